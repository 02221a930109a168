#include "sheaf/kernels/matmul.h"

#include "sheaf/kernels/cpu/gemm.h"

namespace sheaf::kernels::cpu {

size_t matmul_workspace(const View& a, const View& b, const View& c) {
  return gemm_workspace({"matmul", a, b, c, {}});
}

void matmul(const View& a, const View& b, const View& c, Workspace workspace) {
  gemm({"matmul", a, b, c, {}}, workspace);
}

}  // namespace sheaf::kernels::cpu
