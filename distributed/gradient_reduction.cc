// From a unit's slots to its gradient: one collective after another, each issued where the next unit's reduction begins.
#include "sheaf/distributed/gradient_reduction.h"

#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/unit_ops.h"

namespace sheaf {

void GradientReduction::add_to_waiting(std::vector<Tensor> gradients) {
  if (unreduced_.empty()) {
    unreduced_ = std::move(gradients);
    return;
  }
  leaf_waiting();
  for (size_t k = 0; k < gradients.size(); ++k) add_gradient(unreduced_[k], gradients[k]);
}

// Makes gradients left by another recording leaves of this one.
void GradientReduction::leaf_waiting() {
  Recording* const r = Recording::current();
  if (!r) return;
  unit_.each_trainable([&](const FlatBuffer& b, size_t k) { r->leaf(unreduced_[k], "waiting gradient of " + b.name); });
}

void GradientReduction::start(std::vector<Tensor> slots, bool to_the_end) {
  complete();  // a unit that is used in several orders of derivatives is reduced once for each, perhaps one right after the other
  is_stored_ = false;
  to_the_end_ = to_the_end;
  recording_ = Recording::current_serial();
  reduce_along(unit_.axis(), std::move(slots));
}

void GradientReduction::start_waiting() {
  leaf_waiting();
  to_the_end_ = true;
  recording_ = Recording::current_serial();
  reduce_along(unit_.caches_gathered() ? unit_.axis() : unit_.axis_after(unit_.axis()), take_waiting());
}

// [Note: reduction] First along the unit's own axis, from the slots, then the result (a slice, if the unit is sharded) along each
// other axis of the mesh, in place, or along a secondary axis as another reduce_scatter. Each is issued where the next unit's
// reduction begins, so that nothing waits for it: by then the previous one has had a unit's backward to complete in. With several
// micro-batches the slices are summed, and only the last one's backward, or the first caller that needs the result, reduces them
// along the other axes: these cross hosts. If they are sent in another dtype (FlatBuffer::reduce), each collective is between two
// casts: ranks add what they have sent, and a cast's memory is freed with the collective's. With int8 blocks other collectives
// replace it: [Note: addends in blocks].
void GradientReduction::reduce_along(int axis, std::vector<Tensor> addends) {
  values_ = std::move(addends);
  if (axis == unit_.axis() || unit_.scatters(axis)) inputs_ = values_;
  std::vector<Tensor> from;
  std::vector<OutputSpec> specs;
  std::vector<size_t> which;  // of the values; those sharded by the tensor axis are no sums along it
  std::vector<Reduced> in_blocks;
  unit_.each_trainable([&](const FlatBuffer& b, size_t k) {
    if (!unit_.sums_along(b, axis)) return;
    if (b.reduce_int8 && !unit_.alone(axis)) {
      in_blocks.emplace_back(&b, k);
      return;
    }
    Tensor& t = values_[k];
    if (b.reduce != b.dtype && !unit_.alone(axis)) {  // each value is freed once it is cast, before the next is cast
      t = UnitOps::cast_by(UnitOps::cast_gradient(), t, b.reduce);
      if (!inputs_.empty()) inputs_[k] = t;
    }
    Type type = t.type();
    if (unit_.mesh()) type.layout[axis] = b.shard.layout()[axis];
    from.push_back(t);
    specs.push_back({.type = type, .into = unit_.scatters(axis) ? Tensor() : t});
    which.push_back(k);
  });
  if (!in_blocks.empty()) exchange_blocks(axis, in_blocks);
  if (!which.empty()) {
    const UnitOps::Attrs attrs{axis, specs.size()};
    const OpDef& op = unit_.alone(axis) ? UnitOps::open() : unit_.scatters(axis) ? UnitOps::reduce_scatter() : UnitOps::all_reduce();
    const Tensors reduced = apply_typed(op, &attrs, from, specs);
    for (size_t i = 0; i < which.size(); ++i) values_[which[i]] = reduced[i];
  }
  along_ = axis;
  if (unit_.alone(axis)) advance();
}

void GradientReduction::advance() {
  complete_offload();
  if (values_.empty()) return;
  const int along = along_;
  const PathScope path(unit_.name());
  if (!unit_.alone(along)) UnitOps::complete_results(along, values_, inputs_);
  for (Tensor& t : values_) t.storage()->settle();
  inputs_.clear();
  if (add_blocks()) return;
  cast_reduced();
  const int next = unit_.axis_after(along);
  if (next < 0) return keep_gradient();
  if (along == unit_.axis() && unit_.sums_further()) {
    add_to_waiting(std::exchange(values_, {}));
    if (to_the_end_) reduce_along(next, take_waiting());
  } else {
    reduce_along(next, std::exchange(values_, {}));
  }
}

void GradientReduction::cast_reduced() {
  unit_.each_trainable([&](const FlatBuffer& b, size_t k) {
    if (Tensor& t = values_[k]; t.dtype() != b.dtype) t = UnitOps::cast_by(UnitOps::cast_reduced(), t, b.dtype);
  });
}

void GradientReduction::complete() {
  while (!values_.empty()) advance();
  complete_offload();
  use_if_stored();
}

void GradientReduction::use_if_stored() {
  if (is_stored_ && use_) std::exchange(use_, nullptr)();
}

void GradientReduction::keep_gradient() {
  const std::vector<Tensor> reduced = std::exchange(values_, {});
  const bool offloads = unit_.offloads() && !(to_the_end_ && use_);  // what is used soon, and freed, stays where it is
  if (offloads) offload_.from = reduced;
  unit_.each_trainable([&](FlatBuffer& b, size_t k) {
    b.grad_scale = b.found_inf = Tensor();  // they belonged to the previous gradient
    // A gradient left by another recording is a leaf of this one, with its value before the change.
    if (Recording* r = Recording::current(); r && b.grad) r->leaf(b.grad, "gradient of " + b.name);
    const Tensor& gradient = reduced[k];
    if (offloads) offload_gradient(b, gradient);
    else if (b.grad) add_gradient(b.grad, gradient);  // a micro-batch's gradient is complete, then added
    else b.grad = gradient;
  });
  is_stored_ = to_the_end_;
}

// Nothing waits: the source is kept until the next unit's gradient is offloaded, or the backward ends.
void GradientReduction::offload_gradient(FlatBuffer& b, const Tensor& gradient) {
  const Tensor inputs[] = {gradient, b.grad};
  const OutputSpec spec{.type = gradient.type(), .into = b.grad};
  const Tensors there = apply_typed(UnitOps::offload_gradient(), nullptr, std::span(inputs, b.grad ? 2 : 1), std::span(&spec, 1));
  if (b.grad) b.grad.storage()->changed();
  else b.grad = there[0];
  offload_.gradients.push_back(b.grad);
}

void GradientReduction::complete_offload() {
  if (offload_.from.empty()) return;
  const PathScope path(unit_.name());
  const Offload left = std::exchange(offload_, {});
  UnitOps::complete_results(unit_.axis(), left.gradients, left.from);
}

void GradientReduction::forget() {
  use_ = nullptr;
  is_stored_ = false;
  unreduced_.clear();
  values_.clear();
  inputs_.clear();
}

void GradientReduction::recording_ended(uint64_t recording) {
  if (recording != recording_) return;
  values_.clear();  // waits for its lane: only then may the slots be freed
  inputs_.clear();
  for (const Tensor& gradient : offload_.gradients) {  // before their sources are freed
    try { gradient.storage()->settle(); } catch (const std::exception&) {}  // the reader gets the error
  }
  offload_ = {};
}

}  // namespace sheaf
