// Allocators count what was asked of them: live and peak requested bytes per rank, the figures that a tape predicts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace sheaf {

struct MemoryStats {
  int64_t live = 0;         ///< requested bytes alive now
  int64_t peak = 0;         ///< most requested bytes alive since the last reset_peak()
  int64_t reserved = 0;     ///< bytes resident on behalf of this allocator, free ones included
  int64_t allocations = 0;  ///< calls so far
};

/// Thread-safe. Blocks are aligned to 128 bytes.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* block, size_t bytes) = 0;
  virtual MemoryStats stats() const = 0;
  virtual void reset_peak() = 0;
};

/// A caching allocator over one virtual range: best fit, blocks split and merged, pages given back when free resident
/// bytes exceed a sixteenth of the peak, so the resident size stays near the live peak whatever the sizes are.
std::shared_ptr<Allocator> make_cpu_allocator();
/// Counts and returns null: the meta device has no memory.
std::shared_ptr<Allocator> make_meta_allocator();

}  // namespace sheaf
