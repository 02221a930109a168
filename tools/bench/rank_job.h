// Measurements in separate processes: `sheaf bench-rank WHAT ...`, a hidden subcommand, run as the ranks of a job by the launcher
// behind `sheaf launch`.
#pragma once

#include <string>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

struct RankJob {
  std::vector<std::string> words;  ///< WHAT and its arguments
  int ranks = 1;
  int threads = 1;           ///< per rank
  std::string communicator;  ///< "gloo", "shm"; "": the default
};

/// Runs the job and returns rank 0's answer. Throws CommError if a rank failed (the launcher has reported the cause on standard
/// error).
Json run_ranks(const Session& session, const RankJob& job);

/// Runs one of the ranks as `words` say (the last one names the file for rank 0's answer). Returns the exit code.
int bench_rank_command(const std::vector<std::string>& words);

/// A temporary folder, removed with its contents by the destructor.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// The numbers of a JSON array.
std::vector<double> numbers(const Json& array);
Json to_json_array(const std::vector<double>& values);

// The jobs that ranks can run; each returns rank 0's answer. `words` are the arguments after WHAT.
Json comm_rank(const std::vector<std::string>& words);
Json train_rank(const std::vector<std::string>& words);
Json init_rank(const std::vector<std::string>& words);

}  // namespace sheaf::bench
