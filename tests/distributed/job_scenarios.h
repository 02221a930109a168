// The scenarios that the ranks of a job of processes run in tests, over any transport, and the expected outcomes.
#pragma once

#include <string>
#include <vector>

#include "sheaf/distributed/world.h"
#include "sheaf/tests/distributed/collective_battery.h"
#include "sheaf/tests/distributed/process_job.h"

namespace sheaf::testing {

#ifdef SHEAF_TSAN
inline constexpr int kLargestWorld = 3;
#else
inline constexpr int kLargestWorld = 5;
#endif

/// All collectives on the gather lane; digest of their results and the communicator's counts.
std::string battery_report(World& world, BufferMemory memory = BufferMemory::normal);
/// The same on the gather lanes of grid(), one after the other.
std::string grid_report(World& world, BufferMemory memory = BufferMemory::normal);
/// All ranks in two rows, the axis "model"; axis "data" joins a rank and its peer in the other row.
Mesh grid(World& world);

/// The main() of a rank: runs one scenario, prints its failure and returns its exit code. "launch/<ranks>/<scenario>" starts ranks itself.
/// With HOSTS=aab in the environment rank 2 is on a host of its own.
int run_scenario(const std::string& scenario);

/// Seconds in which a busy machine, too, tells all ranks of a failure: far below the default time-out.
inline constexpr double kSoon = 15;

void expect_said(const ProcessResult& result, const std::string& part);
std::string last_line(std::string text);
/// At worlds 1 to kLargestWorld every rank reports what ranks that are threads report.
void expect_bits_of_local(const std::string& scenario);
/// All ranks except `culprit` end with `code` within `seconds`, and their output contains `parts`.
std::vector<ProcessResult> expect_fallout(const ProcessJob& job, int culprit, int culprit_code, int code,
                                          double seconds, const std::vector<std::string>& parts);

}  // namespace sheaf::testing
