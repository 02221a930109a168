// The peer of our products: oneDNN's matmul as called by a program that keeps nothing but the primitive. Plain
// row-major memory, oneDNN's own scratchpad, no packing, no choice of kernels.
#pragma once

#include <functional>

#include "sheaf/core/view.h"

namespace sheaf::bench {

/// A call that computes c[M, N] = a[M, K] b[K, N]; matrices of any two strides of which one is 1.
/// Made for the threads of the calling rank. Throws ConfigError where oneDNN has no such product.
std::function<void()> plain_gemm(const View& a, const View& b, const View& c);

}  // namespace sheaf::bench
