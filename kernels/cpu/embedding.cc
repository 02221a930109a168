#include "sheaf/kernels/embedding.h"

#include <limits>

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

Shape position_of(const View& indices, int64_t index) {
  Shape position = indices.shape;
  for (int i = indices.rank() - 1; i >= 0; --i)
    position[i] = index % indices.shape[i], index /= indices.shape[i];
  return position;
}

[[noreturn]] void bad_token(const char* who, const View& tokens, int64_t index, int64_t token,
                            int64_t vocabulary) {
  fail<DataError>("[", who, "] token ", token, " at position ", position_of(tokens, index),
                  " is outside the vocabulary of ", vocabulary);
}

void check_shapes(const View& tokens, const View& table, const View& rows) {
  Shape expected = tokens.shape;
  expected.push_back(table.rank() == 2 ? table.shape[1] : -1);
  check<ShapeError>(rows.shape == expected, "[embedding] tokens ", tokens.shape, ", table ",
                    table.shape, ", rows ", rows.shape);
}
void check_dtypes(const View& rows, const View& table, bool wide) {
  check<DTypeError>(
      rows.dtype == table.dtype || (wide && is_wide_of(table.dtype, rows.dtype)),
      "[embedding] rows of ", rows.dtype, " and a table of ", table.dtype);
}

/// Adds rows to the table, whose first row is `first_row`, one by one, in row order. Threads share
/// columns, never rows.
template <class From, class T>
void scatter(const Indices& token, int64_t first_row, const Rows<From>& from, const Rows<T>& to,
             bool accumulate) {
  const int64_t count = token.count(), width = to.cols(), steps = (width + kLanes - 1) / kLanes;
  if (!accumulate)
    parallel_for(to.count(), row_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) std::fill_n(to[v], width, T(0));
    });
  parallel_for(steps, row_grain(count * kLanes), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLanes, last = std::min(end * kLanes, width);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t v = token[r] - first_row;
      if (v < 0 || v >= to.count()) continue;
      T* row = to[v] + first;
      const From* g = from[r] + first;
      for_lanes(last - first, [&](int64_t i, auto n) {
        store_lanes(row + i, load_lanes(row + i, n) + load_lanes(g + i, n), n);
      });
    }
  });
}

/// The same for types too narrow to add in: each token's rows, chained in row order, are summed in
/// f32 and rounded once.
template <class T>
void scatter_chained(const Indices& token, int64_t first_row, const Rows<T>& from,
                     const Rows<T>& to, bool accumulate, Workspace workspace) {
  const int64_t vocabulary = to.count(), count = token.count(), width = to.cols();
  check<ShapeError>(count <= std::numeric_limits<int32_t>::max(), "[embedding_backward] ", count, " tokens: at most 2^31 - 1 in bf16 and f16");
  Carver carver("embedding_backward", workspace);
  int32_t* head = carver.take<int32_t>(vocabulary);
  int32_t* next = carver.take<int32_t>(count);
  std::fill_n(head, vocabulary, -1);
  for (int64_t r = count - 1; r >= 0; --r) {
    const int64_t v = token[r] - first_row;
    if (v < 0 || v >= vocabulary) continue;
    next[r] = head[v];
    head[v] = static_cast<int32_t>(r);
  }
  parallel_for(vocabulary, row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      if (accumulate && head[v] < 0) continue;
      for_lanes(width, [&](int64_t i, auto n) {
        Lanes<float> sum = accumulate ? load_lanes(to[v] + i, n) : Lanes<float>(0.0f);
        for (int32_t r = head[v]; r >= 0; r = next[r]) sum = sum + load_lanes(from[r] + i, n);
        store_lanes(to[v] + i, sum, n);
      });
    }
  });
}

}  // namespace

void check_targets(const char* who, const View& targets, int64_t classes, int64_t ignore_index) {
  const Indices at(who, targets);
  for (int64_t i = 0; i < at.count(); ++i) {
    const int64_t target = at[i];
    if ((target < 0 || target >= classes) && target != ignore_index)
      fail<DataError>("[", who, "] target ", target, " at position ", position_of(targets, i),
                      " is none of ", classes, " classes, nor ignore_index, ", ignore_index);
  }
}

void embedding(const View& tokens, const View& table, TablePart part, const View& out) {
  check_shapes(tokens, table, out), check_dtypes(out, table, false);
  const Indices token("embedding", tokens);
  visit_floating("embedding", table.dtype, [&]<class T>() {
    const Rows<T> from("embedding", table), to("embedding", out);
    const int64_t rows = table.shape[0], width = to.cols();
    parallel_for(token.count(), row_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t t = token[r] - part.first;
        if (t >= 0 && t < rows) [[likely]]
          std::copy_n(from[t], width, to[r]);
        else if (token[r] < 0 || token[r] >= part.all)
          bad_token("embedding", tokens, r, token[r], part.all);
        else
          std::fill_n(to[r], width, T(0.0f));
      }
    });
  });
}

size_t embedding_backward_workspace(const View& tokens, const View& dout, const View& dtable) {
  // Wide types add in place. Narrow ones need, for each token, the chain of its rows.
  if (dtable.dtype == kF32 || dtable.dtype == kF64 || dout.shape.back() == 0) return 0;
  return line_align(static_cast<size_t>(dtable.shape[0]) * 4) +
         line_align(static_cast<size_t>(tokens.numel()) * 4);
}

void embedding_backward(const View& tokens, const View& dout, TablePart part, const View& dtable,
                        bool accumulate, Workspace workspace) {
  const char* who = "embedding_backward";
  check_shapes(tokens, dtable, dout), check_dtypes(dout, dtable, true);
  if (dtable.numel() == 0) return;
  const Indices token(who, tokens);
  for (int64_t i = 0; i < token.count(); ++i)
    if (token[i] < 0 || token[i] >= part.all) bad_token(who, tokens, i, token[i], part.all);
  visit_floating(who, dout.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const Rows<T> from(who, dout);
    if (dtable.dtype == dtype_of<C>)
      return scatter(token, part.first, from, Rows<C>(who, dtable), accumulate);
    if constexpr (!std::is_same_v<T, C>)
      scatter_chained<T>(token, part.first, from, Rows<T>(who, dtable), accumulate, workspace);
  });
}

}  // namespace sheaf::kernels::cpu
