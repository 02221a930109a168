#include "sheaf/kernels/cuda/emulated_streams.h"

#include <algorithm>
#include <queue>

#include "sheaf/core/error.h"

namespace sheaf::kernels::cuda::emulation {
namespace {

// A call that is not allowed during a capture also ends it: it can no longer become a graph.
[[noreturn]] void break_capture(Capture& capture, const std::string& why) {
  if (capture.broken.empty()) capture.broken = why;
  fail<CudaError>(why, " (emulated GPU)");
}

}  // namespace

// --- graphs ---

void Capture::run() const {
  std::vector<size_t> waits(nodes.size());  // number of predecessors that have not run
  std::vector<std::vector<size_t>> followers(nodes.size());
  std::priority_queue<std::pair<bool, size_t>> ready;  // nodes without work first: they must not hide a missing dependency
  const auto add = [&](size_t n) { ready.emplace(nodes[n].work == nullptr, n); };
  for (size_t n = 0; n < nodes.size(); ++n) {
    waits[n] = nodes[n].behind.size();
    for (size_t b : nodes[n].behind) followers[b].push_back(n);
    if (waits[n] == 0) add(n);
  }
  while (!ready.empty()) {
    const size_t n = ready.top().second;
    ready.pop();
    if (nodes[n].work) nodes[n].work();
    for (size_t f : followers[n])
      if (--waits[f] == 0) add(f);
  }
}

std::vector<bool> Capture::before(const std::vector<size_t>& last) const {
  std::vector<bool> out(nodes.size(), false);
  for (size_t n : last) out[n] = true;
  for (size_t n = nodes.size(); n-- > 0;)  // a node's predecessors were recorded before it
    if (out[n])
      for (size_t b : nodes[n].behind) out[b] = true;
  return out;
}

// --- streams ---

Streams& Streams::get() {
  static Streams streams;
  return streams;
}

std::shared_ptr<EmulatedStream> Streams::of(const Stream& stream) {
  for (const auto& s : streams_)
    if (s.get() == stream.handle) return s;
  fail<CudaError>("[stream] not a stream of this device (emulated GPU)");
}

std::shared_ptr<EmulatedStream> Streams::make() {
  std::lock_guard lock(mutex_);
  streams_.push_back(std::make_shared<EmulatedStream>());
  return streams_.back();
}

void Streams::destroy(const Stream& stream) {
  synchronize(stream);
  std::lock_guard lock(mutex_);
  std::erase_if(streams_, [&](const auto& s) { return s.get() == stream.handle; });
}

void Streams::put(EmulatedStream& s, Work work) {
  s.work.push_back(std::move(work));
  ++s.enqueued;
  if (s.work.size() > kMostWaiting) run(s, s.done + kMostWaiting / 2);
}

void Streams::enqueue(const Stream& stream, Work work) {
  std::lock_guard lock(mutex_);
  EmulatedStream& s = *of(stream);
  if (s.capture)
    record(s, std::move(work));
  else
    put(s, std::move(work));
}

void Streams::record(EmulatedStream& s, Work work) {
  s.capture->nodes.push_back({std::move(work), s.last});
  s.last = {s.capture->nodes.size() - 1};
}

// With the lock held, which work itself never takes.
void Streams::run(EmulatedStream& s, uint64_t ticket) {
  if (s.done >= ticket) return;
  const OpenMemory open;
  while (s.done < ticket) {
    const Work work = std::move(s.work.front());
    s.work.pop_front();
    ++s.done;
    work();
  }
}

void Streams::synchronize(const Stream& stream) {
  std::lock_guard lock(mutex_);
  EmulatedStream& s = *of(stream);
  if (s.capture)
    break_capture(*s.capture,
                  "[cudaStreamSynchronize] operation not permitted when stream is capturing");
  run(s, s.enqueued);
}

void Streams::synchronize(const EmulatedEvent& event) {
  std::lock_guard lock(mutex_);
  if (event.capture)
    break_capture(*event.capture,
                  "[cudaEventSynchronize] operation not permitted on an event last recorded in a "
                  "capturing stream");
  if (event.stream) run(*event.stream, event.ticket);
}

EmulatedEvent Streams::now(const Stream& stream) {
  std::lock_guard lock(mutex_);
  const auto s = of(stream);
  return {s, s->enqueued, s->capture, s->last, {}};
}

void Streams::wait(const Stream& stream, const EmulatedEvent& event) {
  if (!event.stream) return;  // never recorded
  std::lock_guard lock(mutex_);
  const auto s = of(stream);
  if (event.capture) {
    check<CudaError>(!event.capture->over,
                     "[cudaStreamWaitEvent] operation not permitted on an event last recorded in a "
                     "capturing stream (emulated GPU)");
    if (s->capture && s->capture != event.capture)
      break_capture(*s->capture, "[cudaStreamWaitEvent] operation would merge two captures");
    s->capture = event.capture;  // a stream that waits for a capture belongs to it
    for (size_t n : event.nodes)
      if (std::ranges::find(s->last, n) == s->last.end()) s->last.push_back(n);
    return record(*s, {});  // so that it must be joined, even if it does nothing
  }
  if (s->capture)
    break_capture(*s->capture,
                  "[cudaStreamWaitEvent] dependency created on uncaptured work in another stream");
  if (event.stream != s) put(*s, [this, event] { run(*event.stream, event.ticket); });
}

// --- captures ---

void Streams::begin_capture(const Stream& stream) {
  std::lock_guard lock(mutex_);
  EmulatedStream& s = *of(stream);
  if (s.capture)
    break_capture(*s.capture, "[cudaStreamBeginCapture] the stream is capturing already");
  s.capture = std::make_shared<Capture>();
  s.capture->origin = &s;
}

std::shared_ptr<const Capture> Streams::end_capture(const Stream& stream) {
  std::lock_guard lock(mutex_);
  EmulatedStream& s = *of(stream);
  const std::shared_ptr<Capture> capture = s.capture;
  check<CudaError>(capture && capture->origin == &s,
                   "[cudaStreamEndCapture] no capture was begun on this stream (emulated GPU)");
  const std::vector<bool> joined = capture->before(s.last);
  capture->over = true;
  for (const auto& other : streams_)
    if (other->capture == capture) other->capture = nullptr, other->last.clear();
  check<CudaError>(capture->broken.empty(), "[cudaStreamEndCapture] the capture failed before: ",
                   capture->broken, " (emulated GPU)");
  check<CudaError>(std::ranges::all_of(joined, [](bool j) { return j; }),
                   "[cudaStreamEndCapture] capturing stream has unjoined work (emulated GPU)");
  return capture;
}

bool Streams::capturing(const Stream& stream) {
  std::lock_guard lock(mutex_);
  return of(stream)->capture != nullptr;
}

void Streams::launch(std::shared_ptr<const Capture> graph, const Stream& stream) {
  std::lock_guard lock(mutex_);
  EmulatedStream& s = *of(stream);
  if (s.capture)
    break_capture(*s.capture, "[cudaGraphLaunch] graphs inside of graphs are not emulated");
  put(s, [graph = std::move(graph)] { graph->run(); });
}

}  // namespace sheaf::kernels::cuda::emulation
