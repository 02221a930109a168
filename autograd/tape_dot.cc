#include <utility>

#include "sheaf/autograd/tape_dump.h"

namespace sheaf {
namespace {

std::string escaped(std::string_view s) {
  std::string out;
  for (char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

// By the first axis whose size is not 1: the relevant one in a picture of a sharded step.
const char* colour(const Tape& tape, const Node& n) {
  if (n.num_outputs == 0) return "lightgrey";
  const Layout& l = tape.type(tape.output(n)).layout;
  for (int a = 0; a < l.num_axes(); ++a) {
    switch (l[a].kind()) {
      case Placement::Kind::replicate: if (l.num_axes() == a + 1) return "palegreen"; break;
      case Placement::Kind::partial: return "lightsalmon";
      case Placement::Kind::shard: return "lightblue";
      case Placement::Kind::invariant: return "khaki";
    }
  }
  return "white";
}

}  // namespace

std::string to_dot(const Tape& tape) {
  std::string out =
      "digraph tape {\n  node [shape=box, style=filled, fontname=\"sans-serif\"];\n"
      "  // Replicate palegreen, Partial lightsalmon, Shard lightblue, Invariant khaki, no mesh white, no output lightgrey\n";
  out += "  // borders: forward black, backward firebrick, update navy; dashed edges: stores into memory, to who reads it next\n";
  std::vector<NodeId> maker(static_cast<size_t>(tape.num_values()), -1);
  std::vector<std::vector<NodeId>> stored(static_cast<size_t>(tape.num_values()));  // not read by anything yet
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    const std::string what = n.op ? tape.op_name(n) : "leaf " + tape.leaf_name(tape.output(n));
    out += str("  n", id, " [label=\"", escaped(what), tape.path(n).empty() ? "" : "\\n", escaped(tape.path(n)));
    if (n.num_outputs) out += str("\\n%", tape.output(n), " ", escaped(tape.type(tape.output(n)).to_string()));
    out += str("\", fillcolor=", colour(tape, n), n.phase == Phase::forward ? "" : ", color=",
               n.phase == Phase::forward ? "" : n.phase == Phase::backward ? "firebrick" : "navy", "];\n");
    const std::vector<Transfer> travels = transfers(tape, n);
    for (ValueId v : tape.inputs(n)) {
      int64_t bytes = 0;
      for (const Transfer& t : travels) bytes += t.from == v ? t.bytes : 0;
      const NodeId from = maker[static_cast<size_t>(v)];
      for (const NodeId store : std::exchange(stored[static_cast<size_t>(tape.whole_of(v))], {}))
        if (store != from && store != id) out += str("  n", store, " -> n", id, " [style=dashed];\n");
      if (from < 0) continue;
      out += str("  n", from, " -> n", id, " [label=\"%", v, bytes ? "\\n" + format_bytes(bytes) : std::string(), "\"",
                 bytes ? ", penwidth=3" : "", "];\n");
    }
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape.output(n, o);
      maker[static_cast<size_t>(v)] = id;
      const auto memory = static_cast<size_t>(tape.whole_of(v));
      const NodeId made = tape.value(static_cast<ValueId>(memory)).producer;
      if (tape.value(v).base < 0 || made == id || made < 0) continue;  // a pass may have erased who made it
      if (!tape.node(made).op) out += str("  n", id, " -> n", made, " [style=dashed, constraint=false, label=\"updates\"];\n");
      else if (stored[memory].empty() || stored[memory].back() != id) stored[memory].push_back(id);
    }
  }
  return out + "}\n";
}

}  // namespace sheaf
