#include "sheaf/kernels/delta_rule.h"

#include "sheaf/kernels/cpu/check_documents.h"
#include "sheaf/kernels/cpu/delta_rule_chunks.h"
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/kernels/delta_rule_operands.h"

namespace sheaf::kernels {

SHEAF_SIMD_DECLARE(delta_rule)
SHEAF_SIMD_DECLARE(delta_rule_backward)

namespace cpu {
namespace {

size_t bytes(const DeltaRuleOperands& x, const DeltaRuleShape& s, int64_t cells) {
  const size_t each = x.q.dtype == kF64 ? 8 : 4;
  return static_cast<size_t>(s.slots()) * line_align(static_cast<size_t>(cells) * each);
}

}  // namespace

size_t delta_rule_workspace(const DeltaRuleOperands& x, const View&, const View&) {
  const DeltaRuleShape s(x);
  return bytes(x, s, s.forward_cells());
}

void delta_rule(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out, const View& state, Workspace workspace) {
  check_delta_rule("delta_rule", x, out, state);
  check<ShapeError>(workspace.bytes >= delta_rule_workspace(x, out, state), "[delta_rule] workspace too small: ", workspace.bytes);
  check_documents("delta_rule", x.begins);
  (has_v4() ? v4::delta_rule : v3::delta_rule)(x, options, out, state, workspace);
}

size_t delta_rule_backward_workspace(const DeltaRuleOperands& x, const View&, const View&, const DeltaRuleGradients&) {
  const DeltaRuleShape s(x);
  return bytes(x, s, s.backward_cells());
}

void delta_rule_backward(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout, const View& dstate,
                         const DeltaRuleGradients& d, Workspace workspace) {
  check_delta_rule_backward("delta_rule_backward", x, dout, dstate, d);
  check<ShapeError>(workspace.bytes >= delta_rule_backward_workspace(x, dout, dstate, d), "[delta_rule_backward] workspace too small: ",
                    workspace.bytes);
  check_documents("delta_rule_backward", x.begins);
  (has_v4() ? v4::delta_rule_backward : v3::delta_rule_backward)(x, options, dout, dstate, d, workspace);
}

}  // namespace cpu
}  // namespace sheaf::kernels
