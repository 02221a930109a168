#include "sheaf/kernels/cuda/emulation.h"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <sys/mman.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {

// --- device memory: ranges that are closed while no kernel runs ---

namespace {

constexpr size_t kPage = 4096;
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
        range.base + (open - (bytes + 255) / 256 * 256);  // its end lies at the guard page
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
  DeviceRange reserve(size_t bytes) {
    void* base =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
      fail<OutOfMemory>("[reserve] ", bytes, " bytes of addresses (emulated GPU)");
    return {static_cast<char*>(base), bytes, 0};
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

namespace emulation {

MemoryAccess::MemoryAccess() { device_memory().open(); }
MemoryAccess::~MemoryAccess() { device_memory().close(); }

// --- fibers ---

namespace {

// Saves what the calling convention asks a function to keep, and goes on where `to` was left.
extern "C" void sheaf_switch_fiber(void** from, void* to);
asm(R"(
.text
.globl sheaf_switch_fiber
.hidden sheaf_switch_fiber
.type sheaf_switch_fiber, @function
sheaf_switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sheaf_switch_fiber, .-sheaf_switch_fiber
)");

constexpr size_t kStack = 128 << 10;
constexpr unsigned kMaxThreads = 1024;

enum class State : uint8_t { ready, at_block_barrier, at_warp, done };

struct Fiber {
  std::unique_ptr<char[]> stack;
  void* pointer = nullptr;  // of the stack, where it was left
  State state = State::done;
};

struct Warp {
  uint64_t slots[2][32];
  unsigned arrived = 0;
  int turn = 0;
};

class Block;
thread_local Block* current = nullptr;

class Block {
 public:
  void start(const char* name, unsigned threads, size_t shared_bytes,
             const std::function<void()>& body) {
    name_ = name, threads_ = threads, body_ = &body;
    shared_.assign(shared_bytes / 16 + 1, {});
    std::memset(shared_.data(), 0xff, shared_.size() * sizeof(shared_[0]));
    warps_.assign((threads + 31) / 32, {});
    if (fibers_.size() < threads) fibers_.resize(threads);
    for (unsigned i = 0; i < threads; ++i) prepare(fibers_[i]);
  }

  // Goes round until all are done; `first` is where each round begins, `step` (odd times) its
  // stride.
  void run(unsigned first, bool backwards) {
    current = this;
    failure_ = nullptr;
    for (;;) {
      bool progress = false;
      done_ = 0;
      for (unsigned n = 0; n < threads_; ++n) {
        const unsigned i = backwards ? (first + threads_ - n) % threads_ : (first + n) % threads_;
        if (fibers_[i].state == State::ready) {
          progress = true;
          enter(i);
          if (failure_) {
            current = nullptr;
            std::rethrow_exception(failure_);
          }
        }
        done_ += fibers_[i].state == State::done;
      }
      if (done_ == threads_) break;
      if (release_block_barrier()) progress = true;
      if (!progress) stuck();
    }
    current = nullptr;
  }

  void* shared() { return shared_.data(); }

  void block_barrier() { leave(State::at_block_barrier); }

  const void* exchange(const void* value, size_t bytes, unsigned mask) {
    const unsigned warp = running_ / 32, lane = running_ % 32;
    if (mask != 0xffffffffu || (warp + 1) * 32 > threads_)
      fail<CudaError>('[', name_, "] a warp operation must name a full warp (emulated GPU)");
    Warp& w = warps_[warp];
    uint64_t* slots = w.slots[w.turn];
    slots[lane] = 0;
    std::memcpy(&slots[lane], value, bytes);
    if (++w.arrived == 32) {
      w.arrived = 0, w.turn ^= 1;
      for (unsigned i = warp * 32; i < warp * 32 + 32; ++i)
        if (fibers_[i].state == State::at_warp) fibers_[i].state = State::ready;
    } else {
      leave(State::at_warp);
    }
    return slots;
  }

 private:
  static void body_of_fiber() {
    Block* self = current;
    try {
      (*self->body_)();
    } catch (...) {
      self->failure_ = std::current_exception();
    }
    self->leave(State::done);
  }

  void prepare(Fiber& fiber) {
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber.stack.get() + kStack) &
                                          ~uintptr_t{15});
    *--top = nullptr;  // as if called: the stack is 16 bytes aligned before the return address
    *--top = reinterpret_cast<void*>(&body_of_fiber);
    top -= 6;  // the registers
    std::memset(top, 0, 6 * sizeof *top);
    fiber.pointer = top;
    fiber.state = State::ready;
  }

  void enter(unsigned i) {
    running_ = i;
    place.thread = {i, 0, 0};
    sheaf_switch_fiber(&home_, fibers_[i].pointer);
  }
  void leave(State state) {
    Fiber& fiber = fibers_[running_];
    fiber.state = state;
    sheaf_switch_fiber(&fiber.pointer, home_);
  }

  bool release_block_barrier() {
    for (unsigned i = 0; i < threads_; ++i)
      if (fibers_[i].state != State::at_block_barrier && fibers_[i].state != State::done)
        return false;
    for (unsigned i = 0; i < threads_; ++i)
      if (fibers_[i].state == State::at_block_barrier) fibers_[i].state = State::ready;
    return true;
  }

  [[noreturn]] void stuck() {
    unsigned block = 0, warp = 0;
    for (unsigned i = 0; i < threads_; ++i)
      block += fibers_[i].state == State::at_block_barrier,
          warp += fibers_[i].state == State::at_warp;
    current = nullptr;
    fail<CudaError>('[', name_, "] deadlock in a block: ", done_, " of ", threads_,
                    " threads ended, ", block, " wait at __syncthreads, ", warp,
                    " for lanes of their warp (emulated GPU)");
  }

  struct alignas(16) Chunk {
    char bytes[16];
  };
  const char* name_ = "";
  unsigned threads_ = 0, running_ = 0, done_ = 0;
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr failure_;
  void* home_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Chunk> shared_;
};

thread_local std::unique_ptr<Block> worker;

}  // namespace

void* dynamic_shared() { return current->shared(); }
void block_barrier() { current->block_barrier(); }
const void* exchange(const void* value, size_t bytes, unsigned mask) {
  return current->exchange(value, bytes, mask);
}

void run(const char* name, dim3 grid, unsigned threads, size_t shared_bytes,
         const std::function<void()>& body) {
  check<CudaError>(threads > 0 && threads <= kMaxThreads, '[', name, "] launch with ", threads,
                   " threads a block");
  check<CudaError>(shared_bytes <= (227 << 10), '[', name, "] launch with ", shared_bytes,
                   " bytes of shared memory");
  MemoryAccess access;
  if (!worker) worker = std::make_unique<Block>();
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  // A walk through all blocks in another order than theirs: steps of a prime that does not divide
  // their number.
  uint64_t stride = 1;
  for (uint64_t prime : {7919, 104729, 1299709})
    if (blocks % prime != 0) {
      stride = prime;
      break;
    }
  uint64_t b = blocks / 2;
  for (uint64_t n = 0; n < blocks; ++n, b = (b + stride) % blocks) {
    place.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                   static_cast<unsigned>(b / grid.x / grid.y)};
    place.grid = grid;
    place.block_size = dim3(threads);
    worker->start(name, threads, shared_bytes, body);
    worker->run(static_cast<unsigned>(n * 37 % threads), n % 2 == 1);
  }
}

}  // namespace emulation

// --- runtime.h: everything happens at once, in the order of the host ---

int device_count() { return 1; }
std::string why_no_device() { return ""; }
std::string device_name(int) { return "emulated GPU"; }
int multiprocessors(int) { return 4; }
void use_device(int device) {
  check<CudaError>(device == 0, "[cudaSetDevice] invalid device ordinal (emulated GPU)");
}

void* allocate(size_t bytes) { return device_memory().allocate(bytes); }
void free(void* memory) { device_memory().free(memory); }
size_t map_granularity(int) { return 1 << 20; }
DeviceRange reserve(int, size_t bytes) { return device_memory().reserve(bytes); }
bool map(int, DeviceRange& range, size_t bytes) { return device_memory().map(range, bytes); }
void release(DeviceRange& range) { device_memory().release(range); }
DeviceMemoryInfo memory_info() { return device_memory().info(); }
void* allocate_pinned(size_t bytes) { return ::operator new (bytes, std::align_val_t{256}); }
void free_pinned(void* memory) { ::operator delete (memory, std::align_val_t{256}); }

Stream make_stream(int device, Priority) {
  use_device(device);
  return {Device::cuda(device), nullptr};
}
void destroy_stream(const Stream&) {}
void synchronize(const Stream&) {}
EventHandle make_event() { return nullptr; }
void destroy_event(EventHandle) {}
void record(EventHandle, const Stream&) {}
void wait(const Stream&, EventHandle) {}
void synchronize(EventHandle) {}
bool reached(EventHandle) { return true; }

void copy_bytes(const Stream&, void* to, const void* from, size_t bytes, Copy) {
  const emulation::MemoryAccess access;
  if (bytes) std::memcpy(to, from, bytes);
}
void fill_bytes(const Stream&, void* to, int byte, size_t bytes) {
  const emulation::MemoryAccess access;
  if (bytes) std::memset(to, byte, bytes);
}

}  // namespace sheaf::kernels::cuda
