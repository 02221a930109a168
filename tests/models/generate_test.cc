// Generation with a key/value cache against the definition: every token from the logits of its whole window.
#include "sheaf/models/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "sheaf/core/random.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/nn/shard.h"

namespace sheaf {
namespace {

using models::Gpt;
using models::GptConfig;
using models::Llama;
using models::LlamaConfig;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// More than two blocks of attention's keys, and an MLP deeper than a block of the product.
constexpr int64_t kContext = 150, kVocab = 61;

GptConfig gpt(int64_t width = 128) {
  GptConfig c;
  c.layers = 2, c.heads = 4, c.width = width, c.context = kContext, c.vocab = kVocab;
  return c;
}
LlamaConfig llama(int64_t kv_heads = 2) {
  LlamaConfig c;
  c.layers = 2, c.heads = 4, c.kv_heads = kv_heads, c.width = 128, c.context = kContext, c.vocab = kVocab;
  return c;
}

LlamaConfig qwen3() {
  LlamaConfig c = llama();
  c.head_dim = 40, c.qk_norm = true;
  return c;
}

LlamaConfig olmo() {
  LlamaConfig c = qwen3();
  c.qk_norm_all_heads = c.post_norms = true, c.pre_norms = false;
  return c;
}

LlamaConfig gemma2() {
  LlamaConfig c = llama();
  c.attn_logit_softcapping = 0.5, c.final_logit_softcapping = 2, c.post_norms = true;
  return c;
}

LlamaConfig latent() {
  LlamaConfig c = llama(/*kv_heads=*/0);
  c.kv_lora_rank = 48, c.q_lora_rank = 40, c.qk_nope_head_dim = 32, c.qk_rope_head_dim = 16, c.v_head_dim = 24;
  return c;
}

// The window is no multiple of a block of keys, and begins in the third block.
LlamaConfig windowed() {
  LlamaConfig c = llama();
  c.layers = 3, c.window = 40, c.full_attention_every = 2;
  return c;
}

std::vector<int32_t> text(int64_t count) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>((i * i + 5 * i + i / 3) % kVocab));
  return out;
}

// ---- the cache --------------------------------------------------------------------------------------------------------

// Reads a text in pieces of these sizes and compares the logits after each with those of the whole text.
template <class M, class Config>
void expect_rows_of_one_pass(const Config& config, DType dtype, const std::vector<int64_t>& pieces, int64_t batch = 1) {
  M model(config);
  materialize(model, Device::cpu(), {.seed = 3, .dtype = dtype});
  int64_t count = 0;
  for (int64_t piece : pieces) count += piece;
  const Tensor tokens = Tensor::from(text(batch * count), {batch, count}), all = model.logits(tokens);
  nn::KeyValueCache cache(kContext);
  for (int64_t piece : pieces) {
    const int64_t end = cache.length() + piece;
    const Tensor next = model.next_logits(slice(tokens, 1, cache.length(), end), cache);
    ASSERT_EQ(cache.length(), end);
    EXPECT_TRUE(identical(next.clone(), slice(all, 1, end - 1, end).clone())) << str(dtype, " at ", end, ", piece ", piece);
  }
}

std::vector<int64_t> one_by_one(int64_t first, int64_t count) {
  std::vector<int64_t> out{first};
  out.resize(static_cast<size_t>(count - first + 1), 1);
  return out;
}

TEST(KeyValueCache, GivesTheBitsOfOnePass) {
  for (DType dtype : {kF32, kF64, kBF16, kF16})
    for (const std::vector<int64_t>& pieces :
         {one_by_one(1, kContext), one_by_one(70, kContext), {64, 64, 22}, {5, 1, 90, 1, 2, 51}, {kContext}}) {
      expect_rows_of_one_pass<Gpt>(gpt(), dtype, pieces);
      expect_rows_of_one_pass<Llama>(llama(), dtype, pieces);
      expect_rows_of_one_pass<Llama>(qwen3(), dtype, pieces);
      expect_rows_of_one_pass<Llama>(olmo(), dtype, pieces);
      expect_rows_of_one_pass<Llama>(gemma2(), dtype, pieces);
      expect_rows_of_one_pass<Llama>(windowed(), dtype, pieces);
      expect_rows_of_one_pass<Llama>(latent(), dtype, pieces);
      LlamaConfig scaled = llama();
      const std::vector<double> short_factors(16, 1.5), long_factors(16, 7.25);
      for (const RotaryScaling& scaling : {RotaryScaling::llama3(8, 1, 4, 60), RotaryScaling::yarn(8, 60),
                                           RotaryScaling::longrope(short_factors, long_factors, 2.5, 60)}) {
        scaled.rope_scaling = scaling;
        expect_rows_of_one_pass<Llama>(scaled, dtype, pieces);
      }
    }
}

TEST(KeyValueCache, GivesThemForOtherHeadsThreadsAndBatchesToo) {
  for (int threads : {1, 3})
    run_local(1, [](World&) {
      expect_rows_of_one_pass<Gpt>(gpt(/*width=*/84), kF32, one_by_one(60, 140));  // heads of width 21
      expect_rows_of_one_pass<Llama>(llama(/*kv_heads=*/1), kF32, one_by_one(60, 140));
      expect_rows_of_one_pass<Llama>(llama(), kF32, one_by_one(7, 80), /*batch=*/3);
    }, {.threads_per_rank = threads});
}

TEST(KeyValueCache, RanksWithoutSequencesKeepNone) {
  run_local(2, [](World& world) {
    nn::KeyValueCache cache(4);
    const Mesh mesh = world.mesh({{"data", 2}});
    cache.append("a", Tensor::empty({kF32, {0, 3, 2, 5}, Layout(mesh.spec, Placement::shard(0))}));
    cache.advance(3);
    cache.keep_sequences({});
    EXPECT_EQ(cache.append("a", Tensor::empty({kF32, {0, 1, 2, 5}, Layout(mesh.spec, Placement::shard(0))})).shape(), (Shape{0, 4, 2, 5}));
  });
}

TEST(KeyValueCache, SaysWhatItCannotDo) {
  Gpt model(gpt());
  materialize(model, Device::cpu(), {.seed = 3});
  nn::KeyValueCache cache(8);
  const auto read = [&](int64_t batch, int64_t count) {
    return model.next_logits(Tensor::from(text(batch * count), {batch, count}), cache);
  };
  const auto message = [&](int64_t batch, int64_t count) -> std::string {
    try {
      read(batch, count);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const Tensor first = read(1, 5);
  EXPECT_THAT(message(1, 4), AllOf(HasSubstr("[key_value_cache] blocks.0.attention"), HasSubstr("9 tokens"),
                                   HasSubstr("capacity of 8")));
  EXPECT_THAT(message(2, 1), AllOf(HasSubstr("f32[2,1,8,32]"), HasSubstr("cannot follow f32[1,8,8,32]")));
  EXPECT_THAT(message(1, 146), HasSubstr("151 tokens are more than the context of 150"));
  EXPECT_THROW(model.next_logits(Tensor::from<int32_t>({kVocab}, {1, 1}), cache), DataError);
  {
    Recording recording;
    EXPECT_THROW(read(1, 1), LifetimeError);
  }
  EXPECT_EQ(cache.length(), 5) << "what failed was not read";
  cache.clear();
  EXPECT_TRUE(identical(read(1, 5), first));
}

// ---- generate() -------------------------------------------------------------------------------------------------------

// Records every window and its logits; without the cache, it computes them from the window.
template <class M>
struct Watched : M {
  bool cached = true;
  std::vector<int32_t> window;
  std::vector<std::vector<int32_t>> windows;
  std::vector<std::vector<float>> seen;

  using M::M;
  Tensor next_logits(const Tensor& tokens, nn::KeyValueCache& cache) override {
    if (cache.length() == 0) window.clear();
    for (int32_t token : tokens.to_vector<int32_t>()) window.push_back(token);
    const int64_t n = static_cast<int64_t>(window.size());
    Tensor out;
    if (cached) {
      out = M::next_logits(tokens, cache);
    } else {
      cache.advance(tokens.size(1));
      out = slice(M::logits(Tensor::from(window, {1, n})), 1, n - 1, n);
    }
    windows.push_back(window), seen.push_back(out.to_vector<float>());
    return out;
  }
};

template <class M, class Config>
void expect_the_text_of_whole_windows(const Config& config, int64_t prompt, int64_t tokens) {
  SCOPED_TRACE(str("prompt of ", prompt, ", ", tokens, " tokens"));
  models::GenerateConfig options;
  options.tokens = tokens, options.temperature = 1;
  Watched<M> with(config), without(config);
  without.cached = false;
  std::vector<int32_t> texts[2];
  for (Watched<M>* m : {&with, &without}) {
    materialize(*m, Device::cpu(), {.seed = 3});
    texts[m == &without] = generate(*m, text(prompt), kContext, kVocab, options);
  }
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(with.seen, without.seen);
  std::vector<int32_t> all = text(prompt);
  ASSERT_EQ(with.windows.size(), static_cast<size_t>(tokens));
  for (size_t i = 0; i < with.windows.size(); ++i) {
    const int64_t length = std::min(kContext, static_cast<int64_t>(all.size()));
    EXPECT_EQ(with.windows[i], std::vector<int32_t>(all.end() - length, all.end())) << "token " << i;
    all.push_back(texts[0][i]);
  }
}

TEST(Generate, GivesTheTextOfWholeWindows) {
  for (const auto& [prompt, tokens] : std::initializer_list<std::pair<int64_t, int64_t>>{
           {1, 20}, {140, 10}, {140, 11}, {145, 20}, {kContext, 5}, {kContext + 30, 5}, {3, 0}}) {
    expect_the_text_of_whole_windows<Gpt>(gpt(), prompt, tokens);
    expect_the_text_of_whole_windows<Llama>(llama(), prompt, tokens);
    expect_the_text_of_whole_windows<Llama>(qwen3(), prompt, tokens);
    expect_the_text_of_whole_windows<Llama>(windowed(), prompt, tokens);
  }
}

// Of each token's logits the `top_k` likeliest, and of these the fewest that make up top_p, by trying each number of them.
std::vector<int32_t> allowed(const std::vector<float>& logits, const models::GenerateConfig& options) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids, std::greater<>(), [&](int32_t id) { return logits[static_cast<size_t>(id)]; });
  if (options.top_k > 0) ids.resize(std::min(ids.size(), static_cast<size_t>(options.top_k)));
  const auto mass = [&](size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; ++i) sum += std::exp(logits[static_cast<size_t>(ids[i])] / options.temperature);
    return sum;
  };
  size_t count = 1;
  while (count < ids.size() && mass(count) < options.top_p * mass(ids.size())) ++count;
  ids.resize(count);
  const auto relative = [&](int32_t id) {
    return std::exp((double{logits[static_cast<size_t>(id)]} - double{logits[static_cast<size_t>(ids[0])]}) / options.temperature);
  };
  while (relative(ids.back()) < options.min_p) ids.pop_back();
  return ids;
}

TEST(Generate, ChoosesAmongTheLikeliest) {
  for (const auto& [top_k, top_p, min_p] : std::initializer_list<std::tuple<int64_t, double, double>>{
           {0, 1, 0}, {3, 1, 0}, {0, 0.5, 0}, {0, 0.9, 0}, {5, 0.6, 0}, {1, 1, 0}, {0, 0, 0}, {0, 1, 0.5}, {0, 0.9, 0.3}, {4, 1, 0.6}, {0, 1, 1}}) {
    SCOPED_TRACE(str(top_k, ' ', top_p, ' ', min_p));
    models::GenerateConfig options;
    options.tokens = 300, options.temperature = 0.7, options.top_k = top_k, options.top_p = top_p, options.min_p = min_p;
    Watched<Gpt> model(gpt());
    materialize(model, Device::cpu(), {.seed = 3});
    const std::vector<int32_t> text = generate(model, {1}, kContext, kVocab, options);
    std::map<size_t, int> ranks;  // of the chosen token among those allowed
    size_t most = 0;
    double expected = 0, variance = 0;  // how often the likeliest one is chosen
    for (size_t i = 0; i < text.size(); ++i) {
      const std::vector<float>& logits = model.seen[i];
      const std::vector<int32_t> from = allowed(logits, options);
      const auto at = static_cast<size_t>(std::ranges::find(from, text[i]) - from.begin());
      ASSERT_LT(at, from.size()) << i;
      ++ranks[at];
      most = std::max(most, from.size());
      double sum = 0;
      for (const int32_t id : from)
        sum += std::exp((logits[static_cast<size_t>(id)] - logits[static_cast<size_t>(from[0])]) / options.temperature);
      expected += 1 / sum, variance += (1 - 1 / sum) / sum;
    }
    EXPECT_NEAR(ranks[0], expected, 4 * std::sqrt(variance));
    if (min_p == 0) {  // else few rows have as many
      EXPECT_GE(ranks.size(), (most + 1) / 2) << "all of them are chosen now and then";
    }
  }
}

// A model with given outputs: for each token the given logits, after the last row the previous ones again.
struct Says : Gpt {
  std::vector<std::vector<float>> rows;
  size_t said = 0;

  explicit Says(std::vector<std::vector<float>> all) : Gpt(gpt(/*width=*/8)), rows(std::move(all)) {
    materialize(*this, Device::cpu(), {.seed = 3});
  }
  Tensor next_logits(const Tensor& tokens, nn::KeyValueCache& cache) override {
    cache.advance(tokens.size(1));
    const std::vector<float>& row = rows[std::min(said++, rows.size() - 1)];
    return Tensor::from(row, {1, 1, static_cast<int64_t>(row.size())});
  }
};

// Many tokens, many of them equally likely: sorting in parts draws as if all were sorted.
TEST(Generate, DrawsAsTheSeedSays) {
  std::vector<float> logits;
  for (int i = 0; i < 1500; ++i) logits.push_back(static_cast<float>(i * 7919 % 101) / 25);
  for (const auto& [top_k, top_p, min_p] : std::initializer_list<std::tuple<int64_t, double, double>>{
           {0, 1, 0}, {0, 0, 0}, {0, 0.01, 0}, {0, 0.3, 0}, {0, 0.9, 0}, {0, 1 - 1e-9, 0}, {100, 1, 0}, {100, 0.5, 0}, {5000, 1, 0}, {5000, 0.9, 0},
           {0, 1, 0.2}, {0, 0.5, 0.1}, {100, 1, 0.9}}) {
    SCOPED_TRACE(str(top_k, ' ', top_p, ' ', min_p));
    models::GenerateConfig options;
    options.tokens = 200, options.temperature = 0.7, options.top_k = top_k, options.top_p = top_p, options.min_p = min_p, options.seed = 5;
    std::vector<int32_t> from = allowed(logits, options), expected;
    if (top_k == 0 && top_p == 1) std::ranges::sort(from);
    const auto weight = [&](int32_t id) { return std::exp(logits[static_cast<size_t>(id)] / options.temperature); };
    double total = 0;
    for (const int32_t id : from) total += weight(id);
    for (int64_t i = 0; i < options.tokens; ++i) {
      double left = total * static_cast<double>(random_u64(key_of("generate", 5), static_cast<uint64_t>(i)) >> 11) * 0x1p-53;
      size_t at = 0;
      while (at + 1 < from.size() && left >= weight(from[at])) left -= weight(from[at++]);
      expected.push_back(from[at]);
    }
    Says model({logits});
    EXPECT_EQ(generate(model, {1}, kContext, 1500, options), expected);
  }
}

TEST(Generate, NamesChoicesThatCannotBe) {
  const auto message = [](const std::function<void(models::GenerateConfig&)>& change) -> std::string {
    models::GenerateConfig options;
    change(options);
    Says model({{0, 1, 0}});
    try {
      generate(model, {1}, kContext, 3, options);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(message([](auto& o) { o.temperature = -1; }), "[generate] temperature -1, top_k 0, top_p 1, min_p 0: at least 0, and the last two at most 1");
  for (const double wrong : {-0.1, 1.5, std::nan("")}) {
    EXPECT_NE(message([&](auto& o) { o.top_p = wrong; }), "") << wrong;
    EXPECT_NE(message([&](auto& o) { o.min_p = wrong; }), "") << wrong;
  }
  EXPECT_NE(message([](auto& o) { o.temperature = std::nan(""); }), "");
  EXPECT_NE(message([](auto& o) { o.top_k = -1; }), "");
}

TEST(Generate, DrawsNoTokenThatIsForbidden) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (const auto& [top_k, top_p] : std::initializer_list<std::pair<int64_t, double>>{{0, 1}, {4, 1}, {0, 0.999}, {5, 0.999}}) {
    models::GenerateConfig options;
    options.tokens = 200, options.top_k = top_k, options.top_p = top_p;
    Says model({{kNever, 0, kNever, 1, kNever}});
    std::vector<int32_t> text = generate(model, {1}, kContext, 5, options);
    std::ranges::sort(text);
    text.erase(std::unique(text.begin(), text.end()), text.end());
    EXPECT_THAT(text, ElementsAre(1, 3)) << top_k << ' ' << top_p;
  }
}

TEST(Generate, WhatIsNoNumberIsNoText) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [row, what] : std::initializer_list<std::pair<std::vector<float>, const char*>>{
           {{0, kNan, 1}, "the logit of token 1 is nan"},
           {{0, 1, -kNan}, "the logit of token 2 is nan"},
           {{kInfinity, 0, 1}, "the logit of token 0 is inf"},
           {{-kInfinity, -kInfinity, -kInfinity}, "the logits of all tokens are -inf"}})
    for (const double temperature : {0.0, 0.8})
      for (const int64_t top_k : {0, 2}) {
        models::GenerateConfig options;
        options.temperature = temperature, options.top_k = top_k;
        Says model({{0, 1, 0}, {0, -kInfinity, 0}, row});
        int emitted = 0;
        try {
          generate(model, {1, 2, 0, 1}, kContext, 3, options, [&](int32_t) { ++emitted; });
          ADD_FAILURE() << what;
        } catch (const NonFiniteError& e) {
          EXPECT_EQ(e.exit_code(), static_cast<int>(ExitCode::kNonFinite));
          EXPECT_EQ(e.what(), str("[generate] position 6, after a prompt of 4 tokens: ", what));
        }
        EXPECT_EQ(emitted, 2);
      }
  // A token without a text is never drawn.
  Says model({{0, 1, kNan}});
  EXPECT_EQ(generate(model, {1}, kContext, 2, {.tokens = 3}).size(), 3u);
}

TEST(Generate, EndsWhereATextEnds) {
  models::GenerateConfig options;
  options.tokens = 40, options.temperature = 1;
  Gpt model(gpt());
  materialize(model, Device::cpu(), {.seed = 3});
  const std::vector<int32_t> all = generate(model, {1}, kContext, kVocab, options);
  const int32_t end = all[7];
  const std::vector<int32_t> before(all.begin(), std::ranges::find(all, end)), never = {kVocab}, ends = {kVocab, end};
  std::vector<int32_t> emitted;
  const auto emit = [&](int32_t token) { emitted.push_back(token); };
  EXPECT_EQ(generate(model, {1}, kContext, kVocab, options, emit, ends), before);
  EXPECT_EQ(emitted, before);
  EXPECT_EQ(generate(model, {1}, kContext, kVocab, options, {}, never), all);
}

struct WithEnd final : models::Tokenizer {
  std::string_view kind() const override { return "with an end"; }
  int64_t vocab_size() const override { return 9; }
  std::vector<int32_t> encode(std::string_view, std::string_view) const override { return {}; }
  std::string decode(std::span<const int32_t>) const override { return ""; }
  std::optional<int32_t> end_of_text() const override { return 8; }
  std::optional<int32_t> special_token(std::string_view name) const override { return name == "<stop>" ? std::optional(7) : std::nullopt; }
  Json to_json() const override { return {}; }
};

TEST(Generate, TextsEndAsTheTokenizerSays) {
  models::GenerateConfig options;
  EXPECT_THAT(models::ends_of(WithEnd(), options), ElementsAre(8));
  EXPECT_THAT(models::ends_of(WithEnd(), options, std::vector<int32_t>{5, 3}), ElementsAre(8, 5, 3)) << "such as ended documents";
  EXPECT_THAT(models::ends_of(*models::make_byte_tokenizer(), options), IsEmpty());
  options.ignore_end_of_text = true;
  EXPECT_THAT(models::ends_of(WithEnd(), options, std::vector<int32_t>{5}), IsEmpty());
  options.end_token = "<stop>";
  EXPECT_THAT(models::ends_of(WithEnd(), options, std::vector<int32_t>{5}), ElementsAre(7)) << "that was asked for";
}

TEST(Generate, EveryWorldWritesTheSameText) {
  const models::ModelConfig config = [] {
    models::ModelConfig c;
    c.type = "llama", c.layers = 2, c.heads = 4, c.kv_heads = 2, c.width = 64, c.context = 20, c.vocab = kVocab;
    return c;
  }();
  models::GenerateConfig options;
  options.tokens = 30, options.temperature = 1;
  std::vector<int32_t> expected;
  for (int world : {1, 2, 3})
    for (Strategy strategy : {Strategy::full_shard, Strategy::replicate})
      run_local(world, [&](World& w) {
        const auto model = models::make_language_model(config, 0);
        const auto is_block = [&](nn::Module& m, const std::string&) { return model->is_block(m); };
        shard(*model, w.mesh({{"data", w.size()}}), {.units = nn::units_where(is_block), .strategy = strategy});
        materialize(*model, Device::cpu(), {.seed = 3});
        const std::vector<int32_t> text = generate(*model, {1, 2, 3}, 20, kVocab, options);
        if (w.rank() != 0) return;
        if (expected.empty()) expected = text;
        EXPECT_EQ(text, expected) << world;
      }, {.threads_per_rank = 1});
  EXPECT_EQ(expected.size(), 30u);
}

}  // namespace
}  // namespace sheaf
