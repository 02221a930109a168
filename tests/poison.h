// Poisons memory so that reads before writes show.
#pragma once

#include <memory>

#include "sheaf/core/allocator.h"
#include "sheaf/core/gpu.h"

namespace sheaf::testing {

/// Fills the memory of every allocation on this thread's rank with a byte while it lives: by default all bits set, which is NaN. Values
/// that differ between runs under two bytes were not written.
class PoisonScope {
 public:
  explicit PoisonScope(int byte = 0xff);
  ~PoisonScope();
  PoisonScope(const PoisonScope&) = delete;
  PoisonScope& operator=(const PoisonScope&) = delete;

 private:
  std::shared_ptr<Allocator> previous_;
  std::shared_ptr<Gpu> previous_gpu_;
};

}  // namespace sheaf::testing
