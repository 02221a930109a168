#include "sheaf/core/runs.h"

#include <algorithm>

namespace sheaf {

// The block is `outer` rows, and each holds a rank's intervals of the cut dimension, one after another. An interval of its flat index
// is the end of a row, whole rows, and the beginning of one.
std::vector<LocalRuns> runs_of(const OwnershipMap& map, int rank, int ranks, const Shape& global, const Interval& local) {
  std::vector<Interval> cuts = map.owned_intervals(rank, ranks, global);
  int64_t inner = 1, row = 0;
  for (int d = map.dim() + 1; d < global.rank(); ++d) inner *= global[d];
  for (Interval& c : cuts) {
    c = {c.begin * inner, c.end * inner};
    row += c.size();
  }
  const int64_t stride = global[map.dim()] * inner;
  std::vector<LocalRuns> out;
  const auto add = [&](Runs runs, int64_t at) {
    if (runs.size == stride) runs = {runs.begin, runs.numel()};  // nothing between them is cut away
    if (!out.empty() && runs.is_interval()) {
      auto& [before, before_at] = out.back();
      if (before.is_interval() && before.begin + before.size == runs.begin && before_at + before.size == at) {
        before.size += runs.size;
        return;
      }
    }
    out.push_back({runs, at});
  };
  // Positions [begin, end) of each of `count` rows, from row `first`.
  const auto rows = [&](int64_t first, int64_t count, int64_t begin, int64_t end) {
    int64_t at = 0;
    for (const Interval& c : cuts) {
      const int64_t low = std::clamp(begin, at, at + c.size()), high = std::clamp(end, at, at + c.size());
      if (low < high) add({first * stride + c.begin + low - at, high - low, count, count > 1 ? stride : 0}, first * row + low);
      at += c.size();
    }
  };
  if (row == 0 || local.size() <= 0) return out;
  const int64_t first = local.begin / row, last = (local.end - 1) / row;
  const bool one_run = cuts.size() == 1;
  for (int64_t r = first; r <= last; ++r) {
    const int64_t begin = r == first ? local.begin - r * row : 0, end = r == last ? local.end - r * row : row;
    int64_t whole = 1;  // equal rows, handled together
    if (one_run && begin == 0 && end == row) whole = (local.end - r * row) / row;
    rows(r, whole, begin, end);
    r += whole - 1;
  }
  return out;
}

}  // namespace sheaf
