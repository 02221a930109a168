// check_op: everything that this repository's tests demand of an op, for any function of tensors; also for user-defined ops. Each check
// returns "" or a description of the failure, so a test reads
//
//   EXPECT_EQ(check_op({.op = "my_op", .inputs = {{3, 5}}, .f = [](Args x) { return apply<MyOp>({}, x[0]); }}), "");
#pragma once

#include <string>

#include "sheaf/autograd/op.h"
#include "sheaf/tests/op_samples.h"

namespace sheaf::testing {

/// f64 gradients against central differences.
std::string check_gradient(const OpSample& sample);
/// f64 second derivatives likewise; or, for samples with `no_second`, that the error names that op.
std::string check_second_gradient(const OpSample& sample);
/// Outputs, gradients and second derivatives in `dtype` on `device` against f64 on the CPU, on the same (rounded) inputs; all memory holds
/// NaN beforehand.
std::string check_precision(const OpSample& sample, DType dtype, Device device = Device::cpu());
/// Transposed, spread, sliced and (where the sample's values allow it) expanded inputs and strided incoming gradients
/// give what dense ones give.
std::string check_strides(const OpSample& sample, Device device = Device::cpu());
/// Every size set to 0 in turn: right shapes, nothing left unwritten; a ShapeError or DataError is accepted, but not every time.
std::string check_zero_size(const OpSample& sample);
/// On meta: the same types and the same peak of requested bytes as on cpu. The recorded tape passes the checks T and D and replays bitwise,
/// backward included.
std::string check_tape(const OpSample& sample);
/// Gradients that are stored into given memory, as with units, and accumulated into it by a second use, equal those of Recording::gradient.
std::string check_slots(const OpSample& sample);
/// Every assignment of placements to the inputs, on one mesh axis of `ranks` local ranks: either outputs, gradients and second derivatives
/// are those of the unsharded run, without communication, or a PlacementError names op, axis and accepted rules. All cuts even, then
/// uneven, then of parts.
std::string check_placements(const OpSample& sample, int ranks);
/// The same on meshes of two and three axes, even and uneven: every rule on one axis combined with every rule on the other, a random sample
/// of pairs of the other accepted assignments, and operands without a mesh.
std::string check_axes(const OpSample& sample);

/// All of the above, placements at worlds 1 to 5.
std::string check_op(const OpSample& sample);

/// The same for an op struct: check_op<MyOp>({.scale = 2}, {{3, 5}}, {.exact = true}).
template <class Op>
std::string check_op(const typename Op::Attrs& attrs, std::vector<In> inputs, OpSample options = {}) {
  options.op = Op::kName;
  options.inputs = std::move(inputs);
  options.f = [attrs](Args x) { return Outputs(apply(op_def<Op>(), &attrs, x)); };
  return check_op(options);
}

}  // namespace sheaf::testing
