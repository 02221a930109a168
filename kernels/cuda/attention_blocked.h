// Attention by our own blocked kernels, for what cuDNN does not accept: any floating type, strides
// and numbers of tokens, with or without a causal mask, documents or a window, heads up to 256 wide, those of values
// of any width up to that. Products of bf16 and f16 run on tensor cores (attention_fragments.h), which take
// probabilities, and in the backward the gradients of scores before their scale, rounded to the operands' type; those
// of f32 and f64 by multiply-adds. Keys are added in the order that attention_softmax.h describes; dk and dv sum over
// a key head's query heads in order, and for each over blocks of queries in order. Operands as kernels/attention.h
// has them, checked by the caller.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/attention.h"

namespace sheaf::kernels::cuda::blocked {

void attention(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask,
               double scale, const View& out, const View& lse);

/// For dout·out of each query.
size_t attention_backward_workspace(const View& q);
void attention_backward(const Stream& stream, const View& q, const View& k, const View& v,
                        const View& out, const View& lse, const View& dout, const AttentionMask& mask,
                        double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace);

/// The versions for bf16 and f16, which the functions above call.
namespace fragments {

void attention(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask,
               double scale, const View& out, const View& lse);
void attention_backward(const Stream& stream, const View& q, const View& k, const View& v,
                        const View& out, const View& lse, const View& dout, const AttentionMask& mask,
                        double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace);

}  // namespace fragments
}  // namespace sheaf::kernels::cuda::blocked
