// Checks each memory access in a kernel: it must be aligned and, with --config=races, not concurrent with another thread's. The
// compiler inserts the checks (-fsanitize=alignment, -fsanitize=thread); the functions they call are in this file, instead of in the
// compiler's runtime.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <unordered_map>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/emulation.h"

namespace sheaf::kernels::cuda::emulation {
namespace {

// --- races ---

enum class Kind : uint8_t { none, read, write, atomic };
struct Access {
  Moment at;
  Kind kind = Kind::none;
};

// Blocks have no order; threads of a block have one by __syncthreads, those of a warp by __syncwarp
// (other warp operations order no memory).
bool ordered(const Access& before, const Moment& now, bool shared) {
  const Moment& then = before.at;
  if (before.kind == Kind::none || then.launch != now.launch) return true;
  if (then.block != now.block) return shared;  // shared memory belongs to its block
  return then.thread == now.thread || then.barriers != now.barriers ||
         (then.thread / 32 == now.thread / 32 && then.syncs != now.syncs);
}

// The last write of a byte, and the last two threads that read it since.
struct Cell {
  Access write, read, other_read;
  bool shared = false;  // memory other than device memory that kernels have written
};

Cell& cell_of(uintptr_t address) {
  constexpr uintptr_t kPage = 4096;
  constexpr size_t kMostPages = 2048;  // beyond half a gigabyte, everything is forgotten
  thread_local std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages;
  thread_local uintptr_t last_number = 0;
  thread_local Cell* last = nullptr;
  const uintptr_t number = address / kPage;
  if (!last || number != last_number) {
    if (pages.size() > kMostPages) pages.clear();
    std::unique_ptr<Cell[]>& page = pages[number];
    if (!page) page = std::make_unique<Cell[]>(kPage);
    last_number = number, last = page.get();
  }
  return last[address % kPage];
}

void watch(const void* data, size_t bytes, Kind kind) {
  if (!running() || on_own_stack(data)) return;
  const Moment at = now();
  const auto first = reinterpret_cast<uintptr_t>(data);
  const bool writes_shared = kind != Kind::read && !on_device(first);
  for (uintptr_t address = first; address < first + bytes; ++address) {
    Cell& cell = cell_of(address);
    const bool shared = writes_shared || cell.shared;
    if (kind == Kind::read && shared &&
        (cell.write.at.launch != at.launch || cell.write.at.block != at.block))
      refuse(str("thread ", at.thread, " of block ", at.block,
                 " has read shared memory that its block has not written"));
    const auto compare = [&](const Access& before) {
      if ((kind == Kind::atomic && before.kind == Kind::atomic) || ordered(before, at, shared))
        return;
      const auto verb = [](Kind k) { return k == Kind::read ? "read" : "written"; };
      refuse(str("race: what thread ", at.thread, " of block ", at.block, " has ", verb(kind),
                 ", thread ", before.at.thread, " of block ", before.at.block, " had ",
                 verb(before.kind), ", and nothing puts one before the other"));
    };
    compare(cell.write);
    if (kind == Kind::read) {
      const Moment& last = cell.read.at;
      if (last.launch != at.launch || last.block != at.block || last.thread != at.thread)
        cell.other_read = cell.read;
      cell.read = {at, kind};
    } else {
      compare(cell.read), compare(cell.other_read);
      cell = {{at, kind}, {}, {}, shared};
    }
  }
}

}  // namespace

void note_atomic(const void* address, size_t bytes) { watch(address, bytes, Kind::atomic); }

}  // namespace sheaf::kernels::cuda::emulation

using sheaf::kernels::cuda::emulation::Kind;
using sheaf::kernels::cuda::emulation::watch;

extern "C" {

#ifndef SHEAF_TSAN  // which defines these itself

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
#define SHEAF_WATCH(bytes)                                                    \
  void __tsan_read##bytes(void* p) { watch(p, bytes, Kind::read); }           \
  void __tsan_write##bytes(void* p) { watch(p, bytes, Kind::write); }         \
  void __tsan_unaligned_read##bytes(void* p) { watch(p, bytes, Kind::read); } \
  void __tsan_unaligned_write##bytes(void* p) { watch(p, bytes, Kind::write); }
SHEAF_WATCH(1)
SHEAF_WATCH(2)
SHEAF_WATCH(4)
SHEAF_WATCH(8)
SHEAF_WATCH(16)
void __tsan_read_range(void* p, size_t bytes) { watch(p, bytes, Kind::read); }
void __tsan_write_range(void* p, size_t bytes) { watch(p, bytes, Kind::write); }

// For host code in the same files as kernels.
uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) {
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* p, uint32_t x, int) {
  return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
}
uint32_t __tsan_atomic32_fetch_sub(volatile uint32_t* p, uint32_t x, int) {
  return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);
}

#endif

// --- alignment ---

#ifndef SHEAF_ASAN  // which defines these itself

struct SheafMisaligned {
  const char* file;
  unsigned line, column;
  const struct {
    uint16_t kind, info;
    char name[64];  // as long as it is
  } * type;
};

// Code that calls it expects no exception.
[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const SheafMisaligned* access,
                                                        uintptr_t to) {
  using namespace sheaf::kernels::cuda::emulation;
  if (!running()) {  // in a kernel's host code
    std::fprintf(stderr, "%s:%u: misaligned access\n", access->file, access->line);
    std::abort();
  }
  refuse(sheaf::str("misaligned address: ", access->type->name,
                    " is read or written at a multiple of ", to & -to, ", ", access->file, ':',
                    access->line));
}

#endif

}  // extern "C"
