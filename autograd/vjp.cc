// A vjp's view of the reverse pass.
#include <utility>

#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

Recording& Vjp::recording() const { return pass_.recording_; }
const Tape& Vjp::tape() const { return pass_.tape_; }
int32_t Vjp::value_of_input(int i) const {
  expect_index("input", i, num_inputs());
  return tape().inputs(tape().node(node_))[i];
}
int32_t Vjp::value_of_output(int o) const {
  expect_index("output", o, tape().node(node_).num_outputs);
  return tape().output(tape().node(node_), o);
}

int Vjp::num_inputs() const { return tape().node(node_).num_inputs; }
const Type& Vjp::input_type(int i) const { return tape().type(value_of_input(i)); }
const Type& Vjp::output_type(int i) const { return tape().type(value_of_output(i)); }
bool Vjp::needs(int i) const { return needs_ & Recording::bit(i); }
bool Vjp::has_grad(int o) const {
  expect_now("has_grad()");
  return pass_.gradients_[value_of_output(o)].defined();
}
const Tensor& Vjp::grad(int o) const {
  expect_now("grad()");
  return pass_.gradients_[value_of_output(o)];
}
Tensor Vjp::input(int i) const {
  expect_now("input()");
  return pass_.resolve(value_of_input(i));
}
Tensor Vjp::output(int i) const {
  expect_now("output()");
  return pass_.resolve(value_of_output(i));
}
bool Vjp::has_place(int i) const {
  const auto& s = recording().state(value_of_input(i));
  if (!s.group || !pass_.to_slots() || !needs(i)) return false;
  // A leaf that is several operands of the node gets a contribution from each: only one can be stored, the others are added.
  for (int other = 0; other < num_inputs(); ++other) {
    const auto& o = recording().state(value_of_input(other));
    if (other != i && o.group == s.group && o.leaf_index == s.leaf_index) return false;
  }
  return true;
}
Into Vjp::into(int i, bool may_add) const {
  if (!has_place(i)) return {};
  const auto& s = recording().state(value_of_input(i));
  auto& group = pass_.group_state(s.group);
  pass_.expect_reducible(node_, value_of_input(i), output_type(0).layout);
  const bool first = !group.contributed[s.leaf_index];
  if (!first && !may_add) return {};
  if (group.defers_weights) return {s.group->memory_like_slot(s.leaf_index), false};
  return {pass_.slot_of(group, s.leaf_index, node_), !first};
}
Tensor Vjp::take_sum(int i) {
  const ValueId v = value_of_input(i);
  if (!needs(i) || pass_.keeps() || (recording().state(v).group && pass_.to_slots())) return {};
  return std::exchange(pass_.sum_of(v), Tensor());
}
void Vjp::set(int i, Tensor gradient) {
  expect_index("input", i, num_inputs());
  gradients.emplace_back(i, std::move(gradient));
}
void Vjp::expect_index(const char* of, int i, int count) const {
  if (i >= 0 && i < count) [[likely]] return;
  fail<LifetimeError>("[", tape().node(node_).op->name, "] ", path_label(PathScope::current()), ": the derivative asks for ", of, " ", i,
                      " of ", count);
}
void Vjp::expect_now(const char* what) const {
  if (deferred_)
    fail<LifetimeError>("[", tape().node(node_).op->name, "] ", path_label(PathScope::current()), ": ", what,
                        " in the function given to weight_gradients(), which must capture what it reads");
}

}  // namespace sheaf
