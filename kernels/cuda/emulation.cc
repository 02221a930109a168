#include "sheaf/kernels/cuda/emulation.h"

#include <deque>
#include <exception>
#include <memory>
#include <vector>

#include "sheaf/core/error.h"

namespace sheaf::kernels::cuda {

namespace emulation {

// --- fibers ---

namespace {

// Saves the callee-saved registers and continues where `to` was left: by a jump, since a return would always be mispredicted.
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
  popq %rcx
  jmp *%rcx
.size sheaf_switch_fiber, .-sheaf_switch_fiber
)");

constexpr size_t kStack = 128 << 10;
// Stacks begin at offsets that differ in the caches, too: at multiples of a page they would evict each other from the same few lines
// at every switch.
constexpr size_t kStagger = 17 * 64, kStaggers = 61, kMostStagger = kStagger * kStaggers;
constexpr size_t kMostShared = 227 << 10;  // launch() asks for less

enum class State : uint8_t { ready, at_block_barrier, at_warp, done };

struct CopyOfRound {
  Copy copy;
  int round;
};

struct Fiber {
  std::unique_ptr<char[]> stack;
  void* pointer = nullptr;  // stack pointer when it was suspended
  State state = State::done;
  std::deque<CopyOfRound> copies;  // pending
  int rounds = 0;                  // of copies that have ended
};

struct Warp {
  char slots[2][32][kSlot];
  unsigned arrived = 0, syncs = 0;  // syncs: only __syncwarp, as only it orders memory
  int turn = 0;
};

class Block;
thread_local Block* current = nullptr;

class Block {
 public:
  void start(const char* name, unsigned launch, unsigned block, unsigned threads,
             size_t shared_bytes, const std::function<void()>& body) {
    name_ = name, threads_ = threads, body_ = &body;
    launch_ = launch, block_ = block, barriers_ = 0;
    std::memset(shared_.data(), 0xff, shared_bytes);
    if (warps_.size() < (threads + 31) / 32) warps_.resize((threads + 31) / 32);
    for (Warp& w : warps_) w.arrived = w.syncs = 0, w.turn = 0;
    if (fibers_.size() < threads) fibers_.resize(threads);
    for (unsigned i = 0; i < threads; ++i) prepare(fibers_[i], i);
  }

  // Cycles through the fibers, each time from `first` on, until all are done. One that waits continues the next one itself.
  void run(unsigned first, bool backwards) {
    current = this;
    failure_ = nullptr;
    done_ = 0, backwards_ = backwards;
    for (;;) {
      turn_ = first, turns_left_ = threads_;
      const Fiber* const next = next_ready();
      if (next) sheaf_switch_fiber(&home_, next->pointer);
      if (failure_) {
        current = nullptr;
        std::rethrow_exception(failure_);
      }
      if (done_ == threads_) break;
      if (!release_block_barrier() && !next) stuck();
    }
    current = nullptr;
  }

  void* shared() { return shared_.data(); }
  const char* name() const { return name_; }
  Moment now() const { return {launch_, block_, running_, barriers_, warps_[running_ / 32].syncs}; }
  bool on_own_stack(const void* address) const {
    const char* stack = fibers_[running_].stack.get();
    return address >= stack && address < stack + kStack + kMostStagger;
  }

  /// Ends the running thread, and so the launch, without unwinding its stack.
  [[noreturn]] void abandon(std::exception_ptr failure) {
    failure_ = std::move(failure);
    leave(State::done);
    __builtin_unreachable();
  }

  void block_barrier() { leave(State::at_block_barrier); }

  const void* exchange(const void* value, size_t bytes, unsigned mask, bool sync, void (*together)(void* slots) = nullptr) {
    const unsigned warp = running_ / 32, lane = running_ % 32;
    if (mask != 0xffffffffu || (warp + 1) * 32 > threads_)
      fail<CudaError>('[', name_, "] a warp operation must name a full warp (emulated GPU)");
    Warp& w = warps_[warp];
    char(*const slots)[kSlot] = w.slots[w.turn];
    std::memcpy(slots[lane], value, bytes);
    if (++w.arrived == 32) {
      w.arrived = 0, w.turn ^= 1, w.syncs += sync;
      if (together) together(slots);
      for (unsigned i = warp * 32; i < warp * 32 + 32; ++i)
        if (fibers_[i].state == State::at_warp) fibers_[i].state = State::ready;
    } else {
      leave(State::at_warp);
    }
    return slots;
  }

  Fiber& running() { return fibers_[running_]; }

 private:
  static void body_of_fiber() {
    Block* self = current;
    try {
      (*self->body_)();
      if (!self->running().copies.empty())
        fail<CudaError>('[', self->name_, "] thread ", self->running_,
                        " has ended with copies on their way (emulated GPU)");
    } catch (...) {
      self->failure_ = std::current_exception();
    }
    self->leave(State::done);
  }

  void prepare(Fiber& fiber, unsigned i) {
    if (!fiber.stack) fiber.stack.reset(new char[kStack + kMostStagger]);
    char* const end = fiber.stack.get() + kStack + i % kStaggers * kStagger;
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(end) & ~uintptr_t{15});
    *--top = nullptr;  // as if called: the stack is 16-byte aligned before the return address
    *--top = reinterpret_cast<void*>(&body_of_fiber);
    top -= 6;  // the registers
    std::memset(top, 0, 6 * sizeof *top);
    fiber.pointer = top;
    fiber.state = State::ready;
    fiber.copies.clear(), fiber.rounds = 0;
  }

  // The next one of this cycle that can run, which is to run now; null at the cycle's end.
  const Fiber* next_ready() {
    while (turns_left_ > 0) {
      --turns_left_;
      const unsigned i = turn_;
      turn_ = backwards_ ? (i == 0 ? threads_ : i) - 1 : i + 1 == threads_ ? 0 : i + 1;
      if (fibers_[i].state != State::ready) continue;
      const char* top = static_cast<const char*>(fibers_[turn_].pointer);  // what the one after it will read first
      for (const int line : {0, 64, 128}) __builtin_prefetch(top + line);
      running_ = i;
      place.thread = {i, 0, 0};
      return &fibers_[i];
    }
    return nullptr;
  }
  void leave(State state) {
    Fiber& fiber = fibers_[running_];
    fiber.state = state;
    done_ += state == State::done;
    const Fiber* const next = failure_ ? nullptr : next_ready();
    sheaf_switch_fiber(&fiber.pointer, next ? next->pointer : home_);
  }

  bool release_block_barrier() {
    for (unsigned i = 0; i < threads_; ++i)
      if (fibers_[i].state != State::at_block_barrier && fibers_[i].state != State::done)
        return false;
    ++barriers_;
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
  unsigned launch_ = 0, block_ = 0, barriers_ = 0;
  unsigned threads_ = 0, running_ = 0, done_ = 0;
  unsigned turn_ = 0, turns_left_ = 0;  // of the fibers' present cycle
  bool backwards_ = false;
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr failure_;
  void* home_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Chunk> shared_ = std::vector<Chunk>(kMostShared / sizeof(Chunk));  // stays in place
};

thread_local std::unique_ptr<Block> worker;

}  // namespace

void* dynamic_shared() { return current->shared(); }
void block_barrier() { current->block_barrier(); }
const void* exchange(const void* value, size_t bytes, unsigned mask, void (*together)(void*)) {
  return current->exchange(value, bytes, mask, false, together);
}
void warp_barrier(unsigned mask) { current->exchange("", 1, mask, true); }

void add_copy(const Copy& copy) {
  Fiber& thread = current->running();
  thread.copies.push_back({copy, thread.rounds});
}
void end_round() { ++current->running().rounds; }
bool take_copy(int rounds_left, Copy& copy) {
  Fiber& thread = current->running();
  if (thread.copies.empty() || thread.copies.front().round >= thread.rounds - rounds_left) return false;
  copy = thread.copies.front().copy;
  thread.copies.pop_front();
  return true;
}

bool running() { return current != nullptr; }
Moment now() { return current->now(); }
bool on_own_stack(const void* address) { return current->on_own_stack(address); }

void refuse(const std::string& why) {
  std::exception_ptr failure;
  try {
    fail<CudaError>('[', current->name(), "] ", why, " (emulated GPU)");
  } catch (...) {
    failure = std::current_exception();
  }
  current->abandon(std::move(failure));
}

void run(const char* name, dim3 grid, unsigned threads, size_t shared_bytes,
         const std::function<void()>& body) {
  if (!worker) worker = std::make_unique<Block>();
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  // Visits all blocks in another order: in steps of a prime that does not divide their number.
  uint64_t stride = 1;
  for (uint64_t prime : {7919, 104729, 1299709})
    if (blocks % prime != 0) {
      stride = prime;
      break;
    }
  thread_local unsigned launches = 0;
  ++launches;
  uint64_t b = blocks / 2;
  for (uint64_t n = 0; n < blocks; ++n, b = (b + stride) % blocks) {
    place.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                   static_cast<unsigned>(b / grid.x / grid.y)};
    place.grid = grid;
    place.block_size = dim3(threads);
    worker->start(name, launches, static_cast<unsigned>(b), threads, shared_bytes, body);
    worker->run(static_cast<unsigned>(n * 37 % threads), n % 2 == 1);
  }
}

}  // namespace emulation
}  // namespace sheaf::kernels::cuda
