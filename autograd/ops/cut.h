// What each rank has of a value that one mesh axis cuts, and how its rows travel: copied into one block, and from one.
#pragma once

#include <vector>

#include "sheaf/core/placement.h"
#include "sheaf/core/view.h"

namespace sheaf {

/// The value as one rank would hold it if the axis did not cut it, and what each rank has of it: rows of the cut dimension, or
/// of the flat index, which is then the only dimension; several intervals where the dimension is several parts or whole
/// intervals have owners.
struct Cut {
  int dim = 0;
  bool flat = false, contiguous = true;  ///< a rank's share is one run of the dense whole
  int64_t row = 1;                       ///< elements of one
  std::vector<std::vector<Interval>> owned;

  int64_t rows(int rank) const { return total(owned[static_cast<size_t>(rank)]); }
  int64_t elements(int rank) const { return rows(rank) * row; }
  /// Elements of all ranks.
  std::vector<int64_t> counts() const;
  /// Rows of dimension 0 as elements of the flat index.
  void count_elements();

  static int64_t total(const std::vector<Interval>& rows);
};

/// `p` is what `axis` does with a value of this type, or is to do.
Cut cut_of(const Type& type, int axis, const Placement& p);

/// Which rows of `own`, counted in it, are `others`, too. Both are in order.
std::vector<Interval> shared_rows(const std::vector<Interval>& own, const std::vector<Interval>& others);

View flattened(const View& dense);
/// A dense block like `v` but for the rows it has of `dim`.
View block_of_rows(const View& v, int dim, int64_t rows, void* data);
View rows_of(View v, int dim, Interval rows);

/// `rows` of `from`, one interval after another, to the view `packed`.
template <class Copy>
void pack_rows(const Copy& copy, const View& from, int dim, const std::vector<Interval>& rows, const View& packed) {
  int64_t at = 0;
  for (const Interval& i : rows) {
    if (i.size() > 0) copy(rows_of(from, dim, i), rows_of(packed, dim, {at, at + i.size()}));
    at += i.size();
  }
}
/// And back, to the rows of `to`.
template <class Copy>
void unpack_rows(const Copy& copy, const View& packed, const View& to, int dim, const std::vector<Interval>& rows) {
  pack_rows([&](const View& x, const View& y) { copy(y, x); }, to, dim, rows, packed);
}

}  // namespace sheaf
