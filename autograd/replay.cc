#include <algorithm>

#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape.h"

namespace sheaf {

std::vector<Tensor> replay(const Tape& tape, const std::function<Tensor(ValueId)>& leaf,
                           std::span<const ValueId> wanted) {
  std::vector<NodeId> last_use(tape.num_values(), -1);
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    for (ValueId v : tape.inputs(n)) last_use[v] = id;
    for (int o = 0; o < n.num_outputs; ++o)  // what it writes into
      if (const ValueId base = tape.value(tape.output(n, o)).base; base >= 0) last_use[base] = id;
  }
  for (ValueId v : wanted) last_use[v] = tape.num_nodes();

  std::vector<Tensor> values(tape.num_values());
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (!n.op) {
      const auto v = static_cast<ValueId>(n.outputs);
      values[v] = leaf(v);
      if (!values[v]) fail<LifetimeError>("[replay] no value for leaf %", v, " (", tape.leaf_name(v), ")");
      if (!(values[v].type() == tape.type(v)))
        fail<PlacementError>("[replay] leaf %", v, " is ", values[v].type(), ", recorded as ", tape.type(v));
      continue;
    }
    const PathScope path(tape.path(n));
    std::vector<Tensor> inputs;
    for (ValueId v : tape.inputs(n)) inputs.push_back(values[v]);
    std::vector<OutputSpec> specs(n.num_outputs);
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape.output(n, o);
      const Value& value = tape.value(v);
      specs[o].type = tape.type(v);
      if (value.base < 0) continue;
      if (value.base >= static_cast<ValueId>(n.outputs) && value.base < v) {
        specs[o].within = value.base - static_cast<ValueId>(n.outputs);
        specs[o].byte_offset = value.byte_offset;
      } else {
        specs[o].into = Tensor::view_into(values[value.base], specs[o].type, value.byte_offset);
      }
    }
    Tensors outputs = execute_node(*n.op, tape.attrs(n), inputs, specs, n.flags & Node::kAdds);
    for (int o = 0; o < n.num_outputs; ++o) values[tape.output(n, o)] = std::move(outputs[o]);
    const auto drop = [&](ValueId v) {
      if (last_use[v] == id) values[v] = Tensor();
    };
    for (ValueId v : tape.inputs(n)) drop(v);
    for (int o = 0; o < n.num_outputs; ++o)
      if (const ValueId base = tape.value(tape.output(n, o)).base; base >= 0) drop(base);
  }
  std::vector<Tensor> out;
  for (ValueId v : wanted) out.push_back(values[v]);
  return out;
}

}  // namespace sheaf
