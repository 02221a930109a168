// CUDA's device language on a CPU, so that the kernels of this folder can be tested without a GPU: the same .cu files, compiled by
// the host's compiler with --config=emulated.
//
// A block's threads are fibers of one host thread. They switch only at __syncthreads and at warp operations, in an order that changes
// from block to block, and blocks run in a shuffled order: code that relies on an order without synchronisation gives wrong results.
// Misuse ends in a CudaError: threads of a block that wait at different barriers, a warp operation that not all lanes of a full warp
// reach, a misaligned access; with --config=races, accesses of two threads to the same memory that no barrier orders. Only kernels
// and copies may access device memory; an access by the host is a segmentation fault, and so is one past its end.
//
// Streams run as late as they may: enqueued work waits until the host synchronises with it, or with a stream that
// is ordered after it. So work that was not ordered after an event finds its inputs missing, and memory that is
// freed too early is overwritten. An error in a kernel appears where the host synchronises, as on a GPU. A graph
// runs the work that its capture has recorded, with the arguments it had then, in an order constrained only by the
// recorded dependencies.
//
// Tensor cores, and asynchronous copies to shared memory, are in tensor_cores.h.
//
// It cannot show occupancy or speed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "sheaf/core/device.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// One per block: a host thread runs one block at a time, and its fibers share thread-local variables.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_in = 1, unsigned y_in = 1, unsigned z_in = 1)
      : x(x_in), y(y_in), z(z_in) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace sheaf::kernels::cuda::emulation {

struct Place {  // of the running fiber
  uint3 thread{}, block{};
  dim3 block_size, grid;
};
inline thread_local Place place;

/// Runs `body` as every thread of every block; called by enqueued work.
void run(const char* name, dim3 grid, unsigned threads, size_t shared_bytes,
         const std::function<void()>& body);
void* dynamic_shared();
void block_barrier();
inline constexpr size_t kSlot = 48;
/// Gives `bytes` (at most kSlot) of this lane to its warp and waits for all lanes; returns the slots
/// of all 32, kSlot bytes apart, valid until the warp operation after this lane's next. The last lane
/// calls `together`, if given, with the slots, before any other goes on.
const void* exchange(const void* value, size_t bytes, unsigned mask, void (*together)(void* slots) = nullptr);
void warp_barrier(unsigned mask);

/// The position of the running thread at a memory access.
struct Moment {
  unsigned launch = 0;  ///< number among this host thread's launches, from 1
  unsigned block = 0, thread = 0;
  unsigned barriers = 0, syncs = 0;  ///< numbers of barriers that its block and its warp have passed
};
bool running();  ///< a kernel, on this host thread
Moment now();
bool on_own_stack(const void* address);
/// Ends the launch with a CudaError without unwinding the stack of the thread that calls it.
[[noreturn]] void refuse(const std::string& why);
/// True for device memory.
bool on_device(uintptr_t address);
/// Before an atomic operation.
void note_atomic(const void* address, size_t bytes);

/// Enqueues work on device memory that is not a kernel, such as replacements for NVIDIA's libraries.
void enqueue(const Stream& stream, std::function<void()> work);

/// A pending copy of 16 bytes to shared memory.
struct Copy {
  void* to;
  const void* from;
  bool there;  ///< else they become zeros
};
/// Adds a copy of the running thread. It is an error if the thread ends with copies pending.
void add_copy(const Copy& copy);
void end_round();
/// Removes and returns the next due copy; all but those of the newest `rounds_left` rounds are due. False if there is none.
bool take_copy(int rounds_left, Copy& copy);

/// The values that the lanes of a warp have given.
template <class T>
class Lanes {
 public:
  explicit Lanes(const void* slots) : slots_(static_cast<const char*>(slots)) {}
  T operator[](int lane) const {
    T out;
    std::memcpy(&out, slots_ + kSlot * lane, sizeof out);
    return out;
  }

 private:
  const char* slots_;
};
template <class T>
Lanes<T> from_lanes(const T& value, unsigned mask = 0xffffffffu) {
  static_assert(sizeof(T) <= kSlot);
  return Lanes<T>(exchange(&value, sizeof value, mask));
}
template <class T>
T from_lane(T value, int lane, unsigned mask) {
  return from_lanes(value, mask)[lane];
}
inline int lane() { return static_cast<int>(place.thread.x % 32); }

/// Computes what each lane of a warp gets from what all have given, once per warp.
template <class Out, auto kTogether, class In>
Out from_warp(const In& value) {
  static_assert(sizeof(In) <= kSlot && sizeof(Out) <= kSlot);
  return Lanes<Out>(exchange(&value, sizeof value, 0xffffffffu, [](void* slots) {
    In in[32];
    Out out[32];
    for (int i = 0; i < 32; ++i) in[i] = Lanes<In>(slots)[i];
    kTogether(in, out);
    for (int i = 0; i < 32; ++i) std::memcpy(static_cast<char*>(slots) + kSlot * i, &out[i], sizeof(Out));
  }))[lane()];
}

}  // namespace sheaf::kernels::cuda::emulation

#define threadIdx (::sheaf::kernels::cuda::emulation::place.thread)
#define blockIdx (::sheaf::kernels::cuda::emulation::place.block)
#define blockDim (::sheaf::kernels::cuda::emulation::place.block_size)
#define gridDim (::sheaf::kernels::cuda::emulation::place.grid)

inline void __syncthreads() { ::sheaf::kernels::cuda::emulation::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  ::sheaf::kernels::cuda::emulation::warp_barrier(mask);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return ::sheaf::kernels::cuda::emulation::from_lane(value, source & 31, mask);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  namespace e = ::sheaf::kernels::cuda::emulation;
  return e::from_lane(value, e::lane() ^ lanes, mask);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by) {
  namespace e = ::sheaf::kernels::cuda::emulation;
  return e::from_lane(value, e::lane() + by < 32 ? e::lane() + by : e::lane(), mask);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by) {
  namespace e = ::sheaf::kernels::cuda::emulation;
  return e::from_lane(value, e::lane() >= by ? e::lane() - by : e::lane(), mask);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto votes = ::sheaf::kernels::cuda::emulation::from_lanes(predicate != 0, mask);
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= unsigned{votes[i]} << i;
  return out;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == 0xffffffffu;
}

// Blocks run one after another on a host thread, but several ranks may use one device.
#ifdef __SANITIZE_THREAD__  // --config=races
#define SHEAF_ATOMIC __attribute__((no_sanitize("thread")))
#define SHEAF_NOTE_ATOMIC(to) ::sheaf::kernels::cuda::emulation::note_atomic(to, sizeof *to)
#else
#define SHEAF_ATOMIC
#define SHEAF_NOTE_ATOMIC(to)
#endif
SHEAF_ATOMIC inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T>
SHEAF_ATOMIC T atomicAdd(T* to, T value) {
  SHEAF_NOTE_ATOMIC(to);
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
template <class T>
SHEAF_ATOMIC T atomicOr(T* to, T value) {
  SHEAF_NOTE_ATOMIC(to);
  return __atomic_fetch_or(to, value, __ATOMIC_SEQ_CST);
}
template <class T>
SHEAF_ATOMIC T atomicExch(T* to, T value) {
  SHEAF_NOTE_ATOMIC(to);
  return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST);
}
template <class T>
SHEAF_ATOMIC T atomicCAS(T* to, T expected, T value) {
  SHEAF_NOTE_ATOMIC(to);
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T>
SHEAF_ATOMIC T atomicMin(T* to, T value) {
  SHEAF_NOTE_ATOMIC(to);
  T seen = *to;
  while (value < seen &&
         !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return seen;
}
template <class T>
SHEAF_ATOMIC T atomicMax(T* to, T value) {
  SHEAF_NOTE_ATOMIC(to);
  T seen = *to;
  while (seen < value &&
         !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return seen;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(static_cast<unsigned>(x)) + 1 : 0; }
// Operations that are never contracted; kernels are compiled with contraction allowed.
template <class T>
T emulated_rounding(T x) {
  asm("" : "+x"(x));
  return x;
}
inline float __fadd_rn(float a, float b) { return emulated_rounding(a) + emulated_rounding(b); }
inline float __fmul_rn(float a, float b) { return emulated_rounding(a * b); }
inline double __dadd_rn(double a, double b) { return emulated_rounding(a) + emulated_rounding(b); }
inline double __dmul_rn(double a, double b) { return emulated_rounding(a * b); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp2(x * 1.44269504f); }  // as accurate as the GPU's
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
