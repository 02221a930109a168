#include "sheaf/core/placement.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "sheaf/core/interned.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
OwnershipMap OwnershipMap::even(int dim, int64_t granule) {
  check<PlacementError>(granule > 0, "[placement] Shard(", dim, " by ", granule, "): rows stay together in ones or more");
  OwnershipMap m;
  m.dim_ = static_cast<int8_t>(dim);
  m.granule_ = granule;
  return m;
}

OwnershipMap OwnershipMap::uneven(int dim, const std::vector<int64_t>& sizes, int64_t granule) {
  for (const int64_t size : sizes)
    if (size < 0) fail<PlacementError>("[placement] uneven: a rank has ", size, " of dimension ", dim);
  OwnershipMap m = even(dim, granule);
  m.kind_ = Kind::uneven;
  m.sizes_ = interned(sizes);
  return m;
}

OwnershipMap OwnershipMap::flat(int64_t chunk, int64_t offset) {
  OwnershipMap m;
  m.kind_ = Kind::flat;
  m.dim_ = -1;
  m.granule_ = chunk;
  m.offset_ = offset;
  return m;
}

OwnershipMap OwnershipMap::parts(int dim, const std::vector<int64_t>& sizes, int64_t units) {
  OwnershipMap m = even(dim, units);
  m.kind_ = Kind::parts;
  for (int64_t size : sizes)
    if (units <= 0 || size % units != 0)
      fail<PlacementError>("[placement] a part of ", size, " rows cannot be cut in ", units, " units");
  m.sizes_ = interned(sizes);
  return m;
}

OwnershipMap OwnershipMap::inner() const {
  if (is_flat() || is_single())
    fail<PlacementError>("[placement] Shard(", to_string(), ") goes with no other cut: it cannot be an inner one");
  OwnershipMap m = *this;
  m.inner_ = true;
  return m;
}

OwnershipMap OwnershipMap::by_owner(int dim, const std::vector<int64_t>& sizes, const std::vector<int>& owners) {
  if (sizes.size() != owners.size() || std::ranges::any_of(sizes, [](int64_t size) { return size < 0; }))
    fail<PlacementError>("[placement] ", sizes.size(), " sizes, none negative, and ", owners.size(), " owners do not match");
  std::vector<int64_t> table;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) continue;
    if (!table.empty() && table.back() == owners[i]) table[table.size() - 2] += sizes[i];
    else table.insert(table.end(), {sizes[i], owners[i]});
  }
  OwnershipMap m = even(dim);
  m.kind_ = Kind::owned;
  m.sizes_ = interned(table);
  return m;
}

OwnershipMap OwnershipMap::from_both_ends(int dim, int64_t size, int ranks) {
  std::vector<int64_t> sizes(static_cast<size_t>(2 * ranks));
  std::vector<int> owners(sizes.size());
  for (int r = 0; r < ranks; ++r) {
    const size_t front = static_cast<size_t>(r), back = sizes.size() - 1 - front;
    const int64_t rows = size * (r + 1) / ranks - size * r / ranks;
    sizes[front] = rows / 2, sizes[back] = rows - rows / 2;
    owners[front] = owners[back] = r;
  }
  return by_owner(dim, sizes, owners);
}

OwnershipMap OwnershipMap::on(int rank) {
  check<PlacementError>(rank >= 0, "[placement] Shard(on ", rank, "): ranks count from 0");
  OwnershipMap m;
  m.kind_ = Kind::single;
  m.dim_ = -1;
  m.granule_ = rank;
  return m;
}

namespace {
// The intervals of a table of sizes and owners: f(interval, owner).
template <class F>
void for_each_owned(const std::vector<int64_t>& table, F&& f) {
  int64_t at = 0;
  for (size_t i = 0; i < table.size(); i += 2) {
    f(Interval{at, at + table[i]}, table[i + 1]);
    at += table[i];
  }
}
}  // namespace

bool OwnershipMap::can_move(int64_t numerator, int64_t denominator) const {
  if (kind_ == Kind::owned) {
    bool fits = true;
    for_each_owned(*sizes_, [&](Interval i, int64_t) { fits = fits && i.size() * numerator % denominator == 0; });
    return fits;
  }
  if (!is_parts()) return granule_ * numerator % denominator == 0;
  return std::ranges::all_of(*sizes_, [&](int64_t size) { return size / granule_ * numerator % denominator == 0; });
}

OwnershipMap OwnershipMap::moved_to(int dim, int64_t numerator, int64_t denominator) const {
  OwnershipMap m = *this;
  m.dim_ = static_cast<int8_t>(dim);
  if (numerator == denominator) return m;
  if (!can_move(numerator, denominator))
    fail<PlacementError>("[placement] Shard(", to_string(), "): ", is_scattered() ? "its parts" : str("units of ", granule_),
                         " cannot be seen in rows of ", denominator, "/", numerator);
  if (is_parts()) {
    std::vector<int64_t> sizes = *sizes_;
    for (int64_t& size : sizes) size = size * numerator / denominator;
    m.sizes_ = interned(sizes);
    return m;
  }
  if (kind_ == Kind::owned) {
    std::vector<int64_t> table = *sizes_;
    for (size_t i = 0; i < table.size(); i += 2) table[i] = table[i] * numerator / denominator;
    m.sizes_ = interned(table);
    return m;
  }
  m.granule_ = granule_ * numerator / denominator;
  return m;
}

void OwnershipMap::check_fits(int ranks, const Shape& global) const {
  if (kind_ == Kind::flat) {
    if (ranks * granule_ - offset_ < global.numel())
      fail<PlacementError>("[placement] Shard(flat) of ", global, " over ", ranks, " ranks: chunks of ", granule_,
                           " do not hold all of it");
    return;
  }
  if (kind_ == Kind::single) {
    if (owner() >= ranks)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, " over ", ranks, " ranks: there is no rank ", owner());
    return;
  }
  if (dim_ < 0 || dim_ >= global.rank())
    fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": it has no such dimension");
  const int64_t size = global[dim_];
  if (kind_ == Kind::parts) {
    const int64_t sum = std::reduce(sizes_->begin(), sizes_->end());
    const bool whole_units = inner_ && size < sum && size % (sum / granule_) == 0;
    if (sum != size && !whole_units)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": ", sizes_->size(), " parts with a sum of ", sum);
    return;
  }
  if (kind_ == Kind::owned) {
    int64_t sum = 0;
    for_each_owned(*sizes_, [&](Interval i, int64_t owner) {
      sum += i.size();
      if (owner < 0 || owner >= ranks)
        fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, " over ", ranks, " ranks: rank ", owner,
                             " owns [", i.begin, ",", i.end, ")");
    });
    if (sum != size)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": ranks own ", sum, " of ", size);
    return;
  }
  if (size % granule_ != 0)
    fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": ", size, " is no multiple of ", granule_);
  if (kind_ == Kind::uneven) {
    const int64_t sum = std::reduce(sizes_->begin(), sizes_->end());
    if (static_cast<int>(sizes_->size()) != ranks || sum != size / granule_)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, " over ", ranks, " ranks: ", sizes_->size(),
                           " sizes with a sum of ", sum * granule_);
  }
}

int64_t OwnershipMap::units_of(const Shape& global) const {
  const int64_t sum = std::reduce(sizes_->begin(), sizes_->end());
  return sum == global[dim_] ? granule_ : global[dim_] / (sum / granule_);
}

Interval OwnershipMap::owned(int rank, int ranks, const Shape& global) const {
  check_fits(ranks, global);
  switch (kind_) {
    case Kind::flat: {
      const int64_t n = global.numel();
      return {std::clamp<int64_t>(rank * granule_ - offset_, 0, n),
              std::clamp<int64_t>((rank + 1) * granule_ - offset_, 0, n)};
    }
    case Kind::uneven: {
      const auto begin = std::accumulate(sizes_->begin(), sizes_->begin() + rank, int64_t{0}) * granule_;
      return {begin, begin + (*sizes_)[rank] * granule_};
    }
    case Kind::dim: {
      const int64_t rows = global[dim_] / granule_;
      return {rows * rank / ranks * granule_, rows * (rank + 1) / ranks * granule_};
    }
    case Kind::single: return {0, rank == owner() ? global.numel() : 0};
    case Kind::parts:
    case Kind::owned:
      if (ranks == 1) return {0, global[dim_]};
      break;
  }
  fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": a rank's share is not one interval");
}

std::vector<Interval> OwnershipMap::owned_intervals(int rank, int ranks, const Shape& global) const {
  if (!is_scattered()) return {owned(rank, ranks, global)};
  check_fits(ranks, global);
  std::vector<Interval> out;
  if (kind_ == Kind::owned) {
    for_each_owned(*sizes_, [&](Interval i, int64_t owner) {
      if (owner == rank) out.push_back(i);
    });
    return out;
  }
  const int64_t units = units_of(global);
  int64_t part = 0;
  for (const int64_t size : *sizes_) {
    const int64_t rows = size / granule_;
    out.push_back({part + units * rank / ranks * rows, part + units * (rank + 1) / ranks * rows});
    part += units * rows;
  }
  return out;
}

int64_t OwnershipMap::owned_size(int rank, int ranks, const Shape& global) const {
  if (!is_scattered()) return owned(rank, ranks, global).size();
  check_fits(ranks, global);
  if (kind_ == Kind::owned) {
    int64_t own = 0;
    for_each_owned(*sizes_, [&](Interval i, int64_t owner) { own += owner == rank ? i.size() : 0; });
    return own;
  }
  const int64_t units = units_of(global);
  return (units * (rank + 1) / ranks - units * rank / ranks) * (std::reduce(sizes_->begin(), sizes_->end()) / granule_);
}

std::string OwnershipMap::to_string() const {
  if (kind_ == Kind::flat) return "flat";
  if (kind_ == Kind::single) return str("on ", owner());
  const std::string by = kind_ == Kind::dim && granule_ != 1 ? str(" by ", granule_) : "";
  constexpr const char* kSuffix[] = {"", " uneven", "", " parts", " owned"};
  return str(dim_, by, kSuffix[static_cast<int>(kind_)], inner_ ? " inner" : "");
}

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
    fail<PlacementError>("[layout] ", placements.size(), " placements for mesh ", mesh->to_string());
  std::copy(placements.begin(), placements.end(), placements_);
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

// The axes that cut something, in the order in which they do.
struct CuttingAxes {
  int axes[kMaxAxes], count = 0;
  explicit CuttingAxes(const Layout& layout) {
    for (const bool inner : {false, true})
      for (int axis = 0; axis < layout.num_axes(); ++axis)
        if (layout[axis].is_shard() && !layout[axis].is_single() && layout[axis].map().is_inner() == inner) axes[count++] = axis;
  }
  std::span<const int> before(int i) const { return {axes, static_cast<size_t>(i)}; }
};

// A cut of what an earlier axis has cut must fit every block that the earlier ones leave, not this rank's alone: else some
// ranks would refuse what others accept, and those would wait for them.
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
    for (const Interval& own : map.owned_intervals(at, size, shape)) {  // counted in what the axes before leave
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

Shape Layout::local_shape(const Shape& global) const { return mesh_ ? local_shape(global, nullptr) : global; }
Shape Layout::local_start(const Shape& global) const { return local_start(global, nullptr); }

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
