// Fine-tuning with low-rank adapters: frozen weights do not change and need neither gradients nor optimizer state, and adapters are trained
// alike however they, and their layers, are cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/lora.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/lora_ways.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 5;

models::TrainConfig lora(const std::string& type, const std::string& layers = "all") {
  models::TrainConfig c = tiny_config();
  if (type == "mixture") c.model = tiny_mixture(), c.model.aux_loss = 0;  // which cannot be computed from parts of a batch
  else c.model = tiny_model(type, 6, 3);
  c.model.lora_rank = 3;
  c.model.lora_alpha = 6;
  c.model.lora_layers = layers;
  c.train.lr = 1e-2;
  return c;
}

class LoraWays : public ::testing::TestWithParam<Way> {};

TEST_P(LoraWays, TrainAsOneRankInF64) {
  for (const char* type : {"gpt2", "untied llama", "latent", "mixture"})
    for (const int64_t micro_batches : {1, 2}) {
      SCOPED_TRACE(str(type, " in ", micro_batches));
      models::TrainConfig c = lora(type);
      const Values expected = parameters_f64(c, 1, kSteps);
      GetParam().set(c.sharding);
      c.train.micro_batches = micro_batches;
      if (c.model.experts && c.sharding.tensor > 1) continue;  // more ranks than the mixture has heads
      EXPECT_LE(max_difference(expected, parameters_f64(c, GetParam().world, kSteps)), 1e-9);
    }
}
TEST_P(LoraWays, TakeTheBytesOfTheirPlans) {
  models::TrainConfig c = lora("llama");
  GetParam().set(c.sharding);
  c.train.micro_batches = 2;
  expect_planned_tapes(c, GetParam().world);
}
INSTANTIATE_TEST_SUITE_P(All, LoraWays, ::testing::ValuesIn(kLoraWays), [](const auto& way) { return way.param.name; });

// A model with adapters equals one with the weights W + alpha / r b a: the same loss, and by the chain rule the adapters' gradients.
TEST(Lora, IsTheModelOfMergedWeights) {
  for (const char* type : {"gpt2", "untied llama", "latent", "mixture"})
    run_local(1, [&](World& w) {
      SCOPED_TRACE(type);
      const Mesh mesh = w.mesh({{"data", 1}});
      models::ModelConfig config = lora(type).model;
      const auto adapted = tiny_model_f64(mesh, {}, {}, 5, config, [](models::Decoder& model, const ShardOptions&) {
        for (nn::Parameter& p : model.parameters())
          if (p.name().ends_with(".lora.b")) p.set_init(nn::Init::normal(0.3));
      });
      config.lora_rank = 0;
      const auto merged = tiny_model_f64(mesh, {}, {}, 5, config);
      std::map<std::string, nn::Parameter> adapters, weights;
      for (const nn::Parameter& p : adapted->parameters()) adapters[p.name()] = p;
      for (const nn::Parameter& p : merged->parameters()) weights[p.name()] = p;
      const auto of = [](const std::string& a) { return a.substr(0, a.size() - std::string("lora.a").size()); };
      for (const auto& [name, a] : adapters) {
        if (!name.ends_with(".lora.a")) continue;
        const nn::Parameter& weight = weights.at(of(name) + "weight");
        const Tensor b = full_parameter(adapters.at(of(name) + "lora.b"));
        assign(weight, full_parameter(weight) + 2.0 * matmul(b, full_parameter(a)));
      }
      const auto differentiate = [&](models::Decoder& model) {
        const auto [tokens, targets] = tiny_batch(mesh, 0, 5);
        Recording recording({.step = 0});
        const Tensor loss = model.loss(tokens, targets);
        recording.backward(loss);
        return redistribute(loss, "data", Placement::invariant()).item<double>();
      };
      EXPECT_NEAR(differentiate(*adapted), differentiate(*merged), 1e-13);
      for (const auto& [name, a] : adapters) {
        if (!name.ends_with(".lora.a")) continue;
        const nn::Parameter& b = adapters.at(of(name) + "lora.b");
        const Tensor d = full_gradient(weights.at(of(name) + "weight")) * 2.0;
        const Tensor da = matmul(transpose(full_parameter(b), 0, 1), d), db = matmul(d, transpose(full_parameter(a), 0, 1));
        EXPECT_LE(max(abs(full_gradient(a) - da)).item<double>(), 1e-13) << name;
        EXPECT_LE(max(abs(full_gradient(b) - db)).item<double>(), 1e-13) << name;
        EXPECT_GT(max(abs(da)).item<double>(), 1e-6) << name;
      }
    }, {.threads_per_rank = 1});
}

// At first adapters add nothing: the losses of the model alone. Then only adapters change.
TEST(Lora, BeginsAsTheModelAndChangesNothingElse) {
  for (const char* type : {"gpt2", "untied llama", "latent", "mixture"})
    for (const char* layers : {"all", "attention"}) {
      SCOPED_TRACE(str(type, " ", layers));
      models::TrainConfig c = lora(type, layers);
      const TrainedRun one = train_tiny(c, 2, 1), more = train_tiny(c, 2, kSteps);
      models::TrainConfig without = c;
      without.model.lora_rank = 0;
      without.train.lr = without.train.min_lr = 0;
      const TrainedRun base = train_tiny(without, 2, kSteps);
      EXPECT_EQ(one.losses[0], base.losses[0]);
      for (const char* dtype : {"bf16", "f16"}) {  // frozen weights are stored in this dtype, to which the other run casts masters
        c.train.dtype = without.train.dtype = dtype;
        EXPECT_EQ(train_tiny(c, 2, 1).losses[0], train_tiny(without, 2, 1).losses[0]);
      }
      EXPECT_LT(more.losses.back(), base.losses.back()) << "of the same batch";
      size_t adapters = 0;
      for (const auto& [name, values] : more.parameters) {
        if (nn::is_lora(name)) {
          ++adapters;
          EXPECT_NE(values, one.parameters.at(name)) << name;
          EXPECT_THAT(name, ::testing::AnyOf(HasSubstr(".attention."), HasSubstr(".latent_attention."), HasSubstr(".mlp.")));
        } else {
          EXPECT_EQ(values, base.parameters.at(name)) << name;
        }
      }
      const bool latent = type == std::string("latent"), alone = layers == std::string("attention") || type == std::string("mixture");
      const int64_t linear_layers = (latent ? 4 : 2) + (alone ? 0 : type == std::string("gpt2") ? 2 : 3);
      EXPECT_EQ(adapters, static_cast<size_t>(2 * linear_layers * c.model.layers));
    }
}

TEST(Lora, StrategiesRecomputingAndProgramsChangeNoBit) {
  for (const char* dtype : {"f32", "bf16"}) expect_bits_of_all_holdings(lora("llama"), dtype, kSteps);
}

// Weights are gathered as always; only the adapters' gradients are communicated, and only adapters have AdamW state.
TEST(Lora, FrozenWeightsHaveNoGradients) {
  models::TrainConfig c = lora("llama");
  auto of = [&](int64_t rank) {
    c.model.lora_rank = rank;
    return traffic(models::plan_step(c, 13, 0, 2, 1, "local").tape);
  };
  auto whole = of(0), adapted = of(3);
  EXPECT_EQ(adapted["reduce_scatter data"].count, c.model.layers) << "not of the root";
  EXPECT_GT(whole["reduce_scatter data"].bytes, 2 * adapted["reduce_scatter data"].bytes);
  EXPECT_EQ(whole["all_gather data"].count, 3) << "of the root and of two blocks, which the backward begins with";
  EXPECT_EQ(adapted["all_gather data"].count, 5) << "two buffers of each block";
  EXPECT_GT(adapted["all_gather data"].bytes, whole["all_gather data"].bytes);
  run_local(2, [&](World& w) {
    models::TrainingStep step(c, 13, w, Device::cpu());
    step.run(0, fill_tiny);
    int64_t trained = 0;
    for (const nn::Parameter& p : step.model().parameters()) {
      EXPECT_EQ(p.trainable(), nn::is_lora(p.name())) << p.name();
      if (p.trainable()) trained += p.numel();
    }
    int64_t state = 0;
    for (const nn::StatePiece& piece : nn::state_pieces(step.optimizer()))
      if (piece.name.find("blocks") != std::string::npos) state += piece.runs.numel();
    w.communicator().all_reduce(&state, 1, kI64, Reduction::sum, "test").sync();
    EXPECT_EQ(state, 2 * trained);
  }, {.threads_per_rank = 1});
}

TEST(Lora, ACacheGivesTheSameLogits) {
  for (const char* type : {"gpt2", "untied llama"}) {
    const auto model = models::make_language_model(lora(type).model, 0);
    for (nn::Parameter& p : model->parameters())
      if (nn::is_lora(p.name())) p.set_init(nn::Init::normal(0.3));
    materialize(*model);
    const Tensor tokens = cast(reshape(arange(6), {1, 6}), kI32);
    nn::KeyValueCache cache(6);
    model->next_logits(slice(tokens, 1, 0, 4), cache);
    EXPECT_TRUE(identical(model->next_logits(slice(tokens, 1, 4, 6), cache), slice(model->logits(tokens), 1, 5, 6)));
  }
}

// Frozen weights have no masters and are stored in the compute dtype: half the memory, the same bits.
TEST(Lora, FrozenWeightsRestAsTheyAreComputedWith) {
  models::TrainConfig c = lora("llama");
  c.train.dtype = "bf16";
  for (const int world : {1, 2})
    run_local(world, [&](World& w) {
      models::TrainingStep step(c, 13, w, Device::cpu());
      for (const nn::Parameter& p : step.model().parameters()) EXPECT_EQ(p.dtype(), p.trainable() ? kF32 : kBF16) << p.name();
    }, {.threads_per_rank = 1});
  // A checkpoint stores them in it, can be loaded by a run that computes in f32, and vice versa.
  const ScratchFolder folder;
  const auto saved_as = [&](const char* dtype, const std::string& name) {
    c.train.dtype = dtype;
    train_tiny(c, 2, 2, [&](models::TrainingStep& step) {
      models::save_checkpoint(folder / name, 2, step.model(), {&step.optimizer()}, step.world());
    });
  };
  const auto load = [&](const char* dtype, const std::string& name) {
    c.train.dtype = dtype;
    Whole whole;
    run_local(2, [&](World& w) {
      models::TrainingStep step(c, 13, w, Device::cpu());
      ASSERT_TRUE(models::load_checkpoint(folder / name, step.model(), {&step.optimizer()}, w));
      whole.collect(step.model(), false);
    }, {.threads_per_rank = 1});
    return whole.values();
  };
  saved_as("bf16", "narrow");
  saved_as("f32", "wide");
  EXPECT_EQ(max_difference(load("bf16", "narrow"), load("f32", "narrow")), 0);
  const Values rounded = load("bf16", "wide"), whole = load("f32", "wide");
  for (const auto& [name, values] : whole)
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_LE(std::abs(rounded.at(name)[i] - values[i]), nn::is_lora(name) ? 0 : std::abs(values[i]) / 256) << name;
}

TEST(Lora, CheckpointsMoveBetweenMeshes) {
  const ScratchFolder folder;
  const std::vector<Axes> meshes = {Axes{{"data", 3}}, MeshSizes{0, 2, 0, 2}.axes(), MeshSizes{2, 1, 2, 0}.axes()};
  for (const Axes& from : meshes) expect_checkpoint_moves(folder.path(), from, meshes, lora("llama").model);
}

// In models whose head and routers are used outside their layers, which could leave adapters without gradients.
TEST(Lora, EveryAdapterIsTrained) {
  for (const char* type : {"gpt2", "untied llama", "latent", "mixture"})
    run_local(2, [&](World& w) {
      SCOPED_TRACE(type);
      const Mesh mesh = w.mesh({{"data", 2}});
      models::ModelConfig config = lora(type).model;
      config.lora_rank = 0;
      const auto model = tiny_model_f64(mesh, {}, {}, 5, config, [&](models::Decoder& m, const ShardOptions&) {
        const int64_t layers = type == std::string("mixture") ? 2 : type == std::string("gpt2") ? 4 : type == std::string("latent") ? 7 : 5;
        EXPECT_EQ(nn::add_lora(m, {.rank = 2}), layers * config.layers);
      });
      optim::AdamW optimizer(*model, {.lr = 1e-2});
      for (int64_t step = 0; step < 2; ++step) {
        const auto [tokens, targets] = tiny_batch(mesh, 0, 4);
        {
          Recording recording({.step = step});
          recording.backward(model->loss(tokens, targets));
        }
        if (step == 1)
          for (const nn::Parameter& p : model->parameters())
            if (p.trainable()) {
              EXPECT_GT(max(abs(full_gradient(p))).item<double>(), 0) << p.name();
            }
        optimizer.step();
        optimizer.zero_grad();
      }
    }, {.threads_per_rank = 1});
}

// Along a tensor axis: b is cut with the outputs of layers that read the residual stream, a with the inputs of layers that write to it.
TEST(Lora, AdaptersAreCutAsTheirLayersAre) {
  run_local(2, [](World& w) {
    models::TrainConfig c = lora("llama");
    c.sharding.tensor = 2;
    models::TrainingStep step(c, 13, w, Device::cpu());
    for (const nn::Parameter& p : step.model().parameters()) {
      if (!nn::is_lora(p.name())) continue;
      const bool writes = p.name().find("projection") != std::string::npos || p.name().find("down") != std::string::npos;
      EXPECT_EQ(p.cut_axis() >= 0, p.name().ends_with(".a") == writes) << p.name();
    }
  }, {.threads_per_rank = 1});
}

TEST(Lora, AnotherCallLeavesTheFirstOnesAdaptersInTraining) {
  const auto model = models::make_language_model(tiny_model("untied llama", 6, 3), 0);
  const auto of = [](const char* part) { return [part](const std::string& path) { return path.find(part) != std::string::npos; }; };
  EXPECT_EQ(nn::add_lora(*model, {.rank = 4}, of("attention")), 4);
  EXPECT_EQ(nn::add_lora(*model, {.rank = 2}, of("mlp")), 6);
  for (const nn::Parameter& p : model->parameters()) EXPECT_EQ(p.trainable(), nn::is_lora(p.name())) << p.name();
  EXPECT_THROW(nn::add_lora(*model), ConfigError);
  for (const nn::Parameter& p : model->parameters()) EXPECT_EQ(p.trainable(), nn::is_lora(p.name())) << p.name();
}

TEST(Lora, ClonesHaveTheAdaptersToo) {
  models::GptConfig config{.layers = 2, .heads = 2, .width = 8, .context = 5, .vocab = 7};
  models::Gpt model(config);
  nn::add_lora(model, {.rank = 2, .alpha = 3});
  for (nn::Parameter& p : model.parameters())
    if (nn::is_lora(p.name())) p.set_init(nn::Init::normal(0.3));
  shard(model, Mesh{}, {.compute_dtype = kBF16});
  materialize(model);
  models::Gpt copy = clone(model, config);
  const Tensor tokens = cast(reshape(arange(5), {1, 5}), kI32);
  EXPECT_TRUE(identical(copy.logits(tokens), model.logits(tokens)));
  const auto a = model.parameters(), b = copy.parameters();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].dtype(), b[i].dtype()) << a[i].name();
}

// A frozen parameter that a user changes by hand keeps its dtype.
TEST(Lora, OnlyWhatIsFrozenForGoodRestsInTheDtypeOfCompute) {
  nn::Linear layer(3, 5);
  layer.weight.freeze();
  layer.bias.freeze_for_good();
  shard(layer, Mesh{}, {.compute_dtype = kBF16});
  materialize(layer);
  EXPECT_EQ(layer.weight.dtype(), kF32);
  EXPECT_EQ(layer.bias.dtype(), kBF16);
  EXPECT_TRUE(nn::is_lora("lora.a") && nn::is_lora("x.lora.b"));
  EXPECT_FALSE(nn::is_lora("flora.a") || nn::is_lora("lora.c"));
}

TEST(Lora, WhatCannotBeIsRefused) {
  models::TrainConfig c = lora("mixture", "mlp");
  EXPECT_THAT(refusal(1, c), HasSubstr("[model] lora_layers 'mlp': this llama has no such linear layers; its MLPs are mixtures of 5 experts"));
  c = lora("llama", "heads");
  EXPECT_THAT(refusal(1, c), HasSubstr("[model] unknown lora_layers 'heads'; known: all, attention, mlp"));
  nn::Linear layer(3, 5);
  EXPECT_THAT([&] { nn::add_lora(layer, {.rank = 0}); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("[lora] a rank of 0: at least 1")));
  EXPECT_TRUE(layer.weight.trainable()) << "nothing has changed";
  EXPECT_EQ(nn::add_lora(layer), 1);
  EXPECT_THAT([&] { nn::add_lora(layer); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("has one already")));
  EXPECT_EQ(nn::add_lora(layer, {}, [](const std::string&) { return false; }), 0);
}

}  // namespace
}  // namespace sheaf::testing
