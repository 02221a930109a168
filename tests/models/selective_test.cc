// train.recompute selective: values that ops can cheaply recompute from what their derivatives read anyway are not kept, and no bit
// changes.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 4;

models::TrainConfig selective(models::TrainConfig config) {
  config.train.recompute = "selective";
  return config;
}

models::TrainConfig config_of(const std::string& type) {
  models::TrainConfig c = tiny_config();
  c.model = type == "mixture" ? tiny_mixture(1.1) : tiny_model(type, 4, 2);
  c.model.dropout = 0.2;
  c.train.micro_batches = 2;
  return c;
}

TEST(Selective, ChangesNoBit) {
  for (const char* type : {"gpt2", "llama", "mixture"})
    for (const char* dtype : {"f32", "bf16"})
      for (const char* strategy : {"full_shard", "zero1", "replicate"}) {
        SCOPED_TRACE(str(type, ' ', dtype, ' ', strategy));
        models::TrainConfig c = config_of(type);
        c.train.dtype = dtype;
        c.sharding.strategy = strategy;
        for (const int world : {1, 3}) expect_same_bits(train_tiny(selective(c), world, kSteps), train_tiny(c, world, kSteps));
      }
}

TEST(Selective, GoesWithOtherAxesProgramsAndWholeBlocks) {
  for (const char* type : {"gpt2", "llama"}) {
    const auto same_with = [&](int world, auto&& change) {
      models::TrainConfig c = config_of(type);
      change(c);
      expect_same_bits(train_tiny(selective(c), world, kSteps), train_tiny(c, world, kSteps));
      expect_planned_tapes(selective(c), world);
    };
    same_with(2, [](auto&) {});
    same_with(4, [](auto& c) { c.sharding.tensor = 2; });
    same_with(4, [](auto& c) { c.sharding.context = 2; });
    same_with(4, [](auto& c) { c.sharding.replicas = 2, c.sharding.secondary = true; });
    same_with(2, [](auto& c) { c.sharding.pipeline = 2; });
    same_with(2, [](auto& c) { c.train.compile = true; });
    same_with(2, [](auto& c) { c.train.recompute_blocks = 1; });
  }
}

// Two norms and an activation function in each block, once per micro-batch.
TEST(Selective, TheTapeSaysWhatIsComputedAgain) {
  for (const auto& [type, norm, activation] : {std::tuple("gpt2", "layer_norm", "gelu"), {"llama", "rms_norm", "swiglu"}}) {
    models::TrainConfig c = selective(config_of(type));
    const Tape tape = models::plan_step(c, c.model.vocab, 0, 2, 1, "shm").tape;
    std::map<std::string, int64_t> again;
    for (NodeId id = 0; id < tape.num_nodes(); ++id)
      if (const Node& n = tape.node(id); n.flags & Node::kRecomputed) {
        EXPECT_EQ(n.phase, Phase::backward);
        ++again[std::string(tape.op_name(n))];
      }
    const std::map<std::string, int64_t> expected{{norm, 2 * 2 * c.model.layers}, {activation, 2 * c.model.layers}};
    EXPECT_EQ(again, expected) << type;
  }
}

// A GPT block keeps twelve other values of its width per token, in addition to two normalised ones and four after gelu. Enough rows that
// parameters are small.
TEST(Selective, KeepsAThirdLessThanItWould) {
  models::TrainConfig c = tiny_config();
  c.model.width = 64, c.model.context = 256, c.model.bias = false;
  const auto growth = [&](models::TrainConfig config) {
    const auto peak = [&](int64_t layers) {
      config.model.layers = layers;
      return models::plan_step(config, 13, 0, 1, 1, "shm").peak.bytes;
    };
    return peak(12) - peak(6);
  };
  const int64_t six = 6 * int64_t{7} * 256 * 64 * 4 * 6;
  EXPECT_EQ(growth(c) - growth(selective(c)), six);
}

// The growth of the peak per recomputed block, with twice as many rows: one residual stream.
TEST(WholeBlocks, KeepOneResidualStream) {
  for (const char* type : {"gpt2", "llama"}) {
    models::TrainConfig c = tiny_config();
    c.model = tiny_model(type, 4, 2);
    c.model.width = 64, c.model.context = 64;
    c.train.recompute = "block";
    const auto growth = [&](int64_t batch) {
      c.train.batch = batch;
      const auto peak = [&](int64_t layers) {
        c.model.layers = layers;
        return models::plan_step(c, 13, 0, 1, 1, "shm").peak.bytes;
      };
      return peak(12) - peak(6);
    };
    EXPECT_EQ(growth(16) - growth(8), 6 * int64_t{8} * 64 * 64 * 4) << type;
  }
}

struct Derivatives {
  std::vector<double> first, second;
  int64_t again = 0;
};

// Optionally a norm, whose weight and bias are plain values with no other reader; gelu and swiglu.
Derivatives of_activations(bool is_selective, bool has_norm) {
  const Tensor x = Tensor::from<double>({0.5, -1, 2, 0.25, 3, -0.5}, {2, 3}), w = Tensor::from<double>({1, 2, -1}, {3}),
               v = Tensor::from<double>({0.5, 1, 2, -1, 1, 0.5}, {2, 3});
  Recording recording;
  for (const Tensor& t : {x, w, v}) recording.watch(t);
  Tensor loss;
  {
    std::optional<RecomputeScope> scope;
    if (is_selective) scope.emplace(RecomputeOptions{.selective = true});
    const Tensor y = has_norm ? layer_norm(x, exp(w), tanh(w) * 2.0) : swiglu(x * w, x + w);
    loss = sum(linear(gelu(linear(y, v)), transpose(v, 0, 1)) * linear(y, matmul(transpose(v, 0, 1), v)));
  }
  const Tensor xs[] = {x, w, v};
  const auto dx = recording.gradient(loss, xs, {.keep = true});
  std::vector<Tensor> ddx;  // a norm has none
  if (!has_norm) ddx = recording.gradient(sum(dx[0] * dx[0]) + sum(dx[1] * dx[1]), xs);
  Derivatives out;
  for (const auto& [tensors, values] : {std::pair(&dx, &out.first), {&ddx, &out.second}})
    for (const Tensor& t : *tensors)
      for (const double value : t.to_vector<double>()) values->push_back(value);
  for (NodeId id = 0; id < recording.tape().num_nodes(); ++id)
    out.again += (recording.tape().node(id).flags & Node::kRecomputed) != 0;
  return out;
}

TEST(Selective, DerivativesGoThroughBothCopies) {
  for (const bool has_norm : {true, false}) {
    const Derivatives expected = of_activations(false, has_norm), actual = of_activations(true, has_norm);
    EXPECT_EQ(expected.again, 0);
    EXPECT_GE(actual.again, 2);
    EXPECT_EQ(actual.first, expected.first);
    ASSERT_EQ(actual.second.size(), has_norm ? 0u : 15u);
    for (size_t i = 0; i < expected.second.size(); ++i)
      EXPECT_NEAR(actual.second[i], expected.second[i], 1e-12 * std::max(1.0, std::abs(expected.second[i]))) << i;
  }
}

// The gradient of a value that is recomputed, if requested, includes the paths through its copy.
TEST(Selective, GradientsOfWhatIsComputedAgainCountItsCopies) {
  const auto gradient = [](bool is_selective) {
    const Tensor x = Tensor::from<double>({0.5, -1, 2}, {1, 3}), w = Tensor::from<double>({1, 2, -1}, {1, 3});
    Recording recording;
    for (const Tensor& t : {x, w}) recording.watch(t);
    std::optional<RecomputeScope> scope;
    if (is_selective) scope.emplace(RecomputeOptions{.selective = true});
    const Tensor y = gelu(x * 2.0), z = linear(y, w);
    const Tensor dw = recording.gradient(sum(z * z), std::span(&w, 1), {.keep = true})[0];
    return recording.gradient(sum(dw * dw), std::span(&y, 1))[0].to_vector<double>();
  };
  const std::vector<double> expected = gradient(false);
  EXPECT_GT(std::abs(expected[0]), 0.1);
  EXPECT_EQ(gradient(true), expected);
}

// Values that nobody reads in the backward are not recomputed.
TEST(Selective, NothingIsComputedForFrozenWeights) {
  const Tensor x = Tensor::from<double>({0.5, -1, 2}, {1, 3}), w = Tensor::from<double>({1, 2, -1}, {1, 3});
  Recording recording;
  recording.watch(x);
  RecomputeScope scope({.selective = true});
  recording.gradient(sum(linear(silu(x), w)), std::span(&x, 1));
  for (NodeId id = 0; id < recording.tape().num_nodes(); ++id) EXPECT_FALSE(recording.tape().node(id).flags & Node::kRecomputed);
}

}  // namespace
}  // namespace sheaf::testing
