// Runs: elements of a tensor's flat index at equal distances, such as the columns of a matrix that a rank owns.
#pragma once

#include <vector>

#include "sheaf/core/placement.h"

namespace sheaf {

/// `count` runs of `size` elements of a row-major flat index: run k is [begin + k·stride, begin + k·stride + size).
struct Runs {
  int64_t begin = 0, size = 0, count = 1, stride = 0;

  /// An interval: one run.
  static Runs of(const Interval& i) { return {i.begin, i.size()}; }
  int64_t numel() const { return size * count; }
  bool is_interval() const { return count == 1; }
  /// Run k.
  Interval operator[](int64_t k) const { return {begin + k * stride, begin + k * stride + size}; }
  /// The flat index of element i, counted over all runs.
  int64_t at(int64_t i) const { return begin + i / size * stride + i % size; }
  bool operator==(const Runs&) const = default;
};

/// Runs of a tensor's flat index, and the offset of the first of them in a dense block, in which the others follow it.
struct LocalRuns {
  Runs runs;
  int64_t at;
  bool operator==(const LocalRuns&) const = default;
};

/// The part that `rank` of `ranks` owns by `map` of a tensor of shape `global` is a dense block. These are the tensor's elements at
/// positions [local.begin, local.end) of the block's own flat index, in that order. `map` is not flat.
std::vector<LocalRuns> runs_of(const OwnershipMap& map, int rank, int ranks, const Shape& global, const Interval& local);

}  // namespace sheaf
