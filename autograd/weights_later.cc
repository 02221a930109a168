// [Note: weights later] Of a linear layer's two gradients others wait for that of its input; that of its weight is wanted at
// the step's end. A backward with weights_later computes the first ones only, and a stage of a pipeline sends them on the sooner
// (B and W of zero-bubble schedules, Qi et al., https://arxiv.org/abs/2401.10241). What is left, backward_weights() does, of one
// backward after another, so that no sum is made in another order.
//
// Put off are derivatives that ops give to Vjp::weights(), with the tensors that these read. Units in which that leaves a gradient
// out reduce theirs then, so their other gradients wait, too, in memory of their own. The gathered values are not read any more,
// and go where the backward has passed them.
#include <algorithm>
#include <utility>

#include "sheaf/autograd/recording.h"

namespace sheaf {

void Recording::choose_later() {
  for (const Segment& s : ranges_)
    for (NodeId id = s.begin; id < s.end; ++id) {
      const Node& n = tape_.node(id);
      if (!n.op || !n.op->weights_later) continue;
      for (const ValueId v : tape_.inputs(n))
        if (const ValueState& leaf = state(v); leaf.group && leaf.needs_grad)
          for (GroupState& g : groups_) g.later = g.later || g.group.get() == leaf.group;
    }
  later_.emplace_back().last = last_micro_batch_ && !(rest_ && !rest_->parts.empty());
}

void Recording::finish_later(GroupState& group) {
  group.last = is_last_micro_batch_of(group.group.get());
  GroupState& then = later_.back().groups.emplace_back(group);
  then.finished = then.later = false;
  then.contributed.assign(then.contributed.size(), false);  // to its slots
}

void Recording::backward_weights() {
  expect_current("backward_weights");
  if (in_region_) fail<LifetimeError>("[backward_weights] inside of a RecomputeScope: it must end first");
  if (later_.empty()) fail<LifetimeError>("[backward_weights] no backward with weights_later is without its weights' gradients");
  if (tape_.num_nodes() > floor_) end_segment();
  Later later = std::move(later_.front());
  later_.pop_front();
  // Restored if a derivative throws, too.
  struct Before {
    Recording& r;
    std::vector<GroupState> groups;
    const Phase phase;
    const bool saving, selective;
    ~Before() {
      r.groups_ = std::move(groups), r.phase_ = phase, r.saving_ = saving, r.selective_ = selective;
      r.in_weights_ = false;
    }
  } const before{*this, std::exchange(groups_, std::move(later.groups)), std::exchange(phase_, Phase::backward),
                 std::exchange(saving_, false), std::exchange(selective_, false)};
  in_weights_ = to_groups_ = true;
  for (Later::Part& part : later.parts) {
    const PathScope path(tape_.path(tape_.node(part.node)));
    finish_groups(part.node);
    if (part.derivative) {
      Vjp vjp(*this, part.node, part.needs, /*late=*/true);
      std::exchange(part.derivative, nullptr)(vjp);
      accumulate(part.node, part.needs, vjp);
    } else {
      accumulate(part.node, part.leaf, std::exchange(part.gradient, {}));
    }
  }
  finish_groups(-1);
  for (size_t i = 0; i < groups_.size(); ++i) groups_[i].group->backward_ended();
  if (later.last) take_back_all();
  floor_ = tape_.num_nodes();
}

// All of them that are wanted are of units whose gradients wait: what is a view of a parameter is not. Nor may the others be
// parameters, whose memory goes.
bool Vjp::weights_wait(int first) const {
  if (!recording_.weights_later_ || !recording_.to_groups_) return false;
  const auto inputs = recording_.tape_.inputs(recording_.tape_.node(node_));
  bool any = false;
  for (int i = 0; i < num_inputs(); ++i) {
    const auto& s = recording_.state(inputs[i]);
    if (i < first ? s.recipe : needs(i) && !(s.group && recording_.group_state(s.group).later)) return false;
    any = any || (i >= first && needs(i));
  }
  return any;
}

void Vjp::put_off(int first, std::function<void(Vjp&)> f) {
  const uint64_t needs = needs_ & ~(Recording::bit(first) - 1);
  const auto inputs = recording_.tape_.inputs(recording_.tape_.node(node_));
  for (int i = first; i < num_inputs(); ++i)
    if (const auto& s = recording_.state(inputs[i]); this->needs(i))
      recording_.group_state(s.group).contributed[static_cast<size_t>(s.leaf_index)] = true;
  recording_.later_.back().parts.push_back({.node = node_, .needs = needs, .derivative = std::move(f)});
}

void Vjp::expect_now(const char* what) const {
  if (late_)
    fail<LifetimeError>("[", recording_.tape_.node(node_).op->name, "] ", path_label(PathScope::current()), ": ", what,
                        " in what its derivative gave to weights(), which holds what it reads");
}

}  // namespace sheaf
