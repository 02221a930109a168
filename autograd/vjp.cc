// What a vjp sees of a recording.
#include <utility>

#include "sheaf/autograd/recording.h"

namespace sheaf {

int Vjp::num_inputs() const { return recording_.tape_.node(node_).num_inputs; }
const Type& Vjp::input_type(int i) const {
  const Tape& t = recording_.tape_;
  return t.type(t.inputs(t.node(node_))[i]);
}
const Type& Vjp::output_type(int i) const {
  const Tape& t = recording_.tape_;
  return t.type(t.output(t.node(node_), i));
}
bool Vjp::needs(int i) const { return needs_ & Recording::bit(i); }
bool Vjp::has_grad(int o) const {
  expect_now("has_grad()");
  const Tape& t = recording_.tape_;
  return recording_.gradients_[t.output(t.node(node_), o)].defined();
}
const Tensor& Vjp::grad(int o) const {
  expect_now("grad()");
  const Tape& t = recording_.tape_;
  return recording_.gradients_[t.output(t.node(node_), o)];
}
Tensor Vjp::input(int i) const {
  expect_now("input()");
  const Tape& t = recording_.tape_;
  return recording_.resolve(t.inputs(t.node(node_))[i]);
}
Tensor Vjp::output(int i) const {
  expect_now("output()");
  const Tape& t = recording_.tape_;
  return recording_.resolve(t.output(t.node(node_), i));
}
bool Vjp::has_place(int i) const {
  const Tape& t = recording_.tape_;
  const auto& s = recording_.state(t.inputs(t.node(node_))[i]);
  if (!s.group || !recording_.to_groups_ || !needs(i)) return false;
  // A leaf that is several operands of the node gets a contribution from each: they cannot all be stored first.
  for (int other = 0; other < num_inputs(); ++other) {
    const auto& o = recording_.state(t.inputs(t.node(node_))[other]);
    if (other != i && o.group == s.group && o.leaf_index == s.leaf_index) return false;
  }
  return true;
}
Into Vjp::into(int i, bool may_add) const {
  const Tape& t = recording_.tape_;
  if (!has_place(i)) return {};
  const auto& s = recording_.state(t.inputs(t.node(node_))[i]);
  auto& group = recording_.group_state(s.group);
  recording_.expect_reducible(node_, t.inputs(t.node(node_))[i], output_type(0).layout);
  const bool first = !group.contributed[s.leaf_index];
  if (!first && !may_add) return {};
  if (group.later) return {s.group->memory_like_slot(s.leaf_index), false};
  recording_.clear_slots(s.group, node_);
  Tensor& slot = group.slots[s.leaf_index];
  if (!slot) slot = s.group->slot(s.leaf_index);
  return {slot, !first};
}
Tensor Vjp::take_sum(int i) {
  const Tape& t = recording_.tape_;
  const ValueId v = t.inputs(t.node(node_))[i];
  if (!needs(i) || recording_.saving_ || (recording_.state(v).group && recording_.to_groups_)) return {};
  const auto same = recording_.same_value_.find(v);
  Tensor& sum = recording_.gradients_[same == recording_.same_value_.end() ? v : same->second];
  return std::exchange(sum, Tensor());
}
void Vjp::set(int i, Tensor gradient) { gradients.emplace_back(i, std::move(gradient)); }

}  // namespace sheaf
