// Attention of bf16 on the matrix tiles (AMX) of newer x86 machines; attention.cc chooses it where
// it can be used: heads of a multiple of 32, up to 256, and amx::available().
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu::amx {

/// As in kernels/attention.h. Products of bf16 are summed in f32, softmax is f32; probabilities and their gradients are
/// rounded to bf16 before they are multiplied again, as every FlashAttention in bf16 does.
size_t attention_workspace(const View& q, const View& k);
void attention(const View& q, const View& k, const View& v, bool causal, double scale, const View& out,
               const View& lse, Workspace workspace);
size_t attention_backward_workspace(const View& q, const View& k);
void attention_backward(const View& q, const View& k, const View& v, const View& out, const View& lse,
                        const View& dout, bool causal, double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace);

}  // namespace sheaf::kernels::cpu::amx
