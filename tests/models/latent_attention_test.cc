// Multi-head latent attention: a layer against its definition, gradients on every mesh, communication, and the contents of a cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/layers/latent_attention.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 8;
constexpr const char* kTypes[] = {"latent", "latent without queries"};

models::TrainConfig config_of(const std::string& type, const char* strategy = "full_shard") {
  models::TrainConfig c = tiny_config();
  c.model = tiny_model(type, 10, 10);
  c.sharding.strategy = strategy;
  return c;
}

// ---- the layer ------------------------------------------------------------------------------------------------------

nn::LatentAttentionConfig layer_config(int64_t q_lora_rank) {
  return {.width = 11, .heads = 3, .q_lora_rank = q_lora_rank, .kv_lora_rank = 7, .qk_nope_head_dim = 5, .qk_rope_head_dim = 4,
          .v_head_dim = 6, .norm_eps = 1e-3, .rope_theta = 50.0, .scale = 1.3, .init = nn::Init::normal(0.5),
          .projection_init = nn::Init::normal(0.5)};
}

/// By section 2.1 of its source, head by head, with matrices of all scores.
Tensor defined(nn::LatentAttention& layer, const Tensor& x_BTC) {
  const nn::LatentAttentionConfig& c = layer.config;
  const int64_t b = x_BTC.size(0), t = x_BTC.size(1), n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, d = n + r, e = c.v_head_dim;
  const auto turned = [&](const Tensor& x_BTR) {  // adjacent pairs, by angles that are computed here
    std::vector<double> x = x_BTR.to_vector<double>(), out(x.size());
    for (size_t i = 0; i < x.size(); i += 2) {
      const auto pair = static_cast<int64_t>(i) % r / 2, position = static_cast<int64_t>(i) / r % t;
      const double angle = static_cast<double>(position) * std::pow(c.rope_theta, -2.0 * static_cast<double>(pair) / static_cast<double>(r));
      out[i] = x[i] * std::cos(angle) - x[i + 1] * std::sin(angle);
      out[i + 1] = x[i + 1] * std::cos(angle) + x[i] * std::sin(angle);
    }
    return Tensor::from(out, x_BTR.shape());
  };
  const auto product = [](const Tensor& x, const Tensor& weight) { return matmul(x, transpose(weight, 0, 1)); };
  const Tensor latents = product(x_BTC, layer.latents.weight);
  const Tensor of_q = layer.query_norm ? rms_norm(slice(latents, 2, 0, c.q_lora_rank), layer.query_norm->weight, c.norm_eps) : x_BTC;
  const int64_t kv = c.q_lora_rank, end = kv + c.kv_lora_rank;
  const Tensor queries = product(of_q, layer.queries.weight);
  const Tensor up = product(rms_norm(slice(latents, 2, kv, end), layer.latent_norm.weight, c.norm_eps), layer.keys_values.weight);
  const Tensor shared = turned(slice(latents, 2, end, end + r));
  const Tensor future = reshape(lt(reshape(arange(t), {t, 1}), reshape(arange(t), {1, t})), {1, t, t});
  std::vector<Tensor> out;
  for (int64_t h = 0; h < c.heads; ++h) {
    const Tensor q = concat({slice(queries, 2, h * d, h * d + n), turned(slice(queries, 2, h * d + n, (h + 1) * d))}, 2);
    const Tensor k = concat({slice(up, 2, h * (n + e), h * (n + e) + n), shared}, 2), v = slice(up, 2, h * (n + e) + n, (h + 1) * (n + e));
    const Tensor scores = matmul(q, transpose(k, 1, 2)) * (c.scale / std::sqrt(static_cast<double>(d)));
    out.push_back(matmul(softmax(where(future, -1e300, scores)), v));
  }
  return reshape(product(concat(out, 2), layer.projection.weight), {b, t, c.width});
}

TEST(LatentAttention, IsItsDefinition) {
  for (const int64_t q_lora_rank : {0, 6}) {
    nn::LatentAttention layer(layer_config(q_lora_rank));
    materialize(layer, Device::cpu(), {.seed = 3, .dtype = kF64});
    for (const nn::Parameter& p : {layer.latent_norm.weight}) assign(p, randn({kF64, p.shape(), {}}, Key{5}));
    if (layer.query_norm) assign(layer.query_norm->weight, randn({kF64, layer.query_norm->weight.shape(), {}}, Key{6}));
    const Tensor x_BTC = randn({kF64, {2, 9, 11}, {}}, Key{7});
    const std::vector<double> expected = defined(layer, x_BTC).to_vector<double>(), actual = layer(x_BTC).to_vector<double>();
    ASSERT_EQ(expected.size(), actual.size());
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(expected[i], actual[i], 1e-12) << q_lora_rank << ' ' << i;
  }
}

TEST(LatentAttention, SaysWhatItCannotBe) {
  const auto refusal = [](auto&& change) {
    nn::LatentAttentionConfig c = layer_config(6);
    change(c);
    try {
      const nn::LatentAttention layer(c);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string("no exception");
  };
  using Config = nn::LatentAttentionConfig;
  EXPECT_THAT(refusal([](Config& c) { c.kv_lora_rank = 0; }), HasSubstr("kv_lora_rank 0"));
  EXPECT_THAT(refusal([](Config& c) { c.qk_rope_head_dim = 3; }), HasSubstr("qk_rope_head_dim that is even, not 3"));
  EXPECT_THAT(refusal([](Config& c) { c.window = -1; }), HasSubstr("[latent_attention] window -1"));
}

// ---- on meshes ------------------------------------------------------------------------------------------------------

class LatentGradients : public ::testing::TestWithParam<std::tuple<std::string, std::string, MeshSizes, int>> {};

TEST_P(LatentGradients, EqualUnshardedInF64) {
  const auto [type, strategy, sizes, rows] = GetParam();
  expect_gradients_of_one_rank(sizes.axes(), strategy, rows, tiny_model(type, 10, 10));
}

// Data parallel only; heads cut by a tensor axis, by a context axis, and by both, evenly and not, combined with replicas.
INSTANTIATE_TEST_SUITE_P(Meshes, LatentGradients,
                         ::testing::Combine(::testing::Values("latent", "latent without queries"),
                                            ::testing::Values("full_shard", "shard_grad_op", "zero1", "replicate"),
                                            ::testing::Values(MeshSizes{0, 3, 0, 0}, MeshSizes{0, 2, 0, 2}, MeshSizes{0, 1, 0, 3},
                                                              MeshSizes{0, 2, 2, 0}, MeshSizes{0, 1, 3, 0}, MeshSizes{0, 0, 2, 2}),
                                            ::testing::Values(7)));
INSTANTIATE_TEST_SUITE_P(Uneven, LatentGradients,
                         ::testing::Combine(::testing::Values("latent"), ::testing::Values("full_shard", "zero1"),
                                            ::testing::Values(MeshSizes{0, 0, 5, 0}, MeshSizes{2, 0, 2, 0}, MeshSizes{2, 1, 2, 2},
                                                              MeshSizes{0, 1, 0, 4}, MeshSizes{0, 0, 10, 0}),
                                            ::testing::Values(3, 1)));

TEST(LatentAttention, StrategiesPrefetchUnitsAndRecomputeChangeNoBit) {
  for (const auto& [tensor, context] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    models::TrainConfig c = config_of("latent");
    c.sharding.tensor = tensor, c.sharding.context = context;
    const int world = 2 * tensor * context;
    const TrainedRun expected = train_tiny(c, world, kSteps);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
      if (tensor > 1 && strategy == std::string("replicate")) continue;  // it reduces in another order there
      models::TrainConfig other = c;
      other.sharding.strategy = strategy;
      expect_same_bits(expected, train_tiny(other, world, kSteps));
    }
    for (const char* recompute : {"block", "selective"}) {
      models::TrainConfig other = c;
      other.train.recompute = recompute;
      expect_same_bits(expected, train_tiny(other, world, kSteps));
    }
    c.train.compile = true;
    c.sharding.prefetch_bytes = 0;
    expect_same_bits(expected, train_tiny(c, world, kSteps));
  }
}

TEST(LatentAttention, TrainsAsOneRankDoes) {
  for (const char* type : kTypes) {
    models::TrainConfig c = config_of(type);
    c.model.dropout = 0.2;
    c.train.micro_batches = 2;
    const TrainedRun expected = train_tiny(c, 1, kSteps);
    for (const auto& [tensor, context, world] : {std::tuple{2, 1, 4}, {1, 3, 3}, {2, 2, 4}}) {
      c.sharding.tensor = tensor, c.sharding.context = context;
      const TrainedRun actual = train_tiny(c, world, kSteps);
      EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5) << type << ' ' << tensor << ' ' << context;
    }
  }
}

TEST(LatentAttention, TooManyRanksAreRefusedByName) {
  models::TrainConfig c = config_of("latent");
  c.sharding.context = 11;
  EXPECT_THAT([&] { train_tiny(c, 11, 1); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr(
      "'blocks.0.latent_attention': the 11 ranks of context axis 'context' cannot share 10 heads; at most 10 can")));
}

// Where a tensor axis cuts tokens, latents are gathered for queries, keys and values, not the residual stream; the MLP gathers the residual
// stream.
TEST(LatentAttention, GathersLatents) {
  const auto gathered = [](const std::string& type) {
    models::TrainConfig c = config_of(type);
    c.model.width = 40;
    c.sharding.tensor = 2;
    const Tape tape = models::plan_step(c, 13, 0, 2, 1, "local").tape;
    std::vector<int64_t> widths;
    for (NodeId i = 0; i < tape.num_nodes(); ++i) {
      const Node& n = tape.node(i);
      if (tape.op_name(n) == "all_gather" && n.phase == Phase::forward && tape.path(n).ends_with(".latent_attention"))
        widths.push_back(tape.type(tape.output(n)).shape.back());
    }
    return widths;
  };
  EXPECT_THAT(gathered("latent"), ::testing::ElementsAre(6 + 7 + 4, 6 + 7 + 4));
  EXPECT_THAT(gathered("latent without queries"), ::testing::ElementsAre(7 + 4, 40, 7 + 4, 40));
}

}  // namespace
}  // namespace sheaf::testing
