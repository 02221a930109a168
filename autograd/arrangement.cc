#include "sheaf/autograd/arrangement.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace sheaf {
namespace {

int64_t rounded(int64_t bytes) {
  constexpr int64_t kAlign = Arrangement::kAlign;
  return std::max(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
}

// Finds the lifetimes that may overlap a given one without scanning all: they are indexed by intervals of time.
class Stretches {
 public:
  explicit Stretches(std::span<const Lifetime> lifetimes) : lifetimes_(lifetimes), seen_(lifetimes.size(), -1) {
    int32_t last = 0;
    for (const Lifetime& l : lifetimes) last = std::max(last, l.last);
    within_.resize(last / kMoments + 1);
  }
  void add(int32_t i) {
    for (int32_t s = lifetimes_[i].first / kMoments; s <= lifetimes_[i].last / kMoments; ++s) within_[s].push_back(i);
  }
  /// The added lifetimes that overlap lifetime `i`, each once.
  void meeting(int32_t i, std::vector<int32_t>& out) {
    out.clear();
    const Lifetime& own = lifetimes_[i];
    for (int32_t s = own.first / kMoments; s <= own.last / kMoments; ++s)
      for (const int32_t j : within_[s]) {
        const Lifetime& other = lifetimes_[j];
        if (seen_[j] == i || other.last < own.first || own.last < other.first) continue;
        seen_[j] = i;
        out.push_back(j);
      }
  }

 private:
  static constexpr int32_t kMoments = 32;
  std::span<const Lifetime> lifetimes_;
  std::vector<int32_t> seen_;  // by lifetime: the query that last returned it
  std::vector<std::vector<int32_t>> within_;
};

Arrangement place_in_order(std::span<const Lifetime> lifetimes, std::span<const int32_t> order) {
  Arrangement out;
  out.offsets.assign(lifetimes.size(), 0);
  Stretches placed(lifetimes);
  std::vector<int32_t> beside;
  for (const int32_t i : order) {
    const int64_t bytes = rounded(lifetimes[i].bytes);
    placed.meeting(i, beside);
    std::ranges::sort(beside, {}, [&](int32_t j) { return out.offsets[j]; });
    int64_t at = -1, tightest = INT64_MAX, free_from = 0;
    for (const int32_t j : beside) {
      const int64_t gap = out.offsets[j] - free_from;
      if (gap >= bytes && gap < tightest) at = free_from, tightest = gap;
      free_from = std::max(free_from, out.offsets[j] + rounded(lifetimes[j].bytes));
    }
    if (at < 0) at = free_from;
    out.offsets[i] = at;
    out.total = std::max(out.total, at + bytes);
    placed.add(i);
  }
  return out;
}

}  // namespace

Arrangement arrange(std::span<const Lifetime> lifetimes) {
  std::vector<int32_t> order(lifetimes.size());
  std::iota(order.begin(), order.end(), 0);
  std::optional<Arrangement> best;
  const auto place_by = [&](auto key) {
    std::ranges::stable_sort(order, {}, [&](int32_t i) { return key(lifetimes[i]); });
    Arrangement placed = place_in_order(lifetimes, order);
    if (!best || placed.total < best->total) best = std::move(placed);
  };
  place_by([](const Lifetime& l) { return static_cast<int64_t>(l.first); });
  place_by([](const Lifetime& l) { return -rounded(l.bytes); });
  place_by([](const Lifetime& l) { return -static_cast<double>(rounded(l.bytes)) * (l.last - l.first + 1); });
  return *best;
}

int64_t most_alive(std::span<const Lifetime> lifetimes) {
  std::vector<std::pair<int32_t, int64_t>> changes;  // at this moment by this many bytes
  for (const Lifetime& l : lifetimes) {
    changes.emplace_back(l.first, rounded(l.bytes));
    changes.emplace_back(l.last + 1, -rounded(l.bytes));
  }
  std::ranges::sort(changes);  // at equal moments, ends come before beginnings
  int64_t alive = 0, most = 0;
  for (const auto& [moment, bytes] : changes) most = std::max(most, alive += bytes);
  return most;
}

}  // namespace sheaf
