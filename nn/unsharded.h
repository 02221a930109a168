// Unsharded: a model's parameters stay whole while it lives, for many passes outside of recordings.
#pragma once

#include "sheaf/nn/shard.h"

namespace sheaf::nn {

/// While it lives, units that are entered outside of recordings are gathered, or cast, once and stay so, for evaluation or generation at the speed
/// of a replicated model, and in its memory (FSDP2's unshard() and reshard()):
///
///   const nn::Unsharded whole(model);
///   for (...) model.next_logits(tokens, cache);
///
/// A recording gathers for itself, as usual; after an optimizer's step, or whatever else changes masters, units are gathered anew. Must
/// not outlive the model. All this holds for copies made of replicas' secondary shards and for values in blocks, too.
class Unsharded {
 public:
  /// Throws LifetimeError for a model without memory.
  explicit Unsharded(Module& model) {
    gather_schedule(model);
    schedule_ = units(model).at(0)->schedule();
    schedule_->hold();
  }
  ~Unsharded() { schedule_->release(); }
  Unsharded(const Unsharded&) = delete;
  Unsharded& operator=(const Unsharded&) = delete;

 private:
  std::shared_ptr<GatherSchedule> schedule_;
};

}  // namespace sheaf::nn
