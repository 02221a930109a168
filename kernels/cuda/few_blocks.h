// Kernels that read or write host memory mostly wait for the bus. Running blocks keep their multiprocessors until they end, whatever
// the priority of their stream: with as many blocks as fit, all other kernels would wait, too.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sheaf::kernels::cuda {

/// While one lives, this thread's launches of kernels that cast, add and pack use few blocks, which loop over the data.
class FewBlocks {
 public:
  FewBlocks() { ++depth_; }
  ~FewBlocks() { --depth_; }
  FewBlocks(const FewBlocks&) = delete;
  FewBlocks& operator=(const FewBlocks&) = delete;

  /// `blocks`, or fewer. By Little's law 64 GB/s (PCIe 5.0) at 2 us keep 128 KB in flight; a block has 4 to 16 KiB.
  static int64_t of(int64_t blocks) { return depth_ > 0 ? std::min<int64_t>(blocks, 32) : blocks; }

 private:
  static inline thread_local int depth_ = 0;
};

}  // namespace sheaf::kernels::cuda
