#include "sheaf/distributed/nccl_communicator.h"

#include "sheaf/core/profile.h"
#include "sheaf/distributed/nccl_calls.h"
#include "sheaf/kernels/cuda/config.h"

namespace sheaf {
namespace {

using std::chrono::milliseconds;

// How often pending calls are checked; failures of the job are noticed at once.
constexpr milliseconds kTick{20};
// When a communicator ends, this rank's calls are done, and what it sends is in flight: peers that end later need nothing from it.
constexpr auto kFarewell = std::chrono::seconds(1);
// How long the destructor waits for an abort, whose graphs are gone by then unless the device has failed.
constexpr auto kAbortTime = std::chrono::seconds(3);

/// Runs `f` on a separate thread, which may outlive the communicator.
std::future<void> apart(std::function<void()> f) {
  std::promise<void> over;
  std::future<void> out = over.get_future();
  std::thread([f = std::move(f), over = std::move(over)]() mutable {
    f();
    f = nullptr;
    over.set_value();
  }).detach();
  return out;
}

}  // namespace

/// Why a communicator was aborted, for all holders of its events. Set before NCCL's kernels are ended, so that their partial outputs
/// are not mistaken for results.
class NcclCommunicator::Fate {
 public:
  void settle(std::exception_ptr why) {
    std::lock_guard lock(mutex_);
    if (!why_) why_ = std::move(why);
  }
  void check() const {
    std::lock_guard lock(mutex_);
    if (why_) std::rethrow_exception(why_);
  }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr why_;
};

class NcclCommunicator::Point final : public DevicePoint {
 public:
  Point(std::shared_ptr<const DevicePoint> point, std::shared_ptr<const Fate> fate)
      : point_(std::move(point)), fate_(std::move(fate)) {}
  void sync() const override {
    point_->sync();
    fate_->check();
  }
  bool reached() const override { return point_->reached(); }
  void order(const Stream& stream) const override {
    fate_->check();
    point_->order(stream);
  }

 private:
  const std::shared_ptr<const DevicePoint> point_;
  const std::shared_ptr<const Fate> fate_;
};

NcclCommunicator::NcclCommunicator(CommunicatorGroup group, std::shared_ptr<Job> job,
                                   std::unique_ptr<Communicator> host,
                                   std::shared_ptr<LaneThread> issuer, NcclLibrary& library)
    : CommunicatorBase(std::move(group), job->board),
      job_(std::move(job)),
      host_(std::move(host)),
      issuer_(std::move(issuer)),
      fate_(std::make_shared<Fate>()),
      notes_(group_, *job_->monitor) {
  connect(library);
  registration_.emplace(*comm_, RankContext::current().gpu, *host_, group_.name);
  subscription_ = board_->subscribe([this](const JobFailure&) {
    { std::lock_guard lock(mutex_); }  // the watchdog has either seen the board's change or is asleep by now
    condition_.notify_all();
  });
  watchdog_ = std::thread([this] { watch(); });
}

NcclCommunicator::~NcclCommunicator() {
  finish_lane();
  issuer_->submit([]() -> std::shared_ptr<const DevicePoint> { return nullptr; }).sync();  // after its last call
  {
    std::unique_lock lock(mutex_);
    condition_.wait(lock, [&] { return pending_.empty(); });
    stop_ = true;
  }
  condition_.notify_all();
  watchdog_.join();
  board_->unsubscribe(subscription_);
  close();
}

void NcclCommunicator::connect(NcclLibrary& library) {
  const Deadline deadline = Clock::now() + job_->rendezvous.init_timeout;
  const std::string key = "nccl/" + group_.name;
  std::string id;
  if (rank() == 0)
    job_->store->set(key, id = library.unique_id(), deadline);
  else
    id = job_->store->get(key, deadline, waits_for(group_, 0));

  const std::string me = str("[mesh] rank ", group_.world_rank(), " of ", group_.world, ": ");
  comm_ = library.join(id, size(), rank(), group_.name);
  for (;; std::this_thread::sleep_for(milliseconds(1))) {
    if (const auto failure = board_->failure())
      throw CommError(str(me, "rank ", failure->rank, " failed: ", failure->reason),
                      ExitCode::kPeerLost);
    std::string why;
    switch (comm_->state(why)) {
      case NcclComm::State::ready:
        return;
      case NcclComm::State::failed:
        throw CommError(str(me, "cannot connect ", group_.name, ": ", why), ExitCode::kPeerLost);
      case NcclComm::State::busy:
        break;
    }
    if (Clock::now() >= deadline)
      throw CommError(str(me, "time-out after ", job_->rendezvous.init_timeout.count() / 1000,
                          " s: NCCL connects ", group_.name),
                      ExitCode::kTimeout);
  }
}

void NcclCommunicator::close() {
  if (!finalize()) {
    begin_abort();
    abort_over_.wait_for(kAbortTime);
  }
  // NCCL's destroy waits for the peers of this node to end theirs, and some may never do so.
  apart([comm = std::exchange(comm_, nullptr)]() mutable { comm = nullptr; }).wait_for(kFarewell);
}

bool NcclCommunicator::finalize() {
  try {
    if (!board_->failed()) {
      registration_->end();
      comm_->finalize();
      const auto until = Clock::now() + kFarewell;
      std::string why;
      NcclComm::State state;
      while ((state = comm_->state(why)) == NcclComm::State::busy && !board_->failed() &&
             Clock::now() < until)
        std::this_thread::sleep_for(milliseconds(1));
      return state == NcclComm::State::ready;
    }
  } catch (const std::exception&) {
  }  // all calls are done: there is no event left to fail
  return false;
}

// --- calls: on the host's lane or the issuer ---

void NcclCommunicator::run(const Collective& call) {
  const auto issue = [&]() -> Event {
    switch (call.op) {
      case CollectiveOp::all_gather:
        return host_->all_gather(call.in, call.out, call.counts, call.dtype, call.path);
      case CollectiveOp::reduce_scatter:
        return host_->reduce_scatter(call.in, call.out, call.counts, call.dtype, call.path);
      case CollectiveOp::all_reduce:
        return host_->all_reduce(call.out, call.counts[0], call.dtype, call.reduction, call.path);
      case CollectiveOp::all_to_all:
        return host_->all_to_all(call.in, call.counts, call.out, call.recv_counts, call.dtype,
                                 call.path);
      case CollectiveOp::broadcast:
        return host_->broadcast(call.out, call.counts[0], call.root, call.path);
      case CollectiveOp::barrier:
        return host_->barrier(call.path);
    }
    return {};
  };
  if (!call.has_deadline) host_->next_call_has_no_deadline();
  host_->label_next_call(call.of);
  host_->next_call_is_awaited();
  issue().sync();
}

std::shared_ptr<const DevicePoint> NcclCommunicator::run_on_gpu(const Collective& call) {
  check_nccl_can(call);
  try {
    std::optional<ProfileSpan> span;
    issue(call, [&] {
      registration_->catch_up();
      call.buffers_ready.order(comm_->stream());
      span.emplace(group_.name, name(call.op), call.path, &comm_->stream());
      comm_->group([&] { call_nccl(*comm_, call, size(), rank()); });
    });
    settle(call);
    span.reset();
    std::shared_ptr<const DevicePoint> done;
    issue(call, [&] { done = comm_->record().point(); });
    if (call.captured)
      watch_replays(call);
    else
      watch_for({.call = call, .done = done});
    return std::make_shared<Point>(std::move(done), fate_);
  } catch (...) {
    end(std::current_exception());
    throw;
  }
}

void NcclCommunicator::watch_for(Pending pending) {
  std::lock_guard lock(mutex_);
  pending_.push_back(std::make_shared<Pending>(std::move(pending)));
  if (pending_.size() == 1) condition_.notify_all();
}

void NcclCommunicator::watch_replays(const Collective& call) {
  Collective replayed = call;
  replayed.buffers_ready = {};
  RankContext::current().gpu->at_replays(
      this, [this, replayed](const Event& begun, const Event& done) mutable {
        replayed.buffers_ready = begun;
        watch_for({.call = replayed, .done = done.point()});  // before anything throws
        fate_->check();
        throw_if_failed(replayed);
      });
}

/// Rewords exceptions of CUDA and NCCL for this call.
void NcclCommunicator::issue(const Collective& call, const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& e) {
    throw_if_failed(call);
    raise(call, ExitCode::kPeerLost, e.what());
  }
}

/// Waits until NCCL has enqueued its work: the first calls connect to peers before.
void NcclCommunicator::settle(const Collective& call) {
  constexpr int kSpins = 1000;
  Wait wait;
  std::string why;
  for (int i = 0; comm_->state(why) != NcclComm::State::ready; ++i) {
    check_progress(call, wait);
    if (i < kSpins)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// --- watching ---

void NcclCommunicator::end(std::exception_ptr why) {
  fate_->settle(std::move(why));
  begin_abort();
}

void NcclCommunicator::begin_abort() {
  std::call_once(abort_once_, [&] { abort_over_ = apart([comm = comm_] { comm->abort(); }); });
}

void NcclCommunicator::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (pending_.empty()) {
      condition_.wait(lock);
      continue;
    }
    const std::shared_ptr<Pending> first = pending_.front();
    lock.unlock();
    bool done = false, failed = false;
    try {
      done = finished(*first);
    } catch (...) {
      failed = true;
      end(std::current_exception());
    }
    lock.lock();
    if (done) pending_.pop_front();
    if (failed) pending_.clear();
    if (pending_.empty())
      condition_.notify_all();  // the destructor waits for it
    else if (!done)
      condition_.wait_for(lock, kTick);
  }
}

bool NcclCommunicator::finished(Pending& pending) {
  const Collective& call = pending.call;
  bool started = pending.wait.has_value();
  try {
    if (pending.done->reached()) return true;
    started = started || call.buffers_ready.ready();
  } catch (const std::exception& e) {  // the device has failed
    throw_if_failed(call);
    raise(call, ExitCode::kPeerLost, e.what());
  }
  throw_if_failed(call);
  if (!started) return false;
  if (!pending.wait) pending.wait.emplace();
  check_progress(call, *pending.wait);
  return false;
}

/// Throws, worded for this call, if it will not complete.
void NcclCommunicator::check_progress(const Collective& call, Wait& wait) {
  throw_if_failed(call);
  std::string why;
  if (comm_->state(why) == NcclComm::State::failed) {
    await_explanation(call, [] { return false; });
    raise(call, ExitCode::kPeerLost, "NCCL: " + why);
  }

  const auto waited = wait.timer.look();
  if (waited < Monitor::kTick) return;
  if (const auto now = Clock::now(); now - wait.posted >= Monitor::kNotePeriod) {
    wait.posted = now;
    notes_.post(call);
  }
  const std::string wrong =
      notes_.disagreement(call, [&](uint64_t sequence) { return flight_entry(sequence); });
  if (!wrong.empty()) raise(call, ExitCode::kDesync, wrong);

  std::vector<int> others;
  for (int m = 0; m < size(); ++m)
    if (m != rank()) others.push_back(m);
  if (waited >= kExplanationTime)
    for (int m : others)
      if (job_->monitor->has_left(group_.members[m])) raise_lost(call, m, "it has left the job");
  const auto timeout = time_for(call, job_->rendezvous.timeout);
  if (waited >= timeout)
    raise_timeout(
        call, std::chrono::duration<double>(timeout).count(),
        notes_.missing(call, others, Monitor::knows_who_waits(timeout)));
}

// --- NcclTransport ---

std::unique_ptr<Communicator> NcclTransport::connect(const CommunicatorGroup& group) {
  if (group.size() == 1) return host_->connect(group);
  check<ConfigError>(RankContext::current().gpu != nullptr, "[mesh] rank ", group.world_rank(),
                     " has no GPU: 'nccl' ", "is for ranks that have one each");
  CommunicatorGroup on_host = group;
  on_host.name += "/host";
  std::shared_ptr<LaneThread> issuer = issuer_.lock();
  if (!issuer) issuer_ = issuer = std::make_shared<LaneThread>();
  return std::make_unique<NcclCommunicator>(group, job_, host_->connect(on_host),
                                            std::move(issuer), library_);
}

std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Job> job,
                                          std::shared_ptr<Transport> host) {
  if constexpr (kernels::kHasCuda)
    return std::make_shared<NcclTransport>(std::move(job), std::move(host), nccl_library());
  else
    fail<ConfigError>("[nccl] this build has no CUDA");
}

}  // namespace sheaf
