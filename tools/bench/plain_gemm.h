// The peer of our products: oneDNN's matmul as called by a program that caches only the primitive. Plain row-major memory, oneDNN's
// own scratchpad, no prepacking, no choice of kernels.
#pragma once

#include <functional>

#include "sheaf/core/view.h"

namespace sheaf::bench {

/// Whether oneDNN multiplies matrices of `dtype`, f32 or bf16, on this machine.
bool has_plain_gemm(DType dtype);

/// A call that computes c[M, N] = a[M, K] b[K, N]; the matrices may have any strides of which one is 1. Created for the threads of
/// the calling rank. Throws ConfigError where oneDNN has no such product.
std::function<void()> plain_gemm(const View& a, const View& b, const View& c);

}  // namespace sheaf::bench
