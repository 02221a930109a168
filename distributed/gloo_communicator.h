// GlooCommunicator: ranks that are processes, over TCP. Gloo only moves bytes between ranks; the algorithms and all sums are ours.
//
// A message's tag is the running fingerprint of its collective. So ranks that disagree never receive each other's bytes: they block,
// tell each other over the monitor, and find both sides of the disagreement there. The monitor is also the first to learn of a peer's
// death or failure. So these checks cost nothing per call.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sheaf/distributed/awake_timer.h"
#include "sheaf/distributed/communicator_base.h"
#include "sheaf/distributed/job.h"
#include "sheaf/distributed/stuck_notes.h"
#include "sheaf/distributed/transport.h"

namespace gloo {
class Context;
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo

namespace sheaf {

class GlooCommunicator final : public CommunicatorBase {
 public:
  GlooCommunicator(CommunicatorGroup group, std::shared_ptr<Job> job,
                   std::shared_ptr<gloo::transport::Device> device);
  ~GlooCommunicator() override;

  std::string_view kind() const override { return "gloo"; }
  int64_t staging_bytes() const override { return staging_bytes_; }

 private:
  class Transfers;  // the messages of a collective in flight
  friend class Transfers;
  struct InFlight {
    gloo::transport::UnboundBuffer* buffer;
    uint64_t step;
    bool is_send;
  };

  void run(const Collective& call) override;
  void all_gather(const Collective& call, const std::byte* in, std::byte* out, const std::vector<int64_t>& counts);
  void reduce_scatter(const Collective& call, const std::byte* in, std::byte* out,
                      const std::vector<int64_t>& counts);
  void all_reduce(const Collective& call, std::byte* data);
  void all_to_all(const Collective& call, const std::byte* in, std::byte* out);
  void broadcast(const Collective& call, std::byte* data);
  void barrier(const Collective& call);

  std::byte* staging(int64_t half, int peer) const;
  void interrupt();
  void tick();  // on the monitor's thread

  const std::shared_ptr<Job> job_;
  StuckNotes notes_;
  const std::shared_ptr<Allocator> allocator_;
  const int64_t chunk_bytes_, staging_bytes_;
  std::byte* staging_ = nullptr;
  std::shared_ptr<gloo::Context> context_;
  std::vector<char> barrier_bytes_;

  // The call that the lane's thread is executing, for threads that interrupt it or compare notes.
  std::mutex mutex_;
  std::vector<InFlight> in_flight_;
  const Collective* running_ = nullptr;
  AwakeTimer timer_;
  std::chrono::steady_clock::time_point posted_;
  bool interrupted_ = false;
  std::string disagreement_;

  int subscription_ = -1, watcher_ = -1;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(std::shared_ptr<Job> job);
  std::string_view kind() const override { return "gloo"; }
  std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) override;
  FailureBoard& board() override { return *job_->board; }

 private:
  const std::shared_ptr<Job> job_;
  std::shared_ptr<gloo::transport::Device> device_;
};

}  // namespace sheaf
