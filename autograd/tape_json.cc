#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/json.h"

namespace sheaf {
namespace {

std::string_view kind_name(OpKind kind) {
  constexpr std::string_view kNames[] = {"leaf", "op", "redistribute", "discard", "step"};
  return kNames[static_cast<int>(kind)];
}

template <class List, class F>
std::string array(const List& list, F&& f) {
  std::string out = "[";
  bool first = true;
  for (const auto& e : list) {
    out += first ? "" : ",";
    out += f(e);
    first = false;
  }
  return out + "]";
}

std::string number(int64_t n) { return std::to_string(n); }

std::string value_json(const Tape& tape, ValueId v) {
  const Type& t = tape.type(v);
  const Value& value = tape.value(v);
  std::string out = str("{\"id\":", v, ",\"producer\":", value.producer, ",\"dtype\":", json_string(name(t.dtype)),
                        ",\"shape\":", array(t.shape, number));
  std::string placements;
  for (int a = 0; a < t.layout.num_axes(); ++a)
    placements += str(a ? "," : "", "{\"axis\":", json_string(t.layout.mesh()->name(a)), ",\"size\":", t.layout.mesh()->size(a),
                      ",\"placement\":", json_string(t.layout[a].to_string()), "}");
  out += ",\"layout\":[" + placements + "]";
  if (value.base >= 0) out += str(",\"base\":", value.base, ",\"byte_offset\":", value.byte_offset);
  if (value.view_of >= 0) out += str(",\"view_of\":", value.view_of);
  return out + "}";
}

std::string node_json(const Tape& tape, NodeId id) {
  const Node& n = tape.node(id);
  std::string out = str("{\"id\":", id, ",\"kind\":", json_string(kind_name(tape.kind(n))), ",\"op\":", json_string(tape.op_name(n)),
                        ",\"path\":", json_string(tape.path(n)), ",\"phase\":", json_string(name(n.phase)));
  if (!n.op) out += ",\"name\":" + json_string(tape.leaf_name(tape.output(n)));
  out += ",\"lane\":" + json_string(lane_name(tape, n));
  std::string flags;
  const auto flag = [&](int bit, const char* what) {
    if (n.flags & bit) flags += (flags.empty() ? "" : ",") + json_string(what);
  };
  flag(Node::kAdds, "adds");
  flag(Node::kMirror, "mirror");
  flag(Node::kPrefetched, "prefetched");
  flag(Node::kRecomputed, "recomputed");
  out += ",\"flags\":[" + flags + "]";
  std::string attributes;
  if (n.op && n.op->describe) n.op->describe(tape.attrs(n), attributes);
  out += ",\"attributes\":" + json_string(attributes);
  out += ",\"inputs\":" + array(tape.inputs(n), number) + ",\"outputs\":[";
  for (int o = 0; o < n.num_outputs; ++o) out += (o ? "," : "") + number(tape.output(n, o));
  return out + str("],\"bytes\":", tape.wire_bytes(n), "}");
}

}  // namespace

std::string to_json(const Tape& tape) {
  std::string out = "{\"nodes\":[";
  for (NodeId id = 0; id < tape.num_nodes(); ++id) out += (id ? ",\n" : "\n") + node_json(tape, id);
  out += "],\n\"values\":[";
  for (ValueId v = 0, said = 0; v < tape.num_values(); ++v)  // values that a pass removed have no producer
    if (tape.value(v).producer >= 0) out += (said++ ? ",\n" : "\n") + value_json(tape, v);
  std::vector<std::pair<ValueId, ValueId>> cotangents = tape.cotangents();
  std::erase_if(cotangents, [&](const auto& c) { return tape.value(c.first).producer < 0 || tape.value(c.second).producer < 0; });
  out += "],\n\"cotangents\":" + array(cotangents, [](const auto& c) { return str('[', c.first, ',', c.second, ']'); });
  return out + "}\n";
}

}  // namespace sheaf
