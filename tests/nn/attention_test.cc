// Attention without a causal mask: against its formula, its gradients on meshes whose ranks share batches, sequences and heads, and what it
// refuses.
#include "sheaf/nn/layers/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/values_on_meshes.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

using Way = testing::MeshAndStrategy;
using testing::Values;

/// softmax(scale q kT) v of every head, over all keys of the sequence, and the projection.
std::vector<double> by_formula(const nn::SelfAttention& m, const Tensor& x_BTC) {
  const nn::AttentionConfig& c = m.config;
  const int64_t batch = x_BTC.size(0), tokens = x_BTC.size(1), width = x_BTC.size(2), d = c.head_dim, queries = c.heads * d;
  const auto x = x_BTC.to_vector<double>(), read = full_parameter(m.qkv.weight).to_vector<double>(),
             write = full_parameter(m.projection.weight).to_vector<double>();
  const auto product = [](const double* a, const double* b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  };
  std::vector<double> out;
  for (int64_t b = 0; b < batch; ++b) {
    const auto feature = [&](int64_t t, int64_t row) { return product(&x[(b * tokens + t) * width], &read[row * width], width); };
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<double> mixed(queries);
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t key = queries + h / (c.heads / c.kv_heads) * d, value = key + c.kv_heads * d;
        std::vector<double> weights(tokens);
        double all = 0;
        for (int64_t s = 0; s < tokens; ++s) {
          double score = 0;
          for (int64_t i = 0; i < d; ++i) score += feature(t, h * d + i) * feature(s, key + i);
          score *= c.scale / std::sqrt(static_cast<double>(d));
          if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
          all += weights[s] = std::exp(score);
        }
        for (int64_t s = 0; s < tokens; ++s)
          for (int64_t i = 0; i < d; ++i) mixed[h * d + i] += weights[s] / all * feature(s, value + i);
      }
      for (int64_t c = 0; c < width; ++c) out.push_back(product(mixed.data(), &write[c * queries], queries));
    }
  }
  return out;
}

TEST(AttentionOfAll, IsASoftmaxOverAllKeys) {
  for (const int64_t kv_heads : {4, 2, 1})
    for (const double softcap : {0.0, 0.7}) {
      nn::AttentionConfig c{.width = 12, .heads = 4, .kv_heads = kv_heads, .causal = false, .bias = false, .scale = 1.3, .softcap = softcap};
      c.init = c.projection_init = nn::Init::normal(0.5);
      nn::SelfAttention all(c);
      c.causal = true;
      nn::SelfAttention causal(c);
      for (auto* m : {&all, &causal}) materialize(*m, Device::cpu(), {.seed = 2, .dtype = kF64});
      const Tensor x = randn({kF64, {2, 5, 12}, {}}, Key{1});
      const std::vector<double> got = all(x).to_vector<double>(), want = by_formula(all, x), masked = causal(x).to_vector<double>();
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << i;
      for (size_t i = 4 * 12; i < 5 * 12; ++i) EXPECT_NEAR(got[i], masked[i], 1e-12) << "the last token sees all keys either way";
      EXPECT_GT(std::abs(got[0] - masked[0]), 1e-3) << "and the first does not";
    }
}

enum class Documents { none, on_all_ranks, like_tokens };

// The output and the gradients of sum(y * c), with everything that attention may have.
Values values_on(const Way& way, Documents documents) {
  Values out;
  run_local(way.ranks(), [&](World& w) {
    const Mesh mesh = w.mesh(way.axes);
    nn::AttentionConfig c{.width = 12, .heads = 6, .kv_heads = 3, .causal = false, .gate = true, .sinks = true, .qk_norm = true, .rope_theta = 100.0};
    c.init = c.projection_init = nn::Init::normal(0.5);
    nn::SelfAttention m(c);
    ShardOptions options{.strategy = way.strategy};
    Layout layout(mesh.spec, Placement::shard(0));
    for (int a = 0; a < layout.num_axes(); ++a) {
      const std::string& name = mesh.spec->name(a);
      if (name == "data") continue;
      layout[a] = Placement::shard(1);
      if (name == "model") options.tensor_axis = name;
      else options.context_axis = name;
      if (name != "gathered") continue;
      options.context_comm = nn::ContextComm::all_gather;
      layout[a] = Placement::shard(OwnershipMap::from_both_ends(1, 7, mesh.spec->size(a)));
    }
    shard(m, mesh, options);
    materialize(m, w.device(), {.seed = 4, .dtype = kF64});
    const Tensor x = redistribute(randn({kF64, {3, 7, 12}, {}}, Key{1}), layout),
                 factors = redistribute(randn({kF64, {3, 7, 12}, {}}, Key{2}), layout);
    std::vector<int64_t> ends;  // of documents: tokens 3 of all rows and 1 of the first, and the last one
    for (int64_t i = 0; i < 3 * 7; ++i) ends.push_back(i % 7 != 3 && i != 1 && i != 20);
    const Tensor tokens = redistribute(Tensor::from(ends, {3, 7}), layout);
    Tensor begins;
    if (documents == Documents::on_all_ranks) begins = nn::document_begins(tokens, 0);
    if (documents == Documents::like_tokens) begins = redistribute(document_begins(Tensor::from(ends, {3, 7}), 0), layout);
    nn::KeyValueCache* const none = nullptr;
    {
      Recording recording;
      recording.backward(sum(m(x, none, begins) * factors));
      recording.take();
    }
    const Tensor whole = redistribute(m(x, none, begins), Layout(mesh.spec));
    Values mine{{"y", whole.to_vector<double>()}};
    for (const nn::Parameter& p : m.parameters()) mine[p.name()] = full_gradient(p).to_vector<double>();
    if (w.rank() == 0) out = mine;
  }, {.threads_per_rank = 1});
  return out;
}

void expect_same_on_every_mesh(Documents documents) {
  const Values expected = values_on({{{"data", 1}}, Strategy::replicate}, documents);
  const Way ways[] = {{{{"data", 2}}},
                      {{{"data", 3}}, Strategy::replicate},
                      {{{"data", 1}, {"context", 2}}},
                      {{{"data", 1}, {"context", 3}}},
                      {{{"data", 1}, {"gathered", 2}}},
                      {{{"data", 1}, {"gathered", 3}}, Strategy::zero1},
                      {{{"data", 1}, {"model", 2}}},
                      {{{"data", 1}, {"model", 3}}},
                      {{{"data", 1}, {"context", 2}, {"model", 2}}},
                      {{{"data", 1}, {"gathered", 2}, {"model", 2}}}};
  for (const Way& way : ways) {
    testing::expect_near(values_on(way, documents), expected, 1e-11, " on " + way.axes.back().name);
  }
}

TEST(AttentionOfAll, HasTheSameGradientsOnEveryMesh) { expect_same_on_every_mesh(Documents::none); }
TEST(AttentionOfAll, HasTheSameGradientsOfDocumentsOnEveryMesh) { expect_same_on_every_mesh(Documents::on_all_ranks); }
TEST(AttentionOfAll, TakesDocumentsThatAreCutLikeTokens) { expect_same_on_every_mesh(Documents::like_tokens); }

// Rows of 3 and 5 tokens, the former padded.
TEST(AttentionOfAll, DoesNotSeePadding) {
  nn::SelfAttention m({.width = 12, .heads = 4, .kv_heads = 2, .causal = false});
  materialize(m, Device::cpu(), {.seed = 2});
  const Tensor x = randn({kF32, {2, 5, 12}, {}}, Key{1}), lengths = Tensor::from<int64_t>({3, 5}, {2});
  const Tensor real = lt(arange(5), unsqueeze(lengths, 1)), begins = cast(where(real, 0.0, unsqueeze(lengths, 1)), kI32);
  const Tensor got = m(x, nullptr, begins);
  const auto first = [](const Tensor& t) { return slice(slice(t, 0, 0, 1), 1, 0, 3); };
  EXPECT_TRUE(identical(first(got).clone(), m(first(x).clone())));
  EXPECT_TRUE(identical(slice(got, 0, 1, 2).clone(), m(slice(x, 0, 1, 2).clone())));
  EXPECT_FALSE(identical(first(got).clone(), first(m(x)).clone()));
}

TEST(AttentionOfAll, RefusesWhatNeedsACausalMask) {
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [] { nn::SelfAttention({.width = 8, .heads = 2, .causal = false, .window = 3}); }),
              HasSubstr("[attention] window 3, not causal"));
  nn::SelfAttention m({.width = 8, .heads = 2, .causal = false});
  materialize(m);
  const Tensor x = full({1, 4, 8}, 0.5);
  nn::KeyValueCache cache(8);
  nn::KeyValueCache* const at = &cache;
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { m(x, at); }), HasSubstr("is not causal: tokens in a cache"));
}

}  // namespace
}  // namespace sheaf
