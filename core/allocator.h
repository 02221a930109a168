// Allocators count what was requested of them: live and peak requested bytes per rank, the figures that a tape predicts.
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

/// Which part of a rank's memory a block is in, by who else can access it. Ranks that share a host map each other's wire memory and
/// read it without an intermediate copy. On a GPU, buffers that units send and receive are where NCCL transfers them without a copy
/// (Gpu::set_wire), except for those that stay long after they were sent: that memory has no other use meanwhile.
enum class MemoryKind : uint8_t {
  normal,     ///< private to the rank; data received from other ranks may be placed here, too
  wire,       ///< other ranks read it
  landing,    ///< data received from other ranks: normal on a CPU, wire on a GPU
  host_wire,  ///< other ranks read it, and it is long-lived: wire on a CPU, normal on a GPU
  host,       ///< the host's, page-locked, for a GPU that reads and writes it over the bus; normal on a CPU
};

/// Memory that other processes map, too.
struct SharedRange {
  char* base = nullptr;  ///< its address in this process, on a page boundary
  size_t bytes = 0;
  std::shared_ptr<void> mapping = {};  ///< keeps it there
};

/// Thread-safe. Blocks are aligned to 128 bytes. All counts are over all its kinds of memory; host memory that a GPU uses has a
/// separate allocator.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// On a CPU, if there is no wire memory, or none left, a normal block is returned instead.
  virtual void* allocate(size_t bytes, MemoryKind where = MemoryKind::normal) = 0;
  virtual void free(void* block, size_t bytes) = 0;
  virtual MemoryStats stats() const = 0;
  virtual void reset_peak() = 0;
  /// From now on wire blocks come from `range`.
  virtual void add_wire(SharedRange range) = 0;
  /// Returns pages of free blocks to the system, if it can: for memory that will not be needed again, or not here.
  virtual void give_back() {}
};

/// A caching allocator over virtual ranges: best fit, blocks split and merged, pages returned when free resident bytes exceed a
/// sixteenth of the peak (an eighth, if they are needed again), so the resident size stays near the live peak whatever the sizes are.
/// That holds for each kind of memory separately.
std::shared_ptr<Allocator> make_cpu_allocator();
/// Counts and returns null: the meta device has no memory.
std::shared_ptr<Allocator> make_meta_allocator();

}  // namespace sheaf
