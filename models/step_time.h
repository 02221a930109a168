// Estimates the time of a training step on machines that need not be present: from each rank's tape, planned on the meta device, and
// the clock (autograd/clock.h) with a machine's rates (distributed/machine.h).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "sheaf/autograd/clock.h"
#include "sheaf/distributed/machine.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Seconds are those of the slowest of the planned ranks: one of each pipeline stage, the last of its ranks, which has the largest
/// parts. All other ranks are assumed to take equally long.
struct StepTime {
  double seconds = 0;
  double computing = 0;    ///< of these, seconds in which the compute lane is busy
  int64_t peak_bytes = 0;  ///< of the planned ranks
  int64_t host_bytes = 0;  ///< of host memory, of a rank
  int64_t received = 0;    ///< bytes, of the rank that receives the most
  /// The waits of that rank's compute lane, in seconds by name ("all_gather", "send", ...), the longest first.
  std::vector<std::pair<std::string, double>> waits;
};

enum class Planning {
  /// Plans each kind of turn once if micro-batches are equal (the first, one between two others, the last, ...), and one of equal
  /// stages; the rest is assumed to repeat. Repetition is verified within the planned part; if it does not hold, all turns are
  /// planned.
  shorter,
  whole,  ///< every turn of every stage
};

/// For a GPU step; with islands a share of the outer step is added to each. Throws what plan_step() throws. Both kinds of planning
/// give the same result.
StepTime time_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine,
                   Planning planning = Planning::shorter);
/// As peak_bytes, but for the first rank of each stage, which may hold values that are on one rank only.
int64_t peak_of_first_ranks(const TrainConfig& config, int64_t vocab, int world, const Machine& machine,
                            Planning planning = Planning::shorter);
/// The same as a trace (to_trace) of the planned ranks, planned whole.
std::string trace_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine);

}  // namespace sheaf::models
