#include "sheaf/models/gpt.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "sheaf/distributed/run_local.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/model_options.h"
#include "sheaf/models/presets.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using models::Block;
using models::Gpt;
using models::GptConfig;
using models::Llama;
using models::LlamaBlock;
using models::LlamaConfig;
using models::make_language_model;
using models::presets;

int64_t count(nn::Module& m) {
  int64_t n = 0;
  for (const nn::Parameter& p : m.parameters()) n += p.numel();
  return n;
}

GptConfig small_gpt() {
  GptConfig c;
  c.layers = 3;
  c.heads = 3;
  c.width = 18;
  c.context = 6;
  c.vocab = 23;
  return c;
}
LlamaConfig small_llama() {
  LlamaConfig c;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.width = 24;
  c.context = 7;
  c.vocab = 29;
  return c;
}

LlamaConfig small_qwen3() {
  LlamaConfig c = small_llama();
  c.head_dim = 10, c.qk_norm = true;
  return c;
}

Mesh data_mesh(World& w) { return w.mesh({{"data", w.size()}}); }

Tensor tokens(const Mesh& mesh, int64_t rows, int64_t length, int64_t vocab, int64_t shift) {
  const Type type{kI32, {rows, length}, mesh.spec ? Layout(mesh.spec, Placement::shard(0)) : Layout()};
  const int64_t begin = mesh.spec ? type.local_start()[0] : 0;
  std::vector<int32_t> local;
  for (int64_t i = 0; i < type.local_shape().numel(); ++i) {
    const int64_t global = begin * length + i + shift;
    local.push_back(static_cast<int32_t>((global * global + 5 * global + global / 3) % vocab));
  }
  return Tensor::from_local(local, type);
}

TEST(Gpt, PublishedSizes) {  // counts of the released checkpoints
  const std::map<std::string, int64_t> expected = {
      {"gpt2-124m", 124439808}, {"gpt2-355m", 354823168}, {"gpt2-774m", 774030080}, {"gpt2-1558m", 1557611200}};
  for (const auto& [name, parameters] : expected) {
    Gpt model(GptConfig::preset(name));
    EXPECT_EQ(count(model), parameters) << name;
  }
  EXPECT_THROW(GptConfig::preset("gpt3"), ConfigError);
}

TEST(Llama, PublishedSizes) {
  const std::map<std::string, int64_t> expected = {{"llama3-8b", 8030261248},
                                                   {"llama3-70b", 70553706496},
                                                   {"llama3.1-8b", 8030261248},
                                                   {"llama3.1-70b", 70553706496},
                                                   {"llama3.1-405b", 405853388800},
                                                   {"llama3.2-1b", 1235814400},
                                                   {"llama3.2-3b", 3212749824},
                                                   {"qwen3-0.6b", 596049920},
                                                   {"qwen3-1.7b", 1720574976},
                                                   {"qwen3-4b", 4022468096},
                                                   {"qwen3-8b", 8190735360},
                                                   {"qwen3-14b", 14768307200},
                                                   {"qwen3-32b", 32762123264},
                                                   {"qwen3-30b-a3b", 30532122624},
                                                   {"qwen3-next-80b-a3b", 79674391296},
                                                   {"qwen3.5-9b", 8953803264},
                                                   {"qwen3.5-35b-a3b", 34660610688},
                                                   {"gemma-2b", 2506172416},
                                                   {"gemma-7b", 8537680896},
                                                   {"gemma2-2b", 2614341888},
                                                   {"gemma2-9b", 9241705984},
                                                   {"gemma2-27b", 27227128320},
                                                   {"gemma3-270m", 268098176},
                                                   {"gemma3-1b", 999885952},
                                                   {"gemma3-4b", 3880263168},
                                                   {"gemma3-12b", 11766034176},
                                                   {"gemma3-27b", 27009346304},
                                                   {"smollm3-3b", 3075098624},
                                                   {"olmo2-1b", 1484916736},
                                                   {"olmo2-7b", 7298617344},
                                                   {"olmo2-13b", 13716198400},
                                                   {"olmo2-32b", 32234279936},
                                                   {"olmo3-7b", 7298011136},
                                                   {"olmo3-32b", 32233522176},
                                                   {"olmoe-1b-7b", 6919161856},
                                                   {"phi4-14b", 14659507200},
                                                   {"mixtral-8x7b", 46702792704},
                                                   {"gpt-oss-20b", 20914757184},
                                                   {"gpt-oss-120b", 116829156672},
                                                   {"deepseek-v2-lite", 15706484224},
                                                   {"deepseek-v3", 671026419200},
                                                   {"moonlight-16b-a3b", 15960110208},
                                                   {"kimi-k2", 1026408232448},
                                                   {"glm-4.5", 352797829024},
                                                   {"glm-4.5-air", 106852251264}};
  for (const auto& [name, parameters] : expected) {
    Llama model(LlamaConfig::preset(name));
    EXPECT_EQ(count(model), parameters) << name;
  }
  EXPECT_EQ(expected.size(), LlamaConfig::published().size());
  EXPECT_THROW(LlamaConfig::preset("llama4"), ConfigError);
  EXPECT_TRUE(LlamaConfig::preset("llama3-8b").rope_scaling == RotaryScaling());
  EXPECT_TRUE(LlamaConfig::preset("llama3.1-8b").rope_scaling == RotaryScaling::llama3(8, 1, 4, 8192));
  EXPECT_TRUE(LlamaConfig::preset("llama3.2-1b").rope_scaling == RotaryScaling::llama3(32, 1, 4, 8192));
  EXPECT_EQ(LlamaConfig::preset("llama3.2-1b").context, 131072);
}

// The model that a run builds from a preset is the one that a program gets by its name.
TEST(Presets, AreThePublishedSizes) {
  EXPECT_EQ(presets().size(), GptConfig::published().size() + LlamaConfig::published().size());
  const auto expect_same_model = [](const std::string& name, auto model) {
    const auto made = make_language_model(presets().at(name), 0);
    EXPECT_EQ(count(*made), count(model)) << name;
  };
  for (const auto& [name, config] : GptConfig::published()) expect_same_model(name, Gpt(config));
  for (const auto& [name, config] : LlamaConfig::published()) {
    expect_same_model(name, Llama(config));
    EXPECT_TRUE(rotary_scaling(presets().at(name).rope_scaling) == config.rope_scaling) << name;
  }
  LlamaConfig linear;
  linear.rope_scaling = RotaryScaling::linear(2);
  EXPECT_TRUE(rotary_scaling(options_of(linear).rope_scaling) == linear.rope_scaling);
  LlamaConfig yarn;
  yarn.rope_scaling = RotaryScaling::yarn(4, 32768, 2, 20, false);
  EXPECT_TRUE(rotary_scaling(options_of(yarn).rope_scaling) == yarn.rope_scaling);
  LlamaConfig longrope;
  longrope.rope_scaling = RotaryScaling::longrope({1, 1.0199999809265137, 1.1}, {1.1, 2e-3, 1.0 / 3}, 32, 4096);
  EXPECT_EQ(options_of(longrope).rope_scaling.short_factor, "1 1.0199999809265137 1.1");
  EXPECT_TRUE(rotary_scaling(options_of(longrope).rope_scaling) == longrope.rope_scaling);
}

TEST(Gpt, InitialWeights) {
  GptConfig c = small_gpt();
  c.width = 96, c.vocab = 300;
  Gpt model(c);
  materialize(model, Device::cpu(), {.seed = 1337});
  const auto deviation = [](const nn::Parameter& p) {
    double squares = 0;
    for (double x : full_parameter(p).to_vector<double>()) squares += x * x;
    return std::sqrt(squares / static_cast<double>(p.numel()));
  };
  EXPECT_NEAR(deviation(model.wte.weight), 0.02, 4e-4);
  EXPECT_NEAR(deviation(model.blocks[1].attention.qkv.weight), 0.02, 4e-4);
  EXPECT_NEAR(deviation(model.blocks[1].mlp.up.weight), 0.02, 4e-4);
  EXPECT_NEAR(deviation(model.blocks[1].attention.projection.weight), 0.02 / std::sqrt(6.0), 2e-4);
  EXPECT_NEAR(deviation(model.blocks[1].mlp.down.weight), 0.02 / std::sqrt(6.0), 2e-4);
  EXPECT_EQ(deviation(model.blocks[1].mlp.down.bias), 0.0);
  EXPECT_EQ(model.blocks[2].mlp.up.weight.name(), "blocks.2.mlp.up.weight");
  const double loss = model.loss(tokens({}, 4, 6, 300, 0), tokens({}, 4, 6, 300, 1)).item<double>();
  EXPECT_NEAR(loss, std::log(300.0), 0.1);
}

template <class M>
void expect_loss_is_that_of_the_logits(M& model, int64_t vocab) {
  materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
  const Tensor x = tokens({}, 3, 5, vocab, 0), y = tokens({}, 3, 5, vocab, 1);
  const Tensor logits = model.logits(x);
  EXPECT_EQ(logits.shape(), (Shape{3, 5, vocab}));
  EXPECT_NEAR(model.loss(x, y).template item<double>(), cross_entropy(logits, y).item<double>(), 1e-12);
  EXPECT_NEAR(model.loss(x, y, {.divide_by = 30}).template item<double>(),
              cross_entropy(logits, y).item<double>() / 2, 1e-12);
  // Causal: a token does not affect earlier ones.
  std::vector<int32_t> changed = x.to_vector<int32_t>();
  changed[3] = (changed[3] + 1) % static_cast<int32_t>(vocab);
  const auto a = logits.to_vector<double>();
  const auto b = model.logits(Tensor::from(changed, {3, 5})).template to_vector<double>();
  for (int64_t i = 0; i < 3 * vocab; ++i) EXPECT_EQ(a[i], b[i]);
  double later = 0;
  for (int64_t i = 3 * vocab; i < 5 * vocab; ++i) later += std::abs(a[i] - b[i]);
  EXPECT_GT(later, 1e-3);
}

TEST(Gpt, LossIsThatOfTheLogits) {
  Gpt model(small_gpt());
  expect_loss_is_that_of_the_logits(model, 23);
  GptConfig untied = small_gpt();
  untied.tie_embeddings = false, untied.bias = false;
  Gpt other(untied);
  expect_loss_is_that_of_the_logits(other, 23);
  EXPECT_THROW(model.logits(tokens({}, 1, 7, 23, 0)), ShapeError);
  EXPECT_THROW(model.logits(Tensor::from<int32_t>({23}, {1, 1})), DataError);
}

TEST(Llama, LossIsThatOfTheLogits) {
  for (const LlamaConfig& config : {small_llama(), small_qwen3()}) {
    Llama model(config);
    expect_loss_is_that_of_the_logits(model, 29);
  }
}

// The model generates with its own.
TEST(Gpt, AnotherCapOfTheLossIsRefused) {
  Gpt model(small_gpt());
  materialize(model);
  const auto tokens = Tensor::from<int64_t>({1, 2, 3}, {1, 3});
  EXPECT_NO_THROW(model.loss(tokens, tokens, {.softcap = 0}));
  EXPECT_THROW(model.loss(tokens, tokens, {.softcap = 30}), ConfigError);
}

TEST(Llama, ImpossibleScalingIsRefused) {
  const auto message = [](const RotaryScaling& scaling) {
    LlamaConfig config = small_llama();
    config.rope_scaling = scaling;
    Llama model(config);
    materialize(model);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { model.logits(tokens({}, 1, 3, 29, 0)); });
  };
  const std::map<std::string, RotaryScaling> impossible = {
      {"factor is 0.5: expected a number from 1 to", RotaryScaling::linear(0.5)},
      {"factor is nan: expected a number", RotaryScaling::linear(std::nan(""))},
      {"low_freq_factor is 0: expected a positive number", RotaryScaling::llama3(8, 0, 4)},
      {"high_freq_factor is 1: expected a number above low_freq_factor, 1", RotaryScaling::llama3(8, 1, 1)},
      {"original_context is -1: expected a number of tokens", RotaryScaling::llama3(8, 1, 4, -1)},
      {"original_context is 0: expected a number of tokens", RotaryScaling::yarn(8, 0)},
      {"beta_slow is 0: expected a positive number", RotaryScaling::yarn(8, 64, 0)},
      {"beta_fast is 1: expected a number not below beta_slow, 2", RotaryScaling::yarn(8, 64, 2, 1)},
      {"short_factor has 2 numbers: expected one for each of the 3 pairs", RotaryScaling::longrope({1, 2}, {1, 2}, 8, 64)}};
  for (const auto& [expected, scaling] : impossible) {
    const std::string text = message(scaling);
    EXPECT_NE(text.find("[rotary] of "), std::string::npos) << text;
    EXPECT_NE(text.find("the scaling's " + expected), std::string::npos) << text;
  }
  models::ModelConfig options;
  options.type = "llama", options.vocab = 29, options.rope_scaling.rope_type = "dynamic";
  EXPECT_THROW(make_language_model(options, 0), ConfigError);
}

// Norms add the residuals, and their backwards the gradients, also that of the first norm, which has no residual to add. Separate additions
// are of `other_adds` gradients inside the blocks.
template <class M>
void expect_norms_add_the_residuals(M& model, int64_t vocab, const std::string& norm, int64_t blocks, int64_t other_adds) {
  materialize(model, Device::cpu(), {.seed = 3});
  Recording recording;
  recording.backward(model.loss(tokens({}, 3, 5, vocab, 0), tokens({}, 3, 5, vocab, 1)));
  const Tape tape = recording.take();
  std::map<std::string, int64_t> ops;
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    if (const Node& n = tape.node(id); n.op) {
      const bool in_block = std::string_view(tape.path(n)).starts_with("blocks");
      ++ops[std::string(in_block ? "block " : "") + n.op->name];
    }
  EXPECT_EQ(ops["block " + norm], 1);
  EXPECT_EQ(ops["block add_" + norm] + ops["add_" + norm], 2 * blocks);
  EXPECT_EQ(ops["block norm_backward"] + ops["norm_backward"], 2 * blocks + 1);
  EXPECT_EQ(ops["block add"], other_adds);
}

TEST(Gpt, NormsAddTheResiduals) {
  Gpt model(small_gpt());
  expect_norms_add_the_residuals(model, 23, "layer_norm", 3, /*other_adds=*/0);
}

TEST(Llama, NormsAddTheResiduals) {
  Llama model(small_llama());
  expect_norms_add_the_residuals(model, 29, "rms_norm", 2, /*other_adds=*/2);  // of the gradients of the inputs of gate and up
}

using Gradients = std::map<std::string, std::vector<double>>;

template <class M, class BlockType, class Config>
void expect_gradients_of_one_rank(const Config& config) {
  for (const int64_t rows : {7, 3}) {  // with 3, ranks are without rows at worlds 4 and 5
    Gradients expected;
    const auto compare = [&](M& model, const std::string& what) {
      double largest = 0;
      for (const auto& [name, g] : expected)
        for (double x : g) largest = std::max(largest, std::abs(x));
      for (const nn::Parameter& p : model.parameters()) {
        const auto g = full_gradient(p).to_vector<double>();
        double error = 0;
        for (size_t i = 0; i < g.size(); ++i) error = std::max(error, std::abs(g[i] - expected.at(p.name())[i]));
        EXPECT_LE(error, 1e-12 * largest) << p.name() << " " << what;
      }
    };
    const auto backward = [&](M& model, const Mesh& mesh) {
      Recording recording;
      recording.backward(model.loss(tokens(mesh, rows, 5, config.vocab, 0), tokens(mesh, rows, 5, config.vocab, 1)));
    };
    M plain(config);
    materialize(plain, Device::cpu(), {.seed = 5, .dtype = kF64});
    backward(plain, {});
    for (const nn::Parameter& p : plain.parameters()) expected[p.name()] = full_gradient(p).template to_vector<double>();
    for (int world = 1; world <= 5; ++world)
      for (Strategy s : {Strategy::replicate, Strategy::shard_grad_op, Strategy::full_shard})
        run_local(world, [&](World& w) {
          M model(config);
          shard(model, data_mesh(w), {.units = nn::units_of<BlockType>(), .strategy = s});
          materialize(model, Device::cpu(), {.seed = 5, .dtype = kF64});
          for (int pass = 0; pass < 2; ++pass) {  // the second one prefetches
            for (const auto& u : units(model)) u->zero_grad();
            backward(model, data_mesh(w));
          }
          compare(model, str("world ", world, " ", name(s), " rows ", rows));
        }, {.threads_per_rank = 1});
  }
}

TEST(Gpt, GradientsAtWorldsOneToFive) { expect_gradients_of_one_rank<Gpt, Block>(small_gpt()); }
TEST(Llama, GradientsAtWorldsOneToFive) { expect_gradients_of_one_rank<Llama, LlamaBlock>(small_llama()); }
TEST(Qwen3, GradientsAtWorldsOneToFive) { expect_gradients_of_one_rank<Llama, LlamaBlock>(small_qwen3()); }

TEST(Gpt, DropoutActsInTrainingOnlyAndDoesNotDependOnTheCut) {
  GptConfig c = small_gpt();
  c.dropout = 0.3;
  double trained = 0, evaluated = 0;
  for (int world : {1, 2, 3})
    run_local(world, [&](World& w) {
      Gpt model(c);
      shard(model, data_mesh(w), {.units = nn::units_of<Block>()});
      materialize(model, Device::cpu(), {.seed = 5, .dtype = kF64});
      const Mesh mesh = data_mesh(w);
      const auto loss = [&] {
        Recording recording({.step = 4, .first_sample = 12, .seed = 9});
        return redistribute(model.loss(tokens(mesh, 6, 5, 23, 0), tokens(mesh, 6, 5, 23, 1)),
                            Layout(mesh.spec, Placement::invariant())).item<double>();
      };
      const double with = loss();
      model.eval();
      const double without = loss();
      if (w.rank() != 0) return;
      if (world == 1) trained = with, evaluated = without;
      EXPECT_NEAR(with, trained, 1e-12) << world;
      EXPECT_NEAR(without, evaluated, 1e-12) << world;
    }, {.threads_per_rank = 1});
  EXPECT_GT(std::abs(trained - evaluated), 1e-4);
}

}  // namespace
}  // namespace sheaf
