// Causal attention by cuDNN, where it takes it: bf16 and f16 on tensor cores, the statistics in
// f32. Operands and results as in kernels/attention.h, so that forward and backward may each be
// cuDNN's or our own kernel.
#pragma once

#include <string>
#include <string_view>

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cuda::cudnn {

/// One call of attention (without dout) or of attention_backward. Where only shapes count, data may
/// be null.
struct Attention {
  View q, k, v, out, lse;
  View dout = {}, dq = {}, dk = {}, dv = {};  ///< not given forward
  bool causal = true;
  double scale = 1;
  /// Backward: dq has the same bits at every run. cuDNN then wants workspace for a dq in f32 for
  /// every 128 keys, or 256 where heads are wider than 64. Without it, it adds to one such dq in
  /// the order in which blocks finish.
  bool deterministic = true;
};

/// Why cuDNN does not take this on the thread's current device: in its words, or because of
/// something that was never tried; empty if it does. The first question about a shape compiles a
/// plan for it, which takes about half a second; the answer is kept.
std::string refusal(const Attention& a);
inline bool accepts(const Attention& a) { return refusal(a).empty(); }
/// The same for a device that need not be here, described in JSON as cuDNN does. Compiles each time
/// and, if it does, writes the plan's workspace into `workspace`.
std::string refusal_on(std::string_view device_properties, const Attention& a, int64_t* workspace);

/// Only for what is accepted.
size_t attention_workspace(const Attention& a);
void attention(const Stream& stream, const Attention& a, Workspace workspace);

/// The part of refusal() that needs no cuDNN.
std::string layout_refusal(const Attention& a);

}  // namespace sheaf::kernels::cuda::cudnn
