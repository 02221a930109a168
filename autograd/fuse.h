// How elementwise ops become steps of one kernel (kernels/fused.h): each op defines in `fuse(const Attrs&, Fuse&)` what it computes
// per element.
//
//   static void fuse(const Attrs& a, Fuse& f) { f.yields(f.binary(kernels::BinaryOp::mul, f.input(0), f.constant(a.scalar))); }
#pragma once

#include <initializer_list>
#include <span>
#include <unordered_map>

#include "sheaf/autograd/tape.h"
#include "sheaf/kernels/elementwise.h"
#include "sheaf/kernels/fused.h"

namespace sheaf {

/// Code that grows one node at a time. A node's value must have the bits of its own kernel: steps compute in f32 (f64 for f64), by
/// the functions of kernels/elementwise.h, and a node's value is rounded to the dtype of its output.
class Fuse {
 public:
  using Value = int;

  // --- for ops ---
  Value input(int i);
  Value constant(double value);
  Value unary(kernels::UnaryOp op, Value x) { return step(kernels::FusedStep::unary, static_cast<int>(op), {x}); }
  Value binary(kernels::BinaryOp op, Value x, Value y) {
    return step(kernels::FusedStep::binary, static_cast<int>(op), {x, y});
  }
  Value backward(kernels::BackwardOp op, Value kept, Value dy) {
    return step(kernels::FusedStep::backward, static_cast<int>(op), {kept, dy});
  }
  Value swiglu(Value gate, Value up) { return step(kernels::FusedStep::swiglu, 0, {gate, up}); }
  /// gate sigmoid(alpha gate) (up + 1)
  Value shifted_swiglu(Value gate, Value up, double alpha) {
    return step(kernels::FusedStep::shifted_swiglu, 0, {gate, up, constant(alpha)});
  }
  Value where(Value cond, Value x, Value y) { return step(kernels::FusedStep::where, 0, {cond, x, y}); }
  Value clamp(Value x, double lo, double hi) { return step(kernels::FusedStep::clamp, 0, {x, constant(lo), constant(hi)}); }
  Value cast(Value x) { return step(kernels::FusedStep::cast, 0, {x}); }
  void yields(Value v) { yield_ = v; }  ///< a step of this op

  // --- for passes ---
  /// Adds a node with one output; false if there is no room for it, or if its types cannot be combined with the others'. Then this
  /// object must not be used any more.
  bool add(const Tape& tape, const Node& n);
  /// Makes the value of an added node an output; false if there is no room.
  bool add_output(ValueId v);
  std::span<const ValueId> inputs() const { return inputs_; }
  const kernels::FusedCode& code() const { return code_; }

 private:
  Value step(kernels::FusedStep::Kind kind, int op, std::initializer_list<Value> operands);
  bool takes_types(const Tape& tape, const Node& n);

  kernels::FusedCode code_;
  std::vector<ValueId> inputs_;
  std::unordered_map<ValueId, Value> values_;
  const Tape* tape_ = nullptr;
  const Node* node_ = nullptr;  // being added
  Value yield_ = -1;
  bool settled_ = false;  // the compute type
  bool full_ = false;
};

/// Whether a node can be fused at all: an elementwise op with one output in its own memory, without Partial placements, in floating
/// types or bool.
bool can_fuse(const Tape& tape, const Node& n);
/// The op that runs fused code. Its attributes are the code; inputs are broadcast to the outputs' common shape.
const OpDef& fused_op();

}  // namespace sheaf
