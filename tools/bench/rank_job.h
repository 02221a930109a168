// Measurements that need processes of their own: `sheaf bench-rank WHAT ...`, a hidden subcommand,
// run as the ranks of a job by the launcher that `sheaf launch` uses.
#pragma once

#include <string>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

struct RankJob {
  std::vector<std::string> words;  ///< WHAT and its arguments
  int ranks = 1;
  int threads = 1;           ///< of each rank
  std::string communicator;  ///< "gloo", "shm"; "": as the program chooses
};

/// Runs the job to its end and returns what rank 0 answered. Throws CommError if a rank failed (the
/// launcher has said why on standard error).
Json run_ranks(const Session& session, const RankJob& job);

/// One of the ranks: does what `words` say (the last names the file for rank 0's answer). Returns
/// the exit code.
int bench_rank_command(const std::vector<std::string>& words);

/// A folder under the system's temporary one, removed with all in it when this object goes.
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

// What ranks can be asked to do; each returns rank 0's answer. `words` follow WHAT.
Json comm_rank(const std::vector<std::string>& words);
Json train_rank(const std::vector<std::string>& words);
Json init_rank(const std::vector<std::string>& words);

}  // namespace sheaf::bench
