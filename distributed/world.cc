#include "sheaf/distributed/world.h"

#include <algorithm>
#include <cstdio>
#include <exception>

namespace sheaf {

struct World::Binding {
  RankContext& context;
  Transport& transport;
  int exceptions = std::uncaught_exceptions();
  std::vector<std::pair<const MeshSpec*, std::shared_ptr<MeshRuntime>>> meshes = {};

  ~Binding() {
    if (std::uncaught_exceptions() > exceptions)
      transport.board().raise({context.rank, ExitCode::kPeerLost, "an exception ended it"});
    // In the order that all ranks made them: the end of a communicator may wait for the others to end theirs.
    for (auto& [spec, runtime] : meshes) {
      context.unbind(spec);
      runtime = nullptr;
    }
    context.rank = context.local_rank = 0;
    context.world = context.local_world = 1;
    context.hosts.clear();
  }
};

World::World(std::shared_ptr<Transport> transport, RankContext& context, int rank, int size, int local_rank,
             int local_size, Device device)
    : context_(&context), transport_(std::move(transport)), device_(device),
      binding_(new Binding{.context = context, .transport = *transport_}) {
  context.rank = rank;
  context.world = size;
  context.local_rank = local_rank;
  context.local_world = local_size;
}

World::World(World&&) noexcept = default;
World::~World() = default;

Mesh World::mesh(std::vector<MeshSpec::Axis> axes) {
  const MeshSpec* spec = MeshSpec::intern(std::move(axes));
  if (spec->num_ranks() != size())
    fail<ConfigError>("[mesh] ", spec->to_string(), " has ", spec->num_ranks(), " ranks, but the world has ", size());
  auto& meshes = binding_->meshes;
  const auto known = std::ranges::find(meshes, spec, [](const auto& entry) { return entry.first; });
  if (known != meshes.end()) return {spec, known->second};
  meshes.emplace_back(spec, std::make_shared<DeviceMesh>(spec, rank(), *transport_));
  context_->bind(spec, meshes.back().second);
  return {spec, meshes.back().second};
}

void World::abort(const std::string& reason, ExitCode code) { transport_->board().raise({rank(), code, reason}); }

void World::guard(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    abort(e.what());
    throw;
  } catch (...) {
    abort("an exception of unknown type");
    throw;
  }
}

void World::print_line(std::string line) {
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

}  // namespace sheaf
