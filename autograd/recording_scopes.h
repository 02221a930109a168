// Scopes that say something of what is recorded while they live: its phase, that the backward computes it again, its module path.
#pragma once

#include <cstdint>
#include <string>

#include "sheaf/autograd/tape.h"

namespace sheaf {

class Recording;

/// Sets the phase of what is recorded while it lives.
class PhaseScope {
 public:
  explicit PhaseScope(Phase phase);
  ~PhaseScope();

 private:
  Recording* recording_;
  Phase previous_;
};

struct RecomputeOptions {
  /// Only what ops can cheaply compute again from what their derivatives read anyway: normalised values, activation functions
  /// (OpDef::rematerialize). The rest is kept, and the other options have no part. Not inside of another scope.
  bool selective = false;
  /// What is used outside of the scope is not kept either but computed again where the backward reads it: for results that
  /// take more memory than what they come from, such as gathered activations.
  bool results = false;
  /// On a GPU, what came in from outside and has a gradient waits in the host's memory until the backward comes near. Not
  /// beside `results`.
  bool offload = false;
};

/// Activation checkpointing (Chen et al. 2016, https://arxiv.org/abs/1604.06174): of what the recording of this thread
/// computes while the scope lives, the backward keeps only what came in from outside and what is used outside; the rest
/// it computes again, when it comes to it, from the same values with the same bits. What is computed again is on the
/// tape. An inner scope does nothing, but inside of a selective one; nor does one outside of a recording or in its
/// backward. Values must not be stored into memory that was there before (LifetimeError).
class RecomputeScope {
 public:
  explicit RecomputeScope(const RecomputeOptions& options = {});
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
  /// Whether all that is computed in it will be computed again.
  bool is_region() const { return recording_ != 0 && !selective_; }

 private:
  uint64_t recording_ = 0;  // whose region it opened
  bool selective_ = false;  // or which it made selective
};

/// What is recorded while it lives has shapes of each rank's own, as within rowwise() and local_map(): ranks must not decide by its work.
class PerRankScope {
 public:
  explicit PerRankScope(bool is = true) : previous_(now) { now = now || is; }
  ~PerRankScope() { now = previous_; }
  PerRankScope(const PerRankScope&) = delete;
  PerRankScope& operator=(const PerRankScope&) = delete;
  static bool active() { return now; }

 private:
  static inline thread_local bool now = false;
  const bool previous_;
};

/// The module path of what this thread executes, for tapes and error messages. nn::Module opens these scopes. A path that somebody else has,
/// which must outlive the scope, is not copied: every op has one.
class PathScope {
 public:
  explicit PathScope(const std::string& path);
  explicit PathScope(std::string&& path);  ///< "probe", or what is put together for it: the scope keeps it
  ~PathScope();
  PathScope(const PathScope&) = delete;
  PathScope& operator=(const PathScope&) = delete;
  static const std::string& current();

 private:
  const std::string own_;
  const std::string* previous_;
};

}  // namespace sheaf
