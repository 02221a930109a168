// Unsharded: a model's parameters stay whole while it lives, for many passes outside of recordings.
#pragma once

#include "sheaf/nn/shard.h"

namespace sheaf::nn {

/// While it lives, units that are entered outside of recordings are gathered, or cast, once and stay so, for evaluation or generation
/// at the speed of a replicated model, and with its memory (FSDP2's unshard() and reshard()):
///
///   const nn::Unsharded whole(model);
///   for (...) model.next_logits(tokens, cache);
///
/// A recording gathers separately, as usual; after an optimizer's step, or any other change of masters, units are gathered again.
/// Must not outlive the model. All this also applies to copies made from secondary shards and to dequantized blocks.
class Unsharded {
 public:
  /// Throws LifetimeError for a model without memory.
  explicit Unsharded(Module& model) {
    gather_schedule(model);
    const auto all = units(model);
    if (all.empty()) return;
    schedule_ = all[0]->schedule();
    schedule_->keep_open();
  }
  ~Unsharded() {
    if (schedule_) schedule_->end_keeping_open();
  }
  Unsharded(const Unsharded&) = delete;
  Unsharded& operator=(const Unsharded&) = delete;

 private:
  std::shared_ptr<GatherSchedule> schedule_;
};

}  // namespace sheaf::nn
