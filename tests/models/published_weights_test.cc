// Weights as `transformers` writes them: our models compute its logits from them, and every rank holds its own part of the same parameters,
// having read nothing else. The folders are made by tests/models/published/make.
#include <cmath>
#include <cstring>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_names.h"
#include "sheaf/models/published_text.h"
#include "sheaf/models/published_weights.h"
#include "sheaf/models/saved_model.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/cuts.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Values;
using testing::Whole;

const char* const kFolders[] = {"gpt2_f32_shards",      "gpt2_f16_base",       "llama_bf16_shards",  "llama_f32_tied",     "llama_f32_scaled",
                                "mistral_f32",          "mistral_f32_heads",   "qwen2_bf16_tied",    "qwen3_bf16_tied",    "qwen3_f32_yarn",
                                "mixtral_bf16_shards",  "qwen3_moe_bf16",      "mistral_f32_window", "qwen3_bf16_windows", "dots1_bf16",
                                "dots1_f32_window",     "deepseek_v3_bf16",    "deepseek_v2_f32",    "gemma_bf16",         "gemma3_bf16",
                                "gemma3_f32_version_4", "gpt_oss_bf16",        "gpt_oss_mxfp4",      "qwen3_next_bf16",    "qwen3_5_bf16_images",
                                "qwen3_5_moe_bf16",     "gemma3_bf16_images",  "glm4_moe_bf16",      "kimi_k2_fp8",        "smollm3_bf16",
                                "smollm3_f32_listed",   "olmo2_bf16",          "olmo3_f32",          "olmoe_bf16",         "phi3_bf16",
                                "gemma2_bf16",          "gemma2_f32_version_4", "phi3_bf16_longrope"};

/// Experts are stored in blocks of 17 bytes, of which a rank may have parts, or matrices in one byte per value next to others in more.
bool has_blocks(const std::string& name) { return name == "gpt_oss_mxfp4" || name == "kimi_k2_fp8"; }

bool has_linear_attention(const std::string& name) { return name.starts_with("qwen3_next") || name.starts_with("qwen3_5"); }

std::string folder_of(const std::string& name) { return "tests/models/published/" + name; }

models::ModelConfig config_of(const std::string& name) {
  models::ModelConfig config = models::read_published_config(folder_of(name) + "/config.json");
  if (name == "deepseek_v3_bf16") config.mtp_layers = 2;
  return config;
}

/// The outputs of transformers for these weights, in f64, and its input tokens.
struct Expected {
  Tensor tokens_BT;
  std::vector<double> logits;
  explicit Expected(const std::string& name, const char* which = "logits") {
    const auto file = SafetensorsFile::open(folder_of(name) + "/logits.safetensors");
    const Shape shape = file.at("tokens").shape;
    std::vector<int32_t> tokens(static_cast<size_t>(shape.numel()));
    file.read("tokens", 0, shape.numel(), tokens.data());
    tokens_BT = Tensor::from(tokens, shape);
    logits.resize(static_cast<size_t>(file.at(which).shape.numel()));
    file.read(which, 0, file.at(which).shape.numel(), logits.data());
  }
};

/// Largest difference, relative to the largest logit.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0, most = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    worst = std::isfinite(a[i]) ? std::max(worst, std::abs(a[i] - b[i])) : INFINITY;
    most = std::max(most, std::abs(b[i]));
  }
  EXPECT_GT(most, 1.0);
  return worst / most;
}

TEST(PublishedWeights, GiveTheLogitsOfTransformers) {
  for (const std::string name : kFolders)
    for (DType dtype : {kF64, kF32}) {
      SCOPED_TRACE(str(name, " in ", dtype));
      const auto model = models::make_language_model(config_of(name), 0);
      materialize(*model, Device::cpu(), {.dtype = dtype});
      models::load_weights(*model, folder_of(name));
      const Expected expected(name);
      const double error = relative_difference(model->logits(expected.tokens_BT).to_vector<double>(), expected.logits);
      std::printf("%s in %s: relative error %.2e\n", name.c_str(), std::string(sheaf::name(dtype)).c_str(), error);
      // transformers computes Llama's norms and rotary angles in f32, whatever the model's type, and all of linear attention.
      const double more = has_linear_attention(name) ? 2 : 1;
      EXPECT_LE(error, dtype == kF32 ? 1e-5 * more : name.starts_with("gpt2") ? 1e-13 : 2e-6 * more);
    }
}

struct Loaded {
  Values values;
  std::vector<int64_t> bytes;  // read by each rank
};

Loaded load_on(int world, const std::string& name, const std::string& strategy, bool units, int experts = 0) {
  Loaded out;
  out.bytes.resize(static_cast<size_t>(world));
  Whole whole;
  run_local(world, [&](World& w) {
    const auto model = models::make_language_model(config_of(name), 0);
    ShardOptions options;
    options.strategy = strategy;
    if (units) options.units = nn::units_where([&](nn::Module& m, const std::string&) { return model->is_block(m); });
    if (experts) options.expert_axis = "expert";
    shard(*model, experts ? w.mesh({{"data", w.size() / experts}, {"expert", experts}}) : w.mesh({{"data", w.size()}}), options);
    materialize(*model, Device::cpu());
    Allocator& memory = *RankContext::current().memory(Device::cpu());
    memory.reset_peak();
    const int64_t before = memory.stats().peak;
    out.bytes[static_cast<size_t>(w.rank())] = models::load_weights(*model, folder_of(name));
    EXPECT_EQ(memory.stats().peak, before);
    whole.collect(*model, false);
  }, {.threads_per_rank = 1});
  out.values = whole.values();
  return out;
}

TEST(PublishedWeights, AreTheSameBitsOnAnyNumberOfRanks) {
  for (const std::string name : kFolders) {
    const Loaded one = load_on(1, name, "full_shard", true);
    for (int world : {1, 2, 3, 4})
      for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
        for (bool units : {true, false}) {
          SCOPED_TRACE(str(name, ", ", world, " ranks, ", strategy, units ? ", blocks" : ", one unit"));
          const Loaded many = load_on(world, name, strategy, units);
          EXPECT_EQ(testing::max_difference(one.values, many.values), 0.0);
          // If parameters are cut, the ranks together read each byte of the weights once, in similar shares.
          int64_t sum = 0, most = 0;
          for (int64_t bytes : many.bytes) sum += bytes, most = std::max(most, bytes);
          const bool whole = std::string(strategy) == "replicate";
          EXPECT_NEAR(static_cast<double>(sum), static_cast<double>(one.bytes[0] * (whole ? world : 1)), has_blocks(name) ? 100 : 0);
          if (!whole) {  // of elements; those in blocks have fewer bytes than others
            EXPECT_LE(most, one.bytes[0] / world + one.bytes[0] / (has_blocks(name) ? 5 : 10));
          }
        }
  }
}

// A rank gets its elements for any cut along a dimension, transposed or not, and reads no others.
TEST(PublishedWeights, FillAnyCut) {
  for (const std::string name : kFolders) {
    const models::ModelConfig config = config_of(name);
    const auto files = models::PublishedFiles::open(folder_of(name));
    const auto model = models::make_language_model(config, 0);
    materialize(*model);
    const int64_t bytes = models::load_weights(*model, files);
    const std::vector<nn::StatePiece> whole = nn::state_pieces(*model);
    int64_t elements = 0;
    for (const nn::StatePiece& p : whole) elements += p.runs.numel();
    for (const testing::Cut& cut : testing::cuts()) {
      SCOPED_TRACE(str(name, ", ", cut.to_string()));
      int64_t read = 0;
      for (int rank = 0; rank < cut.world(); ++rank) {
        std::vector<nn::StatePiece> mine;
        std::vector<std::vector<float>> memory;
        int64_t held = 0;
        for (const nn::StatePiece& p : whole)
          for (const Runs& runs : cut.runs(p.shape, rank)) {
            memory.emplace_back(static_cast<size_t>(runs.numel()), -7.0f);
            mine.push_back({p.name, p.dtype, p.shape, runs, p.device, memory.back().data()});
            held += runs.numel();
          }
        const int64_t own = models::fill_weights(mine, files, config);
        read += own;
        if (!has_blocks(name)) {
          EXPECT_EQ(own * elements, bytes * held);  // all weights of a file have one type
        }
        size_t at = 0;
        for (const nn::StatePiece& p : whole)
          for (; at < mine.size() && mine[at].name == p.name; ++at)
            for (int64_t i = 0; i < mine[at].runs.numel(); ++i)
              ASSERT_EQ(memory[at][i], static_cast<float*>(p.data)[mine[at].runs.at(i)]) << p.name << " " << i;
        ASSERT_EQ(at, mine.size());
      }
      EXPECT_NEAR(static_cast<double>(read), static_cast<double>(bytes), has_blocks(name) ? 100 : 0);
    }
  }
}

TEST(PublishedWeights, AreTheSameBitsWhereRanksShareExperts) {
  for (const std::string name : {"mixtral_bf16_shards", "gpt_oss_bf16", "gpt_oss_mxfp4", "qwen3_next_bf16"}) {
    const Loaded one = load_on(1, name, "full_shard", true);
    const int all = static_cast<int>(config_of(name).experts);
    for (const auto& [world, experts] : {std::pair{2, 2}, {4, 2}, {all, all}})
      for (const char* strategy : {"full_shard", "replicate"})
        EXPECT_EQ(testing::max_difference(one.values, load_on(world, name, strategy, true, experts).values), 0.0) << name;
  }
}

// Half precision is widened exactly, transposed or not, into any parameter.
TEST(PublishedWeights, AreWidenedExactly) {
  const auto expect_widened = [](const std::string& name, auto half) {
    using Half = decltype(half);
    const models::ModelConfig config = config_of(name);
    const Values values = load_on(3, name, "full_shard", true).values;
    const auto files = models::PublishedFiles::open(folder_of(name));
    for (const models::PublishedTensor& t : models::published_tensors(config)) {
      const auto prefix = models::published_prefix(config);
      const bool bare = !files.tensors().contains(t.name) && t.name.starts_with(prefix);
      const std::string there = bare ? t.name.substr(prefix.size()) : t.name;
      const int64_t rows = t.rows(), columns = t.row_size();
      std::vector<Half> read(static_cast<size_t>(t.shape.numel()));
      files.tensors().at(there)->read(there, 0, t.shape.numel(), read.data());
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c)
          ASSERT_EQ(values.at(t.own)[(t.first_row + r) * columns + c],
                    static_cast<float>(read[t.place(t.transposed ? c * rows + r : r * columns + c)])) << t.name << " " << r << " " << c;
    }
  };
  expect_widened("gpt2_f16_base", f16());
  expect_widened("llama_bf16_shards", bf16());
  expect_widened("mixtral_bf16_shards", bf16());
  expect_widened("deepseek_v3_bf16", bf16());
  expect_widened("gpt_oss_bf16", bf16());
}

TEST(PublishedWeights, AShorterContextTakesTheFirstPositions) {
  for (const std::string name : kFolders) {
    SCOPED_TRACE(name);
    models::ModelConfig config = config_of(name);
    config.context = 5;
    const auto model = models::make_language_model(config, 0);
    materialize(*model, Device::cpu(), {.dtype = kF64});
    models::load_weights(*model, folder_of(name));
    const Expected expected(name, config.rope_scaling.rope_type == "longrope" ? "short_logits" : "logits");  // whose factors are others
    const int64_t vocab = config.vocab, context = std::ssize(expected.logits) / (2 * vocab);
    const std::vector<double> actual = model->logits(slice(expected.tokens_BT, 1, 0, 5)).to_vector<double>();
    std::vector<double> first;
    for (int64_t row = 0; row < 2; ++row)
      first.insert(first.end(), expected.logits.begin() + row * context * vocab,
                   expected.logits.begin() + (row * context + 5) * vocab);
    EXPECT_LE(relative_difference(actual, first), has_linear_attention(name) ? 2e-6 : 1e-6);
  }
}

// vLLM's losses of DeepSeek-V3's last layers. These are read if the model has them, on any number of ranks, and otherwise skipped.
TEST(PublishedWeights, LayersForFurtherTokensHaveTheLossesOfTheirDepths) {
  const std::string name = "deepseek_v3_bf16";
  const Expected expected(name);
  const int64_t rows = expected.tokens_BT.size(0), context = expected.tokens_BT.size(1);
  std::vector<int32_t> targets = expected.tokens_BT.to_vector<int32_t>();
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t t = 0; t < context; ++t)
      targets[static_cast<size_t>(r * context + t)] = t + 1 < context ? targets[static_cast<size_t>(r * context + t + 1)] : -1;
  double losses[2];
  SafetensorsFile::open(folder_of(name) + "/logits.safetensors").read("mtp_losses", 0, 2, losses);
  for (const int64_t layers : {1, 2, 3}) {
    models::ModelConfig config = config_of(name);
    config.mtp_layers = layers, config.mtp_loss = 1;
    config.expert_balance_rate = 0;
    const auto model = models::make_language_model(config, 0);
    materialize(*model, Device::cpu(), {.dtype = kF64});
    models::load_weights(*model, folder_of(name));
    const auto loss = [&] { return model->loss(expected.tokens_BT, Tensor::from(targets, {rows, context})).item<double>(); };
    const double with = loss();
    model->eval();
    if (layers < 3) EXPECT_NEAR(with - loss(), layers == 1 ? losses[0] : (losses[0] + losses[1]) / 2, 1e-5) << layers;
    else EXPECT_GT(with, loss());  // the file has no third one, so it keeps its initial values
  }
}

// A model for generation has as many as the files; with fewer it loads, too.
TEST(PublishedWeights, LayersForFurtherTokensAreThereForDrafts) {
  models::SavedModel saved = models::open_saved_model("generate", folder_of("deepseek_v3_bf16"));
  EXPECT_EQ(saved.model.mtp_layers, 2);
  EXPECT_EQ(models::open_saved_model("generate", folder_of("deepseek_v2_f32")).model.mtp_layers, 0);
  for (const int64_t layers : {0, 1, 2}) {
    saved.model.mtp_layers = layers;
    const auto model = models::make_language_model(saved.model, saved.vocab, /*frozen=*/true);
    materialize(*model);
    saved.load(*model);
    EXPECT_EQ(model->num_mtp_layers(), layers);
  }
}

// Other models' vocab.json and merges.txt are read by another pattern: only a tokenizer.json says which.
TEST(PublishedWeights, PairsWithoutATokenizerFileAreGpt2s) {
  const ScratchFolder folder;
  std::filesystem::copy_file("tests/models/bpe/encoder.json", folder / "vocab.json");
  std::filesystem::copy_file("tests/models/bpe/vocab.bpe", folder / "merges.txt");
  const auto read = [&](const std::string& type) {
    write_file(folder / "config.json", "{\"model_type\": \"" + type + "\"}");
    return models::read_published_text(folder.path());
  };
  EXPECT_TRUE(read("gpt2").tokenizer);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { read("qwen2"); }), HasSubstr("are of a \"qwen2\", not of a gpt2"));
}

// The ids that it states count, and a later processor's stand before those of an earlier one, as in `tokenizers`.
TEST(PublishedWeights, APostProcessorsIdsAreReadBeforeATexts) {
  const ScratchFolder folder;
  const std::string path = "tests/models/huggingface/llama3.json";
  Json file = Json::parse(File::open(path).read_all(), path);
  const auto before = [&](const std::string& processor) {
    write_file(folder / "tokenizer.json", file.set("post_processor", Json::parse(processor, "here")).dump());
    return models::read_published_text(folder.path()).before;
  };
  const auto puts = [](const char* name, const char* ids) {
    return str(R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":")", name, R"(","type_id":0}},{"Sequence":{"id":"A","type_id":0}},)",
               R"({"SpecialToken":{"id":"end","type_id":0}}],"special_tokens":{")", name, R"(":{"id":"","ids":)", ids, R"(,"tokens":[]}}})");
  };
  EXPECT_THAT(before(puts("<|begin_of_text|>", "[420]")), ElementsAre(420));
  EXPECT_THAT(before(puts("<|begin_of_text|>", "[422]")), ElementsAre(422));
  EXPECT_THAT(before(puts("BOS", "[420,422]")), ElementsAre(420, 422));
  EXPECT_THAT(before(R"({"type":"BertProcessing","sep":["x",421],"cls":["<|begin_of_text|>",422]})"), ElementsAre(422));
  EXPECT_THAT(before(str(R"({"type":"Sequence","processors":[)", puts("a", "[420]"), R"(,{"type":"ByteLevel"},)", puts("b", "[422]"), "]}")),
              ElementsAre(422, 420));
  EXPECT_THAT(before(R"({"type":"ByteLevel"})"), ElementsAre());
  EXPECT_THAT(before("null"), ElementsAre());
  const auto refused = [&](const std::string& processor) { return message_of<DataError>(ExitCode::kData, [&] { before(processor); }); };
  EXPECT_THAT(refused(puts("a", "[423]")), HasSubstr("tokenizer.json': post_processor: it puts the token 423 before a text, of a vocabulary of 423"));
  EXPECT_THAT(refused(puts("a", "[-1]")), HasSubstr("-1 is no id of a token"));
  EXPECT_THAT(refused(R"({"type":"BertProcessing","cls":["x"]})"), HasSubstr("cls is not a token and its id"));
}

// A model with one layer less does not take an MTP layer for its last one.
TEST(PublishedWeights, ALayerTooManyIsNamed) {
  models::ModelConfig config = config_of("deepseek_v3_bf16");
  config.layers = 2;
  const auto files = models::PublishedFiles::open(folder_of("deepseek_v3_bf16") + "/model.safetensors");
  std::vector<nn::StatePiece> none;
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { models::fill_weights(none, files, config); }),
              HasSubstr("is nothing that this llama of 2 layers has"));
}

TEST(PublishedWeights, MustBeThoseOfTheModel) {
  const auto message = [](const std::string& name, auto&& change) {
    models::ModelConfig config = config_of(name);
    change(config);
    const auto model = models::make_language_model(config, 0);
    materialize(*model);
    return message_of<ConfigError>(ExitCode::kConfig, [&] { models::load_weights(*model, folder_of(name)); });
  };
  const auto gpt2 = [&](auto&& change) { return message("gpt2_f32_shards", change); };
  using Config = models::ModelConfig;
  EXPECT_THAT(gpt2([](Config& c) { c.heads = 4, c.kv_heads = 4; }), HasSubstr("model.heads is 4, but 3 in tests/models"));
  EXPECT_THAT(gpt2([](Config& c) { c.layers = 3; }), HasSubstr("model.layers is 3, but 2 in"));
  EXPECT_THAT(gpt2([](Config& c) { c.vocab = 64; }), HasSubstr("model.vocab is 64, but 29 in"));
  EXPECT_THAT(gpt2([](Config& c) { c.norm_eps = 1e-6; }), HasSubstr("model.norm_eps is 1e-06, but 1e-05 in"));
  EXPECT_THAT(gpt2([](Config& c) { c.context = 12; }), HasSubstr("model.context is 12, more than the 11 of"));
  EXPECT_THAT(message("llama_f32_tied", [](Config& c) { c.rope_theta = 5e5; }), HasSubstr("model.rope_theta is 500000, but 10000 in"));
  EXPECT_THAT(message("llama_f32_tied", [](Config& c) { c.rope_scaling.rope_type = "linear"; }),
              HasSubstr("model.rope_scaling.rope_type is linear, but default in"));
  EXPECT_THAT(message("llama_f32_scaled", [](Config& c) { c.rope_scaling.rope_type = "default"; }),
              HasSubstr("model.rope_scaling.rope_type is default, but llama3 in"));
  const auto scaled = [&](auto change) {
    return message("llama_f32_scaled", [&](Config& c) { change(c.rope_scaling); });
  };
  using Scaling = models::RopeScalingConfig;
  EXPECT_THAT(scaled([](Scaling& s) { s.factor = 4; }), HasSubstr("rope_scaling.factor is 4, but 8 in"));
  EXPECT_THAT(scaled([](Scaling& s) { s.low_freq_factor = 2; }), HasSubstr("low_freq_factor is 2, but 1 in"));
  EXPECT_THAT(scaled([](Scaling& s) { s.high_freq_factor = 8; }), HasSubstr("high_freq_factor is 8, but 4 in"));
  EXPECT_THAT(scaled([](Scaling& s) { s.original_max_position_embeddings = 64; }),
              HasSubstr("original_max_position_embeddings is 64, but 32 in"));
  const auto yarn = [&](auto change) { return message("qwen3_f32_yarn", [&](Config& c) { change(c.rope_scaling); }); };
  EXPECT_THAT(yarn([](Scaling& s) { s.beta_fast = 32; }), HasSubstr("rope_scaling.beta_fast is 32, but 4 in"));
  EXPECT_THAT(yarn([](Scaling& s) { s.beta_slow = 2; }), HasSubstr("rope_scaling.beta_slow is 2, but 1 in"));
  EXPECT_THAT(yarn([](Scaling& s) { s.truncate = false; }), HasSubstr("rope_scaling.truncate is false, but true in"));
  EXPECT_THAT(yarn([](Scaling& s) { s.attention_factor = 2; }), HasSubstr("rope_scaling.attention_factor is 2, but 1.06931472 in"));
  EXPECT_THAT(yarn([](Scaling& s) { s.mscale = 2, s.mscale_all_dim = 1; }), HasSubstr("attention_factor is 1.06482163, but 1.0693"));
  const auto longrope = [&](auto change) { return message("phi3_bf16_longrope", [&](Config& c) { change(c.rope_scaling); }); };
  EXPECT_THAT(longrope([](Scaling& s) { s.short_factor = "1 1.25 1.75"; }), HasSubstr("rope_scaling.short_factor is 1 1.25 1.75, but 1 1.25 1.5 in"));
  EXPECT_THAT(longrope([](Scaling& s) { s.long_factor = s.short_factor; }), HasSubstr("rope_scaling.long_factor is 1 1.25 1.5, but 1.125 3 8.5 in"));
  EXPECT_THAT(longrope([](Scaling& s) { s.attention_factor = 2; }), HasSubstr("rope_scaling.attention_factor is 2, but 1.23625274 in"));
  EXPECT_THAT(longrope([](Scaling& s) { s.original_max_position_embeddings = 9; }), HasSubstr("original_max_position_embeddings is 9, but 8 in"));
  EXPECT_EQ(longrope([](Scaling& s) { s.short_factor = "1.0 125e-2 1.50"; }), "no exception");
  EXPECT_THAT(message("qwen2_bf16_tied", [](Config& c) { c.qkv_bias = false; }), HasSubstr("model.qkv_bias is false, but true in"));
  EXPECT_THAT(message("qwen3_moe_bf16", [](Config& c) { c.normalize_experts = true; }),
              HasSubstr("model.normalize_experts is true, but false in"));
  const auto deepseek = [&](auto change) { return message("deepseek_v3_bf16", change); };
  EXPECT_THAT(deepseek([](Config& c) { c.kv_lora_rank = 8; }), HasSubstr("model.kv_lora_rank is 8, but 7 in"));
  EXPECT_THAT(deepseek([](Config& c) { c.q_lora_rank = 0; }), HasSubstr("model.q_lora_rank is 0, but 6 in"));
  EXPECT_THAT(deepseek([](Config& c) { c.qk_nope_head_dim = 6; }), HasSubstr("model.qk_nope_head_dim is 6, but 5 in"));
  EXPECT_THAT(deepseek([](Config& c) { c.qk_rope_head_dim = 2; }), HasSubstr("model.qk_rope_head_dim is 2, but 4 in"));
  EXPECT_THAT(deepseek([](Config& c) { c.v_head_dim = 4; }), HasSubstr("model.v_head_dim is 4, but 3 in"));
  EXPECT_THAT(deepseek([](Config& c) { c.rope_scaling.mscale_all_dim = 1; }), HasSubstr("mscale_all_dim is 1, but 0.8 in"));
  const auto dots = [&](auto change) { return message("dots1_bf16", change); };
  EXPECT_THAT(dots([](Config& c) { c.expert_affinity = "softmax"; }), HasSubstr("model.expert_affinity is softmax, but sigmoid in"));
  EXPECT_THAT(dots([](Config& c) { c.expert_bias = false; }), HasSubstr("model.expert_bias is false, but true in"));
  EXPECT_THAT(dots([](Config& c) { c.expert_scale = 1; }), HasSubstr("model.expert_scale is 1, but 2.5 in"));
  EXPECT_THAT(dots([](Config& c) { c.routing_groups = 2; }), HasSubstr("model.routing_groups is 2, but 3 in"));
  EXPECT_THAT(dots([](Config& c) { c.routing_groups_per_token = 3; }), HasSubstr("model.routing_groups_per_token is 3, but 2 in"));
  EXPECT_THAT(dots([](Config& c) { c.shared_experts = 1; }), HasSubstr("model.shared_experts is 1, but 2 in"));
  EXPECT_THAT(dots([](Config& c) { c.dense_layers = 0; }), HasSubstr("model.dense_layers is 0, but 1 in"));
  EXPECT_THAT(dots([](Config& c) { c.mlp_width = 8; }), HasSubstr("model.mlp_width is 8, but 24 in"));
  EXPECT_THAT(message("qwen3_bf16_tied", [](Config& c) { c.qk_norm = false; }), HasSubstr("model.qk_norm is false, but true in"));
  EXPECT_THAT(message("mistral_f32_heads", [](Config& c) { c.head_dim = 4; }), HasSubstr("model.head_dim is 4, but 6 in"));
  EXPECT_THAT(message("mistral_f32_window", [](Config& c) { c.window = 5; }), HasSubstr("model.window is 5, but 4 in"));
  EXPECT_THAT(message("mistral_f32", [](Config& c) { c.window = 5; }), HasSubstr("model.window is 5, but 0 in"));
  EXPECT_THAT(message("qwen3_bf16_windows", [](Config& c) { c.full_attention_every = 3; }),
              HasSubstr("model.full_attention_every is 3, but 2 in"));
  EXPECT_THAT(message("smollm3_bf16", [](Config& c) { c.nope_every = 4; }), HasSubstr("model.nope_every is 4, but 2 in"));
  const auto gemma = [&](auto change) { return message("gemma3_bf16", change); };
  EXPECT_THAT(gemma([](Config& c) { c.gelu_gate = false; }), HasSubstr("model.gelu_gate is false, but true in"));
  EXPECT_THAT(gemma([](Config& c) { c.post_norms = false; }), HasSubstr("model.post_norms is false, but true in"));
  EXPECT_THAT(gemma([](Config& c) { c.scale_embedding = false; }), HasSubstr("model.scale_embedding is false, but true in"));
  EXPECT_THAT(message("gemma2_bf16", [](Config& c) { c.attn_logit_softcapping = 50; }), HasSubstr("model.attn_logit_softcapping is 50, but 1.5 in"));
  EXPECT_THAT(message("gemma2_bf16", [](Config& c) { c.final_logit_softcapping = 0; }), HasSubstr("model.final_logit_softcapping is 0, but 2.5 in"));
  EXPECT_THAT(gemma([](Config& c) { c.window_rope_theta = 31; }), HasSubstr("model.window_rope_theta is 31, but 30 in"));
  EXPECT_THAT(message("olmo2_bf16", [](Config& c) { c.qk_norm_all_heads = false; }), HasSubstr("model.qk_norm_all_heads is false, but true in"));
  EXPECT_THAT(message("olmo2_bf16", [](Config& c) { c.pre_norms = true; }), HasSubstr("model.pre_norms is true, but false in"));
  const auto mixtral = [&](auto change) { return message("mixtral_bf16_shards", change); };
  EXPECT_THAT(mixtral([](Config& c) { c.experts = 4; }), HasSubstr("model.experts is 4, but 5 in"));
  EXPECT_THAT(mixtral([](Config& c) { c.experts_per_token = 2; }), HasSubstr("model.experts_per_token is 2, but 3 in"));
  EXPECT_THAT(mixtral([](Config& c) { c.expert_hidden = 8; }), HasSubstr("model.expert_hidden is 8, but 24 in"));
  EXPECT_THAT(mixtral([](Config& c) { c.normalize_experts = false; }), HasSubstr("model.normalize_experts is false, but true in"));
  EXPECT_THAT(message("llama_f32_tied", [](Config& c) { c.kv_heads = 4; }), HasSubstr("model.kv_heads is 4, but 2 in"));

  nn::Linear other(3, 3);
  materialize(other);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::load_weights(other, folder_of("llama_f32_tied")); }),
              HasSubstr("for Gpt and Llama, not for"));
}

// Weights that are stored in a narrower type are rounded to nearest even, as they would be for compute.
TEST(PublishedWeights, AreRoundedToTheTypeThatTheyRestIn) {
  for (const std::string name : {"gpt2_f32_shards", "gpt2_f16_base", "llama_bf16_shards", "gpt_oss_mxfp4"})
    for (const DType dtype : {kBF16, kF16}) {
      const auto wide = models::make_language_model(config_of(name), 0), narrow = models::make_language_model(config_of(name), 0);
      for (nn::Parameter& p : narrow->parameters()) p.freeze();
      materialize(*wide);
      materialize(*narrow, Device::cpu(), {.dtype = dtype});
      models::load_weights(*wide, folder_of(name));
      models::load_weights(*narrow, folder_of(name));
      const auto a = wide->parameters(), b = narrow->parameters();
      for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(identical(cast(full_parameter(a[i]), dtype), full_parameter(b[i]))) << a[i].name();
    }
  // For trained parameters that rounding would be lost silently, so it is an error.
  const auto model = models::make_language_model(config_of("gpt2_f32_shards"), 0);
  materialize(*model, Device::cpu(), {.dtype = kBF16});
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::load_weights(*model, folder_of("gpt2_f32_shards")); }),
              HasSubstr("is trained and bf16; weights go to masters in f32 or f64"));
}

}  // namespace
}  // namespace sheaf
