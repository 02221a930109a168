#include "sheaf/core/placement.h"

#include <algorithm>
#include <span>

#include "sheaf/core/rank_context.h"

namespace sheaf {
std::string Placement::to_string() const {
  switch (kind_) {
    case Kind::replicate: return "Replicate";
    case Kind::partial: return "Partial";
    case Kind::invariant: return "Invariant";
    case Kind::shard: return "Shard(" + map_.to_string() + ")";
  }
  return "?";
}

Layout::Layout(const MeshSpec* mesh, Placement everywhere) : mesh_(mesh) {
  for (int i = 0; i < num_axes(); ++i) placements_[i] = everywhere;
}

Layout::Layout(const MeshSpec* mesh, std::vector<Placement> placements) : mesh_(mesh) {
  if (static_cast<int>(placements.size()) != num_axes())
    fail<PlacementError>("[layout] ", placements.size(), " placements for mesh ", mesh->to_string(), ", which has ", num_axes(), " axes");
  std::copy(placements.begin(), placements.end(), placements_);
}

int Layout::axis_named(const std::string& axis) const {
  if (!mesh_) fail<PlacementError>("[layout] there is no mesh, and so no axis '", axis, "'");
  return mesh_->axis(axis);
}

Layout Layout::dual() const {
  Layout out = *this;
  for (int i = 0; i < num_axes(); ++i) out.placements_[i] = placements_[i].dual();
  return out;
}

bool Layout::has_shard() const {
  for (int i = 0; i < num_axes(); ++i)
    if (placements_[i].is_shard()) return true;
  return false;
}

bool Layout::is_elsewhere(const int* coordinates) const {
  for (int axis = 0; axis < num_axes(); ++axis)
    if (placements_[axis].is_single() &&
        placements_[axis].map().owner() != (coordinates ? coordinates[axis] : RankContext::current().coordinate(mesh_, axis)))
      return true;
  return false;
}

bool Layout::all_invariant() const {
  for (int i = 0; i < num_axes(); ++i)
    if (!placements_[i].is_invariant()) return false;
  return true;
}

namespace {
[[noreturn]] void does_not_fit(const Layout& layout, const Shape& global, int axis, const std::string& why) {
  fail<PlacementError>("[placement] ", global, " cannot be ", layout.to_string(), " on mesh ", layout.mesh()->to_string(),
                       ": axis ", layout.mesh()->name(axis), " ", why);
}

// The axes that cut something, in the order in which they cut.
struct CuttingAxes {
  int axes[kMaxAxes], count = 0;
  explicit CuttingAxes(const Layout& layout) {
    for (const bool inner : {false, true})
      for (int axis = 0; axis < layout.num_axes(); ++axis)
        if (layout[axis].is_shard() && !layout[axis].is_single() && layout[axis].map().is_inner() == inner) axes[count++] = axis;
  }
  std::span<const int> before(int i) const { return {axes, static_cast<size_t>(i)}; }
};

// A cut of what an earlier axis has cut must fit every block that the earlier ones leave, not only this rank's: else some ranks would
// refuse a layout that others accept, and the others would wait for them.
void check_further_cut(const Layout& layout, const Shape& global, int axis, std::span<const int> before) {
  const OwnershipMap& map = layout[axis].map();
  if (map.kind() == OwnershipMap::Kind::dim && map.granule() == 1) return;
  std::vector<Shape> blocks = {global};
  for (const int a : before) {
    if (!layout[a].is_shard(map.dim())) continue;
    std::vector<Shape> cut;
    const int size = layout.mesh()->size(a);
    for (const Shape& block : blocks)
      for (int r = 0; r < size; ++r) {
        Shape part = block;
        part[map.dim()] = layout[a].map().owned_size(r, size, block);
        if (std::find(cut.begin(), cut.end(), part) == cut.end()) cut.push_back(part);
      }
    blocks = std::move(cut);
  }
  for (const Shape& block : blocks) {
    try {
      map.owned_size(0, layout.mesh()->size(axis), block);
    } catch (const PlacementError&) {
      does_not_fit(layout, global, axis, str("does not fit a block of ", block[map.dim()], " that the axes before it ",
                                             "leave of dimension ", map.dim()));
    }
  }
}

void check_owners(const Layout& layout, const Shape& global) {
  for (int axis = 0; axis < layout.num_axes(); ++axis)
    if (layout[axis].is_single() && layout[axis].map().owner() >= layout.mesh()->size(axis))
      does_not_fit(layout, global, axis, str("has no rank ", layout[axis].map().owner()));
}

// Walks the axes in order; each shard cuts what the axes before it have left. Returns what the last one leaves.
template <class F>
Shape for_each_cut(const Layout& layout, const Shape& global, const int* coordinates, F&& f) {
  Shape shape = global;
  const CuttingAxes cutting(layout);
  for (int i = 0; i < cutting.count; ++i) {
    const int axis = cutting.axes[i];
    const Placement& p = layout[axis];
    const int size = layout.mesh()->size(axis);
    const int at = coordinates ? coordinates[axis] : RankContext::current().coordinate(layout.mesh(), axis);
    const bool flat = p.map().is_flat();
    bool cut_before = false;
    for (const int before : cutting.before(i)) {
      if (flat || layout[before].map().is_flat())
        does_not_fit(layout, global, axis, "cuts it too, and a flat cut goes with no other");
      cut_before = cut_before || layout[before].map().dim() == p.map().dim();
    }
    if (cut_before) check_further_cut(layout, global, axis, cutting.before(i));
    f(p.map(), at, size, shape);
    const int64_t own = p.map().owned_size(at, size, shape);
    if (flat) shape = Shape{own};
    else shape[p.map().dim()] = own;
  }
  return shape;
}
}  // namespace

Shape Layout::local_shape(const Shape& global, const int* coordinates) const {
  if (!mesh_) return global;
  check_owners(*this, global);
  const Shape here = for_each_cut(*this, global, coordinates, [](const OwnershipMap&, int, int, const Shape&) {});
  return is_elsewhere(coordinates) ? Shape{0} : here;
}

Shape Layout::local_start(const Shape& global, const int* coordinates) const {
  Shape start = Shape::filled(global.rank(), 0);
  for_each_cut(*this, global, coordinates, [&](const OwnershipMap& map, int at, int size, const Shape& shape) {
    const Interval own = map.owned(at, size, shape);
    if (map.is_flat()) start = Shape{own.begin};
    else start[map.dim()] += own.begin;
  });
  return start;
}

std::vector<Interval> Layout::local_rows(const Shape& global, int dim, const int* coordinates) const {
  if (is_elsewhere(coordinates)) return {};
  std::vector<Interval> have = {{0, global[dim]}};
  for_each_cut(*this, global, coordinates, [&](const OwnershipMap& map, int at, int size, const Shape& shape) {
    if (map.dim() != dim) return;
    std::vector<Interval> left;
    for (const Interval& own : map.owned_intervals(at, size, shape)) {  // in coordinates of what the axes before leave
      int64_t before = 0;
      for (const Interval& h : have) {
        const int64_t shift = h.begin - before;
        const Interval rows{std::max(own.begin, before) + shift, std::min(own.end, before + h.size()) + shift};
        before += h.size();
        if (rows.size() <= 0) continue;
        if (!left.empty() && left.back().end == rows.begin) left.back().end = rows.end;
        else left.push_back(rows);
      }
    }
    have = std::move(left);
  });
  return have;
}

bool Layout::operator==(const Layout& o) const {
  if (mesh_ != o.mesh_) return false;
  for (int i = 0; i < num_axes(); ++i)
    if (!(placements_[i] == o.placements_[i])) return false;
  return true;
}

std::string Layout::to_string() const {
  std::string out;
  for (int i = 0; i < num_axes(); ++i)
    out += (i ? " " : "") + placements_[i].to_string() + "@" + mesh_->name(i);
  return out;
}

std::string Type::to_string() const {
  const std::string l = layout.to_string();
  return str(dtype, shape, l.empty() ? "" : " ", l);
}

}  // namespace sheaf
