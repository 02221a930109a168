// The gradients of a unit: the slots that kernels write them into, their reduction, and what a backward leaves at rest.
#include <algorithm>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/distributed/unit_ops.h"

namespace sheaf {

// Slots of another recording, around this one, hold what it has put there ahead: it keeps that memory, and finds other slots.
bool Unit::accepts_early_gradient(int index, const Type& gradient) const {
  return (slot_buffers_.empty() || slots_of_ != Recording::current_serial()) && slot_type(index) == gradient;
}

Tensor Unit::slot(int index) {
  if (const uint64_t recording = Recording::current_serial(); recording != slots_of_) {
    drop_slots();
    slots_of_ = recording;
  }
  if (!slots_[index]) {
    const PathScope path(name_);
    std::vector<OutputSpec> specs;
    std::vector<int> buffer_of, leaf_of;
    for (size_t b = 0; b < buffers_.size(); ++b) {
      if (!buffers_[b].trainable) continue;
      buffer_of.push_back(static_cast<int>(b));
      specs.push_back({.type = slots_type(buffers_[b])});
    }
    for (int i = 0; i < num_leaves(); ++i) {
      if (!leaves_[i].trainable) continue;
      const auto [b, position] = where_[i];
      const int within = static_cast<int>(std::find(buffer_of.begin(), buffer_of.end(), b) - buffer_of.begin());
      leaf_of.push_back(i);
      specs.push_back({slot_type(i), {}, within,
                       buffers_[b].layout.offsets[position] * static_cast<int64_t>(size_of(buffers_[b].dtype))});
    }
    const DeviceScope device(buffers_[0].shard.device());
    const UnitOps::Attrs attrs{axis_, static_cast<int32_t>(buffer_of.size())};
    const OpDef& op = gathers() ? UnitOps::grad_slots() : UnitOps::lasting_grad_slots();
    Tensors outputs = apply_typed(op, &attrs, {}, specs);
    slot_buffers_.assign(outputs.begin(), outputs.begin() + buffer_of.size());
    for (size_t k = 0; k < leaf_of.size(); ++k) slots_[leaf_of[k]] = outputs[buffer_of.size() + k];
  }
  return slots_[index];
}

void Unit::zero_missing(const std::vector<bool>& contributed) {
  for (int i = 0; i < num_leaves(); ++i) {
    if (contributed[i] || !leaves_[i].trainable) continue;
    const Tensor to = slot(i);
    const OutputSpec spec{.type = to.type(), .into = to};
    apply_typed(UnitOps::zero(), nullptr, {}, std::span(&spec, 1));
  }
}

Tensor Unit::memory_like_slot(int index) {
  const PathScope path(name_);
  const OutputSpec spec{.type = slot_type(index)};
  const DeviceScope device(buffers_[0].shard.device());
  return apply_typed(UnitOps::slot_memory(), nullptr, {}, std::span(&spec, 1))[0];
}

void Unit::pass() {
  ++pending_finishes_;
  pass_constant();
}

void Unit::pass_constant() {
  const PathScope path(name_);
  mirror_next_ = false;
  if (state_ == State::in_flight) {
    // Gathered ahead for a backward after this one, which opened it only for its scope.
  } else if (caches_gathered()) {
    std::fill(values_.begin(), values_.end(), Tensor());
    state_ = State::closed;  // but kept, for the next micro-batch
  } else if (gathers()) {
    discard_gathered();
  }
  if (gathers() && state_ != State::in_flight && Recording::current()->is_last_micro_batch_of(this)) drop_copies();
}

bool Unit::is_summed_over_stages() const {
  for (int a = 0; mesh_ && stage_axis_ < 0 && a < mesh_->num_axes(); ++a)
    if (mesh_->is_chain(a) && !alone(a)) return true;
  return false;
}

void Unit::finish(const std::vector<bool>& contributed) {
  const PathScope path(name_);
  if (pending_finishes_ == 0)
    fail<LifetimeError>("[unit] '", path_label(name_), "': the gradients of its weights were put off in a backward with defer_weights ",
                        "that zero_grad() has given up since");
  --pending_finishes_;
  zero_missing(contributed);
  // Units that all stages share are summed where the step asks for it (reduce_waiting): here each stage would wait for the last
  // one although it has work to do, and they get here in different turns.
  const bool last = !is_summed_over_stages() && Recording::current()->is_last_micro_batch_of(this);
  if (slot_buffers_.empty()) return;  // all frozen
  std::vector<Tensor> slots = std::exchange(slot_buffers_, {});
  std::fill(slots_.begin(), slots_.end(), Tensor());
  if (caches_gathered()) {
    add_to_waiting(std::move(slots));
    if (!last) return;
    slots = std::exchange(unreduced_, {});
  }
  schedule_->advance_reductions();    // at most one unit's slots are in flight
  reduction_.inputs = std::move(slots);
  reduction_.to_the_end = last;
  reduce_along(axis_);
}

void Unit::add_to_waiting(std::vector<Tensor> gradients) {
  if (unreduced_.empty()) {
    unreduced_ = std::move(gradients);
    return;
  }
  leaf_waiting();
  for (size_t k = 0; k < gradients.size(); ++k) add_gradient(unreduced_[k], gradients[k]);
}

// Gradients that another recording left become leaves of this one.
void Unit::leaf_waiting() {
  Recording* r = Recording::current();
  size_t k = 0;
  for (const FlatBuffer& b : buffers_)
    if (r && b.trainable) r->leaf(unreduced_[k++], "waiting gradient of " + b.name);
}

void Unit::reduce_waiting() {
  if (pending_finishes_ > 0)
    fail<LifetimeError>("[unit] '", path_label(name_), "': the gradients of its weights were put off in ", pending_finishes_,
                        pending_finishes_ == 1 ? " backward" : " backwards", " with defer_weights, and recording.backward_weights() was not ",
                        "called as often; zero_grad() gives up all gradients of this step");
  if (unreduced_.empty()) return;
  const PathScope path(name_);
  leaf_waiting();
  reduction_.to_the_end = true;
  reduce_waiting_along(caches_gathered() ? axis_ : axis_after(axis_));
}

void Unit::reduce_waiting_along(int axis) {
  (axis == axis_ ? reduction_.inputs : reduction_.values) = std::exchange(unreduced_, {});
  reduce_along(axis);
}

// [Note: reduction] First along the unit's own axis, from the slots, then what is left (a slice, if the unit is sharded)
// along each other axis of the mesh, in place, or along a secondary axis as a reduce_scatter again. Each is issued where
// the next unit's reduction begins, so that nobody waits for it: by then the previous one has had a unit's backward to
// complete in. With several micro-batches the slices are added up, and only the last one's backward, or the first caller that
// asks, reduces them along the other axes: these cross hosts. If they travel in another dtype (FlatBuffer::reduce) each
// collective is between two casts: ranks add up what they have sent, and a cast's memory is freed with the collective's. With
// int8 blocks other collectives take its place: [Note: addends in blocks].
void Unit::reduce_along(int axis) {
  if (axis == axis_) reduction_.values = reduction_.inputs;
  else if (scatters(axis)) reduction_.inputs = reduction_.values;
  std::vector<Tensor> from;
  std::vector<OutputSpec> specs;
  std::vector<size_t> which;  // of the values; what the tensor axis cuts is no sum along it
  std::vector<Reduced> in_blocks;
  size_t k = 0;
  for (const FlatBuffer& b : buffers_) {
    if (!b.trainable) continue;
    Tensor& t = reduction_.values[k++];
    if (!sums_along(b, axis)) continue;
    if (b.reduce_int8 && !alone(axis)) {
      in_blocks.emplace_back(&b, k - 1);
      continue;
    }
    if (b.reduce != b.dtype && !alone(axis)) {  // what is cast goes before more is
      t = UnitOps::cast_by(UnitOps::cast_gradient(), t, b.reduce);
      if (!reduction_.inputs.empty()) reduction_.inputs[k - 1] = t;
    }
    Type type = t.type();
    if (mesh_) type.layout[axis] = b.shard.layout()[axis];
    from.push_back(t);
    specs.push_back({.type = type, .into = scatters(axis) ? Tensor() : t});
    which.push_back(k - 1);
  }
  if (!in_blocks.empty()) exchange_blocks(axis, in_blocks);
  if (!which.empty()) {
    const UnitOps::Attrs attrs{axis, static_cast<int32_t>(specs.size())};
    const OpDef& op = alone(axis) ? UnitOps::open() : scatters(axis) ? UnitOps::reduce_scatter() : UnitOps::all_reduce();
    const Tensors reduced = apply_typed(op, &attrs, from, specs);
    for (size_t i = 0; i < which.size(); ++i) reduction_.values[which[i]] = reduced[i];
  }
  reduction_.along = axis;
  if (alone(axis)) advance_reduction();
}

void Unit::advance_reduction() {
  complete_offload();
  if (reduction_.values.empty()) return;
  const int along = reduction_.along;
  const PathScope path(name_);
  if (!alone(along)) {
    UnitOps::complete_results(along, reduction_.values, reduction_.inputs);
  }
  for (Tensor& t : reduction_.values) t.storage()->settle();
  reduction_.inputs.clear();
  if (add_blocks()) return;
  cast_reduced();
  const int next = axis_after(along);
  if (next < 0) return keep_gradient();
  if (along == axis_ && sums_further()) {
    add_to_waiting(std::exchange(reduction_.values, {}));
    if (reduction_.to_the_end) reduce_waiting_along(next);
  } else {
    reduce_along(next);
  }
}

void Unit::cast_reduced() {
  size_t k = 0;
  for (const FlatBuffer& b : buffers_) {
    if (!b.trainable) continue;
    Tensor& t = reduction_.values[k++];
    if (t.dtype() != b.dtype) t = UnitOps::cast_by(UnitOps::cast_reduced(), t, b.dtype);
  }
}

bool Unit::holds_gradients() const {
  return pending_finishes_ > 0 || !unreduced_.empty() || std::ranges::any_of(buffers_, [](const FlatBuffer& b) { return b.grad.defined(); });
}

void Unit::complete_reduction() {
  while (!reduction_.values.empty()) advance_reduction();
  complete_offload();
}

void Unit::keep_gradient() {
  const std::vector<Tensor> reduced = std::exchange(reduction_.values, {});
  if (offloads_) offload_in_flight_.from = reduced;
  size_t k = 0;
  for (FlatBuffer& b : buffers_) {
    if (!b.trainable) continue;
    b.grad_scale = b.found_inf = Tensor();  // they belonged to the gradient before
    // What another recording left here is a leaf of this one, as it is before it changes.
    if (Recording* r = Recording::current(); r && b.grad) r->leaf(b.grad, "gradient of " + b.name);
    const Tensor& gradient = reduced[k++];
    if (offloads_) offload_gradient(b, gradient);
    else if (b.grad) add_gradient(b.grad, gradient);  // a micro-batch's gradient is finished, then added
    else b.grad = gradient;
  }
}

// Nobody waits: what leaves is held until the next unit's gradient leaves, or the backward ends.
void Unit::offload_gradient(FlatBuffer& b, const Tensor& gradient) {
  const Tensor inputs[] = {gradient, b.grad};
  const OutputSpec spec{.type = gradient.type(), .into = b.grad};
  const Tensors there = apply_typed(UnitOps::offload_gradient(), nullptr, std::span(inputs, b.grad ? 2 : 1), std::span(&spec, 1));
  if (b.grad) b.grad.storage()->changed();
  else b.grad = there[0];
  offload_in_flight_.gradients.push_back(b.grad);
}

void Unit::complete_offload() {
  if (offload_in_flight_.from.empty()) return;
  const PathScope path(name_);
  const Offload left = std::exchange(offload_in_flight_, {});
  UnitOps::complete_results(axis_, left.gradients, left.from);
}

}  // namespace sheaf
