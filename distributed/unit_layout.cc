#include "sheaf/distributed/unit_layout.h"

#include <numeric>

namespace sheaf {

FlatLayout FlatLayout::of(const std::vector<Shape>& shapes, int ranks, int64_t align, int64_t parts) {
  FlatLayout f;
  for (const Shape& s : shapes) {
    f.offsets.push_back(f.total);
    f.total += (s.numel() + align - 1) / align * align;
  }
  const int64_t step = align * ranks * parts;
  f.total = (f.total + step - 1) / step * step;
  f.chunk = f.total / ranks;
  return f;
}

UnitLayout::UnitLayout(std::string name, std::vector<LeafSpec> leaves, const UnitOptions& o)
    : name_(std::move(name)), leaves_(std::move(leaves)), mesh_(o.mesh), axis_(o.axis), tensor_axis_(mesh_ ? o.tensor_axis : -1),
      secondary_axis_(mesh_ ? o.secondary_axis : -1), stage_axis_(mesh_ ? o.stage_axis : -1), stage_(o.stage),
      strategy_(mesh_ ? o.strategy : Strategy::none), offload_(o.offload && shards()) {
  where_.resize(leaves_.size());
  for (int i = 0; i < static_cast<int>(leaves_.size()); ++i) {
    const LeafSpec& leaf = leaves_[i];
    const bool casts = !leaf.exact && is_floating(leaf.dtype);
    const bool gather_int8 = o.gather_int8 && casts && leaf.shape.rank() >= 2 && !leaf.bias;
    auto it = std::find_if(buffers_.begin(), buffers_.end(), [&](const FlatBuffer& b) {
      return b.dtype == leaf.dtype && b.trainable == leaf.trainable && b.cut == is_cut(i) && b.exact == leaf.exact &&
             b.steered == leaf.steered && b.gather_int8 == gather_int8;
    });
    if (it == buffers_.end()) {
      buffers_.push_back({});
      it = std::prev(buffers_.end());
      it->dtype = leaf.dtype;
      it->trainable = leaf.trainable;
      it->cut = is_cut(i);
      it->exact = leaf.exact;
      it->steered = leaf.steered;
      it->gather_int8 = gather_int8;
      it->reduce_int8 = o.reduce_int8 && casts;
      it->compute = casts ? o.compute.value_or(leaf.dtype) : leaf.dtype;
      it->reduce = casts ? o.reduce.value_or(leaf.dtype) : leaf.dtype;
    }
    where_[i] = {static_cast<int>(it - buffers_.begin()), static_cast<int>(it->leaves.size())};
    it->leaves.push_back(i);
  }
  int slices = mesh_ ? mesh_->size(axis_) : 1;
  if (secondary_axis_ >= 0) slices *= mesh_->size(secondary_axis_);
  for (FlatBuffer& b : buffers_) {
    std::vector<Shape> shapes;
    for (int i : b.leaves) shapes.push_back(b.cut ? largest_block(i) : leaves_[i].shape);
    // Replicas of a slice each sum an equal part of it when they reduce.
    int64_t parts = 1;
    if (b.reduce_int8 && mesh_)
      for (int a = 0; a < mesh_->num_axes(); ++a)
        if (a != axis_ && a != secondary_axis_ && sums_along(b, a)) parts = std::lcm(parts, int64_t{mesh_->size(a)});
    b.layout = FlatLayout::of(shapes, slices, o.whole_blocks || b.gather_int8 || b.reduce_int8 ? kBlockSize : FlatLayout::kAlign, parts);
    b.name = path_label(name_);
    if (b.cut) b.name += " cut";
    if (b.steered != 0) b.name += " steered";
    else if (b.exact) b.name += " exact";
    if (!b.trainable) b.name += " frozen";
    if (b.gather_int8) b.name += " in blocks";
    if (buffers_.size() > 1 && b.dtype != kF32) b.name += str(" ", b.dtype);
  }
}

Shape UnitLayout::block_shape(int leaf, int rank) const {
  Shape shape = leaves_[leaf].shape;
  if (!is_cut(leaf)) return shape;
  const OwnershipMap& map = *leaves_[leaf].cut;
  shape[map.dim()] = map.owned_size(rank, mesh_->size(tensor_axis_), shape);
  return shape;
}

Shape UnitLayout::largest_block(int leaf) const {
  const LeafSpec& l = leaves_[leaf];
  const OwnershipMap& cut = *l.cut;
  const int ranks = mesh_->size(tensor_axis_);
  Shape largest = block_shape(leaf, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    const Shape block = block_shape(leaf, rank);
    if (block.numel() > largest.numel()) largest = block;
    if (block.numel() > 0) continue;
    const int64_t units = cut.is_parts() ? cut.granule() : l.shape[cut.dim()] / cut.granule();
    const Shape shape = l.blocks ? values_shape(l.shape, *l.blocks) : l.shape;
    fail<ConfigError>("[shard] '", l.name, "' ", shape, l.blocks ? str(" in ", sheaf::name(*l.blocks), " blocks") : "", ": cut as ",
                      Placement::shard(cut), " over the ", ranks, " ranks of tensor axis '", mesh_->name(tensor_axis_), "' it leaves rank ",
                      rank, " nothing; at most ", units, " can share it");
  }
  return largest;
}

Layout UnitLayout::placed(Placement everywhere) const {
  Layout l(mesh_, everywhere);
  if (stage_axis_ >= 0) l[stage_axis_] = Placement::on(stage_);
  return l;
}

Layout UnitLayout::resting(const FlatBuffer& b) const {
  if (!mesh_) return {};
  Layout l = placed(Placement::invariant());
  if (b.cut) l[tensor_axis_] = Placement::shard(0);
  if (secondary_axis_ >= 0) {
    l[axis_] = Placement::shard(b.cut ? 1 : 0);
    l[secondary_axis_] = Placement::shard(b.cut ? 2 : 1);
  } else if (shards()) {
    l[axis_] = b.cut ? Placement::shard(1) : Placement::shard(OwnershipMap::flat(b.layout.chunk));
  }
  return l;
}

Layout UnitLayout::whole(const FlatBuffer& b) const {
  if (!mesh_) return {};
  const Layout l = placed(Placement::replicate());
  return b.cut ? l.with(tensor_axis_, Placement::shard(0)) : l;
}

Layout UnitLayout::value_layout(int leaf) const {
  if (!mesh_) return {};
  const Layout l = placed(Placement::replicate());
  return is_cut(leaf) ? l.with(tensor_axis_, Placement::shard(*leaves_[leaf].cut)) : l;
}

Type UnitLayout::buffer_type(const FlatBuffer& b, DType dtype, const Layout& layout) const {
  Shape shape;
  if (b.cut) shape.push_back(mesh_->size(tensor_axis_));
  const int64_t slices = secondary_axis_ >= 0 ? mesh_->size(axis_) : 1;
  if (secondary_axis_ >= 0) shape.push_back(slices);
  shape.push_back(b.layout.total / slices);
  return {dtype, shape, layout};
}

// In the masters' dtype, with the dual placement of the gathered values.
Type UnitLayout::slot_buffer_type(const FlatBuffer& b) const { return buffer_type(b, b.dtype, whole(b)).dual(); }
Type UnitLayout::slot_type(int leaf) const { return value_type(leaf, leaves_[leaf].dtype).dual(); }

std::vector<LocalPiece> UnitLayout::pieces(const FlatBuffer& b, Interval part) const {
  std::vector<LocalPiece> out;
  if (!b.shard || !is_here()) return out;
  const RankContext& context = RankContext::current();
  Interval mine{0, b.layout.total};
  for (const int axis : {axis_, secondary_axis_}) {
    if (axis < 0 || !shards()) continue;
    const int64_t slice = mine.size() / mesh_->size(axis);
    mine.begin += context.coordinate(mesh_, axis) * slice;
    mine.end = mine.begin + slice;
  }
  mine = {mine.begin + part.begin, std::min(mine.end, mine.begin + part.end)};
  const int rank = b.cut ? context.coordinate(mesh_, tensor_axis_) : 0;
  for (size_t i = 0; i < b.leaves.size(); ++i) {
    const int leaf = b.leaves[i];
    const int64_t offset = b.layout.offsets[i];
    const Interval here{std::max(offset, mine.begin) - offset,  // of this rank's block of the leaf
                        std::min(offset + block_shape(leaf, rank).numel(), mine.end) - offset};
    const int64_t start = offset - mine.begin;
    if (here.size() <= 0) continue;
    if (!b.cut) {
      out.push_back({leaf, Runs::of(here), start + here.begin});
      continue;
    }
    const LeafSpec& spec = leaves_[leaf];
    for (const auto& [runs, at] : runs_of(*spec.cut, rank, mesh_->size(tensor_axis_), spec.shape, here))
      out.push_back({leaf, runs, start + at});
  }
  return out;
}

// The axes in the order of reduction: the unit's own, then the others along which something is a sum; -1 after the last.
int UnitLayout::axis_after(int axis) const {
  if (!mesh_) return -1;
  for (int next = axis == axis_ ? 0 : axis + 1; next < mesh_->num_axes(); ++next)
    if (next != axis_ && std::ranges::any_of(buffers_, [&](const FlatBuffer& b) { return b.trainable && sums_along(b, next); }))
      return next;
  return -1;
}

bool UnitLayout::sums_further() const {
  for (int a = axis_after(axis_); a >= 0; a = axis_after(a))
    if (!alone(a)) return true;
  return false;
}

int64_t UnitLayout::gathered_bytes() const {
  int64_t bytes = 0;
  if (gathers() && is_here())
    for (const FlatBuffer& b : buffers_) bytes += b.layout.total * static_cast<int64_t>(size_of(b.compute));
  return bytes;
}

int64_t UnitLayout::copied_bytes() const {
  int64_t bytes = 0;
  if (secondary() && is_here())
    for (const FlatBuffer& b : buffers_) bytes += b.layout.total / mesh_->size(axis_) * static_cast<int64_t>(size_of(b.compute));
  return bytes;
}

}  // namespace sheaf
