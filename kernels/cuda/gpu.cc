#include "sheaf/kernels/cuda/gpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

/// An event of a stream's device, which is selected before each call: in threads that never selected one, CUDA's calls would create a
/// context on device 0, and an event there cannot be recorded on another device's stream.
class OwnedEvent {
 public:
  OwnedEvent(const Stream& stream, EventHandle (*make)()) : device_(stream.device.index) {
    use_device(device_);
    event_ = make();
  }
  ~OwnedEvent() {
    try {
      destroy_event(get());
    } catch (const CudaError&) {
    }  // reported by the call that failed: after a fault every call fails
  }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  EventHandle get() const { return use_device(device_), event_; }

 private:
  const int device_;
  EventHandle event_ = nullptr;
};

class Point : public DevicePoint {
 public:
  explicit Point(const Stream& stream) : event_(stream, make_event) {
    cuda::record(event_.get(), stream);
  }
  void sync() const override { synchronize(event_.get()); }
  bool reached() const override { return cuda::reached(event_.get()); }
  void order(const Stream& stream) const override { wait(stream, event_.get()); }

 private:
  const OwnedEvent event_;
};

class Time : public DeviceTime {
 public:
  explicit Time(const Stream& stream) : event_(stream, make_timed_event) {
    cuda::record(event_.get(), stream);
  }
  double since(const DeviceTime& earlier) const override {
    const EventHandle begin = static_cast<const Time&>(earlier).event_.get(), end = event_.get();
    synchronize(begin), synchronize(end);
    return seconds_between(begin, end);
  }

 private:
  const OwnedEvent event_;
};

class CudaGraph : public GpuGraph {
 public:
  using Replayed = std::map<const void*, Gpu::Replayed>;
  CudaGraph(std::shared_ptr<Gpu> gpu, GraphHandle handle, std::shared_ptr<void> memory,
            Replayed replayed)
      : gpu_(std::move(gpu)),
        handle_(handle),
        memory_(std::move(memory)),
        replayed_(std::move(replayed)) {}
  ~CudaGraph() override {
    try {
      synchronize(gpu_->compute());
    } catch (const CudaError&) {
    }  // reported by the call that failed
    try {
      destroy_graph(handle_);  // even after a failure: aborting NCCL's communicator waits for it
    } catch (const CudaError&) {
    }
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void replay() override {
    check<CudaError>(!gpu_->capturing(), "[graph] a replay cannot be captured");
    const Event begun = replayed_.empty() ? Event() : gpu_->record(gpu_->compute());
    launch_graph(handle_, gpu_->compute());
    if (replayed_.empty()) return;
    const Event done = gpu_->record(gpu_->compute());
    std::exception_ptr failure;
    for (const auto& [caller, f] : replayed_) {
      try {
        f(begun, done);
      } catch (...) {  // the others are still called
        failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

 private:
  const std::shared_ptr<Gpu> gpu_;
  const GraphHandle handle_;
  const std::shared_ptr<void> memory_;
  const Replayed replayed_;
};

class CudaGpu : public Gpu, public std::enable_shared_from_this<CudaGpu> {
 public:
  explicit CudaGpu(int index)
      : device_(Device::cuda(index)),
        compute_(make_stream(index)),
        copies_(make_stream(index, Priority::low)),  // its kernels take few blocks (few_blocks.h)
        d2h_(make_stream(index, Priority::low)),
        blocks_(make_device_allocator(index)),
        host_blocks_(make_pinned_allocator(index)) {}
  ~CudaGpu() override {
    try {
      synchronize(compute_);  // kernels may still use memory that is freed now
      synchronize(copies_);
      synchronize(d2h_);
      if (staging_) free_pinned(staging_);
      destroy_stream(compute_);
      destroy_stream(copies_);
      destroy_stream(d2h_);
    } catch (const CudaError&) {
    }  // reported by the call that failed
  }
  CudaGpu(const CudaGpu&) = delete;
  CudaGpu& operator=(const CudaGpu&) = delete;

  Device device() const override { return device_; }
  std::string name() const override { return device_name(device_.index); }
  const std::shared_ptr<Allocator>& memory() const override { return memory_; }
  const std::shared_ptr<Allocator>& host_memory() const override { return host_memory_; }
  bool holds(const void* address) const override { return blocks_->holds(address); }
  void set_wire(std::shared_ptr<PieceSource> source) override {
    blocks_->set_wire(std::move(source));
  }
  std::vector<MemoryPiece> wire_pieces(size_t known) const override {
    return blocks_->wire_pieces(known);
  }
  const Stream& compute() const override { return compute_; }
  const Stream& copies() const override { return copies_; }
  const Stream& d2h() const override { return d2h_; }
  Stream make_lane() override { return make_stream(device_.index, Priority::high); }
  void destroy_lane(const Stream& lane) override { destroy_stream(lane); }

  void copy(const Stream& stream, void* to, const void* from, size_t bytes, Copy kind) override {
    if (kind == Copy::on_device) return copy_bytes(stream, to, from, bytes, cuda::Copy::on_device);
    check<CudaError>(!capturing_, "[gpu] a copy of ", bytes,
                     kind == Copy::to_host
                         ? " bytes to the host cannot be captured: values are not there before a "
                           "graph has run"
                         : " bytes from the host cannot be captured: a replay would not read the "
                           "host's memory again");
    std::lock_guard lock(mutex_);
    use_device(device_.index);
    if (!staging_) staging_ = static_cast<char*>(allocate_pinned(kSlots * kSlot));
    auto* host = static_cast<char*>(kind == Copy::to_host ? to : const_cast<void*>(from));
    auto* there = static_cast<char*>(kind == Copy::to_host ? const_cast<void*>(from) : to);
    for (size_t done = 0; done < bytes; done += kSlot) {
      const size_t n = std::min(kSlot, bytes - done);
      turn_ = (turn_ + 1) % kSlots;
      if (used_[turn_]) used_[turn_]->sync();  // by a copy from the host, kSlots ago
      used_[turn_] = nullptr;
      char* const slot = staging_ + turn_ * kSlot;
      if (kind == Copy::to_host) {
        copy_bytes(stream, slot, there + done, n, cuda::Copy::to_host);
        synchronize(stream);
        std::memcpy(host + done, slot, n);
      } else {
        std::memcpy(slot, host + done, n);
        copy_bytes(stream, there + done, slot, n, cuda::Copy::to_device);
        used_[turn_] = std::make_shared<Point>(stream);
      }
    }
  }
  void sync(const Stream& stream) override {
    check<CudaError>(!capturing_ || !cuda::capturing(stream),
                     "[gpu] the host cannot wait for a stream that is captured");
    synchronize(stream);
  }
  Event record(const Stream& stream) override { return Event::at(std::make_shared<Point>(stream)); }
  std::shared_ptr<const DeviceTime> note_time(const Stream& stream) override {
    return std::make_shared<Time>(stream);
  }

  void begin_capture() override {
    check<CudaError>(!capturing_, "[gpu] a capture goes on already");
    cuda::begin_capture(compute_);
    blocks_->begin_capture();
    host_blocks_->begin_capture();
    capturing_ = true;
  }
  std::unique_ptr<GpuGraph> end_capture() override {
    check<CudaError>(capturing_, "[gpu] there is no capture to end");
    capturing_ = false;
    CudaGraph::Replayed replayed = take_replayed();
    std::shared_ptr<void> memory = end_ownership();
    const GraphHandle handle = cuda::end_capture(compute_);
    return std::make_unique<CudaGraph>(shared_from_this(), handle, std::move(memory),
                                       std::move(replayed));
  }
  void abandon_capture() noexcept override {
    try {
      capturing_ = false;
      take_replayed();
      end_ownership();
      destroy_graph(cuda::end_capture(compute_));
    } catch (const CudaError&) {
    }  // of a capture that has failed
  }
  bool capturing() const override { return capturing_; }
  void at_replays(const void* caller, Replayed f) override {
    std::lock_guard lock(mutex_);
    replayed_[caller] = std::move(f);
  }

 private:
  // A step gets its data from the host in one or few copies: the host can be some steps ahead before it waits for a slot.
  static constexpr size_t kSlot = size_t{1} << 20, kSlots = 8;

  /// The graph owns all memory that the capture has allocated while the result lives.
  std::shared_ptr<void> end_ownership() {
    return std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
        blocks_->end_capture(), host_blocks_->end_capture());
  }
  CudaGraph::Replayed take_replayed() {
    std::lock_guard lock(mutex_);
    return std::exchange(replayed_, {});
  }

  const Device device_;
  const Stream compute_, copies_, d2h_;
  const std::shared_ptr<DeviceAllocator> blocks_;
  const std::shared_ptr<Allocator> memory_ = blocks_;
  const std::shared_ptr<GraphAllocator> host_blocks_;
  const std::shared_ptr<Allocator> host_memory_ = host_blocks_;
  std::atomic<bool> capturing_ = false;
  std::mutex mutex_;         // guards the members below
  char* staging_ = nullptr;  // slots, used in turn
  size_t turn_ = 0;
  std::shared_ptr<Point> used_[kSlots];
  CudaGraph::Replayed replayed_;  // of the current capture
};

}  // namespace

std::shared_ptr<Gpu> make_gpu(int index) {
  const int count = device_count();
  if (count == 0) fail<CudaError>("[gpu] there is no GPU: ", why_no_device());
  check<CudaError>(index >= 0 && index < count, "[gpu] cuda:", index, " of ", count, " devices");
  use_device(index);
  return std::make_shared<CudaGpu>(index);
}

}  // namespace sheaf::kernels::cuda
