// Which build of the fused kernel runs ([Note: two builds of one kernel] in simd.h).
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/kernels/fused.h"

namespace sheaf::kernels {

SHEAF_SIMD_CHOOSE(fused,
                  (const FusedCode& code, std::span<const View> inputs, std::span<const View> outputs),
                  (code, inputs, outputs))

}  // namespace sheaf::kernels
