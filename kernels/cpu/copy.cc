#include "sheaf/kernels/copy.h"

#include <cstring>

#include "sheaf/kernels/cpu/blocks.h"

namespace sheaf::kernels::cpu {
namespace {

/// A copy between equal types, its dimensions in dst's memory order, merged where both sides allow it.
struct Plan {
  Shape shape, src, dst;
};

Plan make_plan(const View& src, const View& dst) {
  int order[kMaxDims], n = 0;
  for (int i = 0; i < dst.rank(); ++i)
    if (dst.shape[i] != 1) order[n++] = i;
  std::stable_sort(order, order + n, [&](int a, int b) { return dst.strides[a] > dst.strides[b]; });
  Plan plan;
  for (int k = 0; k < n; ++k) {
    const int64_t size = dst.shape[order[k]], from = src.strides[order[k]],
                  to = dst.strides[order[k]];
    const int last = plan.shape.rank() - 1;
    if (k > 0 && plan.src[last] == from * size && plan.dst[last] == to * size) {
      plan.shape[last] *= size, plan.src[last] = from, plan.dst[last] = to;
    } else {
      plan.shape.push_back(size), plan.src.push_back(from), plan.dst.push_back(to);
    }
  }
  if (plan.shape.empty()) plan.shape.push_back(1), plan.src.push_back(1), plan.dst.push_back(1);
  return plan;
}

/// Calls f(src offset, dst offset) for the positions [begin, end) of the dimensions before `inner`.
template <class F>
void for_outer(const Plan& plan, int inner, int64_t begin, int64_t end, F&& f) {
  for (int64_t k = begin; k < end; ++k) {
    int64_t rest = k, from = 0, to = 0;
    for (int i = inner - 1; i >= 0; --i) {
      const int64_t at = rest % plan.shape[i];
      rest /= plan.shape[i], from += at * plan.src[i], to += at * plan.dst[i];
    }
    f(from, to);
  }
}

template <class T>
void copy_run(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t n) {
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
  } else if (to_stride == 1 && from_stride == 0) {
    std::fill_n(to, n, *from);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i * to_stride] = from[i * from_stride];
  }
}

template <class T>
void copy_bits(const View& src, const View& dst) {
  Plan plan = make_plan(src, dst);
  const T* from = src.as<T>();
  T* to = dst.as<T>();
  int last = plan.shape.rank() - 1;
  if (last == 0 && plan.src[0] == 1 && plan.dst[0] == 1) {
    return parallel_for(plan.shape[0], kGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(T));
    });
  }
  // A transpose: src runs densely along an outer dimension. Tiles of the two dimensions keep both sides within the
  // cache.
  int dense = -1;
  for (int i = 0; i < last; ++i)
    if (plan.src[i] == 1 && plan.shape[i] >= 8) dense = i;
  if (dense >= 0 && plan.src[last] > 1 && plan.shape[last] >= 8) {
    for (Shape* s : {&plan.shape, &plan.src, &plan.dst}) {
      const int64_t v = (*s)[dense];
      s->erase(dense);
      s->insert(last - 1, v);
    }
    constexpr int64_t kTile = 32;
    const int64_t rows = plan.shape[last - 1], cols = plan.shape[last];
    const int64_t row_tiles = (rows + kTile - 1) / kTile,
                  tiles = row_tiles * ((cols + kTile - 1) / kTile);
    const int64_t outer = plan.shape.numel() / (rows * cols);
    return parallel_for(outer * tiles, kGrain / (kTile * kTile), [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        for_outer(plan, last - 1, k / tiles, k / tiles + 1, [&](int64_t a, int64_t b) {
          const int64_t tile = k % tiles, r0 = tile % row_tiles * kTile,
                        c0 = tile / row_tiles * kTile;
          const int64_t r1 = std::min(r0 + kTile, rows), c1 = std::min(c0 + kTile, cols);
          const int64_t row = plan.dst[last - 1], col = plan.dst[last], step = plan.src[last];
          for (int64_t r = r0; r < r1; ++r)
            copy_run(to + b + r * row + c0 * col, col, from + a + r + c0 * step, step, c1 - c0);
        });
      }
    });
  }
  const int64_t n = plan.shape[last];
  parallel_for(plan.shape.numel() / n, std::max<int64_t>(1, kGrain / n),
               [&](int64_t begin, int64_t end) {
                 for_outer(plan, last, begin, end, [&](int64_t a, int64_t b) {
                   copy_run(to + b, plan.dst[last], from + a, plan.src[last], n);
                 });
               });
}

}  // namespace

void copy(const View& src, const View& dst) {
  check_shapes("copy", dst, src);
  if (dst.numel() == 0) return;
  if (src.dtype != dst.dtype) {
    return visit_compute(compute_type(src.dtype), [&]<class C>() {
      parallel_for(dst.numel(), kGrain, [&](int64_t begin, int64_t end) {
        // If dst has the compute type, blocks are read directly into it, else they are written directly from src.
        if (dst.dtype == dtype_of<C>) {
          Cursor from(src, begin);
          BlockOutput<C> to(dst, begin);
          for (int64_t i = begin, n; i < end; i += n)
            n = to.limit(std::min(kBlock, end - i)), from.read(n, to.next(n)), to.done(n);
        } else {
          BlockInput<C> from(src, begin);
          Cursor to(dst, begin);
          for (int64_t i = begin, n; i < end; i += n)
            n = from.limit(std::min(kBlock, end - i)), to.write(n, from.next(n));
        }
      });
    });
  }
  visit_bits(dst.dtype, [&]<class T>() { copy_bits<T>(src, dst); });
}

void fill(const View& dst, double value) {
  const View source{&value, kF64, dst.shape, Shape::filled(dst.rank(), 0)};
  if (dst.dtype != kF64) {
    // One converted element, then a broadcast of its bits.
    uint64_t bits = 0;
    store_run(dst.dtype, &bits, 1, 1, &value);
    return copy(View{&bits, dst.dtype, dst.shape, Shape::filled(dst.rank(), 0)}, dst);
  }
  copy(source, dst);
}

void add_into(const View& dst, const View& src) {
  check_shapes("add_into", dst, src);
  visit_compute(compute_type(dst.dtype, src.dtype), [&]<class C>() {
    map_blocks<C>(
        dst,
        [](C* to, const C* a, const C* b, int64_t n) {
#pragma GCC ivdep
          for (int64_t i = 0; i < n; ++i) to[i] = a[i] + b[i];
        },
        dst, src);
  });
}

void arange(double start, double step, const View& dst) {
  check<ShapeError>(dst.rank() == 1, "[arange] the output has shape ", dst.shape,
                    ", not one dimension");
  auto run = [&]<class C>() {
    const C first = static_cast<C>(start), by = static_cast<C>(step);
    parallel_for(dst.numel(), kGrain, [&](int64_t begin, int64_t end) {
      C buffer[kBlock];
      Cursor cursor(dst, begin);
      for (int64_t i = begin; i < end;) {
        const int64_t n = std::min(kBlock, end - i);
        for (int64_t k = 0; k < n; ++k) buffer[k] = first + static_cast<C>(i + k) * by;
        cursor.write(n, buffer), i += n;
      }
    });
  };
  is_floating(dst.dtype) ? run.operator()<double>() : run.operator()<int64_t>();
}

}  // namespace sheaf::kernels::cpu
