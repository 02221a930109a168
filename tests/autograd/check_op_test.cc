// Tests of the op checks themselves: ops with one deliberate mistake each, defined as a user would define them, and the check that must
// find it. The same op without the mistake passes all checks.
#include "sheaf/tests/check_op.h"

#include <gmock/gmock.h>

#include "sheaf/autograd/ops.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

enum class Mistake : int32_t {
  none,
  gradient_scale,      // the derivative is off by a factor
  constant_gradient,   // the backward treats an input as a constant: first derivatives are right, second are not
  ignores_strides,     // the kernel reads its input as if it were dense
  gradient_strides,    // the backward kernel does so with the incoming gradient
  skips_last,          // one element of the output is not written
  low_precision,       // f32 computes with a rounded intermediate
  accepts_partial,     // the rule applies a nonlinearity to Partial values
  wrong_output,        // the rule says that a sum over a cut dimension is whole
  not_dual,            // the gradient's placement is not the dual
  refuses_all,         // the demanded rule is missing
  nameless_refusal,    // the error does not name op, axis and rules
  communicates,        // the backward gathers, which no rule needs
  one_axis_only,       // cuts on two axes together give other values
  refuses_second_cut,  // cuts on two axes together are refused
  remembers,           // not a function of its inputs: cannot be replayed
};

template <class T>
double get(const View& v, int64_t i, bool dense) {
  int64_t at = dense ? i : 0;
  for (int d = v.rank() - 1, rest = static_cast<int>(i); d >= 0 && !dense; --d) {
    at += rest % v.shape[d] * v.strides[d];
    rest /= static_cast<int>(v.shape[d]);
  }
  return static_cast<double>(static_cast<float>(v.as<T>()[at]));
}

double value_at(const View& v, int64_t i, bool dense) {
  if (v.dtype == kBF16) return get<bf16>(v, i, dense);
  if (v.dtype == kF32) return get<float>(v, i, dense);
  View halves = v;  // f64: get() rounds to f32, so it is read here
  int64_t at = dense ? i : 0;
  int64_t rest = i;
  for (int d = v.rank() - 1; d >= 0 && !dense; --d) at += rest % v.shape[d] * v.strides[d], rest /= v.shape[d];
  return halves.as<double>()[at];
}

void put(const View& v, int64_t i, double x) {
  if (v.dtype == kBF16) v.as<bf16>()[i] = bf16(static_cast<float>(x));
  else if (v.dtype == kF32) v.as<float>()[i] = static_cast<float>(x);
  else v.as<double>()[i] = x;
}

int calls = 0;

int cuts(const Type& type) {
  int n = 0;
  for (int a = 0; a < type.layout.num_axes(); ++a) n += type.layout[a].is_shard() && !type.layout[a].is_single();
  return n;
}

struct SquareGradient {  // 2 x g
  static constexpr const char* kName = "my_square_backward";
  struct Attrs { Mistake mistake; };
  static constexpr uint64_t kSavedInputs = 3;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs& a, Place& p) {
    if (a.mistake == Mistake::not_dual) {
      if (const OwnershipMap* map = p.sharded()) {
        p.rule({Placement::shard(*map), Placement::shard(*map)}, {Placement::partial()});
        return;
      }
    }
    rules::pointwise_multilinear(p);
  }
  static void execute(const Attrs& a, Execute& c) {
    const double scale = a.mistake == Mistake::gradient_scale ? 2.001 : 2;
    for (int64_t i = 0; i < c.output(0).numel(); ++i)
      put(c.output(0), i, scale * value_at(c.input(0), i, false) *
                              value_at(c.input(1), i, a.mistake == Mistake::gradient_strides));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (a.mistake != Mistake::constant_gradient) c.set(0, mul(mul(c.input(1), 2), c.grad()));
    else c.set(0, mul(c.grad(), 0));
    c.set(1, mul(mul(c.input(0), 2), c.grad()));
  }
};

struct Square {
  static constexpr const char* kName = "my_square";
  struct Attrs { Mistake mistake; };
  static constexpr uint64_t kSavedInputs = 1;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs& a, Place& p) {
    if (a.mistake == Mistake::nameless_refusal && p.in(0).is_partial()) fail<PlacementError>("no");
    if (a.mistake == Mistake::refuses_all) return rules::replicate_only(p);
    if (a.mistake == Mistake::refuses_second_cut && cuts(p.type(0)) > 1) return rules::replicate_only(p);
    rules::pointwise_nonlinear(p);
    if (a.mistake == Mistake::accepts_partial) p.rule({Placement::partial()}, {Placement::partial()});
  }
  static void execute(const Attrs& a, Execute& c) {
    const int64_t n = c.output(0).numel();
    for (int64_t i = 0; i < (a.mistake == Mistake::skips_last ? n - 1 : n); ++i) {
      double x = value_at(c.input(0), i, a.mistake == Mistake::ignores_strides);
      if (a.mistake == Mistake::low_precision && c.input(0).dtype == kF32)
        x = static_cast<double>(static_cast<float>(bf16(static_cast<float>(x))));
      if (a.mistake == Mistake::remembers) x += ++calls;
      if (a.mistake == Mistake::one_axis_only && cuts(c.input_type(0)) > 1) x += 1;
      put(c.output(0), i, x * x);
    }
  }
  static void vjp(const Attrs& a, Vjp& c) {
    Tensor g = apply<SquareGradient>({a.mistake}, {c.input(0), c.grad()});
    if (a.mistake == Mistake::communicates && g.layout().mesh() && g.layout()[0].is_shard())
      g = redistribute(redistribute(g, g.layout().with(0, Placement::replicate())), g.layout());
    c.set(0, g);
  }
};

struct Total {  // the sum of a vector
  static constexpr const char* kName = "my_total";
  struct Attrs { Mistake mistake; };
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), {}); }
  static void place(const Attrs& a, Place& p) {
    const Placement cut = a.mistake == Mistake::wrong_output ? Placement::replicate() : Placement::partial();
    if (const OwnershipMap* map = p.sharded()) p.rule({Placement::shard(*map)}, {cut});
    rules::pointwise_linear(p);
  }
  static void execute(const Attrs&, Execute& c) {
    double sum = 0;
    for (int64_t i = 0; i < c.input(0).numel(); ++i) sum += value_at(c.input(0), i, false);
    put(c.output(0), 0, sum);
  }
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, redistribute(expand(c.grad(), c.input_type(0).shape), c.input_type(0).dual().layout));  // at most a slice
  }
};

OpSample square(Mistake mistake) {
  return {.op = "my_square", .inputs = {{3, 5}}, .f = [=](Args x) { return apply<Square>({mistake}, x[0]); },
          .rules = {"S0 -> S0"}};
}

OpSample total(Mistake mistake) {
  return {.op = "my_total", .inputs = {{7}}, .f = [=](Args x) { return apply<Total>({mistake}, x[0]); },
          .exact = true, .rules = {"S0 -> P"}};
}

TEST(CheckOp, RightOpsPass) {
  EXPECT_EQ(check_op(square(Mistake::none)), "");
  EXPECT_EQ(check_op(total(Mistake::none)), "");
  EXPECT_EQ(check_op<Total>({Mistake::none}, {{7}}, {.exact = true}), "");
  EXPECT_THAT(check_op<Total>({Mistake::wrong_output}, {{7}}, {.exact = true}), HasSubstr("[my_total] placements"));
}

TEST(CheckOp, FindsWrongDerivatives) {
  EXPECT_THAT(check_gradient(square(Mistake::gradient_scale)), HasSubstr("central difference"));
  EXPECT_EQ(check_gradient(square(Mistake::constant_gradient)), "");
  EXPECT_THAT(check_second_gradient(square(Mistake::constant_gradient)), HasSubstr("central difference"));
}

TEST(CheckOp, FindsAMissingSecondDerivative) {
  OpSample sample = square(Mistake::none);
  sample.no_second = "my_square_backward";
  EXPECT_THAT(check_second_gradient(sample), HasSubstr("works, though"));
}

TEST(CheckOp, FindsIgnoredStrides) {
  EXPECT_THAT(check_strides(square(Mistake::ignores_strides)), HasSubstr("transposed f64: output 0"));
  EXPECT_THAT(check_strides(square(Mistake::gradient_strides)), HasSubstr("gradient 0"));
}

TEST(CheckOp, FindsMemoryThatIsNotWritten) {
  EXPECT_THAT(check_precision(square(Mistake::skips_last), kF32), HasSubstr("output 0 is off by"));
}

TEST(CheckOp, FindsLostPrecision) {
  EXPECT_THAT(check_precision(square(Mistake::low_precision), kF32), HasSubstr("output 0 is off by"));
  EXPECT_EQ(check_precision(square(Mistake::none), kF32), "");
}

TEST(CheckOp, FindsWrongPlacementRules) {
  EXPECT_THAT(check_placements(square(Mistake::accepts_partial), 3), HasSubstr("(P) at 3 ranks: "));
  EXPECT_THAT(check_placements(total(Mistake::wrong_output), 2), HasSubstr("(S0) at 2 ranks"));
  EXPECT_EQ(check_placements(total(Mistake::wrong_output), 1), "");
  EXPECT_THAT(check_placements(square(Mistake::not_dual), 2), HasSubstr("is not the dual of its value"));
  EXPECT_THAT(check_placements(square(Mistake::refuses_all), 2), HasSubstr("the rule S0 -> S0 is missing"));
  EXPECT_THAT(check_placements(square(Mistake::nameless_refusal), 2),
              HasSubstr("the refusal should name op, mesh axis and accepted rules: no"));
  EXPECT_THAT(check_placements(square(Mistake::communicates), 2), HasSubstr("it communicates: all_gather"));
}

TEST(CheckOp, FindsRulesThatHoldOnOneAxisOnly) {
  for (const Mistake mistake : {Mistake::one_axis_only, Mistake::refuses_second_cut})
    EXPECT_EQ(check_placements(square(mistake), 3), "");
  EXPECT_THAT(check_axes(square(Mistake::one_axis_only)), HasSubstr("(S0 S0) at 2 x 2 ranks: output 0 is off"));
  EXPECT_THAT(check_axes(square(Mistake::refuses_second_cut)),
              HasSubstr("refused, though each axis alone is accepted: [my_square] on mesh axis data"));
}

TEST(CheckOp, FindsTapesThatDoNotReplay) {
  EXPECT_THAT(check_tape(square(Mistake::remembers)), HasSubstr("replay gives another"));
}

}  // namespace
}  // namespace sheaf::testing
