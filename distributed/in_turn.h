// CollectivesInTurn: a collective on GPUs completes before its call returns.
#pragma once

namespace sheaf {

/// Applies to calls that the thread makes while this object lives.
///
/// [Note: code is loaded at first use] Before CUDA loads a kernel's code, at its first launch, it waits until the GPU has finished
/// all earlier work, and launches of other threads wait for that. A collective's kernel spins for its peers meanwhile. If one rank
/// has begun a gather and another one a reduction, while both load code, then each waits for a kernel that the other cannot launch.
/// So in a job's first step, which launches most kernels for the first time and also times products, no collective is in progress
/// while a rank continues; nor in its first evaluation, which has additional kernels.
class CollectivesInTurn {
 public:
  CollectivesInTurn() : before_(active_) { active_ = true; }
  ~CollectivesInTurn() { active_ = before_; }
  CollectivesInTurn(const CollectivesInTurn&) = delete;
  CollectivesInTurn& operator=(const CollectivesInTurn&) = delete;

  static bool active() { return active_; }

 private:
  static inline thread_local bool active_ = false;
  const bool before_;
};

}  // namespace sheaf
