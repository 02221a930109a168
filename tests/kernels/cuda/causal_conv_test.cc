#include "sheaf/kernels/causal_conv.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the sums in the header, in f64.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Operands {
  Array x, weight, dy;
  Array begins = {};  // optional
  bool silu = true;

  int64_t batch() const { return x.view().shape[0]; }
  int64_t tokens() const { return x.view().shape[1]; }
  int64_t channels() const { return x.view().shape[2]; }
  int64_t taps() const { return weight.view().shape[1]; }
  std::string to_string() const {
    return str(x.view().dtype, x.view().shape, x.view().strides, weight.view().shape, silu ? " silu" : "",
               begins.bytes() ? " documents" : "");
  }
};

Operands random(DType d, const Shape& shape, int64_t taps, Shape strides = {}, Shape of_weight = {}) {
  return {Array::random(d, shape, 1, 1, strides), Array::random(d, {shape[2], taps}, 2, 1, of_weight),
          Array::random(d, shape, 3, 1, strides)};
}
/// Documents of these lengths, in each sequence.
Operands with_documents(Operands o, const std::vector<int64_t>& lengths) {
  o.begins = Array(kI32, {o.batch(), o.tokens()});
  for (int64_t b = 0; b < o.batch(); ++b) {
    int64_t t = 0;
    for (const int64_t length : lengths)
      for (int64_t i = 0; i < length; ++i, ++t) o.begins.set(b * o.tokens() + t, static_cast<double>(t - i));
    EXPECT_EQ(t, o.tokens());
  }
  return o;
}

struct Results {
  Array y, dx, dweight;
};

Results on_gpu(const Operands& o, bool wants_dx = true, bool wants_dweight = true) {
  const Stream& s = OnGpu::stream();
  const OnGpu x(o.x), weight(o.weight), dy(o.dy), begins(o.begins.bytes() ? o.begins : Array(kI32, {1})), y(like(o.x)), dx(like(o.x)),
      dweight(Array(statistics_of(o.x.view().dtype), o.weight.view().shape, o.weight.view().strides));
  const View documents = o.begins.bytes() ? begins.view() : View{}, of_x = wants_dx ? dx.view() : View{},
             of_weight = wants_dweight ? dweight.view() : View{};
  const CausalConvOperands operands{x, weight, documents, o.silu};
  cuda::causal_conv(s, operands, y);
  const size_t bytes = cuda::causal_conv_backward_workspace({without_data(x), without_data(weight), without_data(documents), o.silu},
                                                            without_data(dy), without_data(of_x), without_data(of_weight));
  const GpuScratch scratch(bytes);
  cuda::causal_conv_backward(s, operands, dy, of_x, of_weight, bytes ? Workspace(scratch) : Workspace{});  // as ops have it
  return {y.back(), dx.back(), dweight.back()};
}

Results in_reference(const Operands& o) {
  const int64_t T = o.tokens(), C = o.channels(), W = o.taps();
  Results r{Array(kF64, o.x.view().shape), Array(kF64, o.x.view().shape), Array(kF64, o.weight.view().shape)};
  for (Array* x : {&r.dx, &r.dweight}) x->fill([](int64_t) { return 0.0; });
  for (int64_t b = 0; b < o.batch(); ++b)
    for (int64_t t = 0; t < T; ++t) {
      const auto first = o.begins.bytes() ? static_cast<int64_t>(o.begins.at(b * T + t)) : 0;
      for (int64_t c = 0; c < C; ++c) {
        const auto each_tap = [&](auto f) {
          for (int64_t j = 0; j < W; ++j)
            if (t - W + 1 + j >= first) f(c * W + j, (b * T + t - W + 1 + j) * C + c);
        };
        double sum = 0;
        each_tap([&](int64_t w, int64_t x) { sum += o.weight.at(w) * o.x.at(x); });
        const int64_t at = (b * T + t) * C + c;
        const double s = 1 / (1 + std::exp(-sum)), dsum = o.dy.at(at) * (o.silu ? s * (1 + sum * (1 - s)) : 1);
        r.y.set(at, o.silu ? sum * s : sum);
        each_tap([&](int64_t w, int64_t x) {
          r.dx.set(x, r.dx.at(x) + o.weight.at(w) * dsum);
          r.dweight.set(w, r.dweight.at(w) + o.x.at(x) * dsum);
        });
      }
    }
  return r;
}

void compare(Operands o) {
  const DType d = o.x.view().dtype;
  for (bool silu : {false, true}) {
    o.silu = silu;
    const Results got = on_gpu(o), want = in_reference(o);
    const double bound = d == kF64 ? 1e-14 : d == kF32 ? 2e-6 : epsilon(d);
    EXPECT_LT(scaled_error(got.y, values(want.y)), bound) << o.to_string();
    EXPECT_LT(scaled_error(got.dx, values(want.dx)), bound) << o.to_string();
    EXPECT_LT(scaled_error(got.dweight, values(want.dweight)), d == kF64 ? 1e-14 : 2e-6) << o.to_string();
  }
}

// Few taps and many, full and partial runs, channels of less than a pack and of more than a block's.
TEST(CudaCausalConv, MatchesTheSums) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16}) {
    for (int64_t taps : {1, 2, 3, 4, 5, 9}) compare(random(d, {2, 70, 11}, taps));
    for (int64_t tokens : {1, 2, 16, 64, 129}) compare(random(d, {1, tokens, 16}, 4));
    compare(random(d, {1, 18, 1100}, 4));
    compare(random(d, {1, 3, 8}, 7));
  }
}

TEST(CudaCausalConv, Documents) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16})
    for (int64_t taps : {3, 4, 6}) compare(with_documents(random(d, {2, 137, 12}, taps), {1, 2, 61, 1, 1, 62, 9}));
}

TEST(CudaCausalConv, RunsAndStridesChangeNothing) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16})
    for (int64_t taps : {4, 6}) {
      const Shape shape{2, 70, 24};
      const Operands dense = random(d, shape, taps);
      const Results want = on_gpu(dense), again = on_gpu(dense);
      EXPECT_TRUE(same_bits(again.y, want.y) && same_bits(again.dx, want.dx) && same_bits(again.dweight, want.dweight)) << name(d);
      for (int64_t gap : {8, 3}) {  // packs aligned to 16 bytes, and not
        const Operands o = random(d, shape, taps, {72 * (24 + gap), 24 + gap, 1}, {taps + 2, 1});
        const Results got = on_gpu(o);
        EXPECT_TRUE(same_bits(got.y, want.y) && same_bits(got.dx, want.dx) && same_bits(got.dweight, want.dweight)) << name(d);
        EXPECT_TRUE(gaps_kept(like(o.x), got.y) && gaps_kept(like(o.x), got.dx) && gaps_kept(like(got.dweight), got.dweight)) << name(d);
      }
    }
}

TEST(CudaCausalConv, GradientsThatAreNotWanted) {
  SHEAF_NEEDS_GPU();
  for (int64_t taps : {4, 6}) {
    const Operands o = random(kBF16, {2, 70, 24}, taps);
    const Results want = on_gpu(o), of_x = on_gpu(o, true, false), of_weight = on_gpu(o, false, true);
    EXPECT_TRUE(same_bits(of_x.dx, want.dx) && same_bits(of_weight.dweight, want.dweight));
    EXPECT_TRUE(same_bits(of_x.dweight, like(want.dweight)) && same_bits(of_weight.dx, like(want.dx)));
  }
}

TEST(CudaCausalConv, NoTokens) {
  SHEAF_NEEDS_GPU();
  for (const Shape& shape : {Shape{0, 5, 8}, Shape{2, 0, 8}})
    EXPECT_EQ(values(on_gpu(random(kF32, shape, 2)).dweight), std::vector<double>(16, 0.0));
  on_gpu(random(kF32, {2, 3, 0}, 4));
}

// With two taps the second token after an infinite one is unaffected, as is the gradient of the second token before it.
TEST(CudaCausalConv, TapsThatAreAbsentTouchNothing) {
  SHEAF_NEEDS_GPU();
  Operands o = random(kF32, {1, 9, 8}, 2);
  o.silu = false;
  for (int64_t c = 0; c < 8; ++c) o.x.set(4 * 8 + c, INFINITY), o.dy.set(4 * 8 + c, INFINITY);
  const Results r = on_gpu(o);
  for (int64_t t = 0; t < 9; ++t)
    for (int64_t c = 0; c < 8; ++c) {
      EXPECT_EQ(std::isfinite(r.y.at(t * 8 + c)), t != 4 && t != 5) << t;
      EXPECT_EQ(std::isfinite(r.dx.at(t * 8 + c)), t != 3 && t != 4) << t;
    }
}

TEST(CudaCausalConv, RefusesWhatItCannotTake) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {1, 4, 8}), weight(kF32, {8, 4});
  const auto run = [&](const Array& of_weight, const Array& y) {
    cuda::causal_conv(OnGpu::stream(), {x, of_weight, View{}, false}, y);
  };
  EXPECT_THROW(run(Array(kF32, {7, 4}), x), ShapeError);
  EXPECT_THROW(run(Array(kF32, {8, 0}), x), ShapeError);
  EXPECT_THROW(run(weight, Array(kF32, {1, 3, 8})), ShapeError);
  EXPECT_THROW(run(Array(kBF16, {8, 4}), x), DTypeError);
  EXPECT_THROW(cuda::causal_conv_backward(OnGpu::stream(), {x, weight, View{}, false}, x, x, weight, Workspace{}), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
