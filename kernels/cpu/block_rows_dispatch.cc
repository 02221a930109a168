#include "sheaf/kernels/cpu/block_rows.h"
#include "sheaf/kernels/cpu/simd.h"

namespace sheaf::kernels {

SHEAF_SIMD_CHOOSE(multiply_blocks, (const BlockRows& p, int64_t first), (p, first))

}  // namespace sheaf::kernels
