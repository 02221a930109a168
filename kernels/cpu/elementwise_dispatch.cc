// Which build of the elementwise kernels runs ([Note: two builds of one kernel] in simd.h).
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/kernels/elementwise.h"

#define SHEAF_EITHER(function, parameters, arguments)             \
  SHEAF_SIMD_DECLARE(function)                                    \
  namespace cpu {                                                 \
  void function parameters {                                      \
    (has_v4() ? v4::function : v3::function) arguments;           \
  }                                                               \
  }

namespace sheaf::kernels {

SHEAF_EITHER(unary, (UnaryOp op, const View& x, const View& out), (op, x, out))
SHEAF_EITHER(binary, (BinaryOp op, const View& a, const View& b, const View& out), (op, a, b, out))
SHEAF_EITHER(binary_scalar,
             (BinaryOp op, const View& a, double scalar, bool scalar_left, const View& out),
             (op, a, scalar, scalar_left, out))
SHEAF_EITHER(where, (const View& cond, const View& a, const View& b, const View& out),
             (cond, a, b, out))
SHEAF_EITHER(where_scalar,
             (const View& cond, const View& x, double scalar, bool scalar_first, const View& out),
             (cond, x, scalar, scalar_first, out))
SHEAF_EITHER(clamp, (const View& x, double lo, double hi, const View& out), (x, lo, hi, out))
SHEAF_EITHER(gelu_backward, (UnaryOp kind, const View& x, const View& dy, const View& dx),
             (kind, x, dy, dx))
SHEAF_EITHER(silu_backward, (const View& x, const View& dy, const View& dx), (x, dy, dx))
SHEAF_EITHER(relu_backward, (const View& x, const View& dy, const View& dx), (x, dy, dx))
SHEAF_EITHER(tanh_backward, (const View& y, const View& dy, const View& dx), (y, dy, dx))
SHEAF_EITHER(sigmoid_backward, (const View& y, const View& dy, const View& dx), (y, dy, dx))
SHEAF_EITHER(swiglu, (const View& gate, const View& up, const View& out), (gate, up, out))
SHEAF_EITHER(swiglu_backward,
             (const View& gate, const View& up, const View& dy, const View& dgate, const View& dup),
             (gate, up, dy, dgate, dup))

}  // namespace sheaf::kernels
