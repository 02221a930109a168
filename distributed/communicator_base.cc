#include "sheaf/distributed/communicator_base.h"

#include <cstdio>
#include <cstring>
#include <thread>

#include "sheaf/core/gpu.h"
#include "sheaf/core/profile.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/in_turn.h"

namespace sheaf {
namespace {

/// The point at which both are reached.
class BothPoints final : public DevicePoint {
 public:
  BothPoints(Event a, Event b) : a_(std::move(a)), b_(std::move(b)) {}
  void sync() const override { a_.sync(), b_.sync(); }
  bool reached() const override { return a_.ready() && b_.ready(); }
  void order(const Stream& stream) const override { a_.order(stream), b_.order(stream); }

 private:
  const Event a_, b_;
};

bool consequential(ExitCode code) { return code != ExitCode::kTimeout && code != ExitCode::kDesync; }

}  // namespace

void run_alone(const Collective& call) {
  if (!call.in || call.in == call.out || call.counts.empty() || call.counts[0] == 0) return;
  const auto bytes = static_cast<size_t>(call.counts[0] * call.element_size());
  if (!call.on_gpu) {
    std::memmove(call.out, call.in, bytes);
    return;
  }
  Gpu& gpu = *RankContext::current().gpu;
  gpu.copy(gpu.compute(), call.out, call.in, bytes, Gpu::Copy::on_device);
}

Event CommunicatorBase::all_gather(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                                   std::string_view path) {
  check_counts("all_gather", counts);
  return submit({.op = CollectiveOp::all_gather, .dtype = dtype, .counts = {counts.begin(), counts.end()},
                 .in = in, .out = out, .path = std::string(path)});
}

Event CommunicatorBase::reduce_scatter(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                                       std::string_view path) {
  check_counts("reduce_scatter", counts);
  return submit({.op = CollectiveOp::reduce_scatter, .dtype = dtype, .counts = {counts.begin(), counts.end()},
                 .in = in, .out = out, .path = std::string(path)});
}

Event CommunicatorBase::all_reduce(void* data, int64_t count, DType dtype, Reduction reduction,
                                   std::string_view path) {
  check<CommError>(count >= 0, "[all_reduce] negative count ", count);
  return submit({.op = CollectiveOp::all_reduce, .dtype = dtype, .reduction = reduction, .counts = {count},
                 .in = data, .out = data, .path = std::string(path)});
}

Event CommunicatorBase::all_to_all(const void* in, std::span<const int64_t> send_counts, void* out,
                                   std::span<const int64_t> recv_counts, DType dtype, std::string_view path) {
  check_counts("all_to_all", send_counts);
  check_counts("all_to_all", recv_counts);
  check<CommError>(send_counts[rank()] == recv_counts[rank()], "[all_to_all] rank ", group_.world_rank(), " sends ",
                   send_counts[rank()], " elements to itself but expects ", recv_counts[rank()]);
  return submit({.op = CollectiveOp::all_to_all, .dtype = dtype,
                 .counts = {send_counts.begin(), send_counts.end()},
                 .recv_counts = {recv_counts.begin(), recv_counts.end()}, .in = in, .out = out,
                 .path = std::string(path)});
}

Event CommunicatorBase::broadcast(void* data, int64_t bytes, int root, std::string_view path) {
  check<CommError>(bytes >= 0, "[broadcast] negative size ", bytes);
  check<CommError>(root >= 0 && root < size(), "[broadcast] root ", root, " in a group of ", size());
  return submit({.op = CollectiveOp::broadcast, .root = root, .counts = {bytes}, .in = data, .out = data,
                 .path = std::string(path)});
}

Event CommunicatorBase::barrier(std::string_view path) {
  return submit({.op = CollectiveOp::barrier, .path = std::string(path)});
}

void CommunicatorBase::check_counts(const char* op, std::span<const int64_t> counts) const {
  if (counts.size() != static_cast<size_t>(size()))
    fail<CommError>('[', op, "] ", counts.size(), " counts for a group of ", size());
  for (int64_t c : counts)
    if (c < 0) fail<CommError>('[', op, "] negative count ", c);
}

Event CommunicatorBase::submit(Collective call) {
  const std::vector<Event> behind = std::exchange(behind_, {});
  call.waited_for = std::exchange(waited_for_, false);
  call.has_deadline = std::exchange(has_deadline_, true);
  call.of = std::exchange(of_, {});
  throw_if_failed(call);
  Gpu* const gpu = RankContext::current().gpu.get();
  call.captured = gpu && size() > 1 && gpu->capturing();
  if (call.captured && !(can_be_captured() && gpu->holds(call.out)))
    fail<ConfigError>('[', name(call.op), "] ", path_label(call.path), ": a graph cannot hold this call: ",
                      can_be_captured() ? "its memory is the host's"
                                        : str("'", kind(), "' makes ranks meet on the host"));
  if (gpu && gpu->holds(call.out)) {
    if (size() > 1 && !moves_gpu_memory())
      fail<ConfigError>('[', name(call.op), "] ", path_label(call.path), ": '", kind(), "' moves memory of the host, not of ",
                        gpu->device().to_string());
    call.on_gpu = true;
    if (size() > 1) call.buffers_ready = gpu->record(gpu->compute());
    for (const Event& event : behind) {
      if (size() > 1) call.buffers_ready = Event::at(std::make_shared<BothPoints>(call.buffers_ready, event));
      else event.order(gpu->compute());
    }
  } else {
    for (const Event& event : behind) event.sync();
  }
  call.call_hash = hash_call(call);
  auto shared = std::make_shared<Collective>(std::move(call));
  {
    std::lock_guard lock(mutex_);
    shared->sequence = ++sequence_;
    shared->fingerprint = fingerprint_ = chain(fingerprint_, shared->call_hash);
    bytes_received_ += received_bytes(*shared, rank(), size());
    flight_.push_back({shared->sequence, shared->fingerprint, shared->to_string()});
    if (flight_.size() > kFlightEntries) flight_.pop_front();
  }
  Event event = dispatch(shared);
  // [Note: one thread captures] Two threads must not work on one CUDA graph at once, not even if each captures its own stream. While
  // the lane, and NCCL's thread after it, record the call, this one does nothing.
  if (shared->captured) event.point();
  else if (shared->on_gpu && CollectivesInTurn::active()) event.sync();
  return event;
}

Event CommunicatorBase::dispatch(std::shared_ptr<Collective> call) {
  if (size() == 1) {
    run_alone(*call);
    return {};
  }
  LaneThread* lane = call->on_gpu ? gpu_lane() : nullptr;
  if (call->waited_for && !call->on_gpu && (!lane_ || lane_->idle())) {
    const ProfileSpan waits(Profile::kCompute, "waits", {});
    execute(*call);
    return {};
  }
  if (!lane) {
    if (!lane_) lane_ = std::make_unique<LaneThread>();
    lane = lane_.get();
  }
  return lane->submit([this, call = std::move(call)] { return execute(*call); });
}

std::shared_ptr<const DevicePoint> CommunicatorBase::execute(const Collective& call) {
  try {
    throw_if_failed(call);
    if (call.on_gpu) return run_on_gpu(call);
    const ProfileSpan span(group_.name, name(call.op), call.path);
    run(call);
    return nullptr;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    raise(call, ExitCode::kPeerLost, e.what());
  }
}

void CommunicatorBase::abort(const std::string& reason) {
  board_->raise({group_.world_rank(), ExitCode::kPeerLost, reason});
}

uint64_t CommunicatorBase::sequence() const {
  std::lock_guard lock(mutex_);
  return sequence_;
}

uint64_t CommunicatorBase::fingerprint() const {
  std::lock_guard lock(mutex_);
  return fingerprint_;
}

int64_t CommunicatorBase::bytes_received() const {
  std::lock_guard lock(mutex_);
  return bytes_received_;
}

std::vector<FlightEntry> CommunicatorBase::flight_record() const {
  std::lock_guard lock(mutex_);
  return {flight_.begin(), flight_.end()};
}

std::optional<FlightEntry> CommunicatorBase::flight_entry(uint64_t sequence) const {
  std::lock_guard lock(mutex_);
  if (flight_.empty() || sequence < flight_.front().sequence || sequence > flight_.back().sequence) return std::nullopt;
  return flight_[sequence - flight_.front().sequence];
}

CommError CommunicatorBase::error(const Collective& call, ExitCode code, const std::string& what) const {
  std::string group;
  if (size() != group_.world) {
    std::vector<int> all(size());
    for (int i = 0; i < size(); ++i) all[i] = i;
    group = str(" in group {", ranks_text(all), "}");
  }
  // A call that was refused before it was numbered has no sequence number.
  const std::string where = str(call.sequence ? str(" at sequence ", call.sequence) : "", " (", path_label(call.path), ')');
  return CommError(str('[', name(call.op), "] rank ", group_.world_rank(), " of ", group_.world, group, ": ", what,
                       where), code);
}

void CommunicatorBase::raise(const Collective& call, ExitCode code, const std::string& what) const {
  CommError e = error(call, code, what);
  if (!board_->raise({group_.world_rank(), code, e.what()})) throw_if_failed(call);
  throw e;
}

void CommunicatorBase::throw_failure(const Collective& call, const JobFailure& failure) const {
  if (failure.rank == group_.world_rank()) {
    throw error(call, failure.code, str("this rank has failed already: ", failure.reason));
  }
  const ExitCode code = consequential(failure.code) ? ExitCode::kPeerLost : failure.code;
  throw error(call, code, str("rank ", failure.rank, " failed: ", failure.reason));
}

void CommunicatorBase::throw_if_failed(const Collective& call) const {
  if (auto failure = board_->failure()) throw_failure(call, *failure);
}

void CommunicatorBase::await_explanation(const Collective& call, const std::function<bool()>& over) const {
  using Clock = std::chrono::steady_clock;
  for (const auto until = Clock::now() + kExplanationTime; Clock::now() < until && !over();) {
    throw_if_failed(call);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void CommunicatorBase::raise_lost(const Collective& call, int member, const std::string& how) const {
  board_->raise({group_.members[member], ExitCode::kPeerLost, how});
  throw_failure(call, *board_->failure());
}

void CommunicatorBase::raise_timeout(const Collective& call, double seconds, const std::vector<int>& missing) const {
  char after[32];
  std::snprintf(after, sizeof after, "%.1f", seconds);
  CommError e = error(call, ExitCode::kTimeout, str("time-out after ", after, " s"));
  CommError full(str(e.what(), ", missing ranks: ", ranks_text(missing)), ExitCode::kTimeout);
  if (!board_->raise({group_.world_rank(), ExitCode::kTimeout, full.what()})) throw_if_failed(call);
  throw full;
}

std::string CommunicatorBase::ranks_text(const std::vector<int>& indices) const {
  std::string out;
  for (int i : indices) out += str(out.empty() ? "" : ", ", group_.members[i]);
  return out.empty() ? "none" : out;
}

}  // namespace sheaf
