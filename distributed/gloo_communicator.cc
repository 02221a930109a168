#include "sheaf/distributed/gloo_communicator.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include <gloo/context.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "sheaf/distributed/block_signal.h"
#include "sheaf/distributed/gloo_transfers.h"
#include "sheaf/distributed/local_communicator.h"
#include "sheaf/distributed/reduce.h"
#include "sheaf/distributed/staging.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

// Distinguishes an all_gather's messages from those of a reduce_scatter in the same call.
constexpr uint64_t kGatherStep = uint64_t{1} << 32;

/// Gloo writes to sockets in the caller's thread without MSG_NOSIGNAL: a dead peer would kill us. Its threads inherit the mask.
struct BlockSigpipe : BlockSignal {
  BlockSigpipe() : BlockSignal(SIGPIPE) {}
};

/// Our store with Gloo's interface.
class GlooStore final : public gloo::rendezvous::Store {
 public:
  GlooStore(StoreClient& store, const CommunicatorGroup& group, Deadline deadline) : store_(store), group_(group), deadline_(deadline) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(path(key), {data.data(), data.size()}, deadline_);
  }
  /// A key that is a rank's number has its addresses, one for each other rank. This rank reads the one that is for it, so only that is
  /// fetched: all ranks fetch from all others. The rest are zeros.
  std::vector<char> get(const std::string& key) override {
    const std::string own = fetch(key);
    if (!is_rank(key)) return {own.begin(), own.end()};
    std::vector<char> all(own.size() * parts(), 0);
    std::ranges::copy(own, all.begin() + static_cast<std::ptrdiff_t>(own.size() * part(key)));
    return all;
  }
  void wait(const std::vector<std::string>&) override {}  // Gloo gets what it has waited for, and get() waits

 private:
  static bool is_rank(const std::string& key) { return key.find_first_not_of("0123456789") == std::string::npos; }
  std::string path(const std::string& key) const { return group_.name + '/' + key; }
  uint64_t parts() const { return static_cast<uint64_t>(group_.size() - 1); }
  uint64_t part(const std::string& key) const { return static_cast<uint64_t>(group_.index - (std::stoi(key) < group_.index)); }
  std::string fetch(const std::string& key) {
    const std::string what = awaited(key);
    return is_rank(key) ? store_.get_part(path(key), part(key), parts(), deadline_, what) : store_.get(path(key), deadline_, what);
  }
  std::string awaited(const std::string& key) const {  // of "3" or "rank_3"
    const std::string number = key.substr(key.find_last_not_of("0123456789") + 1);
    const int member = number.empty() || number.size() > 6 ? group_.size() : std::stoi(number);
    return member < group_.size() ? waits_for(group_, member) : "";
  }

  StoreClient& store_;
  const CommunicatorGroup& group_;
  const Deadline deadline_;
};

// Gloo's exceptions differ in their texts alone.
ExitCode code_of(std::string_view gloo_error) {
  const auto says = [&](std::string_view part) { return gloo_error.find(part) != std::string_view::npos; };
  if (says("Connect timeout")) return ExitCode::kTimeout;
  if (says("Too many open files")) return ExitCode::kIo;  // it is this rank that has failed
  return ExitCode::kPeerLost;
}

void throw_if_peer_failed(const FailureBoard& board, const std::string& me) {
  if (const auto failure = board.failure())
    throw CommError(str(me, "rank ", failure->rank, " failed: ", failure->reason), ExitCode::kPeerLost);
}

int64_t largest(const std::vector<int64_t>& counts) { return *std::max_element(counts.begin(), counts.end()); }

}  // namespace

GlooTransport::GlooTransport(std::shared_ptr<Job> job) : job_(std::move(job)) {
  const BlockSigpipe block;
  gloo::transport::tcp::attr attr;
  attr.hostname = job_->store->local_address();
  try {
    device_ = gloo::transport::tcp::CreateDevice(attr);
  } catch (const std::exception& e) {
    fail<IoError>("[gloo] cannot listen on ", attr.hostname, ": ", e.what());
  }
}

std::unique_ptr<Communicator> GlooTransport::connect(const CommunicatorGroup& group) {
  if (group.size() == 1)
    return std::make_unique<LocalCommunicator>(group, job_->board, std::make_shared<LocalGroup>(1), LocalOptions{});
  return std::make_unique<GlooCommunicator>(group, job_, device_);
}

GlooCommunicator::GlooCommunicator(CommunicatorGroup group, std::shared_ptr<Job> job,
                                   std::shared_ptr<gloo::transport::Device> device)
    : CommunicatorBase(std::move(group), job->board), job_(std::move(job)), notes_(group_, *job_->monitor),
      allocator_(RankContext::current().cpu), chunk_bytes_(gloo_chunk_bytes(size())),
      staging_bytes_(gloo_staging_bytes(size())), barrier_bytes_(static_cast<size_t>(size()) + 1) {
  auto context = std::make_shared<gloo::rendezvous::Context>(rank(), size());
  const auto longest = std::min<std::chrono::milliseconds>(std::chrono::seconds(30), job_->rendezvous.init_timeout);
  context->setTimeout(longest / 5);  // Gloo waits five times as long for a connection
  GlooStore store(*job_->store, group_, Clock::now() + job_->rendezvous.init_timeout);
  const std::string me = str("[mesh] rank ", group_.world_rank(), " of ", group_.world, ": ");
  try {
    const BlockSigpipe block;
    context->connectFullMesh(store, device);
  } catch (const Error&) {
    throw_if_peer_failed(*board_, me);
    throw;
  } catch (const std::exception& e) {
    const ExitCode code = code_of(e.what());
    // A peer that dies takes its connections along, which may be noticed here before the monitor says why.
    for (const auto until = Clock::now() + kExplanationTime; code != ExitCode::kIo && Clock::now() < until;) {
      throw_if_peer_failed(*board_, me);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    throw CommError(str(me, "cannot connect ", group_.name, ": ", e.what()), code);
  }
  context_ = std::move(context);
  staging_ = static_cast<std::byte*>(allocator_->allocate(static_cast<size_t>(staging_bytes_)));
  subscription_ = board_->subscribe([this](const JobFailure&) { interrupt(); });
  watcher_ = job_->monitor->watch([this] { tick(); });
}

GlooCommunicator::~GlooCommunicator() {
  finish_lane();
  job_->monitor->unwatch(watcher_);
  board_->unsubscribe(subscription_);
  context_.reset();
  allocator_->free(staging_, static_cast<size_t>(staging_bytes_));
}

void GlooCommunicator::interrupt() {
  std::lock_guard lock(mutex_);
  interrupted_ = true;
  for (const InFlight& f : in_flight_) {
    if (f.is_send) f.buffer->abortWaitSend();
    else f.buffer->abortWaitRecv();
  }
}

void GlooCommunicator::tick() {
  bool news = false, late = false;
  Collective call;
  {
    std::lock_guard lock(mutex_);
    if (!running_ || interrupted_) return;
    const auto waited = timer_.look();
    if (waited < Monitor::kTick) return;
    call = *running_;
    late = waited >= time_for(call, job_->rendezvous.timeout);
    news = Clock::now() - posted_ >= Monitor::kNotePeriod;
    if (news) posted_ = Clock::now();
  }
  if (news) notes_.post(call);
  std::string disagreement = notes_.disagreement(call, [&](uint64_t sequence) { return flight_entry(sequence); });
  if (disagreement.empty() && !late) return;
  {
    std::lock_guard lock(mutex_);
    disagreement_ = std::move(disagreement);
  }
  interrupt();
}

void GlooCommunicator::run(const Collective& call) {
  struct Running {
    Running(GlooCommunicator& c, const Collective& call) : comm(c) {
      std::lock_guard lock(comm.mutex_);
      comm.running_ = &call;
      comm.timer_ = AwakeTimer();
      comm.posted_ = {};
    }
    ~Running() {
      std::lock_guard lock(comm.mutex_);
      comm.running_ = nullptr;
    }
    GlooCommunicator& comm;
  };
  const BlockSigpipe block;
  const Running running(*this, call);
  const Monitor::OpenEnded open(*job_->monitor, !call.has_deadline);
  const auto* in = static_cast<const std::byte*>(call.in);
  auto* out = static_cast<std::byte*>(call.out);
  switch (call.op) {
    case CollectiveOp::all_gather: return all_gather(call, in, out, call.counts);
    case CollectiveOp::reduce_scatter: return reduce_scatter(call, in, out, call.counts);
    case CollectiveOp::all_reduce: return all_reduce(call, out);
    case CollectiveOp::all_to_all: return all_to_all(call, in, out);
    case CollectiveOp::broadcast: return broadcast(call, out);
    case CollectiveOp::barrier: return barrier(call);
  }
}

void GlooCommunicator::all_gather(const Collective& call, const std::byte* in, std::byte* out,
                                  const std::vector<int64_t>& counts) {
  const int64_t element = call.element_size();
  const std::vector<int64_t> cuts = cuts_of(counts, element);
  Transfers transfers(*this, call);
  for (int i = 1; i < size(); ++i) {  // each rank starts with a different peer
    const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
    transfers.receive(from, out + cuts[from], counts[from] * element, kGatherStep);
    transfers.send(to, in, counts[rank()] * element, kGatherStep);
  }
  std::byte* own = out + cuts[rank()];
  if (counts[rank()] > 0 && own != in) std::memcpy(own, in, static_cast<size_t>(counts[rank()] * element));
  transfers.finish(kGatherStep);
}

void GlooCommunicator::reduce_scatter(const Collective& call, const std::byte* in, std::byte* out,
                                      const std::vector<int64_t>& counts) {
  const int64_t element = call.element_size(), chunk = chunk_bytes_ / element;
  const std::vector<int64_t> cuts = cuts_of(counts, element);
  const int64_t steps = (largest(counts) + chunk - 1) / chunk;
  Transfers transfers(*this, call);
  // Elements of rank r's slice that are sent in one step.
  const auto length = [&](int r, int64_t step) { return std::clamp(counts[r] - step * chunk, int64_t{0}, chunk); };
  const auto post = [&](int64_t step) {
    for (int i = 1; i < size(); ++i) {
      const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
      transfers.receive(from, staging(step % 2, from), length(rank(), step) * element, static_cast<uint64_t>(step));
      transfers.send(to, in + cuts[to] + step * chunk * element, length(to, step) * element,
                     static_cast<uint64_t>(step));
    }
  };
  std::vector<const void*> sources(static_cast<size_t>(size()));
  if (steps > 0) post(0);
  for (int64_t step = 0; step < steps; ++step) {
    if (step + 1 < steps) post(step + 1);  // into the other half, while this one is summed
    transfers.finish(static_cast<uint64_t>(step));
    const int64_t n = length(rank(), step);
    if (n == 0) continue;
    for (int r = 0; r < size(); ++r)
      sources[r] = r == rank() ? in + cuts[r] + step * chunk * element : staging(step % 2, r);
    reduce_in_order(out + step * chunk * element, sources, n, call.dtype, call.reduction);
  }
}

void GlooCommunicator::all_reduce(const Collective& call, std::byte* data) {
  const int64_t element = call.element_size(), bytes = call.counts[0] * element;
  if (bytes <= kSmallAllReduceBytes) {
    Transfers transfers(*this, call);
    std::vector<const void*> sources(static_cast<size_t>(size()), data);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sources[r] = staging(0, r);
      transfers.receive(r, staging(0, r), bytes, 0);
      transfers.send(r, data, bytes, 0);
    }
    transfers.finish(0);
    if (bytes > 0) reduce_in_order(data, sources, call.counts[0], call.dtype, call.reduction);
    return;
  }
  std::vector<int64_t> counts(static_cast<size_t>(size()));
  for (int r = 0; r < size(); ++r)
    counts[r] = even_cut(call.counts[0], r + 1, size()) - even_cut(call.counts[0], r, size());
  std::byte* own = data + even_cut(call.counts[0], rank(), size()) * element;
  reduce_scatter(call, data, own, counts);
  all_gather(call, own, data, counts);
}

void GlooCommunicator::all_to_all(const Collective& call, const std::byte* in, std::byte* out) {
  const int64_t element = call.element_size();
  const std::vector<int64_t> from_at = cuts_of(call.recv_counts, element), to_at = cuts_of(call.counts, element);
  Transfers transfers(*this, call);
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
    transfers.receive(from, out + from_at[from], call.recv_counts[from] * element, 0);
    transfers.send(to, in + to_at[to], call.counts[to] * element, 0);
  }
  const int64_t own = call.counts[rank()] * element;
  if (own > 0) std::memcpy(out + from_at[rank()], in + to_at[rank()], static_cast<size_t>(own));
  transfers.finish(0);
}

void GlooCommunicator::broadcast(const Collective& call, std::byte* data) {
  Transfers transfers(*this, call);
  if (rank() != call.root) transfers.receive(call.root, data, call.counts[0], 0);
  for (int r = 0; r < size(); ++r)
    if (rank() == call.root && r != rank()) transfers.send(r, data, call.counts[0], 0);
  transfers.finish(0);
}

void GlooCommunicator::barrier(const Collective& call) {
  Transfers transfers(*this, call);
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    transfers.receive(r, &barrier_bytes_[r], 1, 0);
    transfers.send(r, &barrier_bytes_[size()], 1, 0);
  }
  transfers.finish(0);
}

std::byte* GlooCommunicator::staging(int64_t half, int peer) const {
  const int slot = peer < rank() ? peer : peer - 1;
  return staging_ + (half * (size() - 1) + slot) * chunk_bytes_;
}

}  // namespace sheaf
