// Activation functions with fused backwards, which are themselves differentiable ops.
#include <limits>

#include "sheaf/autograd/fuse.h"
#include "sheaf/autograd/ops/activations.h"
#include "sheaf/autograd/ops/common.h"
#include "sheaf/autograd/ops/second.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf {
namespace {

using kernels::BackwardOp;
using kernels::UnaryOp;
using namespace ops;

/// Forward: out = f(x).
template <class Op, UnaryOp kKernel>
struct Activation {
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) {
    require_floating(Op::kName, c.dtype(0));
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), unary, kKernel, c.input(0), c.output(0));
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.unary(kKernel, f.input(0))); }
};

/// Backward: dx = dy f'(kept), inputs {kept, dy}; linear in dy.
template <class Op, BackwardOp kKernel>
struct Backward {
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b11;
  static void infer(const auto&, Infer& c) { c.output(common_dtype(Op::kName, c), c.shape(0)); }
  static void place(const auto&, Place& p) { pointwise_linear_in(p, 1); }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), activation_backward, kKernel, c.input(0), c.input(1), c.output(0));
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.backward(kKernel, f.input(0), f.input(1))); }
};

// --- relu ---
struct ReluBackward : Backward<ReluBackward, BackwardOp::relu> {
  static constexpr const char* kName = "relu_backward";
  static constexpr uint64_t kSavedInputs = 0b01;
  static void vjp(const Attrs&, Vjp& c) {  // f'' = 0
    if (c.needs(1)) c.set(1, apply<ReluBackward>({}, {c.input(0), c.grad()}));
  }
};
struct Relu : Activation<Relu, UnaryOp::relu> {
  static constexpr const char* kName = "relu";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, apply<ReluBackward>({}, {c.input(0), c.grad()}));
  }
};

// --- tanh and sigmoid: backward in terms of the output ---
struct TanhBackward : Backward<TanhBackward, BackwardOp::tanh> {
  static constexpr const char* kName = "tanh_backward";
  static void vjp(const Attrs&, Vjp& c) {  // dy (1 - y^2)
    const Tensor y = c.input(0);
    if (c.needs(0)) c.set(0, mul(mul(c.grad(), mul(y, -2.0)), c.input(1)));
    if (c.needs(1)) c.set(1, apply<TanhBackward>({}, {y, c.grad()}));
  }
};
struct Tanh : Activation<Tanh, UnaryOp::tanh> {
  static constexpr const char* kName = "tanh";
  static constexpr uint64_t kSavedOutputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, apply<TanhBackward>({}, {c.output(0), c.grad()}));
  }
};

struct SigmoidBackward : Backward<SigmoidBackward, BackwardOp::sigmoid> {
  static constexpr const char* kName = "sigmoid_backward";
  static void vjp(const Attrs&, Vjp& c) {  // dy y (1 - y)
    const Tensor y = c.input(0);
    if (c.needs(0)) c.set(0, mul(mul(c.grad(), sub(1.0, mul(y, 2.0))), c.input(1)));
    if (c.needs(1)) c.set(1, apply<SigmoidBackward>({}, {y, c.grad()}));
  }
};
struct Sigmoid : Activation<Sigmoid, UnaryOp::sigmoid> {
  static constexpr const char* kName = "sigmoid";
  static constexpr uint64_t kSavedOutputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, apply<SigmoidBackward>({}, {c.output(0), c.grad()}));
  }
};

// --- silu ---
struct SiluBackward : Backward<SiluBackward, BackwardOp::silu> {
  static constexpr const char* kName = "silu_backward";
  static void vjp(const Attrs&, Vjp& c) {
    const Tensor x = c.input(0);
    if (c.needs(0)) c.set(0, mul(mul(c.grad(), silu_second(x)), c.input(1)));
    if (c.needs(1)) c.set(1, apply<SiluBackward>({}, {x, c.grad()}));
  }
};
struct Silu : Activation<Silu, UnaryOp::silu> {
  static constexpr const char* kName = "silu";
  static constexpr uint64_t kSavedInputs = 0b1;
  static constexpr int kRematerializable = 0;
  static Tensor rematerialize(const Attrs&, Vjp& c) { return apply<Silu>({}, c.input(0)); }
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, apply<SiluBackward>({}, {c.input(0), c.grad()}));
  }
};

// --- softplus ---
struct Softplus : Activation<Softplus, UnaryOp::softplus> {
  static constexpr const char* kName = "softplus";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(c.grad(), sigmoid(c.input(0)))); }
};

// --- gelu ---
struct GeluAttrs {
  GeluKind kind;
};
UnaryOp kernel_of(const GeluAttrs& a) {
  return a.kind == GeluKind::tanh ? UnaryOp::gelu_tanh : UnaryOp::gelu_exact;
}

struct GeluBackward : Backward<GeluBackward, BackwardOp::gelu_tanh> {
  static constexpr const char* kName = "gelu_backward";
  using Attrs = GeluAttrs;
  static BackwardOp backward_of(const Attrs& a) {
    return a.kind == GeluKind::tanh ? BackwardOp::gelu_tanh : BackwardOp::gelu_exact;
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), activation_backward, backward_of(a), c.input(0), c.input(1), c.output(0));
  }
  static void fuse(const Attrs& a, Fuse& f) { f.yields(f.backward(backward_of(a), f.input(0), f.input(1))); }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor x = c.input(0);
    if (c.needs(0)) c.set(0, mul(mul(c.grad(), gelu_second(x, a.kind)), c.input(1)));
    if (c.needs(1)) c.set(1, apply<GeluBackward>(a, {x, c.grad()}));
  }
};
struct Gelu {
  static constexpr const char* kName = "gelu";
  using Attrs = GeluAttrs;
  static constexpr uint64_t kSavedInputs = 0b1;
  static void infer(const Attrs&, Infer& c) {
    require_floating(kName, c.dtype(0));
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), unary, kernel_of(a), c.input(0), c.output(0));
  }
  static void fuse(const Attrs& a, Fuse& f) { f.yields(f.unary(kernel_of(a), f.input(0))); }
  static constexpr int kRematerializable = 0;
  static Tensor rematerialize(const Attrs& a, Vjp& c) { return apply<Gelu>(a, c.input(0)); }
  static void vjp(const Attrs& a, Vjp& c) {
    c.set(0, apply<GeluBackward>(a, {c.input(0), c.grad()}));
  }
  static void describe(const Attrs& a, std::string& out) {
    out += a.kind == GeluKind::tanh ? "tanh" : "exact";
  }
};

// --- swiglu ---
void check_equal_shapes(const char* op, const Infer& c) {
  for (int i = 1; i < c.num_inputs(); ++i)
    if (!(c.shape(i) == c.shape(0)))
      fail<ShapeError>("[", op, "] shapes ", c.shape(0), " and ", c.shape(i), " differ");
}
// For backwards with inputs gate, up, dy and outputs dgate, dup.
void infer_of_gate(const char* op, Infer& c) {
  const DType d = common_dtype(op, c);
  check_equal_shapes(op, c);
  c.output(d, c.shape(0));
  c.output(d, c.shape(0));
}
void rules_of_gate(Place& p) {
  if (const OwnershipMap* map = p.sharded())
    rule_all(p, Placement::shard(*map), Placement::shard(*map), 2);
  rule_all(p, kR, kR, 2);
  p.rule({kR, kR, kP}, {kP, kP});
}

// Inputs gate, up, dy; outputs dgate = dy up h'(gate), dup = dy h(gate), h = silu.
struct SwigluBackward {
  static constexpr const char* kName = "swiglu_backward";
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b111;
  static void infer(const Attrs&, Infer& c) { infer_of_gate(kName, c); }
  static void place(const Attrs&, Place& p) {
    rules_of_gate(p);
    p.rule({kR, kP, kR}, {kP, kR});
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), swiglu_backward, c.input(0), c.input(1), c.input(2), c.output(0),
                 c.output(1));
  }
  static void vjp(const Attrs&, Vjp& c) {
    const Tensor gate = c.input(0), up = c.input(1), dy = c.input(2);
    const auto slope = [&](const Tensor& t) {
      return apply<SiluBackward>({}, {gate, t});
    };  // t h'(gate)
    const Tensor a = grad_if(true, c, 0), b = grad_if(true, c, 1);
    if (c.needs(0))
      c.set(0, sum_of_defined({a ? mul(mul(mul(a, silu_second(gate)), up), dy) : Tensor(), b ? mul(slope(b), dy) : Tensor()}));
    if (c.needs(1) && a) c.set(1, mul(slope(a), dy));
    if (c.needs(2)) c.set(2, sum_of_defined({a ? mul(slope(a), up) : Tensor(), b ? mul(b, silu(gate)) : Tensor()}));
  }
};
struct Swiglu {
  static constexpr const char* kName = "swiglu";
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b11;
  static void infer(const Attrs&, Infer& c) {
    require_floating(kName, common_dtype(kName, c));
    check_equal_shapes(kName, c);
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) { pointwise_linear_in(p, 1); }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), swiglu, c.input(0), c.input(1), c.output(0));
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.swiglu(f.input(0), f.input(1))); }
  static constexpr int kRematerializable = 0;
  static Tensor rematerialize(const Attrs&, Vjp& c) { return apply<Swiglu>({}, {c.input(0), c.input(1)}); }
  static void vjp(const Attrs&, Vjp& c) {
    const auto d = apply_all<SwigluBackward>({}, {c.input(0), c.input(1), c.grad()});
    c.set(0, d[0]);
    c.set(1, d[1]);
  }
};

// --- clamped_swiglu: h(g) (u + 1) of the clamped operands, g and u; h(g) = g sigmoid(alpha g) ---
struct ClampedSwigluBackward {  // inputs gate, up, dy; outputs dgate = dy (u + 1) h'(g), dup = dy h(g), 0 where g, u were clamped
  static constexpr const char* kName = "clamped_swiglu_backward";
  using Attrs = ClampedSwigluOptions;
  static constexpr uint64_t kSavedInputs = 0b111;
  static void infer(const Attrs&, Infer& c) { infer_of_gate(kName, c); }
  static void place(const Attrs&, Place& p) {
    rules_of_gate(p);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), clamped_swiglu_backward, c.input(0), c.input(1), c.input(2), a.alpha, a.limit, c.output(0),
                 c.output(1));
  }
  static void vjp(const Attrs& attrs, Vjp& c) {
    const double alpha = attrs.alpha, limit = attrs.limit;
    const Tensor gate = c.input(0), up = c.input(1), dy = c.input(2);
    const auto within_gate = [&](const Tensor& t) { return where(le(gate, limit), t, 0.0); };
    const auto within_up = [&](const Tensor& t) { return where(le(abs(up), limit), t, 0.0); };
    // With x = alpha g: h(g) = silu(x) / alpha, h'(g) = silu'(x), h''(g) = alpha silu''(x).
    const Tensor x = mul(clamp(gate, -std::numeric_limits<double>::infinity(), limit), alpha);
    const Tensor u1 = add(clamp(up, -limit, limit), 1.0);
    const auto slope = [&](const Tensor& t) { return apply<SiluBackward>({}, {x, t}); };  // t h'(g)
    const Tensor a = c.has_grad(0) ? within_gate(c.grad(0)) : Tensor(), b = c.has_grad(1) ? within_up(c.grad(1)) : Tensor();
    if (c.needs(0))
      c.set(0, sum_of_defined({a ? mul(mul(mul(a, mul(silu_second(x), alpha)), u1), dy) : Tensor(),
                               b ? within_gate(mul(slope(b), dy)) : Tensor()}));
    if (c.needs(1) && a) c.set(1, within_up(mul(slope(a), dy)));
    if (c.needs(2)) c.set(2, sum_of_defined({a ? mul(slope(a), u1) : Tensor(), b ? mul(b, mul(silu(x), 1 / alpha)) : Tensor()}));
  }
};
struct ClampedSwiglu {
  static constexpr const char* kName = "clamped_swiglu";
  using Attrs = ClampedSwigluOptions;
  static constexpr uint64_t kSavedInputs = 0b11;
  static void infer(const Attrs& a, Infer& c) {
    check<ConfigError>(a.alpha > 0 && std::isfinite(a.alpha), "[clamped_swiglu] alpha ", a.alpha, " is not positive and finite");
    check<ConfigError>(a.limit > 0, "[clamped_swiglu] limit ", a.limit, " is not positive");
    require_floating(kName, common_dtype(kName, c));
    check_equal_shapes(kName, c);
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), clamped_swiglu, c.input(0), c.input(1), a.alpha, a.limit, c.output(0));
  }
  static void fuse(const Attrs& a, Fuse& f) {
    const Fuse::Value g = f.clamp(f.input(0), -std::numeric_limits<double>::infinity(), a.limit);
    f.yields(f.shifted_swiglu(g, f.clamp(f.input(1), -a.limit, a.limit), a.alpha));
  }
  static constexpr int kRematerializable = 0;
  static Tensor rematerialize(const Attrs& a, Vjp& c) { return apply<ClampedSwiglu>(a, {c.input(0), c.input(1)}); }
  static void vjp(const Attrs& a, Vjp& c) {
    const auto d = apply_all<ClampedSwigluBackward>(a, {c.input(0), c.input(1), c.grad()});
    c.set(0, d[0]);
    c.set(1, d[1]);
  }
  static void describe(const Attrs& a, std::string& out) { out += str("alpha ", a.alpha, ", limit ", a.limit); }
};

Tensor gelu_second_of(const Tensor& x, GeluKind kind) {
  if (kind == GeluKind::exact)
    return mul(mul(exp(mul(square(x), -0.5)), 0.39894228040143267794), sub(2.0, square(x)));
  const double k = 1.5957691216057308, cubic = 0.044715;
  const Tensor s = sigmoid(mul(mul(add(mul(square(x), cubic), 1.0), x), k));
  const Tensor w1 = mul(add(mul(square(x), 3 * cubic), 1.0), k), w2 = mul(x, 6 * cubic * k);
  const Tensor slope = mul(s, sub(1.0, s));
  const Tensor curve = add(mul(sub(1.0, mul(s, 2.0)), square(w1)), w2);
  return mul(slope, add(mul(w1, 2.0), mul(x, curve)));
}

}  // namespace

Tensor ops::silu_second(const Tensor& x) {
  const Tensor s = sigmoid(x);
  return mul(mul(s, sub(1.0, s)), add(mul(x, sub(1.0, mul(s, 2.0))), 2.0));
}
Tensor ops::gelu_second(const Tensor& of, GeluKind kind) {
  const Tensor x = in_statistics_dtype(of);  // x² may not fit into f16
  return cast(gelu_second_of(x, kind), of.dtype());
}
Tensor ops::gelu_gradient(const Tensor& x, const Tensor& dy, GeluKind kind) {
  return apply<GeluBackward>({kind}, {x, dy});
}

Tensor relu(const Tensor& x) { return apply<Relu>({}, x); }
Tensor tanh(const Tensor& x) { return apply<Tanh>({}, x); }
Tensor sigmoid(const Tensor& x) { return apply<Sigmoid>({}, x); }
Tensor silu(const Tensor& x) { return apply<Silu>({}, x); }
Tensor softplus(const Tensor& x) { return apply<Softplus>({}, x); }
Tensor gelu(const Tensor& x, GeluKind kind) { return apply<Gelu>({kind}, x); }
Tensor swiglu(const Tensor& gate, const Tensor& up) { return apply<Swiglu>({}, {gate, up}); }
Tensor clamped_swiglu(const Tensor& gate, const Tensor& up, const ClampedSwigluOptions& options) {
  return apply<ClampedSwiglu>(options, {gate, up});
}
Tensor geglu(const Tensor& gate, const Tensor& up) {
  expect_defined("geglu", gate), expect_defined("geglu", up, 1);
  check<ShapeError>(gate.shape() == up.shape(), "[geglu] gate ", gate.shape(), " and up ", up.shape(), " are of equal shape");
  const RecomputeScope again({.results = true});
  return gelu(gate, GeluKind::tanh) * up;
}

}  // namespace sheaf
