// NcclCommunicator: ranks with a GPU each, through NCCL. What lies on the host goes through a
// communicator of the host's.
//
// A call on GPUs is enqueued on the communicator's own stream, behind what the rank's stream had to
// do before it, and the thread that did it goes on to the next one: host and GPUs never wait for
// each other. Each communicator has one of NCCL's, so gathers and reductions run side by side, on
// streams with high priority. But one thread enqueues for all communicators of a rank, in the order
// in which the rank called ([Note: one thread issues]).
//
// Sums are NCCL's: their order is its own (ring, tree or switch, by size and topology), not the
// order of ranks. f32 and f64 are summed as they are; bf16 and f16 may be rounded after every
// addition: reduce in f32. Bytes arrive as they were, of every dtype. Bool is reduced as u8; for
// u16 NCCL has no reductions: ConfigError.
//
// What units gather and reduce-scatter is registered with NCCL, which then moves it without copies
// of its own (nccl_registration.h).
//
// [Note: NCCL that hangs] A kernel of NCCL whose peer is gone spins for ever, and so does
// everything behind it. A thread per communicator watches the calls that are under way: when the
// job fails, NCCL reports an error, ranks disagree, a peer has left or time is up, it raises that
// on the board and aborts NCCL's communicator; its kernels end then. Events of calls that were not
// done by then throw. The communicator never blocks (ncclConfig_t::blocking = 0), so that the
// threads that call it can be stopped as well. The time of a call counts from when its buffers are
// ready and the calls before it are done.
//
// [Note: NCCL in graphs] A call that is captured becomes part of the graph and is not watched: it
// runs when the graph does. Who makes it waits until it is enqueued ([Note: one thread captures]). At every replay the
// communicator watches the last call of the graph, from the moment the graph begins until all of it is done; when that
// will not come to its end, NCCL's kernels are ended as above, and the next call or replay throws. What the graph left
// is undefined.
//
// NCCL's abort comes back when the graphs that hold its calls are gone, and those go when whoever
// replays them hears of the failure; besides, it waits for the peers of the node to end theirs, as
// NCCL's destroy does. So both run on threads of their own: nobody here waits for them, but the
// communicator's end, and that not for ever.
//
// [Note: one thread issues] NCCL wants the calls of several communicators on one GPU from one thread,
// in an order that does not change from run to run ("Using multiple NCCL communicators concurrently"
// and "Thread Safety" in its guide): kernels of two that begin in other orders on other GPUs can wait
// for each other where not all find room at once. With NCCL_LAUNCH_ORDER_IMPLICIT=1, which nccl.cc
// sets where nothing is set, NCCL has each kernel begin behind the one that was issued before it.
// Nothing waits longer for that: a call is behind all that the rank's stream was given before it
// anyhow. Streams that share one of the device's queues wait for each other, too. CUDA takes 8 of
// these unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise, and a rank of a pipeline has a dozen
// streams: init_from_env() asks for 32, the most there are, where nothing is set.
//
// Unproven: nothing of this has run over NCCL itself, which takes a GPU per rank. Tests run it over
// a stand-in whose ranks are threads.
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
  /// How long a call has kept this rank waiting.
  struct Wait {
    Clock::time_point started, posted = {};
  };
  /// A call that is enqueued.
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
  std::shared_ptr<NcclComm> comm_;  // its end may outlive this
  std::optional<NcclRegistration> registration_;
  std::once_flag abort_once_;
  std::future<void> abort_over_;

  std::mutex mutex_;  // guards what follows; not held while the board is raised
  std::condition_variable condition_;
  std::deque<std::shared_ptr<Pending>> pending_;
  bool stop_ = false;
  int subscription_ = -1;
  std::thread watchdog_;
};

/// Groups of two and more on GPUs; `host` carries what lies on the host, and groups of one.
class NcclTransport final : public Transport {
 public:
  /// On a rank of the job, once it has its GPU.
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
  std::weak_ptr<LaneThread> issuer_;  // of the communicators that are left
  NcclLibrary& library_;
};

/// For ranks that have a GPU each, all of them, in their RankContext before the first mesh. `host`
/// is the transport that the same job has between CPUs. ConfigError where the build has no NCCL.
std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Job> job,
                                          std::shared_ptr<Transport> host);

}  // namespace sheaf
