// The gradients of a unit: the slots that kernels write them into, their reduction, and what a backward leaves at rest.
#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/distributed/unit_ops.h"

namespace sheaf {

Tensor Unit::slot(int index) {
  if (!slots_[index]) {
    const PathScope path(name_);
    std::vector<OutputSpec> specs;
    std::vector<int> buffer_of, leaf_of;
    for (size_t b = 0; b < buffers_.size(); ++b) {
      if (!buffers_[b].trainable) continue;
      buffer_of.push_back(static_cast<int>(b));
      specs.push_back({slots_type(buffers_[b]), {}, -1, 0});
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
    const OutputSpec spec{to.type(), to, -1, 0};
    apply_typed(UnitOps::zero(), nullptr, {}, std::span(&spec, 1));
  }
}

void Unit::finish(const std::vector<bool>& contributed) {
  const PathScope path(name_);
  zero_missing(contributed);
  mirror_next_ = false;
  if (gathers()) {
    schedule_->forget_in_flight(*this);
    discard_gathered();
  }
  if (slot_buffers_.empty()) return;  // all frozen
  schedule_->complete_reductions();   // at most one reduction's input is in flight
  std::vector<OutputSpec> specs;
  size_t k = 0;
  for (const FlatBuffer& b : buffers_) {
    if (!b.trainable) continue;
    const Tensor& slots = slot_buffers_[k++];
    if (gathers()) specs.push_back({b.shard.type(), {}, -1, 0});
    else specs.push_back({b.shard.type(), slots, -1, 0});  // reduced in place
  }
  reduction_.slots = std::move(slot_buffers_);
  slot_buffers_.clear();
  std::fill(slots_.begin(), slots_.end(), Tensor());
  const UnitOps::Attrs attrs{axis_, static_cast<int32_t>(specs.size())};
  const OpDef& op = gathers() ? UnitOps::reduce_scatter() : communicates() ? UnitOps::all_reduce() : UnitOps::open();
  reduction_.reduced = apply_typed(op, &attrs, reduction_.slots, specs);
  if (!communicates()) complete_reduction();
}

void Unit::complete_reduction() {
  if (reduction_.reduced.empty()) return;
  const PathScope path(name_);
  if (communicates()) {
    std::vector<Tensor> lent(reduction_.reduced.begin(), reduction_.reduced.end());
    lent.insert(lent.end(), reduction_.slots.begin(), reduction_.slots.end());
    const UnitOps::Attrs attrs{axis_, static_cast<int32_t>(reduction_.reduced.size())};
    apply_typed(UnitOps::complete(), &attrs, lent, {});
  }
  for (Tensor& t : reduction_.reduced) t.storage()->settle();
  reduction_.slots.clear();
  size_t k = 0;
  for (FlatBuffer& b : buffers_) {
    if (!b.trainable) continue;
    const Tensor& reduced = reduction_.reduced[k++];
    b.grad_scale = Tensor();  // it belonged to the gradient before
    if (!b.grad) {
      b.grad = reduced;
      continue;
    }
    // What another recording left here is a leaf of this one, as it is before it changes.
    if (Recording* r = Recording::current()) r->leaf(b.grad, "gradient of " + b.name);
    add_into(b.grad, reduced);  // a micro-batch's gradient is finished, then added
  }
  reduction_.reduced.clear();
}

}  // namespace sheaf
