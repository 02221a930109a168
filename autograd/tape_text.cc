#include <algorithm>
#include <map>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/tape_dump.h"

namespace sheaf {
namespace {

// A column is as wide as its longest cell, but cells longer than this do not widen it.
constexpr size_t kWidest[] = {64, 48, 112};

std::string ids(std::span<const ValueId> values) {
  std::string out;
  for (ValueId v : values) out += str(out.empty() ? "%" : ", %", v);
  return out;
}

// "%8", or "%8..%13" for several.
std::string outputs(const Tape& tape, const Node& n) {
  if (n.num_outputs == 0) return "";
  const ValueId first = tape.output(n), last = tape.output(n, n.num_outputs - 1);
  return n.num_outputs == 1 ? str('%', first) : str('%', first, "..%", last);
}

std::string placements(const Tape& tape, const Node& n) {
  const Layout& from = tape.type(tape.inputs(n)[0]).layout;
  const Layout& to = tape.type(tape.output(n)).layout;
  std::string out;
  for (int a = 0; a < to.num_axes(); ++a) {
    const Placement p = from.mesh() ? from[a] : Placement::replicate();
    if (!(p == to[a])) out += str(out.empty() ? "" : " ", p, "→", to[a], '@', to.mesh()->name(a));
  }
  return out;
}

std::string marks(const Tape& tape, const Node& n) {
  std::string out;
  const auto mark = [&](const std::string& text) { out += (out.empty() ? "" : ", ") + text; };
  if (n.op && n.op->marked) {
    std::string text;
    n.op->describe(tape.attrs(n), text);
    if (!text.empty()) mark(text);
  }
  if (n.flags & Node::kMirror) mark("mirror of its discard");
  if (n.flags & Node::kPrefetched) mark("prefetched");
  if (n.flags & Node::kRecomputed) mark("computed again");
  for (int o = 0; o < n.num_outputs; ++o) {
    const ValueId v = tape.output(n, o), base = tape.value(v).base;
    if (base < 0 || tape.value(base).producer == tape.value(v).producer) continue;
    const auto in = tape.inputs(n);
    const bool adds = (n.flags & Node::kAdds) || std::find(in.begin(), in.end(), base) != in.end();
    const bool slot = n.phase != Phase::update && tape.value(base).base >= 0;  // one of a unit's slots
    if (tape.kind(n) == OpKind::redistribute) {
      mark(str("in the memory of %", base));
      continue;
    }
    mark(str(slot ? (adds ? "added to slot %" : "stored into slot %") : (adds ? "updates %" : "stored into %"), base));
  }
  if (const ValueId v = n.num_outputs ? tape.value(tape.output(n)).view_of : -1; v >= 0) mark(str("view of %", v));
  return out;
}

size_t width(std::string_view s) {  // UTF-8: continuation bytes take no column
  return static_cast<size_t>(std::count_if(s.begin(), s.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

struct Row {
  std::string section = {}, program = {}, path = {}, type = {}, bytes = {}, rest = {};
  const std::string& cell(size_t c) const { return c == 0 ? program : c == 1 ? path : type; }
};

// The columns of a phase, even if it is interrupted on the tape.
struct Columns {
  size_t widths[std::size(kWidest)] = {}, bytes = 0;

  void fit(const Row& r) {
    for (size_t c = 0; c < std::size(kWidest); ++c)
      if (const size_t w = width(r.cell(c)); w <= kWidest[c]) widths[c] = std::max(widths[c], w);
    bytes = std::max(bytes, r.bytes.size());
  }
  // The text after an overlong cell begins two spaces after it, and later cells return to their columns if they can.
  std::string line(const Row& r) const {
    std::string out = "  ";
    size_t begin = width(out);
    for (size_t c = 0; c < std::size(kWidest); ++c) {
      out += r.cell(c);
      begin += widths[c] + 2;
      const size_t end = width(out) + 2;
      out.append(std::max(begin, end) - end + 2, ' ');
    }
    if (!r.bytes.empty()) out += std::string(bytes - r.bytes.size(), ' ') + r.bytes + "  ";
    out += r.rest;
    out.erase(out.find_last_not_of(' ') + 1);
    return out + "\n";
  }
};

}  // namespace

std::string to_text(const Tape& tape) {
  std::vector<Row> rows, leaves;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    Row row{.section = std::string(n.op ? name(n.phase) : "leaf"), .path = std::string(path_label(tape.path(n))), .rest = marks(tape, n)};
    const std::string out = outputs(tape, n);
    if (!n.op) {
      const ValueId v = tape.output(n);
      row.program = str('%', v, " = leaf ", tape.leaf_name(v));
      row.type = str(tape.type(v));
      leaves.push_back(std::move(row));
      continue;
    }
    row.program = (out.empty() ? "" : out + " = ") + tape.op_name(n);
    if (n.num_inputs) row.program += " " + ids(tape.inputs(n));
    if (n.num_outputs) {
      const Type& t = tape.type(tape.output(n));
      const std::string moves = tape.kind(n) == OpKind::redistribute && n.num_inputs ? placements(tape, n) : "";
      row.type = moves.empty() ? str(t) : str(moves, ' ', t.dtype, t.shape);
    }
    if (!transfers(tape, n).empty()) row.bytes = format_bytes(tape.wire_bytes(n));
    if (const std::string_view lane = lane_name(tape, n); lane != name(Lane::compute)) row.rest = str(lane, " lane  ", row.rest);
    rows.push_back(std::move(row));
  }
  rows.insert(rows.begin(), std::make_move_iterator(leaves.begin()), std::make_move_iterator(leaves.end()));
  std::map<std::string, Columns> columns;
  for (const Row& r : rows) columns[r.section].fit(r);
  std::string out, section;
  for (const Row& r : rows) {
    if (r.section != section) out += (section = r.section) + "\n";
    out += columns[section].line(r);
  }
  return out;
}

}  // namespace sheaf
