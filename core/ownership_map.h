// OwnershipMap: which elements of a tensor each rank of a mesh axis owns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sheaf/core/shape.h"

namespace sheaf {

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
    owned,   ///< one dimension in intervals, each entirely on one rank, in any order
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
  /// each part. It holds those shares, one after another. Throws PlacementError for a size that is no multiple.
  static OwnershipMap parts(int dim, const std::vector<int64_t>& sizes, int64_t units);
  /// The same cut, applied last: to the block that the other axes leave of its dimension, wherever its axis is in the mesh.
  /// With parts, the block may have fewer units than the whole, equally many of each part.
  OwnershipMap inner() const;
  /// Dimension `dim` is intervals of these sizes, one after another, and interval i is entirely on rank owners[i]: for rows that must
  /// not be separated, such as the matrices of a flat buffer. A rank holds its intervals one after another; it may have none. Maps
  /// with equal ownership are equal, however they are written. Throws PlacementError for lists that do not match.
  static OwnershipMap by_owner(int dim, const std::vector<int64_t>& sizes, const std::vector<int>& owners);
  /// The dimension is cut into 2 R pieces; rank r of R owns the r-th and the r-th from the end, together as many rows as in an even
  /// cut (by_owner). If a row's work grows with the rows before it, as in causal attention, all ranks have equal work.
  static OwnershipMap from_both_ends(int dim, int64_t size, int ranks);
  /// All of the value is on `rank`, whatever its shape; other ranks have none of it and compute nothing with it.
  static OwnershipMap on(int rank);

  Kind kind() const { return kind_; }
  bool is_flat() const { return kind_ == Kind::flat; }
  bool is_parts() const { return kind_ == Kind::parts; }
  bool is_single() const { return kind_ == Kind::single; }
  int owner() const { return static_cast<int>(granule_); }  ///< of single
  bool is_inner() const { return inner_; }
  /// A rank's share may be several intervals.
  bool is_scattered() const { return kind_ == Kind::parts || kind_ == Kind::owned; }
  int dim() const { return dim_; }              ///< −1 for flat and single
  int64_t granule() const { return granule_; }  ///< of parts: their units
  /// The sizes of uneven and parts; sizes and owners, alternating, of owned. Null for the others.
  const std::vector<int64_t>* table() const { return sizes_; }
  const std::vector<int64_t>& sizes() const { return *sizes_; }  ///< of uneven and parts
  int64_t chunk() const { return granule_; }  ///< of flat
  int64_t offset() const { return offset_; }  ///< of flat
  /// The same cut as seen on dimension `dim` whose rows are `factor` of the old ones (reshape, transpose).
  OwnershipMap moved_to(int dim, int64_t factor_numerator = 1, int64_t factor_denominator = 1) const;
  /// Whether moved_to() is possible: no rank's share begins or ends inside one of the new rows.
  bool can_move(int64_t factor_numerator, int64_t factor_denominator) const;

  /// Rows of `dim` (or, for flat and single, flat positions) that `rank` of `ranks` owns of a tensor of this global shape. Throws
  /// PlacementError for a share that is not one interval.
  Interval owned(int rank, int ranks, const Shape& global) const;
  /// The same for any map: one interval, or one for each part, or as many as it owns.
  std::vector<Interval> owned_intervals(int rank, int ranks, const Shape& global) const;
  /// The number of positions in them.
  int64_t owned_size(int rank, int ranks, const Shape& global) const;

  bool operator==(const OwnershipMap&) const = default;
  /// "0", "0 by 8" (rows that stay together), "0 uneven", "flat", "0 parts", "0 owned", "0 parts inner", "on 2".
  std::string to_string() const;

 private:
  Kind kind_ = Kind::dim;
  int8_t dim_ = 0;
  bool inner_ = false;
  int64_t granule_ = 1;  // or chunk, or owner
  int64_t offset_ = 0;
  const std::vector<int64_t>* sizes_ = nullptr;  // interned: equal tables, equal pointer
  void check_fits(int ranks, const Shape& global) const;
  int64_t units_of(const Shape& global) const;  // of parts: how many of them a block has
};

}  // namespace sheaf
