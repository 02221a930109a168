#include "sheaf/distributed/world.h"

#include <algorithm>
#include <cstdio>
#include <exception>

namespace sheaf {

struct World::Binding {
  RankContext& context;
  Transport& transport;
  int exceptions = std::uncaught_exceptions();
  struct Bound {
    const MeshSpec* spec;
    std::shared_ptr<MeshRuntime> runtime;
    const MeshSpec* slice_of = nullptr;  // and of which axis of it
    int axis = -1;
  };
  std::vector<Bound> meshes = {};

  /// Null if there is none.
  const Bound* find(const MeshSpec* spec) const {
    const auto known = std::ranges::find(meshes, spec, &Bound::spec);
    return known == meshes.end() ? nullptr : &*known;
  }
  Mesh bind(Bound mesh) {
    context.bind(mesh.spec, mesh.runtime);
    meshes.push_back(std::move(mesh));
    return {meshes.back().spec, meshes.back().runtime};
  }

  ~Binding() {
    if (std::uncaught_exceptions() > exceptions)
      transport.board().raise({context.rank, ExitCode::kPeerLost, "an exception ended it"});
    // In the order in which all ranks created them: the end of a communicator may wait for the others to end theirs.
    for (Bound& mesh : meshes) {
      context.unbind(mesh.spec);
      mesh.runtime = nullptr;
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
  if (const Binding::Bound* known = binding_->find(spec)) return {spec, known->runtime};
  return binding_->bind({spec, std::make_shared<DeviceMesh>(spec, rank(), *transport_)});
}

Mesh World::slice(const Mesh& mesh, const std::string& axis) {
  const int left_out = mesh.spec->axis(axis);
  std::vector<MeshSpec::Axis> axes;
  for (int a = 0; a < mesh.spec->num_axes(); ++a)
    if (a != left_out) axes.push_back({mesh.spec->name(a), mesh.spec->size(a), mesh.spec->is_chain(a), mesh.spec->is_ring(a)});
  if (axes.empty()) fail<ConfigError>("[mesh] ", mesh.spec->to_string(), " without axis '", axis, "' has none: give it another, of size 1");
  const MeshSpec* spec = MeshSpec::intern(std::move(axes));
  const Binding::Bound* known = binding_->find(spec);
  if (!known) return binding_->bind({spec, std::make_shared<MeshSlice>(mesh.runtime, left_out), mesh.spec, left_out});
  if (mesh.spec->size(left_out) > 1 && (known->slice_of != mesh.spec || known->axis != left_out))
    fail<ConfigError>("[mesh] ", spec->to_string(), " is in use already, and not as ", mesh.spec->to_string(), " without '", axis, "'");
  return {spec, known->runtime};
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
