// Placement: the part of a tensor that each rank of a mesh axis holds. Sharding is this type.
//
//   Replicate R   the whole value, entering rank-varying compute      gradient: Partial
//   Partial   P   an addend; the value is the sum over ranks          gradient: Replicate
//   Shard     S   the elements that the ownership map gives the rank  gradient: Shard, same map
//   Invariant I   the whole value of one logical computation          gradient: Invariant
//
// [Note: dual] The table above is the whole theory. Pair a cotangent with a value by summing over ranks; then
//   (A) the adjoint of a meaning-preserving redistribution p → q is one from dual(q) to dual(p);
//   (B) if an op's forward rule is right, its local backward needs no communication and yields dual placements.
// So only forward rules are written, and FSDP is S → R with adjoint P → S.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sheaf/core/mesh.h"
#include "sheaf/core/ownership_map.h"
#include "sheaf/core/shape.h"

namespace sheaf {

inline constexpr int kMaxAxes = 4;

class Placement {
 public:
  enum class Kind : uint8_t { replicate, partial, shard, invariant };
  constexpr Placement() = default;
  static Placement replicate() { return Placement(Kind::replicate); }
  static Placement partial() { return Placement(Kind::partial); }
  static Placement invariant() { return Placement(Kind::invariant); }
  static Placement shard(OwnershipMap map) { Placement p(Kind::shard); p.map_ = map; return p; }
  static Placement shard(int dim) { return shard(OwnershipMap::even(dim)); }
  /// Whole on one rank of the axis; its gradient is on the same rank.
  static Placement on(int rank) { return shard(OwnershipMap::on(rank)); }

  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::replicate; }
  bool is_partial() const { return kind_ == Kind::partial; }
  bool is_shard() const { return kind_ == Kind::shard; }
  bool is_shard(int dim) const { return is_shard() && map_.dim() == dim; }
  bool is_single() const { return is_shard() && map_.is_single(); }
  bool is_invariant() const { return kind_ == Kind::invariant; }
  const OwnershipMap& map() const { return map_; }
  /// The placement of this value's gradient; see [Note: dual].
  Placement dual() const {
    return is_replicate() ? partial() : is_partial() ? replicate() : *this;
  }
  bool operator==(const Placement& o) const { return kind_ == o.kind_ && (!is_shard() || map_ == o.map_); }
  std::string to_string() const;  ///< "Replicate", "Shard(0)", "Shard(flat)", "Partial", "Invariant"

 private:
  explicit Placement(Kind kind) : kind_(kind) {}
  Kind kind_ = Kind::replicate;
  OwnershipMap map_;
};

/// Whether axis a, placed as p, cuts what axis b, placed as q, leaves, if both cut the same dimension: axes cut in their order
/// in the mesh, but inner cuts come last.
inline bool cuts_after(const Placement& p, int a, const Placement& q, int b) {
  const bool p_inner = p.is_shard() && p.map().is_inner(), q_inner = q.is_shard() && q.map().is_inner();
  return p_inner != q_inner ? p_inner : a > b;
}

/// A mesh and a placement for each of its axes. A default layout has no mesh: the value is Replicate on every mesh (a constant such
/// as a mask), or there is only one rank. Axes that cut the same dimension cut it in axis order, inner cuts last, each cutting what
/// those before it leave; a flat cut cannot be combined with another. If a value is on one rank of an axis (single), other ranks have
/// nothing of it, whatever the other axes do.
class Layout {
 public:
  Layout() = default;
  explicit Layout(const MeshSpec* mesh, Placement everywhere = Placement::replicate());
  Layout(const MeshSpec* mesh, std::vector<Placement> placements);

  const MeshSpec* mesh() const { return mesh_; }
  int num_axes() const { return mesh_ ? mesh_->num_axes() : 0; }
  const Placement& operator[](int axis) const { return placements_[axis]; }
  Placement& operator[](int axis) { return placements_[axis]; }
  /// A copy with the placement of one axis replaced.
  Layout with(int axis, Placement p) const { Layout l = *this; l.placements_[axis] = p; return l; }
  /// By the axis's name; ConfigError if the mesh has none of it.
  Layout with(const std::string& axis, Placement p) const { return with(axis_named(axis), std::move(p)); }
  const Placement& operator[](const std::string& axis) const { return placements_[axis_named(axis)]; }
  Layout dual() const;
  bool has_shard() const;
  bool all_invariant() const;
  /// On another rank of some axis: nothing of it is here (or at these coordinates).
  bool is_elsewhere(const int* coordinates = nullptr) const;

  /// The sizes this rank (or the one at these coordinates) holds of a tensor of global shape `global`. A flat cut gives a rank-1 shape, and so does a
  /// value that is elsewhere: [0].
  Shape local_shape(const Shape& global, const int* coordinates = nullptr) const;
  /// Where the local block of a tensor cut along dimensions starts in the global tensor; PlacementError for a scattered
  /// cut, which leaves no block.
  Shape local_start(const Shape& global, const int* coordinates = nullptr) const;
  /// The rows of dimension `dim` of the global tensor that are on this rank (or at these coordinates), in order, as the fewest
  /// non-empty intervals. No cut may be flat.
  std::vector<Interval> local_rows(const Shape& global, int dim, const int* coordinates = nullptr) const;

  bool operator==(const Layout& o) const;
  std::string to_string() const;  ///< "" without a mesh, else "Shard(0)@data"

 private:
  int axis_named(const std::string& axis) const;
  const MeshSpec* mesh_ = nullptr;
  Placement placements_[kMaxAxes];
};

/// A tensor's full type, except for where its bytes are.
struct Type {
  DType dtype = DType::f32;
  Shape shape;  ///< global
  Layout layout;

  Shape local_shape() const { return layout.local_shape(shape); }
  Shape local_start() const { return layout.local_start(shape); }
  Type dual() const { return {dtype, shape, layout.dual()}; }
  bool operator==(const Type&) const = default;
  std::string to_string() const;  ///< "f32[32,64] Shard(0)@data"
};

}  // namespace sheaf
