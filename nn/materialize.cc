// From marked modules to units with memory and values.
#include <algorithm>
#include <unordered_map>

#include "sheaf/core/communicator.h"
#include "sheaf/core/random.h"
#include "sheaf/distributed/agreement.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/random.h"
#include "sheaf/nn/block_piece.h"
#include "sheaf/nn/shard.h"
#include "sheaf/nn/unit_mark.h"

namespace sheaf {
namespace {

using nn::Module;
using nn::ModuleAccess;
using nn::Parameter;

// A module that will be a unit, if unclaimed leaves remain for it. They form a tree; node 0 is the model.
struct UnitNode {
  Module* module;
  std::string path;
  int parent;
  std::vector<Parameter> leaves;
};

// Names everything, finds the marked modules, and for each leaf the lowest one that holds all of its uses.
struct Survey : nn::Visitor {
  std::vector<UnitNode> nodes;
  std::vector<Parameter> leaves;                           // each once, in visiting order
  std::unordered_map<const Parameter::State*, int> owner;  // leaf -> node
  std::vector<nn::Buffer> buffers;
  int inside = -1;

  void module(Module& m) override {
    ModuleAccess::list(m, path());
    const int before = inside;
    if (ModuleAccess::mark(m) || nodes.empty()) {
      nodes.push_back({&m, path(), inside, {}});
      inside = static_cast<int>(nodes.size()) - 1;
    }
    m.visit(*this);
    inside = before;
  }
  void parameter(Parameter& p) override {
    if (p.unit())
      fail<ConfigError>("[materialize] '", path(), "' is materialized already, as '", p.name(), "': a model is once, and a copy of a ",
                        "Parameter is the same parameter");
    const auto [it, first] = owner.try_emplace(p.id(), inside);
    if (first) {
      p.state().name = path();
      leaves.push_back(p);
    } else {
      it->second = common_ancestor(it->second, inside);
    }
  }
  void buffer(nn::Buffer& b) override {
    if (b.state().value) return;
    b.state().name = path();
    buffers.push_back(b);
  }
  // Parents come before their children, so the later node is never above the earlier one.
  int common_ancestor(int a, int b) const {
    while (a != b) (a > b ? a : b) = nodes[std::max(a, b)].parent;
    return a;
  }
};

/// Writes the initial values of a leaf of `numel` elements at these runs of its flat index to `data`.
void fill(Device device, const nn::Init& init, Key key, int64_t numel, const Runs& runs, void* data, DType dtype) {
  const bool rows = !runs.is_interval();
  const kernels::GlobalIndex where =
      rows ? kernels::GlobalIndex{{numel / runs.stride, runs.stride}, {runs.begin / runs.stride, runs.begin % runs.stride}}
           : kernels::GlobalIndex{{numel}, {runs.begin}};
  const View out = View::dense(data, dtype, rows ? Shape{runs.count, runs.size} : Shape{runs.size});
  const Stream stream = RankContext::current().stream(device);
  switch (init.kind) {
    case nn::Init::Kind::constant: SHEAF_ON_DEVICE(stream, fill, out, init.value); break;
    case nn::Init::Kind::normal: SHEAF_ON_DEVICE(stream, normal, out, key, where, 0.0, init.value); break;
    case nn::Init::Kind::uniform: SHEAF_ON_DEVICE(stream, uniform, out, key, where, init.center - init.value, init.center + init.value); break;
  }
}

// A parameter in blocks is a leaf of bytes, which are sharded as its values would be.
LeafSpec in_blocks(const Parameter& p, BlockFormat format, const UnitOptions& options) {
  LeafSpec spec{p.name(), blocks_shape(p.shape(), format), kU8, false, p.cut()};
  spec.blocks = format;
  const int last = p.shape().rank() - 1;
  if (!spec.cut || options.tensor_axis < 0 || spec.cut->dim() != last) return spec;
  if (!spec.cut->can_move(1, kBlockSize))
    fail<ConfigError>("[quantize] '", p.name(), "' ", p.shape(), ": cut as ", Placement::shard(*spec.cut), " along tensor axis '",
                      options.mesh->name(options.tensor_axis), "', but its ", name(format), " blocks are ", kBlockSize,
                      " elements, which stay together");
  spec.cut = spec.cut->moved_to(last, block_bytes(format), kBlockSize);
  return spec;
}

std::string described(const Parameter& p) {
  return str(p.name(), ' ', p.dtype(), p.shape(), p.trainable() ? "" : " frozen");
}

// Ranks that create different models from the same code, or different values of one model, would compute inconsistent results, often
// without any collective that notices: the definition of each unit is compared, once, along every axis of its mesh.
void expect_agreement(const std::vector<UnitNode>& nodes, uint64_t seed) {
  std::vector<std::pair<const MeshSpec*, std::vector<Fact>>> meshes;
  for (const UnitNode& node : nodes) {
    const auto mark = ModuleAccess::mark(*node.module);
    if (node.leaves.empty() || !mark || !mark->mesh) continue;
    auto at = std::ranges::find(meshes, mark->mesh, &std::pair<const MeshSpec*, std::vector<Fact>>::first);
    if (at == meshes.end()) at = meshes.insert(at, {mark->mesh, {{"the seed", str(seed)}}});
    std::string what;
    for (const Parameter& p : node.leaves) what += str(what.empty() ? "" : ", ", described(p));
    at->second.push_back({str("unit '", path_label(node.path), "'"), str(mark->strategy, ": ", what), what});
  }
  for (const auto& [mesh, facts] : meshes)
    if (MeshRuntime* runtime = RankContext::current().runtime(mesh))
      for (int axis = 0; axis < mesh->num_axes(); ++axis)
        require_agreement(runtime->reduce_lane(axis), "materialize", facts);
}

void make_unit(UnitNode& node, const std::shared_ptr<GatherSchedule>& schedule, Device device, const MaterializeOptions& how) {
  const auto mark = ModuleAccess::mark(*node.module);
  UnitOptions options;
  if (mark) options = *mark;
  std::vector<LeafSpec> specs;
  for (const Parameter& p : node.leaves) {
    // Nothing is ever added to it: it is kept in the compute dtype.
    if (p.state().frozen_for_good && !p.exact() && options.compute && size_of(*options.compute) < size_of(p.dtype()))
      p.state().dtype = *options.compute;
    if (p.blocks()) {
      p.state().dtype = options.compute.value_or(p.dtype());
      specs.push_back(in_blocks(p, *p.blocks(), options));
      continue;
    }
    specs.push_back({p.name(), p.shape(), p.dtype(), p.trainable(), p.cut(), p.exact(), p.bias(), p.steered()});
  }
  auto unit = std::make_shared<Unit>(node.path, std::move(specs), options, schedule);
  unit->allocate(device);
  for (size_t i = 0; i < node.leaves.size(); ++i) {
    node.leaves[i].state().unit = unit;
    node.leaves[i].state().index = static_cast<int>(i);
  }
  ModuleAccess::unit(*node.module) = unit;
  if (device.is_meta() || !how.values) return;
  for (const FlatBuffer& b : unit->buffers()) {
    char* data = b.shard.view().as<char>();
    for (const LocalPiece& piece : unit->pieces(b)) {
      const Parameter& p = node.leaves[piece.leaf];
      if (p.blocks()) {
        nn::BlockPiece blocks(p.name(), *p.blocks(), piece.runs);
        fill(Device::cpu(), p.init(), key_of(p.name(), how.seed), p.numel(), blocks.elements(), blocks.values().data(), kF32);
        blocks.store(device, data + piece.shard_offset);
        continue;
      }
      fill(device, p.init(), key_of(p.name(), how.seed), p.numel(), piece.runs,
           data + piece.shard_offset * static_cast<int64_t>(size_of(b.dtype)), b.dtype);
    }
  }
}

}  // namespace

void materialize(nn::Module& module, Device device, const MaterializeOptions& options) {
  Survey survey;
  survey.module(module);
  for (const Parameter& p : survey.leaves) {
    if (options.dtype) p.state().dtype = *options.dtype;
    survey.nodes[survey.owner[p.id()]].leaves.push_back(p);
  }
  const auto root_mark = ModuleAccess::mark(module);
  const bool sharded = std::any_of(survey.nodes.begin(), survey.nodes.end(), [](const UnitNode& n) {
    const auto mark = ModuleAccess::mark(*n.module);
    return mark && mark->mesh && mark->mesh->num_ranks() > 1;
  });
  if (sharded && !root_mark && !survey.nodes[0].leaves.empty())
    fail<ConfigError>("[materialize] '", survey.nodes[0].leaves[0].name(),
                      "' is in no unit, though parts of the model are sharded: call shard() on the whole model too");
  if (!device.is_meta()) expect_agreement(survey.nodes, options.seed);
  const auto schedule = std::make_shared<GatherSchedule>(root_mark ? root_mark->prefetch_bytes : -1);
  for (UnitNode& node : survey.nodes)
    if (!node.leaves.empty()) make_unit(node, schedule, device, options);
  if (survey.nodes[0].leaves.empty()) ModuleAccess::schedule(module) = schedule;
  for (const nn::Buffer& b : survey.buffers) {
    nn::Buffer::State& s = b.state();
    if (options.dtype && is_floating(s.dtype)) s.dtype = *options.dtype;
    s.value = Tensor::empty({s.dtype, s.shape, {}}, device);
    if (!device.is_meta())
      fill(device, s.init, key_of(s.name, options.seed), s.shape.numel(), Runs::of({0, s.shape.numel()}), s.value.view().data,
           s.dtype);
  }
}

GatherSchedule& gather_schedule(nn::Module& module) {
  if (ModuleAccess::schedule(module)) return *ModuleAccess::schedule(module);
  expect_own_units("gather_schedule", "use", module);
  const auto all = units(module);
  if (all.empty()) fail<LifetimeError>("[gather_schedule] ", module.type_name(), " is not materialized");
  return *all[0]->schedule();
}

std::vector<std::shared_ptr<Unit>> units(nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> out;
  for (auto& [path, m] : module.named_modules())
    if (m->unit()) out.push_back(m->unit());
  return out;
}

void expect_own_units(const char* who, const char* act, nn::Module& module) {
  const auto own = units(module);
  for (const nn::Parameter& p : module.parameters())
    if (p.unit() && std::ranges::find(own, p.unit()) == own.end())
      fail<ConfigError>("[", who, "] '", p.name(), "' is in unit '", path_label(p.unit()->name()), "' of a model around this ",
                        module.type_name(), ": ", act, " the whole model, or shard() this part of it as a unit");
}

Device device_of(nn::Module& module) {
  const auto all = units(module);
  check<LifetimeError>(!all.empty() && !all[0]->buffers().empty() && all[0]->buffers()[0].shard, "[device_of] ", module.type_name(),
                       " is not materialized");
  return all[0]->buffers()[0].shard.device();
}

}  // namespace sheaf
