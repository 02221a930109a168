#include "sheaf/kernels/cuda/slow_notice.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>

namespace sheaf::kernels::cuda {

void slow_notice([[maybe_unused]] std::string_view text) {
#if !SHEAF_CUDA_EMULATED
  static std::mutex mutex;
  static std::set<std::string, std::less<>> known;
  std::lock_guard lock(mutex);
  if (known.size() >= kMostNotices || !known.emplace(text).second) return;
  // One call, so that lines of several ranks do not mix.
  std::fprintf(stderr, "sheaf: %.*s\n", static_cast<int>(text.size()), text.data());
#endif
}

}  // namespace sheaf::kernels::cuda
