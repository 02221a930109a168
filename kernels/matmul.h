// Matrix products.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// Bytes that `matmul` needs. Depends on shapes, strides, dtypes and the rank's thread count; data
/// may be null.
size_t matmul_workspace(const View& a, const View& b, const View& c, bool fp8 = false);

/// c[.., M, N] = a[.., M, K] b[.., K, N]; leading dimensions broadcast (a view's may have stride 0
/// already). Any strides: transposes cost nothing. a and b have one floating dtype; c has it too,
/// or is f32 for bf16 and f16, which multiply with f32 accumulation. K = 0 gives zeros. A row of the product does
/// not depend, bit for bit, on M, the batch, or the number of threads. With fp8, a's rows and b's columns are
/// rounded first (fp8.h); both functions must be told.
void matmul(const View& a, const View& b, const View& c, Workspace workspace, bool fp8 = false);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`, by cuBLASLt. f32 is multiplied as f32, never as TF32.
/// The same call gives the same bits at every run with the same choice of algorithms
/// (cuda/product.h); a row's bits may depend on M and on the batch, since other sizes may use another algorithm.
namespace cuda {

size_t matmul_workspace(const View& a, const View& b, const View& c, bool fp8 = false);
void matmul(const Stream& stream, const View& a, const View& b, const View& c, Workspace workspace,
            bool fp8 = false);

}  // namespace cuda
}  // namespace sheaf::kernels
