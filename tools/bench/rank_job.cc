#include "sheaf/tools/bench/rank_job.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/distributed/launcher.h"

namespace sheaf::bench {
namespace {

// Sets an environment variable of this process, and so of its children, for the lifetime of this object.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before, was_set_ = true;
    if (!value.empty()) setenv(name, value.c_str(), 1);
  }
  ~Variable() {
    if (was_set_)
      setenv(name_, before_.c_str(), 1);
    else
      unsetenv(name_);
  }

 private:
  const char* name_;
  std::string before_;
  bool was_set_ = false;
};

}  // namespace

TemporaryFolder::TemporaryFolder() {
  path_ = (std::filesystem::temp_directory_path() / "sheaf-bench-XXXXXX").string();
  if (!mkdtemp(path_.data())) fail<IoError>("[bench] cannot make a folder like ", path_);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Json run_ranks(const Session& session, const RankJob& job) {
  int code = 0;
  {
    const TemporaryFolder folder;
    const std::string answer = folder.path() + "/answer.json";
    distributed::LaunchOptions options;
    options.nproc = job.ranks;
    options.threads_per_rank = job.threads;
    options.command = {session.options().program, "bench-rank"};
    options.command.insert(options.command.end(), job.words.begin(), job.words.end());
    options.command.push_back(answer);
    const Variable communicator("SHEAF_COMM", job.communicator), device("SHEAF_DEVICE", "cpu");
    code = distributed::launch(options);
    if (code == 0) return Json::parse(File::open<IoError>(answer).read_all(), answer);
  }
  // The launcher handles the signal itself while ranks run, but it was meant for this process too.
  if (code > 128) std::raise(code - 128);
  fail<CommError>("[bench] ", job.ranks, " ranks of '", job.words.at(0), "' ended with code ",
                  code);
}

std::vector<double> numbers(const Json& array) {
  std::vector<double> out;
  for (const Json& x : array.as_array()) out.push_back(x.as_double());
  return out;
}

Json to_json_array(const std::vector<double>& values) {
  return Json::Array(values.begin(), values.end());
}

int bench_rank_command(const std::vector<std::string>& words) {
  check<ConfigError>(words.size() >= 2, "[bench-rank] is for `sheaf bench` only");
  const std::vector<std::string> arguments(words.begin() + 1, words.end() - 1);
  Json answer;
  if (words[0] == "comm")
    answer = comm_rank(arguments);
  else if (words[0] == "train")
    answer = train_rank(arguments);
  else if (words[0] == "init")
    answer = init_rank(arguments);
  else
    fail<ConfigError>("[bench-rank] unknown '", words[0], "'");
  if (!answer.is_null()) write_file(words.back(), answer.dump());
  return 0;
}

}  // namespace sheaf::bench
