#include "sheaf/kernels/causal_conv.h"

#include <gmock/gmock.h>

#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels {
SHEAF_SIMD_DECLARE(causal_conv)
SHEAF_SIMD_DECLARE(causal_conv_backward)

namespace {

using namespace sheaf::testing;

struct Operands {
  Array x, weight, dy, begins;
  bool silu;
  CausalConvOperands view() const { return {x, weight, begins.bytes() ? begins.view() : View{}, silu}; }
};
struct Results {
  Array y, dx, dweight;
};

Operands random(DType d, const Shape& s, int64_t taps, bool silu, const Shape& strides = {}) {
  return {Array::random(d, s, 1, 1, strides), Array::random(d, {s[2], taps}, 2), Array::random(d, s, 3, 1, strides), {}, silu};
}
Operands with_documents(Operands o, const std::vector<int64_t>& begin_at) {
  const Shape s = o.x.view().shape;
  o.begins = Array(kI32, {s[0], s[1]});
  for (int64_t i = 0; i < s[0] * s[1]; ++i) {
    int64_t begin = 0;
    for (const int64_t b : begin_at)
      if (b <= i % s[1]) begin = b;
    o.begins.set(i, static_cast<double>(begin));
  }
  return o;
}

template <class Forward, class Backward>
Results computed(const Operands& o, Forward&& forward, Backward&& backward) {
  Results r{like(o.x), like(o.x), Array(statistics_of(o.x.view().dtype), o.weight.view().shape)};
  forward(o.view(), r.y);
  std::vector<char> scratch(cpu::causal_conv_backward_workspace(o.view(), o.dy, r.dx, r.dweight), '\xff');
  backward(o.view(), o.dy, r.dx, r.dweight, Workspace{scratch.data(), scratch.size()});
  return r;
}
Results on_cpu(const Operands& o) { return computed(o, cpu::causal_conv, cpu::causal_conv_backward); }

void expect_same(const Results& a, const Results& b) {
  EXPECT_TRUE(same_bits(a.y, b.y));
  EXPECT_TRUE(same_bits(a.dx, b.dx));
  EXPECT_TRUE(same_bits(a.dweight, b.dweight));
}

// In f64, by the formula in the header.
Results in_reference(const Operands& o) {
  const Shape s = o.x.view().shape;
  const int64_t T = s[1], C = s[2], W = o.weight.view().shape[1];
  Results r{Array(kF64, s), Array(kF64, s), Array(kF64, {C, W})};
  r.dx.fill([](int64_t) { return 0.0; }), r.dweight.fill([](int64_t) { return 0.0; });
  for (int64_t i = 0; i < s.numel(); ++i) {
    const int64_t c = i % C, t = i / C % T, row = i / C - t, begin = o.begins.bytes() ? static_cast<int64_t>(o.begins.at(i / C)) : 0;
    double m = 0;
    for (int64_t j = 0; j < W; ++j)
      if (const int64_t from = t - W + 1 + j; from >= begin) m += o.weight.at(c * W + j) * o.x.at((row + from) * C + c);
    const double sigmoid = 1 / (1 + std::exp(-m)), g = o.dy.at(i) * (o.silu ? sigmoid * (1 + m * (1 - sigmoid)) : 1);
    r.y.set(i, o.silu ? m * sigmoid : m);
    for (int64_t j = 0; j < W; ++j)
      if (const int64_t from = t - W + 1 + j; from >= begin) {
        const int64_t at = (row + from) * C + c;
        r.dx.set(at, r.dx.at(at) + g * o.weight.at(c * W + j)), r.dweight.set(c * W + j, r.dweight.at(c * W + j) + g * o.x.at(at));
      }
  }
  return r;
}

void compare(const Operands& o) {
  const DType d = o.x.view().dtype;
  const std::string what = str(d, o.x.view().shape);
  const double bound = d == kF64 ? 1e-14 : d == kF32 ? 2e-6 : epsilon(d);
  const Results got = on_cpu(o), want = in_reference(o);
  EXPECT_LT(scaled_error(got.y, values(want.y)), bound) << what;
  EXPECT_LT(scaled_error(got.dx, values(want.dx)), bound) << what;
  EXPECT_LT(scaled_error(got.dweight, values(want.dweight)), d == kF64 ? 1e-14 : 2e-6) << what;
}

TEST(CausalConv, MatchesTheDefinition) {
  for (DType d : {kF64, kF32, kBF16, kF16})
    for (const bool silu : {false, true})
      for (const auto& [shape, taps] : {std::pair(Shape{2, 70, 37}, 4), {Shape{1, 1, 1}, 1}, {Shape{3, 5, 16}, 7}, {Shape{1, 130, 3}, 2}, {Shape{1, 65, 48}, 16}, {Shape{1, 66, 300}, 3}})
        compare(random(d, shape, taps, silu));
}

TEST(CausalConv, Documents) {
  for (DType d : {kF64, kF32, kBF16})
    for (const bool silu : {false, true}) compare(with_documents(random(d, {2, 140, 21}, 4, silu), {1, 3, 64, 66, 130}));
}

// A document among others has the same bits as alone.
TEST(CausalConv, DocumentsAreThoseAlone) {
  const Operands o = with_documents(random(kF32, {1, 100, 21}, 4, true), {30, 31, 70});
  const Results packed = on_cpu(o);
  const auto part = [](const Array& x, int64_t first, int64_t end) {
    Array out(x.view().dtype, {1, end - first, 21});
    out.fill([&](int64_t i) { return x.at(first * 21 + i); });
    return out;
  };
  for (const auto& [first, end] : {std::pair<int64_t, int64_t>{0, 30}, {30, 31}, {31, 70}, {70, 100}}) {
    const Results alone = on_cpu({part(o.x, first, end), o.weight, part(o.dy, first, end), {}, true});
    EXPECT_TRUE(same_bits(part(packed.y, first, end), alone.y));
    EXPECT_TRUE(same_bits(part(packed.dx, first, end), alone.dx));
  }
}

// The tokens before a document's first one do not exist for it.
TEST(CausalConv, TheFirstDocumentMayHaveBegunEarlier) {
  const Operands o = with_documents(random(kF32, {1, 40, 21}, 4, true), {30});
  Operands earlier = o;
  earlier.begins = o.begins.clone();
  for (int64_t t = 0; t < 30; ++t) earlier.begins.set(t, -37);
  expect_same(on_cpu(earlier), on_cpu(o));
}

TEST(CausalConv, StridesThreadsAndBuildsChangeNothing) {
  for (DType d : {kF64, kF32, kBF16}) {
    const Shape s{2, 150, 137};
    const Operands dense = with_documents(random(d, s, 4, true), {40, 90});
    const Results want = on_cpu(dense);
    Operands strided = random(d, s, 4, true, {170 * 141, 141, 1});
    strided.begins = dense.begins;
    const Results got = on_cpu(strided);
    expect_same(got, want);
    EXPECT_TRUE(gaps_kept(like(got.y), got.y) && gaps_kept(like(got.dx), got.dx));
    for (const int threads : {1, 2, 5}) {
      RankContext context;
      context.threads = threads;
      RankScope scope(context);
      expect_same(on_cpu(dense), want);
    }
    if (has_v4()) expect_same(computed(dense, v3::causal_conv, v3::causal_conv_backward), computed(dense, v4::causal_conv, v4::causal_conv_backward));
  }
}

TEST(CausalConv, OneGradientAlone) {
  const Operands o = random(kF32, {2, 70, 21}, 4, true);
  const Results both = on_cpu(o);
  Results r{like(o.x), like(o.x), like(both.dweight)};
  for (const auto& [dx, dweight] : {std::pair(r.dx.view(), View{}), {View{}, r.dweight.view()}}) {
    std::vector<char> scratch(cpu::causal_conv_backward_workspace(o.view(), o.dy, dx, dweight), '\xff');
    cpu::causal_conv_backward(o.view(), o.dy, dx, dweight, Workspace{scratch.data(), scratch.size()});
  }
  EXPECT_TRUE(same_bits(r.dx, both.dx) && same_bits(r.dweight, both.dweight));
}

TEST(CausalConv, Empty) {
  for (const Shape& s : {Shape{0, 5, 3}, Shape{2, 0, 3}, Shape{2, 5, 0}}) {
    const Results r = on_cpu(random(kF32, s, 3, true));
    for (int64_t i = 0; i < r.dweight.view().numel(); ++i) EXPECT_EQ(r.dweight.at(i), 0);
  }
}

TEST(CausalConv, RefusesWhatItCannotTake) {
  const auto run = [](const Operands& o) { cpu::causal_conv(o.view(), like(o.x)); };
  Operands o = random(kF32, {1, 4, 3}, 2, false);
  o.weight = Array(kF32, {4, 2});
  EXPECT_THROW(run(o), ShapeError);
  o.weight = Array(kF64, {3, 2});
  EXPECT_THROW(run(o), DTypeError);
  o = with_documents(random(kF32, {1, 4, 3}, 2, false), {2});
  o.begins.set(3, 1);
  EXPECT_THAT([&] { run(o); }, ::testing::ThrowsMessage<DataError>(::testing::HasSubstr("[causal_conv] begins[0,3] is 1")));
}

}  // namespace
}  // namespace sheaf::kernels
