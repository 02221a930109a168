// Scaled dot-product attention that never builds the T x T matrix (FlashAttention: Dao et al.,
// https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2307.08691).
//
//   B batch, T queries, S keys, H query heads, G key and value heads (H a multiple of G), D width of
// a query's and a key's head, E of a value's, often D
//
// q: [B, T, H, D]; k: [B, S, G, D]; v: [B, S, G, E]; out: [B, T, H, E]; head h reads key head
// h / (H / G). Leading dimensions may have any strides (slices of a packed [B, T, 3C] projection),
// the last is dense. All have one floating dtype; f32, bf16 and f16 compute in f32, except bf16 on machines with
// AMX or AVX512_BF16 when D and E are multiples of 32: there products are of bf16 values, probabilities included,
// summed in f32. lse: [B, H, T], any leading strides, too, f32 (f64 for f64): log of the sum of a row's
// exponentials.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// Which keys a query sees, and how its scores are capped. With `causal`, query t sees keys s <= t + S - T: the last query sees all
/// keys; without it, every query does. With `begins`, i32[B, T], the last dimension dense, sequences are concatenated documents: the
/// query at position p = t + S - T sees keys begins[b, t] <= s <= p, where begins[b, t] is the position of its document's first token
/// among the keys, of which there are at least as many as queries. The first query's document may have begun earlier, at any key up
/// to the query's own; no query sees keys before that document. Every other query either begins a document, at t + S - T, or
/// continues its predecessor's. Without `causal` keys have documents of their own, `key_begins`, i32[B, S], the last dimension dense:
/// each key begins one or continues its predecessor's. A query sees all keys of the document that begins at key begins[b, t]; none, if
/// there are begins[b, t] keys. These do not decrease along t. Blocks of keys begin where documents do, blocks of queries at a
/// document's first query, so a document packed with others has the same bits as alone, and the work depends on its length (except
/// with cuDNN).
///
/// With a window of W keys (sliding-window attention: Child et al., https://arxiv.org/abs/1904.10509; Beltagy et al.,
/// https://arxiv.org/abs/2004.05150) the query at position p sees, of these keys, those with p - W < s: itself and the W - 1 before
/// it; causal only. Blocks of keys that no query of a block sees are not read, so the work depends on the window (except with cuDNN).
/// Blocks begin at the same keys as without a window, at multiples of their size from the document's first key: keys before a query's
/// window change none of its bits, and a window of S keys or more gives the bits of no window.
///
/// With a softcap C > 0, scores s become C tanh(s / C) (Gemma 2, https://arxiv.org/abs/2408.00118).
struct AttentionMask {
  bool causal;
  View begins;  ///< without a shape: one document
  int64_t window;  ///< most keys that a query sees; 0: no window
  double softcap;  ///< 0: none
  View key_begins;    ///< documents without `causal`; at first, queries and keys are those of the same tokens
  AttentionMask(bool is_causal, const View& of_documents = {}, int64_t keys_seen = 0, double cap = 0)  // NOLINT: implicit by design
      : causal(is_causal), begins(of_documents), window(keys_seen), softcap(cap), key_begins(is_causal ? View() : of_documents) {}
  bool has_documents() const { return begins.rank() > 0; }
};

namespace cpu {

/// out = softmax(scale * q kᵀ over the keys that `mask` shows) v. A query that sees no key gives zeros (and lse = -inf). A row of the
/// result depends only on its query and the keys it sees, not on T, B or the number of threads. Throws DataError for invalid begins.
size_t attention_workspace(const View& q, const View& k, const View& v, const AttentionMask& mask,
                           const View& out, const View& lse);
void attention(const View& q, const View& k, const View& v, const AttentionMask& mask, double scale,
               const View& out, const View& lse, Workspace workspace);

/// The gradients of attention's inputs, stored; shapes as q, k, v. Probabilities are recomputed from lse. Sums run over queries in
/// order, for each key head over its query heads in order; threads share (batch, key head) pairs. A key that no query sees has
/// gradients of zero.
size_t attention_backward_workspace(const View& q, const View& k, const View& v, const View& out,
                                    const View& lse, const View& dout, const AttentionMask& mask, const View& dq,
                                    const View& dk, const View& dv);
void attention_backward(const View& q, const View& k, const View& v, const View& out,
                        const View& lse, const View& dout, const AttentionMask& mask, double scale,
                        const View& dq, const View& dk, const View& dv, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`, for D and E up to 256: by cuDNN if it accepts the operands (cudnn_attention.h: causal,
/// bf16 or f16, at least as many keys as queries), else by our own kernels (attention_blocked.h, and attention_decode.h for up to 16
/// queries), which are also used if the workspace is smaller than cuDNN needs. With bf16 and f16 both use tensor cores, with
/// probabilities rounded to the operands' type and sums in f32. All give the same bits at every run. Ours guarantee, as above, that a
/// row depends only on what it sees, whichever of them computes it: a token's row, decoded from a cache, has the bits of one pass
/// over all tokens, unless cuDNN computes that pass. (This holds for finite values: infinities and NaN spread to all queries that see
/// their tile of 64.) With ours, documents and windows also save the work that they hide. With cuDNN the same call gives the same
/// bits, but another B or T may select another of its kernels, and keys before a document are computed and masked. The first call of
/// a shape asks cuDNN for a plan (half a second on the host): it must not be inside a stream capture.
namespace cuda {

size_t attention_workspace(const View& q, const View& k, const View& v, const AttentionMask& mask,
                           const View& out, const View& lse);
void attention(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask,
               double scale, const View& out, const View& lse, Workspace workspace);
size_t attention_backward_workspace(const View& q, const View& k, const View& v, const View& out,
                                    const View& lse, const View& dout, const AttentionMask& mask, const View& dq,
                                    const View& dk, const View& dv);
void attention_backward(const Stream& stream, const View& q, const View& k, const View& v,
                        const View& out, const View& lse, const View& dout, const AttentionMask& mask,
                        double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
