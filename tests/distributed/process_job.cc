#include "sheaf/tests/distributed/process_job.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sheaf/distributed/socket.h"

namespace sheaf::testing {

std::vector<ProcessResult> run_processes(const ProcessJob& job) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Socket listener = listen_on("127.0.0.1", 0);
  const int port = local_port(listener);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");

  std::vector<ProcessResult> results(job.ranks);
  std::vector<pid_t> pids(job.ranks, -1);
  std::vector<int> pipes(job.ranks, -1);
  for (int r = 0; r < job.ranks; ++r) {
    if (std::count(job.absent.begin(), job.absent.end(), r)) continue;
    std::vector<std::string> variables = job.environment;  // the first variable of a name counts
    if (job.own_variables) {
      const std::string n = std::to_string(job.ranks), rank = std::to_string(r);
      for (std::string v : {"RANK=" + rank, "WORLD_SIZE=" + n, "LOCAL_RANK=" + rank, "LOCAL_WORLD_SIZE=" + n,
                            std::string("MASTER_ADDR=127.0.0.1"), "MASTER_PORT=" + std::to_string(port),
                            "SHEAF_LISTEN_FD=" + std::to_string(listener.fd())})
        variables.push_back(v);
    }
    for (char** e = environ; *e; ++e) variables.emplace_back(*e);
    std::vector<char*> env;
    for (std::string& v : variables) env.push_back(v.data());
    env.push_back(nullptr);
    std::string worker = "--worker=" + job.scenario, self = program;
    char* arguments[] = {self.data(), worker.data(), nullptr};
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    pids[r] = fork();
    if (pids[r] == 0) {
      dup2(ends[1], 1);
      dup2(ends[1], 2);
      if (job.own_variables && r == 0) fcntl(listener.fd(), F_SETFD, 0);
      execve(arguments[0], arguments, env.data());
      _exit(127);
    }
    close(ends[1]);
    pipes[r] = ends[0];
  }
  listener.close();

  bool signalled = job.signal == 0;
  const auto any = [&] { return std::any_of(pids.begin(), pids.end(), [](pid_t p) { return p > 0; }); };
  std::vector<bool> stopped(job.ranks);
  bool killed = false;
  std::vector<pollfd> polled(job.ranks);
  while (any() || std::any_of(pipes.begin(), pipes.end(), [](int p) { return p >= 0; })) {
    for (int r = 0; r < job.ranks; ++r) polled[r] = {pipes[r], POLLIN, 0};
    poll(polled.data(), polled.size(), 5);
    for (int r = 0; r < job.ranks; ++r) {
      if (pipes[r] >= 0 && polled[r].revents) {
        char chunk[4096];
        const ssize_t n = read(pipes[r], chunk, sizeof chunk);
        if (n > 0) results[r].output.append(chunk, n);
        else close(std::exchange(pipes[r], -1));
      }
      int status;
      if (pids[r] <= 0 || waitpid(pids[r], &status, WNOHANG | WUNTRACED) != pids[r]) continue;
      if (WIFSTOPPED(status)) {
        stopped[r] = !job.goes_on;
      } else {
        results[r].code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        results[r].seconds = elapsed();
        pids[r] = -1;
      }
    }
    if (!signalled && results[0].output.find(job.signal_after) != std::string::npos) {
      signalled = true;
      if (pids[0] > 0) kill(pids[0], job.signal);
    }
    bool only_stopped = any();
    for (int r = 0; r < job.ranks; ++r) only_stopped = only_stopped && (pids[r] <= 0 || stopped[r]);
    if (only_stopped || (!killed && elapsed() > job.limit)) {
      killed = true;
      for (pid_t p : pids)
        if (p > 0) kill(p, SIGKILL);
    }
  }
  return results;
}

}  // namespace sheaf::testing
