// GemmPart: the share of a matrix product that one thread computes. gemm.cc divides a product into parts; three kernels multiply
// them: gemm_simd.cc by vectors (f32 and f64), gemm_amx.cc by tiles and gemm_dot.cc by vectors of pairs (bf16).
//
// [Note: the bits of a product] By vectors, an element of c is the sum over blocks of the depth, in order, each block one chain of
// fused multiply-adds; the blocks depend on the depth alone. By the other kernels it is one chain of their instructions. So neither
// the other rows and columns nor the number of threads change a bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sheaf/core/dtype.h"

namespace sheaf::kernels::cpu {

/// Element (i, j) is at data + i * row_stride + j * col_stride, counted in elements.
struct MatrixOperand {
  char* data;
  DType dtype;
  int64_t row_stride, col_stride;
};

/// c[rows, cols] = a[rows, depth] b[depth, cols] + bias[cols], or c += a b if `accumulate` (then without bias). a and b
/// have one dtype and any strides; c has the compute dtype and dense rows. No size is zero.
struct GemmPart {
  int64_t rows, cols, depth;
  MatrixOperand a, b, c;
  MatrixOperand bias;  ///< one row; its data is nullptr for none
  bool accumulate;
};

/// The length of a chain in products by vectors.
inline constexpr int64_t kDepthBlock = 384;

/// Bytes of scratch memory that gemm_part needs, aligned to 128. Bounded, whatever the sizes.
size_t gemm_scratch(const GemmPart& p);
void gemm_part(const GemmPart& p, void* scratch);

}  // namespace sheaf::kernels::cpu
