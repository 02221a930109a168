// The emulated device: its memory, and the functions of runtime.h.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include <sys/mman.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/emulated_streams.h"
#include "sheaf/kernels/cuda/emulation.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {

// --- device memory: ranges that are closed while no stream runs ---

namespace {

constexpr size_t kPage = 4096, kHugePage = 2 << 20;
constexpr size_t kDeviceBytes = size_t{4} << 30;  // what ranges may map

struct Range {
  char* base = nullptr;
  size_t open = 0;      // bytes before the guard page
  size_t reserved = 0;  // with it
};

class DeviceMemory {
 public:
  void* allocate(size_t bytes) {
    const size_t open = (bytes + kPage - 1) / kPage * kPage + (bytes == 0 ? kPage : 0);
    std::lock_guard lock(mutex_);
    void* base =
        mmap(nullptr, open + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
      fail<OutOfMemory>("[cudaMalloc] ", bytes, " bytes asked (emulated GPU)");
    const Range range{static_cast<char*>(base), open, open + kPage};
    if (users_) mprotect(range.base, range.open, PROT_READ | PROT_WRITE);
    char* memory =
        range.base + (open - (bytes + 255) / 256 * 256);  // its end is at the guard page
    ranges_[memory] = range;
    return memory;
  }
  void free(void* memory) {
    if (!memory) return;
    std::lock_guard lock(mutex_);
    const auto it = ranges_.find(memory);
    check<CudaError>(it != ranges_.end(), "[cudaFree] not a block of this device");
    munmap(it->second.base, it->second.reserved);
    ranges_.erase(it);
  }
  // Huge pages, so that mprotect changes few. Like a virtual GPU, which may have no ranges, with SHEAF_EMULATED_RANGES=0.
  DeviceRange reserve(size_t bytes) {
    const char* ranges = std::getenv("SHEAF_EMULATED_RANGES");
    if (ranges && std::string_view(ranges) == "0") fail<CudaError>("[reserve] not supported (emulated GPU)");
    const size_t more = bytes + kHugePage;
    void* memory =
        mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
      fail<OutOfMemory>("[reserve] ", bytes, " bytes of addresses (emulated GPU)");
    char* const from = static_cast<char*>(memory);
    char* const base =
        from + (kHugePage - reinterpret_cast<uintptr_t>(from) % kHugePage) % kHugePage;
    if (base > from) munmap(from, static_cast<size_t>(base - from));
    munmap(base + bytes, static_cast<size_t>(from + more - base - bytes));  // at least a page
    madvise(base, bytes, MADV_HUGEPAGE);
    return {base, bytes, 0};
  }
  bool map(DeviceRange& range, size_t bytes) {
    if (range.mapped + bytes > range.reserved) return false;
    std::lock_guard lock(mutex_);
    if (mapped_ + bytes > kDeviceBytes) return false;
    mapped_ += bytes, range.mapped += bytes;
    Range& all = ranges_[range.base];
    all = {range.base, range.mapped, range.reserved};
    if (users_) mprotect(all.base, all.open, PROT_READ | PROT_WRITE);
    return true;
  }
  void release(DeviceRange& range) {
    {
      std::lock_guard lock(mutex_);
      mapped_ -= range.mapped;
    }
    if (range.mapped)
      free(range.base);
    else if (range.base)
      munmap(range.base, range.reserved);
    range = {};
  }
  DeviceMemoryInfo info() {
    std::lock_guard lock(mutex_);
    return {kDeviceBytes - mapped_, kDeviceBytes};
  }
  bool contains(uintptr_t address) {
    std::lock_guard lock(mutex_);
    const auto next = ranges_.upper_bound(reinterpret_cast<void*>(address));
    if (next == ranges_.begin()) return false;
    const Range& range = std::prev(next)->second;
    return address < reinterpret_cast<uintptr_t>(range.base) + range.open;
  }
  void open() {
    std::lock_guard lock(mutex_);
    if (users_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    std::lock_guard lock(mutex_);
    if (--users_ == 0) protect(PROT_NONE);
  }

 private:
  void protect(int access) {
    for (const auto& [memory, range] : ranges_) mprotect(range.base, range.open, access);
  }
  std::mutex mutex_;
  int users_ = 0;
  size_t mapped_ = 0;  // of ranges
  std::map<void*, Range> ranges_;
};

DeviceMemory& device_memory() {
  static DeviceMemory memory;
  return memory;
}

}  // namespace

namespace {

using emulation::EmulatedEvent;
using emulation::Streams;

std::mutex pinned_mutex;
std::map<char*, size_t> pinned_blocks;

bool is_pinned(const void* memory) {
  std::lock_guard lock(pinned_mutex);
  const auto next = pinned_blocks.upper_bound(static_cast<char*>(const_cast<void*>(memory)));
  if (next == pinned_blocks.begin()) return false;
  const auto& [base, bytes] = *std::prev(next);
  return memory < base + bytes;
}

EmulatedEvent& event_of(EventHandle event) { return *static_cast<EmulatedEvent*>(event); }

}  // namespace

namespace emulation {

bool on_device(uintptr_t address) { return device_memory().contains(address); }

OpenMemory::OpenMemory() { device_memory().open(); }
OpenMemory::~OpenMemory() { device_memory().close(); }

void enqueue(const Stream& stream, std::function<void()> work) {
  Streams::get().enqueue(stream, std::move(work));
}

}  // namespace emulation

// --- runtime.h ---

int device_count() { return 1; }
std::string why_no_device() { return ""; }
std::string device_name(int) { return "emulated GPU"; }
std::string device_identity(int) { return "emulated GPU"; }
int compute_capability(int) { return 90; }
int64_t block_shared_bytes(int) { return kBlocksSharedBytes; }
int multiprocessors(int) { return 4; }
void use_device(int device) {
  check<CudaError>(device == 0, "[cudaSetDevice] invalid device ordinal (emulated GPU)");
}

void* allocate(size_t bytes) { return device_memory().allocate(bytes); }
// Freeing waits for nothing, as CUDA's may: work that comes later and still uses the memory crashes.
void free(void* memory) { device_memory().free(memory); }
size_t map_granularity(int) { return kHugePage; }  // an H200's, too
DeviceRange reserve(int, size_t bytes) { return device_memory().reserve(bytes); }
bool map(int, DeviceRange& range, size_t bytes) { return device_memory().map(range, bytes); }
void release(DeviceRange& range) { device_memory().release(range); }
DeviceMemoryInfo memory_info() { return device_memory().info(); }

void* allocate_pinned(size_t bytes) {
  char* memory = static_cast<char*>(::operator new (bytes, std::align_val_t{256}));
  std::lock_guard lock(pinned_mutex);
  pinned_blocks[memory] = bytes;
  return memory;
}
void free_pinned(void* memory) {
  {
    std::lock_guard lock(pinned_mutex);
    pinned_blocks.erase(static_cast<char*>(memory));
  }
  ::operator delete (memory, std::align_val_t{256});
}

Stream make_stream(int device, Priority) {
  use_device(device);
  return {Device::cuda(device), Streams::get().make().get()};
}
void destroy_stream(const Stream& stream) { Streams::get().destroy(stream); }
void synchronize(const Stream& stream) { Streams::get().synchronize(stream); }

EventHandle make_event() { return new EmulatedEvent; }
EventHandle make_timed_event() {
  auto* const event = new EmulatedEvent;
  event->seconds = std::make_shared<double>();
  return event;
}
void destroy_event(EventHandle event) { delete static_cast<EmulatedEvent*>(event); }
void record(EventHandle event, const Stream& stream) {
  const auto seconds = event_of(event).seconds;
  if (seconds)
    Streams::get().enqueue(stream, [seconds] {
      *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
                     .count();
    });
  event_of(event) = Streams::get().now(stream);
  event_of(event).seconds = seconds;
}
void wait(const Stream& stream, EventHandle event) { Streams::get().wait(stream, event_of(event)); }
void synchronize(EventHandle event) { Streams::get().synchronize(event_of(event)); }
bool reached(EventHandle event) {
  synchronize(event);  // or a host that polls would poll forever
  return true;
}

double seconds_between(EventHandle begin, EventHandle end) {
  synchronize(begin), synchronize(end);
  return *event_of(end).seconds - *event_of(begin).seconds;
}

using GraphBox = std::shared_ptr<const emulation::Capture>;

void begin_capture(const Stream& stream) { Streams::get().begin_capture(stream); }
GraphHandle end_capture(const Stream& stream) {
  return new GraphBox(Streams::get().end_capture(stream));
}
bool capturing(const Stream& stream) { return Streams::get().capturing(stream); }
void launch_graph(GraphHandle graph, const Stream& stream) {
  Streams::get().launch(*static_cast<GraphBox*>(graph), stream);
}
void destroy_graph(GraphHandle graph) { delete static_cast<GraphBox*>(graph); }

void copy_bytes(const Stream& stream, void* to, const void* from, size_t bytes, Copy kind) {
  if (bytes == 0) return;
  // The host may change its memory at once, but a graph reads it when it runs.
  if (kind == Copy::to_device && !is_pinned(from) && !capturing(stream)) {
    const auto* source = static_cast<const char*>(from);
    emulation::enqueue(stream, [to, copy = std::vector<char>(source, source + bytes)] {
      std::memcpy(to, copy.data(), copy.size());
    });
    return;
  }
  emulation::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  if (kind == Copy::to_host && !is_pinned(to)) synchronize(stream);
}
void fill_bytes(const Stream& stream, void* to, int byte, size_t bytes) {
  if (bytes) emulation::enqueue(stream, [=] { std::memset(to, byte, bytes); });
}

}  // namespace sheaf::kernels::cuda
