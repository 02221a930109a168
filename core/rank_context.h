// RankContext: everything that belongs to one rank. Ranks are processes in production and threads in tests, so no
// per-rank state is static: it belongs to this object, found through a thread-local pointer that communication threads
// inherit. Threads that compute parts of a kernel do not inherit it: what they need from it is looked up beforehand.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sheaf/core/allocator.h"
#include "sheaf/core/device.h"

namespace sheaf {

class Gpu;
class MemoryLog;
class ProfileLog;
class MeshSpec;
class MeshRuntime;

class RankContext {
 public:
  RankContext();
  ~RankContext();
  RankContext(const RankContext&) = delete;
  RankContext& operator=(const RankContext&) = delete;

  int rank = 0;  ///< in the world
  int world = 1;
  int local_rank = 0;  ///< on this host
  int local_world = 1;
  std::vector<int> hosts = {};  ///< which ranks of the world share memory (distributed/hosts.h); empty: not determined
  int threads = 1;              ///< compute threads of this rank; parallel_for uses as many

  std::shared_ptr<Allocator> cpu;              ///< host memory of this rank
  std::shared_ptr<Allocator> meta;             ///< counts only: what `cpu`, or a GPU, would hold
  std::shared_ptr<Allocator> meta_host;        ///< counts only: what a GPU would use of the host's memory
  std::shared_ptr<Gpu> gpu;                    ///< null: this rank computes on its CPU alone
  Device device = {};                          ///< where this rank computes by default
  std::atomic<ProfileLog*> profile = nullptr;  ///< records what is done (profile.h); null: nothing does
  std::shared_ptr<ProfileLog> profile_log;     ///< the last one
  std::shared_ptr<MemoryLog> memory_log;       ///< records allocations (memory_ledger.h); null: nothing does
  Device meta_is = {};                         ///< the device that meta stands for: workspaces are those of its kernels

  /// The rank's GPU if it is `device`, else a ConfigError that says which devices there are.
  Gpu& gpu_of(const Device& device) const;
  /// The allocator of values on `device`; a GPU's values in host memory have a different one.
  const std::shared_ptr<Allocator>& memory(const Device& device, MemoryKind where = MemoryKind::normal) const;
  /// All existing allocators.
  std::vector<std::shared_ptr<Allocator>> memories() const;
  /// Where ops on `device` run: the stream of its GPU, or the calling thread.
  Stream stream(const Device& device) const;

  /// The communication of a mesh, if this rank has joined it. Layouts name meshes; this finds their runtime.
  void bind(const MeshSpec* mesh, std::shared_ptr<MeshRuntime> runtime);
  void unbind(const MeshSpec* mesh);
  MeshRuntime* runtime(const MeshSpec* mesh) const;
  /// This rank's coordinate on one axis of `mesh`; throws PlacementError if the mesh is not bound.
  int coordinate(const MeshSpec* mesh, int axis) const;

  /// The context of the calling thread; a process-wide default for threads without one.
  static RankContext& current();

 private:
  std::vector<std::pair<const MeshSpec*, std::shared_ptr<MeshRuntime>>> meshes_;
};

/// Makes `context` current on this thread while it lives, with its thread count. Flush-to-zero arithmetic stays.
class RankScope {
 public:
  explicit RankScope(RankContext& context);
  ~RankScope();
  RankScope(const RankScope&) = delete;
  RankScope& operator=(const RankScope&) = delete;

 private:
  RankContext* previous_;
};

/// Sets this thread to flush denormals to zero (FTZ and DAZ). Every thread that touches values calls it, else sums
/// with denormals differ between threads and run many times slower.
void flush_denormals();

}  // namespace sheaf
