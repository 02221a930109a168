// The measured time line of a training step, of all ranks.
#pragma once

#include <string>

#include "sheaf/core/profile.h"
#include "sheaf/distributed/world.h"

namespace sheaf::models {

/// Records, from its construction on, what this rank, or its GPU, does, and how much of its memory is alive (Profile).
class StepProfile {
 public:
  explicit StepProfile(World& world) : world_(world), begin_(profile_.settle()) {}

  /// Ends it; collective. Rank 0 writes all ranks' time lines to `path` (TraceEvents), and gets a readable line with the largest
  /// shares of its own thread's time, or its GPU's. Throws IoError.
  std::string write(const std::string& path);

 private:
  World& world_;
  Profile profile_;
  const double begin_;
};

}  // namespace sheaf::models
