// The gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464): attention whose keys and values are stored in a state of
// fixed size, so that its work and memory grow linearly with the tokens, not quadratically.
//
//   B sequences   T tokens   G key heads   H value heads, a multiple of G   D width of queries and keys   E width of values
//
// Value head h reads key head h / (H / G) and has a state S[D, E]. For each token
//
//   S = exp(decay) S,   S = S + k (beta (v - Sᵀ k))ᵀ,   out = scale Sᵀ q
//
// so a fraction beta of the state's answer to a key is replaced by the key's value. S is zero before the first token of a document.
//
// It is computed in chunks of kDeltaChunk tokens (Yang et al., https://arxiv.org/abs/2406.06484), which begin at a document's first
// token. With γ_i = exp(sum of decays of the chunk's tokens up to i), Λ_ij = γ_i / γ_j, S the state before the chunk, and rows k_i, ..:
//
//   A_ij = beta_i Λ_ij k_i·k_j (j < i)      (1 + A) u = beta (v - γ Sᵀ k)        what each token writes, u_i
//   P_ij = scale Λ_ij q_i·k_j (j <= i)      out_i = scale γ_i Sᵀ q_i + Σ_j P_ij u_j
//   S'   = γ_last S + Σ_j Λ_last,j k_j u_jᵀ
//
// No exponent is positive.
//
// q, k: [B, T, G, D]; v, out: [B, T, H, E], of one floating dtype, any strides but a dense last dimension. decay (<= 0), beta:
// [B, T, H]; states: [B, H, D, E], each dense; all of these f32 (f64 for f64). Products and sums are computed in that type, on a GPU in
// less, see below.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

inline constexpr int64_t kDeltaChunk = 64;

struct DeltaRuleOperands {
  View q, k, v, decay, beta;
  View initial;  ///< the state before the first token, which belongs to that token's document; without a shape: zero
  View begins;   ///< i32[B, T]: the place of the first token of each token's document; without a shape: one document
};

struct DeltaRuleOptions {
  double scale;
  /// Queries and keys are first divided by sqrt(sum of their squares + norm_eps); 0: they are not.
  double norm_eps;
};

/// Gradients of the operands, stored, with the operands' shapes and dtypes. `initial` without a shape is not needed.
struct DeltaRuleGradients {
  View q, k, v, decay, beta, initial;
};

namespace cpu {

/// Stores out, and the state after the last token in `state` if it has a shape. A token's result depends on the tokens of its
/// document up to it, and on its position in the document: neither later tokens nor the number of threads change a bit. A sequence
/// that is read in parts, each from the state that the previous one left, has the bits of the whole if all lengths but the last are
/// multiples of kDeltaChunk. Λ_ij is computed from the sum of the decays between j and i. Throws DataError for invalid begins.
size_t delta_rule_workspace(const DeltaRuleOperands& x, const View& out, const View& state);
void delta_rule(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out, const View& state, Workspace workspace);

/// Gradients of the operands from that of out and, if it has a shape, of the last state. States before chunks are recomputed, in the
/// workspace. Sums over the value heads that read a key head run in their order; threads share (sequence, key head) pairs. Parts as
/// above, from the last one backwards, each with the following part's gradient of `initial` as its dstate, have the bits of the whole.
size_t delta_rule_backward_workspace(const DeltaRuleOperands& x, const View& dout, const View& dstate, const DeltaRuleGradients& d);
void delta_rule_backward(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout, const View& dstate,
                         const DeltaRuleGradients& d, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`, for D and E up to 256; sums in other orders, the same at every run. Λ is computed from
/// differences of sums of decays. With bf16 and f16 operands the factors of products have 16 bits: states and gradients of gates are
/// less accurate than f32 allows. Begins are not checked.
namespace cuda {

size_t delta_rule_workspace(const DeltaRuleOperands& x, const View& out, const View& state);
void delta_rule(const Stream& stream, const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out, const View& state,
                Workspace workspace);
size_t delta_rule_backward_workspace(const DeltaRuleOperands& x, const View& dout, const View& dstate, const DeltaRuleGradients& d);
void delta_rule_backward(const Stream& stream, const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout,
                         const View& dstate, const DeltaRuleGradients& d, Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
