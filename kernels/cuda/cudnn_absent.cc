// For a CUDA toolkit without cuDNN: refuses everything.
#include "sheaf/kernels/cuda/cudnn_headers.h"
#if !SHEAF_HAS_CUDNN

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"

namespace sheaf::kernels::cuda::cudnn {
namespace {
constexpr const char* kWhy = "built without cuDNN 9.8 or later";
}

std::string refusal(const Attention&) { return kWhy; }
std::string refusal_on(std::string_view, const Attention&, int64_t*) { return kWhy; }
size_t attention_workspace(const Attention&) { fail<CudaError>("[attention] ", kWhy); }
void attention(const Stream&, const Attention&, Workspace) {
  fail<CudaError>("[attention] ", kWhy);
}
int64_t attention_calls() { return 0; }

}  // namespace sheaf::kernels::cuda::cudnn

#endif
