// Elementwise functions of one operand.
#include <numbers>

#include "sheaf/autograd/fuse.h"
#include "sheaf/autograd/ops/common.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf {
namespace {

using kernels::UnaryOp;
using namespace ops;

template <class Op, UnaryOp kKernel, bool kIntegers = false>
struct Unary {
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) {
    if (!kIntegers) require_floating(Op::kName, c.dtype(0));
    c.output(kernels::is_predicate(kKernel) ? kBool : c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), unary, kKernel, c.input(0), c.output(0));
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.unary(kKernel, f.input(0))); }
};

struct Neg : Unary<Neg, UnaryOp::neg, true> {
  static constexpr const char* kName = "neg";
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static void vjp(const Attrs&, Vjp& c) { c.set(0, neg(c.grad())); }
};
struct Exp : Unary<Exp, UnaryOp::exp> {
  static constexpr const char* kName = "exp";
  static constexpr uint64_t kSavedOutputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(c.grad(), c.output(0))); }
};
struct Log : Unary<Log, UnaryOp::log> {
  static constexpr const char* kName = "log";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, div(c.grad(), c.input(0))); }
};
struct Sqrt : Unary<Sqrt, UnaryOp::sqrt> {
  static constexpr const char* kName = "sqrt";
  static constexpr uint64_t kSavedOutputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(div(c.grad(), c.output(0)), 0.5)); }
};
struct Rsqrt : Unary<Rsqrt, UnaryOp::rsqrt> {
  static constexpr const char* kName = "rsqrt";
  static constexpr uint64_t kSavedOutputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) {  // y = x^-1/2, dy/dx = -y^3 / 2
    const Tensor y = c.output(0);
    c.set(0, mul(c.grad(), mul(mul(square(y), y), -0.5)));
  }
};
struct Square : Unary<Square, UnaryOp::square, true> {
  static constexpr const char* kName = "square";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(c.grad(), mul(c.input(0), 2.0))); }
};
struct Abs : Unary<Abs, UnaryOp::abs, true> {
  static constexpr const char* kName = "abs";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(c.grad(), sign(c.input(0)))); }
};
struct Sign : Unary<Sign, UnaryOp::sign, true> {
  static constexpr const char* kName = "sign";
  static void vjp(const Attrs&, Vjp&) {}  // the derivative is zero wherever it exists
};
struct Floor : Unary<Floor, UnaryOp::floor> {
  static constexpr const char* kName = "floor";
  static void vjp(const Attrs&, Vjp&) {}  // likewise
};
struct Round : Unary<Round, UnaryOp::round> {
  static constexpr const char* kName = "round";
  static void vjp(const Attrs&, Vjp&) {}
};
struct Sin : Unary<Sin, UnaryOp::sin> {
  static constexpr const char* kName = "sin";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(c.grad(), cos(c.input(0)))); }
};
struct Cos : Unary<Cos, UnaryOp::cos> {
  static constexpr const char* kName = "cos";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, neg(mul(c.grad(), sin(c.input(0))))); }
};
struct Log1p : Unary<Log1p, UnaryOp::log1p> {
  static constexpr const char* kName = "log1p";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, div(c.grad(), add(c.input(0), 1.0))); }
};
struct Expm1 : Unary<Expm1, UnaryOp::expm1> {
  static constexpr const char* kName = "expm1";
  static constexpr uint64_t kSavedInputs = 0b1;  // not the output: 1 + y has lost exp(x) where that is small
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(c.grad(), exp(c.input(0)))); }
};
struct Erf : Unary<Erf, UnaryOp::erf> {
  static constexpr const char* kName = "erf";
  static constexpr uint64_t kSavedInputs = 0b1;
  static void vjp(const Attrs&, Vjp& c) { c.set(0, mul(c.grad(), mul(exp(neg(square(c.input(0)))), 2 * std::numbers::inv_sqrtpi))); }
};
struct IsFinite : Unary<IsFinite, UnaryOp::isfinite, true> {
  static constexpr const char* kName = "isfinite";
};
struct Not : Unary<Not, UnaryOp::logical_not, true> {
  static constexpr const char* kName = "logical_not";
};

/// Conversion between dtypes; linear between floating types.
struct Cast {
  static constexpr const char* kName = "cast";
  static constexpr bool kRecipe = true;
  struct Attrs {
    DType to;
  };
  static void infer(const Attrs& a, Infer& c) { c.output(a.to, c.shape(0)); }
  static void place(const Attrs& a, Place& p) {
    is_floating(a.to) && is_floating(p.type(0).dtype) ? rules::pointwise_linear(p)
                                                      : rules::pointwise_nonlinear(p);
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), copy, c.input(0), c.output(0));
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.cast(f.input(0))); }
  static void vjp(const Attrs&, Vjp& c) { c.set(0, cast(c.grad(), c.input_type(0).dtype)); }
  static void describe(const Attrs& a, std::string& out) { out += name(a.to); }
};

/// min(max(x, lo), hi); the gradient passes where lo <= x <= hi.
struct Clamp {
  static constexpr const char* kName = "clamp";
  struct Attrs {
    double lo, hi;
  };
  static constexpr uint64_t kSavedInputs = 0b1;
  static void infer(const Attrs& a, Infer& c) {
    check<ConfigError>(a.lo <= a.hi, "[clamp] bounds ", a.lo, " and ", a.hi, " are not in order");
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), clamp, c.input(0), a.lo, a.hi, c.output(0));
  }
  static void fuse(const Attrs& a, Fuse& f) { f.yields(f.clamp(f.input(0), a.lo, a.hi)); }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor x = c.input(0);
    c.set(0, where(logical_and(ge(x, a.lo), le(x, a.hi)), c.grad(), 0.0));
  }
  static void describe(const Attrs& a, std::string& out) { out += str(a.lo, " ", a.hi); }
};

/// cond ? a : b, with broadcasting.
struct Where {
  static constexpr const char* kName = "where";
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b1;
  static void infer(const Attrs&, Infer& c) {
    c.output(common_dtype(kName, c, 1), broadcast_inputs(kName, c));
  }
  static void place(const Attrs&, Place& p) {
    rules::pointwise_nonlinear(p);
    p.rule({kR, kP, kP}, {kP});
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), where, broadcast_input(c, 0), broadcast_input(c, 1),
                 broadcast_input(c, 2), c.output(0));
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.where(f.input(0), f.input(1), f.input(2))); }
  static void vjp(const Attrs&, Vjp& c) {
    if (c.needs(1)) c.set(1, sum_to(where(c.input(0), c.grad(), 0.0), c.input_type(1)));
    if (c.needs(2)) c.set(2, sum_to(where(c.input(0), 0.0, c.grad()), c.input_type(2)));
  }
};

/// cond ? x : other, or cond ? other : x; linear in x if other is 0.
struct WhereScalar {
  static constexpr const char* kName = "where_scalar";
  struct Attrs {
    double other;
    bool first;  ///< the scalar is the first choice
    char unused[7] = {};
  };
  static constexpr uint64_t kSavedInputs = 0b1;
  static void infer(const Attrs& a, Infer& c) {
    check_scalar("where", c.dtype(1), a.other);
    c.output(c.dtype(1), broadcast_inputs("where", c));
  }
  static void place(const Attrs& a, Place& p) {
    a.other == 0 ? pointwise_linear_in(p, 1) : rules::pointwise_nonlinear(p);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), where_scalar, broadcast_input(c, 0), broadcast_input(c, 1), a.other, a.first != 0,
                    c.output(0));
  }
  static void fuse(const Attrs& a, Fuse& f) {
    const Fuse::Value cond = f.input(0), x = f.input(1), other = f.constant(a.other);
    f.yields(a.first ? f.where(cond, other, x) : f.where(cond, x, other));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (!c.needs(1)) return;
    const Tensor g = a.first ? where(c.input(0), 0.0, c.grad()) : where(c.input(0), c.grad(), 0.0);
    c.set(1, sum_to(g, c.input_type(1)));
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str(a.first ? "" : "else ", a.other);
  }
};

}  // namespace

Tensor neg(const Tensor& x) { return apply<Neg>({}, x); }
Tensor exp(const Tensor& x) { return apply<Exp>({}, x); }
Tensor log(const Tensor& x) { return apply<Log>({}, x); }
Tensor sqrt(const Tensor& x) { return apply<Sqrt>({}, x); }
Tensor rsqrt(const Tensor& x) { return apply<Rsqrt>({}, x); }
Tensor square(const Tensor& x) { return apply<Square>({}, x); }
Tensor abs(const Tensor& x) { return apply<Abs>({}, x); }
Tensor sign(const Tensor& x) { return apply<Sign>({}, x); }
Tensor floor(const Tensor& x) { return apply<Floor>({}, x); }
Tensor round(const Tensor& x) { return apply<Round>({}, x); }
Tensor sin(const Tensor& x) { return apply<Sin>({}, x); }
Tensor cos(const Tensor& x) { return apply<Cos>({}, x); }
Tensor log1p(const Tensor& x) { return apply<Log1p>({}, x); }
Tensor expm1(const Tensor& x) { return apply<Expm1>({}, x); }
Tensor erf(const Tensor& x) { return apply<Erf>({}, x); }
Tensor isfinite(const Tensor& x) { return apply<IsFinite>({}, x); }
Tensor logical_not(const Tensor& x) { return apply<Not>({}, x); }
Tensor cast(const Tensor& x, DType dtype) {
  expect_defined("cast", x);
  return x.dtype() == dtype ? x : apply<Cast>({dtype}, x);
}
Tensor clamp(const Tensor& x, double lo, double hi) { return apply<Clamp>({lo, hi}, x); }
Tensor where(const Tensor& cond, const Tensor& a, const Tensor& b) {
  return apply<Where>({}, {cond, a, b});
}
Tensor where(const Tensor& cond, const Tensor& a, double b) {
  return apply<WhereScalar>({b, false}, {cond, a});
}
Tensor where(const Tensor& cond, double a, const Tensor& b) {
  return apply<WhereScalar>({a, true}, {cond, b});
}

}  // namespace sheaf
