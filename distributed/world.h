// World: all ranks of a job as seen by one of them, and the meshes created over them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/device_mesh.h"
#include "sheaf/distributed/transport.h"

namespace sheaf {

/// Lives on the thread that created it, like the RankContext that is current there. While it lives, that context holds the job's
/// ranks, threads and meshes. Its destructor waits for queued collectives and destroys its meshes; if an exception destroys it, the
/// other ranks are told at once. Created by run_local, distributed::init_from_env or distributed::simulated_world.
class World {
 public:
  /// Takes over `context`, which is current: initializes it for this rank.
  World(std::shared_ptr<Transport> transport, RankContext& context, int rank, int size, int local_rank, int local_size,
        Device device = Device::cpu());
  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) = delete;

  int rank() const { return context_->rank; }
  int size() const { return context_->world; }
  int local_rank() const { return context_->local_rank; }
  int local_size() const { return context_->local_world; }
  Device device() const { return device_; }
  std::string_view kind() const { return transport_->kind(); }  ///< of its communicators; "shm+gloo": see hosts.h

  /// The mesh with these axes, bound in this rank's RankContext. Every rank creates the same meshes in the same order; the same axes
  /// again return the same mesh. ConfigError unless the sizes multiply to size().
  Mesh mesh(std::vector<MeshSpec::Axis> axes);

  /// `mesh` without this axis: the ranks that share this one's coordinate there. Its communicators are those of `mesh`. Each such
  /// group may have its own model: seen over the whole mesh, a group's value is a row of a tensor sharded by `axis` (optim::DiLoCo).
  /// ConfigError for the only axis, and if another slice of this world has the same axes.
  Mesh slice(const Mesh& mesh, const std::string& axis);

  /// A communicator of all ranks for calls outside tapes: the gather lane of the mesh (data=size()).
  Communicator& communicator() { return mesh({{"data", size()}}).runtime->gather_lane(0); }

  /// Writes one line to standard output, on rank 0 only.
  template <class... Parts>
  void print(const Parts&... parts) const {
    if (rank() == 0) print_line(str(parts...));
  }

  /// Tells every rank that this one has failed; all communicators of the job fail from here on.
  void abort(const std::string& reason, ExitCode code = ExitCode::kPeerLost);
  /// Runs `body`; if it throws, the other ranks learn what was thrown before the exception propagates. (Without it they learn only
  /// that this rank was ended by an exception.)
  void guard(const std::function<void()>& body);

  /// Keeps an object alive as long as the world: for functions that make worlds.
  void keep(std::shared_ptr<void> object) { kept_.push_back(std::move(object)); }

 private:
  static void print_line(std::string line);

  struct Binding;  // of the meshes, undone when the world is destroyed
  // In order of construction; destroyed from the last to the first.
  std::vector<std::shared_ptr<void>> kept_;
  RankContext* context_;
  std::shared_ptr<Transport> transport_;
  Device device_;
  std::unique_ptr<Binding> binding_;
};

}  // namespace sheaf
