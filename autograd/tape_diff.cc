#include "sheaf/autograd/tape_diff.h"

#include <algorithm>

namespace sheaf {
namespace {

std::string what_differs(const Tape& a, const Node& n, const Tape& b, const Node& m) {
  if (n.op != m.op) return str("one has ", a.op_name(n), ", the other ", b.op_name(m));
  if (a.path(n) != b.path(m)) return str("one is of '", a.path(n), "', the other of '", b.path(m), "'");
  if (n.phase != m.phase || ((n.flags ^ m.flags) & ~Node::kPerRank)) return "phases or flags differ";
  if (!std::ranges::equal(a.inputs(n), b.inputs(m))) return "inputs differ";
  if (n.outputs != m.outputs || n.num_outputs != m.num_outputs) return "the numbers of outputs differ";
  if (!n.op && a.leaf_name(a.output(n)) != b.leaf_name(b.output(m)))
    return str("one is leaf '", a.leaf_name(a.output(n)), "', the other '", b.leaf_name(b.output(m)), "'");
  if (n.op && !n.op->same_attrs(a.attrs(n), b.attrs(m))) return "attributes differ";
  for (int o = 0; o < n.num_outputs; ++o) {
    const ValueId v = a.output(n, o);
    const Value &x = a.value(v), &y = b.value(v);
    if (!(a.type(v) == b.type(v))) return str("%", v, " is ", a.type(v), " in one, ", b.type(v), " in the other");
    if (x.base != y.base || x.view_of != y.view_of || x.byte_offset != y.byte_offset) return str("%", v, " lies elsewhere");
  }
  return {};
}

}  // namespace

std::optional<Finding> first_difference(const Tape& a, const Tape& b) {
  const int both = std::min(a.num_nodes(), b.num_nodes());
  for (NodeId id = 0; id < both; ++id) {
    const Node& n = a.node(id);
    if (const std::string what = what_differs(a, n, b, b.node(id)); !what.empty())
      return Finding{id, str("[", a.op_name(n), "] ", a.path(n), ": ", what)};
  }
  if (a.num_nodes() == b.num_nodes()) return std::nullopt;
  const Tape& longer = a.num_nodes() > both ? a : b;
  const Node& n = longer.node(both);
  return Finding{both, str("[", longer.op_name(n), "] ", longer.path(n), ": only one of them has it")};
}

}  // namespace sheaf
