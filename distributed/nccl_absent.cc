// No NCCL: the GPU is emulated, or the CUDA toolkit does not include it.
#include "sheaf/distributed/nccl.h"
#include "sheaf/kernels/cuda/config.h"

#if SHEAF_CUDA_EMULATED || !__has_include(<nccl.h>)

namespace sheaf {

NcclLibrary& nccl_library() {
  fail<ConfigError>("[nccl] there is no NCCL in this build: ranks on GPUs cannot reach each other");
}

}  // namespace sheaf

#endif
