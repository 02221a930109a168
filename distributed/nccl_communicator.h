// NcclCommunicator: ranks with one GPU each, through NCCL. Buffers on the host go through a host communicator.
//
// A call on GPUs is enqueued on the communicator's own stream, after the earlier work of the rank's stream, and the calling thread
// continues with the next one: host and GPUs never wait for each other. Each communicator has its own NCCL communicator, so gathers
// and reductions run concurrently, on streams with high priority. But one thread enqueues for all communicators of a rank, in the
// order of the rank's calls ([Note: one thread issues]).
//
// Sums are NCCL's, in its order (ring, tree or switch, by size and topology), not the order of ranks. f32 and f64 are summed as they
// are; bf16 and f16 may be rounded after every addition: reduce in f32. Bytes of every dtype arrive unchanged. Bool is reduced as u8;
// for u16 NCCL has no reductions: ConfigError.
//
// The buffers that units gather and reduce-scatter are registered with NCCL, which then transfers them without intermediate copies
// (nccl_registration.h).
//
// [Note: NCCL that hangs] A kernel of NCCL whose peer is gone spins forever, and everything after it waits forever. A thread per
// communicator watches the pending calls: when the job fails, NCCL reports an error, ranks disagree, a peer has left or a call times
// out, it raises that on the board and aborts NCCL's communicator, which ends its kernels. Events of calls that were not done by then
// throw. The communicator never blocks (ncclConfig_t::blocking = 0), so that the threads that call it can be stopped as well. The
// time of a call counts from when its buffers are ready and the calls before it are done.
//
// [Note: NCCL in graphs] A captured call becomes part of the graph and is not watched: it runs when the graph does.
// The caller waits until it is enqueued ([Note: one thread captures]). At every replay the communicator watches the
// last call of the graph, from the moment the graph begins until all of it is done; if that will not complete, NCCL's
// kernels are ended as above, and the next call or replay throws. The graph's results are undefined.
//
// NCCL's abort returns when the graphs that hold its calls are gone, and these are destroyed when the code that replays them learns
// of the failure; it also waits for the peers of the node to end theirs, as NCCL's destroy does. So both run on separate threads:
// only the communicator's destructor waits for them, and for a limited time.
//
// [Note: one thread issues] NCCL requires that the calls of several communicators on one GPU come from one thread, in an order that
// does not change from run to run ("Using multiple NCCL communicators concurrently" and "Thread Safety" in its guide): kernels of two
// communicators that begin in different orders on different GPUs can wait for each other if not all fit at once. With
// NCCL_LAUNCH_ORDER_IMPLICIT=1, which nccl.cc sets unless it is set already, NCCL makes each kernel begin after the one issued before
// it. Nothing waits longer because of that: a call already follows everything enqueued on the rank's stream before it. Streams that
// share one of the device's queues wait for each other, too. CUDA uses 8 queues unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise,
// and a rank of a pipeline has a dozen streams: init_from_env() asks for 32, the maximum, unless it is set already.
//
// Untested on NCCL itself, which needs a GPU per rank. Tests run it over a stand-in whose ranks are threads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "sheaf/distributed/awake_timer.h"
#include "sheaf/distributed/communicator_base.h"
#include "sheaf/distributed/job.h"
#include "sheaf/distributed/nccl.h"
#include "sheaf/distributed/nccl_registration.h"
#include "sheaf/distributed/stuck_notes.h"
#include "sheaf/distributed/transport.h"

namespace sheaf {

class NcclCommunicator final : public CommunicatorBase {
 public:
  /// Collective over the group, on the GPU of the current rank. `host` is a communicator of the
  /// same group, `issuer` the thread that makes all calls on this rank's GPU.
  NcclCommunicator(CommunicatorGroup group, std::shared_ptr<Job> job,
                   std::unique_ptr<Communicator> host, std::shared_ptr<LaneThread> issuer,
                   NcclLibrary& library);
  ~NcclCommunicator() override;

  std::string_view kind() const override { return "nccl"; }
  int64_t staging_bytes() const override { return host_->staging_bytes(); }
  bool can_be_captured() const override { return true; }

 private:
  using Clock = std::chrono::steady_clock;
  class Fate;
  class Point;
  /// Tracks how long a call has kept this rank waiting.
  struct Wait {
    AwakeTimer timer = {};
    Clock::time_point posted = {};
  };
  /// An enqueued call.
  struct Pending {
    Collective call;
    std::shared_ptr<const DevicePoint> done;
    std::optional<Wait> wait = {};
  };

  void run(const Collective& call) override;
  std::shared_ptr<const DevicePoint> run_on_gpu(const Collective& call) override;
  bool moves_gpu_memory() const override { return true; }
  LaneThread* gpu_lane() override { return issuer_.get(); }
  void watch_for(Pending pending);
  void watch_replays(const Collective& call);

  void connect(NcclLibrary& library);
  void issue(const Collective& call, const std::function<void()>& work);
  void settle(const Collective& call);
  void watch();
  bool finished(Pending& pending);
  void check_progress(const Collective& call, Wait& wait);
  void end(std::exception_ptr why);
  void begin_abort();
  void close();
  bool finalize();

  const std::shared_ptr<Job> job_;
  const std::unique_ptr<Communicator> host_;
  const std::shared_ptr<LaneThread> issuer_;
  const std::shared_ptr<Fate> fate_;
  StuckNotes notes_;
  std::shared_ptr<NcclComm> comm_;  // its shutdown may outlive this
  std::optional<NcclRegistration> registration_;
  std::once_flag abort_once_;
  std::future<void> abort_over_;

  std::mutex mutex_;  // guards the members below; not held while the board is raised
  std::condition_variable condition_;
  std::deque<std::shared_ptr<Pending>> pending_;
  bool stop_ = false;
  int subscription_ = -1;
  std::thread watchdog_;
};

/// Groups of two and more on GPUs; `host` carries buffers on the host, and groups of one.
class NcclTransport final : public Transport {
 public:
  /// To be created on a rank of the job, once it has its GPU.
  NcclTransport(std::shared_ptr<Job> job, std::shared_ptr<Transport> host, NcclLibrary& library)
      : job_(std::move(job)), host_(std::move(host)), library_(library) {
    if (job_->world() > 1) use_nccl_memory(library_);
  }
  std::string_view kind() const override { return "nccl"; }
  std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) override;
  FailureBoard& board() override { return *job_->board; }

 private:
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<Transport> host_;
  std::weak_ptr<LaneThread> issuer_;  // of the remaining communicators
  NcclLibrary& library_;
};

/// For jobs whose ranks all have a GPU each, set in their RankContext before the first mesh. `host` is the same job's transport
/// between CPUs. ConfigError if the build has no NCCL.
std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Job> job,
                                          std::shared_ptr<Transport> host);

}  // namespace sheaf
