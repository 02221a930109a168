// Scopes that annotate what is recorded while they live: its phase, that the backward recomputes it, its module path.
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
  /// Only values that ops can cheaply recompute from what their derivatives read anyway: normalised values, activation functions
  /// (OpDef::rematerialize). The rest is kept, and the other options do not apply. Not inside of another scope.
  bool selective = false;
  /// The scope's results are not kept either but recomputed where the backward reads them: for results that take more memory than
  /// their inputs, such as gathered activations.
  bool results = false;
  /// On a GPU, values from outside that have a gradient are offloaded to host memory until the backward approaches. Not together with
  /// `results`.
  bool offload = false;
};

/// Activation checkpointing (Chen et al. 2016, https://arxiv.org/abs/1604.06174): of what this thread's recording computes while the
/// scope lives, only inputs from outside and values used outside are kept for the backward; it recomputes the rest when it gets
/// there, from the same values with the same bits. The recomputation is on the tape. An inner scope has no effect, unless it is
/// inside of a selective one; nor has one outside of a recording or in its backward. Values must not be stored into memory that
/// existed before (LifetimeError).
class RecomputeScope {
 public:
  explicit RecomputeScope(const RecomputeOptions& options = {});
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
  /// Whether everything computed in it will be recomputed.
  bool is_region() const { return recording_ != 0 && !selective_; }

 private:
  uint64_t recording_ = 0;  // whose region it opened
  bool selective_ = false;  // or which it made selective
};

/// Ops recorded during its lifetime may have shapes that differ between ranks, as in rowwise() and local_map(): ranks must not make
/// decisions based on its work.
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

/// The module path of what this thread executes, for tapes and error messages. nn::Module opens these scopes. A path passed by
/// reference, which must outlive the scope, is not copied: every op has one.
class PathScope {
 public:
  explicit PathScope(const std::string& path);
  explicit PathScope(std::string&& path);  ///< for a literal or a temporary: the scope keeps it
  ~PathScope();
  PathScope(const PathScope&) = delete;
  PathScope& operator=(const PathScope&) = delete;
  static const std::string& current();

 private:
  const std::string own_;
  const std::string* previous_;
};

}  // namespace sheaf
