// The messages of a collective over Gloo: which are awaited, and why one does not arrive.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gloo/transport/unbound_buffer.h>

#include "sheaf/distributed/gloo_communicator.h"

namespace sheaf {

/// The messages of one collective in flight. One buffer object each, so that a completion names its peer. Used from the lane's
/// thread; the communicator's interrupt() ends its waits, also when the call's time is over: Gloo's own time-outs go on while the
/// process is stopped.
class GlooCommunicator::Transfers {
 public:
  Transfers(GlooCommunicator& comm, const Collective& call) : comm_(comm), call_(call) {}
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  /// Posts a message of `step`. Throws the job's failure, if there is one.
  void send(int peer, const void* data, int64_t bytes, uint64_t step) {
    post(true, peer, const_cast<void*>(data), bytes, step);
  }
  void receive(int peer, void* data, int64_t bytes, uint64_t step) { post(false, peer, data, bytes, step); }

  /// Sleeps until the messages of `step` are complete, receives before sends.
  void finish(uint64_t step);

 private:
  struct Message {
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    int peer;
    uint64_t step;
    bool is_send;
  };

  uint64_t tag(int from, int to, int64_t bytes, uint64_t step) const;
  void post(bool is_send, int peer, void* data, int64_t bytes, uint64_t step);
  bool is_late() const;
  static bool completed(Message& m, std::chrono::milliseconds timeout);
  void wait_for(Message& m);
  /// A message to or from `peer` did not get through: finds out why and throws it.
  [[noreturn]] void explain(int peer, const std::string& reason);
  /// Members whose messages have not arrived and that have not reported waiting in the same call.
  std::vector<int> missing();

  GlooCommunicator& comm_;
  const Collective& call_;
  std::vector<Message> messages_;
};

}  // namespace sheaf
