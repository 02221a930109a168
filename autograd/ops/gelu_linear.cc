// Two linear layers with a gelu between them, where the adjacent products compute the gelu and its derivative: linear_gelu,
// gelu_linear.
#include "sheaf/autograd/ops/activations.h"
#include "sheaf/autograd/ops/linear.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/linear.h"

namespace sheaf {
namespace {

using namespace ops;

constexpr GeluKind kKind = GeluKind::tanh;

Placement moved(const Placement& p, int dim) { return Placement::shard(p.map().moved_to(dim)); }
bool is_cut(const Placement& p) { return p.is_shard() && !p.map().is_flat(); }

/// A rule whose last placement is the bias's, which is omitted if there is none.
void rule_with_bias(Place& p, std::initializer_list<Placement> inputs, std::span<const Placement> outputs) {
  p.rule(std::span(inputs.begin(), static_cast<size_t>(p.num_inputs())), outputs);
}

struct LinearGelu : SavesTheOther {  // x[.., I], weight[O, I] [, bias[O]] -> gelu(y), y = x weightᵀ + bias
  static constexpr const char* kName = "linear_gelu";
  static constexpr bool kDefersWeights = true;
  using Attrs = LayerRounds;
  static constexpr auto describe = describe_layer_rounds;
  static constexpr bool kMarked = true;
  static constexpr uint64_t kSavedOutputs = 0b10;
  static void infer(const Attrs& a, Infer& c) {
    for (int output = 0; output < 2; ++output) infer_linear(kName, c, 1, a.forward());
  }
  static void place(const Attrs&, Place& p) {
    const int last = p.shape(0).rank() - 1;
    const auto rule = [&](const Placement& x, const Placement& w, const Placement& y) {
      const Placement out[] = {y, y};
      rule_with_bias(p, {x, w, w}, out);
    };
    if (is_cut(p.in(0)) && p.in(0).map().dim() != last) rule(p.in(0), kR, p.in(0));
    if (p.in(1).is_shard(0)) rule(kR, p.in(1), moved(p.in(1), last));
    rule(kR, kR, kR);
  }
  static View bias(const Execute& c) { return c.num_inputs() == 3 ? c.input(2) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_gelu, c.input(0), c.input(1), bias(c), c.output(1), c.output(0), a.forward());
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_gelu, c.input(0), c.input(1), bias(c), c.output(1), c.output(0), c.workspace, a.forward());
  }
  static uint64_t row_inputs(const Attrs& a, InputTypes) { return a.forward() ? 0 : 0b1; }
  static void work(const Attrs& a, WorkOf& w) { work_of_linear(w, 1, a.forward()); }
  static constexpr int kRematerializable = 0;
  static Tensor rematerialize(const Attrs&, Vjp& c) { return gelu(c.output(1), kKind); }  // of the rounded value
  static void vjp(const Attrs& a, Vjp& c) {
    Tensor dy = c.has_grad(1) ? c.grad(1) : Tensor();
    if (c.has_grad(0)) {
      const Tensor through = gelu_gradient(c.output(1), c.grad(0), kKind);
      dy = dy ? add(dy, through) : through;
    }
    dy = dense_rows(dy);
    will_read_input(c, 1);
    if (c.needs(0)) c.set(0, times(dy, c.input(1), a.forward()));
    set_parameter_gradients(c, dy, 1, a.fp8);
  }
};

struct GeluLinearBackward {  // dy[.., O], weight[O, I], before[.., I] -> gelu'(before) (dy weight)
  static constexpr const char* kName = "gelu_linear_backward";
  using Attrs = Rounds;
  static constexpr auto describe = describe_rounds;
  static constexpr bool kMarked = true;
  static constexpr uint64_t kSavedInputs = 0b111;
  static void infer(const Attrs& a, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_fp8(kName, a.fp8, d);
    c.output(d, c.shape(2));
  }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    for (int i : {0, 2}) {
      if (!is_cut(p.in(i))) continue;
      if (p.in(i).map().dim() != last) p.rule({p.in(i), kR, p.in(i)}, {p.in(i)});
      else if (i == 0) p.rule({p.in(0), moved(p.in(0), 0), kR}, {kP});
      else p.rule({kR, moved(p.in(2), 1), p.in(2)}, {p.in(2)});
    }
    if (p.in(1).is_shard(0)) p.rule({moved(p.in(1), last), p.in(1), kR}, {kP});
    if (p.in(1).is_shard(1)) p.rule({kR, p.in(1), moved(p.in(1), last)}, {moved(p.in(1), last)});
    p.rule({kR, kR, kR}, {kR});
    if (a.fp8) return;
    p.rule({kP, kR, kR}, {kP});
    p.rule({kR, kP, kR}, {kP});
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), gelu_linear_backward, c.input(0), c.input(1), c.input(2), c.output(0), a.fp8);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), gelu_linear_backward, c.input(0), c.input(1), c.input(2), c.output(0), c.workspace, a.fp8);
  }
  static uint64_t row_inputs(const Attrs& a, InputTypes) { return a.fp8 ? 0 : 0b101; }
  static void work(const Attrs& a, WorkOf& w) {
    w.multiplies(w.input(0), w.input(1)[1]);
    if (a.fp8) rounds(w, w.input(0).numel(), w.input(1).numel());
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor &g = c.grad(), before = c.input(2);
    if (c.needs(0) || c.needs(1)) {
      const Tensor through = dense_rows(gelu_gradient(before, g, kKind));
      if (c.needs(0)) c.set(0, linear(through, c.input(1), {}, a.fp8 ? Fp8::activations : Fp8::none));
      if (c.needs(1)) c.set(1, weight_gradient(c.input(0), through));
    }
    if (c.needs(2)) c.set(2, mul(mul(g, gelu_second(before, kKind)), times(c.input(0), c.input(1), a.fp8)));
  }
};

struct GeluLinear {  // value = gelu(before), before[.., I], weight[O, I] [, bias[O]] -> value weightᵀ + bias
  static constexpr const char* kName = "gelu_linear";
  static constexpr bool kDefersWeights = true;
  using Attrs = LayerRounds;
  static constexpr auto describe = describe_layer_rounds;
  static constexpr bool kMarked = true;
  static constexpr uint64_t kSavedInputs = 0b111;
  static void infer(const Attrs& a, Infer& c) {
    infer_linear(kName, c, 2, a.forward());
    if (!(c.shape(1) == c.shape(0)))
      fail<ShapeError>("[", kName, "] ", c.input(0), " is not the gelu of ", c.input(1));
  }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    const auto rule = [&](const Placement& x, const Placement& w, const Placement& b, const Placement& y) {
      rule_with_bias(p, {x, x, w, b}, std::span(&y, 1));
    };
    for (int i : {0, 1}) {
      if (!is_cut(p.in(i))) continue;
      if (p.in(i).map().dim() == last) rule(p.in(i), moved(p.in(i), 1), kP, kP);
      else rule(p.in(i), kR, kR, p.in(i));
      break;
    }
    if (p.in(2).is_shard(0)) rule(kR, p.in(2), p.in(2), moved(p.in(2), last));
    if (p.in(2).is_shard(1)) rule(moved(p.in(2), last), p.in(2), kP, kP);
    rule(kR, kR, kR, kR);
    if (!a.forward()) rule(kR, kP, kP, kP);
  }
  static View bias(const Execute& c) { return c.num_inputs() == 4 ? c.input(3) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear, c.input(0), c.input(2), bias(c), c.output(0), a.forward());
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear, c.input(0), c.input(2), bias(c), c.output(0), c.workspace, a.forward());
  }
  static uint64_t row_inputs(const Attrs& a, InputTypes) { return a.forward() ? 0 : 0b11; }
  static void work(const Attrs& a, WorkOf& w) { work_of_linear(w, 2, a.forward()); }
  static void vjp(const Attrs& a, Vjp& c) {  // all gradients of `value` go through `before`
    const Tensor dy = dense_rows(c.grad());
    if (c.needs(1)) c.set(1, apply<GeluLinearBackward>(rounds_of(a.forward(), dy, c.input(2)), {dy, c.input(2), c.input(1)}));
    set_parameter_gradients(c, dy, 2, a.fp8);
  }
  static void saves(const Attrs&, uint64_t needs, uint64_t& in, uint64_t&) {
    in = ((needs & 0b010) ? 0b110 : 0) | ((needs & 0b100) ? 0b001 : 0);
  }
};

}  // namespace

GeluOfLinear linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Fp8 fp8) {
  std::vector<Tensor> inputs{x, weight};
  if (bias) inputs.push_back(dense_rows(bias));
  const LayerRounds attrs = rounds_of(fp8, x, weight);
  auto out = apply(op_def<LinearGelu>(), &attrs, inputs);
  return {out[0], out[1]};
}

Tensor gelu_linear(const GeluOfLinear& x, const Tensor& weight, const Tensor& bias, Fp8 fp8, const OutputLayout& output_layout) {
  std::vector<Tensor> inputs{x.value, x.before, weight};
  if (bias) inputs.push_back(dense_rows(bias));
  const LayerRounds attrs = rounds_of(fp8, x.value, weight);
  return apply_and_redistribute(op_def<GeluLinear>(), &attrs, inputs, output_layout);
}

}  // namespace sheaf
