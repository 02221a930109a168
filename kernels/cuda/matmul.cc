#include "sheaf/kernels/matmul.h"

#include "sheaf/kernels/cuda/gemm.h"

namespace sheaf::kernels::cuda {

size_t matmul_workspace(const View& a, const View& b, const View& c, bool fp8) {
  return gemm_workspace({.who = "matmul", .a = a, .b = b, .c = c, .bias = {}, .fp8 = fp8});
}

void matmul(const Stream& stream, const View& a, const View& b, const View& c,
            Workspace workspace, bool fp8) {
  gemm(stream, {.who = "matmul", .a = a, .b = b, .c = c, .bias = {}, .fp8 = fp8}, workspace);
}

}  // namespace sheaf::kernels::cuda
