// Which build of the random kernels runs ([Note: two builds of one kernel] in simd.h).
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/kernels/random.h"

namespace sheaf::kernels {

SHEAF_SIMD_CHOOSE(uniform,
                  (const View& out, DrawKey key, const GlobalIndex& where, double lo, double hi),
                  (out, key, where, lo, hi))
SHEAF_SIMD_CHOOSE(normal,
                  (const View& out, DrawKey key, const GlobalIndex& where, double mean, double std),
                  (out, key, where, mean, std))
SHEAF_SIMD_CHOOSE(dropout,
                  (const View& x, double p, DrawKey key, const GlobalIndex& where, const View& out),
                  (x, p, key, where, out))

}  // namespace sheaf::kernels
