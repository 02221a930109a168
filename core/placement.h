// Placement: what each rank of a mesh axis holds of a tensor. This is the type that sharding is.
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
#include "sheaf/core/shape.h"

namespace sheaf {

inline constexpr int kMaxAxes = 4;

/// The half-open range [begin, end) of positions.
struct Interval {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

/// Which elements of a tensor each rank of an axis owns; a small value.
class OwnershipMap {
 public:
  enum class Kind : uint8_t {
    dim,     ///< contiguous, balanced cut of one dimension in units of `granule` rows
    uneven,  ///< contiguous cut of one dimension with given sizes per rank, times `granule`
    flat,    ///< contiguous cut of the flat index: rank r owns [r·chunk − offset, (r+1)·chunk − offset)
    parts,   ///< one dimension that is several parts side by side, each cut: rank r owns its share of each part
    owned,   ///< one dimension in intervals, each whole on one rank, in any order
    single,  ///< all of it on one rank: a stage of a pipeline
  };
  OwnershipMap() = default;

  /// Rank r of n owns rows granule·[m·r/n, m·(r+1)/n) of the m = size/granule rows of dimension `dim`.
  static OwnershipMap even(int dim, int64_t granule = 1);
  /// Rank r owns sizes[r]·granule rows of dimension `dim`.
  static OwnershipMap uneven(int dim, const std::vector<int64_t>& sizes, int64_t granule = 1);
  /// A cut of the row-major flat index in equal chunks, seen from a tensor that starts `offset` elements into the
  /// buffer that is cut (a parameter inside its unit).
  static OwnershipMap flat(int64_t chunk, int64_t offset = 0);
  /// Dimension `dim` is parts of these sizes, one after another (queries, keys and values of one projection), and each is
  /// cut as one of `units` rows of sizes[i]/units elements would be: rank r of n owns units [units·r/n, units·(r+1)/n) of
  /// each part. What it holds is those shares, one after another. Throws PlacementError for a size that is no multiple.
  static OwnershipMap parts(int dim, const std::vector<int64_t>& sizes, int64_t units);
  /// The same cut, made last: of the block that the other axes leave of its dimension, wherever in the mesh its axis stands.
  /// Of parts, the block may have fewer units than the whole, as many of each part.
  OwnershipMap inner() const;
  /// Dimension `dim` is intervals of these sizes, one after another, and interval i lies whole on rank owners[i]: what must
  /// not be torn apart, such as the matrices of a flat buffer. A rank holds its intervals one after another; it may have
  /// none. Equal ownership is equal maps, however it is written. Throws PlacementError for lists that do not match.
  static OwnershipMap by_owner(int dim, const std::vector<int64_t>& sizes, const std::vector<int>& owners);
  /// Of 2 R pieces of a dimension of this size rank r of R owns the r-th and the r-th from the end, together as many rows as by an even
  /// cut (by_owner). Where the work of a row grows with those before it, as of causal attention, ranks have alike much.
  static OwnershipMap from_both_ends(int dim, int64_t size, int ranks);
  /// All of the value is on `rank`, whatever its shape, and on no other: there nothing is computed with it.
  static OwnershipMap on(int rank);

  Kind kind() const { return kind_; }
  bool is_flat() const { return kind_ == Kind::flat; }
  bool is_parts() const { return kind_ == Kind::parts; }
  bool is_single() const { return kind_ == Kind::single; }
  int owner() const { return static_cast<int>(granule_); }  ///< of single
  bool is_inner() const { return inner_; }
  /// A rank's share may be several intervals.
  bool is_scattered() const { return kind_ == Kind::parts || kind_ == Kind::owned; }
  int dim() const { return dim_; }            ///< −1 for flat and single
  int64_t granule() const { return granule_; }  ///< of parts: their units
  /// Of uneven and parts; of owned: sizes and owners in turn. Null of the others.
  const std::vector<int64_t>* table() const { return sizes_; }
  const std::vector<int64_t>& sizes() const { return *sizes_; }  ///< of uneven and parts
  int64_t chunk() const { return granule_; }  ///< of flat
  int64_t offset() const { return offset_; }  ///< of flat
  /// The same cut seen on dimension `dim` whose rows are `factor` of the old ones (reshape, transpose).
  OwnershipMap moved_to(int dim, int64_t factor_numerator = 1, int64_t factor_denominator = 1) const;
  /// Whether that exists: no rank's share begins or ends inside of one of the new rows.
  bool can_move(int64_t factor_numerator, int64_t factor_denominator) const;

  /// Rows of `dim` (or, for flat and single, flat positions) that `rank` of `ranks` owns of a tensor of this global shape. Throws
  /// PlacementError for a share that is not one interval.
  Interval owned(int rank, int ranks, const Shape& global) const;
  /// The same of any map: one interval, or one for each part, or as many as it owns.
  std::vector<Interval> owned_intervals(int rank, int ranks, const Shape& global) const;
  /// How many they are.
  int64_t owned_size(int rank, int ranks, const Shape& global) const;

  bool operator==(const OwnershipMap&) const = default;
  /// "0", "0 by 8" (rows that stay together), "0 uneven", "flat", "0 parts", "0 owned", "0 parts inner", "on 2".
  std::string to_string() const;

 private:
  Kind kind_ = Kind::dim;
  int8_t dim_ = 0;
  bool inner_ = false;
  int64_t granule_ = 1;                          // or chunk, or owner
  int64_t offset_ = 0;
  const std::vector<int64_t>* sizes_ = nullptr;  // interned: equal tables, equal pointer
  void check_fits(int ranks, const Shape& global) const;
  int64_t units_of(const Shape& global) const;   // of parts: how many of them a block has
};

class Placement {
 public:
  enum class Kind : uint8_t { replicate, partial, shard, invariant };
  constexpr Placement() = default;
  static Placement replicate() { return Placement(Kind::replicate); }
  static Placement partial() { return Placement(Kind::partial); }
  static Placement invariant() { return Placement(Kind::invariant); }
  static Placement shard(OwnershipMap map) { Placement p(Kind::shard); p.map_ = map; return p; }
  static Placement shard(int dim) { return shard(OwnershipMap::even(dim)); }
  /// Whole on one rank of the axis: its gradient is on the same.
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

/// A mesh and a placement for each of its axes. A default layout has no mesh: the value is Replicate on every mesh
/// (a constant such as a mask), or there is only one rank. Axes that cut the same dimension cut it in axis order, inner cuts
/// last, each what those before it leave; a flat cut goes with no other. Of what is on one rank of an axis (single) others
/// have nothing, whatever the other axes do.
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
  Layout dual() const;
  bool has_shard() const;
  bool all_invariant() const;
  /// On another rank of some axis: nothing of it is here (or at these coordinates).
  bool is_elsewhere(const int* coordinates = nullptr) const;

  /// The sizes this rank holds of a tensor of global shape `global`. A flat cut gives a rank-1 shape; so does what is
  /// elsewhere: [0].
  Shape local_shape(const Shape& global) const;
  /// Where the local block of a tensor cut along dimensions starts in the global tensor; PlacementError for a scattered
  /// cut, which leaves no block.
  Shape local_start(const Shape& global) const;
  /// The same for any rank, by its coordinates on the mesh.
  Shape local_shape(const Shape& global, const int* coordinates) const;
  Shape local_start(const Shape& global, const int* coordinates) const;
  /// Which rows of dimension `dim` of the global tensor are here (or at these coordinates), in order, as few intervals that
  /// are not empty. No cut is flat.
  std::vector<Interval> local_rows(const Shape& global, int dim, const int* coordinates = nullptr) const;

  bool operator==(const Layout& o) const;
  std::string to_string() const;  ///< "" without a mesh, else "Shard(0)@data"

 private:
  const MeshSpec* mesh_ = nullptr;
  Placement placements_[kMaxAxes];
};

/// A tensor's full type but for where its bytes are.
struct Type {
  DType dtype = DType::f32;
  Shape shape;  ///< global
  Layout layout;

  Shape local_shape() const { return layout.local_shape(shape); }
  Type dual() const { return {dtype, shape, layout.dual()}; }
  bool operator==(const Type&) const = default;
  std::string to_string() const;  ///< "f32[32,64] Shard(0)@data"
};

}  // namespace sheaf
