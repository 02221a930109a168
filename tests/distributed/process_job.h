// Runs this test program again as the ranks of a job, and collects their output and how they ended.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace sheaf::testing {

struct ProcessResult {
  int code = -1;       ///< exit code, or 128 + signal
  double seconds = 0;  ///< from the start of the job
  std::string output;  ///< standard output and error
};

struct ProcessJob {
  std::string scenario;  ///< argument of the re-executed program
  int ranks = 1;
  std::vector<std::string> environment = {};  ///< more variables, "NAME=value"
  std::vector<int> absent = {};               ///< ranks that never start
  bool own_variables = true;                  ///< sets RANK, WORLD_SIZE and so on; false: the program runs as it is
  bool goes_on = false;                       ///< ranks that have stopped (SIGSTOP) will go on
  double limit = 30;                          ///< seconds; then SIGKILL
  int signal = 0;                             ///< sent to rank 0 when it has written `signal_after`
  std::string signal_after = {};
};

/// Ranks that have stopped, and will not go on, are killed when the others have ended.
std::vector<ProcessResult> run_processes(const ProcessJob& job);

}  // namespace sheaf::testing
