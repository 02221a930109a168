#include "sheaf/kernels/elementwise.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels in f64, which have their own tests: fresh random inputs, poisoned outputs.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

constexpr UnaryOp kUnaryOps[] = {
    UnaryOp::neg,        UnaryOp::exp,        UnaryOp::log,      UnaryOp::sqrt,
    UnaryOp::rsqrt,      UnaryOp::reciprocal, UnaryOp::tanh,     UnaryOp::sigmoid,
    UnaryOp::abs,        UnaryOp::relu,       UnaryOp::silu,     UnaryOp::gelu_tanh,
    UnaryOp::gelu_exact, UnaryOp::square,     UnaryOp::isfinite, UnaryOp::logical_not,
    UnaryOp::sign,       UnaryOp::sin,        UnaryOp::cos,      UnaryOp::softplus,
    UnaryOp::floor,      UnaryOp::round,      UnaryOp::log1p,    UnaryOp::expm1,
    UnaryOp::erf};

struct Layout2 {
  Shape shape, strides;  // no strides: dense
};
// Dense, with gaps, with permuted dimensions, both.
const Layout2 kLayouts[] = {
    {{3, 5}, {}},      {{2, 3, 700}, {}}, {{7, 33}, {40, 1}},
    {{7, 33}, {1, 7}}, {{7, 33}, {1, 9}}, {{5, 3, 2, 11}, {400, 1, 198, 18}},
    {{}, {}},          {{0, 4}, {}},      {{1}, {}}};

TEST(CudaElementwise, Unary) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Layout2& layout : kLayouts)
      for (UnaryOp op : kUnaryOps) {
        Array x = Array::random(d, layout.shape, 1, 1, layout.strides);
        if (op == UnaryOp::log || op == UnaryOp::sqrt || op == UnaryOp::rsqrt || op == UnaryOp::log1p)
          for (int64_t i = 0; i < x.view().numel(); ++i) x.set(i, std::fabs(x.at(i)) + 0.01);
        const DType to = is_predicate(op) ? kBool : d;
        const Array blank(to, layout.shape, layout.strides),
            want(is_predicate(op) ? kBool : kF64, layout.shape);
        const OnGpu gx(x), gy(blank);
        cuda::unary(OnGpu::stream(), op, gx, gy);
        const Array y = gy.back();
        cpu::unary(op, in_f64(x), want);
        EXPECT_LT(scaled_error(y, values(want)), 4 * epsilon(d))
            << name(d) << ' ' << static_cast<int>(op) << layout.shape.to_string();
        EXPECT_TRUE(gaps_kept(blank, y)) << layout.shape.to_string();
      }
}

TEST(CudaElementwise, BinaryAndBroadcast) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF64, kI32})
    for (int op = 0; op <= static_cast<int>(BinaryOp::logical_or); ++op) {
      const auto kind = static_cast<BinaryOp>(op);
      if (d == kI32 && (kind == BinaryOp::div || kind == BinaryOp::pow)) continue;
      const Shape shape{4, 37};
      Array a = Array::random(d, shape, 1, 3), b = Array::random(d, shape, 2, 3),
            row = Array::random(d, shape, 3, 3, {0, 1});
      if (kind == BinaryOp::pow)
        for (int64_t i = 0; i < a.view().numel(); ++i) a.set(i, std::fabs(a.at(i)) + 0.1);
      for (const Array& second : {b, row}) {
        const DType to = is_predicate(kind) ? kBool : d, wide = d == kI32 ? kI64 : kF64;
        const Array blank(to, shape), want(is_predicate(kind) ? kBool : wide, shape);
        const OnGpu ga(a), gb(second), gc(blank);
        cuda::binary(OnGpu::stream(), kind, ga, gb, gc);
        Array wide_a(wide, shape), wide_b(wide, shape);
        wide_a.fill([&](int64_t i) { return a.at(i); }),
            wide_b.fill([&](int64_t i) { return second.at(i); });
        cpu::binary(kind, wide_a, wide_b, want);
        EXPECT_LT(scaled_error(gc.back(), values(want)), 2 * epsilon(d)) << name(d) << ' ' << op;
      }
      const Array blank(is_predicate(kind) ? kBool : d, shape), want(blank.view().dtype, shape);
      for (bool left : {false, true}) {
        const OnGpu ga(a), gc(blank);
        cuda::binary_scalar(OnGpu::stream(), kind, ga, 2.0, left, gc);
        cpu::binary_scalar(kind, a, 2.0, left, want);
        EXPECT_LT(scaled_error(gc.back(), values(want)), 2 * epsilon(d)) << name(d) << ' ' << op;
      }
    }
}

// Operands that are constant along rows, columns or altogether, of another dtype, and outputs that alias operands.
TEST(CudaElementwise, BroadcastOfWholePieces) {
  SHEAF_NEEDS_GPU();
  const Shape shape{6, 5, 48};
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (DType other : {d, kF32, kF64})
      for (const Shape& strides : {Shape{0, 48, 1}, {0, 0, 1}, {5, 1, 0}, {0, 0, 0}, {0, 56, 1}})
        for (const Shape& gaps : {Shape{}, {240, 48, 1}, {5 * 56, 56, 1}, {5 * 50, 50, 1}}) {
          const Array a = Array::random(d, shape, 1, 1, gaps),
                      b = Array::random(other, shape, 2, 1, strides), blank(d, shape, gaps),
                      want(d, shape, gaps);
          const OnGpu ga(a), gb(b), gc(blank);
          cpu::binary(BinaryOp::mul, a, b, want);
          cuda::binary(OnGpu::stream(), BinaryOp::mul, ga, gb, gc);
          const Array c = gc.back();
          EXPECT_EQ(values(c), values(want)) << name(d) << name(other) << strides.to_string();
          EXPECT_TRUE(gaps_kept(blank, c));
          cuda::binary(OnGpu::stream(), BinaryOp::mul, gb, ga, ga);
          EXPECT_EQ(values(ga.back()), values(want)) << name(d) << name(other);
        }
}

TEST(CudaElementwise, WhereClampAndMixedTypes) {
  SHEAF_NEEDS_GPU();
  const Shape shape{5, 41};
  Array cond(kBool, shape);
  cond.fill([](int64_t i) { return i % 3 == 0; });
  const Array a = Array::random(kF32, shape, 1), b = Array::random(kF32, shape, 2),
              out(kF32, shape), want(kF32, shape);
  const OnGpu gcond(cond), ga(a), gb(b), gout(out);
  cuda::where(OnGpu::stream(), gcond, ga, gb, gout);
  cpu::where(cond, a, b, want);
  EXPECT_TRUE(same_bits(gout.back(), want));
  for (bool first : {false, true}) {
    cuda::where_scalar(OnGpu::stream(), gcond, ga, 0.1, first, gout);
    cpu::where_scalar(cond, a, 0.1, first, want);
    EXPECT_TRUE(same_bits(gout.back(), want));
  }
  cuda::clamp(OnGpu::stream(), ga, -0.5, 0.25, gout);
  cpu::clamp(a, -0.5, 0.25, want);
  EXPECT_TRUE(same_bits(gout.back(), want));
  Array whole(kI32, shape), whole_out(kI32, shape), whole_want(kI32, shape);
  whole.fill([](int64_t i) { return static_cast<double>(i % 19 - 9); });
  const OnGpu gwhole(whole), gwhole_out(whole_out);
  cuda::clamp(OnGpu::stream(), gwhole, -2.5, 1e30, gwhole_out);
  cpu::clamp(whole, -2.5, 1e30, whole_want);
  EXPECT_TRUE(same_bits(gwhole_out.back(), whole_want));
  // f32 and bf16 compute in f32 and round once.
  const Array narrow = Array::random(kBF16, shape, 4), sum(kBF16, shape), sum_want(kBF16, shape);
  const OnGpu gnarrow(narrow), gsum(sum);
  cuda::binary(OnGpu::stream(), BinaryOp::add, ga, gnarrow, gsum);
  cpu::binary(BinaryOp::add, a, narrow, sum_want);
  EXPECT_TRUE(same_bits(gsum.back(), sum_want));
}

TEST(CudaElementwise, Backwards) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Layout2& layout : kLayouts) {
      const Array x = Array::random(d, layout.shape, 1, 1, layout.strides),
                  dy = Array::random(d, layout.shape, 2, 1, layout.strides),
                  up = Array::random(d, layout.shape, 3);
      const Array wx = in_f64(x), wdy = in_f64(dy), wup = in_f64(up);
      const auto compare = [&](const char* what, auto on_gpu, auto on_cpu) {
        const Array blank(d, layout.shape, layout.strides), want(kF64, layout.shape);
        const OnGpu gx(x), gdy(dy), gdx(blank);
        on_gpu(gx, gdy, gdx), on_cpu(wx, wdy, want);
        EXPECT_LT(scaled_error(gdx.back(), values(want)), 8 * epsilon(d))
            << what << ' ' << name(d) << layout.shape.to_string();
      };
      const Stream& s = OnGpu::stream();
      using enum BackwardOp;
      for (BackwardOp op : {gelu_tanh, gelu_exact, silu, relu, tanh, sigmoid})
        compare(
            "activation_backward",
            [&](auto& a, auto& b, auto& c) { cuda::activation_backward(s, op, a, b, c); },
            [&](auto& a, auto& b, auto& c) { cpu::activation_backward(op, a, b, c); });
      compare(
          "swiglu", [&](auto& a, auto& b, auto& c) { cuda::swiglu(s, a, b, c); },
          [](auto& a, auto& b, auto& c) { cpu::swiglu(a, b, c); });
      compare(
          "clamped_swiglu", [&](auto& a, auto& b, auto& c) { cuda::clamped_swiglu(s, a, b, 1.702, 0.75, c); },
          [](auto& a, auto& b, auto& c) { cpu::clamped_swiglu(a, b, 1.702, 0.75, c); });
      const Array blank(d, layout.shape), want_gate(kF64, layout.shape),
          want_up(kF64, layout.shape);
      const OnGpu gx(x), gup(up), gdy(dy), dgate(blank), dup(blank);
      const auto compare_both = [&](const char* what) {
        EXPECT_LT(scaled_error(dgate.back(), values(want_gate)), 8 * epsilon(d))
            << what << ' ' << name(d) << layout.shape.to_string();
        EXPECT_LT(scaled_error(dup.back(), values(want_up)), 8 * epsilon(d))
            << what << ' ' << name(d) << layout.shape.to_string();
      };
      cuda::swiglu_backward(s, gx, gup, gdy, dgate, dup);
      cpu::swiglu_backward(wx, wup, wdy, want_gate, want_up);
      compare_both("swiglu_backward");
      cuda::clamped_swiglu_backward(s, gx, gup, gdy, 1.702, 0.75, dgate, dup);
      cpu::clamped_swiglu_backward(wx, wup, wdy, 1.702, 0.75, want_gate, want_up);
      compare_both("clamped_swiglu_backward");
    }
}

// At the limits, beyond them, and for NaN, with infinite gradients: as on the CPU, where this has its own tests.
TEST(CudaElementwise, ClampedSwigluAtTheLimits) {
  SHEAF_NEEDS_GPU();
  const double some[] = {2, -2, 2.5, -2.5, INFINITY, -INFINITY, NAN, 0.5};
  const Shape shape{8, 8, 2};
  Array gate(kF32, shape), up(kF32, shape), dy(kF32, shape);
  gate.fill([&](int64_t i) { return some[i / 16]; });
  up.fill([&](int64_t i) { return some[i / 2 % 8]; });
  dy.fill([](int64_t i) { return i % 2 ? INFINITY : 0.5; });
  const Array y(kF32, shape), dgate(kF32, shape), dup(kF32, shape), want_y(kF32, shape), want_gate(kF32, shape), want_up(kF32, shape);
  const OnGpu g(gate), u(up), d(dy), gy(y), gdgate(dgate), gdup(dup);
  cuda::clamped_swiglu(OnGpu::stream(), g, u, 1.702, 2, gy);
  cuda::clamped_swiglu_backward(OnGpu::stream(), g, u, d, 1.702, 2, gdgate, gdup);
  cpu::clamped_swiglu(gate, up, 1.702, 2, want_y);
  cpu::clamped_swiglu_backward(gate, up, dy, 1.702, 2, want_gate, want_up);
  const auto expect_same = [](const char* what, const Array& got, const Array& want) {
    for (int64_t i = 0; i < got.view().numel(); ++i) {
      const double is = got.at(i), should = want.at(i);
      EXPECT_TRUE(is == should || (std::isnan(is) && std::isnan(should)) || std::fabs(is - should) <= 8 * epsilon(kF32) * std::fabs(should))
          << what << ' ' << i << ": " << is << ", not " << should;
    }
  };
  expect_same("y", gy.back(), want_y), expect_same("dgate", gdgate.back(), want_gate), expect_same("dup", gdup.back(), want_up);
}

}  // namespace
}  // namespace sheaf::kernels
