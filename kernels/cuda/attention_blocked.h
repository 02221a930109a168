// Attention by our own blocked kernels, for operands that cuDNN does not accept: any floating type, strides and numbers of tokens,
// with or without a causal mask, documents or a window, heads up to 256 wide, those of values of any width up to that. Products of
// bf16 and f16 use tensor cores (attention_fragments.h), for which probabilities, and in the backward the gradients of scores before
// their scale, are rounded to the operands' type; those of f32 and f64 use multiply-adds. Keys are added in the order that
// attention_softmax.h describes; dk and dv are summed over a key head's query heads in order, and for each over blocks of queries in
// order. Operands as in kernels/attention.h, checked by the caller.
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
