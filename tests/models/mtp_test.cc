// Layers that predict further tokens (MTP): their losses by hand, within documents, on every mesh, in stages and in programs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kEnd = 5;  // fill_tiny() has it in the middle of some windows

models::ModelConfig with_mtp(models::ModelConfig m, int64_t layers = 2) {
  m.mtp_layers = layers, m.mtp_loss = 0.7;
  return m;
}

models::ModelConfig model_of(const std::string& type) {
  if (type == "mixture") return with_mtp(tiny_mixture());
  if (type == "biased mixture") return with_mtp(tiny_biased_mixture());
  return with_mtp(tiny_model(type, 4, 2));
}

models::TrainConfig config_of(const std::string& type) {
  models::TrainConfig c = tiny_config();
  c.model = model_of(type);
  return c;
}

struct Batch {
  int64_t rows, context;
  std::vector<int32_t> tokens, targets;
  explicit Batch(int64_t rows, int64_t context = 9)
      : rows(rows), context(context), tokens(static_cast<size_t>(rows * context)), targets(tokens.size()) {
    fill_tiny(0, rows, tokens.data(), targets.data());
  }
  Tensor of(const std::vector<int32_t>& values) const { return Tensor::from(values, {rows, context}); }
  // Of the tokens that are `by` positions further, where there are any.
  std::vector<int32_t> further(const std::vector<int32_t>& values, int64_t by, int32_t none) const {
    std::vector<int32_t> out(values.size(), none);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t t = 0; t + by < context; ++t) out[static_cast<size_t>(r * context + t)] = values[static_cast<size_t>(r * context + t + by)];
    return out;
  }
};

// From logits that the test computes with the model's parts, summed up one by one.
double loss_of(const Tensor& logits_BTV, const std::vector<int32_t>& targets) {
  const std::vector<double> all = log_softmax(logits_BTV).to_vector<double>();
  const int64_t vocab = logits_BTV.size(2);
  double sum = 0;
  for (size_t i = 0; i < targets.size(); ++i)
    if (targets[i] >= 0) sum -= all[i * static_cast<size_t>(vocab) + static_cast<size_t>(targets[i])];
  return sum / static_cast<double>(targets.size());
}

TEST(Mtp, TheLossIsThatOfEachDepthByHand) {
  for (const char* type : {"llama", "untied llama", "latent"})
    for (const int64_t layers : {1, 2, 3}) {
      const auto made = models::make_language_model(with_mtp(tiny_model(type, 4, type == std::string("latent") ? 4 : 2), layers), 13);
      auto& model = dynamic_cast<models::Llama&>(*made);
      for (nn::Parameter& p : model.parameters()) p.set_init(nn::Init::normal(0.3));
      materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
      const Batch batch(3);
      const auto head = [&](const Tensor& x) { return linear(x, model.head ? model.head->weight : model.embedding.weight); };
      nn::Residual stream{.x = model.embedding(batch.of(batch.tokens))};
      for (models::LlamaBlock& block : model.blocks) stream = block(stream);
      Tensor x_BTC = model.norm(stream).normed;
      const double plain = loss_of(head(x_BTC), batch.targets);
      double further = 0;
      for (int64_t k = 0; k < layers; ++k) {
        models::LlamaMtpLayer& layer = model.mtp_layers[static_cast<size_t>(k)];
        const Tensor next = rms_norm(model.embedding(batch.of(batch.further(batch.tokens, k + 1, 7))), layer.token_norm.weight);
        const Tensor both = concat({next, rms_norm(x_BTC, layer.hidden_norm.weight)}, -1);
        models::LlamaBlock& block = layer;
        x_BTC = layer.norm(block.forward({.x = linear(both, layer.join.weight)})).normed;
        further += loss_of(head(x_BTC), batch.further(batch.targets, k + 1, -1));
      }
      const Tensor tokens = batch.of(batch.tokens), targets = batch.of(batch.targets);
      EXPECT_NEAR(model.loss(tokens, targets).item<double>(), plain + 0.7 * further / static_cast<double>(layers), 1e-12) << type << ' ' << layers;
      model.eval();
      EXPECT_NEAR(model.loss(tokens, targets).item<double>(), plain, 1e-12) << type << ' ' << layers;
    }
}

// A window half of whose targets are ignored, and one shorter than the layers' reach.
TEST(Mtp, WhatIsNoTargetCountsNothing) {
  const auto model = models::make_language_model(model_of("untied llama"), 13);
  materialize(*model, Device::cpu(), {.seed = 4, .dtype = kF64});
  Batch batch(2);
  const Tensor tokens = batch.of(batch.tokens);
  const auto loss = [&](const std::vector<int32_t>& targets) { return model->loss(tokens, batch.of(targets)).item<double>(); };
  const std::vector<int32_t> none(batch.targets.size(), -1);
  EXPECT_EQ(loss(none), 0);
  std::vector<int32_t> last = none;  // only the main head predicts the first target of a window
  last[0] = batch.targets[0];
  model->eval();
  const double plain = loss(last);
  model->train();
  EXPECT_NEAR(loss(last), plain, 1e-15);
  last[1] = batch.targets[1];
  EXPECT_GT(loss(last), plain + 1e-3);
  for (const int64_t tokens_of_window : {1, 2}) {
    const Tensor x = slice(tokens, 1, 0, tokens_of_window), y = slice(batch.of(batch.targets), 1, 0, tokens_of_window);
    const double with = model->loss(x, y).item<double>();
    model->eval();
    const double without = model->loss(x, y).item<double>();
    model->train();
    if (tokens_of_window == 1) EXPECT_NEAR(with, without, 1e-15);
    else EXPECT_GT(with, without + 1e-3);
  }
}

class MtpGradients : public ::testing::TestWithParam<std::tuple<std::string, std::string, Axes>> {};

TEST_P(MtpGradients, EqualThoseOfOneRank) {
  const auto [type, strategy, axes] = GetParam();
  models::ModelConfig m = model_of(type);
  expect_gradients_of_one_rank(axes, strategy, 3, m);
  m.end_of_text = kEnd;
  expect_gradients_of_one_rank(axes, strategy, 3, m);
}

INSTANTIATE_TEST_SUITE_P(Meshes, MtpGradients,
                         ::testing::Combine(::testing::Values("llama", "untied llama"), ::testing::Values("full_shard", "zero1"),
                                            ::testing::Values(Axes{{"data", 2}}, Axes{{"data", 3}}, MeshSizes{2, 2, 0, 0}.axes(),
                                                              MeshSizes{0, 1, 4, 0}.axes(), MeshSizes{0, 2, 1, 2}.axes(),
                                                              MeshSizes{0, 1, 2, 2}.axes(), Axes{{"data", 1}, {"gathered", 4}},
                                                              Axes{{"data", 1}, {"gathered", 2}, {"model", 2}},
                                                              Axes{{"stage", 2, true}, {"data", 1}}, Axes{{"stage", 2, true}, {"data", 2}},
                                                              Axes{{"stage", 2, true}, {"data", 1}, {"context", 2}},
                                                              Axes{{"stage", 2, true}, {"data", 1}, {"model", 2}})));

// Their mixtures' load-balancing losses count, too.
TEST(Mtp, WithExperts) {
  for (const char* type : {"mixture", "biased mixture"})
    for (const Axes& axes :
         {Axes{{"data", 1}, {"expert", 2}}, Axes{{"data", 2}, {"expert", 2}}, Axes{{"stage", 2, true}, {"data", 1}, {"expert", 2}}})
      expect_gradients_of_one_rank(axes, "full_shard", 4, model_of(type));
}

TEST(Mtp, TheirMixturesBalanceCounts) {
  const auto loss = [](int64_t layers, double aux_loss) {
    const auto model = models::make_language_model(with_mtp(tiny_mixture(0, aux_loss), layers), 13);
    materialize(*model, Device::cpu(), {.seed = 4, .dtype = kF64});
    const Batch batch(3);
    return model->loss(batch.of(batch.tokens), batch.of(batch.targets)).item<double>();
  };
  const auto of_balance = [&](int64_t layers) { return loss(layers, 0.1) - loss(layers, 0); };
  // An even mixture's loss is 1: each layer adds at least 0.1.
  EXPECT_GE(of_balance(1), of_balance(0) + 0.099);
  EXPECT_GE(of_balance(3), of_balance(1) + 0.198);
}

TEST(Mtp, StrategiesProgramsAndRecomputeChangeNoBit) {
  for (const char* type : {"untied llama", "biased mixture"}) {
    const TrainedRun expected = train_tiny(config_of(type), 2, 5);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    for (const char* strategy : {"shard_grad_op", "zero1"}) {
      models::TrainConfig c = config_of(type);
      c.sharding.strategy = strategy;
      expect_same_bits(expected, train_tiny(c, 2, 5));
    }
    for (const char* recompute : {"block", "selective"}) {
      models::TrainConfig c = config_of(type);
      c.train.recompute = recompute;
      expect_same_bits(expected, train_tiny(c, 2, 5));
      c.sharding.units = "count";
      expect_same_bits(expected, train_tiny(c, 2, 5));
    }
    models::TrainConfig c = config_of(type);
    c.train.compile = true;
    expect_same_bits(expected, train_tiny(c, 2, 5));
  }
}

// The table is on the first and last stages, tied or not, and the tokens are passed along.
TEST(Mtp, InStages) {
  for (const char* type : {"llama", "untied llama"})
    for (const int64_t stages : {2, 3}) {
      models::TrainConfig c = tiny_pipeline(1, type);
      c.model = with_mtp(c.model);
      c.model.dropout = 0;
      expect_stages_of_one_rank(c, stages);
      c.sharding.pipeline_schedule = "zero_bubble";
      c.sharding.pipeline = stages;
      expect_planned_tapes(c, static_cast<int>(stages));
    }
  models::TrainConfig c = tiny_pipeline(1);
  c.model = with_mtp(c.model), c.model.dropout = 0;
  const TrainedRun expected = train_tiny(c, 1, 4);
  c.sharding.pipeline = 2, c.sharding.pipeline_runs = 2;
  EXPECT_LE(max_difference(expected.parameters, train_tiny(c, 2, 4).parameters), 5e-5);
}

TEST(Mtp, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* recompute : {"none", "block", "selective"}) {
    models::TrainConfig c = config_of("untied llama");
    c.train.micro_batches = 2;
    c.train.recompute = recompute;
    expect_planned_tapes(c, 2, [&](World&, const Tape& tape) {
      int repeated = 0;
      for (NodeId id = 0; id < tape.num_nodes(); ++id)
        repeated += tape.path(tape.node(id)).starts_with("mtp_layers.1") && (tape.node(id).flags & Node::kRecomputed);
      EXPECT_EQ(repeated > 0, recompute != std::string("none"));
    });
    c.train.compile = true;
    expect_planned_tapes(c, 2);
    c.sharding.context = 2;
    c.sharding.tensor = 2;
    expect_planned_tapes(c, 4);
  }
}

// The layers' loss is reported separately: when recorded, by programs, with several micro-batches, ranks and stages.
TEST(Mtp, TheirLossIsAResultOfItsOwn) {
  const auto run = [](const models::TrainConfig& c, int world) {
    std::vector<std::pair<double, double>> out;
    run_local(world, [&](World& w) {
      models::TrainingStep step(c, 13, w, Device::cpu(), tiny_options(c));
      for (int s = 0; s < 5; ++s) {
        const auto result = step.run(s, tiny_data(c));
        ASSERT_EQ(result.mtp.defined(), c.model.mtp_layers > 0);
        if (w.rank() == 0) out.emplace_back(result.loss.item<double>(), result.mtp ? result.mtp.item<double>() : 0);
      }
    }, {.threads_per_rank = 1});
    return out;
  };
  models::TrainConfig c = config_of("untied llama");
  c.train.micro_batches = 2;
  const auto expected = run(c, 1);
  models::TrainConfig plain = c;
  plain.model.mtp_loss = 0;
  EXPECT_NEAR(expected[0].first - 0.7 * expected[0].second, run(plain, 1)[0].first, 1e-5);
  EXPECT_NEAR(expected[0].second, run(plain, 1)[0].second, 1e-5);
  plain.model.mtp_layers = 0;
  run(plain, 1);
  std::vector<models::TrainConfig> ways(3, c);
  ways[1].train.compile = true, ways[2].sharding.pipeline = 2;
  for (const models::TrainConfig& way : ways)
    for (size_t s = 0; s < 5; ++s) {
      const auto got = run(way, 2);
      EXPECT_NEAR(got[s].first, expected[s].first, 2e-5);
      EXPECT_NEAR(got[s].second, expected[s].second, 2e-5);
    }
}

// As separate units: their gathered weights are not held throughout the step.
TEST(Mtp, LayersAreUnits) {
  run_local(2, [](World& world) {
    models::TrainConfig c = config_of("untied llama");
    models::TrainingStep step(c, 13, world, Device::cpu());
    std::vector<std::string> names;
    for (const auto& unit : units(step.model())) names.push_back(unit->name());
    EXPECT_THAT(names, ::testing::IsSupersetOf({"mtp_layers.0", "mtp_layers.1", "blocks.0", "head"}));
  });
}

// In a model of few blocks, recomputing these layers saves most.
TEST(Mtp, AFewBytesMakeThemBeComputedAgain) {
  models::TrainConfig c = config_of("untied llama");
  c.model.layers = 1;
  const auto peak = [&](models::TrainConfig of) { return models::plan_step(of, 13, 0, 2, 1, "local").peak.bytes; };
  models::TrainConfig none = c, block = c;
  block.train.recompute = "block";
  ASSERT_LT(peak(block), peak(none));
  c.train.recompute = "fit", c.sharding.memory_budget = (peak(block) + peak(none)) / 2;
  const models::TrainConfig fitted = models::fit_recompute(c, 13, 2, 1, "local");
  EXPECT_GT(fitted.train.recompute_blocks, 0);
  EXPECT_LE(peak(fitted), c.sharding.memory_budget);
  c.sharding.memory_budget = peak(block) / 2;
  EXPECT_THAT([&] { models::fit_recompute(c, 13, 2, 1, "local"); },
              ::testing::ThrowsMessage<OutOfMemory>(HasSubstr("with all 3 blocks computed again")));
}

TEST(Mtp, RestInBlocksAsOthers) {
  models::ModelConfig m = model_of("untied llama");
  m.width = 64, m.heads = 2, m.kv_heads = 2, m.mlp_width = 64, m.quantize = "int8";
  const auto model = models::make_language_model(m, 13, /*frozen=*/true);
  int in_blocks = 0;
  for (const nn::Parameter& p : model->parameters()) in_blocks += p.name().starts_with("mtp_layers.1.") && p.blocks();
  EXPECT_EQ(in_blocks, 6);  // the joining matrix, two of attention, three of the MLP
}

TEST(Mtp, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder scratch;
  expect_checkpoint_moves(scratch.path(), {{"data", 2}}, {Axes{{"data", 1}}, Axes{{"data", 1}, {"model", 2}}, Axes{{"stage", 2, true}, {"data", 1}}},
                          model_of("untied llama"));
}

TEST(Mtp, WhatCannotBeIsRefused) {
  const auto refused = [](models::ModelConfig m) {
    try {
      models::make_language_model(m, 13);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(refused(with_mtp(tiny_model("gpt2", 4, 4))), HasSubstr("model.mtp_layers 2: only model.type llama"));
  EXPECT_THAT(refused(with_mtp(tiny_model("llama", 4, 2), 9)), HasSubstr("[llama] mtp_layers 9: at least 0, and less than the context of 9 tokens"));
  models::ModelConfig adapted = model_of("llama");
  adapted.lora_rank = 2;
  EXPECT_THAT(refused(adapted), HasSubstr("model.mtp_layers 2: with adapters"));
  const auto model = models::make_language_model(model_of("llama"), 13);
  materialize(*model);
  const Batch batch(1);
  const auto losses = [&] { return model->loss(batch.of(batch.tokens), batch.of(batch.targets), {.per_target = true}); };
  EXPECT_THAT([&] { losses(); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("what MTP layers add to the loss in training belongs to no target")));
  model->eval();
  EXPECT_EQ(losses().numel(), 9);
}

}  // namespace
}  // namespace sheaf::testing
