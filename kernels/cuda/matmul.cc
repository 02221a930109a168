#include "sheaf/kernels/matmul.h"

#include "sheaf/kernels/cuda/gemm.h"

namespace sheaf::kernels::cuda {

size_t matmul_workspace(const View& a, const View& b, const View& c) {
  return gemm_workspace({"matmul", a, b, c, {}});
}

void matmul(const Stream& stream, const View& a, const View& b, const View& c,
            Workspace workspace) {
  gemm(stream, {"matmul", a, b, c, {}}, workspace);
}

}  // namespace sheaf::kernels::cuda
