// What a training step is estimated to take on machines that need not be there: each rank's tape, planned on the meta device,
// and the clock (autograd/clock.h) with a machine's rates (distributed/machine.h).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "sheaf/autograd/clock.h"
#include "sheaf/distributed/machine.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Seconds are those of the slowest of the planned ranks: one of each stage of a pipeline, the last of its ranks, which has the
/// largest parts. All other ranks are assumed to be as far as these are.
struct StepTime {
  double seconds = 0;
  double computing = 0;      ///< of these, seconds in which the compute lane is at work
  int64_t peak_bytes = 0;    ///< of the planned ranks
  int64_t host_bytes = 0;    ///< of the host's memory, of a rank
  int64_t received = 0;      ///< bytes, of the rank that receives most
  /// What the compute lane of that rank waits for, by name ("all_gather", "send", ...), the longest first.
  std::vector<std::pair<std::string, double>> waits;
};

enum class Planning {
  /// Of equal micro-batches each kind of turn once (the first, one between two others, the last, ...), and of equal stages one;
  /// the rest repeats. Repetition is verified as far as it was planned; where it does not hold, all turns are planned.
  shorter,
  whole,  ///< every turn of every stage
};

/// For a GPU step; with islands an outer step's share is added to each. Throws what plan_step() throws. Both plannings give the
/// same.
StepTime time_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine,
                   Planning planning = Planning::shorter);
/// As peak_bytes, but for the first rank of each stage, which may hold what is on one rank alone.
int64_t peak_of_first_ranks(const TrainConfig& config, int64_t vocab, int world, const Machine& machine,
                            Planning planning = Planning::shorter);
/// The same as a trace (to_trace) of the planned ranks, planned whole.
std::string trace_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine);

}  // namespace sheaf::models
