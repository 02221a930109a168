#include "sheaf/nn/optim/diloco.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf::optim {
namespace {

using namespace kernels::cpu;  // the order of the scalars

// Where axis `a` of an island's mesh is among those of all.
int outer_axis(int a, int islands) { return a < islands ? a : a + 1; }

bool is_without(const MeshSpec* mesh, const MeshSpec& all, int axis) {
  if (!mesh || mesh->num_axes() + 1 != all.num_axes()) return false;
  for (int a = 0; a < mesh->num_axes(); ++a) {
    const int there = outer_axis(a, axis);
    if (mesh->name(a) != all.name(there) || mesh->size(a) != all.size(there)) return false;
  }
  return true;
}

}  // namespace

DiLoCo::DiLoCo(nn::Module& module, const Mesh& mesh, const std::string& axis, const DiLoCoOptions& options)
    : mesh_(mesh.spec), axis_(mesh.spec ? mesh.spec->axis(axis) : 0) {
  check<ConfigError>(mesh_, "[diloco] islands are those of a mesh, and this one has no axes");
  check<ConfigError>(options.lr > 0, "[diloco] lr is ", options.lr, ", not above 0");
  check<ConfigError>(options.momentum >= 0 && options.momentum < 1, "[diloco] momentum is ", options.momentum, ", not in [0, 1)");
  const std::vector<nn::Parameter> parameters = module.parameters();
  for (const auto& unit : nn::trainable_units("diloco", parameters)) {
    if (!is_without(unit->mesh(), *mesh_, axis_))
      fail<ConfigError>("[diloco] unit '", path_label(unit->name()), "' is sharded over ", unit->mesh() ? unit->mesh()->to_string() : "no mesh",
                        ", and islands have that of ", mesh_->to_string(), " without '", axis, "' (World::slice)");
    for (size_t b = 0; b < unit->buffers().size(); ++b)
      if (unit->buffers()[b].trainable) add_shard(unit, b);
  }
  if (shards_.empty()) return;
  std::vector<double> scalars(kSgdScalars, 1.0);
  scalars[kSgdLearningRate] = options.lr, scalars[kSgdMomentum] = options.momentum, scalars[kSgdWeightDecay] = 0.0;
  const Device device = shards_[0].rows.device();
  scalars_ = device.is_meta() ? Tensor::empty({kF64, {kSgdScalars}, {}}, device) : Tensor::from(scalars, {kSgdScalars}).to(device);
  begin();
}

int DiLoCo::island() const { return RankContext::current().coordinate(mesh_, axis_); }

// Of a value [R, n] that each island has, or has a part of.
Layout DiLoCo::layout_of(const OuterShard& shard, Placement islands) const {
  Layout layout(mesh_, Placement::invariant());
  const Layout& resting = shard.flat().shard.layout();
  for (int a = 0; a < resting.num_axes(); ++a) {
    const Placement& p = resting[a];
    layout[outer_axis(a, axis_)] = p.is_shard() && !p.is_single() ? Placement::shard(0) : p;
  }
  layout[axis_] = islands;
  return layout;
}

void DiLoCo::add_shard(const std::shared_ptr<Unit>& unit, size_t buffer) {
  OuterShard shard{unit, buffer, {}, {}, {}, {}, {}};
  FlatBuffer& b = shard.flat();
  if (b.dtype != kF32 && b.dtype != kF64)
    fail<DTypeError>("[diloco] unit '", path_label(unit->name()), "' has ", b.dtype, " parameters; masters are f32 or f64");
  const Layout& resting = b.shard.layout();
  int64_t ranks = 1;
  for (int a = 0; a < resting.num_axes(); ++a)
    if (resting[a].is_shard() && !resting[a].is_single()) ranks *= resting.mesh()->size(a);
  const int64_t elements = b.shard.numel() / ranks;

  // Along the mesh of all: the dimension of islands first.
  Layout by_island = layout_of(shard, Placement::shard(0));
  for (int a = 0; a < by_island.num_axes(); ++a)
    if (a != axis_ && by_island[a].is_shard(0)) by_island[a] = Placement::shard(1);
  const Type rows{b.dtype, {islands(), ranks, elements}, by_island};
  const Shape local = rows.local_shape();
  shard.rows = Tensor::over(b.shard.storage(), b.shard.byte_offset(), rows, local, local.contiguous_strides());

  const OwnershipMap part = OwnershipMap::even(1, FlatLayout::kAlign);
  const Type state{b.dtype, {ranks, elements}, layout_of(shard, Placement::shard(part))};
  const Device device = b.shard.device();
  shard.values = detail::zero_state(state, device, {});
  if (b.has_slope()) shard.momentum = detail::zero_state(state, device, {});
  shard.segments = detail::segment_table({0, shard.values.local_shape().numel(), 0}, device);
  const Interval mine = part.owned(island(), islands(), state.shape);
  for (const LocalPiece& piece : unit->pieces(b, mine))
    if (piece.runs.numel() > 0) shard.parts.push_back({piece, piece.shard_offset});
  shards_.push_back(std::move(shard));
}

void DiLoCo::begin() {
  for (OuterShard& shard : shards_) {
    const PathScope path(shard.unit->name());
    const Tensor& rows = shard.rows;
    const Type whole{rows.dtype(), {rows.size(1), rows.size(2)}, layout_of(shard, Placement::replicate())};
    const Shape local = whole.local_shape();
    const Tensor values = Tensor::over(rows.storage(), rows.byte_offset(), whole, local, local.contiguous_strides());
    store_into(shard.values, redistribute(values, shard.values.layout()));
    if (shard.momentum) store_into(shard.momentum, full_like(shard.momentum, 0));
  }
}

void DiLoCo::step() {
  const PhaseScope phase(Phase::update);
  for (OuterShard& shard : shards_) {
    const PathScope path(shard.unit->name());
    shard.unit->close_for_change();
    if (Recording* r = Recording::current()) {
      const std::string& name = shard.flat().name;
      r->leaf(shard.rows, name + " of all islands");
      r->leaf(shard.values, "diloco.values of " + name);
      if (shard.momentum) r->leaf(shard.momentum, "diloco.momentum of " + name);
      r->leaf(shard.segments, "diloco.segments of " + name);
      r->leaf(scalars_, "diloco.scalars");
    }
    step(shard);
  }
}

void DiLoCo::step(OuterShard& shard) {
  const Tensor agreed = redistribute(mean(shard.rows, 0), shard.values.layout());
  if (shard.momentum)
    detail::nesterov_step(shard.values, shard.values - agreed, shard.momentum, shard.segments, scalars_);
  else
    store_into(shard.values, agreed);
  const Tensor whole = redistribute(shard.values, layout_of(shard, Placement::replicate()));
  store_into(shard.rows, redistribute(expand(unsqueeze(whole, 0), shard.rows.shape()), shard.rows.layout()));
}

int64_t DiLoCo::state_bytes() const {
  int64_t bytes = 0;
  for (const OuterShard& shard : shards_)
    bytes += shard.values.local_bytes() + (shard.momentum ? shard.momentum.local_bytes() : 0);
  return bytes;
}

}  // namespace sheaf::optim
