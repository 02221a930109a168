#include "sheaf/kernels/attention.h"

#include "sheaf/kernels/cpu/amx.h"
#include "sheaf/kernels/cpu/attention_amx.h"
#include "sheaf/kernels/cpu/attention_blocks.h"
#include "sheaf/kernels/cpu/simd.h"

namespace sheaf::kernels {

SHEAF_SIMD_DECLARE(attention)
SHEAF_SIMD_DECLARE(attention_backward)

namespace cpu {
namespace {

bool by_tiles(const View& q, const View& k) {
  return q.dtype == kBF16 && q.rank() == 4 && q.shape[3] % 32 == 0 && q.shape[3] > 0 && q.shape[3] <= 256 &&
         q.numel() > 0 && k.numel() > 0 && amx::available();
}

void check_operands(const char* who, const View& q, const View& k, const View& v, const View& out,
                    const View& lse) {
  const bool shapes = q.rank() == 4 && k.rank() == 4 && v.shape == k.shape &&
                      out.shape == q.shape && k.shape[0] == q.shape[0] &&
                      k.shape[3] == q.shape[3] &&
                      (k.shape[2] > 0 ? q.shape[2] % k.shape[2] == 0 : q.shape[2] == 0) &&
                      lse.shape == Shape{q.shape[0], q.shape[2], q.shape[1]};
  check<ShapeError>(shapes, "[", who, "] queries [B,T,H,D] ", q.shape, ", keys [B,S,G,D] ", k.shape,
                    ", values ", v.shape, ", output ", out.shape, ", lse [B,H,T] ", lse.shape,
                    "; H must be a multiple of G");
  check<DTypeError>(k.dtype == q.dtype && v.dtype == q.dtype && out.dtype == q.dtype &&
                        lse.dtype == (q.dtype == kF64 ? kF64 : kF32),
                    "[", who, "] dtypes ", q.dtype, ", ", k.dtype, ", ", v.dtype, ", lse ",
                    lse.dtype);
  for (const View* x : {&q, &k, &v, &out, &lse})
    check<ShapeError>(x->strides.back() == 1 || x->shape.back() <= 1 || x->numel() == 0, "[", who,
                      "] the last dimension must be dense");
}

size_t bytes(const View& q, int64_t slots, int64_t cells) {
  return static_cast<size_t>(slots) *
         line_align(static_cast<size_t>(cells) * (q.dtype == kF64 ? 8 : 4));
}

}  // namespace

size_t attention_workspace(const View& q, const View& k) {
  if (by_tiles(q, k)) return amx::attention_workspace(q, k);
  const AttentionShape s(q, k);
  return bytes(q, s.forward_slots(), s.forward_cells());
}

void attention(const View& q, const View& k, const View& v, bool causal, double scale,
               const View& out, const View& lse, Workspace workspace) {
  check_operands("attention", q, k, v, out, lse);
  check<ShapeError>(lse.contiguous(), "[attention] lse must be dense");
  check<ShapeError>(workspace.bytes >= attention_workspace(q, k),
                    "[attention] workspace too small: ", workspace.bytes);
  if (out.numel() == 0) return;
  if (by_tiles(q, k))
    return amx::attention(q, k, v, causal, scale, out, lse, workspace);
  (has_v4() ? v4::attention : v3::attention)(q, k, v, causal, scale, out, lse, workspace);
}

size_t attention_backward_workspace(const View& q, const View& k) {
  if (by_tiles(q, k)) return amx::attention_backward_workspace(q, k);
  const AttentionShape s(q, k);
  return bytes(q, s.backward_slots(), s.backward_cells());
}

void attention_backward(const View& q, const View& k, const View& v, const View& out,
                        const View& lse, const View& dout, bool causal, double scale,
                        const View& dq, const View& dk, const View& dv, Workspace workspace) {
  const char* who = "attention_backward";
  check_operands(who, q, k, v, out, lse), check_operands(who, dq, dk, dv, dout, lse);
  check<ShapeError>(dq.shape == q.shape && dk.shape == k.shape && dq.dtype == q.dtype, "[", who,
                    "] gradients ", dq.shape, " and ", dk.shape);
  check<ShapeError>(workspace.bytes >= attention_backward_workspace(q, k), "[", who,
                    "] workspace too small: ", workspace.bytes);
  if (q.shape[0] * k.shape[2] == 0) return;
  if (by_tiles(q, k))
    return amx::attention_backward(q, k, v, out, lse, dout, causal, scale, dq, dk, dv, workspace);
  (has_v4() ? v4::attention_backward : v3::attention_backward)(q, k, v, out, lse, dout, causal,
                                                               scale, dq, dk, dv, workspace);
}

}  // namespace cpu
}  // namespace sheaf::kernels
