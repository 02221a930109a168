// The values that derivatives read: kept, gathered, recomputed or copied back from the host.
#include <algorithm>
#include <utility>

#include "sheaf/autograd/replay_node.h"
#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

Tensor ReversePass::resolve(ValueId v) {
  const ValueState& s = recording_.state(v);
  if (s.group) {
    group_state(s.group);  // fails if it is closed
    if (s.group->version() != s.version)
      fail<LifetimeError>("[backward] the parameters of unit '", path_label(s.group->group_name()), "' were changed in place (by a ",
                          "step or an assignment) between forward and backward");
    return s.group->value(s.leaf_index);
  }
  if (s.recipe) {
    const Node n = tape_.node(tape_.value(v).producer);
    std::vector<Tensor> inputs;
    for (int i = 0; i < n.num_inputs; ++i) inputs.push_back(resolve(tape_.inputs(n)[i]));
    return replay_node(tape_, n, inputs)[v - static_cast<ValueId>(n.outputs)];
  }
  const NodeId producer = tape_.value(v).producer;
  if (s.on_host)
    for (Region& region : recording_.regions_)
      if (std::ranges::find(region.on_host, v) != region.on_host.end()) onload(region);
  if (const ValueState& now = recording_.state(v); now.rematerialized && !now.saved && now.saves > 0) rematerialize(v);
  if (!recording_.state(v).saved && tape_.node(producer).op)
    for (Region& region : recording_.regions_)
      if (region.contains(producer)) {
        recompute(region);
        break;
      }
  if (const ValueState& now = recording_.state(v); now.saved) {  // the states may have been reallocated
    if (now.saved.storage()->version() != now.version)
      fail<LifetimeError>("[backward] value %", v, " ", tape_.type(v), " was changed in place between forward and backward, which ",
                          "reads it: change a copy");
    return now.saved;
  }
  fail<LifetimeError>("[backward] value %", v, " ", tape_.type(v), " was freed: this part of the recording was ",
                      "differentiated before (ask for it with {.keep = true}), or its derivative reads what it does not save");
}

// Its op has not been differentiated yet, so its inputs are still available.
void ReversePass::rematerialize(ValueId v) {
  const Node n = tape_.node(tape_.value(v).producer);
  const PathScope path(tape_.path(n));
  const AttrsCopy attrs(tape_, n);
  Vjp saved(*this, tape_.value(v).producer, 0);
  struct Before {  // restored even if it throws
    bool& now;
    const bool then;
    ~Before() { now = then; }
  };
  const Tensor again = [&] {
    const Before before{recording_.rematerializing_, std::exchange(recording_.rematerializing_, true)};
    return n.op->rematerialize(attrs.data(), saved);
  }();
  const ValueId id = recording_.value_of(again);
  tape_.mutable_node(tape_.value(id).producer).flags |= Node::kRecomputed;
  recording_.state(id).original = v;
  recording_.state(v).save(again);
}

}  // namespace sheaf
