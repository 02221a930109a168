// [Note: deferred weights] Of a linear layer's two gradients, other ranks wait for that of its input; that of its weight is needed
// only at the end of the step. A backward with defer_weights computes only the first, so a pipeline stage can send it sooner (B and W
// of zero-bubble schedules, Qi et al., https://arxiv.org/abs/2401.10241). backward_weights() computes the rest, for one backward
// after another, so that the order of every sum is unchanged.
//
// The derivatives that ops pass to Vjp::weight_gradients() are deferred, with the tensors that they read. A unit with a deferred
// gradient is reduced later, so its other gradients wait, too, in separate memory. Gathered values are not read any more, and are
// discarded when the backward has passed their uses.
#include <algorithm>
#include <utility>

#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

void ReversePass::mark_deferring_groups() {
  for (const recorded::Segment& s : parts_.segments)
    for (NodeId id = s.begin; id < s.end; ++id) {
      const Node& n = tape_.node(id);
      if (!n.op || !n.op->defers_weights) continue;
      for (const ValueId v : tape_.inputs(n))
        if (const ValueState& leaf = recording_.state(v); leaf.group && leaf.needs_grad)
          for (GroupState& g : recording_.groups_) g.defers_weights = g.defers_weights || g.group.get() == leaf.group;
    }
  recording_.deferred_weights_.emplace_back().last = last_micro_batch_ && !parts_.leaves_some();
  defers_weights_ = true;
}

void ReversePass::finish_deferring(GroupState& group) {
  group.last = is_last_micro_batch_of(group.group.get());
  GroupState& then = recording_.deferred_weights_.back().groups.emplace_back(group);
  then.finished = then.defers_weights = false;
  then.contributed.assign(then.contributed.size(), false);  // to its slots
}

void Recording::backward_weights() {
  expect_can_differentiate("backward_weights");
  if (deferred_weights_.empty()) fail<LifetimeError>("[backward_weights] no backward with defer_weights is without its weights' gradients");
  if (tape_.num_nodes() > segment_begin_) end_segment();
  recorded::DeferredWeights weights = std::move(deferred_weights_.front());
  deferred_weights_.pop_front();
  ReversePass(*this, ReversePass::Leaves::slots, /*keep=*/false).run(weights);
}

void ReversePass::run(recorded::DeferredWeights& weights) {
  struct Restored {  // even if a derivative throws
    std::vector<GroupState>& groups;
    std::vector<GroupState> before;
    ~Restored() { groups = std::move(before); }
  } const restored{recording_.groups_, std::exchange(recording_.groups_, std::move(weights.groups))};
  const Running running(*this);
  in_backward_weights_ = true;
  for (recorded::DeferredGradient& part : weights.parts) {
    const PathScope path(tape_.path(tape_.node(part.node)));
    finish_groups(part.node);
    compute_deferred(part);
  }
  finish_groups(-1);
  for (size_t i = 0; i < recording_.groups_.size(); ++i) recording_.groups_[i].group->backward_ended();
  if (weights.last) recording_.complete_sends();
  recording_.segment_begin_ = tape_.num_nodes();
}

// Only if all inputs from `first` on that need gradients are leaves of units whose reduction is deferred (a view of a parameter is
// not), and no earlier input is a parameter, whose gathered memory will be freed.
bool Vjp::defers_weights_of(int first) const {
  if (!pass_.defers_weights_) return false;
  bool any = false;
  for (int i = 0; i < num_inputs(); ++i) {
    const auto& s = recording().state(value_of_input(i));
    if (i < first ? s.recipe : needs(i) && !(s.group && pass_.group_state(s.group).defers_weights)) return false;
    any = any || (i >= first && needs(i));
  }
  return any;
}

void Vjp::defer_to_backward_weights(int first, std::function<void(Vjp&)> f) {
  const uint64_t needs = needs_ & ~(Recording::bit(first) - 1);
  for (int i = first; i < num_inputs(); ++i)
    if (const auto& s = recording().state(value_of_input(i)); this->needs(i))
      pass_.group_state(s.group).contributed[static_cast<size_t>(s.leaf_index)] = true;
  recorded::DeferredGradient deferred{.node = node_, .needs = needs, .derivative = std::move(f)};
  const auto reads = [&](ValueId v) {
    if (const auto& s = recording().state(v); s.saved) deferred.reads.emplace_back(s.saved.storage(), s.saved.storage()->version());
  };
  for (int i = 0; i < num_inputs(); ++i) reads(value_of_input(i));
  for (int o = 0; o < tape().node(node_).num_outputs; ++o) reads(value_of_output(o));
  recording().deferred_weights_.back().parts.push_back(std::move(deferred));
}

}  // namespace sheaf
