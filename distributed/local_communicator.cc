#include "sheaf/distributed/local_communicator.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sheaf/core/gpu.h"
#include "sheaf/core/profile.h"
#include "sheaf/distributed/awake_timer.h"
#include "sheaf/distributed/reduce.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/idle.h"
#include "sheaf/kernels/reduce_ranks.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

const std::byte* at(const void* base, int64_t elements, const Collective& call) {
  return static_cast<const std::byte*>(base) + elements * call.element_size();
}
std::byte* at(void* base, int64_t elements, const Collective& call) {
  return static_cast<std::byte*>(base) + elements * call.element_size();
}

LocalOptions with_timeout(LocalOptions options) {
  if (options.timeout.count() == 0) options.timeout = collective_timeout();
  return options;
}

}  // namespace

class GpuLane {
 public:
  explicit GpuLane(std::shared_ptr<Gpu> gpu) : gpu_(std::move(gpu)), stream_(gpu_->make_lane()) {}
  ~GpuLane() {
    try {
      gpu_->destroy_lane(stream_);
    } catch (const CudaError&) {}  // reported by the call that failed
  }
  GpuLane(const GpuLane&) = delete;
  GpuLane& operator=(const GpuLane&) = delete;

  Gpu& gpu() { return *gpu_; }
  const Stream& stream() const { return stream_; }
  Event record() { return gpu_->record(stream_); }

 private:
  const std::shared_ptr<Gpu> gpu_;
  const Stream stream_;
};

bool LocalGroup::all_at(uint64_t meeting) const {
  return std::ranges::all_of(members_, [&](const Member& m) { return m.meetings >= meeting; });
}

LocalGroup::Outcome LocalGroup::gather(int index, const Collective& call, Clock::duration longest,
                                       const FailureBoard& board, std::vector<int>& absent) {
  std::unique_lock lock(mutex_);
  Member& me = members_[index];
  me.call = &call;
  const uint64_t meeting = ++me.meetings;
  const auto here = [&](const Member& m) { return m.meetings >= meeting; };
  const auto gone = [&](const Member& m) { return m.left && !here(m); };
  if (all_at(meeting)) {  // the last one wakes the others; leave() and wake() do so when a wait ends early
    condition_.notify_all();
    return Outcome::all_here;
  }
  bool failed = false, woken = false;
  AwakeTimer timer;
  for (Clock::duration waited{0}; !woken && waited < longest; waited = timer.look())
    woken = condition_.wait_for(lock, std::min<Clock::duration>(longest - waited, AwakeTimer::kLongestLook / 2), [&] {
      return all_at(meeting) || (failed = board.failed()) || std::ranges::any_of(members_, gone);
    });
  if (all_at(meeting)) return Outcome::all_here;
  --me.meetings;
  me.gave_up = meeting;
  if (failed) return Outcome::failed;
  // A member that announced itself, and timed out a moment before this one, is not missing.
  const auto missing = [&](const Member& m) { return !here(m) && m.gave_up < meeting; };
  for (int i = 0; i < static_cast<int>(members_.size()); ++i)
    if (i != index && (woken ? gone(members_[i]) : missing(members_[i]))) absent.push_back(i);
  return woken ? Outcome::left : Outcome::timed_out;
}

std::vector<Event> LocalGroup::meet(int index, const Event& reached) {
  std::unique_lock lock(mutex_);
  const uint64_t meeting = ++members_[index].meetings;
  members_[index].reached[meeting % 2] = reached;
  if (all_at(meeting)) condition_.notify_all();
  else condition_.wait(lock, [&] { return all_at(meeting); });
  std::vector<Event> all;
  for (const Member& m : members_) all.push_back(m.reached[meeting % 2]);
  return all;
}

void LocalGroup::pause(std::chrono::nanoseconds delay, const FailureBoard& board) {
  std::unique_lock lock(mutex_);
  condition_.wait_until(lock, Clock::now() + delay, [&] { return board.failed(); });
}

void LocalGroup::leave(int index) {
  {
    std::lock_guard lock(mutex_);
    members_[index].left = true;
  }
  condition_.notify_all();
}

void LocalGroup::wake() {
  { std::lock_guard lock(mutex_); }  // a sleeper has either seen the board's change or is asleep by now
  condition_.notify_all();
}

LocalCommunicator::LocalCommunicator(CommunicatorGroup group, std::shared_ptr<FailureBoard> board,
                                     std::shared_ptr<LocalGroup> meeting, LocalOptions options)
    : CommunicatorBase(std::move(group), std::move(board)), meeting_(std::move(meeting)), options_(options), has_links_(false) {
  const auto host_of = [&](int member) { return options_.ranks_per_host > 0 ? member / options_.ranks_per_host : 0; };
  for (const int member : group_.members)
    has_links_ = has_links_ || (host_of(member) == host_of(group_.members[static_cast<size_t>(this->rank())])
                                    ? options_.bytes_per_second > 0
                                    : options_.bytes_per_second_between_hosts > 0);
  subscription_ = board_->subscribe([meeting = meeting_](const JobFailure&) { meeting->wake(); });
}

LocalCommunicator::~LocalCommunicator() {
  finish_lane();
  board_->unsubscribe(subscription_);
  meeting_->leave(rank());
}

void LocalCommunicator::gather(const Collective& call) {
  std::vector<int> absent;
  switch (meeting_->gather(rank(), call, time_for(call, options_.timeout), *board_, absent)) {
    case LocalGroup::Outcome::all_here: return;
    case LocalGroup::Outcome::left: raise_lost(call, absent[0], "it has left the job");
    case LocalGroup::Outcome::failed: throw_failure(call, *board_->failure());
    case LocalGroup::Outcome::timed_out:
      raise_timeout(call, std::chrono::duration<double>(options_.timeout).count(), absent);
  }
}

std::string LocalCommunicator::disagreement() const {
  const auto call_of = [&](int r) -> const Collective& { return meeting_->call_of(r); };
  for (int r = 1; r < size(); ++r)
    if (call_of(r).fingerprint != call_of(0).fingerprint)
      return str("ranks disagree: rank ", group_.members[0], " calls ", call_of(0).to_string(), ", rank ",
                 group_.members[r], " calls ", call_of(r).to_string());
  if (call_of(0).op == CollectiveOp::all_to_all)
    for (int from = 0; from < size(); ++from)
      for (int to = 0; to < size(); ++to)
        if (call_of(from).counts[to] != call_of(to).recv_counts[from])
          return str("ranks disagree: rank ", group_.members[from], " sends ", call_of(from).counts[to],
                     " elements to rank ", group_.members[to], ", which expects ", call_of(to).recv_counts[from]);
  return {};
}

// Checks that all members make the same call.
void LocalCommunicator::agree(const Collective& call) {
  if (options_.delay.count() > 0) meeting_->pause(options_.delay, *board_);
  gather(call);
  if (const std::string wrong = disagreement(); !wrong.empty()) {
    meeting_->meet(rank());  // the others read this call, too
    raise(call, ExitCode::kDesync, wrong);
  }
}

std::chrono::nanoseconds LocalCommunicator::link_time(const Collective& call) const {
  const auto host_of = [&](int member) {
    return options_.ranks_per_host > 0 ? group_.members[static_cast<size_t>(member)] / options_.ranks_per_host : 0;
  };
  int elsewhere = 0;  // peers on other hosts; each sends as much
  for (int member = 0; member < size(); ++member) elsewhere += host_of(member) != host_of(rank());
  const double each = static_cast<double>(received_bytes(call, rank(), size())) / std::max(1, size() - 1);
  const auto seconds = [&](int peers, double speed) { return speed > 0 ? each * peers / speed : 0; };
  const double all = seconds(size() - 1 - elsewhere, options_.bytes_per_second) +
                     seconds(elsewhere, options_.bytes_per_second_between_hosts);
  return std::chrono::nanoseconds(std::llround(1e9 * all));
}

void LocalCommunicator::run(const Collective& call) {
  agree(call);
  if (const auto time = link_time(call); time.count() > 0) meeting_->pause(time, *board_);
  exchange(call, nullptr);
  meeting_->meet(rank());  // all have read: the buffers are returned to their owners
}

std::shared_ptr<const DevicePoint> LocalCommunicator::run_on_gpu(const Collective& call) {
  agree(call);
  if (!gpu_lane_) gpu_lane_ = std::make_unique<GpuLane>(RankContext::current().gpu);
  const Stream& stream = gpu_lane_->stream();
  std::exception_ptr failure;  // the others wait for this rank even if it fails
  Event reached;
  try {
    for (int r = 0; r < size(); ++r) meeting_->call_of(r).buffers_ready.order(stream);
    {
      const ProfileSpan span(group_.name, name(call.op), call.path, &stream);
      if constexpr (kernels::kHasCuda)
        if (const auto time = link_time(call); time.count() > 0) kernels::cuda::idle(stream, time);
      exchange(call, gpu_lane_.get());
    }
    reached = gpu_lane_->record();
  } catch (...) {
    failure = std::current_exception();
  }
  // The buffers are returned to their owners after all have read.
  for (const Event& e : meeting_->meet(rank(), reached)) e.order(stream);
  if (failure) std::rethrow_exception(failure);
  return gpu_lane_->record().point();
}

void LocalCommunicator::exchange(const Collective& call, GpuLane* gpu) {
  const int n = size(), me = rank();
  const auto copy = [&](std::byte* to, const std::byte* from, int64_t count) {
    const auto bytes = static_cast<size_t>(count * call.element_size());
    if (count == 0 || to == from) return;
    if (gpu) gpu->gpu().copy(gpu->stream(), to, from, bytes, Gpu::Copy::on_device);
    else std::memcpy(to, from, bytes);
  };
  const auto in_of = [&](int r) { return meeting_->call_of(r).in; };
  // Sums all ranks' elements [begin, begin + count) into `out`: no other rank reads or writes these elements of mine.
  const auto reduce_slice = [&](void* out, int64_t begin, int64_t count) {
    std::vector<const void*> sources(n);
    for (int r = 0; r < n; ++r) sources[r] = at(in_of(r), begin, call);
    if (!gpu) return reduce_in_order(out, sources, count, call.dtype, call.reduction);
    if constexpr (kernels::kHasCuda)
      kernels::cuda::reduce_in_order(gpu->stream(), out, sources, count, call.dtype, call.reduction);
  };

  const std::vector<int64_t> cuts = cuts_of(call.op == CollectiveOp::all_to_all ? call.recv_counts : call.counts);
  switch (call.op) {
    case CollectiveOp::all_gather:
      for (int r = 0; r < n; ++r) copy(at(call.out, cuts[r], call), at(in_of(r), 0, call), call.counts[r]);
      break;
    case CollectiveOp::reduce_scatter: reduce_slice(call.out, cuts[me], call.counts[me]); break;
    case CollectiveOp::all_reduce: {
      const int64_t count = call.counts[0], begin = even_cut(count, me, n);
      std::exception_ptr failure;  // the others wait for this rank even if it fails
      Event reduced;
      try {
        reduce_slice(at(call.out, begin, call), begin, even_cut(count, me + 1, n) - begin);
        if (gpu) reduced = gpu->record();
      } catch (...) {
        failure = std::current_exception();
      }
      const std::vector<Event> everybody = meeting_->meet(me, reduced);
      if (failure) std::rethrow_exception(failure);
      if (gpu)
        for (const Event& e : everybody) e.order(gpu->stream());
      for (int r = 0; r < n; ++r) {
        const int64_t from = even_cut(count, r, n), length = even_cut(count, r + 1, n) - from;
        copy(at(call.out, from, call), at(in_of(r), from, call), length);
      }
      break;
    }
    case CollectiveOp::all_to_all:
      for (int r = 0; r < n; ++r) {
        const Collective& peer = meeting_->call_of(r);
        copy(at(call.out, cuts[r], call), at(peer.in, cuts_of(peer.counts)[me], call), call.recv_counts[r]);
      }
      break;
    case CollectiveOp::broadcast:
      copy(at(call.out, 0, call), at(in_of(call.root), 0, call), call.counts[0]);
      break;
    case CollectiveOp::barrier: break;
  }
}

LocalJob::LocalJob(int size, LocalOptions options)
    : size(size), options(with_timeout(options)), board(std::make_shared<FailureBoard>()) {}

std::shared_ptr<LocalGroup> LocalJob::group(const std::string& name, int members) {
  std::lock_guard lock(mutex_);
  std::weak_ptr<LocalGroup>& entry = groups_[name];
  std::shared_ptr<LocalGroup> group = entry.lock();
  if (!group) entry = group = std::make_shared<LocalGroup>(members);
  return group;
}

std::unique_ptr<Communicator> LocalTransport::connect(const CommunicatorGroup& group) {
  return std::make_unique<LocalCommunicator>(group, job_->board, job_->group(group.name, group.size()),
                                             job_->options);
}

}  // namespace sheaf
