#include "sheaf/kernels/experts.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "sheaf/kernels/cpu/row_math.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

/// f(weights, in the rows' compute type) for the storage type of rows and `other`.
template <class F>
void visit_rows(const char* who, const View& rows, const View& other, const View& weights, F&& f) {
  check<DTypeError>(rows.dtype == other.dtype, "[", who, "] dtypes ", rows.dtype, " and ",
                    other.dtype);
  visit_floating(who, rows.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    check<DTypeError>(weights.rank() == 0 || weights.dtype == dtype_of<C>, "[", who, "] weights of ",
                      weights.dtype, " for rows of ", rows.dtype);
    f.template operator()<T, C>(Elements<C>(who, weights));
  });
}

}  // namespace

void top_k(const View& x, const View& out) {
  const int64_t k = out.shape.back(), n = x.shape.back();
  check<ShapeError>(k <= n && x.contiguous() && out.contiguous() && out.dtype == kI64,
                    "[top_k] the ", k, " largest of ", x.shape);
  if (out.numel() == 0) return;
  visit_floating("top_k", x.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    // Whether (a, i) comes before (b, j).
    const auto before = [](C a, int64_t i, C b, int64_t j) {
      const bool a_nan = a != a, b_nan = b != b;
      if (a_nan != b_nan) return a_nan;
      return a_nan || a == b ? i < j : a > b;
    };
    constexpr int64_t kMostPasses = 16;  // a pass over the row for each of a few choices, as a router's
    parallel_for(out.numel() / k, row_grain(n * std::min(k, kMostPasses)), [&](int64_t begin, int64_t end) {
      std::vector<int64_t> order(static_cast<size_t>(k > kMostPasses ? n : 0));
      for (int64_t row = begin; row < end; ++row) {
        const T* values = x.as<T>() + row * n;
        int64_t* to = out.as<int64_t>() + row * k;
        if (k > kMostPasses) {
          std::iota(order.begin(), order.end(), 0);
          std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t i, int64_t j) {
            return before(static_cast<C>(values[i]), i, static_cast<C>(values[j]), j);
          });
          std::copy_n(order.begin(), k, to);
          continue;
        }
        int64_t last = -1;
        for (int64_t c = 0; c < k; ++c) {
          int64_t best = -1;
          for (int64_t i = 0; i < n; ++i) {
            const C value = static_cast<C>(values[i]);
            if (last >= 0 && !before(static_cast<C>(values[last]), last, value, i)) continue;
            if (best < 0 || before(value, i, static_cast<C>(values[best]), best)) best = i;
          }
          to[c] = last = best;
        }
      }
    });
  });
}

void route(const View& choices, int64_t places, const View& slots, const View& sources, const View& counts) {
  const Routing r = Routing::of(slots, sources, 0);
  const ExpertParts p{counts.shape[0], r.parts};
  const auto* choice = choices.as<int64_t>();
  const int64_t all = r.sequences * r.tokens * r.choices;
  for (int64_t i = 0; i < all; ++i)
    if (choice[i] < 0 || choice[i] >= p.experts) [[unlikely]]
      fail<DataError>("[route] choice ", choice[i], " at position ", i, " is none of ", p.experts,
                      " experts");
  std::fill_n(sources.as<int32_t>(), r.rows(), -1);
  const int64_t groups = r.sequences * r.groups;
  parallel_for(groups, row_grain(4 * r.tokens), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> next(static_cast<size_t>(p.experts)), ends(next);  // the rows of each expert in its part
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / r.groups, group = i % r.groups;
      const int64_t first = (sequence * r.tokens + r.first_of(group)) * r.choices,
                    last = (sequence * r.tokens + r.first_of(group + 1)) * r.choices;
      int32_t* const counts_of = counts.as<int32_t>() + i;  // expert e has counts_of[e * groups]
      for (int64_t e = 0; e < p.experts; ++e) counts_of[e * groups] = 0;
      for (int64_t c = first; c < last; ++c) ++counts_of[choice[c] * groups];
      for (int64_t q = 0; q < r.parts; ++q)
        for (int64_t e = p.first_of(q), row = 0; e < p.first_of(q + 1); ++e) {
          int32_t& count = counts_of[e * groups];
          count = static_cast<int32_t>(std::min({int64_t{count}, places, r.room - row}));
          next[static_cast<size_t>(e)] = row;
          ends[static_cast<size_t>(e)] = row += count;
        }
      for (int64_t c = first; c < last; ++c) {
        const auto e = static_cast<size_t>(choice[c]);
        int32_t& slot = slots.as<int32_t>()[c];
        slot = -1;
        if (next[e] == ends[e]) continue;
        const int64_t part = p.part_of(choice[c]), row = next[e]++;
        slot = static_cast<int32_t>(part * r.room + row);
        sources.as<int32_t>()[r.row(part, sequence, group, row)] = static_cast<int32_t>(c - first);
      }
    }
  });
}

void to_experts(const View& x, const View& weights, const View& slots, const View& sources,
                const View& rows) {
  constexpr const char* kName = "to_experts";
  const Routing r = Routing::of(slots, rows, 1);
  const int64_t cols = x.shape.back();
  const bool weighted = weights.rank() != 0;
  const Elements<int32_t> source_of(kName, sources);
  visit_rows(kName, x, rows, weights, [&]<class T, class C>(const Elements<C>& weight) {
    const Rows<T> tokens(kName, x), out(kName, rows);
    parallel_for(r.rows(), row_grain(cols), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* to = out[row];
        const int64_t source = source_of[row];
        if (source < 0) {
          std::memset(static_cast<void*>(to), 0, static_cast<size_t>(cols) * sizeof(T));
          continue;
        }
        const int64_t choice = r.choice_at(row, source);
        const T* from = tokens[choice / r.choices];
        if (!weighted) {
          std::copy_n(from, cols, to);
          continue;
        }
        const Lanes<C> w(weight[choice]);
        for_lanes(cols, [&](int64_t i, auto n) {
          store_lanes(to + i, w * load_lanes(from + i, n), n);
        });
      }
    });
  });
}

void from_experts(const View& rows, const View& weights, const View& slots, const View& y, int64_t first_part) {
  constexpr const char* kName = "from_experts";
  const Routing r = Routing::of(slots, rows, 1, first_part);
  const int64_t cols = y.shape.back();
  const bool weighted = weights.rank() != 0;
  const Elements<int32_t> slot_of(kName, slots);
  visit_rows(kName, rows, y, weights, [&]<class T, class C>(const Elements<C>& weight) {
    const Rows<T> from(kName, rows), out(kName, y);
    parallel_for(r.sequences * r.tokens, row_grain(cols * r.choices), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        // A pass for each choice: the sums stay in the cache.
        constexpr int64_t kColumns = 512;
        T* to = out[token];
        for (int64_t at = 0; at < cols; at += kColumns) {
          C sums[kColumns] = {};
          const int64_t count = std::min(kColumns, cols - at);
          for (int64_t c = token * r.choices; c < (token + 1) * r.choices; ++c) {
            const int64_t slot = slot_of[c];
            if (!r.has(slot)) continue;
            const T* row = from[r.row_at(c, slot)] + at;
            const Lanes<C> w(weighted ? weight[c] : C(1));
            for_lanes(count, [&](int64_t i, auto n) {
              store_lanes(sums + i, load_lanes(sums + i, n) + w * load_lanes(row + i, n), n);
            });
          }
          for_lanes(count, [&](int64_t i, auto n) { store_lanes(to + at + i, load_lanes(sums + i, n), n); });
        }
      }
    });
  });
}

void choice_dots(const View& rows, const View& y, const View& slots, const View& out, int64_t first_part) {
  constexpr const char* kName = "choice_dots";
  const Routing r = Routing::of(slots, rows, 1, first_part);
  const int64_t cols = y.shape.back();
  const Elements<int32_t> slot_of(kName, slots);
  visit_rows(kName, rows, y, out, [&]<class T, class C>(const Elements<C>&) {
    const Rows<T> from(kName, rows), tokens(kName, y);
    parallel_for(out.numel(), row_grain(cols), [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const int64_t slot = slot_of[c];
        out.as<C>()[c] = C(0);
        if (!r.has(slot)) continue;
        const T *a = from[r.row_at(c, slot)], *b = tokens[c / r.choices];
        out.as<C>()[c] = row_sum<C>(
            cols, [&](int64_t i, auto n) { return load_lanes(a + i, n) * load_lanes(b + i, n); });
      }
    });
  });
}

}  // namespace sheaf::kernels::cpu
