// Fine-tuning with weights stored in blocks (QLoRA): the model equals one with the dequantized values, however it is cut, and weights are
// stored, communicated and saved as blocks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/lora.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/quantize.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/lora_ways.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kSteps = 4;

// Heads and hidden units that ranks share unevenly, in whole blocks.
models::TrainConfig quantized(const std::string& type, const std::string& format = "nf4", int64_t heads = 3) {
  models::TrainConfig c = tiny_config();
  c.model = type == "mixture" ? tiny_mixture(0, 0) : tiny_model(type, heads, heads);
  models::ModelConfig& m = c.model;
  m.mlp_width = 64 * heads;
  if (type == "gpt2") m.width = 64 * heads;
  else m.width = 64, m.head_dim = 64;
  if (type == "latent") m.head_dim = 0, m.kv_lora_rank = m.q_lora_rank = m.v_head_dim = m.qk_nope_head_dim = 64;
  if (type == "mixture") m.expert_hidden = 64, m.heads = m.kv_heads = heads;
  m.lora_rank = 3;
  m.lora_alpha = 6;
  m.quantize = format;
  c.train.lr = 1e-2;
  return c;
}

struct QuantizedWays : ::testing::TestWithParam<Way> {
  static models::TrainConfig with_heads_for_all(const std::string& type, const std::string& format) {
    models::ShardingConfig s;
    GetParam().set(s);
    return quantized(type, format, std::max<int64_t>({3, s.tensor, s.context}));
  }
};

TEST_P(QuantizedWays, TrainAsOneRankInF64) {
  for (const char* type : {"gpt2", "untied llama", "latent", "mixture"})
    for (const char* format : {"nf4", "int8"}) {
      if (format == std::string("int8") && type != std::string("untied llama")) continue;  // the other is cut alike
      SCOPED_TRACE(str(type, " ", format));
      models::TrainConfig c = with_heads_for_all(type, format);
      const Values expected = parameters_f64(c, 1, kSteps);
      GetParam().set(c.sharding);
      EXPECT_LE(max_difference(expected, parameters_f64(c, GetParam().world, kSteps)), 1e-9);
    }
}
TEST_P(QuantizedWays, TakeTheBytesOfTheirPlans) {
  models::TrainConfig c = with_heads_for_all("llama", "nf4");
  GetParam().set(c.sharding);
  c.train.micro_batches = 2;
  expect_planned_tapes(c, GetParam().world);
}
INSTANTIATE_TEST_SUITE_P(All, QuantizedWays, ::testing::ValuesIn(kLoraWays), [](const auto& way) { return way.param.name; });

// Bitwise: the same values enter the same ops.
TEST(Quantized, IsTheModelOfWhatItsBlocksStandFor) {
  for (const char* type : {"gpt2", "untied llama", "latent", "mixture"})
    for (const char* format : {"nf4", "int8"})
      for (const Axes& axes : {Axes{{"data", 1}}, Axes{{"data", 3}}, MeshSizes{0, 1, 0, 2}.axes()})
        run_local(num_ranks(axes), [&](World& w) {
          SCOPED_TRACE(str(type, " ", format));
          const Mesh mesh = w.mesh(axes);
          models::ModelConfig config = quantized(type, format, 2).model;
          const auto draw = [](models::Decoder& model, const ShardOptions&) {
            for (nn::Parameter& p : model.parameters())
              if (p.name().ends_with(".lora.b")) p.set_init(nn::Init::normal(0.1));
          };
          const auto blocks = tiny_model_f64(mesh, {}, {}, 5, config, draw);
          config.quantize = "none";
          const auto values = tiny_model_f64(mesh, {}, {}, 5, config, draw);
          const auto a = blocks->parameters(), b = values->parameters();
          ASSERT_EQ(a.size(), b.size());
          int64_t in_blocks = 0;
          for (size_t i = 0; i < a.size(); ++i) {
            ASSERT_EQ(a[i].name(), b[i].name());
            if (!a[i].blocks()) continue;
            ++in_blocks;
            EXPECT_TRUE(a[i].name().starts_with("blocks.") && !nn::is_lora(a[i].name())) << a[i].name();
            const Tensor stood_for = full_parameter(a[i]), drawn = full_parameter(b[i]);
            EXPECT_EQ(stood_for.shape(), drawn.shape());
            const double error = max(abs(stood_for - drawn)).item<double>(), largest = max(abs(drawn)).item<double>();
            EXPECT_GT(error, 0) << a[i].name();
            EXPECT_LT(error, largest * (format == std::string("int8") ? 0.01 : 0.16)) << a[i].name();
            assign(b[i], stood_for);
          }
          const int64_t matrices = type == std::string("gpt2") ? 4 : type == std::string("latent") ? 7 : 5;
          EXPECT_EQ(in_blocks, matrices * config.layers);
          const auto differentiate = [&](models::Decoder& model) {
            const auto [tokens, targets] = tiny_batch(mesh, 0, 6);
            Recording recording({.step = 0});
            const Tensor loss = model.loss(tokens, targets);
            recording.backward(loss);
            return redistribute(loss, Layout(mesh.spec, Placement::invariant())).item<double>();
          };
          // Along a tensor axis MLPs are cut at other places, so sums are in another order.
          const bool cut = mesh.spec->has_axis("model");
          const double loss = differentiate(*blocks), expected = differentiate(*values);
          EXPECT_LE(std::abs(loss - expected), cut ? 1e-13 : 0);
          for (size_t i = 0; i < a.size(); ++i) {
            if (!a[i].trainable()) continue;
            EXPECT_LE(max(abs(full_gradient(a[i]) - full_gradient(b[i]))).item<double>(), cut ? 1e-13 : 0) << a[i].name();
          }
        }, {.threads_per_rank = 1});
}

TEST(Quantized, StrategiesRecomputingAndProgramsChangeNoBit) {
  for (const char* dtype : {"f32", "bf16", "f16"}) expect_bits_of_all_holdings(quantized("untied llama"), dtype, kSteps);
}

// One matrix's values exist at a time: dequantized where they are used, and again in the backward, not kept.
TEST(Quantized, BlocksTravelAndValuesAreMadeWhereTheyAreUsed) {
  const auto plan = [](const char* format) {
    models::TrainConfig c = quantized("untied llama", format);
    return models::plan_step(c, 13, 0, 2, 1, "local");
  };
  const auto whole = plan("none"), eights = plan("int8"), fours = plan("nf4");
  const auto gathered = [](const auto& p) { return traffic(p.tape)["all_gather data"].bytes; };
  const auto count = [](const auto& p, std::string_view op) {
    int64_t n = 0;
    for (NodeId i = 0; i < p.tape.num_nodes(); ++i) n += p.tape.op_name(p.tape.node(i)) == op;
    return n;
  };
  EXPECT_EQ(count(whole, "dequantize"), 0);
  // Two blocks of five matrices; again for the gradients of their inputs, which the first block's first ones do not need.
  EXPECT_GT(count(fours, "dequantize"), 10);
  EXPECT_LE(count(fours, "dequantize"), 20);
  EXPECT_EQ(count(whole, "all_gather"), count(fours, "all_gather"));
  // Elements of these matrices, of two blocks: gathered whole in the first forward and backward, of the second block once.
  const int64_t elements = 3 * (192 * 64 * 4 + 3 * 192 * 64) / 2;
  EXPECT_EQ(gathered(whole) - gathered(fours), elements * 4 - elements / 64 * 34);
  EXPECT_EQ(gathered(whole) - gathered(eights), elements * 4 - elements / 64 * 66);
}

TEST(Quantized, CheckpointsMoveBetweenMeshesAndAreMadeOfOthers) {
  const ScratchFolder folder;
  const std::vector<Axes> meshes = {Axes{{"data", 3}}, MeshSizes{0, 2, 0, 2}.axes(), MeshSizes{2, 1, 2, 0}.axes()};
  const models::ModelConfig config = quantized("untied llama").model;
  for (const Axes& from : meshes) expect_checkpoint_moves(folder.path(), from, meshes, config);
  // Blocks made while a model loads equal those of the whole matrices, however they are cut.
  models::ModelConfig plain = config;
  plain.quantize = "none";
  Values expected;
  run_local(1, [&](World& w) {
    const auto model = tiny_model_f64(w.mesh({{"data", 1}}), {}, {}, 3, plain);
    for (const nn::Parameter& p : model->parameters()) assign(p, cast(cast(full_parameter(p), kF32), kF64));
    const auto f32 = models::make_language_model(plain, 13);
    shard(*f32, Mesh{}, {});
    materialize(*f32);
    const auto a = model->parameters(), b = f32->parameters();
    for (size_t i = 0; i < a.size(); ++i) assign(b[i], cast(full_parameter(a[i]), kF32));
    models::save_checkpoint(folder / "values", 1, *f32, {}, w);
    const auto blocks = models::make_language_model(config, 13);
    materialize(*blocks);
    const auto c = blocks->parameters();
    for (size_t i = 0; i < a.size(); ++i) assign(c[i], full_parameter(b[i]));
    Whole whole;
    whole.collect(*blocks, false);
    expected = whole.values();
  }, {.threads_per_rank = 1});
  for (const Axes& axes : meshes) {
    Whole whole;
    run_local(num_ranks(axes), [&](World& w) {
      const auto model = models::make_language_model(config, 13, /*frozen=*/true);
      const Mesh mesh = w.mesh(axes);
      ShardOptions options;
      if (mesh.spec->has_axis("model")) options.tensor_axis = "model";
      if (mesh.spec->has_axis("replica")) options.replica_axis = "replica";
      if (mesh.spec->has_axis("context")) options.context_axis = "context";
      shard(*model, mesh, options);
      materialize(*model);
      ASSERT_TRUE(models::load_checkpoint(folder / "values", *model, {}, w));
      whole.collect(*model, false);
    }, {.threads_per_rank = 1});
    EXPECT_EQ(max_difference(expected, whole.values()), 0);
  }
  // Blocks in another format are other bytes.
  run_local(1, [&](World& w) {
    const auto model = models::make_language_model(quantized("untied llama", "int8").model, 13);
    materialize(*model);
    models::save_checkpoint(folder / "eights", 1, *model, {}, w);
    const auto other = models::make_language_model(config, 13);
    materialize(*other);
    EXPECT_THAT([&] { (void)models::load_checkpoint(folder / "eights", *other, {}, w); },
                ThrowsMessage<CheckpointError>(HasSubstr("qkv.weight is u8[576,66], the model has u8[576,34]: nf4 blocks of [576,64]")));
  }, {.threads_per_rank = 1});
}

TEST(Quantized, ClonesAndCachesHaveThemToo) {
  const auto model = models::make_language_model(quantized("untied llama").model, 13, /*frozen=*/true);
  shard(*model, Mesh{}, {.compute_dtype = kBF16});
  materialize(*model);
  const Tensor tokens = cast(reshape(arange(6), {1, 6}), kI32);
  nn::KeyValueCache cache(6);
  model->next_logits(slice(tokens, 1, 0, 4), cache);
  EXPECT_TRUE(identical(model->next_logits(slice(tokens, 1, 4, 6), cache), slice(model->logits(tokens), 1, 5, 6)));
  for (const nn::Parameter& p : model->parameters()) EXPECT_EQ(p.dtype(), kBF16) << p.name();
}

TEST(Quantized, WhatCannotBeIsRefused) {
  models::TrainConfig c = quantized("untied llama");
  c.model.lora_rank = 0;
  EXPECT_THAT(refusal(1, c), HasSubstr("[model] quantize nf4: all weights are trained; only those with adapters (model.lora_rank)"));
  c = quantized("untied llama", "fp4");
  EXPECT_THAT(refusal(1, c), HasSubstr("[model] unknown block format 'fp4'; known: int8, nf4"));
  const auto error_of = [](const models::TrainConfig& config) -> std::string {
    try {
      models::plan_step(config, 13, 0, 2, 1, "local");
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  c = quantized("untied llama");
  c.model.mlp_width = 100;
  EXPECT_THAT(error_of(c), HasSubstr("[quantize] 'blocks.0.mlp.down.weight' [64,100]: rows in blocks (nf4) are multiples of 64 elements"));
  c = quantized("untied llama");
  c.model.heads = c.model.kv_heads = 4, c.model.head_dim = 32;
  EXPECT_EQ(error_of(c), "");
  c.sharding.tensor = 2;
  EXPECT_THAT(error_of(c), HasSubstr("attention.projection.weight' [64,128]: cut as Shard(1 by 32) along tensor axis 'model', but its nf4 "
                                     "blocks are 64 elements, which stay together"));
  nn::Linear layer(64, 5);
  EXPECT_EQ(nn::quantize(layer, BlockFormat::int8), 0) << "it is trained";
  EXPECT_THAT([&] { layer.weight.quantize(BlockFormat::int8); }, ThrowsMessage<ConfigError>(HasSubstr("is not frozen for good")));
  layer.weight.freeze_for_good();
  layer.weight.keep_exact();
  EXPECT_EQ(nn::quantize(layer, BlockFormat::int8), 0);
  EXPECT_THAT([&] { layer.weight.quantize(BlockFormat::int8); }, ThrowsMessage<ConfigError>(HasSubstr("is kept exact")));
  nn::Linear other(64, 5);
  for (nn::Parameter& p : other.parameters()) p.freeze_for_good();
  EXPECT_EQ(nn::quantize(other, BlockFormat::int8), 1) << "not the bias";
  materialize(other);
  EXPECT_THAT([&] { other.weight.quantize(BlockFormat::int8); }, ThrowsMessage<ConfigError>(HasSubstr("is materialized")));
  Tensor bad = full_of({kF32, {5, 64}, {}}, 1.0);
  bad.view().as<float>()[70] = NAN;
  EXPECT_THAT([&] { assign(other.weight, bad); }, ThrowsMessage<NonFiniteError>(HasSubstr("[quantize] 'weight' has a value that is infinite")));
}

}  // namespace
}  // namespace sheaf::testing
