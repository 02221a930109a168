// Attention in bf16 by the bf16 instructions of newer x86 machines; attention.cc uses it where possible: for head widths that are
// multiples of 32, up to 256, and with dot::available().
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/attention.h"

/// As in kernels/attention.h. Products of bf16 are summed in f32, softmax is f32; probabilities and their gradients are
/// rounded to bf16 before they are multiplied again, as every FlashAttention in bf16 does.
namespace sheaf::kernels::cpu {

/// By matrix tiles; only where amx::available().
namespace amx {
size_t attention_workspace(const View& q, const View& k, const View& v);
decltype(cpu::attention) attention;
size_t attention_backward_workspace(const View& q, const View& k, const View& v);
decltype(cpu::attention_backward) attention_backward;
}  // namespace amx

/// By vectors of pairs; only where dot::available().
namespace dot {
size_t attention_workspace(const View& q, const View& k, const View& v);
decltype(cpu::attention) attention;
size_t attention_backward_workspace(const View& q, const View& k, const View& v);
decltype(cpu::attention_backward) attention_backward;
}  // namespace dot

}  // namespace sheaf::kernels::cpu
