#include "sheaf/nn/optim/diloco.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/unit_ops.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf::optim {
namespace {

using namespace kernels::cpu;  // the order of the scalars

// The index of axis `a` of an island's mesh among those of the whole mesh.
int outer_axis(int a, int islands) { return a < islands ? a : a + 1; }

bool is_without(const MeshSpec* mesh, const MeshSpec& all, int axis) {
  if (!mesh || mesh->num_axes() + 1 != all.num_axes()) return false;
  for (int a = 0; a < mesh->num_axes(); ++a) {
    const int there = outer_axis(a, axis);
    if (mesh->name(a) != all.name(there) || mesh->size(a) != all.size(there)) return false;
  }
  return true;
}

// Parts of a rank's elements, or of their bytes: whole blocks.
constexpr int64_t kBytes = block_bytes(BlockFormat::int8);

// The layout of values [R, n] once a dimension of islands precedes R.
Layout behind_islands(Layout layout) {
  for (int a = 0; a < layout.num_axes(); ++a)
    if (layout[a].is_shard(0)) layout[a] = Placement::shard(1);
  return layout;
}

}  // namespace

Moves moves_from(std::string_view name) {
  if (name == "bf16") return Moves::bf16;
  if (name == "int8") return Moves::int8;
  check<ConfigError>(name == "f32", "[diloco] what islands send is ", name, ", not f32, bf16 or int8");
  return Moves::whole;
}

DiLoCo::DiLoCo(nn::Module& module, const Mesh& mesh, const std::string& axis, const DiLoCoOptions& options)
    : mesh_(mesh.spec), axis_(mesh.spec ? mesh.spec->axis(axis) : 0), options_(options) {
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

// The layout of a value [R, n] of which each island has all, or a part.
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

// Without a cut all islands have all of it.
OuterState DiLoCo::state(const OuterShard& shard, std::optional<OwnershipMap> cut, bool offload) const {
  const Tensor& rows = shard.rows;
  const Placement islands = cut ? Placement::shard(*cut) : Placement::replicate();
  OuterState out{detail::zero_state({rows.dtype(), {rows.size(1), rows.size(2)}, layout_of(shard, islands)}, rows.device(), {.offload = offload}),
                 {}};
  const Interval mine = cut ? cut->owned(island(), this->islands(), out.tensor.shape()) : Interval{0, rows.size(2)};
  for (const LocalPiece& piece : shard.unit->pieces(shard.flat(), mine))
    if (piece.runs.numel() > 0) out.parts.push_back({piece, piece.shard_offset});
  return out;
}

void DiLoCo::add_shard(const std::shared_ptr<Unit>& unit, size_t buffer) {
  OuterShard shard{unit, buffer, {}, {}, {}, {}};
  FlatBuffer& b = shard.flat();
  if (b.dtype != kF32 && b.dtype != kF64)
    fail<DTypeError>("[diloco] unit '", path_label(unit->name()), "' has ", b.dtype, " parameters; masters are f32 or f64");
  const Layout& resting = b.shard.layout();
  int64_t ranks = 1;
  for (int a = 0; a < resting.num_axes(); ++a)
    if (resting[a].is_shard() && !resting[a].is_single()) ranks *= resting.mesh()->size(a);
  const int64_t elements = b.shard.numel() / ranks;

  const Layout by_island = behind_islands(layout_of(shard, Placement::replicate())).with(axis_, Placement::shard(0));
  shard.rows = Tensor::view_into(b.shard, {b.dtype, {islands(), ranks, elements}, by_island}, 0);

  if (options_.moves == Moves::int8 && b.has_slope() && elements % kBlockSize != 0)
    fail<ConfigError>("[diloco] unit '", path_label(unit->name()), "': moves in int8 are in blocks of ", kBlockSize, " elements, and a rank has ",
                      elements, "; shard it with ShardOptions::whole_blocks");
  const OwnershipMap cut = OwnershipMap::even(1, part_size());
  shard.values = state(shard, rounds(b) ? std::nullopt : std::optional(cut), false);
  if (b.has_slope() && options_.momentum > 0) {
    shard.momentum = state(shard, cut, options_.offload);
    const int64_t mine = shard.momentum.tensor.local_shape().numel();
    const kernels::Segment all = detail::segment_of({}, 0, mine);
    shard.segments = detail::segment_table(std::span(&all, mine > 0 ? 1 : 0), b.shard.device());
  }
  shards_.push_back(std::move(shard));
}

void DiLoCo::begin() {
  for (OuterShard& shard : shards_) {
    const PathScope path(shard.unit->name());
    const Tensor& rows = shard.rows;
    const Type whole{rows.dtype(), {rows.size(1), rows.size(2)}, layout_of(shard, Placement::replicate())};
    const Tensor values = Tensor::view_into(rows, whole, 0);
    store_into(shard.values.tensor, redistribute(values, shard.values.tensor.layout()));
    if (const Tensor& momentum = shard.momentum.tensor) store_into(momentum, full_like(momentum, 0));
  }
}

void DiLoCo::step() {
  const PhaseScope phase(Phase::update);
  for (OuterShard& shard : shards_) {
    const PathScope path(shard.unit->name());
    shard.unit->close_for_change();
    if (Recording* r = Recording::current()) {
      r->on_rerun([unit = shard.unit] { unit->close_for_change(); });
      const std::string& name = shard.flat().name;
      r->leaf(shard.rows, name + " of all islands");
      r->leaf(shard.values.tensor, "diloco.values of " + name);
      if (shard.momentum.tensor) {
        r->leaf(shard.momentum.tensor, "diloco.momentum of " + name);
        r->leaf(shard.segments, "diloco.segments of " + name);
      }
      r->leaf(scalars_, "diloco.scalars");
    }
    if (rounds(shard.flat())) step_by_moves(shard);
    else step_whole(shard);
  }
}

Tensor DiLoCo::as_rows(const Tensor& whole) const {
  const Shape shape{islands(), whole.size(0), whole.size(1)};
  return redistribute(expand(unsqueeze(whole, 0), shape), behind_islands(whole.layout()).with(axis_, Placement::shard(0)));
}

Tensor DiLoCo::whole(const OuterShard& shard) const {
  return redistribute(shard.values.tensor, layout_of(shard, Placement::replicate()));
}

void DiLoCo::go_back() {
  for (OuterShard& shard : shards_) {
    const PathScope path(shard.unit->name());
    shard.unit->close_for_change();
    store_into(shard.rows, as_rows(whole(shard)));
  }
}

void DiLoCo::descend(const OuterShard& shard, const Tensor& to, const Tensor& gradient) const {
  if (const Tensor& momentum = shard.momentum.tensor) detail::nesterov_step(to, gradient, momentum, shard.segments, scalars_);
  else add_into(to, gradient * -options_.lr);
}

void DiLoCo::step_whole(OuterShard& shard) const {
  const Tensor& values = shard.values.tensor;
  const Placement part = Placement::shard(OwnershipMap::even(2, part_size()));
  Tensor agreed = mean(redistribute(shard.rows, shard.rows.layout().with(axis_, part)), 0);
  const bool to_the_mean = !shard.flat().has_slope() || (!shard.momentum.tensor && options_.lr == 1);
  if (to_the_mean) store_into(values, agreed);
  else descend(shard, values, values - std::exchange(agreed, {}));
  store_into(shard.rows, as_rows(whole(shard)));
}

// The noise differs by rank along `axis`, whose ranks have different addends, or is the same for all (-1).
Tensor DiLoCo::in_fewer_bits(const Tensor& x, int axis) const {
  if (options_.moves == Moves::bf16) return cast(x, kBF16);
  Type type{kU8, x.shape(), x.layout()};
  const int last = x.rank() - 1;
  type.shape[last] = x.size(last) / kBlockSize * kBytes;
  if (type.layout[axis_].is_shard(last)) type.layout[axis_] = Placement::shard(OwnershipMap::even(last, kBytes));
  const UnitOps::Attrs attrs{axis, 1};
  return UnitOps::made_by(UnitOps::quantize_gradient(), &attrs, x, type);
}

// x converted to this type; rows become their mean.
Tensor DiLoCo::in_values(const Tensor& x, const Type& type) const {
  const bool of_rows = x.rank() > type.shape.rank();
  if (x.dtype() != kU8) return of_rows ? mean(cast(x, type.dtype), 0) : cast(x, type.dtype);
  const UnitOps::Rows rows{of_rows ? islands() : 1};
  const Tensor sum = UnitOps::made_by(UnitOps::sum_of_blocks(), &rows, x, type);
  return of_rows ? sum * (1.0 / islands()) : sum;
}

void DiLoCo::step_by_moves(OuterShard& shard) const {
  const Tensor& values = shard.values.tensor;
  const Tensor moved = in_fewer_bits(as_rows(values) - shard.rows, axis_);
  const OwnershipMap part = OwnershipMap::even(2, moved.dtype() == kU8 ? kBytes : part_size());
  const Type type{values.dtype(), values.shape(), layout_of(shard, Placement::shard(OwnershipMap::even(1, part_size())))};
  const Tensor gradient = in_values(redistribute(moved, moved.layout().with(axis_, Placement::shard(part))), type);
  const Tensor move = full_like(gradient, 0);
  descend(shard, move, gradient);
  add_into(values, in_values(redistribute(in_fewer_bits(move, -1), values.layout()), values.type()));
  store_into(shard.rows, as_rows(values));
}

int64_t DiLoCo::state_bytes() const {
  int64_t bytes = 0;
  for (const OuterShard& shard : shards_)
    for (const OuterState& state : {shard.values, shard.momentum}) bytes += state.tensor ? state.tensor.local_bytes() : 0;
  return bytes;
}

}  // namespace sheaf::optim
