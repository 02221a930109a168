// Derivatives of backwards. Where the backward of an op is one fused op, that op's vjp is one of these formulas, in public ops:
// so gradients can be differentiated as often as one likes, with the placements of the first time.
//
// [Note: second derivatives] A backward b(x, dy) = J(x)ᵀ dy is linear in dy. With u for the gradient of its results, what it is
// differentiated for is <u, b> = <J(x) u, dy>: the gradient of dy is the op's tangent along u, and that of x follows from both.
// Statistics (log-sum-exps, inverse deviations) that the forward left are computed again from x, since they depend on it:
// the third derivative would miss that. All of it is computed in the dtype of statistics, f32 or f64.
#pragma once

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf::ops {

/// x in the dtype of its statistics.
inline Tensor in_statistics_dtype(const Tensor& x) {
  const DType d = statistics_dtype(x.dtype());
  return x.dtype() == d ? x : cast(x, d);
}
/// The gradient of a result, if there is that result, and a gradient; else undefined.
inline Tensor grad_if(bool has_result, const Vjp& c, int result) {
  return has_result && c.has_grad(result) ? c.grad(result) : Tensor();
}
/// The sum of those that are defined; undefined if none is.
Tensor sum_of_defined(std::initializer_list<Tensor> terms);
/// y (dy - sum(dy y)): what softmax's derivative makes of dy, where y is the softmax over the last dimension. It is symmetric, so
/// it makes tangents of tangents, too. One op.
Tensor through_softmax(const Tensor& y, const Tensor& dy);

/// What an attention's backward reads, or the gradients of that: q[B, T, H, D], k[B, S, G, D], v[B, S, G, E], dout[B, T, H, E], sinks[H] if
/// there are any.
struct AttentionBackwardOperands {
  Tensor q, k, v, dout = {}, sinks = {};
};
/// Which keys a query sees: AttentionOptions, with `begins` undefined where there are no documents.
struct VisibleKeys {
  bool causal;
  int64_t window;
  Tensor begins;
  double softcap;  ///< of scores; 0: none
};
/// The gradients of attention's backward, for those `u` of its results dq, dk, dv and what queries give the sinks, [B, H, T], of which
/// some are undefined. It has matrices [B, H, T, S] in memory.
AttentionBackwardOperands attention_second(const AttentionBackwardOperands& x, const AttentionBackwardOperands& u,
                                           const VisibleKeys& visible, double scale);

/// What the gated delta rule reads, or gradients of that: q, k[B, T, G, D], v[B, T, H, E], decay, beta[B, T, H], initial[B, H, D, E]. Some
/// may be undefined; q, k and v of a result never are.
struct DeltaRuleTensors {
  Tensor q, k, v, decay, beta, initial;
};
struct DeltaRuleSecond {
  DeltaRuleTensors x;
  Tensor dout, dstate;
};
/// The gradients of its backward of x, dout[B, T, H, E] and dstate[B, H, D, E] (undefined: there is none), for those `u` of its results. It
/// has matrices [B, H, T, T] in memory.
DeltaRuleSecond delta_rule_second(const DeltaRuleTensors& x, const DeltaRuleTensors& u, const Tensor& dout, const Tensor& dstate,
                                  const Tensor& begins, double scale, double norm_eps);

/// What the backward of a normalisation over the last dimension reads, or the gradients of that. Weights may have further dimensions,
/// with which those of x end; undefined if there is none, or no gradient.
struct NormBackwardOperands {
  Tensor dy, x, weight;
};
/// Gradients of its results, of which some are undefined.
struct NormGradients {
  Tensor dx, dweight, dbias;
};
NormBackwardOperands norm_second(const NormBackwardOperands& x, const NormGradients& u, bool layer, double eps);

/// What the backward of losses of logits x[.., C] weight[V, C]ᵀ reads, or the gradients of that: for a target t of each row the
/// gradients dlse[..] of the log-sum-exp and dtarget[..] of the logit of t; either may be a scalar.
struct HeadBackwardOperands {
  Tensor x, weight, dlse, dtarget;
};
/// The gradients for those `u` of dx and dweight, of which one may be undefined. Rows whose target is rules.ignore_index count nothing.
/// `weight` has rows [first_row, first_row + V) of a vocabulary to which targets[..] refer. It has the logits in memory.
HeadBackwardOperands head_second(const HeadBackwardOperands& x, const HeadBackwardOperands& u, const Tensor& targets,
                                 const kernels::HeadRules& rules, int64_t first_row = 0);

/// The same of logits[.., V] that are given: what losses of them read, or the gradients.
struct LogitsBackwardOperands {
  Tensor logits, dlse, dtarget;
};
LogitsBackwardOperands logits_second(const LogitsBackwardOperands& x, const Tensor& u, const Tensor& targets, int64_t ignore_index);

}  // namespace sheaf::ops
