// Runs the command `sheaf` as processes, as a user does, and checks their output and what they leave.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace sheaf::testing {

/// Words of a command line; + concatenates them.
using Words = std::vector<std::string>;
inline Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Outcome {
  int code = -1;              ///< exit code, 128 + signal, or -1 where it hung and was killed
  std::string out, err;       ///< standard output and error
  double cpu_seconds = 0;     ///< of the process and the children it waited for
  int64_t resident_peak = 0;  ///< bytes, of the process itself
};

/// One running `sheaf`. Its working folder is the caller's. Destroying it kills it and its ranks.
class SheafProcess {
 public:
  /// `environment` ("NAME=value") is added to the test's own, without a launcher's variables. It computes on the CPU, unless SHEAF_DEVICE
  /// is in it. Standard output is written to `out`, an existing device or pipe, if given.
  explicit SheafProcess(const std::vector<std::string>& arguments,
                        const std::vector<std::string>& environment = {},
                        const std::string& out = "");
  ~SheafProcess();
  SheafProcess(const SheafProcess&) = delete;
  SheafProcess& operator=(const SheafProcess&) = delete;

  pid_t pid() const { return pid_; }
  bool running();
  /// Ranks under a `sheaf launch`, in the order of their start.
  std::vector<pid_t> ranks() const;
  /// Sends `signal` to the process and all its ranks.
  void signal_all(int signal);
  /// Waits for the end of the process and, if it left any, of its ranks.
  Outcome wait();

 private:
  void reap();

  pid_t pid_ = -1;
  bool ended_ = false;
  std::string out_path_, err_path_;
  std::vector<pid_t> orphans_;
  Outcome outcome_;
};

Outcome run_sheaf(const std::vector<std::string>& arguments,
                  const std::vector<std::string>& environment = {}, const std::string& out = "");
/// EXPECTs success; otherwise its output is part of the failure.
void expect_ok(const Outcome& outcome);
/// The number after the last `before` in a command's output.
double last_number(const std::string& text, const std::string& before);
/// The same command on `world` ranks: under `sheaf launch` from two on, with one thread per rank.
std::vector<std::string> on_ranks(int world, const std::vector<std::string>& arguments);

/// `bytes` characters of words and lines, the same every time.
std::string sample_text(int64_t bytes);
/// A file of 600 tokens below 29, 16 bits each, which are in the vocabulary of every published model of the tests.
void write_sample_tokens(const std::string& path);
std::vector<std::string> lines_of(const std::string& text);
/// EXPECTs exit code `code` and one line on standard error, with all `parts`.
void expect_refused(const Outcome& outcome, int code, const Words& parts);
inline void expect_refused(const Outcome& outcome, int code, const std::string& part) {
  expect_refused(outcome, code, Words{part});
}

/// metrics.jsonl as text: for every step, the fields of its lines with their values verbatim. A step that occurs twice fails the test.
using Metrics = std::map<int64_t, std::map<std::string, std::string>>;
Metrics read_metrics(const std::string& path);
/// Compares loss, lr, grad_norm and val_loss of every step, to the letter.
void expect_same_curve(const Metrics& actual, const Metrics& expected, const std::string& what);

}  // namespace sheaf::testing
