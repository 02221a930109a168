// Attention's inner loops, compiled twice ([Note: two builds of one kernel] in simd.h). Sizes are named in attention.h.
#include <cmath>
#include <limits>

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/cpu/attention_blocks.h"
#include "sheaf/kernels/cpu/head_rows.h"
#include "sheaf/kernels/cpu/row_math.h"
#include "sheaf/kernels/cpu/softcap.h"
#include "sheaf/kernels/cpu/tile_gemm.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

/// Sets those scores of query t with the block of keys from `key` on that precede its window to -inf, whose exponential is 0. Returns
/// the end of the scores that count; 0 if none do.
template <class C>
SHEAF_INLINE int64_t hide(C* scores, const DocumentShape& s, int64_t t, int64_t key, bool causal, int64_t window) {
  const auto in_block = [&](int64_t n) { return std::clamp<int64_t>(n - key, 0, kKeyBlock); };
  const int64_t before = in_block(s.first_visible(t, window)), visible = in_block(s.visible(t, causal));
  if (before >= visible) return 0;
  std::fill_n(scores, before, -std::numeric_limits<C>::infinity());
  return visible;
}

/// Scores of one row become exp(score - most); those past `visible` become zero. Returns their sum.
template <class C>
SHEAF_INLINE C exponentials(C* scores, int64_t visible, C most) {
  const Lanes<C> top(most);
  Lanes<C> total(C(0));
  int64_t i = 0;
  for (; i + kLanes <= visible; i += kLanes) {
    const Lanes<C> e = exp(Lanes<C>::load(scores + i) - top);
    e.store(scores + i);
    total = total + e;
  }
  if (i < visible) {
    exp(Lanes<C>::load(scores + i) - top).store(scores + i);
    std::fill(scores + visible, scores + i + kLanes, C(0));
    total = total + Lanes<C>::load(scores + i);
    i += kLanes;
  }
  for (; i < kKeyBlock; i += kLanes) Lanes<C>(C(0)).store(scores + i);
  return sum(total);
}

template <class T, class C = ComputeType<T>>
class Forward {
 public:
  Forward(const View& q, const View& k, const View& v, const AttentionMask& mask, double scale, const View& out,
          const View& lse, C* scratch)
      : q_(q),
        k_(k),
        v_(v),
        out_(out),
        lse_(lse),
        causal_(mask.causal),
        window_(mask.window),
        softcap_(static_cast<C>(mask.softcap)),
        scale_(static_cast<C>(scale)),
        s_(q, k, v),
        padded_(s_.padded_width()),
        padded_value_(s_.padded_value_width()) {
    keys_ = scratch;
    values_ = keys_ + s_.padded_keys() * padded_;
    query_ = values_ + s_.padded_keys() * padded_value_;
    result_ = query_ + kQueryBlock * padded_;
    scores_ = result_ + kQueryBlock * padded_value_;
    most_ = scores_ + kQueryBlock * kKeyBlock;
    total_ = most_ + kQueryBlock;
  }

  /// Loads the keys of a document; run() then processes its queries.
  void load_keys(int64_t b, int64_t g, const Document& document) {
    s_.take(document);
    const HeadRows<const T> k(k_, b, s_.first_key, g), v(v_, b, s_.first_key, g);
    for (int64_t first = s_.first_block(0, window_); first < s_.keys; first += kKeyBlock) {
      // The queries' memory serves as a buffer before they are loaded.
      static_assert(kKeyBlock <= kQueryBlock);
      pack<T, C>(k, first, s_.keys - first, kKeyBlock, C(1), query_);
      transpose(query_, kKeyBlock, padded_, keys_ + first * padded_);
      pack<T, C>(v, first, s_.keys - first, kKeyBlock, C(1), values_ + first * padded_value_);
    }
  }

  void run(int64_t b, int64_t h, int64_t query_block) {
    const int64_t first = query_block * kQueryBlock,
                  rows = std::min(kQueryBlock, s_.queries - first);
    pack<T, C>(HeadRows<const T>(q_, b, s_.first_query, h), first, rows, rows, scale_, query_);
    std::fill_n(result_, rows * padded_value_, C(0));
    std::fill_n(most_, rows, -std::numeric_limits<C>::infinity());
    std::fill_n(total_, rows, C(0));
    const int64_t seen = s_.visible(first + rows - 1, causal_);
    for (int64_t key = s_.first_block(first, window_); key < seen; key += kKeyBlock) {
      tile_gemm<C>(rows, kKeyBlock, s_.width, query_, padded_, 1, keys_ + key * padded_, kKeyBlock,
                   scores_, kKeyBlock, false);
      for (int64_t r = 0; r < rows; ++r) {
        C* row = scores_ + r * kKeyBlock;
        if (softcap_ != 0) softcap(row, kKeyBlock, C(1), softcap_);
        const int64_t visible = hide(row, s_, first + r, key, causal_, window_);
        if (visible == 0) {
          std::fill_n(row, kKeyBlock, C(0));
          continue;
        }
        const C most = std::max(most_[r], row_max(row, visible));
        const C sum = exponentials(row, visible, most);
        if (most > most_[r]) {
          C correction[kLanes];
          exp(Lanes<C>(most_[r] - most)).store(correction);
          const Lanes<C> factor(correction[0]);
          total_[r] *= correction[0];
          C* result = result_ + r * padded_value_;
          for (int64_t i = 0; i < padded_value_; i += kLanes)
            (Lanes<C>::load(result + i) * factor).store(result + i);
          most_[r] = most;
        }
        total_[r] += sum;
      }
      tile_gemm<C>(rows, padded_value_, kKeyBlock, scores_, kKeyBlock, 1, values_ + key * padded_value_,
                   padded_value_, result_, padded_value_, true);
    }
    const HeadRows<T> out(out_, b, s_.first_query, h);
    C* lse = lse_.as<C>() + b * lse_.strides[0] + h * lse_.strides[1] + s_.first_query + first;
    for (int64_t r = 0; r < rows; ++r) {
      const bool any = s_.visible(first + r, causal_) > 0;
      const Lanes<C> factor(any ? C(1) / total_[r] : C(0)), zero(C(0));
      const C* result = result_ + r * padded_value_;
      T* to = out[first + r];
      // Adding +0 gives every zero one sign: a masked key may or may not have added +0 to an
      // underflowed -0.
      for_lanes(out.width, [&](int64_t i, auto n) {
        store_lanes(to + i, Lanes<C>::load(result + i) * factor + zero, n);
      });
      lse[r] = any ? most_[r] + std::log(total_[r]) : -std::numeric_limits<C>::infinity();
    }
  }

 private:
  const View &q_, &k_, &v_, &out_, &lse_;
  bool causal_;
  int64_t window_;
  C softcap_, scale_;
  DocumentShape s_;
  int64_t padded_, padded_value_;
  C *keys_, *values_, *query_, *result_, *scores_, *most_, *total_;
};

template <class T, class C = ComputeType<T>>
class Backward {
 public:
  Backward(const View& q, const View& k, const View& v, const View& out, const View& lse,
           const View& dout, const AttentionMask& mask, double scale, const View& dq, const View& dk,
           const View& dv, C* scratch)
      : q_(q),
        k_(k),
        v_(v),
        out_(out),
        dout_(dout),
        dq_(dq),
        dk_(dk),
        dv_(dv),
        lse_(lse),
        causal_(mask.causal),
        window_(mask.window),
        softcap_(static_cast<C>(mask.softcap)),
        scale_(static_cast<C>(scale)),
        s_(q, k, v),
        padded_(s_.padded_width()),
        padded_value_(s_.padded_value_width()) {
    const int64_t keys = s_.padded_keys() * padded_, values = s_.padded_keys() * padded_value_;
    keys_ = scratch, keys_t_ = keys_ + keys, values_t_ = keys_t_ + keys,
    dkeys_ = values_t_ + values, dvalues_ = dkeys_ + keys;
    query_ = dvalues_ + values;
    dout_block_ = query_ + kQueryBlock * padded_;
    dquery_ = dout_block_ + kQueryBlock * padded_value_;
    scores_ = dquery_ + kQueryBlock * padded_;
    dscores_ = scores_ + kQueryBlock * kKeyBlock;
    dots_ = dscores_ + kQueryBlock * kKeyBlock;
  }

  void run(int64_t b, int64_t g, const Document& document) {
    s_.take(document);
    const HeadRows<const T> k(k_, b, s_.first_key, g), v(v_, b, s_.first_key, g);
    for (int64_t first = 0; first < s_.keys; first += kKeyBlock) {
      const int64_t at = first * padded_;
      pack<T, C>(k, first, s_.keys - first, kKeyBlock, C(1), keys_ + at);
      transpose(keys_ + at, kKeyBlock, padded_, keys_t_ + at);
      // Their gradient's memory serves as a buffer before it is computed.
      pack<T, C>(v, first, s_.keys - first, kKeyBlock, C(1), dvalues_);
      transpose(dvalues_, kKeyBlock, padded_value_, values_t_ + first * padded_value_);
    }
    std::fill_n(dkeys_, s_.padded_keys() * padded_, C(0));
    std::fill_n(dvalues_, s_.padded_keys() * padded_value_, C(0));
    for (int64_t h = g * s_.group(); h < (g + 1) * s_.group(); ++h)
      for (int64_t first = 0; first < s_.queries; first += kQueryBlock) query_block(b, h, first);
    unpack(dkeys_, C(1), HeadRows<T>(dk_, b, s_.first_key, g), 0, s_.keys);
    unpack(dvalues_, C(1), HeadRows<T>(dv_, b, s_.first_key, g), 0, s_.keys);
  }

 private:
  void query_block(int64_t b, int64_t h, int64_t first) {
    const int64_t rows = std::min(kQueryBlock, s_.queries - first);
    const HeadRows<const T> out(out_, b, s_.first_query, h);
    // Scaled queries give the forward pass's scores, and give dk its factor.
    pack<T, C>(HeadRows<const T>(q_, b, s_.first_query, h), first, rows, rows, scale_, query_);
    pack<T, C>(HeadRows<const T>(dout_, b, s_.first_query, h), first, rows, rows, C(1), dout_block_);
    std::fill_n(dquery_, rows * padded_, C(0));
    for (int64_t r = 0; r < rows; ++r) {
      const T* o = out[first + r];
      const C* d = dout_block_ + r * padded_value_;
      dots_[r] = row_sum<C>(
          out.width, [&](int64_t i, auto n) { return load_lanes(o + i, n) * load_lanes(d + i, n); });
    }
    const C* lse = lse_.as<C>() + b * lse_.strides[0] + h * lse_.strides[1] + s_.first_query + first;
    const int64_t seen = s_.visible(first + rows - 1, causal_);
    for (int64_t key = s_.first_block(first, window_); key < seen; key += kKeyBlock) {
      const int64_t at = key * padded_, value_at = key * padded_value_;
      tile_gemm<C>(rows, kKeyBlock, s_.width, query_, padded_, 1, keys_t_ + at, kKeyBlock, scores_,
                   kKeyBlock, false);
      tile_gemm<C>(rows, kKeyBlock, s_.value_width, dout_block_, padded_value_, 1, values_t_ + value_at,
                   kKeyBlock, dscores_, kKeyBlock, false);
      for (int64_t r = 0; r < rows; ++r) {
        C *p = scores_ + r * kKeyBlock, *dp = dscores_ + r * kKeyBlock;
        C slopes[kKeyBlock];
        if (softcap_ != 0) {
          softcap(p, kKeyBlock, C(1), softcap_);
          for (int64_t i = 0; i < kKeyBlock; ++i) slopes[i] = softcap_slope(p[i], C(1) / softcap_);
        }
        const int64_t visible = hide(p, s_, first + r, key, causal_, window_);
        exponentials(p, visible, lse[r]);
        const Lanes<C> dot(dots_[r]);
        for (int64_t i = 0; i < kKeyBlock; i += kLanes)
          (Lanes<C>::load(p + i) * (Lanes<C>::load(dp + i) - dot)).store(dp + i);
        for (int64_t i = 0; softcap_ != 0 && i < kKeyBlock; ++i) dp[i] *= slopes[i];
      }
      const int64_t count = std::min(kKeyBlock, s_.keys - key);
      tile_gemm<C>(count, padded_value_, rows, scores_, 1, kKeyBlock, dout_block_, padded_value_,
                   dvalues_ + value_at, padded_value_, true);
      tile_gemm<C>(count, padded_, rows, dscores_, 1, kKeyBlock, query_, padded_, dkeys_ + at,
                   padded_, true);
      tile_gemm<C>(rows, padded_, kKeyBlock, dscores_, kKeyBlock, 1, keys_ + at, padded_, dquery_,
                   padded_, true);
    }
    unpack(dquery_, scale_, HeadRows<T>(dq_, b, s_.first_query, h), first, rows);
  }

  const View &q_, &k_, &v_, &out_, &dout_, &dq_, &dk_, &dv_, &lse_;
  bool causal_;
  int64_t window_;
  C softcap_, scale_;
  DocumentShape s_;
  int64_t padded_, padded_value_;
  C *keys_, *keys_t_, *values_t_, *dkeys_, *dvalues_, *query_, *dout_block_, *dquery_, *scores_,
      *dscores_, *dots_;
};

}  // namespace

void attention(const View& q, const View& k, const View& v, const AttentionMask& mask, double scale,
               const View& out, const View& lse, Workspace workspace) {
  visit_floating("attention", q.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const AttentionShape s(q, k, v);
    const Documents documents(mask, s);
    const int64_t cells = static_cast<int64_t>(
        line_align(static_cast<size_t>(s.forward_cells()) * sizeof(C)) / sizeof(C));
    parallel_slots(s.forward_items(), s.forward_slots(),
                   [&](int64_t slot, int64_t begin, int64_t end) {
                     Forward<T> head(q, k, v, mask, scale, out, lse,
                                     static_cast<C*>(workspace.data) + slot * cells);
                     run_forward_items(s, documents, begin, end, head);
                   });
  });
}

void attention_backward(const View& q, const View& k, const View& v, const View& out,
                        const View& lse, const View& dout, const AttentionMask& mask, double scale,
                        const View& dq, const View& dk, const View& dv, Workspace workspace) {
  visit_floating("attention_backward", q.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const AttentionShape s(q, k, v);
    const Documents documents(mask, s);
    const int64_t cells = static_cast<int64_t>(
        line_align(static_cast<size_t>(s.backward_cells()) * sizeof(C)) / sizeof(C));
    parallel_slots(s.backward_items(), s.backward_slots(),
                   [&](int64_t slot, int64_t begin, int64_t end) {
                     Backward<T> head(q, k, v, out, lse, dout, mask, scale, dq, dk, dv,
                                      static_cast<C*>(workspace.data) + slot * cells);
                     for (int64_t item = begin; item < end; ++item)
                       documents.for_each(item / s.key_heads, [&](const Document& d) {
                         head.run(item / s.key_heads, item % s.key_heads, d);
                       });
                   });
  });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
