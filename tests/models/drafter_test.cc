// Drafts by MTP layers: they equal those of a pass over all tokens, and drafting changes no text, only the number of passes.
#include "sheaf/models/drafter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/llama.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/shard.h"

namespace sheaf {
namespace {

constexpr int64_t kContext = 40, kVocab = 17;

models::LlamaConfig config_of(const std::string& kind, int64_t mtp_layers) {
  models::LlamaConfig c;
  c.layers = 1, c.heads = 4, c.kv_heads = 2, c.width = 32, c.context = kContext, c.vocab = kVocab;
  c.mtp_layers = mtp_layers, c.mtp_loss = 1;
  if (kind == "latent") c.kv_heads = 0, c.kv_lora_rank = 9, c.q_lora_rank = 7, c.qk_nope_head_dim = 6, c.qk_rope_head_dim = 4, c.v_head_dim = 5;
  if (kind == "window") c.window = 5;
  if (kind == "mixture") c.experts = 4;
  return c;
}

// Mostly the last two tokens determine the next one.
std::vector<int32_t> text(int64_t count, uint64_t seed = 1) {
  std::vector<int32_t> out{static_cast<int32_t>(seed % kVocab), 3};
  const Key key = key_of("text", seed);
  while (std::ssize(out) < count) {
    const int32_t next = (2 * out.back() + out[out.size() - 2] + 1) % kVocab;
    out.push_back(random_u64(key, out.size()) % 8 == 0 ? static_cast<int32_t>(random_u64(key, 1000 + out.size()) % kVocab) : next);
  }
  out.resize(static_cast<size_t>(count));
  return out;
}

// Trains the model and its MTP layers to predict most of that.
template <class Model>
void train(Model& model, int steps) {
  optim::AdamW optimizer(model, {.lr = 1e-2});
  for (int step = 0; step < steps; ++step) {
    std::vector<int32_t> tokens, targets;
    for (int64_t row = 0; row < 8; ++row) {
      const std::vector<int32_t> all = text(kContext + 1, static_cast<uint64_t>(8 * step + row));
      tokens.insert(tokens.end(), all.begin(), all.end() - 1), targets.insert(targets.end(), all.begin() + 1, all.end());
    }
    Recording recording({.step = step});
    recording.backward(model.loss(Tensor::from(tokens, {8, kContext}), Tensor::from(targets, {8, kContext})));
    optimizer.step();
    optimizer.zero_grad();
  }
  model.eval();
}

// The drafts of whole passes over all tokens.
std::vector<int32_t> drafts_of(models::Llama& model, std::vector<int32_t> tokens, int64_t most) {
  const int64_t n = std::ssize(tokens) - 1;
  nn::KeyValueCache cache(kContext);
  Tensor x = model.read(Tensor::from(std::vector<int32_t>(tokens.begin(), tokens.end() - 1), {1, n}), cache);
  for (int64_t k = 0; k < most; ++k) {
    const std::vector<int32_t> next(tokens.begin() + k + 1, tokens.end());
    x = model.mtp_layers[static_cast<size_t>(k)](nn::Residual{.x = x}, model.embedding(Tensor::from(next, {1, n})));
    tokens.push_back(static_cast<int32_t>(argmax(slice(model.logits_behind(x), 1, n - 1, n)).to_vector<int64_t>()[0]));
  }
  return {tokens.end() - most, tokens.end()};
}

// However many tokens were read at a time, from the first one on.
TEST(Drafter, DraftsWhatWholePassesWould) {
  for (const char* kind : {"plain", "latent", "window", "mixture"})
    for (const int64_t layers : {1, 2, 3}) {
      models::Llama model(config_of(kind, layers));
      materialize(model, Device::cpu(), {.seed = 3});
      model.eval();
      const std::vector<int32_t> all = text(kContext);
      for (const int64_t first : {1, 2, 3, 9}) {
        nn::KeyValueCache cache(kContext);
        models::Drafter drafter(model, layers, kContext, kVocab);
        int64_t read = 0;
        for (int64_t step = 0, more = first; read + more < kContext; ++step) {
          const std::vector<int32_t> now(all.begin() + read, all.begin() + read + more);
          const Tensor x = model.read(Tensor::from(now, {1, more}), cache);
          read += more;
          const std::vector<int32_t> known(all.begin(), all.begin() + read + 1);
          ASSERT_EQ(drafter.draft(x, known, layers), drafts_of(model, known, layers)) << kind << ' ' << layers << " behind " << read;
          more = 1 + static_cast<int64_t>(random_u64(key_of("more", static_cast<uint64_t>(first)), static_cast<uint64_t>(step)) %
                                          static_cast<uint64_t>(layers + 1));
        }
      }
    }
}

TEST(Drafter, SaysWhatItMissed) {
  models::Llama model(config_of("plain", 1));
  materialize(model);
  nn::KeyValueCache cache(kContext);
  models::Drafter drafter(model, 1, kContext, kVocab);
  const Tensor x = model.read(Tensor::from<int32_t>({1, 2}, {1, 2}), cache);
  const std::vector<int32_t> tokens{1, 2, 3, 4};
  EXPECT_THAT([&] { drafter.draft(x, tokens, 1); }, ::testing::ThrowsMessage<ShapeError>(::testing::HasSubstr("has read 0 tokens of 3, and gets 2")));
}

// Records how many tokens each pass reads.
struct Watched : models::Llama {
  std::vector<int64_t> passes;
  using Llama::Llama;
  Tensor read(const Tensor& tokens, nn::KeyValueCache& cache) override {
    passes.push_back(tokens.size(1));
    return Llama::read(tokens, cache);
  }
  Tensor next_logits(const Tensor& tokens, nn::KeyValueCache& cache) override {
    passes.push_back(tokens.size(1));
    return Llama::next_logits(tokens, cache);
  }
};

TEST(Drafter, ChangesNoText) {
  for (const auto& [kind, layers] : {std::pair("plain", int64_t{1}), {"plain", 3}, {"latent", 2}, {"mixture", 1}}) {
    Watched model(config_of(kind, layers));
    materialize(model, Device::cpu(), {.seed = 3});
    train(model, 250);
    std::set<int64_t> kept;  // of the drafts of a pass
    for (const double temperature : {0.0, 1.0})
      for (const int64_t prompt : {1, 20})
        for (const int64_t tokens : {0, 1, 2, 17, 45}) {  // within the context, to its end, and beyond it
          models::GenerateConfig options;
          options.tokens = tokens, options.temperature = temperature, options.drafts = 0;
          std::vector<int32_t> emitted;
          const auto generated = [&] {
            model.passes.clear(), emitted.clear();
            return models::generate(model, text(prompt), kContext, kVocab, options, [&](int32_t token) { emitted.push_back(token); });
          };
          const std::vector<int32_t> expected = generated();
          EXPECT_EQ(model.passes.size(), static_cast<size_t>(tokens));
          for (const int64_t drafts : {1, 2, 9}) {
            options.drafts = drafts;
            EXPECT_EQ(generated(), expected) << kind << ' ' << layers << ' ' << temperature << ' ' << prompt << ' ' << tokens << ' ' << drafts;
            EXPECT_EQ(emitted, expected);
            const int64_t most = std::min(drafts, layers);
            for (size_t i = 1; i < model.passes.size() && prompt + tokens <= kContext; ++i) EXPECT_LE(model.passes[i], 1 + most);
            if (tokens == 17) {
              EXPECT_LE(model.passes.size(), 17u);
              kept.insert(17 - std::ssize(model.passes));
            }
          }
        }
    EXPECT_GE(kept.size(), 2u);
    EXPECT_GE(*kept.rbegin(), layers == 1 ? 6 : 8) << kind;  // the number of 17 tokens that were accepted drafts
    }
}

// An end token ends the text, drafted or not.
TEST(Drafter, StopsWhereTheTextEnds) {
  Watched model(config_of("plain", 2));
  materialize(model, Device::cpu(), {.seed = 3});
  train(model, 250);
  models::GenerateConfig options;
  options.tokens = 30, options.temperature = 0;
  for (int32_t end = 0; end < kVocab; ++end) {
    options.drafts = 0;
    const std::vector<int32_t> ends{end}, expected = models::generate(model, text(4), kContext, kVocab, options, {}, ends);
    options.drafts = 2;
    EXPECT_EQ(models::generate(model, text(4), kContext, kVocab, options, {}, ends), expected) << end;
  }
}

// On each mesh the same text as without drafts; if there are few tokens, some ranks that share them have none.
TEST(Drafter, ChangesNoTextOnAnyMesh) {
  for (const std::vector<MeshSpec::Axis>& axes :
       {std::vector<MeshSpec::Axis>{{"data", 2}}, {{"data", 1}, {"model", 2}}, {{"stage", 2, true}, {"data", 1}}}) {
    int world = 1;
    for (const auto& axis : axes) world *= axis.size;
    run_local(world, [&](World& w) {
      const Mesh mesh = w.mesh(axes);
      models::LlamaConfig c = config_of("plain", 2);
      c.layers = 2;
      models::Llama model(c);
      ShardOptions options{.axis = "data", .units = nn::units_where([&](nn::Module& m, const std::string&) { return model.is_block(m); })};
      if (mesh.spec->has_axis("model")) options.tensor_axis = "model";
      if (mesh.spec->has_axis("stage")) {
        const StageCut cut(std::vector<int64_t>{1, 1}, 2);
        options.stage_axis = "stage", options.stage_of = [&, cut](const nn::Module& m, const std::string&) { return model.stage_of(m, cut); };
        options.units = nn::units_where([&, cut](nn::Module& m, const std::string&) { return model.stage_of(m, cut) >= 0; });
      }
      shard(model, mesh, options);
      materialize(model, Device::cpu(), {.seed = 3});
      models::GenerateConfig generate;
      generate.tokens = 20, generate.temperature = 1, generate.drafts = 0;
      const std::vector<int32_t> expected = models::generate(model, text(5), kContext, kVocab, generate);
      generate.drafts = 2;
      EXPECT_EQ(models::generate(model, text(5), kContext, kVocab, generate), expected);
    });
  }
}

}  // namespace
}  // namespace sheaf
