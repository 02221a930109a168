// The gradients of a unit: the slots that kernels write them into, and when their reduction starts (gradient_reduction.h).
#include <algorithm>
#include <functional>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/distributed/unit_ops.h"

namespace sheaf {

// Slots of an enclosing recording hold its early gradients: it keeps that memory, and gets other slots.
bool Unit::accepts_early_gradient(int index, const Type& gradient) const {
  return (slot_buffers_.empty() || slots_of_ != Recording::current_serial()) && slot_type(index) == gradient;
}

Tensor Unit::slot(int index) {
  if (const uint64_t recording = Recording::current_serial(); recording != slots_of_) {
    if (const Recording* around = Recording::living(slots_of_); around && around->in_backward() && !slot_buffers_.empty())
      fail<LifetimeError>("[backward] unit '", path_label(name_), "' holds gradients of a backward around this recording, which has not ended: ",
                          "within a derivative ask for gradient()");
    drop_slots();
    slots_of_ = recording;
  }
  if (!slots_[index]) make_slots();
  return slots_[index];
}

// Those of all trainable leaves, by one node: one buffer per trainable buffer, and the slots inside them.
void Unit::make_slots() {
  const PathScope path(name_);
  std::vector<OutputSpec> specs;
  std::vector<int> buffer_of, leaf_of;
  for (size_t b = 0; b < buffers_.size(); ++b) {
    if (!buffers_[b].trainable) continue;
    buffer_of.push_back(static_cast<int>(b));
    specs.push_back({.type = slot_buffer_type(buffers_[b])});
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
  const UnitOps::Attrs attrs{axis_, buffer_of.size()};
  const OpDef& op = gathers() ? UnitOps::grad_slots() : UnitOps::lasting_grad_slots();
  Tensors outputs = apply_typed(op, &attrs, {}, specs);
  slot_buffers_.assign(outputs.begin(), outputs.begin() + buffer_of.size());
  for (size_t k = 0; k < leaf_of.size(); ++k) slots_[leaf_of[k]] = outputs[buffer_of.size() + k];
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

void Unit::release() {
  ++pending_finishes_;
  release_values();
}

void Unit::release_values() {
  const PathScope path(name_);
  mirror_next_ = false;
  if (state_ == State::in_flight) {
    // Prefetched for a later backward; this one opened it only for its scope.
  } else if (caches_gathered()) {
    std::fill(values_.begin(), values_.end(), Tensor());
    state_ = State::closed;  // cached for the next micro-batch
  } else if (gathers()) {
    discard_gathered();
  }
  if (gathers() && state_ != State::in_flight && Recording::current()->is_last_micro_batch_of(this)) drop_copies();
}

bool Unit::is_summed_over_stages() const {
  if (!mesh_ || stage_axis_ >= 0) return false;
  for (int a = 0; a < mesh_->num_axes(); ++a)
    if (mesh_->is_chain(a) && !alone(a)) return true;
  return false;
}

// All contributions are in the slots: absent ones become zeros, then the reduction starts. zero1 adds the slots to those of earlier
// micro-batches instead, until the last one.
void Unit::finish(const std::vector<bool>& contributed) {
  const PathScope path(name_);
  if (pending_finishes_ == 0)
    fail<LifetimeError>("[unit] '", path_label(name_), "': the gradients of its weights were put off in a backward with defer_weights ",
                        "that zero_grad() has given up since");
  --pending_finishes_;
  // The loss depends on none of the leaves: the unit has no gradient, as if it had not been read, unless other micro-batches gave it one.
  if (std::ranges::none_of(contributed, std::identity()) && !has_gradients() && !is_summed_over_stages()) {
    if (slots_of_ == Recording::current_serial()) drop_slots();
    return;
  }
  expect_not_consumed("backward");
  zero_missing(contributed);
  // Units shared by all stages are reduced when the step asks for it (reduce_waiting): here each stage would wait for the last one
  // although it has work to do, and they get here in different turns.
  const bool last = !is_summed_over_stages() && Recording::current()->is_last_micro_batch_of(this);
  if (slot_buffers_.empty()) return;  // all frozen
  std::vector<Tensor> slots = std::exchange(slot_buffers_, {});
  std::fill(slots_.begin(), slots_.end(), Tensor());
  if (caches_gathered()) {
    reduction_.add_to_waiting(std::move(slots));
    if (!last) return;
    slots = reduction_.take_waiting();
  }
  schedule_->advance_reductions();  // at most one unit's slots are in flight
  reduction_.start(std::move(slots), last);
  schedule_->use_reduced();
}

void Unit::update_when_reduced(std::function<void()> update) {
  reduction_.when_stored([this, update = std::move(update)] {
    close_for_update();
    update();
    is_consumed_ = true;
    for (FlatBuffer& b : buffers_) b.grad = b.grad_scale = b.found_inf = Tensor();
  });
}

void Unit::expect_not_consumed(std::string_view who) const {
  if (is_consumed_)
    fail<LifetimeError>("[", who, "] unit '", path_label(name_), "' was updated during the backward (Optimizer::step_in_backward), and its ",
                        "gradients are gone: of these only grad_norm() is known, and the next backward comes after zero_grad()");
}

void Unit::reduce_waiting() {
  if (has_failed_)
    fail<LifetimeError>("[unit] '", path_label(name_), "': a backward failed after it had added to these gradients: zero_grad() gives them ",
                        "up, and all of this step");
  if (pending_finishes_ > 0)
    fail<LifetimeError>("[unit] '", path_label(name_), "': the gradients of its weights were put off in ", pending_finishes_,
                        pending_finishes_ == 1 ? " backward" : " backwards", " with defer_weights, and recording.backward_weights() was not ",
                        "called as often; zero_grad() gives up all gradients of this step");
  if (!reduction_.has_waiting()) return;
  const PathScope path(name_);
  reduction_.start_waiting();
}

bool Unit::holds_gradients() const { return pending_finishes_ > 0 || has_gradients(); }

bool Unit::has_gradients() const {
  return reduction_.has_waiting() || reduction_.in_progress() ||
         std::ranges::any_of(buffers_, [](const FlatBuffer& b) { return b.grad.defined(); });
}

}  // namespace sheaf
