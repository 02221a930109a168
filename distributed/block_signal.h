// BlockSignal: a call whose failure also raises a signal only fails.
#pragma once

#include <csignal>
#include <ctime>

namespace sheaf {

/// During its lifetime this thread's calls do not deliver `signal`, such as SIGPIPE, which ends a process by default; one that they have
/// raised is forgotten. Threads that are started meanwhile inherit the mask.
class BlockSignal {
 public:
  explicit BlockSignal(int signal) : signal_(signal) {
    sigemptyset(&alone_);
    sigaddset(&alone_, signal);
    pthread_sigmask(SIG_BLOCK, &alone_, &previous_);
  }
  ~BlockSignal() {
    // One that is pending would be delivered at once.
    const timespec none{};
    if (!sigismember(&previous_, signal_))
      while (sigtimedwait(&alone_, nullptr, &none) == signal_) {
      }
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }
  BlockSignal(const BlockSignal&) = delete;
  BlockSignal& operator=(const BlockSignal&) = delete;

 private:
  const int signal_;
  sigset_t alone_, previous_;
};

}  // namespace sheaf
