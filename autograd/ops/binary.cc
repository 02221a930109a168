// Elementwise ops of two operands, with NumPy broadcasting, and of an operand and a weak scalar.
#include "sheaf/autograd/fuse.h"
#include "sheaf/autograd/ops/common.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf {
namespace {

using kernels::BinaryOp;
using namespace ops;

template <class Op, BinaryOp kKernel>
struct Binary {
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) {
    const DType d = common_dtype(Op::kName, c);
    if (kKernel == BinaryOp::div || kKernel == BinaryOp::pow) require_floating(Op::kName, d);
    c.output(kernels::is_predicate(kKernel) ? kBool : d, broadcast_inputs(Op::kName, c));
  }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), binary, kKernel, broadcast_input(c, 0), broadcast_input(c, 1),
                 c.output(0));
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.binary(kKernel, f.input(0), f.input(1))); }
};

struct Add : Binary<Add, BinaryOp::add> {
  static constexpr const char* kName = "add";
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static void vjp(const Attrs&, Vjp& c) {
    for (int i = 0; i < 2; ++i)
      if (c.needs(i)) c.set(i, sum_to(c.grad(), c.input_type(i)));
  }
};

struct Sub : Binary<Sub, BinaryOp::sub> {
  static constexpr const char* kName = "sub";
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static void vjp(const Attrs&, Vjp& c) {
    if (c.needs(0)) c.set(0, sum_to(c.grad(), c.input_type(0)));
    if (c.needs(1)) c.set(1, neg(sum_to(c.grad(), c.input_type(1))));
  }
};

struct Mul : Binary<Mul, BinaryOp::mul>, SavesTheOther {
  static constexpr const char* kName = "mul";
  static void place(const Attrs&, Place& p) { rules::pointwise_multilinear(p); }
  static void vjp(const Attrs&, Vjp& c) {
    for (int i = 0; i < 2; ++i)
      if (c.needs(i)) c.set(i, sum_to(mul(c.grad(), c.input(1 - i)), c.input_type(i)));
  }
};

struct Div : Binary<Div, BinaryOp::div> {
  static constexpr const char* kName = "div";
  static constexpr uint64_t kSavedInputs = 0b10, kSavedOutputs = 0b1;
  static void saves(const Attrs&, uint64_t needs, uint64_t&, uint64_t& out) {
    out = needs & 2 ? 1 : 0;
  }
  static void place(const Attrs&, Place& p) { pointwise_linear_in(p, 0); }
  static void vjp(const Attrs&, Vjp& c) {  // d(a/b) = da / b - (a/b) db / b
    const Tensor da = div(c.grad(), c.input(1));
    if (c.needs(0)) c.set(0, sum_to(da, c.input_type(0)));
    if (c.needs(1)) c.set(1, neg(sum_to(mul(da, c.output(0)), c.input_type(1))));
  }
};

struct Pow : Binary<Pow, BinaryOp::pow> {
  static constexpr const char* kName = "pow";
  static constexpr uint64_t kSavedInputs = 0b11, kSavedOutputs = 0b1;
  static void saves(const Attrs&, uint64_t needs, uint64_t&, uint64_t& out) {
    out = needs & 2 ? 1 : 0;
  }
  static void vjp(const Attrs&, Vjp& c) {
    // Where a slope is 0 by definition its operand is replaced, not its value: the derivative of a value that is not chosen, infinite
    // there, would be multiplied by 0.
    const Tensor a = c.input(0), b = c.input(1);
    if (c.needs(0)) {  // the gradient of x⁰ is 0, also at x = 0
      const Tensor less = sub(b, 1.0), infinite = logical_and(eq(b, 0.0), logical_not(isfinite(pow(a, less))));
      c.set(0, sum_to(mul(c.grad(), mul(b, pow(where(infinite, 1.0, a), less))), c.input_type(0)));
    }
    if (c.needs(1)) {  // and so is that of 0ˣ for x >= 0
      const Tensor zero = logical_and(eq(a, 0.0), ge(b, 0.0));
      c.set(1, sum_to(mul(c.grad(), mul(c.output(0), log(where(zero, 1.0, a)))), c.input_type(1)));
    }
  }
};

/// minimum and maximum: the selected operand gets the gradient; of two equal ones the first.
template <class Op, BinaryOp kKernel>
struct Extreme : Binary<Op, kKernel> {
  static constexpr uint64_t kSavedInputs = 0b11;
  static void vjp(const NoAttrs&, Vjp& c) {
    const Tensor a = c.input(0), b = c.input(1),
                 first = kKernel == BinaryOp::minimum ? le(a, b) : ge(a, b);
    if (c.needs(0)) c.set(0, sum_to(where(first, c.grad(), 0.0), c.input_type(0)));
    if (c.needs(1)) c.set(1, sum_to(where(first, 0.0, c.grad()), c.input_type(1)));
  }
};
struct Minimum : Extreme<Minimum, BinaryOp::minimum> {
  static constexpr const char* kName = "minimum";
};
struct Maximum : Extreme<Maximum, BinaryOp::maximum> {
  static constexpr const char* kName = "maximum";
};

// Bool results: no gradients.
struct Eq : Binary<Eq, BinaryOp::eq> {
  static constexpr const char* kName = "eq";
};
struct Ne : Binary<Ne, BinaryOp::ne> {
  static constexpr const char* kName = "ne";
};
struct Lt : Binary<Lt, BinaryOp::lt> {
  static constexpr const char* kName = "lt";
};
struct Le : Binary<Le, BinaryOp::le> {
  static constexpr const char* kName = "le";
};
struct Gt : Binary<Gt, BinaryOp::gt> {
  static constexpr const char* kName = "gt";
};
struct Ge : Binary<Ge, BinaryOp::ge> {
  static constexpr const char* kName = "ge";
};
struct And : Binary<And, BinaryOp::logical_and> {
  static constexpr const char* kName = "logical_and";
};
struct Or : Binary<Or, BinaryOp::logical_or> {
  static constexpr const char* kName = "logical_or";
};

/// x op scalar, or scalar op x.
struct BinaryScalar {
  static constexpr const char* kName = "scalar";
  struct Attrs {
    double scalar;
    BinaryOp op;
    bool left;  ///< the scalar is the left operand
    char unused[6] = {};
  };
  static constexpr uint64_t kSavedInputs = 0b1, kSavedOutputs = 0b1;
  static bool is_linear(const Attrs& a) {
    return a.op == BinaryOp::mul || (a.op == BinaryOp::div && !a.left);
  }
  static void infer(const Attrs& a, Infer& c) {
    const char* op = kBinaryNames[static_cast<int>(a.op)];
    if (a.op == BinaryOp::div || a.op == BinaryOp::pow) require_floating(op, c.dtype(0));
    check_scalar(op, c.dtype(0), a.scalar);
    c.output(kernels::is_predicate(a.op) ? kBool : c.dtype(0), c.shape(0));
  }
  static void place(const Attrs& a, Place& p) {
    is_linear(a) ? rules::pointwise_linear(p) : rules::pointwise_nonlinear(p);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), binary_scalar, a.op, c.input(0), a.scalar, a.left, c.output(0));
  }
  static void fuse(const Attrs& a, Fuse& f) {
    const Fuse::Value x = f.input(0);
    if (a.op == BinaryOp::pow && a.scalar == 2 && !a.left) return f.yields(f.unary(kernels::UnaryOp::square, x));  // as its own kernel does
    const Fuse::Value scalar = f.constant(a.scalar);
    f.yields(a.left ? f.binary(a.op, scalar, x) : f.binary(a.op, x, scalar));
  }
  static void saves(const Attrs& a, uint64_t, uint64_t& in, uint64_t& out) {
    const bool input = a.op == BinaryOp::minimum || a.op == BinaryOp::maximum ||
                       (a.op == BinaryOp::pow && !a.left) || (a.op == BinaryOp::div && a.left);
    in = input, out = a.left && (a.op == BinaryOp::pow || a.op == BinaryOp::div);
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor& g = c.grad();
    switch (a.op) {
      case BinaryOp::add:
        return c.set(0, g);
      case BinaryOp::sub:
        return c.set(0, a.left ? neg(g) : g);
      case BinaryOp::mul:
        return c.set(0, mul(g, a.scalar));
      case BinaryOp::div:
        return c.set(0, a.left ? neg(div(mul(g, c.output(0)), c.input(0))) : div(g, a.scalar));
      case BinaryOp::pow:
        if (!a.left && a.scalar == 0) return c.set(0, full_of(g.type(), 0.0));
        if (a.left && a.scalar == 0)  // 0ˣ: 0 for x > 0, 1 for 0, else infinite
          return c.set(0, where(le(c.output(0), 1.0), 0.0, mul(mul(g, c.output(0)), std::log(a.scalar))));
        return c.set(
            0, a.left ? mul(mul(g, c.output(0)), std::log(a.scalar))
                      : mul(mul(g, a.scalar == 2 ? c.input(0) : pow(c.input(0), a.scalar - 1)),
                            a.scalar));
      case BinaryOp::minimum:
        return c.set(0, where(le(c.input(0), a.scalar), g, 0.0));
      case BinaryOp::maximum:
        return c.set(0, where(ge(c.input(0), a.scalar), g, 0.0));
      default:
        return;
    }
  }
  static void describe(const Attrs& a, std::string& out) {
    const char* op = kBinaryNames[static_cast<int>(a.op)];
    out += a.left ? str(a.scalar, " ", op) : str(op, " ", a.scalar);
  }
};

Tensor with_scalar(BinaryOp op, const Tensor& x, double scalar, bool left = false) {
  return apply<BinaryScalar>({scalar, op, left}, x);
}

/// x + scalar, x - scalar or scalar - x. To addends the number is added once, not on each rank: as a tensor of one element that is kept
/// on one of them.
template <class Op>
Tensor sum_with_scalar(BinaryOp op, const Tensor& x, double scalar, bool left = false) {
  if (!x.defined() || !has_partial(x.layout())) return with_scalar(op, x, scalar, left);
  check_scalar(kBinaryNames[static_cast<int>(op)], x.dtype(), scalar);
  const DeviceScope device(x.device());
  const Tensor number = full_of({x.dtype(), {}, {}}, scalar);
  return left ? apply<Op>({}, {number, x}) : apply<Op>({}, {x, number});
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) { return apply<Add>({}, {a, b}); }
Tensor sub(const Tensor& a, const Tensor& b) { return apply<Sub>({}, {a, b}); }
Tensor mul(const Tensor& a, const Tensor& b) { return apply<Mul>({}, {a, b}); }
Tensor div(const Tensor& a, const Tensor& b) { return apply<Div>({}, {a, b}); }
Tensor pow(const Tensor& a, const Tensor& b) { return apply<Pow>({}, {a, b}); }
Tensor minimum(const Tensor& a, const Tensor& b) { return apply<Minimum>({}, {a, b}); }
Tensor maximum(const Tensor& a, const Tensor& b) { return apply<Maximum>({}, {a, b}); }
Tensor eq(const Tensor& a, const Tensor& b) { return apply<Eq>({}, {a, b}); }
Tensor ne(const Tensor& a, const Tensor& b) { return apply<Ne>({}, {a, b}); }
Tensor lt(const Tensor& a, const Tensor& b) { return apply<Lt>({}, {a, b}); }
Tensor le(const Tensor& a, const Tensor& b) { return apply<Le>({}, {a, b}); }
Tensor gt(const Tensor& a, const Tensor& b) { return apply<Gt>({}, {a, b}); }
Tensor ge(const Tensor& a, const Tensor& b) { return apply<Ge>({}, {a, b}); }
Tensor logical_and(const Tensor& a, const Tensor& b) { return apply<And>({}, {a, b}); }
Tensor logical_or(const Tensor& a, const Tensor& b) { return apply<Or>({}, {a, b}); }

Tensor add(const Tensor& x, double scalar) { return sum_with_scalar<Add>(BinaryOp::add, x, scalar); }
Tensor sub(const Tensor& x, double scalar) { return sum_with_scalar<Sub>(BinaryOp::sub, x, scalar); }
Tensor sub(double scalar, const Tensor& x) { return sum_with_scalar<Sub>(BinaryOp::sub, x, scalar, true); }
Tensor mul(const Tensor& x, double scalar) { return with_scalar(BinaryOp::mul, x, scalar); }
Tensor div(const Tensor& x, double scalar) { return with_scalar(BinaryOp::div, x, scalar); }
Tensor div(double scalar, const Tensor& x) { return with_scalar(BinaryOp::div, x, scalar, true); }
Tensor pow(const Tensor& x, double exponent) { return with_scalar(BinaryOp::pow, x, exponent); }
Tensor pow(double base, const Tensor& x) { return with_scalar(BinaryOp::pow, x, base, true); }
Tensor minimum(const Tensor& x, double scalar) { return with_scalar(BinaryOp::minimum, x, scalar); }
Tensor maximum(const Tensor& x, double scalar) { return with_scalar(BinaryOp::maximum, x, scalar); }
Tensor eq(const Tensor& x, double scalar) { return with_scalar(BinaryOp::eq, x, scalar); }
Tensor ne(const Tensor& x, double scalar) { return with_scalar(BinaryOp::ne, x, scalar); }
Tensor lt(const Tensor& x, double scalar) { return with_scalar(BinaryOp::lt, x, scalar); }
Tensor le(const Tensor& x, double scalar) { return with_scalar(BinaryOp::le, x, scalar); }
Tensor gt(const Tensor& x, double scalar) { return with_scalar(BinaryOp::gt, x, scalar); }
Tensor ge(const Tensor& x, double scalar) { return with_scalar(BinaryOp::ge, x, scalar); }

namespace ops {

Tensor sum_to(const Tensor& gradient, const Type& operand) {
  const Shape &have = gradient.shape(), &want = operand.shape;
  if (have == want) return gradient;
  const int extra = have.rank() - want.rank();
  Dims dims;
  bool inner = false;
  for (int i = 0; i < have.rank(); ++i) {
    if (i >= extra && want[i - extra] == have[i]) continue;
    dims.push_back(i);
    inner = inner || i >= extra;
  }
  if (!inner) return sum(gradient, dims);
  Dims leading;
  for (int i = 0; i < extra; ++i) leading.push_back(i);
  return squeeze(sum(gradient, dims, true), leading);
}

Tensor sliced_to_dual(const Tensor& gradient, const Type& value) {
  const Layout& have = gradient.layout();
  if (!have.mesh() || !value.layout.mesh()) return gradient;
  Layout to = have;
  const Layout dual = value.layout.dual();
  for (int i = 0; i < to.num_axes(); ++i)
    if (dual[i].is_shard() && have[i].is_replicate() && can_slice(have, i, dual[i])) to[i] = dual[i];
  return redistribute(gradient, to);
}

}  // namespace ops
}  // namespace sheaf
