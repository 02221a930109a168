// The lines of the comm suite on a GPU.
#pragma once

#include <string>

#include "sheaf/core/error.h"
#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

/// Ranks that share the GPU, as threads, against concurrent copies of as many bytes on all of them; and NCCL with a single rank,
/// whose all-gather and reduction are copies, against a copy.
void gpu_comm_lines(Session& session);

/// "64KiB", "16MiB".
inline std::string short_bytes(int64_t bytes) {
  return bytes >= 1 << 20 ? str(bytes >> 20, "MiB") : str(bytes >> 10, "KiB");
}

}  // namespace sheaf::bench
