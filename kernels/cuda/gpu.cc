#include "sheaf/kernels/cuda/gpu.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

class Point : public DevicePoint {
 public:
  explicit Point(const Stream& stream) : event_(make_event()) { cuda::record(event_, stream); }
  ~Point() override { destroy_event(event_); }
  Point(const Point&) = delete;
  Point& operator=(const Point&) = delete;
  void sync() const override { synchronize(event_); }
  bool reached() const override { return cuda::reached(event_); }
  void order(const Stream& stream) const override { wait(stream, event_); }

 private:
  EventHandle event_;
};

class CudaGpu : public Gpu {
 public:
  explicit CudaGpu(int index)
      : device_(Device::cuda(index)),
        compute_(make_stream(index)),
        blocks_(make_device_allocator(index)) {}
  ~CudaGpu() override {
    try {
      synchronize(compute_);  // kernels may still use what is given back now
      if (staging_) free_pinned(staging_);
      destroy_stream(compute_);
    } catch (const CudaError&) {
    }  // reported where it happened
  }
  CudaGpu(const CudaGpu&) = delete;
  CudaGpu& operator=(const CudaGpu&) = delete;

  Device device() const override { return device_; }
  std::string name() const override { return device_name(device_.index); }
  const std::shared_ptr<Allocator>& memory() const override { return memory_; }
  bool holds(const void* address) const override { return blocks_->holds(address); }
  const Stream& compute() const override { return compute_; }
  Stream make_lane() override { return make_stream(device_.index, Priority::high); }
  void destroy_lane(const Stream& lane) override { destroy_stream(lane); }

  void copy(const Stream& stream, void* to, const void* from, size_t bytes, Copy kind) override {
    if (kind == Copy::on_device) return copy_bytes(stream, to, from, bytes, cuda::Copy::on_device);
    std::lock_guard lock(mutex_);
    use_device(device_.index);
    if (!staging_) staging_ = static_cast<char*>(allocate_pinned(2 * kHalf));
    auto* host = static_cast<char*>(kind == Copy::to_host ? to : const_cast<void*>(from));
    auto* there = static_cast<char*>(kind == Copy::to_host ? const_cast<void*>(from) : to);
    for (size_t done = 0; done < bytes; done += kHalf) {
      const size_t n = std::min(kHalf, bytes - done);
      if (kind == Copy::to_host) {
        copy_bytes(stream, staging_, there + done, n, cuda::Copy::to_host);
        synchronize(stream);
        std::memcpy(host + done, staging_, n);
      } else {
        turn_ ^= 1;
        if (used_[turn_]) used_[turn_]->sync();  // by the copy before the last one
        char* const half = staging_ + static_cast<size_t>(turn_) * kHalf;
        std::memcpy(half, host + done, n);
        copy_bytes(stream, there + done, half, n, cuda::Copy::to_device);
        used_[turn_] = std::make_shared<Point>(stream);
      }
    }
  }
  void sync(const Stream& stream) override { synchronize(stream); }
  Event record(const Stream& stream) override { return Event::at(std::make_shared<Point>(stream)); }

 private:
  static constexpr size_t kHalf = size_t{4} << 20;

  const Device device_;
  const Stream compute_;
  const std::shared_ptr<DeviceAllocator> blocks_;
  const std::shared_ptr<Allocator> memory_ = blocks_;
  std::mutex mutex_;         // of the staging memory
  char* staging_ = nullptr;  // two halves, used in turn
  int turn_ = 0;
  std::shared_ptr<Point> used_[2];
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
