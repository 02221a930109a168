// FP8 products: which operands are rounded, and along which dimension, bitwise, on one rank and on several; which layers of a model use
// them.
#include "sheaf/nn/fp8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/kernels/fp8.h"
#include "sheaf/nn/layers/experts.h"
#include "sheaf/nn/layers/mlp.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Values = std::vector<float>;

constexpr int64_t kRows = 7, kIn = 32, kOut = 48;

Tensor drawn(const Shape& shape, int seed) {
  Values values;
  for (int64_t i = 0; i < shape.numel(); ++i)
    values.push_back(static_cast<float>(((i + seed) * (2 * seed + 7919) % 997) - 498) * (i % 5 == 0 ? 0.3f : 0.007f));
  return Tensor::from_local(values, {kF32, shape, {}});
}
Tensor x_of() { return drawn({kRows, kIn}, 1); }
Tensor weight_of() { return drawn({kOut, kIn}, 2); }
Tensor bias_of() { return drawn({kOut}, 3); }
Tensor dy_of() { return drawn({kRows, kOut}, 4); }

// --- the definition ---

Tensor rounded(const Tensor& x) {
  const Tensor out = Tensor::empty({x.dtype(), x.shape(), {}});
  kernels::cpu::round_to_fp8(x.view(), out.view());
  return out;
}
Tensor rounded_by_columns(const Tensor& x) { return contiguous(transpose(rounded(contiguous(transpose(x, 0, 1))), 0, 1)); }

/// Of Σ f()·dy, by xs.
template <class F>
std::vector<Tensor> gradients(F&& f, const Tensor& dy, const std::vector<Tensor>& xs) {
  Recording recording;
  for (const Tensor& x : xs) recording.watch(x);
  return recording.gradient(sum(f() * dy), xs);
}

struct Gradients {
  Values y, x, weight, bias;
};
/// `f`'s value, and its gradients for dy with respect to x, weight and bias.
template <class F>
Gradients gradients_of(F&& f, const Tensor& dy) {
  const Tensor x = x_of(), weight = weight_of(), bias = bias_of();
  const std::vector<Tensor> g = gradients([&] { return f(x, weight, bias); }, dy, {x, weight, bias});
  return {f(x, weight, bias).template to_vector<float>(), g[0].to_vector<float>(), g[1].to_vector<float>(), g[2].to_vector<float>()};
}

TEST(Fp8Layer, RoundsItsOperandsAlongWhatIsAddedUp) {
  const Tensor x = x_of(), weight = weight_of(), bias = bias_of(), dy = dy_of();
  const Gradients plain = gradients_of([](auto& x, auto& w, auto& b) { return linear(x, w, b); }, dy);
  for (const Fp8 fp8 : {Fp8::activations, Fp8::all}) {
    const Gradients got = gradients_of([&](auto& x, auto& w, auto& b) { return linear(x, w, b, fp8); }, dy);
    EXPECT_EQ(got.y, linear(rounded(x), rounded(weight), bias).to_vector<float>());
    EXPECT_NE(got.y, plain.y);
    EXPECT_EQ(got.x, matmul(rounded(dy), rounded_by_columns(weight)).to_vector<float>());
    EXPECT_EQ(got.bias, plain.bias);
    if (fp8 == Fp8::activations) {
      EXPECT_EQ(got.weight, plain.weight);
    } else {
      const Tensor of_rounded = matmul(contiguous(transpose(rounded_by_columns(dy), 0, 1)), rounded_by_columns(x));
      const Values want = of_rounded.to_vector<float>();
      ASSERT_EQ(got.weight.size(), want.size());
      for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got.weight[i], want[i], 1e-5f);
      EXPECT_NE(got.weight, plain.weight);
    }
  }
}

// gelu between two layers: bitwise that of the separate layers.
TEST(Fp8Layer, GeluBetweenLayers) {
  const Tensor down = drawn({16, kOut}, 5), dz = drawn({kRows, 16}, 6);
  for (const Fp8 fp8 : {Fp8::activations, Fp8::all}) {
    const Gradients fused = gradients_of([&](auto& x, auto& w, auto& b) { return gelu_linear(linear_gelu(x, w, b, fp8), down, {}, fp8); }, dz);
    const Gradients alone =
        gradients_of([&](auto& x, auto& w, auto& b) { return linear(gelu(linear(x, w, b, fp8), GeluKind::tanh), down, {}, fp8); }, dz);
    EXPECT_EQ(fused.y, alone.y);
    EXPECT_EQ(fused.x, alone.x);
    EXPECT_EQ(fused.weight, alone.weight);
  }
}

TEST(Fp8Layer, ExpertsRoundEachItsOwn) {
  const int64_t experts = 3, places = 700;  // more than a CPU multiplies at once
  const Tensor x = drawn({experts, 1, places, kIn}, 1), weight = drawn({experts, kOut, kIn}, 2), dy = drawn({experts, 1, places, kOut}, 4),
               counts = Tensor::from_local(std::vector<int32_t>(experts, places), {kI32, {experts, 1}, {}});
  const auto product = [&](bool fp8) { return [&, fp8] { return expert_linear(x, weight, counts, {.fp8 = fp8}); }; };
  const std::vector<Tensor> g = gradients(product(true), dy, {x, weight});
  EXPECT_EQ(product(true)().to_vector<float>(), expert_linear(rounded(x), rounded(weight), counts).to_vector<float>());
  const Tensor columns = transpose(rounded(contiguous(transpose(weight, 1, 2))), 1, 2);
  EXPECT_EQ(g[0].to_vector<float>(), matmul(rounded(dy), reshape(contiguous(columns), {experts, 1, kOut, kIn})).to_vector<float>());
  EXPECT_EQ(g[1].to_vector<float>(), gradients(product(false), dy, {x, weight})[1].to_vector<float>());
}

// The rows of a batch and the outputs of a layer may be cut arbitrarily: the same bits, forward and backward. If the contracted dimension
// is cut, each part has its own scales: only close.
TEST(Fp8Layer, CutsOfRowsAndOutputsKeepTheBits) {
  const Gradients whole = gradients_of([](auto& x, auto& w, auto& b) { return linear(x, w, b, Fp8::activations); }, dy_of());
  const auto part = [](const Tensor& t, const Layout& layout) {  // this rank's part of a whole tensor
    const Type type{t.dtype(), t.shape(), layout};
    Tensor own = t;
    const Shape first = layout.local_start(t.shape()), size = type.local_shape();
    for (int d = 0; d < t.rank(); ++d) own = slice(own, d, first[d], first[d] + size[d]);
    return Tensor::from_local(contiguous(own).to_vector<float>(), type);
  };
  for (int world = 1; world <= 5; ++world)
    run_local(world, [&](World& w) {
      const Mesh mesh = w.mesh({{"ranks", world}});
      const auto on = [&](const Placement& p) { return Layout(mesh.spec, p); };
      const auto cut = [&](int dim) { return on(Placement::shard(dim)); };
      const Layout all = on(Placement::replicate());
      const auto values = [](const Tensor& t) { return t.to_vector<float>(); };
      const auto of_whole = [&](const Values& v, const Shape& shape, const Layout& layout) {
        return values(part(Tensor::from_local(v, {kF32, shape, {}}), layout));
      };
      {  // rows
        const Tensor x = part(x_of(), cut(0)), weight = part(weight_of(), all), bias = part(bias_of(), all), dy = part(dy_of(), cut(0));
        const auto layer = [&] { return linear(x, weight, bias, Fp8::activations); };
        EXPECT_EQ(values(layer()), of_whole(whole.y, {kRows, kOut}, cut(0)));
        EXPECT_EQ(values(gradients(layer, dy, {x})[0]), of_whole(whole.x, {kRows, kIn}, cut(0)));
      }
      {  // outputs
        const Tensor x = part(x_of(), all), weight = part(weight_of(), cut(0)), bias = part(bias_of(), cut(0));
        EXPECT_EQ(values(linear(x, weight, bias, Fp8::activations)), of_whole(whole.y, {kRows, kOut}, cut(1)));
      }
      {  // inputs
        const Tensor x = part(x_of(), cut(1)), weight = part(weight_of(), cut(1));
        const Tensor y = linear(x, weight, {}, Fp8::activations);
        ASSERT_TRUE(y.layout()[0].is_partial());
        const Values got = values(redistribute(y, "ranks", Placement::replicate())), near = linear(x_of(), weight_of()).to_vector<float>();
        float largest = 0, worst = 0;
        for (size_t i = 0; i < got.size(); ++i) largest = std::max(largest, std::abs(near[i])), worst = std::max(worst, std::abs(got[i] - near[i]));
        EXPECT_LT(worst, 0.1f * largest);
      }
    }, {.threads_per_rank = 1});
}

// The sum of rounded values is not the rounded sum: products of Partial operands are computed without FP8.
TEST(Fp8Layer, PartialOperandsAreNotRounded) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"ranks", 2}});
    const auto like = [&](const Tensor& t, const Placement& p) {
      return Tensor::from_local(t.to_vector<float>(), {kF32, t.shape(), Layout(mesh.spec, p)});
    };
    const Tensor partial = like(x_of(), Placement::partial()), weight = like(weight_of(), Placement::replicate());
    const Values exact = linear(partial, weight).to_vector<float>();
    EXPECT_EQ(linear(partial, weight, {}, Fp8::all).to_vector<float>(), exact);
    EXPECT_EQ(matmul(partial, transpose(weight, 0, 1), {.fp8 = true}).to_vector<float>(), exact);
    // Like a layer's gradient: y is whole, its gradient Partial.
    const Tensor x = like(x_of(), Placement::replicate()), dy = like(dy_of(), Placement::partial());
    const auto of = [&](Fp8 fp8) { return gradients([&] { return linear(x, weight, {}, fp8); }, dy, {x, weight}); };
    const std::vector<Tensor> got = of(Fp8::all), want = of(Fp8::none);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].to_vector<float>(), want[i].to_vector<float>()) << i;
  });
}

TEST(Fp8Layer, F64IsRefused) {
  const Tensor x = cast(x_of(), kF64), weight = cast(weight_of(), kF64);
  EXPECT_THAT([&] { linear(x, weight, {}, Fp8::all); }, ThrowsMessage<DTypeError>(HasSubstr("[linear] rounds f32, bf16 and f16 to FP8, not f64")));
  EXPECT_THROW(matmul(x, transpose(weight, 0, 1), {.fp8 = true}), DTypeError);
}

struct Odd : nn::Module {
  nn::Linear fits{32, 48}, too_wide{32, 50}, too_deep{36, 48}, table{16, 16};
  std::optional<nn::MixtureOfExperts> mixture;
  Odd() {
    table.weight.set_table();
    mixture.emplace(nn::MixtureConfig{.width = 32, .hidden = 16, .experts = 16, .choices = 2});
  }
  SHEAF_FIELDS(fits, too_wide, too_deep, table, mixture);
};

TEST(Fp8Layer, TakesLayersOfWidthsThatGpusMultiply) {
  Odd net;
  EXPECT_EQ(nn::use_fp8(net, Fp8::all), 2);
  EXPECT_EQ(net.fits.fp8, Fp8::all);
  EXPECT_EQ(net.mixture->experts.fp8, Fp8::all);
  for (const nn::Linear* layer : {&net.too_wide, &net.too_deep, &net.table, &net.mixture->router}) EXPECT_EQ(layer->fp8, Fp8::none);
  Odd other;
  EXPECT_EQ(nn::use_fp8(other, Fp8::activations, [](const std::string& path) { return path == "fits"; }), 1);
  EXPECT_EQ(other.fits.fp8, Fp8::activations);
  EXPECT_EQ(other.mixture->experts.fp8, Fp8::none);
}

TEST(Fp8Layer, RanksOfATensorAxisHaveHiddenUnitsInSixteens) {
  nn::GatedMLP gated({.width = 32, .hidden = 48, .bias = false});
  nn::MLP plain({.width = 16});
  for (nn::Module* module : {static_cast<nn::Module*>(&gated), static_cast<nn::Module*>(&plain)}) nn::use_fp8(*module, Fp8::all);
  for (const nn::Linear* layer : {&gated.gate, &gated.up, &plain.up}) EXPECT_EQ(*layer->weight.cut(), OwnershipMap::even(0, 16));
  for (const nn::Linear* layer : {&gated.down, &plain.down}) EXPECT_EQ(*layer->weight.cut(), OwnershipMap::even(1, 16));
}

}  // namespace
}  // namespace sheaf::testing
