#include "sheaf/kernels/cuda/config.h"

namespace sheaf::kernels {

bool emulated_cuda() { return SHEAF_CUDA_EMULATED != 0; }

}  // namespace sheaf::kernels
