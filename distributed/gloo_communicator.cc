#include "sheaf/distributed/gloo_communicator.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include <gloo/context.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "sheaf/distributed/local_communicator.h"
#include "sheaf/distributed/reduce.h"
#include "sheaf/distributed/staging.h"

#ifdef SHEAF_TSAN
// When a collective fails, buffers that nobody waited for are destroyed. Their destructor waits until Gloo's thread has
// let go of them, through an atomic in a library that is not instrumented: the sanitizer cannot see it.
extern "C" const char* __tsan_default_suppressions() {
  return "race:gloo::transport::tcp::UnboundBuffer::~UnboundBuffer\n"
         "race:std::default_delete<gloo::transport::UnboundBuffer>\n";
}
#endif

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A peer's connection can break a moment before the monitor tells why.
constexpr auto kExplanationTime = std::chrono::seconds(1);

// Where an all_gather's messages differ from those of a reduce_scatter in the same call.
constexpr uint64_t kGatherStep = uint64_t{1} << 32;

/// Gloo writes to sockets in the caller's thread without MSG_NOSIGNAL: a dead peer would kill us by SIGPIPE. Threads
/// made in this scope inherit the mask.
class BlockSigpipe {
 public:
  BlockSigpipe() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &previous_);
  }
  ~BlockSigpipe() {
    // One that is pending would be delivered at once.
    if (!sigismember(&previous_, SIGPIPE)) {
      sigset_t pipe;
      sigemptyset(&pipe);
      sigaddset(&pipe, SIGPIPE);
      const timespec none{};
      while (sigtimedwait(&pipe, nullptr, &none) == SIGPIPE) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }

 private:
  sigset_t previous_;
};

/// Our store, as Gloo asks for it.
class GlooStore final : public gloo::rendezvous::Store {
 public:
  GlooStore(StoreClient& store, std::string prefix, Deadline deadline)
      : store_(store), prefix_(std::move(prefix)), deadline_(deadline) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(prefix_ + key, {data.data(), data.size()}, deadline_);
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = store_.get(prefix_ + key, deadline_);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) store_.get(prefix_ + key, deadline_);
  }

 private:
  StoreClient& store_;
  const std::string prefix_;
  const Deadline deadline_;
};

std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), int64_t{0});
  return offsets;
}

int64_t largest(const std::vector<int64_t>& counts) { return *std::max_element(counts.begin(), counts.end()); }

}  // namespace

GlooTransport::GlooTransport(std::shared_ptr<Job> job) : job_(std::move(job)) {
  const BlockSigpipe block;
  gloo::transport::tcp::attr attr;
  attr.hostname = job_->store->local_address();
  device_ = gloo::transport::tcp::CreateDevice(attr);
}

std::unique_ptr<Communicator> GlooTransport::connect(const CommunicatorGroup& group) {
  if (group.size() == 1)
    return std::make_unique<LocalCommunicator>(group, job_->board, std::make_shared<LocalGroup>(1), LocalOptions{});
  return std::make_unique<GlooCommunicator>(group, job_, device_);
}

/// The messages of one collective that are under way. One buffer object each, so that a completion names its peer.
class GlooCommunicator::Transfers {
 public:
  Transfers(GlooCommunicator& comm, const Collective& call) : comm_(comm), call_(call) {}
  ~Transfers() {
    std::lock_guard lock(comm_.mutex_);
    comm_.in_flight_.clear();
  }

  void send(int peer, const void* data, int64_t bytes, uint64_t step) {
    post(true, peer, const_cast<void*>(data), bytes, step);
  }
  void receive(int peer, void* data, int64_t bytes, uint64_t step) { post(false, peer, data, bytes, step); }

  /// Sleeps until the messages of `step` are through, receives before sends.
  void finish(uint64_t step) {
    for (bool is_send : {false, true}) {
      for (Message& m : messages_)
        if (m.step == step && m.is_send == is_send) wait_for(m);
      {
        std::lock_guard lock(comm_.mutex_);
        std::erase_if(comm_.in_flight_, [&](const InFlight& f) { return f.step == step && f.is_send == is_send; });
      }
      std::erase_if(messages_, [&](const Message& m) { return m.step == step && m.is_send == is_send; });
    }
  }

 private:
  struct Message {
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    int peer;
    uint64_t step;
    bool is_send;
  };

  uint64_t tag(int from, int to, int64_t bytes, uint64_t step) const {
    const uint64_t route = static_cast<uint64_t>(from) << 32 | static_cast<uint64_t>(to);
    return chain(chain(chain(call_.fingerprint, step), route), static_cast<uint64_t>(bytes));
  }

  void post(bool is_send, int peer, void* data, int64_t bytes, uint64_t step) {
    if (bytes == 0) return;
    auto buffer = comm_.context_->createUnboundBuffer(data, static_cast<size_t>(bytes));
    bool interrupted;
    {
      std::lock_guard lock(comm_.mutex_);
      interrupted = comm_.interrupted_;
      if (!interrupted) comm_.in_flight_.push_back({buffer.get(), step, is_send});
    }
    if (interrupted) explain(peer, "interrupted");
    messages_.push_back({std::move(buffer), peer, step, is_send});
    gloo::transport::UnboundBuffer& posted = *messages_.back().buffer;
    try {
      if (is_send) posted.send(peer, tag(comm_.rank(), peer, bytes, step));
      else posted.recv(peer, tag(peer, comm_.rank(), bytes, step));
    } catch (const std::exception& e) {
      explain(peer, e.what());
    }
  }

  milliseconds time_left() const {
    const auto deadline = comm_.started_ + comm_.job_->rendezvous.timeout;
    return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(deadline - Clock::now()));
  }

  static bool completed(Message& m, milliseconds timeout) {
    return m.is_send ? m.buffer->waitSend(nullptr, timeout) : m.buffer->waitRecv(nullptr, timeout);
  }

  void wait_for(Message& m) {
    std::string reason;
    try {
      if (completed(m, time_left())) return;
    } catch (const std::exception& e) {
      reason = e.what();
    }
    explain(m.peer, reason);
  }

  /// A message to or from `peer` did not get through: finds out why and throws it.
  [[noreturn]] void explain(int peer, const std::string& reason) {
    std::string disagreement;
    {
      std::lock_guard lock(comm_.mutex_);
      disagreement = comm_.disagreement_;
    }
    comm_.throw_if_failed(call_);
    if (!disagreement.empty()) comm_.raise(call_, ExitCode::kDesync, disagreement);
    if (time_left().count() == 0)
      comm_.raise_timeout(call_, std::chrono::duration<double>(comm_.job_->rendezvous.timeout).count(), missing());
    const int culprit = comm_.group_.members[peer];
    for (const auto until = Clock::now() + kExplanationTime; Clock::now() < until;) {
      comm_.throw_if_failed(call_);
      if (comm_.job_->monitor->has_left(culprit)) {
        comm_.board_->raise({culprit, ExitCode::kPeerLost, "it has left the job"});
      } else {
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
    comm_.board_->raise({culprit, ExitCode::kPeerLost, "its connection broke: " + reason});
    comm_.throw_failure(call_, *comm_.board_->failure());
  }

  /// Members whose messages have not come through and who have not said that they wait here too.
  std::vector<int> missing() {
    std::vector<int> absent;
    for (Message& m : messages_) {
      try {
        if (completed(m, milliseconds(0))) continue;
      } catch (const std::exception&) {  // Gloo throws for what is not complete
      }
      absent.push_back(m.peer);
    }
    // A rank may have waited a while before it stopped; after a short time-out nobody can tell.
    const bool knows_elsewhere = comm_.job_->rendezvous.timeout > Monitor::kNoteLife + Monitor::kNotePeriod;
    return comm_.notes_.missing(call_, absent, knows_elsewhere);
  }

  GlooCommunicator& comm_;
  const Collective& call_;
  std::vector<Message> messages_;
};

GlooCommunicator::GlooCommunicator(CommunicatorGroup group, std::shared_ptr<Job> job,
                                   std::shared_ptr<gloo::transport::Device> device)
    : CommunicatorBase(std::move(group), job->board), job_(std::move(job)), notes_(group_, *job_->monitor),
      allocator_(RankContext::current().cpu), chunk_bytes_(gloo_chunk_bytes(size())),
      staging_bytes_(gloo_staging_bytes(size())), barrier_bytes_(static_cast<size_t>(size()) + 1) {
  auto context = std::make_shared<gloo::rendezvous::Context>(rank(), size());
  context->setTimeout(std::chrono::seconds(6));  // Gloo waits five times as long for a connection
  GlooStore store(*job_->store, group_.name + "/", Clock::now() + job_->rendezvous.init_timeout);
  const std::string me = str("[mesh] rank ", group_.world_rank(), " of ", group_.world, ": ");
  try {
    context->connectFullMesh(store, device);
  } catch (const Error&) {
    if (const auto failure = job_->board->failure())
      throw CommError(str(me, "rank ", failure->rank, " failed: ", failure->reason), ExitCode::kPeerLost);
    throw;
  } catch (const std::exception& e) {
    throw CommError(str(me, "cannot connect ", group_.name, ": ", e.what()), ExitCode::kPeerLost);
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
  bool news = false;
  Collective call;
  {
    std::lock_guard lock(mutex_);
    if (!running_ || interrupted_ || Clock::now() - started_ < Monitor::kTick) return;
    call = *running_;
    news = Clock::now() - posted_ >= Monitor::kNotePeriod;
    if (news) posted_ = Clock::now();
  }
  if (news) notes_.post(call);
  std::string disagreement = notes_.disagreement(call, [&](uint64_t sequence) { return flight_entry(sequence); });
  if (disagreement.empty()) return;
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
      comm.started_ = Clock::now();
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
  const std::vector<int64_t> offsets = offsets_of(counts);
  Transfers transfers(*this, call);
  for (int i = 1; i < size(); ++i) {  // everybody starts with another peer
    const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
    transfers.receive(from, out + offsets[from] * element, counts[from] * element, kGatherStep);
    transfers.send(to, in, counts[rank()] * element, kGatherStep);
  }
  std::byte* own = out + offsets[rank()] * element;
  if (counts[rank()] > 0 && own != in) std::memcpy(own, in, static_cast<size_t>(counts[rank()] * element));
  transfers.finish(kGatherStep);
}

void GlooCommunicator::reduce_scatter(const Collective& call, const std::byte* in, std::byte* out,
                                      const std::vector<int64_t>& counts) {
  const int64_t element = call.element_size(), chunk = chunk_bytes_ / element;
  const std::vector<int64_t> offsets = offsets_of(counts);
  const int64_t steps = (largest(counts) + chunk - 1) / chunk;
  Transfers transfers(*this, call);
  // Elements of rank r's slice that go in one step.
  const auto length = [&](int r, int64_t step) { return std::clamp(counts[r] - step * chunk, int64_t{0}, chunk); };
  const auto post = [&](int64_t step) {
    for (int i = 1; i < size(); ++i) {
      const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
      transfers.receive(from, staging(step % 2, from), length(rank(), step) * element, static_cast<uint64_t>(step));
      transfers.send(to, in + (offsets[to] + step * chunk) * element, length(to, step) * element,
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
      sources[r] = r == rank() ? in + (offsets[r] + step * chunk) * element : staging(step % 2, r);
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
  const std::vector<int64_t> from_at = offsets_of(call.recv_counts), to_at = offsets_of(call.counts);
  Transfers transfers(*this, call);
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();
    transfers.receive(from, out + from_at[from] * element, call.recv_counts[from] * element, 0);
    transfers.send(to, in + to_at[to] * element, call.counts[to] * element, 0);
  }
  const int64_t own = call.counts[rank()] * element;
  if (own > 0) std::memcpy(out + from_at[rank()] * element, in + to_at[rank()] * element, static_cast<size_t>(own));
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
