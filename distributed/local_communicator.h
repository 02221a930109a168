// LocalCommunicator: ranks that are threads of one process. Peers read each other's buffers directly; nothing is
// staged. The default for distributed tests and for research.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sheaf/distributed/communicator_base.h"
#include "sheaf/distributed/transport.h"

namespace sheaf {

struct LocalOptions {
  std::chrono::milliseconds delay{0};         ///< added to every collective, to study overlap
  double bytes_per_second = 0;                ///< at which a rank receives, as over a link; 0: no limit
  int ranks_per_host = 0;                     ///< simulates hosts of this many neighbouring ranks; 0: one host
  double bytes_per_second_between_hosts = 0;  ///< at which a rank receives from other hosts; 0: no limit
  std::chrono::milliseconds timeout{0};       ///< of one collective, from the moment it starts on its lane; 0: collective_timeout()
  int threads_per_rank = 0;                   ///< 0: default_threads(ranks)
  Device device = {};                         ///< a GPU: all ranks share it, each with a stream and an allocator of its own
};

/// The meeting point of one local group's members; shared by their communicators.
class LocalGroup {
 public:
  explicit LocalGroup(int size) : members_(size) {}

  enum class Outcome { all_here, failed, left, timed_out };
  /// Announces member `index` with its call and sleeps until all members have announced theirs, for `longest` while this process is
  /// not stopped. On any outcome but all_here the announcement is withdrawn, so that either all members continue or none does; `absent`
  /// receives those that are missing (timed_out) or gone (left).
  Outcome gather(int index, const Collective& call, std::chrono::steady_clock::duration longest,
                 const FailureBoard& board, std::vector<int>& absent);
  /// Sleeps until all members meet again. Nothing interrupts it: peers that continued together only copy and add until they meet
  /// again, and buffers must not be returned to their owners before. On a GPU they have only enqueued that work: `reached` is the
  /// event at which this member's part is done; returns those of all members.
  std::vector<Event> meet(int index, const Event& reached = {});
  /// The call that a member announced. Valid from gather() until the last meet() of the call.
  const Collective& call_of(int index) const { return *members_[index].call; }
  /// Sleeps for `delay`, or until the job fails.
  void pause(std::chrono::nanoseconds delay, const FailureBoard& board);
  void leave(int index);
  void wake();  ///< after the board has changed

 private:
  struct Member {
    const Collective* call = nullptr;
    uint64_t meetings = 0;
    Event reached[2];      // at even and odd meetings: a member may be at the next one while others still read this one's
    uint64_t gave_up = 0;  // the meeting at which it timed out
    bool left = false;
  };
  bool all_at(uint64_t meeting) const;

  std::mutex mutex_;
  std::condition_variable condition_;
  std::vector<Member> members_;
};

class GpuLane;  // a stream of the rank's GPU

/// Ranks that share a GPU: the buffers of all of them are memory of one device, copies and sums run on a stream of the
/// rank that receives.
class LocalCommunicator final : public CommunicatorBase {
 public:
  LocalCommunicator(CommunicatorGroup group, std::shared_ptr<FailureBoard> board, std::shared_ptr<LocalGroup> meeting,
                    LocalOptions options);
  ~LocalCommunicator() override;

  std::string_view kind() const override { return "local"; }
  bool takes_own_cores() const override { return !has_links_; }
  int64_t staging_bytes() const override { return 0; }

 private:
  void run(const Collective& call) override;
  std::shared_ptr<const DevicePoint> run_on_gpu(const Collective& call) override;
  bool moves_gpu_memory() const override { return true; }
  void gather(const Collective& call);
  void agree(const Collective& call);
  std::string disagreement() const;  ///< empty if all members made the same call; the same text on all of them
  std::chrono::nanoseconds link_time(const Collective& call) const;  ///< how long the data that this rank receives takes
  void exchange(const Collective& call, GpuLane* gpu);

  const std::shared_ptr<LocalGroup> meeting_;
  const LocalOptions options_;
  bool has_links_;  // has links with a limited rate
  int subscription_;
  std::unique_ptr<GpuLane> gpu_lane_;  // created by the first call on a GPU
};

/// The ranks of one process: one object, shared by the transports of its ranks.
class LocalJob {
 public:
  LocalJob(int size, LocalOptions options);

  const int size;
  const LocalOptions options;
  const std::shared_ptr<FailureBoard> board;
  std::shared_ptr<LocalGroup> group(const std::string& name, int members);

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<LocalGroup>> groups_;
};

class LocalTransport final : public Transport {
 public:
  explicit LocalTransport(std::shared_ptr<LocalJob> job) : job_(std::move(job)) {}
  std::string_view kind() const override { return "local"; }
  std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) override;
  FailureBoard& board() override { return *job_->board; }

 private:
  const std::shared_ptr<LocalJob> job_;
};

}  // namespace sheaf
