// Selects the implementation of attention on a GPU: cuDNN if it accepts the operands, else our own kernels, one of which is for few
// queries.
#include "sheaf/kernels/attention.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "sheaf/core/error.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/kernels/cuda/attention_decode.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"
#include "sheaf/kernels/cuda/slow_notice.h"

namespace sheaf::kernels::cuda {
namespace {

using cudnn::Attention;

/// SHEAF_CUDNN_ATTENTION=0 selects our own kernels always, for comparison.
bool wanted() {
  const char* const value = std::getenv("SHEAF_CUDNN_ATTENTION");
  return !value || std::string_view(value) != "0";
}

bool by_cudnn(const Attention& a) { return wanted() && cudnn::accepts(a); }

/// Enough for both: memory may turn out to be unaligned at the call.
size_t workspace_of(const Attention& a, size_t ours) {
  return by_cudnn(a) ? std::max(ours, cudnn::attention_workspace(a)) : ours;
}

/// False, with nothing done, if our own kernels are to run.
bool run_cudnn(const Stream& stream, const Attention& a, Workspace workspace) {
  if (!wanted()) return false;
  if (const std::string why = cudnn::refusal(a); !why.empty()) {
    const Shape &q = a.q.shape, &k = a.k.shape;
    if ((a.q.dtype == kBF16 || a.q.dtype == kF16) &&
        q[0] * q[2] * q[1] * k[1] >= kWorthANotice)
      slow_notice(str("[attention] our own kernel computes the ",
                      a.dout.rank() != 0 ? "backward" : "forward", " pass of ", a.q.dtype,
                      ": cuDNN refuses it: ", why));
    return false;
  }
  if (workspace.bytes < cudnn::attention_workspace(a)) return false;
  cudnn::attention(stream, a, workspace);
  return true;
}

Attention forward(const View& q, const View& k, const View& v, const AttentionMask& mask, double scale,
                  const View& out, const View& lse) {
  return {.q = q,
          .k = k,
          .v = v,
          .out = out,
          .lse = lse,
          .causal = mask.causal,
          .begins = mask.begins,
          .window = mask.window,
          .softcap = mask.softcap,
          .scale = scale};
}

Attention backward(const View& q, const View& k, const View& v, const View& out, const View& lse,
                   const View& dout, const AttentionMask& mask, double scale, const View& dq,
                   const View& dk, const View& dv) {
  return {.q = q,
          .k = k,
          .v = v,
          .out = out,
          .lse = lse,
          .dout = dout,
          .dq = dq,
          .dk = dk,
          .dv = dv,
          .causal = mask.causal,
          .begins = mask.begins,
          .window = mask.window,
          .softcap = mask.softcap,
          .scale = scale};
}

}  // namespace

size_t attention_workspace(const View& q, const View& k, const View& v, const AttentionMask& mask,
                           const View& out, const View& lse) {
  // For so few queries cuDNN never accepts the operands.
  if (decode::takes(q, v)) return decode::attention_workspace(q, k, v, mask);
  return workspace_of(forward(q, k, v, mask, 1, out, lse), 0);
}

void attention(const Stream& stream, const View& q, const View& k, const View& v, const AttentionMask& mask,
               double scale, const View& out, const View& lse, Workspace workspace) {
  check_attention("attention", q, k, v, mask, out, lse);
  if (decode::takes(q, v))
    return decode::attention(stream, q, k, v, mask, scale, out, lse, workspace);
  const Attention a = forward(q, k, v, mask, scale, out, lse);
  if (!run_cudnn(stream, a, workspace))
    blocked::attention(stream, q, k, v, mask, scale, out, lse);
}

size_t attention_backward_workspace(const View& q, const View& k, const View& v, const View& out,
                                    const View& lse, const View& dout, const AttentionMask& mask, const View& dq,
                                    const View& dk, const View& dv) {
  return workspace_of(backward(q, k, v, out, lse, dout, mask, 1, dq, dk, dv),
                      blocked::attention_backward_workspace(q));
}

void attention_backward(const Stream& stream, const View& q, const View& k, const View& v,
                        const View& out, const View& lse, const View& dout, const AttentionMask& mask,
                        double scale, const View& dq, const View& dk, const View& dv,
                        Workspace workspace) {
  check_attention_backward("attention_backward", q, k, v, out, lse, dout, mask, dq, dk, dv);
  const Attention a = backward(q, k, v, out, lse, dout, mask, scale, dq, dk, dv);
  if (!run_cudnn(stream, a, workspace))
    blocked::attention_backward(stream, q, k, v, out, lse, dout, mask, scale, dq, dk, dv,
                                workspace);
}

}  // namespace sheaf::kernels::cuda
