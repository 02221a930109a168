// Sinks of attention (Xiao et al., https://arxiv.org/abs/2309.17453; as parameters: OpenAI's gpt-oss,
// https://arxiv.org/abs/2508.10925): one score per head that every query's softmax includes in addition to its keys' scores, and that
// has no value. The probabilities of keys sum to less than 1.
//
//   B batch   T queries   H heads   E width of a value's head
//
// With a the log-sum-exp of a query's scores of keys and s the sink of its head, the log-sum-exp of all is a' = log(e^a + e^s), and
// probabilities are those without a sink times e^(a - a'). So sinks can be applied after any attention kernel, and any kernel's
// backward is correct with sinks, given the result and the log-sum-exps with sinks: for the probabilities p with sinks, dS = p (dP -
// Σ_E out dout), whether or not p sums to 1.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// sinks[H], of the dtype of lse; out[B, T, H, E], the last dimension dense; lse[B, H, T].
inline void check_attention_sinks(const char* who, const View& sinks, const View& out, const View& lse) {
  check<ShapeError>(sinks.rank() == 1 && out.rank() == 4 && sinks.shape[0] == out.shape[2] &&
                        lse.shape == Shape{out.shape[0], out.shape[2], out.shape[1]},
                    "[", who, "] sinks [H] ", sinks.shape, ", output [B,T,H,E] ", out.shape, ", lse [B,H,T] ", lse.shape);
  check<DTypeError>(lse.dtype == (out.dtype == kF64 ? kF64 : kF32) && sinks.dtype == lse.dtype, "[", who, "] dtypes ", out.dtype,
                    ", lse ", lse.dtype, ", sinks ", sinks.dtype);
}
inline void check_attention_sinks_backward(const char* who, const View& sinks, const View& out, const View& lse, const View& dout,
                                           const View& dscores) {
  check_attention_sinks(who, sinks, out, lse);
  check<ShapeError>(dout.shape == out.shape && dscores.shape == lse.shape, "[", who, "] gradients ", dout.shape, " and ",
                    dscores.shape, " of ", out.shape, " and ", lse.shape);
  check<DTypeError>(dout.dtype == out.dtype && dscores.dtype == lse.dtype, "[", who, "] dtypes ", out.dtype, ", gradient ",
                    dout.dtype, ", lse ", lse.dtype, ", gradients of scores ", dscores.dtype);
}

namespace cpu {
/// Turns the results of attention() into those with sinks, in place. A query that sees no key keeps its zeros and gets lse = s; s =
/// -inf means no sink.
void attention_sinks(const View& sinks, const View& out, const View& lse);
/// dscores[B, H, T]: each query's gradient of its head's sink, -e^(s - lse) Σ_E out dout; out and lse with sinks. The gradient
/// of the sinks is their sum over B and T.
void attention_sinks_backward(const View& sinks, const View& out, const View& lse, const View& dout, const View& dscores);
}  // namespace cpu

namespace cuda {
void attention_sinks(const Stream& stream, const View& sinks, const View& out, const View& lse);
void attention_sinks_backward(const Stream& stream, const View& sinks, const View& out, const View& lse, const View& dout,
                              const View& dscores);
}  // namespace cuda
}  // namespace sheaf::kernels
