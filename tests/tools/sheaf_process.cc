#include "sheaf/tests/tools/sheaf_process.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sheaf::testing {
namespace {

using Clock = std::chrono::steady_clock;
// Only a hanging process takes this long.
constexpr auto kLimit = std::chrono::seconds(240);

std::string binary() {
  const char* path = std::getenv("SHEAF_BINARY");  // for runs outside Bazel
  return std::filesystem::absolute(path ? path : "tools/sheaf");
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

bool is_launcher_variable(const std::string& entry) {
  for (const char* name : {"RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=",
                           "MASTER_ADDR=", "MASTER_PORT=", "SHEAF_", "OMP_NUM_THREADS=",
                           "SLURM_", "PMI_", "PMIX_", "OMPI_"})
    if (entry.starts_with(name)) return true;
  return false;
}

double seconds(const timeval& t) {
  return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
}

}  // namespace

SheafProcess::SheafProcess(const std::vector<std::string>& arguments,
                           const std::vector<std::string>& environment,
                           const std::string& out_to) {
  // Ranks whose launcher was killed become children of this process, which can then wait for them.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  static int count = 0;
  const std::string base =
      ::testing::TempDir() + "/sheaf-" + std::to_string(getpid()) + "-" + std::to_string(count++);
  out_path_ = base + ".out";
  err_path_ = base + ".err";
  const int out = out_to.empty()
                      ? open(out_path_.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600)
                      : open(out_to.c_str(), O_WRONLY | O_CLOEXEC);
  const int err = open(err_path_.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  std::vector<std::string> words = {binary()}, variables = environment;
  words.insert(words.end(), arguments.begin(), arguments.end());
  variables.emplace_back("SHEAF_DEVICE=cpu");  // the first of equal names counts: the caller's
  for (char** e = environ; *e; ++e)
    if (!is_launcher_variable(*e)) variables.emplace_back(*e);
  std::vector<char*> argv, envp;
  for (std::string& w : words) argv.push_back(w.data());
  for (std::string& v : variables) envp.push_back(v.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(out, 1);
    dup2(err, 2);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(out);
  close(err);
  if (pid_ < 0) throw std::runtime_error("fork");
}

SheafProcess::~SheafProcess() {
  if (!ended_) {
    signal_all(SIGKILL);
    wait();
  }
  std::filesystem::remove(out_path_);
  std::filesystem::remove(err_path_);
}

std::vector<pid_t> SheafProcess::ranks() const {
  const std::string pid = std::to_string(pid_);
  std::istringstream list(read_text("/proc/" + pid + "/task/" + pid + "/children"));
  std::vector<pid_t> out;
  for (pid_t child; list >> child;) out.push_back(child);
  return out;
}

void SheafProcess::signal_all(int signal) {
  if (ended_) return;
  orphans_ = ranks();
  kill(pid_, signal);
  for (pid_t rank : orphans_) kill(rank, signal);
}

bool SheafProcess::running() {
  if (!ended_) reap();
  return !ended_;
}

void SheafProcess::reap() {
  int status = 0;
  rusage usage{};
  if (wait4(pid_, &status, WNOHANG, &usage) != pid_) return;
  ended_ = true;
  outcome_.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  outcome_.cpu_seconds = seconds(usage.ru_utime) + seconds(usage.ru_stime);
  outcome_.resident_peak = usage.ru_maxrss * 1024;
}

Outcome SheafProcess::wait() {
  const auto until = Clock::now() + kLimit;
  while (running()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (Clock::now() < until) continue;
    signal_all(SIGKILL);
    waitpid(pid_, nullptr, 0);
    ended_ = true;
    outcome_.code = -1;
  }
  for (pid_t orphan : orphans_)
    waitpid(orphan, nullptr, 0);  // fails for those that the launcher waited for
  orphans_.clear();
  outcome_.out = read_text(out_path_);
  outcome_.err = read_text(err_path_);
  return outcome_;
}

Outcome run_sheaf(const std::vector<std::string>& arguments,
                  const std::vector<std::string>& environment, const std::string& out) {
  return SheafProcess(arguments, environment, out).wait();
}

void expect_ok(const Outcome& outcome) { EXPECT_EQ(outcome.code, 0) << outcome.err; }

double last_number(const std::string& text, const std::string& before) {
  const size_t at = text.rfind(before);
  EXPECT_NE(at, text.npos) << "no '" << before << "' in " << text;
  return at == text.npos ? 0 : std::stod(text.substr(at + before.size()));
}

std::vector<std::string> on_ranks(int world, const std::vector<std::string>& arguments) {
  std::vector<std::string> out = arguments;
  if (world == 1) {
    if (out[0] == "train") out.insert(out.begin() + 1, {"--threads-per-rank", "1"});
    return out;
  }
  out.insert(out.begin(), {"launch", "--nproc-per-node", std::to_string(world),
                           "--threads-per-rank", "1", "--", binary()});
  return out;
}

void write_sample_tokens(const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  for (int i = 0; i < 600; ++i) {
    const auto token = static_cast<uint16_t>((i * i + i / 7) % 29);
    out.write(reinterpret_cast<const char*>(&token), 2);
  }
}

std::string sample_text(int64_t bytes) {
  constexpr const char* kWords[] = {"the", "sea",   "wind",  "and", "a",    "stone",
                                    "in",  "light", "river", "of",  "night"};
  std::string text;
  uint32_t state = 1;
  while (static_cast<int64_t>(text.size()) < bytes) {
    state = state * 1664525u + 1013904223u;
    text += kWords[(state >> 16) % std::size(kWords)];
    text += (state >> 8) % 9 == 0 ? '\n' : ' ';
  }
  text.resize(static_cast<size_t>(bytes));
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

void expect_refused(const Outcome& outcome, int code, const Words& parts) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(lines_of(outcome.err).size(), 1u) << outcome.err;
  for (const std::string& part : parts) EXPECT_THAT(outcome.err, ::testing::HasSubstr(part));
}

Metrics read_metrics(const std::string& path) {
  Metrics metrics;
  for (const std::string& line : lines_of(read_text(path))) {
    // {"step":10,"loss":2.25}: our own files, without nesting and without commas in strings.
    std::map<std::string, std::string> fields;
    for (size_t at = 1; at < line.size() - 1;) {
      const size_t end = std::min(line.find(',', at), line.size() - 1), colon = line.find(':', at);
      fields[line.substr(at + 1, colon - at - 2)] = line.substr(colon + 1, end - colon - 1);
      at = end + 1;
    }
    const int64_t step = std::stoll(fields.at("step"));
    fields.erase("step");
    for (const auto& [name, value] : fields)
      EXPECT_TRUE(metrics[step].emplace(name, value).second)
          << path << ": " << name << " of step " << step << " twice";
  }
  return metrics;
}

void expect_same_curve(const Metrics& actual, const Metrics& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [step, fields] : expected) {
    ASSERT_TRUE(actual.contains(step)) << what << ": no step " << step;
    const auto& found = actual.at(step);
    for (const char* name : {"loss", "lr", "grad_norm", "val_loss", "loss_scale", "skipped_steps"}) {
      ASSERT_EQ(found.contains(name), fields.contains(name))
          << what << ": " << name << " of step " << step;
      if (fields.contains(name)) {
        ASSERT_EQ(found.at(name), fields.at(name)) << what << ": " << name << " of step " << step;
      }
    }
  }
}

}  // namespace sheaf::testing
