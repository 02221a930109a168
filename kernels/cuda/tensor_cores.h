// A warp's use of tensor cores, and asynchronous copies to shared memory: the PTX instructions for which CUDA C++ has no functions
// (https://docs.nvidia.com/cuda/parallel-thread-execution). Emulated, they are functions that do the same, lane by lane
// (emulated_tensor_cores.h).
//
// Every lane of a warp calls load_matrices() and multiply_add() together; copies are a thread's own. How a matrix is distributed over
// lanes: of 8 x 8 elements, lane n has the two at row n / 4 from column n % 4 * 2 on, in one register, the first in its lower half.
#pragma once

#include "sheaf/kernels/cuda/numbers.h"

#if SHEAF_CUDA_EMULATED
#include "sheaf/kernels/cuda/emulated_tensor_cores.h"
#endif

namespace sheaf::kernels::cuda {

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x) / kWarp; }

#if !SHEAF_CUDA_EMULATED

/// x and y, rounded to elements, x in the lower half.
template <class T>
__device__ unsigned pair_of(float x, float y) {
  unsigned out;
  if constexpr (std::is_same_v<T, bf16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(y), "f"(x));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(y), "f"(x));
  return out;
}

/// Loads four 8 x 8 matrices of 2-byte elements from shared memory; lanes 0 to 7, 8 to 15, .. pass the addresses of their rows, each
/// a multiple of 16 bytes; transposed, if kTransposed.
template <bool kTransposed>
__device__ void load_matrices(unsigned (&to)[4], const void* row) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
}

/// c += a b, of a 16 x 16 and b 16 x 8 of T, c 16 x 8 in f32. a: rows 0 to 7 and 8 to 15 of columns 0 to 7, then of 8 to 15. b,
/// transposed: its rows 0 to 7, then 8 to 15. c: rows 0 to 7, a register per element, then 8 to 15.
template <class T>
__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Copies 16 bytes of global memory, or zeros, to shared memory; in flight until arrived(). Both addresses are multiples
/// of 16 bytes.
__device__ inline void copy_beside(void* to, const void* from, bool there) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = there ? 16 : 0;  // the others become zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
/// Ends a round of a thread's copies.
__device__ inline void end_round() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for all of this thread's copies except those of its newest kLeft rounds. Those of other threads need a
/// barrier.
template <int kLeft>
__device__ void arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

#endif

/// A matrix of 2-byte elements in shared memory, `pitch` elements from row to row, as an operand of multiply_add: 16 x 16 elements of it,
/// from (row, column) on. If its rows run along the summed dimension, they are transposed.
template <class T>
struct SharedMatrix {
  const T* data;
  int pitch;

  /// Rows of the product are the matrix's rows or, kColumns, its columns.
  template <bool kColumns>
  __device__ void as_a(unsigned (&to)[4], int row, int column) const {
    const int lane = lane_of_thread(), first = lane / 8 % 2 * 8, second = lane / 16 * 8;
    load_matrices<kColumns>(to, data + (row + lane % 8 + (kColumns ? second : first)) * pitch + column + (kColumns ? first : second));
  }
  /// Columns of the product are the matrix's rows or, kColumns, its columns: the first eight are b0 and b1 of to[0] and to[1], the
  /// others of to[2] and to[3].
  template <bool kColumns>
  __device__ void as_b(unsigned (&to)[4], int row, int column) const {
    const int lane = lane_of_thread(), first = lane / 8 % 2 * 8, second = lane / 16 * 8;
    load_matrices<kColumns>(to, data + (row + lane % 8 + (kColumns ? first : second)) * pitch + column + (kColumns ? second : first));
  }
};

}  // namespace sheaf::kernels::cuda
