// The measured time line of a training step, of all ranks.
#pragma once

#include <string>

#include "sheaf/core/profile.h"
#include "sheaf/distributed/world.h"

namespace sheaf::models {

/// Notes what this rank does from its construction on.
class StepProfile {
 public:
  explicit StepProfile(World& world) : world_(world), begin_(Profile::now()) {}

  /// Ends it; collective. Rank 0 writes all ranks' time lines to `path` (TraceEvents), and gets a line for people: what the
  /// largest shares of its own thread's time were. Throws IoError.
  std::string write(const std::string& path);

 private:
  World& world_;
  const double begin_;
  Profile profile_;
};

}  // namespace sheaf::models
