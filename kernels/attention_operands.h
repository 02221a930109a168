// Attention's operands: the requirements of the kernels of all devices on them, and their packed layout.
#pragma once

#include "sheaf/core/view.h"
#include "sheaf/kernels/attention.h"

namespace sheaf::kernels {

/// Heads [first, first + count) of `width` elements of a packed x[B, T, ..], as [B, T, count,
/// width].
inline View heads_of(const View& x, int64_t first, int64_t count, int64_t width) {
  View out{x.data,
           x.dtype,
           {x.shape[0], x.shape[1], count, width},
           {x.strides[0], x.strides[1], width, 1}};
  if (x.data) out.data = x.as<char>() + static_cast<size_t>(first * width) * size_of(x.dtype);
  return out;
}

/// Queries, keys and values of a packed projection [B, T, (H + 2 G) D].
struct PackedHeads {
  View q, k, v;
  PackedHeads(const View& qkv, int64_t heads, int64_t key_heads, int64_t width)
      : q(heads_of(qkv, 0, heads, width)),
        k(heads_of(qkv, heads, key_heads, width)),
        v(heads_of(qkv, heads + key_heads, key_heads, width)) {}
};

inline void check_attention_operands(const char* who, const View& q, const View& k, const View& v,
                                     const View& out, const View& lse) {
  const bool shapes = q.rank() == 4 && k.rank() == 4 && v.rank() == 4 && k.shape[0] == q.shape[0] &&
                      k.shape[3] == q.shape[3] &&
                      v.shape == Shape{k.shape[0], k.shape[1], k.shape[2], v.shape[3]} &&
                      out.shape == Shape{q.shape[0], q.shape[1], q.shape[2], v.shape[3]} &&
                      (k.shape[2] > 0 ? q.shape[2] % k.shape[2] == 0 : q.shape[2] == 0) &&
                      lse.shape == Shape{q.shape[0], q.shape[2], q.shape[1]};
  check<ShapeError>(shapes, "[", who, "] queries [B,T,H,D] ", q.shape, ", keys [B,S,G,D] ", k.shape,
                    ", values [B,S,G,E] ", v.shape, ", output [B,T,H,E] ", out.shape,
                    ", lse [B,H,T] ", lse.shape, "; H must be a multiple of G");
  check<DTypeError>(k.dtype == q.dtype && v.dtype == q.dtype && out.dtype == q.dtype &&
                        lse.dtype == (q.dtype == kF64 ? kF64 : kF32),
                    "[", who, "] dtypes ", q.dtype, ", ", k.dtype, ", ", v.dtype, ", lse ",
                    lse.dtype);
  for (const View* x : {&q, &k, &v, &out, &lse})
    check<ShapeError>(x->strides.back() == 1 || x->shape.back() <= 1 || x->numel() == 0, "[", who,
                      "] the last dimension must be dense");
}

inline void check_attention_mask(const char* who, const AttentionMask& mask, const View& q, const View& k) {
  check<ShapeError>(mask.window >= 0 && (mask.causal || mask.window == 0), "[", who, "] a window of ", mask.window, " keys",
                    mask.causal ? "" : ", not causal", "; wants 0 for none, or a causal mask and at least 1");
  check<ShapeError>(mask.softcap >= 0, "[", who, "] a softcap of ", mask.softcap, "; wants 0 for none, or a positive number");
  if (!mask.has_documents()) return;
  const auto check_begins = [&](const View& begins, const View& rows, const char* wants) {
    check<ShapeError>(begins.shape == Shape{rows.shape[0], rows.shape[1]} && (!mask.causal || k.shape[1] >= q.shape[1]), "[", who,
                      "] begins of documents ", begins.shape, " for queries ", q.shape, " and keys ", k.shape, wants);
    check<DTypeError>(begins.dtype == kI32, "[", who, "] begins of documents must be i32, not ", begins.dtype);
    check<ShapeError>(begins.strides.back() == 1 || begins.shape.back() <= 1, "[", who,
                      "] begins of documents must be dense in the last dimension");
  };
  check_begins(mask.begins, q, mask.causal ? "; wants [B,T], no fewer keys than queries" : ", not causal; wants [B,T] of queries");
  if (!mask.causal) check_begins(mask.key_begins, k, ", not causal; wants [B,S] of keys");
}

inline void check_attention(const char* who, const View& q, const View& k, const View& v, const AttentionMask& mask,
                            const View& out, const View& lse) {
  check_attention_operands(who, q, k, v, out, lse);
  check_attention_mask(who, mask, q, k);
}

inline void check_attention_backward(const char* who, const View& q, const View& k, const View& v,
                                     const View& out, const View& lse, const View& dout, const AttentionMask& mask,
                                     const View& dq, const View& dk, const View& dv) {
  check_attention_operands(who, q, k, v, out, lse);
  check_attention_mask(who, mask, q, k);
  check_attention_operands(who, dq, dk, dv, dout, lse);
  check<ShapeError>(dq.shape == q.shape && dk.shape == k.shape && dv.shape == v.shape && dq.dtype == q.dtype, "[", who,
                    "] gradients ", dq.shape, ", ", dk.shape, " and ", dv.shape);
}

}  // namespace sheaf::kernels
