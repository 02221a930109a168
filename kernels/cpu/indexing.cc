#include "sheaf/kernels/indexing.h"

#include <cstring>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/indexing_operands.h"

namespace sheaf::kernels::cpu {
namespace {

void check_indices(const char* who, const View& index, int64_t size) {
  if (is_floating(index.dtype) || index.dtype == kBool || index.dtype == kI8)
    fail<DTypeError>("[", who, "] an index cannot be ", index.dtype);
  parallel_for(index.numel(), kGrain, [&](int64_t begin, int64_t end) {
    int64_t buffer[kBlock];
    Cursor cursor(index, begin);
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t n = std::min(kBlock, end - i);
      cursor.read(n, buffer);
      for (int64_t k = 0; k < n; ++k)
        if (buffer[k] < 0 || buffer[k] >= size) [[unlikely]]
          fail<DataError>("[", who, "] index ", buffer[k], " at position ", i + k,
                          " is out of range for size ", size);
    }
  });
}

int64_t read_index(const View& index, int64_t offset) {
  int64_t value;
  load_run(index.dtype, element(index, offset), 1, 1, &value);
  return value;
}

void add_lines(const View& out, int dim, const View& index, const View& src) {
  const View out_lines = without(out, dim), index_lines = without(index, dim),
             src_lines = without(src, dim);
  const int64_t count = src.shape[dim];
  visit_compute(compute_type(out.dtype, src.dtype), [&]<class C>() {
    // A line belongs to one thread, so its order of additions is fixed.
    parallel_for(out_lines.numel(), std::max<int64_t>(1, kGrain / 16 / std::max<int64_t>(1, count)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t line = begin; line < end; ++line) {
                     const int64_t to = offset_of(out_lines, line),
                                   at = offset_of(index_lines, line),
                                   from = offset_of(src_lines, line);
                     for (int64_t i = 0; i < count; ++i) {
                       const int64_t j = read_index(index, at + i * index.strides[dim]);
                       void* target = element(out, to + j * out.strides[dim]);
                       C sum, term;
                       load_run(out.dtype, target, 1, 1, &sum);
                       load_run(src.dtype, element(src, from + i * src.strides[dim]), 1, 1, &term);
                       sum += term;
                       store_run(out.dtype, target, 1, 1, &sum);
                     }
                   }
                 });
  });
}

}  // namespace

void gather(const View& x, int dim, const View& index, const View& out) {
  check_shapes("gather", out, index);
  check_lines("gather", x, dim, out);
  check<DTypeError>(x.dtype == out.dtype, "[gather] dtypes ", x.dtype, " and ", out.dtype,
                    " differ");
  check_indices("gather", index, x.shape[dim]);
  View lines = x;  // x in out's shape, except for the indexed dimension
  lines.shape = out.shape;
  lines.strides[dim] = 0;
  visit_bits(x.dtype, [&]<class T>() {
    parallel_for(out.numel(), kGrain / 8, [&](int64_t begin, int64_t end) {
      int64_t at[kBlock];
      Cursor indices(index, begin), from(lines, begin), to(out, begin);
      for (int64_t i = begin; i < end;) {
        const int64_t n = std::min({kBlock, end - i, from.run_left(), to.run_left()});
        indices.read(n, at);
        const T* p = reinterpret_cast<const T*>(from.pointer());
        T* q = reinterpret_cast<T*>(to.pointer());
        const int64_t ps = from.stride(), qs = to.stride(), step = x.strides[dim];
        for (int64_t k = 0; k < n; ++k) q[k * qs] = p[k * ps + at[k] * step];
        from.advance(n), to.advance(n), i += n;
      }
    });
  });
}

void take(const View& x, int dim, const View& index, const View& out) {
  check_lines("take", x, dim, out);
  check<DTypeError>(x.dtype == out.dtype, "[take] dtypes ", x.dtype, " and ", out.dtype, " differ");
  check_indices("take", index, x.shape[dim]);
  const View wide = broadcast_index("take", index, dim, out);
  View inner{nullptr, x.dtype, Shape(std::span(x.shape.begin() + dim + 1, x.shape.end())),
             Shape(std::span(x.strides.begin() + dim + 1, x.strides.end()))};
  View out_inner{nullptr, x.dtype, inner.shape,
                 Shape(std::span(out.strides.begin() + dim + 1, out.strides.end()))};
  const int64_t run = inner.numel();
  if (run < 8 || !inner.contiguous() || !out_inner.contiguous()) return gather(x, dim, wide, out);
  // Whole rows: positions are those of the dimensions up to and including dim.
  auto head = [&](View v) {
    while (v.rank() > dim + 1) v.shape.erase(v.rank() - 1), v.strides.erase(v.strides.rank() - 1);
    return v;
  };
  const View out_rows = head(out);
  View x_rows = head(x);
  x_rows.shape = out_rows.shape, x_rows.strides[dim] = 0;
  const View index_rows = head(wide);
  parallel_for(out_rows.numel(), std::max<int64_t>(1, kGrain / run),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   const int64_t j = read_index(index, offset_of(index_rows, row));
                   std::memcpy(element(out, offset_of(out_rows, row)),
                               element(x, offset_of(x_rows, row) + j * x.strides[dim]),
                               static_cast<size_t>(run) * size_of(x.dtype));
                 }
               });
}

void scatter_add(const View& out, int dim, const View& index, const View& src) {
  check_shapes("scatter_add", src, index);
  check_lines("scatter_add", out, dim, src);
  check_indices("scatter_add", index, out.shape[dim]);
  add_lines(out, dim, index, src);
}

void take_add(const View& out, int dim, const View& index, const View& src) {
  check_lines("take_add", out, dim, src);
  check_indices("take_add", index, out.shape[dim]);
  const View wide = broadcast_index("take_add", index, dim, src);
  const int64_t count = src.shape[dim];
  // Dimension 0 of matrices and more: add whole rows, each thread its columns, so the order is that
  // of add_lines.
  if (dim != 0 || out.rank() < 2) return add_lines(out, dim, wide, src);
  const View row = without(out, 0), from = without(src, 0);
  visit_compute(compute_type(out.dtype, src.dtype), [&]<class C>() {
    parallel_for(row.numel(), std::max<int64_t>(64, kGrain / std::max<int64_t>(1, count)),
                 [&](int64_t begin, int64_t end) {
                   C sum[kBlock], term[kBlock];
                   for (int64_t i = 0; i < count; ++i) {
                     const int64_t j = read_index(index, i * index.strides[0]);
                     View to = row, add = from;
                     to.data = element(out, j * out.strides[0]),
                     add.data = element(src, i * src.strides[0]);
                     Cursor reader(to, begin), writer(to, begin), terms(add, begin);
                     for (int64_t k = begin; k < end; k += kBlock) {
                       const int64_t n = std::min(kBlock, end - k);
                       reader.read(n, sum), terms.read(n, term);
                       for (int64_t c = 0; c < n; ++c) sum[c] += term[c];
                       writer.write(n, sum);
                     }
                   }
                 });
  });
}

void cumsum(const View& x, int dim, bool reverse, const View& out) {
  check_shapes("cumsum", out, x);
  const View from = without(x, dim), to = without(out, dim);
  const int64_t count = x.shape[dim];
  auto run = [&]<class C>() {
    parallel_for(to.numel(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, count)),
                 [&](int64_t begin, int64_t end) {
                   C buffer[kBlock];
                   const int64_t sign = reverse ? -1 : 1, first = reverse ? count - 1 : 0;
                   for (int64_t line = begin; line < end; ++line) {
                     const int64_t p = offset_of(from, line), q = offset_of(to, line);
                     C total = C(0);
                     for (int64_t i = 0; i < count; i += kBlock) {
                       const int64_t n = std::min(kBlock, count - i), at = first + sign * i;
                       load_run(x.dtype, element(x, p + at * x.strides[dim]), sign * x.strides[dim],
                                n, buffer);
                       for (int64_t k = 0; k < n; ++k) buffer[k] = total += buffer[k];
                       store_run(out.dtype, element(out, q + at * out.strides[dim]),
                                 sign * out.strides[dim], n, buffer);
                     }
                   }
                 });
  };
  is_floating(x.dtype) ? run.operator()<double>() : run.operator()<int64_t>();
}

void pad(const View& x, const Shape& before, double value, const View& out) {
  View inside = out;
  for (int i = 0; i < x.rank(); ++i) {
    check<ShapeError>(before[i] >= 0 && before[i] + x.shape[i] <= out.shape[i], "[pad] ", x.shape,
                      " at ", before, " does not fit into ", out.shape);
    inside.data = element(inside, before[i] * out.strides[i]);
  }
  inside.shape = x.shape;
  fill(out, value);
  copy(x, inside);
}

void document_begins(const View& tokens, int64_t end_of_text, const View& out) {
  check_document_begins(tokens, out);
  const Indices ids("document_begins", tokens);
  const Rows<int32_t> rows("document_begins", out);
  parallel_for(rows.count(), row_grain(rows.cols()), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      int32_t begin = 0, *const to = rows[r];
      for (int64_t t = 0; t < rows.cols(); ++t) {
        to[t] = begin;
        if (ids[r * rows.cols() + t] == end_of_text) begin = static_cast<int32_t>(t + 1);
      }
    }
  });
}

}  // namespace sheaf::kernels::cpu
