// Weights and addends of gradients sent in int8 blocks (kernels/quantize.h, [Note: int8 by chance]), as in ZeRO++
// (https://arxiv.org/abs/2306.10209), typed like everything else.
//
// [Note: addends in blocks] Blocks cannot be added, so they are not Partial. The addends of n ranks are the rows of a tensor with one
// more dimension, Shard on it, and the result is the sum over this dimension. An all_to_all changes the shard from the rows to the
// parts of a reduce_scatter, and each rank sums all rows of its part:
//
//   quantize_gradient  f32 [N] Partial@data     → u8 [n, N·66/64] Shard(0)@data
//   all_to_all                                  → u8 [n, N·66/64] Shard(1)@data
//   sum_of_blocks                               → f32 [N] Shard(flat)@data
//
// Gradients that must be whole on all ranks are rounded once more: the blocks of all parts are gathered, and every rank uses their
// values. Blocks also have one more dimension for each other axis on which gradients are still addends.
#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/gradient_reduction.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/distributed/unit_ops.h"

namespace sheaf {
namespace {

constexpr int64_t kBytes = block_bytes(BlockFormat::int8);

/// The type of a value's blocks. Its rows are whole blocks, and it is sharded between blocks.
Type in_blocks(const Type& values) {
  Type out{kU8, {}, values.layout};
  const MeshSpec* mesh = values.layout.mesh();
  int rows = 0;
  for (int a = 0; mesh && a < mesh->num_axes(); ++a) {
    if (!values.layout[a].is_partial()) continue;
    out.shape.push_back(mesh->size(a));
    out.layout[a] = Placement::shard(rows++);
  }
  for (int d = 0; d < values.shape.rank(); ++d) out.shape.push_back(values.shape[d]);
  const int last = out.shape.rank() - 1;
  out.shape[last] = values.shape.back() / kBlockSize * kBytes;
  for (int a = 0; mesh && a < mesh->num_axes(); ++a) {
    if (!values.layout[a].is_shard() || values.layout[a].is_single()) continue;
    const OwnershipMap& map = values.layout[a].map();
    if (!map.is_flat() && map.dim() + rows < last) {
      out.layout[a] = Placement::shard(map.moved_to(map.dim() + rows));
      continue;
    }
    const int64_t size = map.is_flat() ? map.chunk() : map.granule() > 1 ? map.granule() : values.shape.back() / mesh->size(a);
    const OwnershipMap cut = OwnershipMap::even(last, std::max<int64_t>(size / kBlockSize, 1) * kBytes);  // without values, of no blocks
    out.layout[a] = Placement::shard(map.is_inner() ? cut.inner() : cut);
  }
  return out;
}

/// The parts that the ranks of a reduction sum: equal, in whole blocks, of what other axes leave of a dimension.
OwnershipMap parts_of(int dim, int64_t block) { return OwnershipMap::even(dim, block).inner(); }

}  // namespace

Type UnitLayout::sent_type(const FlatBuffer& b, const Layout& layout) const {
  return sends_blocks(b) ? in_blocks(buffer_type(b, b.dtype, layout)) : buffer_type(b, b.compute, layout);
}

// The landing buffers are discarded as soon as the unpacked values exist: unlike casts, blocks need additional memory, a fraction of
// the values'.
void Unit::unpack() {
  if (!is_packed() || values_[0]) return;  // cached from another micro-batch: the values exist already
  const PathScope path(name_);
  const std::vector<Tensor> landed = gathered_;
  const UnitOps::Attrs attrs{axis_, landed.size()};
  const Tensors outputs = apply_typed(UnitOps::unpack(), &attrs, landed, gathered_specs());
  gathered_.assign(outputs.begin(), outputs.begin() + landed.size());
  std::copy(outputs.begin() + landed.size(), outputs.end(), values_.begin());
  if (Recording::current()) bind();
  UnitOps::discard_buffers(axis_, landed, recording_);
}

// The addends' blocks are lent in their place until those of all ranks have arrived.
void GradientReduction::exchange_blocks(int axis, std::span<const Reduced> which) {
  std::vector<Tensor> from;
  std::vector<OutputSpec> specs;
  for (const auto& [buffer, value] : which) {
    const FlatBuffer& b = *buffer;
    Tensor& t = values_[value];
    const UnitOps::Attrs of_addends{axis, 1};
    t = UnitOps::made_by(UnitOps::quantize_gradient(), &of_addends, t, in_blocks(t.type()));
    if (value < inputs_.size()) inputs_[value] = t;  // what it was made from goes before more is
    else inputs_.push_back(t);
    Type type = t.type();
    const int last = type.shape.rank() - 1, rows = type.shape.rank() - b.shard.shape().rank();
    OwnershipMap part = parts_of(last, kBytes);
    if (unit_.scatters(axis)) {
      const Type kept{b.dtype, b.shard.shape(), Layout(unit_.mesh()).with(axis, b.shard.layout()[axis])};
      const OwnershipMap cut = in_blocks(kept).layout[axis].map();
      part = cut.moved_to(cut.dim() + rows);
    }
    type.layout[axis] = Placement::shard(part);
    from.push_back(t);
    specs.push_back({.type = type});
  }
  const UnitOps::Attrs attrs{axis, specs.size()};
  const Tensors arrived = apply_typed(UnitOps::exchange(), &attrs, from, specs);
  for (size_t i = 0; i < which.size(); ++i) values_[which[i].second] = arrived[i];
}

/// The type of the sum of blocks received in a reduction of `b` along `axis`.
Type GradientReduction::sum_type(const FlatBuffer& b, const Type& blocks) const {
  Type sum = b.shard.type();
  const int rows = blocks.shape.rank() - sum.shape.rank();
  for (int a = 0; a < unit_.mesh()->num_axes(); ++a)  // still addends there
    if (blocks.layout[a].is_shard() && !blocks.layout[a].is_single() && blocks.layout[a].map().dim() < rows)
      sum.layout[a] = Placement::partial();
  return sum;
}

// Adds up what has arrived. True if the sums' blocks are then sent on, because they must be whole on all ranks.
bool GradientReduction::add_blocks() {
  const int axis = along_;
  std::vector<Tensor> from;
  std::vector<OutputSpec> specs;
  std::vector<size_t> which;
  unit_.each_trainable([&](const FlatBuffer& b, size_t k) {
    Tensor& t = values_[k];
    if (t.dtype() != kU8) return;
    const bool all = t.layout()[axis].is_invariant();  // they are sums already
    Type sum = sum_type(b, t.type());
    const bool parts = !all && !unit_.scatters(axis);
    if (parts) {
      if (const Placement& p = sum.layout[unit_.axis()]; p.is_shard() && p.map().is_flat())  // a flat cut goes with no other
        sum.layout[unit_.axis()] = Placement::shard(OwnershipMap::even(0, std::max<int64_t>(p.map().chunk(), 1)));
      sum.layout[axis] = Placement::shard(parts_of(sum.shape.rank() - 1, kBlockSize));
    }
    const UnitOps::Rows rows{all ? 1 : unit_.mesh()->size(axis)};
    t = UnitOps::made_by(UnitOps::sum_of_blocks(), &rows, t, sum);
    if (!parts) return;
    const UnitOps::Attrs of_sums{-1, 1};
    const Tensor blocks = UnitOps::made_by(UnitOps::quantize_gradient(), &of_sums, t, in_blocks(sum));
    inputs_.push_back(blocks);
    from.push_back(blocks);
    Type whole = blocks.type();
    whole.layout[axis] = Placement::invariant();
    specs.push_back({.type = whole});
    which.push_back(k);
    t = blocks;  // frees their source before more memory is used
  });
  if (which.empty()) return false;
  const UnitOps::Attrs attrs{axis, specs.size()};
  const Tensors gathered = apply_typed(UnitOps::gather_blocks(), &attrs, from, specs);
  for (size_t i = 0; i < which.size(); ++i) values_[which[i]] = gathered[i];
  return true;
}

}  // namespace sheaf
