// Derivatives of backwards. If the backward of an op is one fused op, that op's vjp is one of these formulas, in public ops: so
// gradients can be differentiated any number of times, with the placements of the first time.
//
// [Note: second derivatives] A backward b(x, dy) = J(x)ᵀ dy is linear in dy. With u for the gradient of its results, its vjp
// differentiates <u, b> = <J(x) u, dy>: the gradient of dy is the op's tangent along u, and that of x follows from both. Statistics
// saved by the forward (log-sum-exps, inverse deviations) are recomputed from x, since they depend on it: otherwise the third
// derivative would miss that. All of it is computed in the dtype of statistics, f32 or f64.
#pragma once

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf::ops {

/// The gradient of a result, if that result exists and has a gradient; else undefined.
inline Tensor grad_if(bool has_result, const Vjp& c, int result) {
  return has_result && c.has_grad(result) ? c.grad(result) : Tensor();
}
/// The sum of those that are defined; undefined if none is.
Tensor sum_of_defined(std::initializer_list<Tensor> terms);
/// y (dy - sum(dy y)): softmax's vjp of dy, where y is the softmax over the last dimension. It is symmetric, so it maps tangents to
/// tangents, too. One op.
Tensor through_softmax(const Tensor& y, const Tensor& dy);

/// The inputs of an attention's backward, or their gradients: q[B, T, H, D], k[B, S, G, D], v[B, S, G, E], dout[B, T, H, E], sinks[H]
/// if there are any.
struct AttentionBackwardOperands {
  Tensor q, k, v, dout = {}, sinks = {};
};
/// Which keys a query sees: AttentionOptions, with `begins` undefined where there are no documents, `key_begins` always defined where
/// there are and no causal mask.
struct VisibleKeys {
  bool causal;
  int64_t window;
  Tensor begins, key_begins;
  double softcap;  ///< of scores; 0: none
};
/// The gradients of the inputs of attention's backward, for the gradients `u` of its results dq, dk, dv and the queries'
/// contributions to the sinks' gradient, [B, H, T]; some of them may be undefined. It holds matrices [B, H, T, S] in memory.
AttentionBackwardOperands attention_second(const AttentionBackwardOperands& x, const AttentionBackwardOperands& u,
                                           const VisibleKeys& visible, double scale);

/// The inputs of the gated delta rule, or their gradients: q, k[B, T, G, D], v[B, T, H, E], decay, beta[B, T, H],
/// initial[B, H, D, E]. Some may be undefined; q, k and v of a result never are.
struct DeltaRuleTensors {
  Tensor q, k, v, decay, beta, initial;
};
struct DeltaRuleSecond {
  DeltaRuleTensors x;
  Tensor dout, dstate;
};
/// The gradients of the inputs of its backward, x, dout[B, T, H, E] and dstate[B, H, D, E] (undefined: none), for the gradients `u`
/// of its results. It holds matrices [B, H, T, T] in memory.
DeltaRuleSecond delta_rule_second(const DeltaRuleTensors& x, const DeltaRuleTensors& u, const Tensor& dout, const Tensor& dstate,
                                  const Tensor& begins, double scale, double norm_eps);

/// The inputs of the backward of a normalisation over the last dimension, or their gradients. Weights may have several dimensions,
/// which match the last ones of x; undefined if there is no weight, or no gradient.
struct NormBackwardOperands {
  Tensor dy, x, weight;
};
/// Gradients of its results; some may be undefined.
struct NormGradients {
  Tensor dx, dweight, dbias;
};
NormBackwardOperands norm_second(const NormBackwardOperands& x, const NormGradients& u, bool layer, double eps);

/// The inputs of the backward of losses of logits x[.., C] weight[V, C]ᵀ, or their gradients: for each row's target t the gradients
/// dlse[..] of the log-sum-exp and dtarget[..] of the logit of t; either may be a scalar.
struct HeadBackwardOperands {
  Tensor x, weight, dlse, dtarget;
};
/// The gradients for the gradients `u` of dx and dweight, of which one may be undefined. Rows whose target is rules.ignore_index do
/// not count. `weight` has rows [first_row, first_row + V) of a vocabulary that targets[..] index. It holds the logits in memory.
HeadBackwardOperands head_second(const HeadBackwardOperands& x, const HeadBackwardOperands& u, const Tensor& targets,
                                 const kernels::HeadRules& rules, int64_t first_row = 0);

/// The same for given logits[.., V]: the inputs of the backward of their losses, or the gradients.
struct LogitsBackwardOperands {
  Tensor logits, dlse, dtarget;
};
LogitsBackwardOperands logits_second(const LogitsBackwardOperands& x, const Tensor& u, const Tensor& targets, int64_t ignore_index);

}  // namespace sheaf::ops
