// Each rank's part of a value that one mesh axis shards, and how its rows are packed into one block to be sent, and unpacked.
#pragma once

#include <vector>

#include "sheaf/core/placement.h"
#include "sheaf/core/view.h"

namespace sheaf {

/// The value as one rank would hold it if the axis did not shard it, and each rank's part: rows of the sharded dimension, or of the
/// flat index, which is then the only dimension; several intervals if the dimension consists of several parts or if whole intervals
/// have owners.
struct Cut {
  int dim = 0;
  bool flat = false, contiguous = true;  ///< each rank's part is one contiguous run of the dense whole
  int64_t row = 1;                       ///< elements of a row
  std::vector<std::vector<Interval>> owned;

  int64_t rows(int rank) const { return total(owned[static_cast<size_t>(rank)]); }
  int64_t elements(int rank) const { return rows(rank) * row; }
  /// Elements of each rank.
  std::vector<int64_t> counts() const;
  /// Converts rows of dimension 0 to elements of the flat index.
  void count_elements();

  static int64_t total(const std::vector<Interval>& rows);
};

/// `p`: the placement of a value of this type on `axis`, or the one it is to have.
Cut cut_of(const Type& type, int axis, const Placement& p);

/// The rows of `own` that are also in `others`, numbered within `own`. Both are sorted.
std::vector<Interval> shared_rows(const std::vector<Interval>& own, const std::vector<Interval>& others);

View flattened(const View& dense);
/// A dense block like `v` except for its `rows` rows of `dim`.
View block_of_rows(const View& v, int dim, int64_t rows, void* data);
View rows_of(View v, int dim, Interval rows);

/// Copies `rows` of `from`, one interval after another, to the view `packed`.
template <class Copy>
void pack_rows(const Copy& copy, const View& from, int dim, const std::vector<Interval>& rows, const View& packed) {
  int64_t at = 0;
  for (const Interval& i : rows) {
    if (i.size() > 0) copy(rows_of(from, dim, i), rows_of(packed, dim, {at, at + i.size()}));
    at += i.size();
  }
}
/// And back, to these rows of `to`.
template <class Copy>
void unpack_rows(const Copy& copy, const View& packed, const View& to, int dim, const std::vector<Interval>& rows) {
  pack_rows([&](const View& x, const View& y) { copy(y, x); }, to, dim, rows, packed);
}

}  // namespace sheaf
