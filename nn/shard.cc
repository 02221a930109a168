#include "sheaf/nn/shard.h"

#include <algorithm>
#include <set>
#include <unordered_set>

#include "sheaf/distributed/pipeline.h"
#include "sheaf/nn/layers/attention.h"
#include "sheaf/nn/layers/experts.h"
#include "sheaf/nn/layers/delta_net.h"
#include "sheaf/nn/layers/latent_attention.h"
#include "sheaf/nn/unit_mark.h"

namespace sheaf {
namespace nn {

using Mark = std::shared_ptr<const Module::UnitMark>;

UnitPolicy UnitPolicy::at(std::vector<std::string> paths) {
  UnitPolicy policy;
  policy.paths_ = std::move(paths);
  return policy;
}

UnitPolicy UnitPolicy::of_at_least(int64_t parameters) {
  check<ConfigError>(parameters > 0, "[shard] units of at least ", parameters, " parameters: the minimum is 1");
  UnitPolicy policy;
  policy.minimum_ = parameters;
  return policy;
}

// Marks the modules below the sharded one that a policy chooses.
struct UnitMarker : Visitor {
  const UnitPolicy& policy;
  const Mark& mark;
  std::unordered_set<std::string> missing;
  std::set<std::string> known;
  std::unordered_set<const Parameter::State*> counted;
  bool none_chosen = true;
  int64_t unclaimed = 0;  // elements of leaves that no unit has claimed yet, in the module being visited

  UnitMarker(const UnitPolicy& p, const Mark& m) : policy(p), mark(m), missing(p.paths_.begin(), p.paths_.end()) {}

  void parameter(Parameter& p) override {
    if (p.unit()) fail<ConfigError>("[shard] '", p.name(), "' is materialized already: shard before materialize()");
    if (counted.insert(p.id()).second) unclaimed += p.numel();
  }

  void module(Module& m) override {
    const std::string here = path();
    known.insert(here);
    if (ModuleAccess::mark(m)) {  // an inner call has claimed it, with its submodules
      if (missing.erase(here))
        fail<ConfigError>("[shard] '", here, "' is sharded by a call of its own already");
      none_chosen = false;
      return;
    }
    const int64_t before = std::exchange(unclaimed, 0);
    Visitor::module(m);
    const bool listed = missing.erase(here) > 0;
    if (listed || (policy.predicate_ && policy.predicate_(m, here)) ||
        (policy.minimum_ > 0 && unclaimed >= policy.minimum_)) {
      ModuleAccess::mark(m) = mark;
      none_chosen = false;
      unclaimed = 0;
    }
    unclaimed += before;
  }

  void finish(Module& root) const {
    if (!missing.empty()) fail<ConfigError>("[shard] no module at '", *missing.begin(), "'; there are: ", list(known));
    // The root is a unit anyway; a minimum may be more than the model has.
    if (!none_chosen || !policy.predicate_ || policy.predicate_(root, "")) return;
    const bool by_type = !policy.types_.empty();
    std::set<std::string> types;
    for (const auto& [path, module] : root.named_modules())
      if (known.contains(path)) types.insert(module->type_name());
    const std::string all = known.empty() ? "no modules" : by_type ? "modules of types " + list(types, ", ") : "modules " + list(known);
    std::set<std::string> wanted;
    for (const std::type_info* type : policy.types_) wanted.insert(type_name(*type));
    const std::string chosen_by = by_type ? "units_of<" + list(wanted, ", ") + ">()" : "the predicate";
    fail<ConfigError>("[shard] ShardOptions::units: ", chosen_by, " chooses no module of this ", root.type_name(), ", which has ", all,
                      "; for one unit leave `units` out");
  }

 private:
  static std::string list(const std::set<std::string>& names, const char* between = " ") {
    std::string all;
    for (const std::string& n : names) all += (all.empty() ? "" : between) + n;
    return all;
  }
};

// Finds attention that no inner call has sharded, and how ranks share it: ConfigError if those of a context axis cannot.
struct AttentionToCut : Visitor {
  const MeshSpec* mesh;
  int tensor, context;
  ContextComm comm;
  std::vector<std::pair<SelfAttention*, int64_t>> layers;  // and the units of their heads
  std::vector<LatentAttention*> latent_layers;

  AttentionToCut(const MeshSpec* mesh, int tensor_axis, int context_axis, ContextComm comm)
      : mesh(mesh), tensor(tensor_axis), context(context_axis), comm(comm) {}

  void module(Module& m) override {
    if (ModuleAccess::mark(m)) return;
    if (auto* a = dynamic_cast<SelfAttention*>(&m)) {
      const AttentionConfig& c = a->config;
      const int64_t units = head_units(c.heads, c.kv_heads, c.head_dim, tensor < 0 ? 1 : mesh->size(tensor));
      layers.emplace_back(a, units);
      check_context(units, c.heads / units);
    }
    if (auto* latent = dynamic_cast<LatentAttention*>(&m)) {
      latent_layers.push_back(latent);
      check_context(latent->config.heads, 1);
    }
    if (auto* recurrent = dynamic_cast<GatedDeltaNet*>(&m)) check_recurrent(recurrent->config.key_heads);
    Visitor::module(m);
  }
  void cut() const {
    for (const auto& [layer, units] : layers) layer->cut_heads(units), layer->context_comm = comm;
    for (LatentAttention* layer : latent_layers) layer->context_comm = comm;
  }

 private:
  // A state needs all tokens, so the ranks of both axes share heads, even if attention's ranks share sequences.
  void check_recurrent(int64_t units) const {
    const int of_tensor = tensor < 0 ? 1 : mesh->size(tensor), of_context = context < 0 ? 1 : mesh->size(context);
    check<ConfigError>(units >= int64_t{of_tensor} * of_context, "[delta_net] '", path_label(path()), "': ", of_tensor,
                       " ranks of a tensor axis times ", of_context, " of a context axis cannot share ", units, " key heads; at most ", units, " can");
  }
  void check_context(int64_t units, int64_t group) const {
    if (context >= 0 && comm == ContextComm::all_to_all)
      ContextRegion::copies(path(), units, group, *mesh, {context}, tensor < 0 ? std::vector<int>{} : std::vector<int>{tensor});
  }
};

}  // namespace nn

namespace {

/// The axis over which experts are sharded if the rest of the model is sharded over the experts' own axis.
int axis_of_experts(const MeshSpec& mesh, int experts, int context, const std::vector<int>& taken) {
  if (context >= 0) return context;
  for (int a = 0; a < mesh.num_axes(); ++a)
    if (a != experts && !std::ranges::count(taken, a)) return a;
  fail<ConfigError>("[shard] mesh ", mesh.to_string(), " needs one more axis, over which the experts of each rank of '", mesh.name(experts),
                    "' are sharded (of size 1 if they are not)");
}

/// Experts are separate units: no other parameters are sharded like them.
void mark_experts(nn::Module& module, const nn::Module::UnitMark& mark) {
  const auto shared = std::make_shared<const nn::Module::UnitMark>(mark);
  for (const auto& [path, m] : module.named_modules()) {
    const auto* experts = dynamic_cast<nn::Experts*>(m);
    if (!experts || nn::ModuleAccess::mark(*m)) continue;
    const int64_t count = experts->gate.shape()[0], ranks = mark.mesh->size(mark.tensor_axis);
    if (count < ranks)
      fail<ConfigError>("[experts] '", path_label(path), "': the ", ranks, " ranks of expert axis '", mark.mesh->name(mark.tensor_axis),
                        "' cannot share ", count, " experts; at most ", count, " can");
    nn::ModuleAccess::mark(*m) = shared;
  }
}

/// Gives modules marked with `mark`, or with experts' marks below them, marks with their stage.
void mark_stages(nn::Module& module, const ShardOptions& options, const std::shared_ptr<const nn::Module::UnitMark>& mark,
                 int axis) {
  const int stages = mark->mesh->size(axis);
  const auto modules = module.named_modules();
  const auto is_unit = [&](nn::Module* m) { return nn::ModuleAccess::mark(*m) == mark && m != &module; };
  const auto is_below = [](const std::string& path, const std::string& outer) { return path.starts_with(outer + "."); };
  std::vector<std::string> outermost;  // paths of units; those below them are on the same stage
  for (const auto& [path, m] : modules)
    if (is_unit(m) && (outermost.empty() || !is_below(path, outermost.back()))) outermost.push_back(path);
  const int64_t count = std::ssize(outermost);
  if (count < stages * options.stage_runs)
    fail<ConfigError>("[shard] ", count, " units cannot be the ", options.stage_runs > 1 ? str(options.stage_runs, " runs of the ") : "",
                      stages, " stages of axis '", mark->mesh->name(axis), "'");
  std::vector<int> used(static_cast<size_t>(stages), 0);
  const StageCut cut(count, stages, options.stage_runs);
  int64_t index = 0;
  std::vector<std::pair<std::string, int>> placed;  // paths of units and their stages
  for (const auto& [path, m] : modules) {
    const auto own = nn::ModuleAccess::mark(*m);
    if (!own || m == &module) continue;
    const auto around = std::ranges::find_if(placed, [&, &path = path](const auto& unit) { return is_below(path, unit.first); });
    int stage = around == placed.end() ? -1 : around->second;
    if (own == mark && options.stage_of) {
      stage = options.stage_of(*m, path);
      if (stage < -1 || stage >= stages)
        fail<ConfigError>("[shard] '", path, "' is in stage ", stage, " of ", stages, " along axis '", mark->mesh->name(axis), "'");
      if (around != placed.end() && stage != around->second)
        fail<ConfigError>("[shard] '", path, "' is in stage ", stage, ", '", around->first, "' around it in stage ", around->second);
    } else if (own == mark && around == placed.end()) {
      stage = cut.stage_of(index++);
    }
    placed.emplace_back(path, stage);
    if (stage < 0) continue;
    ++used[static_cast<size_t>(stage)];
    nn::Module::UnitMark there = *own;
    there.stage_axis = axis;
    there.stage = stage;
    nn::ModuleAccess::mark(*m) = std::make_shared<const nn::Module::UnitMark>(there);
  }
  if (const auto empty = std::ranges::find(used, 0); empty != used.end())
    fail<ConfigError>("[shard] no unit is in stage ", empty - used.begin(), " of axis '", mark->mesh->name(axis), "'");
}

/// The axis of each role, -1 if there is none. Each has one role, but context and experts may share that of the parameters.
struct Axes {
  int parameters = 0, replicas = -1, tensor = -1, context = -1, experts = -1, stages = -1;

  bool have(int axis) const {
    for (const int a : {parameters, replicas, tensor, context, experts, stages})
      if (a == axis) return true;
    return false;
  }
  /// The first axis along which the parameters are replicated, other than their own; -1: none.
  int replicating() const { return replicating_beside(parameters, {replicas, context, experts}); }
  /// The first of `axes` along which parameters sharded over `axis` are replicated; -1: none.
  int replicating_beside(int axis, std::initializer_list<int> axes) const {
    for (const int a : axes)
      if (a >= 0 && (a != axis || a == replicas)) return a;
    return -1;
  }
};

Axes axes_of(const MeshSpec* mesh, const ShardOptions& options) {
  if (!mesh) return {};
  if (!mesh->has_axis(options.axis))
    fail<ConfigError>("[shard] mesh ", mesh->to_string(), " has no axis '", options.axis, "' (ShardOptions::axis",
                      options.axis == ShardOptions().axis ? ", by default" : "", ")",
                      options.tensor_axis.empty() ? "" : "; where ranks share layers and nothing else, its size is 1");
  std::vector<int> named{mesh->axis(options.axis)};
  const auto axis_of = [&](std::string_view role, const std::string& axis, bool may_be_first = false) {
    const int a = axis.empty() ? -1 : mesh->axis(axis);
    if (a >= 0 && std::ranges::count(named.begin() + may_be_first, named.end(), a))
      fail<ConfigError>("[shard] axis '", axis, "' cannot be the ", role, " axis as well");
    return named.emplace_back(a);
  };
  Axes axes{.parameters = named[0]};
  axes.replicas = axis_of("replica", options.replica_axis);
  axes.tensor = axis_of("tensor", options.tensor_axis);
  axes.context = axis_of("context", options.context_axis, /*may_be_first=*/true);
  axes.experts = axis_of("expert", options.expert_axis, /*may_be_first=*/true);
  axes.stages = axis_of("stage", options.stage_axis);
  if (axes.stages >= 0 && !mesh->is_chain(axes.stages))
    fail<ConfigError>("[shard] axis '", options.stage_axis, "' of mesh ", mesh->to_string(), " is no chain: its neighbours have "
                      "no links (MeshSpec::Axis::chain)");
  return axes;
}

void expect_all_named(const MeshSpec& mesh, const Axes& axes, const ShardOptions& options) {
  for (int a = 0; a < mesh.num_axes(); ++a)
    if (!axes.have(a) && mesh.size(a) > 1)
      fail<ConfigError>("[shard] mesh ", mesh.to_string(), ": sharding over '", options.axis, "' leaves out axis '",
                        mesh.name(a), "'; if the batch is cut there, too, name it as ShardOptions::replica_axis, if "
                        "sequences are, as ShardOptions::context_axis, if layers are, as ShardOptions::tensor_axis, if experts are, as "
                        "ShardOptions::expert_axis, if units lie on it one after another, as ShardOptions::stage_axis");
}

void check_options(const MeshSpec* mesh, const Axes& axes, const ShardOptions& options) {
  if (options.reduce_int8 && options.reduce_dtype)
    fail<ConfigError>("[shard] gradients are sent in int8 blocks (reduce_int8) or as ", *options.reduce_dtype, " (reduce_dtype), not both");
  for (const auto& [name, dtype] : {std::pair("compute_dtype", options.compute_dtype), {"reduce_dtype", options.reduce_dtype}})
    if (dtype && !is_floating(*dtype)) fail<ConfigError>("[shard] ", name, " ", *dtype, ": it is bf16, f16, f32 or f64");
  if (options.stage_runs < 1 || (options.stage_runs > 1 && (axes.stages < 0 || !mesh->is_ring(axes.stages))))
    fail<ConfigError>("[shard] stage_runs ", options.stage_runs, ": runs of units are those of a stage axis that is a ring "
                      "(MeshSpec::Axis::ring)");
  const Strategy strategy = mesh ? options.strategy.value : Strategy::none;
  if (mesh && strategy == Strategy::none && mesh->size(axes.parameters) > 1)
    fail<ConfigError>("[shard] strategy 'none' is for one rank; axis '", options.axis, "' has ", mesh->size(axes.parameters));
  if (options.offload && strategy <= Strategy::replicate)
    fail<ConfigError>("[shard] offload is for strategies that shard over a mesh, which may be of one rank, not for '", name(strategy), "'");
  if (!options.secondary || !mesh) return;
  if (axes.replicating() < 0)
    fail<ConfigError>("[shard] secondary shards are those of replicas: neither ShardOptions::replica_axis nor, besides axis '",
                      options.axis, "', ShardOptions::context_axis or expert_axis names any");
  if (strategy <= Strategy::replicate)
    fail<ConfigError>("[shard] secondary shards are for strategies that shard, not '", name(strategy), "'");
}

nn::Module::UnitMark mark_of(const MeshSpec* mesh, const Axes& axes, const ShardOptions& options) {
  nn::Module::UnitMark mark;
  mark.mesh = mesh;
  mark.axis = axes.parameters;
  mark.tensor_axis = axes.tensor;
  mark.secondary_axis = options.secondary ? axes.replicating() : -1;
  mark.strategy = mesh ? options.strategy.value : Strategy::none;
  mark.prefetch_bytes = options.prefetch_bytes;
  mark.compute = options.compute_dtype;
  mark.reduce = options.reduce_dtype;
  mark.gather_int8 = options.gather_int8;
  mark.reduce_int8 = options.reduce_int8;
  mark.whole_blocks = options.whole_blocks;
  mark.offload = options.offload;
  return mark;
}

/// A rank's experts are sharded over another axis than the one that distributes the experts.
nn::Module::UnitMark mark_of_experts(nn::Module::UnitMark mark, const Axes& axes, const ShardOptions& options) {
  mark.tensor_axis = axes.experts;
  if (mark.axis == axes.experts) mark.axis = axis_of_experts(*mark.mesh, axes.experts, axes.context, {axes.replicas, axes.tensor, axes.stages});
  if (options.secondary) mark.secondary_axis = axes.replicating_beside(mark.axis, {axes.replicas, axes.context});
  return mark;
}

/// Gives modules the marks that they had before, unless keep() is called: a call that is refused leaves none.
class MarksAsBefore {
 public:
  explicit MarksAsBefore(nn::Module& module) {
    for (const auto& [path, m] : module.named_modules()) before_.emplace_back(m, nn::ModuleAccess::mark(*m));
  }
  ~MarksAsBefore() {
    for (auto& [m, mark] : before_) nn::ModuleAccess::mark(*m) = std::move(mark);
  }
  MarksAsBefore(const MarksAsBefore&) = delete;
  void keep() { before_.clear(); }

 private:
  std::vector<std::pair<nn::Module*, nn::Mark>> before_;
};

}  // namespace

void shard(nn::Module& module, const Mesh& mesh, const ShardOptions& options) {
  using nn::ModuleAccess;
  if (ModuleAccess::mark(module))
    fail<ConfigError>("[shard] this ", module.type_name(), " is sharded already");
  const Axes axes = axes_of(mesh.spec, options);
  check_options(mesh.spec, axes, options);
  if (mesh.spec) expect_all_named(*mesh.spec, axes, options);
  const nn::Module::UnitMark mark = mark_of(mesh.spec, axes, options);
  nn::AttentionToCut attention(mesh.spec, axes.tensor, axes.context, options.context_comm);
  attention.module(module);
  MarksAsBefore marks(module);
  if (axes.experts >= 0) mark_experts(module, mark_of_experts(mark, axes, options));
  const auto shared = std::make_shared<const nn::Module::UnitMark>(mark);
  nn::UnitMarker marker(options.units, shared);
  module.visit(marker);
  marker.finish(module);
  attention.cut();
  if (axes.stages >= 0) mark_stages(module, options, shared, axes.stages);
  ModuleAccess::mark(module) = shared;
  marks.keep();
}

}  // namespace sheaf
