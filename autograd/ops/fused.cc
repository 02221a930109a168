// Several elementwise nodes as one: what the pass fuse_elementwise replaces them by. It has no derivative, as the pass runs after the
// backward has been recorded.
#include "sheaf/autograd/fuse.h"

#include <algorithm>
#include <array>

#include "sheaf/autograd/ops/common.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using kernels::FusedCode;
using kernels::FusedStep;

const char* const kUnaryNames[] = {"neg",     "exp",     "log",      "sqrt",      "rsqrt", "reciprocal", "tanh", "sigmoid",
                                   "abs",     "relu",    "silu",     "gelu tanh", "gelu",  "square",     "isfinite",
                                   "logical_not", "sign", "sin",     "cos",       "softplus", "floor",   "round",
                                   "log1p",   "expm1",   "erf"};
static_assert(std::size(kUnaryNames) == static_cast<size_t>(kernels::UnaryOp::erf) + 1);
const char* const kBackwardNames[] = {"gelu_backward tanh", "gelu_backward", "silu_backward",
                                      "relu_backward",      "tanh_backward", "sigmoid_backward"};

std::string_view name_of(const FusedStep& s) {
  switch (s.kind) {
    case FusedStep::unary:
      return kUnaryNames[s.op];
    case FusedStep::binary:
      return ops::kBinaryNames[s.op];
    case FusedStep::backward:
      return kBackwardNames[s.op];
    case FusedStep::swiglu:
      return "swiglu";
    case FusedStep::shifted_swiglu:
      return "shifted swiglu";
    case FusedStep::where:
      return "where";
    case FusedStep::clamp:
      return "clamp";
    case FusedStep::cast:
      return name(s.dtype);
  }
  return "";
}

struct Fused {
  static constexpr const char* kName = "fused";
  static constexpr bool kMarked = true;
  using Attrs = FusedCode;
  static void infer(const Attrs& a, Infer& c) {
    const Shape shape = ops::broadcast_inputs(kName, c);
    for (int o = 0; o < a.num_outputs; ++o) c.output(a.steps[a.outputs[o] - FusedCode::kFirstStep].dtype, shape);
  }
  static void place(const Attrs& a, Place& p) {
    rules::pointwise_nonlinear(p);
    for (Place::Rule& r : p.rules) r.outputs.resize(a.num_outputs, Placement(r.outputs[0]));
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    std::array<View, FusedCode::kMaxInputs> in;
    std::array<View, FusedCode::kMaxOutputs> out;
    for (int i = 0; i < c.num_inputs(); ++i) in[i] = ops::broadcast_input(c, i);
    for (int o = 0; o < c.num_outputs(); ++o) out[o] = c.output(o);
    const std::span<const View> inputs(in.data(), c.num_inputs()), outputs(out.data(), c.num_outputs());
    SHEAF_ON_DEVICE(stream, fused, a, inputs, outputs);
  }
  static void describe(const Attrs& a, std::string& out) {
    for (int s = 0; s < a.num_steps; ++s) out += (s ? ", " : "") + std::string(name_of(a.steps[s]));
  }
};

bool gives_truth(const FusedStep& s) {
  return s.kind == FusedStep::cast || (s.kind == FusedStep::unary && kernels::is_predicate(static_cast<kernels::UnaryOp>(s.op))) ||
         (s.kind == FusedStep::binary && kernels::is_predicate(static_cast<kernels::BinaryOp>(s.op)));
}

}  // namespace

const OpDef& fused_op() { return op_def<Fused>(); }

bool can_fuse(const Tape& tape, const Node& n) {
  if (!n.op || !n.op->fuse || n.num_outputs != 1 || (n.flags & Node::kAdds)) return false;
  const ValueId out = tape.output(n);
  const auto fits = [&](ValueId v) {
    const Type& t = tape.type(v);
    return (is_floating(t.dtype) || t.dtype == kBool) && !ops::has_partial(t.layout);
  };
  return tape.value(out).lies_in() < 0 && fits(out) && std::ranges::all_of(tape.inputs(n), fits);
}

bool Fuse::takes_types(const Tape& tape, const Node& n) {
  const auto takes = [&](DType d) {
    if (d == kBool) return true;
    const DType compute = d == kF64 ? kF64 : kF32;
    if (!settled_) code_.compute = compute, settled_ = true;
    return code_.compute == compute;
  };
  for (ValueId v : tape.inputs(n))
    if (!takes(tape.type(v).dtype)) return false;
  return takes(tape.type(tape.output(n)).dtype);
}

bool Fuse::add(const Tape& tape, const Node& n) {
  tape_ = &tape, node_ = &n, yield_ = -1;
  if (!takes_types(tape, n)) return false;
  const int first = FusedCode::kFirstStep + code_.num_steps;
  n.op->fuse(tape.attrs(n), *this);
  if (full_ || yield_ < first) return false;  // an unchanged operand would be one value under two names
  values_[tape.output(n)] = yield_;
  FusedStep& last = code_.steps[yield_ - FusedCode::kFirstStep];
  last.dtype = tape.type(tape.output(n)).dtype;
  // Bools are 0 and 1: the results of other steps would have to be converted first.
  return last.dtype != kBool || gives_truth(last);
}

bool Fuse::add_output(ValueId v) {
  if (code_.num_outputs == FusedCode::kMaxOutputs) return false;
  code_.outputs[code_.num_outputs++] = static_cast<uint8_t>(values_.at(v));
  return true;
}

Fuse::Value Fuse::input(int i) {
  const ValueId v = tape_->inputs(*node_)[i];
  if (const auto it = values_.find(v); it != values_.end()) return it->second;
  if (code_.num_inputs == FusedCode::kMaxInputs) return full_ = true, 0;
  inputs_.push_back(v);
  return values_[v] = code_.num_inputs++;
}

Fuse::Value Fuse::constant(double value) {
  for (int i = 0; i < code_.num_constants; ++i)
    if (std::bit_cast<uint64_t>(code_.constants[i]) == std::bit_cast<uint64_t>(value)) return FusedCode::kFirstConstant + i;
  if (code_.num_constants == FusedCode::kMaxConstants) return full_ = true, 0;
  code_.constants[code_.num_constants] = value;
  return FusedCode::kFirstConstant + code_.num_constants++;
}

Fuse::Value Fuse::step(FusedStep::Kind kind, int op, std::initializer_list<Value> operands) {
  if (code_.num_steps == FusedCode::kMaxSteps) return full_ = true, 0;
  FusedStep& s = code_.steps[code_.num_steps];
  s.kind = kind, s.op = static_cast<uint8_t>(op), s.dtype = code_.compute;
  s.num_operands = static_cast<uint8_t>(operands.size());
  std::ranges::copy(operands, s.operands);
  return FusedCode::kFirstStep + code_.num_steps++;
}

}  // namespace sheaf
