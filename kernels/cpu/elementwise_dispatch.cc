// Which build of the elementwise kernels runs ([Note: two builds of one kernel] in simd.h).
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels {

SHEAF_SIMD_CHOOSE(unary, (UnaryOp op, const View& x, const View& out), (op, x, out))
SHEAF_SIMD_CHOOSE(binary, (BinaryOp op, const View& a, const View& b, const View& out),
                  (op, a, b, out))
SHEAF_SIMD_CHOOSE(binary_scalar,
                  (BinaryOp op, const View& a, double scalar, bool scalar_left, const View& out),
                  (op, a, scalar, scalar_left, out))
SHEAF_SIMD_CHOOSE(where, (const View& cond, const View& a, const View& b, const View& out),
                  (cond, a, b, out))
SHEAF_SIMD_CHOOSE(where_scalar,
                  (const View& cond, const View& x, double scalar, bool scalar_first,
                   const View& out),
                  (cond, x, scalar, scalar_first, out))
SHEAF_SIMD_CHOOSE(clamp, (const View& x, double lo, double hi, const View& out), (x, lo, hi, out))
SHEAF_SIMD_CHOOSE(activation_backward,
                  (BackwardOp op, const View& kept, const View& dy, const View& dx),
                  (op, kept, dy, dx))
SHEAF_SIMD_CHOOSE(swiglu, (const View& gate, const View& up, const View& out), (gate, up, out))
SHEAF_SIMD_CHOOSE(swiglu_backward,
                  (const View& gate, const View& up, const View& dy, const View& dgate,
                   const View& dup),
                  (gate, up, dy, dgate, dup))
SHEAF_SIMD_CHOOSE(clamped_swiglu,
                  (const View& gate, const View& up, double alpha, double limit, const View& out),
                  (gate, up, alpha, limit, out))
SHEAF_SIMD_CHOOSE(clamped_swiglu_backward,
                  (const View& gate, const View& up, const View& dy, double alpha, double limit,
                   const View& dgate, const View& dup),
                  (gate, up, dy, alpha, limit, dgate, dup))

}  // namespace sheaf::kernels
