// A simulated job: any world size, seen from any rank, without data. Counts bytes and calls, for dry runs.
#pragma once

#include <string>

#include "sheaf/core/device.h"
#include "sheaf/distributed/world.h"

namespace sheaf::distributed {

struct SimulationOptions {
  int threads = 1;  ///< compute threads of the rank: kernels' workspaces depend on them
  /// RankContext::meta is charged with the bytes that communicators of this kind would hold (World::kind()).
  std::string comm = "shm";
  std::vector<int> hosts = {};  ///< "shm+gloo" only: which ranks share memory (hosts.h)
  /// The device that meta stands for: workspaces are those of its kernels. ConfigError for a GPU in a build without CUDA; no GPU
  /// needs to be present.
  Device device = {};
};

/// Rank `rank` of `size`, on the meta device, in its own RankContext, which is current on this thread while the world lives (so
/// worlds must be destroyed in reverse order of construction). Its collectives complete at once and move nothing.
World simulated_world(int rank, int size, SimulationOptions options = {});

}  // namespace sheaf::distributed
