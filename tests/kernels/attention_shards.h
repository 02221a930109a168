// Attention over a context in parts: queries of an interval [begin, end) of every sequence, and all keys [0, end), or all that there
// are without a causal mask. Each row, and its query's gradient, has the same bits as without parts; the gradients of keys add up to
// those without parts.
#pragma once

#include "sheaf/kernels/attention.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::testing {

/// Rows [begin, end) along dimension `dim`.
inline View rows_of(View v, int dim, int64_t begin, int64_t end) {
  v.data = v.as<char>() + begin * v.strides[dim] * static_cast<int64_t>(size_of(v.dtype));
  v.shape[dim] = end - begin;
  return v;
}

/// Inputs and outputs of attention and its backward pass.
struct AttentionOperands {
  View q, k, v, dout, begins, out, lse, dq, dk, dv;
};

/// An array in the memory of the CPU's kernels; OnGpu is its counterpart for the GPU.
struct OnHost {
  Array array;
  explicit OnHost(const Array& x) : array(x) {}
  operator const View&() const { return array; }
  Array back() const { return array; }
};

struct ContextCase {
  DType dtype;
  int64_t batch, tokens, heads, key_heads, width, value_width;
  /// Sequence b begins with documents of these lengths, starting at the b-th one; none: documents are not kept apart.
  std::vector<int64_t> documents = {};
  int64_t window = 0;
  bool causal = true;

  Shape of(int64_t count, int64_t size) const { return {batch, tokens, count, size}; }
  /// Where the document of each token begins.
  Array begins() const {
    Array out(kI32, {batch, tokens});
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t begin = 0, d = b, end; begin < tokens; begin = end, ++d) {
        end = d < std::ssize(documents) ? std::min(tokens, begin + documents[static_cast<size_t>(d)]) : tokens;
        for (int64_t t = begin; t < end; ++t) out.set(b * tokens + t, static_cast<double>(begin));
      }
    return out;
  }
  /// Whether the query at position p of sequence b sees key s.
  bool sees(const Array& begins, int64_t b, int64_t p, int64_t s) const {
    if (begins.at(b * tokens + p) != begins.at(b * tokens + s)) return false;
    return !causal || (s <= p && (window == 0 || s > p - window));
  }
  /// How many keys the queries up to `end` need.
  int64_t keys(int64_t end) const { return causal ? end : tokens; }
};

/// Calls compute(operands, mask) for the whole context and for the interval between any two neighbours of `borders`, to which 0 and the
/// number of tokens are added.
template <class Place, class Compute>
void expect_parts_are_the_whole(const ContextCase& c, const std::vector<int64_t>& borders, Compute&& compute) {
  const DType d = c.dtype;
  const std::string where =
      str(d, c.of(c.heads, c.width), " values ", c.of(c.key_heads, c.value_width), " window ", c.window,
          c.documents.empty() ? "" : " documents", c.causal ? "" : ", not causal", ", part to ");
  const auto random = [&](int64_t heads, int64_t width, int seed) { return Array::random(d, c.of(heads, width), seed); };
  const Array begins = c.begins(), keys = random(c.key_heads, c.width, 2), values_of = random(c.key_heads, c.value_width, 3);
  const Place q(random(c.heads, c.width, 1)), dout(random(c.heads, c.value_width, 4)), at(begins);
  struct Results {
    Place out, lse, dq;
  };
  const auto blank = [&] {
    return Results{Place(Array(d, c.of(c.heads, c.value_width))),
                   Place(Array(statistics_of(d), {c.batch, c.heads, c.tokens})), Place(Array(d, c.of(c.heads, c.width)))};
  };
  struct Gradients {
    Array dk, dv;
  };
  const auto run = [&](const Results& to, const View& k, const View& v, int64_t begin, int64_t end) {
    const auto gradient = [&](int64_t width) { return Place(Array(d, {c.batch, c.keys(end), c.key_heads, width})); };
    const Place dk = gradient(c.width), dv = gradient(c.value_width);
    const auto part = [&](const View& x) { return rows_of(x, 1, begin, end); };
    const View documents = c.documents.empty() ? View() : part(at);
    kernels::AttentionMask mask(c.causal, documents, c.window);
    if (mask.has_documents() && !c.causal) mask.key_begins = at;
    compute(AttentionOperands{part(q), rows_of(k, 1, 0, c.keys(end)), rows_of(v, 1, 0, c.keys(end)), part(dout), documents,
                              part(to.out), rows_of(to.lse, 2, begin, end), part(to.dq), dk, dv}, mask);
    return Gradients{dk.back(), dv.back()};
  };

  const Results whole = blank(), parts = blank();
  const Gradients want = run(whole, Place(keys), Place(values_of), 0, c.tokens);
  std::vector<double> dk_sum(static_cast<size_t>(keys.view().numel())), dv_sum(static_cast<size_t>(values_of.view().numel()));
  for (size_t n = 1; n < borders.size(); ++n) {
    const int64_t begin = borders[n - 1], end = borders[n];
    // The rows before the documents of a part, and behind them, are not touched.
    const auto hidden = [&](Array x) {
      x = x.clone();
      const int64_t row = x.view().strides[1];
      for (int64_t b = 0; begin < end && !c.documents.empty() && b < c.batch; ++b)
        for (int64_t s = 0; s < c.tokens; ++s) {
          const double of_key = begins.at(b * c.tokens + s);
          if (of_key >= begins.at(b * c.tokens + begin) && of_key <= begins.at(b * c.tokens + end - 1)) continue;
          for (int64_t i = 0; i < row; ++i) x.set((b * c.tokens + s) * row + i, NAN);
        }
      return Place(x);
    };
    const Place k = hidden(keys), v = hidden(values_of);
    const Gradients got = run(parts, k, v, begin, end);
    for (const auto& [gradient, sum] : {std::pair{&got.dk, &dk_sum}, {&got.dv, &dv_sum}}) {
      const int64_t row = gradient->view().strides[1];
      for (int64_t b = 0; b < c.batch; ++b)
        for (int64_t s = 0; s < c.keys(end); ++s) {
          bool seen = false;
          for (int64_t p = begin; p < end; ++p) seen = seen || c.sees(begins, b, p, s);
          for (int64_t i = 0; i < row; ++i) {
            const double x = gradient->at((b * c.keys(end) + s) * row + i);
            (*sum)[static_cast<size_t>((b * c.tokens + s) * row + i)] += x;
            if (!seen) {
              ASSERT_EQ(x, 0.0) << where << end << " key " << s;
            }
          }
        }
    }
    for (const auto& [a, b, dim] : {std::tuple{&parts.out, &whole.out, 1}, {&parts.lse, &whole.lse, 2}, {&parts.dq, &whole.dq, 1}})
      EXPECT_TRUE(same_bits(rows_of(a->back(), dim, begin, end), rows_of(b->back(), dim, begin, end))) << where << end;
  }
  // Queries of one part do not write to the others.
  EXPECT_TRUE(same_bits(parts.out.back(), whole.out.back()) && same_bits(parts.lse.back(), whole.lse.back()) &&
              same_bits(parts.dq.back(), whole.dq.back())) << where << "all";
  const double bound = d == kF64 ? 1e-12 : 16 * epsilon(d);
  EXPECT_LT(scaled_error(want.dk, dk_sum), bound) << where << "all";
  EXPECT_LT(scaled_error(want.dv, dv_sum), bound) << where << "all";
}

}  // namespace sheaf::testing
