#include "sheaf/kernels/embedding.h"

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

[[noreturn]] void bad_token(const char* who, const View& tokens, int64_t index, int64_t token,
                            int64_t vocabulary) {
  Shape position = tokens.shape;
  for (int i = tokens.rank() - 1; i >= 0; --i)
    position[i] = index % tokens.shape[i], index /= tokens.shape[i];
  fail<DataError>("[", who, "] token ", token, " at position ", position,
                  " is outside the vocabulary of ", vocabulary);
}

void check_shapes(const View& tokens, const View& table, const View& rows) {
  Shape expected = tokens.shape;
  expected.push_back(table.rank() == 2 ? table.shape[1] : -1);
  check<ShapeError>(rows.shape == expected, "[embedding] tokens ", tokens.shape, ", table ",
                    table.shape, ", rows ", rows.shape);
  check<DTypeError>(rows.dtype == table.dtype || rows.dtype != kF64, "[embedding] rows of ",
                    rows.dtype, " of a table of ", table.dtype);
}

}  // namespace

void check_tokens(const char* who, const View& tokens, int64_t vocabulary, int64_t ignore_index) {
  visit_index(who, tokens.dtype, [&]<class I>() {
    const Elements<I> at(who, tokens);
    for (int64_t i = 0; i < at.count(); ++i) {
      const int64_t token = static_cast<int64_t>(at[i]);
      if ((token < 0 || token >= vocabulary) && token != ignore_index)
        bad_token(who, tokens, i, token, vocabulary);
    }
  });
}

void embedding(const View& tokens, const View& table, const View& out) {
  check_shapes(tokens, table, out);
  check<DTypeError>(out.dtype == table.dtype, "[embedding] table of ", table.dtype, " into ",
                    out.dtype);
  visit_index("embedding", tokens.dtype, [&]<class I>() {
    visit_floating("embedding", table.dtype, [&]<class T>() {
      const Elements<I> token("embedding", tokens);
      const Rows<T> from("embedding", table), to("embedding", out);
      const int64_t vocabulary = table.shape[0], width = to.cols();
      parallel_for(token.count(), row_grain(width), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const int64_t t = static_cast<int64_t>(token[r]);
          if (t < 0 || t >= vocabulary) bad_token("embedding", tokens, r, t, vocabulary);
          std::copy_n(from[t], width, to[r]);
        }
      });
    });
  });
}

size_t embedding_backward_workspace(const View& tokens, const View& dout, const View& dtable) {
  // Wide types add in place. Narrow ones need, for each token, the list of its rows.
  if (dtable.dtype == kF32 || dtable.dtype == kF64 || dout.numel() == 0) return 0;
  return line_align(static_cast<size_t>(dtable.shape[0]) * 4) +
         line_align(static_cast<size_t>(tokens.numel()) * 4);
}

void embedding_backward(const View& tokens, const View& dout, const View& dtable, bool accumulate,
                        Workspace workspace) {
  check_shapes(tokens, dtable, dout);
  visit_index("embedding_backward", tokens.dtype, [&]<class I>() {
    visit_floating("embedding_backward", dtable.dtype, [&]<class T>() {
      visit_floating("embedding_backward", dout.dtype, [&]<class G>() {
        using C = ComputeType<T>;
        if constexpr (std::is_same_v<C, ComputeType<G>>) {
          const Elements<I> token("embedding_backward", tokens);
          const Rows<G> from("embedding_backward", dout);
          const Rows<T> to("embedding_backward", dtable);
          const int64_t vocabulary = to.count(), count = token.count(), width = to.cols();
          check_tokens("embedding_backward", tokens, vocabulary);
          const int64_t steps = (width + kLanes - 1) / kLanes;
          // Threads share columns, never rows, so that every sum is in row order.
          if constexpr (std::is_same_v<T, C>) {
            if (!accumulate)
              parallel_for(vocabulary, row_grain(width), [&](int64_t begin, int64_t end) {
                for (int64_t v = begin; v < end; ++v) std::fill_n(to[v], width, T(0));
              });
            parallel_for(
                steps, std::max<int64_t>(1, row_grain(count * kLanes)),
                [&](int64_t begin, int64_t end) {
                  const int64_t first = begin * kLanes, last = std::min(end * kLanes, width);
                  for (int64_t r = 0; r < count; ++r) {
                    T* row = to[token[r]];
                    const G* g = from[r];
                    for_lanes(last - first, [&](int64_t i, auto n) {
                      store_lanes(row + first + i,
                                  load_lanes(row + first + i, n) + load_lanes(g + first + i, n), n);
                    });
                  }
                });
          } else {
            Carver carver("embedding_backward", workspace);
            int32_t *head = nullptr, *next = nullptr;
            if (count * width != 0)
              head = carver.take<int32_t>(vocabulary), next = carver.take<int32_t>(count);
            if (head) std::fill_n(head, vocabulary, -1);
            for (int64_t r = count - 1; head && r >= 0; --r)
              next[r] = head[token[r]], head[token[r]] = static_cast<int32_t>(r);
            parallel_for(vocabulary, row_grain(width), [&](int64_t begin, int64_t end) {
              for (int64_t v = begin; v < end; ++v) {
                if (accumulate && (!head || head[v] < 0)) continue;
                for_lanes(width, [&](int64_t i, auto n) {
                  Lanes<C> sum = accumulate ? load_lanes(to[v] + i, n) : Lanes<C>(C(0));
                  for (int32_t r = head ? head[v] : -1; r >= 0; r = next[r])
                    sum = sum + load_lanes(from[r] + i, n);
                  store_lanes(to[v] + i, sum, n);
                });
              }
            });
          }
        } else {
          fail<DTypeError>("[embedding_backward] ", dout.dtype, " into ", dtable.dtype);
        }
      });
    });
  });
}

}  // namespace sheaf::kernels::cpu
