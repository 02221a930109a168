// Compiled twice, for two instruction sets: namespace SHEAF_BF16_NAMESPACE is amx or dot.
//
// Two packs (bf16_pairs.h) give every operand of a product C[m, n] += A[m, k] B[k, n], A in rows and B in pairs, from rows r
// of bf16 x[r, d]:
//   transpose_words   to[d / 2][r] = the words x[r, d], x[r, d + 1]     pairs of the transpose: B = xᵀ
//   pair_rows         to[r / 2][d] = the words x[r, d], x[r + 1, d]     pairs of x itself:      B = x
// and transpose_words of pair_rows gives the plain transpose xᵀ in rows, an A.
#include "sheaf/kernels/cpu/attention_bf16.h"

#include <cmath>
#include <limits>

#include "sheaf/kernels/cpu/attention_blocks.h"
#include "sheaf/kernels/cpu/row_math.h"
#include "sheaf/kernels/cpu/softcap.h"
#ifdef __AMX_TILE__
#include "sheaf/kernels/cpu/amx_tiles.h"
#else
#include "sheaf/kernels/cpu/dot_blocks.h"
#endif

namespace sheaf::kernels::cpu::SHEAF_BF16_NAMESPACE {
namespace {

constexpr int64_t kB = kQueryBlock;  // queries, and keys, of a block
static_assert(kKeyBlock == kB && kB == 64);  // one bit of a word for each score of a row in a block
using L = Lanes<float>;

/// `rows` rows from `begin` on of one head of a [B, T, H, width] view.
struct Head {
  bf16* data;
  int64_t stride, rows, width;
  Head(const View& v, int64_t b, int64_t h, int64_t begin, int64_t count)
      : data(v.as<bf16>() + b * v.strides[0] + begin * v.strides[1] + h * v.strides[2]), stride(v.strides[1]), rows(count),
        width(v.shape[3]) {}
  bf16* operator[](int64_t t) const { return data + t * stride; }
};

/// to[rows, width] = the rows from `first` on; zeros past the last.
void copy_block(const Head& from, int64_t first, bf16* to, int64_t rows = kB) {
  const int64_t here = std::clamp<int64_t>(from.rows - first, 0, rows);
  for (int64_t r = 0; r < here; ++r) std::memcpy(to + r * from.width, from[first + r], static_cast<size_t>(from.width) * 2);
  std::fill_n(to + here * from.width, (rows - here) * from.width, bf16(0.0f));
}

struct Sizes : DocumentShape {
  using DocumentShape::DocumentShape;
  Head of_queries(const View& v, int64_t b, int64_t h) const { return {v, b, h, first_query, queries}; }
  Head of_keys(const View& v, int64_t b, int64_t g) const { return {v, b, g, first_key, keys}; }
  float* lse_row(const View& lse, int64_t b, int64_t h, int64_t first) const {
    return lse.as<float>() + b * lse.strides[0] + h * lse.strides[1] + first_query + first;
  }
  int64_t block() const { return kB * width; }              ///< elements of a block of queries or keys
  int64_t value_block() const { return kB * value_width; }  ///< of values or results
  int64_t largest_block() const { return std::max(block(), value_block()); }
  /// Key blocks that some query of query block i sees.
  int64_t seen_blocks(int64_t i, bool causal) const {
    const int64_t last = visible(std::min((i + 1) * kB, queries) - 1, causal);
    return (last + kB - 1) / kB;
  }
  /// The blocks before those, which none of its queries sees.
  int64_t unseen_blocks(int64_t i, int64_t window) const { return first_visible(i * kB, window) / kB; }
};

/// The first n of 64 bits.
uint64_t first_bits(int64_t n) { return n <= 0 ? 0 : n >= kB ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

size_t elements(int64_t n, size_t size) { return line_align(static_cast<size_t>(n) * size); }

// ---- forward ----

struct Forward {
  Sizes s;
  const View &q, &k, &v, &out, &lse;
  const bool causal;
  const int64_t window;
  const float scale, cap;
  bf16 *keys, *values, *queries, *p, *staging;
  float *scores, *result;

  static size_t bytes(const Sizes& s) {
    return elements(s.key_blocks() * s.block(), 2) + elements(s.key_blocks() * s.value_block(), 2) +
           elements(s.block(), 2) + elements(s.largest_block(), 2) + elements(kB * kB, 2) + elements(kB * kB, 4) +
           elements(s.value_block(), 4);
  }

  Forward(const Sizes& sizes, const View& q_in, const View& k_in, const View& v_in, const View& out_in, const View& lse_in,
          const AttentionMask& mask, double scale_in, Workspace w)
      : s(sizes), q(q_in), k(k_in), v(v_in), out(out_in), lse(lse_in), causal(mask.causal), window(mask.window),
        scale(static_cast<float>(scale_in)), cap(static_cast<float>(mask.softcap)) {
    Carver carver("attention", w);
    keys = carver.take<bf16>(s.key_blocks() * s.block()), values = carver.take<bf16>(s.key_blocks() * s.value_block());
    queries = carver.take<bf16>(s.block()), staging = carver.take<bf16>(s.largest_block());
    p = carver.take<bf16>(kB * kB), scores = carver.take<float>(kB * kB), result = carver.take<float>(s.value_block());
  }

  /// Loads the keys of a document; run() then processes its queries.
  void load_keys(int64_t b, int64_t g, const Document& document) {
    s.take(document);
    const Head kh = s.of_keys(k, b, g), vh = s.of_keys(v, b, g);
    for (int64_t j = s.unseen_blocks(0, window); j < s.key_blocks(); ++j) {
      copy_block(kh, j * kB, staging);
      transpose_words(staging, kB, s.width / 2, keys + j * s.block());
      copy_block(vh, j * kB, staging);
      pair_rows(staging, kB, s.value_width, values + j * s.value_block());
    }
  }

  /// Softmax of one row's scores (those whose bits in `counts` are set) into `to`, continuing from the earlier blocks. Returns the
  /// factor by which their results must be scaled.
  float softmax_row(float* row, uint64_t counts, bf16* to, float& most, float& total) const {
    const L low(-std::numeric_limits<float>::infinity());
    if (cap != 0) softcap(row, kB, scale, cap);
    const float factor_of_scores = cap != 0 ? 1.0f : scale;
    L x[kB / kLanes];
    L top = low;
    for (int c = 0; c < kB / kLanes; ++c) {
      const auto those = static_cast<__mmask16>(counts >> (c * kLanes));
      x[c].v = _mm512_mask_mul_ps(low.v, those, _mm512_loadu_ps(row + c * kLanes), _mm512_set1_ps(factor_of_scores));
      top = max(x[c], top);
    }
    const float now = std::max(most, max_lane(top));
    const L shift(now == -std::numeric_limits<float>::infinity() ? 0.0f : now);
    L sum_of(0.0f);
    for (int c = 0; c < kB / kLanes; ++c) x[c] = exp(x[c] - shift), sum_of = sum_of + x[c];
    for (int c = 0; c < kB / kLanes; c += 2) _mm512_storeu_si512(to + c * kLanes, to_bf16(x[c].v, x[c + 1].v));
    const float factor = now == most ? 1.0f : std::exp(most - now);
    total = total * factor + sum(sum_of);
    most = now;
    return factor;
  }

  void run(int64_t b, int64_t h, int64_t i) {
    const int64_t first = i * kB, here = std::min(kB, s.queries - first), d = s.width, e = s.value_width;
    const int64_t rows = (here + kProductRows - 1) / kProductRows * kProductRows;  // few, when one token is decoded
    copy_block(s.of_queries(q, b, h), first, queries, rows);
    float most[kB], total[kB];
    std::fill_n(most, kB, -std::numeric_limits<float>::infinity()), std::fill_n(total, kB, 0.0f);
    const int64_t begin = s.unseen_blocks(i, window), blocks = s.seen_blocks(i, causal);
    for (int64_t j = begin; j < blocks; ++j) {
      product<false>(rows, kB, d, queries, d * 2, keys + j * s.block(), kB * 4, scores, kB * 4);
      for (int64_t r = 0; r < rows; ++r) {
        const uint64_t seen = r < here ? first_bits(s.visible(first + r, causal) - j * kB) : 0,
                       hidden = first_bits(s.first_visible(first + r, window) - j * kB);
        const float factor = softmax_row(scores + r * kB, seen & ~hidden, p + r * kB, most[r], total[r]);
        if (j > begin && factor != 1.0f)
          for (int64_t c = 0; c < e; c += kLanes) (L::load(result + r * e + c) * L(factor)).store(result + r * e + c);
      }
      if (j == begin)
        product<false>(rows, e, kB, p, kB * 2, values + j * s.value_block(), e * 4, result, e * 4);
      else
        product<true>(rows, e, kB, p, kB * 2, values + j * s.value_block(), e * 4, result, e * 4);
    }
    const Head to = s.of_queries(out, b, h);
    float* lse_row = s.lse_row(lse, b, h, first);
    for (int64_t r = 0; r < here; ++r) {
      const L inverse(total[r] > 0 ? 1.0f / total[r] : 0.0f);
      for (int64_t c = 0; c < e; c += kLanes)
        store_lanes(to[first + r] + c, blocks == begin ? L(0.0f) : L::load(result + r * e + c) * inverse);
      lse_row[r] = total[r] > 0 ? most[r] + std::log(total[r]) : -std::numeric_limits<float>::infinity();
    }
  }
};

// ---- backward ----

/// Computes transposed scores, [key][query]: so the probabilities are already the A of dv = Pᵀ dout and dk = dSᵀ q, and the lse and
/// delta of a row's queries are adjacent.
struct Backward {
  Sizes s;
  const View &q, &k, &v, &out, &lse, &dout, &dq, &dk, &dv;
  const bool causal;
  const int64_t window;
  const float scale, cap;
  bf16 *k_rows, *v_rows, *k_columns, *rows, *q_words, *q_pairs, *g_words, *g_pairs, *p, *ds, *ds_pairs;
  float *dk_sum, *dv_sum, *scores, *dp, *dq_columns, *lse_of, *delta;

  static size_t bytes(const Sizes& s) {
    const int64_t keys = s.key_blocks() * s.block(), values = s.key_blocks() * s.value_block();
    return 2 * elements(keys, 2) + elements(values, 2) + elements(keys, 4) + elements(values, 4) +
           elements(s.largest_block(), 2) + 2 * elements(s.block(), 2) + 2 * elements(s.value_block(), 2) +
           3 * elements(kB * kB, 2) + 2 * elements(kB * kB, 4) + elements(s.block(), 4) + 2 * elements(kB, 4);
  }

  Backward(const Sizes& sizes, const View& q_in, const View& k_in, const View& v_in, const View& out_in, const View& lse_in,
           const View& dout_in, const View& dq_in, const View& dk_in, const View& dv_in, const AttentionMask& mask,
           double scale_in, Workspace w)
      : s(sizes), q(q_in), k(k_in), v(v_in), out(out_in), lse(lse_in), dout(dout_in), dq(dq_in), dk(dk_in), dv(dv_in),
        causal(mask.causal), window(std::min(mask.window, sizes.keys)), scale(static_cast<float>(scale_in)),
        cap(static_cast<float>(mask.softcap)) {
    Carver carver("attention_backward", w);
    const int64_t keys = s.key_blocks() * s.block(), values = s.key_blocks() * s.value_block();
    k_rows = carver.take<bf16>(keys), v_rows = carver.take<bf16>(values), k_columns = carver.take<bf16>(keys);
    dk_sum = carver.take<float>(keys), dv_sum = carver.take<float>(values);
    rows = carver.take<bf16>(s.largest_block());
    for (bf16** to : {&q_words, &q_pairs}) *to = carver.take<bf16>(s.block());
    for (bf16** to : {&g_words, &g_pairs}) *to = carver.take<bf16>(s.value_block());
    for (bf16** to : {&p, &ds, &ds_pairs}) *to = carver.take<bf16>(kB * kB);
    scores = carver.take<float>(kB * kB), dp = carver.take<float>(kB * kB);
    dq_columns = carver.take<float>(s.block());
    lse_of = carver.take<float>(kB), delta = carver.take<float>(kB);
  }

  void run(int64_t b, int64_t g, const Document& document) {
    s.take(document);
    const Head kh = s.of_keys(k, b, g), vh = s.of_keys(v, b, g);
    for (int64_t j = 0; j < s.key_blocks(); ++j) {
      bf16* at = k_rows + j * s.block();
      copy_block(kh, j * kB, at);
      pair_rows(at, kB, s.width, rows);
      transpose_words(rows, kB / 2, s.width, k_columns + j * s.block());
      copy_block(vh, j * kB, v_rows + j * s.value_block());
    }
    std::fill_n(dk_sum, s.key_blocks() * s.block(), 0.0f), std::fill_n(dv_sum, s.key_blocks() * s.value_block(), 0.0f);
    for (int64_t h = g * s.group(); h < (g + 1) * s.group(); ++h)
      for (int64_t i = 0; i < s.query_blocks(); ++i) query_block(b, h, i);
    store(dk_sum, scale, s.of_keys(dk, b, g)), store(dv_sum, 1.0f, s.of_keys(dv, b, g));
  }

  static void store(const float* from, float factor, const Head& to) {
    for (int64_t r = 0; r < to.rows; ++r)
      for (int64_t c = 0; c < to.width; c += kLanes)
        store_lanes(to[r] + c, L::load(from + r * to.width + c) * L(factor));
  }

  void query_block(int64_t b, int64_t h, int64_t i) {
    const int64_t first = i * kB, here = std::min(kB, s.queries - first), d = s.width, e = s.value_width;
    const Head oh = s.of_queries(out, b, h), gh = s.of_queries(dout, b, h), to = s.of_queries(dq, b, h);
    copy_block(s.of_queries(q, b, h), first, rows);
    transpose_words(rows, kB, d / 2, q_words), pair_rows(rows, kB, d, q_pairs);
    copy_block(gh, first, rows);
    transpose_words(rows, kB, e / 2, g_words), pair_rows(rows, kB, e, g_pairs);
    const float* lse_row = s.lse_row(lse, b, h, first);
    for (int64_t r = 0; r < kB; ++r) {
      // Rows past the end, and queries that see nothing, have probability 0 everywhere.
      const bool sees = r < here && lse_row[r] > -std::numeric_limits<float>::infinity();
      lse_of[r] = sees ? lse_row[r] : std::numeric_limits<float>::infinity();
      delta[r] = 0.0f;
      if (sees) {
        L dot(0.0f);
        for (int64_t c = 0; c < e; c += kLanes) dot = fma(load_lanes(oh[first + r] + c), load_lanes(rows + r * e + c), dot);
        delta[r] = sum(dot);
      }
    }
    const int64_t begin = s.unseen_blocks(i, window), blocks = s.seen_blocks(i, causal);
    if (blocks == begin) std::fill_n(dq_columns, s.block(), 0.0f);
    for (int64_t j = begin; j < blocks; ++j) {
      product<false>(kB, kB, d, k_rows + j * s.block(), d * 2, q_words, kB * 4, scores, kB * 4);
      product<false>(kB, kB, e, v_rows + j * s.value_block(), e * 2, g_words, kB * 4, dp, kB * 4);
      cap != 0 ? probabilities<true>(first, j * kB) : probabilities<false>(first, j * kB);
      product<true>(kB, e, kB, p, kB * 2, g_pairs, e * 4, dv_sum + j * s.value_block(), e * 4);
      product<true>(kB, d, kB, ds, kB * 2, q_pairs, d * 4, dk_sum + j * s.block(), d * 4);
      if (j == begin)
        product<false>(d, kB, kB, k_columns + j * s.block(), kB * 2, ds_pairs, kB * 4, dq_columns, kB * 4);
      else
        product<true>(d, kB, kB, k_columns + j * s.block(), kB * 2, ds_pairs, kB * 4, dq_columns, kB * 4);
    }
    for (int64_t r = 0; r < here; r += 16)
      for (int64_t c = 0; c < d; c += 16) {
        float tile[16 * 16];
        transpose_16x16(dq_columns + c * kB + r, kB, tile, 16);
        for (int64_t n = 0; n < std::min<int64_t>(16, here - r); ++n)
          store_lanes(to[first + r + n] + c, L::load(tile + n * 16) * L(scale));
      }
  }

  /// scores and dp, [key][query] -> p = exp(scale scores - lse), ds = p (dp - delta), and ds in pairs of keys. With a cap, ds is the
  /// gradient of the scores before it.
  template <bool kCapped>
  void probabilities(int64_t first_query, int64_t first_key) {
    if (kCapped) softcap(scores, kB * kB, scale, cap);
    const bool whole = first_key + kB <= s.keys && first_key + kB <= s.visible(first_query, causal) &&
                       first_key >= s.first_visible(first_query + kB - 1, window);
    const L factor(kCapped ? 1.0f : scale), inverse_cap(kCapped ? 1.0f / cap : 0.0f);
    for (int64_t r = 0; r < kB; r += 2)
      for (int64_t c = 0; c < kB; c += 32) {
        __m512i ds_row[2];
        for (int64_t n = 0; n < 2; ++n) {
          L prob[2], grad[2];
          for (int64_t m = 0; m < 2; ++m) {
            const int64_t at = c + m * kLanes, cell = (r + n) * kB + at;
            const L score = L::load(scores + cell);
            L e = exp(score * factor - L::load(lse_of + at));
            if (!whole) e.v = _mm512_maskz_mov_ps(seen(first_query + at, first_key + r + n), e.v);
            prob[m] = e, grad[m] = e * (L::load(dp + cell) - L::load(delta + at));
            if constexpr (kCapped) grad[m] = grad[m] * softcap_slope(score, inverse_cap);
          }
          _mm512_storeu_si512(p + (r + n) * kB + c, to_bf16(prob[0].v, prob[1].v));
          ds_row[n] = to_bf16(grad[0].v, grad[1].v);
          _mm512_storeu_si512(ds + (r + n) * kB + c, ds_row[n]);
        }
        interleave(ds_row[0], ds_row[1], reinterpret_cast<int32_t*>(ds_pairs) + r / 2 * kB + c);
      }
  }

  /// Which of sixteen queries see a key.
  __mmask16 seen(int64_t first_query, int64_t key) const {
    if (key >= s.keys) return 0;
    if (!causal) return 0xffff;
    // The first query that sees a key is the one at its position; with a window, the last one is window - 1 later.
    const int64_t itself = key - (s.keys - s.queries) - first_query, unseen = std::clamp<int64_t>(itself, 0, 16);
    const auto from = static_cast<__mmask16>(0xffffu << unseen);
    return window ? static_cast<__mmask16>(from & first_bits(itself + window)) : from;
  }
};

}  // namespace

size_t attention_workspace(const View& q, const View& k, const View& v) {
  const Sizes s(q, k, v);
  return Forward::bytes(s) * static_cast<size_t>(s.forward_slots());
}

void attention(const View& q, const View& k, const View& v, const AttentionMask& mask, double scale, const View& out,
               const View& lse, Workspace workspace) {
  const Sizes s(q, k, v);
  const Documents documents(mask, s);
  const size_t each = Forward::bytes(s);
  parallel_slots(s.forward_items(), s.forward_slots(), [&](int64_t slot, int64_t begin, int64_t end) {
    [[maybe_unused]] const Scope scope;
    Forward head(s, q, k, v, out, lse, mask, scale,
                 {static_cast<char*>(workspace.data) + static_cast<size_t>(slot) * each, each});
    run_forward_items(s, documents, begin, end, head);
  });
}

size_t attention_backward_workspace(const View& q, const View& k, const View& v) {
  const Sizes s(q, k, v);
  return Backward::bytes(s) * static_cast<size_t>(s.backward_slots());
}

void attention_backward(const View& q, const View& k, const View& v, const View& out, const View& lse, const View& dout,
                        const AttentionMask& mask, double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace) {
  const Sizes s(q, k, v);
  const Documents documents(mask, s);
  const size_t each = Backward::bytes(s);
  parallel_slots(s.backward_items(), s.backward_slots(), [&](int64_t slot, int64_t begin, int64_t end) {
    [[maybe_unused]] const Scope scope;
    Backward head(s, q, k, v, out, lse, dout, dq, dk, dv, mask, scale,
                  {static_cast<char*>(workspace.data) + static_cast<size_t>(slot) * each, each});
    for (int64_t item = begin; item < end; ++item)
      documents.for_each(item / s.key_heads, [&](const Document& d) { head.run(item / s.key_heads, item % s.key_heads, d); });
  });
}

}  // namespace sheaf::kernels::cpu::SHEAF_BF16_NAMESPACE
