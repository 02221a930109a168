#include "sheaf/kernels/matmul.h"

#include "sheaf/kernels/cpu/gemm.h"

namespace sheaf::kernels::cpu {

size_t matmul_workspace(const View& a, const View& b, const View& c, bool fp8) {
  return gemm_workspace({.who = "matmul", .a = a, .b = b, .c = c, .bias = {}, .fp8 = fp8});
}

void matmul(const View& a, const View& b, const View& c, Workspace workspace, bool fp8) {
  gemm({.who = "matmul", .a = a, .b = b, .c = c, .bias = {}, .fp8 = fp8}, workspace);
}

}  // namespace sheaf::kernels::cpu
