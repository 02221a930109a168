// Blocks with linear attention (Gated DeltaNet) next to blocks with attention, alone and as in Qwen3-Next: a layer against its definition,
// token by token; gradients on every mesh, the bits of every strategy, one rank's steps, the bytes of plans, and the same tokens with a
// cache as without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/models/flops.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/nn/layers/delta_net.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 6;

models::TrainConfig config_of(const char* strategy = "full_shard", int64_t tensor = 1, int64_t context = 1) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_linear_attention();
  c.sharding.strategy = strategy;
  c.sharding.tensor = tensor;
  c.sharding.context = context;
  return c;
}

// ---- the layer ------------------------------------------------------------------------------------------------------

nn::DeltaNetConfig layer_config() {
  return {.width = 11, .key_heads = 2, .value_heads = 6, .key_width = 5, .value_width = 4, .taps = 3, .norm_eps = 1e-3,
          .init = nn::Init::normal(0.5), .projection_init = nn::Init::normal(0.5)};
}

std::vector<double> values(const nn::Parameter& p) { return full_parameter(p).to_vector<double>(); }
double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

// y = W x of a weight [out, in].
std::vector<double> product(const nn::Linear& layer, std::span<const double> x) {
  const std::vector<double> weight = values(layer.weight);
  std::vector<double> y(weight.size() / x.size());
  for (size_t o = 0; o < y.size(); ++o)
    for (size_t i = 0; i < x.size(); ++i) y[o] += weight[o * x.size() + i] * x[i];
  return y;
}

/// One sequence x[T, C], in which documents begin at `begins`.
std::vector<double> defined(const nn::GatedDeltaNet& layer, const std::vector<double>& x, const std::vector<int32_t>& begins) {
  const nn::DeltaNetConfig& c = layer.config;
  const auto width = static_cast<size_t>(c.width), G = static_cast<size_t>(c.key_heads), H = static_cast<size_t>(c.value_heads),
             D = static_cast<size_t>(c.key_width), E = static_cast<size_t>(c.value_width), W = static_cast<size_t>(c.taps);
  const std::vector<double> taps = values(layer.taps), log_decay = values(layer.log_decay), bias = values(layer.decay_bias),
                            weight = values(layer.norm.weight);
  std::vector<std::vector<double>> projected;
  std::vector<double> S(H * D * E), out;
  for (size_t t = 0; t < x.size() / width; ++t) {
    const auto begin = static_cast<size_t>(begins[t]);
    if (begin == t) std::ranges::fill(S, 0.0);
    const std::span<const double> token(&x[t * width], width);
    projected.push_back(product(layer.qkv, token));
    std::vector<double> f(projected[t].size());
    for (size_t i = 0; i < f.size(); ++i) {
      double sum = 0;
      for (size_t w = 0; w < W; ++w)
        if (t + w + 1 >= W + begin) sum += taps[i * W + w] * projected[t + w + 1 - W][i];
      f[i] = sum * sigmoid_of(sum);
    }
    const std::vector<double> gate = product(layer.gate, token), rates = product(layer.rates, token);
    std::vector<double> gated(H * E);
    for (size_t h = 0; h < H; ++h) {
      const double beta = sigmoid_of(rates[h]), decay = std::exp(-std::exp(log_decay[h]) * std::log1p(std::exp(rates[H + h] + bias[h])));
      const auto unit = [&](size_t first) {
        std::vector<double> v(&f[first], &f[first] + D);
        double squares = 1e-6;
        for (double e : v) squares += e * e;
        for (double& e : v) e /= std::sqrt(squares);
        return v;
      };
      const size_t g = h / (H / G);
      const std::vector<double> q = unit(g * D), k = unit(G * D + g * D);
      std::vector<double> o(E);
      double squares = 0;
      for (size_t e = 0; e < E; ++e) {
        double* s = &S[h * D * E + e];  // a column
        double answer = 0;
        for (size_t d = 0; d < D; ++d) answer += (s[d * E] *= decay) * k[d];
        const double write = beta * (f[2 * G * D + h * E + e] - answer);
        for (size_t d = 0; d < D; ++d) o[e] += (s[d * E] += k[d] * write) * q[d] / std::sqrt(static_cast<double>(D));
        squares += o[e] * o[e];
      }
      for (size_t e = 0; e < E; ++e) {
        const double z = gate[h * E + e];
        gated[h * E + e] = o[e] / std::sqrt(squares / static_cast<double>(E) + c.norm_eps) * weight[e] * z * sigmoid_of(z);
      }
    }
    const std::vector<double> y = product(layer.projection, gated);
    out.insert(out.end(), y.begin(), y.end());
  }
  return out;
}

struct Layer {
  nn::GatedDeltaNet net{layer_config()};
  Layer() {
    materialize(net, Device::cpu(), {.seed = 3, .dtype = kF64});
    assign(net.norm.weight, randn({kF64, net.norm.weight.shape(), {}}, Key{5}));
    assign(net.decay_bias, randn({kF64, net.decay_bias.shape(), {}}, Key{6}, -3, 1));
  }
};

TEST(GatedDeltaNet, IsItsDefinition) {
  Layer layer;
  constexpr int64_t T = 150;  // chunks of 64
  const Tensor x_BTC = randn({kF64, {2, T, 11}, {}}, Key{7});
  const std::vector<double> x = x_BTC.to_vector<double>();
  std::vector<int32_t> one(T, 0), several(T);
  for (int32_t t = 0; t < T; ++t) several[static_cast<size_t>(t)] = t < 3 ? 0 : t < 70 ? 3 : t < 71 ? 70 : 71;
  std::vector<int32_t> begins = one;
  begins.insert(begins.end(), several.begin(), several.end());
  const std::vector<double> plain = layer.net(x_BTC).to_vector<double>(),
                            packed = layer.net(x_BTC, nullptr, Tensor::from(begins, {2, T})).to_vector<double>();
  for (size_t b = 0; b < 2; ++b) {
    const std::vector<double> part(&x[b * T * 11], &x[b * T * 11] + T * 11);
    const std::vector<double> expected = defined(layer.net, part, one), of_documents = defined(layer.net, part, b ? several : one);
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(plain[b * T * 11 + i], expected[i], 1e-10) << b << ' ' << i;
      ASSERT_NEAR(packed[b * T * 11 + i], of_documents[i], 1e-10) << b << ' ' << i;
    }
  }
}

// Initial decays give heads a memory of about one token to some thousands.
TEST(GatedDeltaNet, BeginsWithManyTimeScales) {
  nn::GatedDeltaNet net({.width = 8, .key_heads = 100, .value_heads = 1000, .key_width = 1, .value_width = 1});
  materialize(net, Device::cpu(), {.seed = 1});
  const std::vector<double> rate = values(net.log_decay), bias = values(net.decay_bias);
  double least = 1, most = 0;
  for (size_t h = 0; h < rate.size(); ++h) {
    ASSERT_TRUE(rate[h] >= 0 && rate[h] < std::log(16.0)) << rate[h];
    const double per_token = std::exp(rate[h]) * std::log1p(std::exp(bias[h]));
    least = std::min(least, per_token), most = std::max(most, per_token);
  }
  EXPECT_LT(least, 2e-3);
  EXPECT_GT(most, 1);
}

TEST(GatedDeltaNet, SaysWhatItCannotBe) {
  const auto refusal = [](auto&& change) {
    nn::DeltaNetConfig c = layer_config();
    change(c);
    try {
      const nn::GatedDeltaNet layer(c);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string("no exception");
  };
  using Config = nn::DeltaNetConfig;
  EXPECT_THAT(refusal([](Config& c) { c.value_heads = 5; }), HasSubstr("2 key heads of 5, 5 value heads of 4"));
  EXPECT_THAT(refusal([](Config& c) { c.taps = 0; }), HasSubstr("0 taps"));
  Layer layer;
  nn::KeyValueCache cache(10);
  EXPECT_THAT([&] { layer.net(zeros({1, 2, 11}, kF64), &cache, zeros({1, 2}, kI32)); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("the tokens of a cache are one document")));
}

// ---- on meshes ------------------------------------------------------------------------------------------------------

class LinearGradients : public ::testing::TestWithParam<std::tuple<Axes, int64_t>> {};

TEST_P(LinearGradients, EqualThoseOfOneRank) {
  const auto& [axes, key_heads] = GetParam();
  models::ModelConfig m = tiny_linear_attention(key_heads);
  expect_gradients_of_one_rank(axes, "full_shard", 3, m);
  m = tiny_qwen3_next(key_heads);
  expect_gradients_of_one_rank(axes, "full_shard", 3, m);
  m.end_of_text = 5;  // within documents
  expect_gradients_of_one_rank(axes, "zero1", 3, m);
}

INSTANTIATE_TEST_SUITE_P(Meshes, LinearGradients,
                         ::testing::Combine(::testing::Values(Axes{{"data", 3}}, Axes{{"data", 1}, {"model", 2}}, Axes{{"data", 1}, {"model", 3}},
                                                              Axes{{"data", 1}, {"model", 5}}, Axes{{"data", 2}, {"context", 2}},
                                                              Axes{{"data", 1}, {"context", 5}}, Axes{{"data", 1}, {"gathered", 2}},
                                                              Axes{{"data", 1}, {"gathered", 3}, {"model", 2}},
                                                              Axes{{"data", 1}, {"context", 2}, {"model", 2}}, Axes{{"replica", 2}, {"data", 2}},
                                                              Axes{{"secondary", 2}, {"data", 2}}),
                                            ::testing::Values(6, 7)),
                         [](const auto& info) {
                           std::string out = str("keys", std::get<1>(info.param));
                           for (const auto& axis : std::get<0>(info.param)) out += str("_", axis.name, axis.size);
                           return out;
                         });

TEST(LinearAttention, AllOfItIsTrained) {
  const Values gradients = gradients_f64(Axes{{"data", 1}}, "replicate", 3, {}, tiny_linear_attention());
  for (const char* name : {"qkv.weight", "gate.weight", "rates.weight", "taps", "log_decay", "decay_bias", "norm.weight", "projection.weight"}) {
    const auto found = gradients.find(str("blocks.1.linear_attention.", name));
    ASSERT_NE(found, gradients.end()) << name;
    EXPECT_GT(max_magnitude({*found}), 1e-7 * max_magnitude(gradients)) << name;
  }
  EXPECT_TRUE(gradients.contains("blocks.2.attention.qkv.weight"));
}

TEST(LinearAttention, StrategiesPrefetchUnitsRecomputeAndProgramsChangeNoBit) {
  struct Case { int tensor, context, world; };
  for (const auto& [tensor, context, world] : {Case{1, 1, 2}, Case{2, 1, 4}, Case{1, 2, 2}, Case{2, 2, 4}}) {
    SCOPED_TRACE(str(tensor, " ", context, " ", world));
    expect_ways_change_no_bit(config_of("full_shard", tensor, context), world, kSteps);
  }
}

TEST(LinearAttention, TrainsAsOneRankDoes) {
  models::TrainConfig c = config_of();
  c.model.dropout = 0.2;
  c.train.micro_batches = 2;
  const TrainedRun expected = train_tiny(c, 1, kSteps);
  for (const auto& [tensor, context, world] : {std::tuple{1, 1, 3}, {2, 1, 2}, {4, 1, 4}, {1, 5, 5}, {2, 2, 4}}) {
    c.sharding.tensor = tensor, c.sharding.context = context;
    const TrainedRun actual = train_tiny(c, world, kSteps);
    EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << tensor << " " << context << " " << world;
    for (int s = 0; s < kSteps; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
  }
  c.sharding.tensor = c.sharding.context = 1;
  expect_stages_of_one_rank(c, 3);
}

TEST(LinearAttention, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const models::ModelConfig& m : {tiny_linear_attention(), tiny_qwen3_next()})
    for (const char* dtype : {"f32", "bf16"})
      for (const auto& [tensor, context, world] : {std::tuple{1, 1, 2}, {2, 1, 4}, {2, 2, 4}}) {
        SCOPED_TRACE(str(m.experts, " ", dtype, " ", tensor, " ", context, " ", world));
        models::TrainConfig c = config_of("full_shard", tensor, context);
        c.model = m;
        c.train.dtype = dtype;
        c.train.micro_batches = m.experts ? 1 : 2;
        expect_planned_tapes(c, world);
        c.train.recompute = "selective";
        c.train.compile = true;
        expect_planned_tapes(c, world);
      }
}

TEST(LinearAttention, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  const std::vector<Axes> meshes = {{{"data", 3}}, {{"data", 1}, {"context", 2}}, {{"data", 1}, {"model", 5}}};
  for (const Axes& from : meshes) expect_checkpoint_moves(scratch.path(), from, meshes, tiny_linear_attention());
}

TEST(LinearAttention, TooManyRanksAreRefusedByName) {
  models::TrainConfig c = config_of();
  c.sharding.tensor = 7;
  EXPECT_THAT([&] { train_tiny(c, 7, 1); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr(
      "'blocks.0.linear_attention': 7 ranks of a tensor axis times 1 of a context axis cannot share 6 key heads; at most 6 can")));
  c.sharding.tensor = 2, c.sharding.context = 4;
  EXPECT_THAT([&] { train_tiny(c, 8, 1); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("times 4 of a context axis cannot share 6 key heads")));
}

TEST(LinearAttention, HasNoWindow) {
  models::LlamaConfig c;
  c.linear_key_heads = 2, c.window = 4;
  EXPECT_THAT([&] { models::Llama m(c); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("linear_key_heads 2 with a window of 4")));
}

// By hand: of three blocks two have states, and one has keys.
TEST(LinearAttention, OperationsAreCounted) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_linear_attention();
  const auto& m = c.model;
  const double width = 24, mlp = 3 * width * 40, full = width * (24 + 2 * 12) + 24 * width,
               linear = width * (2 * 18 + 24) + width * 24 + width * 24 + 24 * width, states = 3 * 12 * 3 * 2;
  const double keys = 9.0 / 2 * (24 + 24), head = 13 * width;
  EXPECT_DOUBLE_EQ(models::flops_per_step(c), 9.0 * 7 * 6 * (3 * mlp + full + 2 * (linear + states) + keys + head)) << m.heads;
  c.model = tiny_qwen3_next();
  const double gated = width * (36 + 2 * 18) + width * 36 + 36 * width, mixture = 3 * width * 10 * 3 + width * (5 + 1);
  EXPECT_DOUBLE_EQ(models::flops_per_step(c), 9.0 * 7 * 6 * (3 * mixture + gated + 2 * (linear + states) + 9.0 / 2 * (36 + 36) + head));
}

// ---- generation -----------------------------------------------------------------------------------------------------

models::ModelConfig long_model() {
  models::ModelConfig m = tiny_qwen3_next();
  m.context = 300;
  return m;
}

std::vector<double> rows(const std::vector<double>& logits, int64_t begin, int64_t end) {
  return {logits.begin() + begin * 13, logits.begin() + end * 13};
}

// However many tokens are read at once, also across chunks; and after some were removed again.
TEST(LinearAttention, ACacheGivesTheSameLogits) {
  for (const DType dtype : {kF64, kF32}) {
    const auto model = models::make_language_model(long_model(), 13);
    materialize(*model, Device::cpu(), {.seed = 4, .dtype = dtype});
    model->eval();
    std::vector<int32_t> text;
    for (int64_t t = 0; t < 300; ++t) text.push_back(static_cast<int32_t>(t * t % 13));
    const Tensor tokens = Tensor::from(text, {1, 300});
    const std::vector<double> expected = model->logits(tokens).to_vector<double>();
    for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{300}, {3, 1, 1, 59, 1, 1, 63, 64, 65, 42}, {200, 100}, {64, 64, 128, 44}}) {
      nn::KeyValueCache cache(300);
      int64_t at = 0;
      const auto read = [&](int64_t n) {
        const Tensor x = model->read(slice(tokens, 1, at, at + n), cache);
        EXPECT_EQ(model->logits_behind(x).to_vector<double>(), rows(expected, at, at + n)) << name(dtype) << " at " << at << " of " << n;
        at += n;
      };
      for (const int64_t n : lengths) {
        read(n);
        const int64_t back = std::min<int64_t>(n, 5);  // such as drafts
        cache.shorten(at -= back);
        read(back);
      }
      EXPECT_EQ(at, 300);
      cache.shorten(at = 250);
      read(50);
      cache.clear(), at = 0;
      read(70);
    }
    nn::KeyValueCache cache(300);
    model->read(slice(tokens, 1, 0, 290), cache);
    cache.shorten(100);
    EXPECT_THAT([&] { model->read(slice(tokens, 1, 100, 101), cache); },
                ::testing::ThrowsMessage<LifetimeError>(HasSubstr("shortened to 100 tokens, before what a recurrent layer can go back to")));
  }
}

}  // namespace
}  // namespace sheaf::testing
