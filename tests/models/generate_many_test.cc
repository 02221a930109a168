// Many prompts at once against each of them alone, whatever its neighbours.
#include "sheaf/models/generate_many.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "sheaf/distributed/run_local.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/llama.h"
#include "sheaf/nn/shard.h"
#include "sheaf/nn/unsharded.h"

namespace sheaf {
namespace {

using models::Continuation;
using models::Decoder;
using models::GenerateConfig;
using models::generate_many;
using models::GenerateManyOptions;
using models::Gpt;
using models::GptConfig;
using models::Llama;
using models::LlamaConfig;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kContext = 150, kVocab = 61;
using Prompts = std::vector<std::vector<int32_t>>;

GptConfig gpt() {
  GptConfig c;
  c.layers = 2, c.heads = 4, c.width = 64, c.context = kContext, c.vocab = kVocab;
  return c;
}
LlamaConfig llama(int64_t kv_heads = 2) {
  LlamaConfig c;
  c.layers = 2, c.heads = 4, c.kv_heads = kv_heads, c.width = 64, c.context = kContext, c.vocab = kVocab;
  return c;
}

std::vector<int32_t> text(int64_t count, int64_t seed) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>((i * i + 5 * i * seed + 11 * seed + i / 3) % kVocab));
  return out;
}

Prompts prompts(const std::vector<int64_t>& lengths) {
  Prompts out;
  for (const int64_t n : lengths) out.push_back(text(n, std::ssize(out)));
  return out;
}

// Lengths around blocks of 64 keys, one that fills the context, and equal ones.
const std::vector<int64_t> kLengths = {3, 70, 1, 64, kContext, 12, 65, kContext - 1, 12, 128, 7};

GenerateConfig drawing(int64_t tokens) {
  GenerateConfig c;
  c.tokens = tokens, c.temperature = 1;
  return c;
}

// Each prompt alone, in a batch of one.
std::vector<Continuation> one_by_one(Decoder& model, const Prompts& all, const GenerateConfig& config, GenerateManyOptions options) {
  std::vector<Continuation> out;
  for (size_t i = 0; i < all.size(); ++i) {
    options.first = static_cast<int64_t>(i);
    out.push_back(generate_many(model, std::span(&all[i], 1), config, options)[0]);
  }
  return out;
}

void expect_equal(const std::vector<Continuation>& got, const std::vector<Continuation>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << what << ", prompt " << i;
    EXPECT_EQ(got[i].ended, want[i].ended) << what << ", prompt " << i;
  }
}

template <class M, class Config>
void expect_prompts_to_be_alone(const Config& config, DType dtype, const std::string& what) {
  M model(config);
  materialize(model, Device::cpu(), {.seed = 3, .dtype = dtype});
  const Prompts all = prompts(kLengths);
  const std::vector<int32_t> ends = {5, 17};
  const GenerateManyOptions options{.context = kContext, .vocab = kVocab, .ends = ends};
  const GenerateConfig draws = drawing(40);
  const std::vector<Continuation> want = one_by_one(model, all, draws, options);
  EXPECT_TRUE(std::ranges::any_of(want, &Continuation::ended) && !std::ranges::all_of(want, &Continuation::ended)) << what;
  for (const int64_t at_once : {2, 3, 64}) {
    GenerateManyOptions some = options;
    some.at_once = at_once;
    expect_equal(generate_many(model, all, draws, some), want, str(what, ", ", at_once, " at once"));
  }
}

TEST(GenerateMany, WhatAPromptGetsDoesNotDependOnOthers) {
  for (const DType dtype : {kF32, kBF16}) {
    expect_prompts_to_be_alone<Gpt>(gpt(), dtype, "gpt");
    expect_prompts_to_be_alone<Llama>(llama(), dtype, "llama");
    LlamaConfig c = llama();
    c.layers = 3, c.window = 40, c.full_attention_every = 2, c.attention_sinks = true;
    expect_prompts_to_be_alone<Llama>(c, dtype, "windows and sinks");
    c = llama();
    c.qk_norm = true, c.rotary_dim = 8, c.attention_gate = true, c.rope_scaling = RotaryScaling::yarn(8, 60);
    expect_prompts_to_be_alone<Llama>(c, dtype, "gates, yarn");
    c = llama(/*kv_heads=*/0);
    c.kv_lora_rank = 48, c.q_lora_rank = 40, c.qk_nope_head_dim = 32, c.qk_rope_head_dim = 16, c.v_head_dim = 24;
    expect_prompts_to_be_alone<Llama>(c, dtype, "latent attention");
    c = llama();
    c.experts = 4, c.experts_per_token = 2;
    expect_prompts_to_be_alone<Llama>(c, dtype, "experts");
  }
}

// The logits of left-padded rows are those of the row alone; chunks of the delta rule begin elsewhere, which changes rounding.
TEST(GenerateMany, LinearAttentionIsTheSameUpToRounding) {
  LlamaConfig c = llama();
  c.layers = 3, c.linear_key_heads = 2, c.full_attention_every = 3;
  Llama model(c);
  materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
  model.eval();
  for (const auto& [longest, shorter] : std::initializer_list<std::pair<int64_t, int64_t>>{{70, 1}, {70, 2}, {64, 5}, {130, 66}, {130, 127}}) {
    const std::vector<int32_t> a = text(longest, 1), b = text(shorter, 2);
    std::vector<int32_t> both = a;
    both.resize(static_cast<size_t>(2 * longest - shorter), 9);  // padding of anything
    both.insert(both.end(), b.begin(), b.end());
    nn::KeyValueCache cache(kContext), alone(kContext);
    cache.set_begins(Tensor::from<int32_t>({0, static_cast<int32_t>(longest - shorter)}, {2}));
    Tensor rows = model.next_logits(Tensor::from(both, {2, longest}), cache), row = model.next_logits(Tensor::from(b, {1, shorter}), alone);
    for (int step = 0; step < 8; ++step) {
      const auto got = slice(rows, 0, 1, 2).clone().to_vector<double>(), want = row.to_vector<double>();
      for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-12) << longest << ' ' << shorter << " step " << step;
      rows = model.next_logits(Tensor::from<int32_t>({step, 3 * step}, {2, 1}), cache);
      row = model.next_logits(Tensor::from<int32_t>({3 * step}, {1, 1}), alone);
    }
  }
}

TEST(GenerateMany, TheFirstPromptGetsWhatGenerateGives) {
  Gpt model(gpt());
  materialize(model, Device::cpu(), {.seed = 3});
  const std::vector<int32_t> ends = {5};
  for (const auto& [length, tokens] : std::initializer_list<std::pair<int64_t, int64_t>>{{3, 60}, {140, 11}, {kContext, 1}, {20, 0}}) {
    const Prompts one = {text(length, 1)};
    const GenerateManyOptions options{.context = kContext, .vocab = kVocab, .ends = ends};
    EXPECT_EQ(generate_many(model, one, drawing(tokens), options)[0].tokens,
              models::generate(model, one[0], kContext, kVocab, drawing(tokens), {}, ends)) << length;
  }
}

TEST(GenerateMany, AModelInTrainingStaysInIt) {
  GptConfig c = gpt();
  c.dropout = 0.5;
  Gpt model(c);
  materialize(model, Device::cpu(), {.seed = 3});
  const Prompts one = {text(9, 1)};
  const auto many = [&] { return generate_many(model, one, drawing(20), {.context = kContext, .vocab = kVocab})[0].tokens; };
  const std::vector<int32_t> tokens = many();
  EXPECT_EQ(models::generate(model, one[0], kContext, kVocab, drawing(20)), tokens);
  EXPECT_TRUE(model.training() && model.blocks[0].training());
  model.eval();
  EXPECT_EQ(many(), tokens) << "without dropout";
}

TEST(GenerateMany, EndsAtTheContext) {
  Gpt model(gpt());
  materialize(model, Device::cpu(), {.seed = 3});
  const Prompts all = prompts({kContext, kContext - 5, 2});
  const std::vector<Continuation> got = generate_many(model, all, drawing(1000), {.context = kContext, .vocab = kVocab});
  EXPECT_EQ(got[0].tokens.size(), 1u);
  EXPECT_EQ(got[1].tokens.size(), 6u);
  EXPECT_EQ(got[2].tokens.size(), static_cast<size_t>(kContext - 1));
  EXPECT_FALSE(got[2].ended);
}

TEST(GenerateMany, SamplesOfOnePromptAreDrawnByThemselves) {
  Gpt model(gpt());
  materialize(model, Device::cpu(), {.seed = 3});
  const Prompts same(40, text(5, 1));
  const std::vector<Continuation> got = generate_many(model, same, drawing(3), {.context = kContext, .vocab = kVocab});
  std::map<std::vector<int32_t>, int> texts;
  for (const Continuation& c : got) ++texts[c.tokens];
  EXPECT_GE(texts.size(), 39u) << "of 61^3 texts that are nearly alike likely";
}

TEST(GenerateMany, SaysWhatIsWrong) {
  Gpt model(gpt());
  materialize(model, Device::cpu(), {.seed = 3});
  const auto message = [&](const Prompts& all, GenerateManyOptions options) -> std::string {
    try {
      generate_many(model, all, drawing(3), options);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(message({{1}, {}}, {.context = kContext, .vocab = kVocab, .first = 7}), "[generate_many] prompt 8 is empty: give at least one token");
  EXPECT_EQ(message({text(kContext + 1, 1)}, {.context = kContext, .vocab = kVocab}), "[generate_many] prompt 0 has 151 tokens, the context 150");
  EXPECT_THAT(message({{1}}, {.vocab = kVocab}), HasSubstr("context 0"));
  EXPECT_EQ(message({}, {.context = kContext, .vocab = kVocab}), "");
  EXPECT_EQ(message({{1}}, {.context = kContext + 1, .vocab = kVocab}), "[generate_many] context 151: the model's is 150");
  assign(model.wte.weight, full({kVocab, 64}, std::nan("")));
  EXPECT_THAT(message({{1, 2}}, {.context = kContext, .vocab = kVocab, .first = 41}),
              HasSubstr("[generate_many] prompt 41: [generate] position 2, after"));
}

// Clearing a cache also clears the offsets at which rows began.
TEST(GenerateMany, AClearedCacheHasNoPadding) {
  Gpt model(gpt());
  materialize(model, Device::cpu(), {.seed = 3});
  const Tensor tokens = Tensor::from(text(16, 1), {2, 8});
  nn::KeyValueCache fresh(kContext), cache(kContext);
  const Tensor want = model.next_logits(tokens, fresh);
  cache.set_begins(Tensor::from<int32_t>({0, 5}, {2}));
  EXPECT_FALSE(identical(model.next_logits(tokens, cache), want));
  cache.clear();
  EXPECT_TRUE(identical(model.next_logits(tokens, cache), want));
  // Padding may be read token by token, too.
  nn::KeyValueCache at_once(kContext), slowly(kContext);
  Tensor all, last;
  for (nn::KeyValueCache* c : {&at_once, &slowly}) c->set_begins(Tensor::from<int32_t>({0, 5}, {2}));
  all = model.next_logits(tokens, at_once);
  for (int64_t t = 0; t < 8; ++t) last = model.next_logits(slice(tokens, 1, t, t + 1), slowly);
  EXPECT_TRUE(identical(last, all));
}

// ---- ranks ------------------------------------------------------------------------------------------------------------

struct World2D {
  int data, model;
};

TEST(GenerateMany, EveryWorldGivesTheSame) {
  const Prompts all = prompts(kLengths);
  const std::vector<int32_t> ends = {5, 17};
  std::vector<Continuation> want;
  for (const auto& [data, model_ranks] : {World2D{1, 1}, World2D{2, 1}, World2D{3, 1}, World2D{5, 1}, World2D{2, 2}})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::replicate})
      run_local(data * model_ranks, [&](World& w) {
        Llama model(llama());
        const Mesh mesh = w.mesh({{"data", data}, {"model", model_ranks}});
        shard(model, mesh, {.axis = "data", .tensor_axis = "model", .units = nn::units_of<models::LlamaBlock>(), .strategy = strategy});
        materialize(model, Device::cpu(), {.seed = 3});
        // Uneven shares, one of them empty: the last rank has the remainder.
        const int rank = mesh.coordinate("data");
        const size_t share = data == 5 ? 3 : (all.size() + 1) / static_cast<size_t>(data),
                     begin = std::min(all.size(), share * static_cast<size_t>(rank)), end = std::min(all.size(), begin + share);
        Layout rows(mesh.spec, Placement::replicate());
        rows[mesh.spec->axis("data")] = Placement::shard(0);
        const GenerateManyOptions options{.context = kContext, .vocab = kVocab, .ends = ends, .at_once = 2, .rows = rows,
                                          .first = static_cast<int64_t>(begin)};
        for (const bool whole : {false, true}) {
          std::optional<nn::Unsharded> kept;
          if (whole) kept.emplace(model);
          const auto got = generate_many(model, std::span(all).subspan(begin, end - begin), drawing(20), options);
          if (want.empty()) want = got;
          // A tensor axis adds up in another order, which rarely changes the sampled tokens.
          expect_equal(got, {want.begin() + static_cast<ptrdiff_t>(begin), want.begin() + static_cast<ptrdiff_t>(end)},
                       str(data, " x ", model_ranks, ' ', name(strategy), whole ? " whole" : "", ", rank ", w.rank()));
        }
      }, {.threads_per_rank = 1});
  EXPECT_EQ(want.size(), all.size());
}

// Rows are cut over two axes, and there are fewer of them than ranks.
TEST(GenerateMany, RanksThatShareExpertsHavePromptsOfTheirOwn) {
  LlamaConfig c = llama();
  c.experts = 4, c.experts_per_token = 2;
  const Prompts all = prompts({3, 20, 1});
  std::vector<Continuation> want;
  for (const bool shares : {false, true})
    run_local(shares ? 4 : 1, [&](World& w) {
      Llama model(c);
      const Mesh mesh = w.mesh({{"data", shares ? 2 : 1}, {"expert", shares ? 2 : 1}});
      shard(model, mesh, {.axis = "data", .expert_axis = "expert", .units = nn::units_of<models::LlamaBlock>()});
      materialize(model, Device::cpu(), {.seed = 3});
      const size_t share = shares ? 1 : 3, begin = std::min<size_t>(3, share * static_cast<size_t>(w.rank())),
                   end = std::min<size_t>(3, begin + share);
      const auto got =
          generate_many(model, std::span(all).subspan(begin, end - begin), drawing(12),
                        {.context = kContext, .vocab = kVocab, .rows = Layout(mesh.spec, Placement::shard(0)), .first = static_cast<int64_t>(begin)});
      if (!shares) want = got;
      expect_equal(got, {want.begin() + static_cast<ptrdiff_t>(begin), want.begin() + static_cast<ptrdiff_t>(end)}, str("rank ", w.rank()));
    }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf
