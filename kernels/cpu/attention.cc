#include "sheaf/kernels/attention.h"

#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/cpu/attention_bf16.h"
#include "sheaf/kernels/cpu/attention_blocks.h"
#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/kernels/cpu/check_documents.h"
#include "sheaf/kernels/cpu/simd.h"

namespace sheaf::kernels {

SHEAF_SIMD_DECLARE(attention)
SHEAF_SIMD_DECLARE(attention_backward)

namespace cpu {
namespace {

bool by_bf16(const View& q, const View& k, const View& v) {
  const auto fits = [](int64_t width) { return width % 32 == 0 && width > 0 && width <= 256; };
  return q.dtype == kBF16 && q.rank() == 4 && v.rank() == 4 && fits(q.shape[3]) && fits(v.shape[3]) &&
         q.numel() > 0 && k.numel() > 0 && dot::available();
}

size_t bytes(const View& q, int64_t slots, int64_t cells) {
  return static_cast<size_t>(slots) *
         line_align(static_cast<size_t>(cells) * (q.dtype == kF64 ? 8 : 4));
}

// Blocks are placed by `begins`. If the first document began earlier, the keys before the first query's are present, too.
void check_mask(const char* who, const AttentionMask& mask, const View& q, const View& k) {
  const View& begins = mask.begins;
  if (mask.causal || !mask.has_documents()) return check_documents(who, begins, k.shape[1] - q.shape[1], 0);
  const int64_t keys = k.shape[1];
  for (int64_t b = 0; b < begins.shape[0]; ++b) {
    const int32_t *row = begins.as<int32_t>() + b * begins.strides[0], *of_key = mask.key_begins.as<int32_t>() + b * mask.key_begins.strides[0];
    for (int64_t t = 0; t < begins.shape[1]; ++t) {
      const bool begins_one = row[t] >= 0 && row[t] <= keys && (row[t] == keys || of_key[row[t]] == row[t]);
      if (!begins_one || (t > 0 && row[t] < row[t - 1]))
        fail<DataError>("[", who, "] begins[", b, ",", t, "] is ", row[t], ": wants the first of a document's keys, of ", keys,
                        " in all, and not before that of the query in front");
    }
  }
  check_documents(who, mask.key_begins, 0, 0);
}

}  // namespace

size_t attention_workspace(const View& q, const View& k, const View& v, const AttentionMask&, const View&,
                           const View&) {
  if (by_bf16(q, k, v))
    return (amx::available() ? amx::attention_workspace : dot::attention_workspace)(q, k, v);
  const AttentionShape s(q, k, v);
  return bytes(q, s.forward_slots(), s.forward_cells());
}

void attention(const View& q, const View& k, const View& v, const AttentionMask& mask, double scale,
               const View& out, const View& lse, Workspace workspace) {
  check_attention("attention", q, k, v, mask, out, lse);
  check<ShapeError>(workspace.bytes >= attention_workspace(q, k, v, mask, out, lse),
                    "[attention] workspace too small: ", workspace.bytes);
  if (lse.numel() == 0) return;
  check_mask("attention", mask, q, k);
  if (by_bf16(q, k, v))
    return (amx::available() ? amx::attention : dot::attention)(q, k, v, mask, scale, out, lse,
                                                                workspace);
  (has_v4() ? v4::attention : v3::attention)(q, k, v, mask, scale, out, lse, workspace);
}

size_t attention_backward_workspace(const View& q, const View& k, const View& v, const View&,
                                    const View&, const View&, const AttentionMask&, const View&, const View&,
                                    const View&) {
  if (by_bf16(q, k, v))
    return (amx::available() ? amx::attention_backward_workspace
                             : dot::attention_backward_workspace)(q, k, v);
  const AttentionShape s(q, k, v);
  return bytes(q, s.backward_slots(), s.backward_cells());
}

void attention_backward(const View& q, const View& k, const View& v, const View& out,
                        const View& lse, const View& dout, const AttentionMask& mask, double scale,
                        const View& dq, const View& dk, const View& dv, Workspace workspace) {
  const char* who = "attention_backward";
  check_attention_backward(who, q, k, v, out, lse, dout, mask, dq, dk, dv);
  check<ShapeError>(workspace.bytes >= attention_backward_workspace(q, k, v, out, lse, dout, mask,
                                                                    dq, dk, dv),
                    "[", who, "] workspace too small: ", workspace.bytes);
  if (q.shape[0] * k.shape[2] == 0) return;
  check_mask(who, mask, q, k);
  if (by_bf16(q, k, v))
    return (amx::available() ? amx::attention_backward : dot::attention_backward)(
        q, k, v, out, lse, dout, mask, scale, dq, dk, dv, workspace);
  (has_v4() ? v4::attention_backward : v3::attention_backward)(q, k, v, out, lse, dout, mask,
                                                               scale, dq, dk, dv, workspace);
}

}  // namespace cpu
}  // namespace sheaf::kernels
