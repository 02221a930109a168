#include "sheaf/kernels/reduce.h"

#include <cmath>
#include <limits>

#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/vector_math.h"

namespace sheaf::kernels::cpu {
namespace {

constexpr int kGroups = 64;
constexpr int kColumns =
    64;  // outputs reduced together if neighbours in memory belong to different outputs

/// The type in which block totals are added.
template <class C>
using Total = std::conditional_t<std::is_same_v<C, int64_t>, int64_t, double>;

struct Add {
  template <class C>
  static C identity() {
    return C(0);
  }
  template <class C>
  C operator()(C a, C b) const {
    return a + b;
  }
};
struct Max {
  template <class C>
  static C identity() {
    return std::is_integral_v<C> ? std::numeric_limits<C>::min()
                                 : -std::numeric_limits<C>::infinity();
  }
  template <class C>
  C operator()(C a, C b) const {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class C>
  static C identity() {
    return std::is_integral_v<C> ? std::numeric_limits<C>::max()
                                 : std::numeric_limits<C>::infinity();
  }
  template <class C>
  C operator()(C a, C b) const {
    return a < b || a != a ? a : b;
  }
};

/// Reduces one block of n <= kBlock contiguous elements, mapped by f.
template <class C, class Op, class F>
C reduce_block(const C* x, int64_t n, Op op, F f) {
  C lane[kLanes];
  std::fill_n(lane, kLanes, Op::template identity<C>());
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] = op(lane[l], f(x[k + l]));
  for (int l = 0; k + l < n; ++l) lane[l] = op(lane[l], f(x[k + l]));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lane[l] = op(lane[l], lane[l + width]);
  return lane[0];
}

/// The input's dimensions, split into those kept (in the output's order) and those reduced.
struct Split {
  Split(const char* who, const View& x, const View& out) {
    check<ShapeError>(x.rank() == out.rank(), "[", who, "] shapes ", x.shape, " and ", out.shape,
                      " differ in rank");
    for (int i = 0; i < x.rank(); ++i) {
      if (x.shape[i] == out.shape[i]) {
        kept.push_back(x.shape[i]), kept_strides.push_back(x.strides[i]);
      } else {
        check<ShapeError>(out.shape[i] == 1, "[", who, "] cannot reduce ", x.shape, " to ",
                          out.shape);
        reduced.push_back(x.shape[i]), reduced_strides.push_back(x.strides[i]);
      }
    }
    count = reduced.numel();
  }
  Shape kept, kept_strides, reduced, reduced_strides;
  int64_t count;
};

/// Blocks [first, last) of one output, whose elements start at `data`: neighbours along the reduced dimensions.
template <class C, class Op, class F>
Total<C> reduce_row(const void* data, DType dtype, const Runs& runs, int64_t count, int64_t first,
                    int64_t last, Op op, F f) {
  C buffer[kBlock];
  Total<C> total = Op::template identity<Total<C>>();
  Cursor cursor(const_cast<void*>(data), dtype, runs, first * kBlock);
  for (int64_t block = first; block < last; ++block) {
    const int64_t n = std::min(kBlock, count - block * kBlock);
    const C* x = buffer;
    if (dtype == dtype_of<C> && cursor.stride() == 1 && cursor.run_left() >= n) {
      x = reinterpret_cast<const C*>(cursor.pointer());
      cursor.advance(n);
    } else {
      cursor.read(n, buffer);
    }
    total = op(total, static_cast<Total<C>>(reduce_block(x, n, op, f)));
  }
  return total;
}

/// The same for `width` outputs adjacent in memory (`step` apart): one pass over the rows, lanes in the cache.
template <class C, class Op>
void reduce_columns(char* data, DType dtype, int64_t step, int width, const Runs& runs,
                    int64_t count, int64_t first, int64_t last, Op op, Total<C>* total) {
  C lane[kLanes][kColumns], row[kColumns];
  Cursor cursor(data, dtype, runs, first * kBlock);
  std::fill_n(total, width, Op::template identity<Total<C>>());
  for (int64_t block = first; block < last; ++block) {
    const int64_t n = std::min(kBlock, count - block * kBlock);
    const int used = static_cast<int>(std::min<int64_t>(n, kLanes));  // the others would add nothing
    for (int64_t k = 0; k < n; ++k) {
      const char* at = cursor.pointer();
      cursor.advance(1);
      const C* x = reinterpret_cast<const C*>(at);
      if (dtype != dtype_of<C> || step != 1) load_run(dtype, at, step, width, row), x = row;
      C* to = lane[k % kLanes];
      if (k < kLanes) {
        std::copy_n(x, width, to);
        continue;
      }
#pragma GCC ivdep
      for (int c = 0; c < width; ++c) to[c] = op(to[c], x[c]);
    }
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int l = 0; l < std::min(half, used - half); ++l)
        for (int c = 0; c < width; ++c) lane[l][c] = op(lane[l][c], lane[l + half][c]);
    for (int c = 0; c < width; ++c) total[c] = op(total[c], static_cast<Total<C>>(lane[0][c]));
  }
}

/// Runs either of the two: finish(index of the first output, totals, how many), neighbours along the last kept dimension. Work items
/// are tiles of outputs; if these are too few for the threads, the groups of one tile are distributed instead.
template <class C, class Op, class F, class Finish>
void reduce(const View& x, const Split& split, bool identity_map, Op op, F f, Finish finish) {
  const int64_t outputs = split.kept.numel();
  const int64_t blocks = (split.count + kBlock - 1) / kBlock;
  const int64_t groups = std::clamp<int64_t>(blocks, 1, kGroups);
  const int64_t inner = split.kept.empty() ? 1 : split.kept.back();
  const Runs runs(split.reduced, split.reduced_strides);
  const bool columns = identity_map && inner >= 8 &&
                       (split.count == 1 || std::abs(split.kept_strides.back()) < std::abs(runs.strides.back()));
  const int64_t per_row = columns ? (inner + kColumns - 1) / kColumns : 1;
  const int64_t tiles = columns ? outputs / inner * per_row : outputs;

  auto run_group = [&](int64_t tile, int64_t group, Total<C>* total) {
    const int64_t first = blocks * group / groups, last = blocks * (group + 1) / groups;
    if (columns) {
      const int64_t begin = tile % per_row * kColumns,
                    width = std::min<int64_t>(kColumns, inner - begin);
      const int64_t base =
          offset_of(split.kept, split.kept_strides, tile / per_row * inner + begin);
      reduce_columns<C>(element(x, base), x.dtype, split.kept_strides.back(),
                        static_cast<int>(width), runs, split.count, first, last, op, total);
    } else {
      const void* data = element(x, offset_of(split.kept, split.kept_strides, tile));
      *total = reduce_row<C>(data, x.dtype, runs, split.count, first, last, op, f);
    }
  };
  auto finish_tile = [&](int64_t tile, Total<C>* total) {
    if (!columns) return finish(tile, total, 1);
    const int64_t begin = tile % per_row * kColumns;
    finish(tile / per_row * inner + begin, total, std::min<int64_t>(kColumns, inner - begin));
  };

  if (groups == 1 || tiles >= 4 * num_threads()) {
    const int64_t work = std::max<int64_t>(1, split.count * (columns ? kColumns : 1));
    parallel_for(tiles, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
      Total<C> total[kColumns], part[kColumns];
      for (int64_t tile = begin; tile < end; ++tile) {
        run_group(tile, 0, total);
        for (int64_t g = 1; g < groups; ++g) {
          run_group(tile, g, part);
          for (int c = 0; c < (columns ? kColumns : 1); ++c) total[c] = op(total[c], part[c]);
        }
        finish_tile(tile, total);
      }
    });
    return;
  }
  Total<C> parts[kGroups][kColumns];
  for (int64_t tile = 0; tile < tiles; ++tile) {
    parallel_for(groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) run_group(tile, g, parts[g]);
    });
    for (int64_t g = 1; g < groups; ++g)
      for (int c = 0; c < (columns ? kColumns : 1); ++c) parts[0][c] = op(parts[0][c], parts[g][c]);
    finish_tile(tile, parts[0]);
  }
}

/// Writes one element of the output, whose kept dimensions are those of the split (the others have
/// size 1).
template <class T>
void put(const View& out, int64_t index, T value) {
  store_run(out.dtype, element(out, offset_of(out, index)), 1, 1, &value);
}

/// The same for n elements, neighbours along the last dimension that has more than one.
template <class T>
void put(const View& out, int64_t index, const T* values, int64_t n) {
  int last = out.rank() - 1;
  while (last >= 0 && out.shape[last] == 1) --last;
  store_run(out.dtype, element(out, offset_of(out, index)), last < 0 ? 1 : out.strides[last], n,
            values);
}

constexpr auto kIdentity = [](auto v) { return v; };

template <class Op>
void extreme(const char* who, const View& x, const View& out) {
  const Split split(who, x, out);
  visit_compute(compute_type(x.dtype), [&]<class C>() {
    reduce<C>(x, split, true, Op(), kIdentity,
              [&](int64_t i, const Total<C>* totals, int64_t n) { put(out, i, totals, n); });
  });
}

void require_floating(const char* who, const View& x) {
  if (!is_floating(x.dtype)) fail<DTypeError>("[", who, "] is not defined for ", x.dtype);
}

}  // namespace

void sum(const View& x, const View& out, double scale) {
  const Split split("sum", x, out);
  visit_compute(compute_type(x.dtype), [&]<class C>() {
    if (std::is_same_v<C, int64_t>)
      check<DTypeError>(scale == 1.0, "[sum] integers take no scale: cast to a floating type first");
    reduce<C>(x, split, true, Add(), kIdentity, [&](int64_t i, Total<C>* totals, int64_t n) {
      if constexpr (!std::is_same_v<C, int64_t>)
        for (int64_t c = 0; c < n; ++c) totals[c] *= scale;
      put(out, i, totals, n);
    });
  });
}

void max(const View& x, const View& out) { extreme<Max>("max", x, out); }
void min(const View& x, const View& out) { extreme<Min>("min", x, out); }

void logsumexp(const View& x, const View& out) {
  require_floating("logsumexp", x);
  const Split split("logsumexp", x, out);
  const Runs runs(split.reduced, split.reduced_strides);
  const int64_t blocks = (split.count + kBlock - 1) / kBlock;
  auto run = [&]<class C>() {
    parallel_for(
        split.kept.numel(), std::max<int64_t>(1, kGrain / 8 / std::max<int64_t>(1, split.count)),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const void* row = element(x, offset_of(split.kept, split.kept_strides, i));
            const double top =
                reduce_row<C>(row, x.dtype, runs, split.count, 0, blocks, Max(), kIdentity);
            if (!std::isfinite(top)) {  // empty, all -inf, some +inf, or NaN
              put(out, i, top);
              continue;
            }
            const C shift = static_cast<C>(top);
            const double total = reduce_row<C>(row, x.dtype, runs, split.count, 0, blocks, Add(),
                                               [shift](C v) { return vm::exp(v - shift); });
            put(out, i, top + std::log(total));
          }
        });
  };
  x.dtype == kF64 ? run.operator()<double>() : run.operator()<float>();
}

void var(const View& x, double correction, const View& out) {
  require_floating("var", x);
  const Split split("var", x, out);
  const Runs runs(split.reduced, split.reduced_strides);
  const int64_t blocks = (split.count + kBlock - 1) / kBlock;
  auto run = [&]<class C>() {
    const int64_t grain = std::max<int64_t>(1, kGrain / 4 / std::max<int64_t>(1, split.count));
    parallel_for(split.kept.numel(), grain, [&](int64_t begin, int64_t end) {
      const double n = static_cast<double>(split.count);
      for (int64_t i = begin; i < end; ++i) {
        const void* row = element(x, offset_of(split.kept, split.kept_strides, i));
        auto total = [&](auto f) {
          return reduce_row<C>(row, x.dtype, runs, split.count, 0, blocks, Add(), f);
        };
        // The corrected two-pass algorithm (Chan, Golub, LeVeque 1983): the centre is the mean up
        // to rounding, and the sum of the distances to it tells how far it is off.
        const C centre = static_cast<C>(total(kIdentity) / n);
        const double squares = total([centre](C v) { return (v - centre) * (v - centre); });
        const double off = total([centre](C v) { return v - centre; });
        put(out, i, (squares - off * off / n) / (n - correction));
      }
    });
  };
  x.dtype == kF64 ? run.operator()<double>() : run.operator()<float>();
}

void argmax(const View& x, int dim, const View& out) {
  check<ShapeError>(x.rank() == out.rank() && out.shape[dim] == 1, "[argmax] cannot reduce ",
                    x.shape, " to ", out.shape);
  const int64_t count = x.shape[dim], stride = x.strides[dim];
  check<ShapeError>(count > 0 || out.numel() == 0, "[argmax] dimension ", dim, " of ", x.shape,
                    " has no elements");
  Shape kept = x.shape;
  kept[dim] = 1;
  visit_compute(compute_type(x.dtype), [&]<class C>() {
    parallel_for(
        out.numel(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, count)), [&](int64_t begin, int64_t end) {
          C buffer[kBlock];
          for (int64_t i = begin; i < end; ++i) {
            const int64_t base = offset_of(kept, x.strides, i);
            C best = C(0);
            int64_t where = -1;
            for (int64_t k = 0; k < count; k += kBlock) {
              const int64_t n = std::min(kBlock, count - k);
              load_run(x.dtype, element(x, base + k * stride), stride, n, buffer);
              for (int64_t j = 0; j < n; ++j)
                if (where < 0 || buffer[j] > best || (buffer[j] != buffer[j] && best == best))
                  best = buffer[j], where = k + j;
            }
            put(out, i, where);
          }
        });
  });
}

}  // namespace sheaf::kernels::cpu
