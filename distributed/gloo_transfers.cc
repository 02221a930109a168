#include "sheaf/distributed/gloo_transfers.h"

#include <utility>

#include <gloo/context.h>

#ifdef SHEAF_TSAN
// When a collective fails, buffers that were not waited for are destroyed. Their destructor waits until Gloo's thread has released
// them, through an atomic in a library that is not instrumented: the sanitizer cannot see it.
extern "C" const char* __tsan_default_suppressions() {
  return "race:gloo::transport::tcp::UnboundBuffer::~UnboundBuffer\n"
         "race:std::default_delete<gloo::transport::UnboundBuffer>\n";
}
#endif

namespace sheaf {
namespace {

using std::chrono::milliseconds;

}  // namespace

GlooCommunicator::Transfers::~Transfers() {
  std::lock_guard lock(comm_.mutex_);
  comm_.in_flight_.clear();
}

void GlooCommunicator::Transfers::finish(uint64_t step) {
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

uint64_t GlooCommunicator::Transfers::tag(int from, int to, int64_t bytes, uint64_t step) const {
  const uint64_t route = static_cast<uint64_t>(from) << 32 | static_cast<uint64_t>(to);
  return chain(chain(chain(call_.fingerprint, step), route), static_cast<uint64_t>(bytes));
}

void GlooCommunicator::Transfers::post(bool is_send, int peer, void* data, int64_t bytes, uint64_t step) {
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

bool GlooCommunicator::Transfers::is_late() const {
  std::lock_guard lock(comm_.mutex_);
  return comm_.timer_.look() >= time_for(call_, comm_.job_->rendezvous.timeout);
}

bool GlooCommunicator::Transfers::completed(Message& m, milliseconds timeout) {
  return m.is_send ? m.buffer->waitSend(nullptr, timeout) : m.buffer->waitRecv(nullptr, timeout);
}

void GlooCommunicator::Transfers::wait_for(Message& m) {
  std::string reason;
  try {
    if (completed(m, kForever)) return;
  } catch (const std::exception& e) {
    reason = e.what();
  }
  explain(m.peer, reason);
}

void GlooCommunicator::Transfers::explain(int peer, const std::string& reason) {
  std::string disagreement;
  {
    std::lock_guard lock(comm_.mutex_);
    disagreement = comm_.disagreement_;
  }
  comm_.throw_if_failed(call_);
  if (!disagreement.empty()) comm_.raise(call_, ExitCode::kDesync, disagreement);
  if (is_late())
    comm_.raise_timeout(call_, std::chrono::duration<double>(comm_.job_->rendezvous.timeout).count(), missing());
  const auto has_left = [&] { return comm_.job_->monitor->has_left(comm_.group_.members[peer]); };
  comm_.await_explanation(call_, has_left);
  comm_.raise_lost(call_, peer, has_left() ? "it has left the job" : "its connection broke: " + reason);
}

std::vector<int> GlooCommunicator::Transfers::missing() {
  std::vector<int> absent;
  for (Message& m : messages_) {
    try {
      // Gloo reports an interruption once, and only then a completion before it.
      if (completed(m, milliseconds(0)) || completed(m, milliseconds(0))) continue;
    } catch (const std::exception&) {  // Gloo throws for incomplete operations
    }
    absent.push_back(m.peer);
  }
  return comm_.notes_.missing(call_, absent, Monitor::knows_who_waits(comm_.job_->rendezvous.timeout));
}

}  // namespace sheaf
