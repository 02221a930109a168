#include "sheaf/distributed/launcher.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sheaf/core/error.h"
#include "sheaf/distributed/core_shares.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/distributed/socket.h"

namespace sheaf::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

// Peers of a dead rank report what they observed and exit by themselves.
constexpr auto kOwnExitTime = seconds(2);
constexpr auto kTerminateTime = seconds(3);
// After a signal from outside a program may want to save something.
constexpr auto kForwardedTime = seconds(30);
// A signal that arrives sooner is the same request: `timeout` and batch systems signal a whole group, and each
// member.
constexpr auto kSameRequest = seconds(1);

constexpr int kMostRestarts = 1'000'000;

constexpr const char* kErrorFd = "SHEAF_ERROR_FD";

struct Child {
  pid_t pid = -1;
  bool running = true;
  int status = 0;      ///< as waitpid returned it
  int reason_fd = -1;  ///< read end of a pipe to which the rank writes why it fails

  /// The reason it has written so far, as one line; does not wait for more.
  std::string reason() const {
    std::string text;
    char chunk[4096];
    for (ssize_t n; text.size() < 65536 && (n = read(reason_fd, chunk, sizeof chunk)) > 0;)
      text.append(chunk, static_cast<size_t>(n));
    while (!text.empty() && text.back() == '\n') text.pop_back();
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
  }
};

struct Failure {
  int rank;
  pid_t pid;
  int status;  // as waitpid returned it
  std::string reason = {};  // the rank's own message; may be empty

  int exit_code() const { return WIFSIGNALED(status) ? static_cast<int>(ExitCode::kPeerLost) : WEXITSTATUS(status); }
  /// The signal that killed it, or after which it exited by itself, as `sheaf train` does; 0 if none.
  int signal() const {
    if (WIFSIGNALED(status)) return WTERMSIG(status);
    return exit_code() > 128 ? exit_code() - 128 : 0;
  }
  /// False if a retry would fail in the same way, or if it was asked to end.
  bool may_be_cured() const {
    for (int asked : {SIGHUP, SIGINT, SIGTERM})
      if (signal() == asked || reason.starts_with(after_signal(asked))) return false;
    if (WIFSIGNALED(status)) return true;
    for (ExitCode again : {ExitCode::kConfig, ExitCode::kData, ExitCode::kOutOfMemory, ExitCode::kNonFinite, ExitCode::kResumeMismatch})
      if (exit_code() == static_cast<int>(again)) return false;
    return exit_code() != 126 && exit_code() != 127;  // a shell's, for a command that cannot be run
  }
  /// False for a rank that left because another had gone.
  bool is_own() const { return WIFSIGNALED(status) || exit_code() != static_cast<int>(ExitCode::kPeerLost); }
  std::string to_string() const {
    return str("rank ", rank, " (pid ", static_cast<int64_t>(pid), ") ",
               WIFSIGNALED(status) ? str("was killed by signal ", WTERMSIG(status))
                                   : str("exited with code ", WEXITSTATUS(status)),
               reason.empty() ? "" : ": ", reason);
  }
};

std::string random_token() {
  unsigned char bytes[32];
  check<IoError>(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "[launch] no random numbers for a job token");
  std::string token;
  for (unsigned char b : bytes) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", b);
    token += hex;
  }
  return token;
}

/// This process's environment, with `changes` ("NAME=value", or "NAME" to remove it).
std::vector<std::string> changed_environment(const std::vector<std::string>& changes) {
  const auto name_of = [](const std::string& entry) { return entry.substr(0, entry.find('=')); };
  std::vector<std::string> out;
  for (char** e = environ; *e; ++e)
    if (std::none_of(changes.begin(), changes.end(), [&](auto& c) { return name_of(c) == name_of(*e); }))
      out.emplace_back(*e);
  for (const std::string& c : changes)
    if (c.find('=') != std::string::npos) out.push_back(c);
  return out;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (const std::string& s : strings) out.push_back(const_cast<char*>(s.c_str()));
  out.push_back(nullptr);
  return out;
}

/// SIGCHLD and signals from outside: blocked while this lives, and received by next() and pause().
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGCHLD);
    // Signals that were ignored when it started, as under nohup or with `&` in a script, stay ignored, here and in its ranks.
    for (int s : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction now{};
      if (sigaction(s, nullptr, &now) != 0 || now.sa_handler != SIG_IGN) sigaddset(&set_, s);
    }
    sigprocmask(SIG_BLOCK, &set_, &previous_mask_);
    std::signal(SIGCHLD, SIG_DFL);  // if it is ignored, children's exit statuses are lost
  }
  ~Signals() { sigprocmask(SIG_SETMASK, &previous_mask_, nullptr); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  /// Sleeps until the next signal, or until `until`: then `si_signo` is 0.
  siginfo_t next(Clock::time_point until) const {
    const auto ns = std::max<int64_t>(0, std::chrono::nanoseconds(until - Clock::now()).count());
    const timespec time{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    siginfo_t info{};
    if (sigtimedwait(&set_, &info, &time) <= 0) info.si_signo = 0;
    return info;
  }
  /// Sleeps for `time` and returns 0, or returns at once the signal that asks the launcher to end.
  int pause(std::chrono::milliseconds time) const {
    for (const auto until = Clock::now() + time; Clock::now() < until;)
      if (const int signal = next(until).si_signo; signal != 0 && signal != SIGCHLD) return signal;
    return 0;
  }
  const sigset_t& previous_mask() const { return previous_mask_; }

 private:
  sigset_t set_, previous_mask_;
};

int stopped_by(int signal) {
  std::fprintf(stderr, "sheaf launch: stopped by signal %d\n", signal);
  return 128 + signal;
}

/// One attempt to run the job.
class Attempt {
 public:
  /// `restart`: the number of earlier attempts.
  Attempt(const LaunchOptions& options, const Signals& signals, int restart)
      : options_(options), signals_(signals), restart_(restart), children_(static_cast<size_t>(options.nproc)) {}
  ~Attempt() {
    signal_all(SIGKILL);  // only if start() failed half-way
    for (Child& c : children_) {
      if (c.pid > 0 && c.running) waitpid(c.pid, nullptr, 0);
      if (c.reason_fd >= 0) close(c.reason_fd);
    }
  }

  void start() {
    const int n = options_.nproc;
    const int threads = options_.threads_per_rank > 0 ? options_.threads_per_rank : threads_per_rank(n);
    // Shares of all available CPUs; an empty one means not pinned. Where a quota leaves a rank fewer threads than its
    // share has CPUs, the kernel finds idle ones for them.
    std::vector<std::vector<int>> shares(static_cast<size_t>(n));
    if (options_.pin)
      if (auto all = core_shares(available_cpus(), n); !all.empty()) shares = std::move(all);
    for (std::vector<int>& share : shares)
      if (static_cast<int>(share.size()) < threads) share.clear();
    // Rank 0 inherits the socket that its store will serve on, so nobody can take the port in between.
    Socket listener = listen_on("127.0.0.1", 0);
    const std::string token = random_token();
    for (int r = 0; r < n; ++r) {
      int ends[2];
      if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) fail<IoError>("[launch] cannot make a pipe: ", std::strerror(errno));
      children_[r].reason_fd = ends[0];
      const std::vector<std::string> environment = changed_environment(
          {str("RANK=", r), str("WORLD_SIZE=", n), str("LOCAL_RANK=", r), str("LOCAL_WORLD_SIZE=", n),
           "MASTER_ADDR=127.0.0.1", str("MASTER_PORT=", local_port(listener)), "SHEAF_TOKEN=" + token,
           str("SHEAF_THREADS_PER_RANK=", threads), str("OMP_NUM_THREADS=", threads), str(kErrorFd, '=', ends[1]),
           str("TORCHELASTIC_RESTART_COUNT=", restart_),
           r == 0 ? str("SHEAF_LISTEN_FD=", listener.fd()) : "SHEAF_LISTEN_FD", "SHEAF_PORT",
           "TORCHELASTIC_USE_AGENT_STORE"});
      children_[r].pid = spawn(environment, shares[r], r == 0 ? listener.fd() : -1, ends[1]);
      close(ends[1]);
    }
  }

  struct End {
    int code = 0;
    bool another_try = false;
  };
  End wait() {
    while (running()) {
      sleep_until_news();
      reap();
      const auto now = Clock::now();
      if (stop_at_ && now >= *stop_at_) {
        stop_at_.reset();
        stopping_ = true;
        signal_all(SIGTERM);
        kill_at_ = now + kTerminateTime;
      }
      if (kill_at_ && now >= *kill_at_) {
        kill_at_.reset();
        stopping_ = true;
        if (signal_ != 0 && now - asked_at_ >= kForwardedTime)
          std::fprintf(stderr, "sheaf launch: ranks that did not end within %lld s of signal %d are killed\n",
                       static_cast<long long>(std::chrono::duration_cast<std::chrono::seconds>(kForwardedTime).count()), signal_);
        killed_ = true;
        signal_all(SIGKILL);
      }
    }
    return report();
  }

 private:
  /// `cpus`: where it runs; anywhere if empty.
  pid_t spawn(const std::vector<std::string>& environment, const std::vector<int>& cpus, int listen_fd, int reason_fd) {
    const std::vector<char*> arguments = pointers(options_.command), variables = pointers(environment);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    const pid_t parent = getpid();
    const pid_t pid = fork();
    check<IoError>(pid >= 0, "[launch] cannot start a process: ", std::strerror(errno));
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(static_cast<int>(ExitCode::kPeerLost));  // it died before the line above
    sigprocmask(SIG_SETMASK, &signals_.previous_mask(), nullptr);
    if (!cpus.empty()) sched_setaffinity(0, sizeof set, &set);  // if that fails, the rank runs unpinned
    if (listen_fd >= 0) fcntl(listen_fd, F_SETFD, 0);
    fcntl(reason_fd, F_SETFD, 0);
    execvpe(arguments[0], arguments.data(), variables.data());
    dprintf(reason_fd, "cannot run %s: %s\n", arguments[0], std::strerror(errno));
    _exit(static_cast<int>(ExitCode::kConfig));
  }

  bool running() const {
    return std::any_of(children_.begin(), children_.end(), [](const Child& c) { return c.running; });
  }

  void signal_all(int signal) {
    for (Child& c : children_)
      if (c.pid > 0 && c.running) kill(c.pid, signal);
  }

  void sleep_until_news() {
    auto until = Clock::now() + seconds(1);
    if (stop_at_) until = std::min(until, *stop_at_);
    if (kill_at_) until = std::min(until, *kill_at_);
    const siginfo_t info = signals_.next(until);
    const int signal = info.si_signo;
    if (signal == 0 || signal == SIGCHLD) return;
    const auto now = Clock::now();
    if (signal_ == 0) {
      signal_ = signal;
      asked_at_ = now;
      if (!stopping_) kill_at_ = now + kForwardedTime;  // else it is near already
    } else if (now - asked_at_ < kSameRequest) {
      return;
    } else {
      kill_at_ = now;
    }
    // The kernel has sent a terminal's signals to the ranks already.
    if (info.si_code != SI_KERNEL) signal_all(signal);
  }

  void reap() {
    for (int r = 0; r < options_.nproc; ++r) {
      Child& c = children_[r];
      int status = 0;
      if (!c.running || waitpid(c.pid, &status, WNOHANG) != c.pid) continue;
      c.running = false;
      c.status = status;
      if (status == 0 || stopping_) continue;
      const Failure failure{r, c.pid, status, c.reason()};
      if (signal_ != 0) {  // it was asked to end, which may fail: it could not save a checkpoint, say
        if (!failure.is_own()) continue;
        if (!failure.reason.empty()) std::fprintf(stderr, "sheaf launch: %s\n", failure.to_string().c_str());
        if (failure.signal() != signal_ && code_after_signal_ == 0) code_after_signal_ = failure.exit_code();
        continue;
      }
      failures_.push_back(failure);
      if (failures_.size() == 1) stop_at_ = Clock::now() + kOwnExitTime;
    }
  }

  End report() const {
    if (!failures_.empty()) {
      auto first = std::find_if(failures_.begin(), failures_.end(), [](const Failure& f) { return f.is_own(); });
      if (first == failures_.end()) first = failures_.begin();
      for (const Failure& f : failures_) {
        const bool says_more = !f.reason.empty() && f.reason != first->reason && (f.is_own() || first->reason.empty());
        if (&f != &*first && says_more) std::fprintf(stderr, "sheaf launch: %s\n", f.to_string().c_str());
      }
      const bool another_try = signal_ == 0 && first->may_be_cured() && restart_ < options_.max_restarts;
      std::fprintf(stderr, "sheaf launch: %s%s\n", first->to_string().c_str(), what_next(*first, another_try).c_str());
      return {first->exit_code(), another_try};
    }
    const bool all_done = std::ranges::all_of(children_, [](const Child& c) { return c.status == 0; });
    if (signal_ == 0 || all_done) return {};  // the signal may arrive after all have finished
    const int asked = stopped_by(signal_);
    return {killed_ ? 128 + SIGKILL : code_after_signal_ != 0 ? code_after_signal_ : asked};
  }

  /// Text after a failure's line, if more than one try was asked for.
  std::string what_next(const Failure& failure, bool another_try) const {
    const int tries = options_.max_restarts + 1;
    if (another_try)
      return str("; try ", restart_ + 2, " of ", tries, " in ", std::chrono::duration<double>(options_.pause).count(), " s");
    if (tries == 1 || signal_ != 0) return "";
    return failure.may_be_cured() ? str("; that was try ", tries, " of ", tries) : "; it is not tried again";
  }

  const LaunchOptions& options_;
  const Signals& signals_;
  const int restart_;
  std::vector<Child> children_;
  std::vector<Failure> failures_;  // in order of time
  std::optional<Clock::time_point> stop_at_, kill_at_;
  bool stopping_ = false;
  bool killed_ = false;        // ranks had to be killed
  int signal_ = 0;             // the first signal that we received
  int code_after_signal_ = 0;  // of the first rank that did not end by that signal
  Clock::time_point asked_at_;
};

}  // namespace

bool tell_launcher(const std::string& reason) {
  const char* variable = std::getenv(kErrorFd);
  if (!variable || !*variable) return false;
  char* end = nullptr;
  const long fd = std::strtol(variable, &end, 10);
  // If a process between us and the launcher closed it, the number may be another file's by now.
  struct stat info;
  if (*end || fd < 3 || fd > INT_MAX || fstat(static_cast<int>(fd), &info) != 0 || !S_ISFIFO(info.st_mode)) return false;
  const std::string line = reason + '\n';
  return write(static_cast<int>(fd), line.data(), line.size()) == static_cast<ssize_t>(line.size());
}

std::string after_signal(int signal) { return str("after signal ", signal, ": "); }

int launch(const LaunchOptions& options) {
  check<ConfigError>(options.nproc >= 1 && options.nproc <= 4096, "[launch] cannot run ", options.nproc, " processes");
  check<ConfigError>(options.threads_per_rank >= 0, "[launch] ", options.threads_per_rank, " threads per rank");
  check<ConfigError>(!options.command.empty(), "[launch] no command to run");
  check<ConfigError>(options.max_restarts >= 0 && options.max_restarts <= kMostRestarts, "[launch] ", options.max_restarts,
                     " restarts");
  const Signals signals;
  for (int restart = 0;; ++restart) {
    Attempt attempt(options, signals, restart);
    attempt.start();
    const Attempt::End end = attempt.wait();
    if (!end.another_try) return end.code;
    if (const int signal = signals.pause(options.pause)) return stopped_by(signal);
  }
}

}  // namespace sheaf::distributed
