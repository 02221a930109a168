// Cross-attention: against its formula, padding of the memory, its gradients on meshes whose ranks share batches, sequences and heads.
#include "sheaf/nn/layers/cross_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/values_on_meshes.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

using Way = testing::MeshAndStrategy;
using testing::Values;

nn::CrossAttentionConfig config(int64_t kv_heads, bool qk_norm) {
  nn::CrossAttentionConfig c{.width = 12, .memory_width = 10, .heads = 6, .kv_heads = kv_heads, .qk_norm = qk_norm, .scale = 1.3};
  c.init = c.projection_init = nn::Init::normal(0.5);
  return c;
}

// The same from other ops: every head's matrix of scores exists.
Tensor by_formula(nn::CrossAttention& m, const Tensor& x, const Tensor& memory, const Tensor& seen_BTS) {
  const int64_t b = x.size(0), t = x.size(1), s = memory.size(1), group = m.heads / m.kv_heads;
  const auto by_heads = [&](const Tensor& y, int64_t tokens, int64_t heads) {
    return transpose(reshape(y, {b, tokens, heads, m.head_dim}), 1, 2);
  };
  const auto both = chunk(m.keys_values(memory), 2, 2);
  Tensor q = by_heads(m.query(x), t, m.heads), k = by_heads(both[0], s, m.kv_heads), v = by_heads(both[1], s, m.kv_heads);
  if (m.query_norm) q = (*m.query_norm)(q), k = (*m.key_norm)(k);
  const auto for_each_query = [&](const Tensor& y) {  // [B, G, S, D] as [B, H, S, D]
    return reshape(expand(unsqueeze(y, 2), {b, m.kv_heads, group, s, m.head_dim}), {b, m.heads, s, m.head_dim});
  };
  const Tensor scores = mul(matmul(q, transpose(for_each_query(k), 2, 3)), m.scale);
  const Tensor p = softmax(seen_BTS ? where(unsqueeze(seen_BTS, 1), scores, -1e30) : scores);
  return m.projection(reshape(transpose(matmul(p, for_each_query(v)), 1, 2), {b, t, m.heads * m.head_dim}));
}

TEST(CrossAttention, IsASoftmaxOverTheMemory) {
  for (const int64_t kv_heads : {6, 3, 1})
    for (const bool norm : {false, true}) {
      nn::CrossAttention m(config(kv_heads, norm));
      materialize(m, Device::cpu(), {.seed = 2, .dtype = kF64});
      const Tensor x = randn({kF64, {2, 4, 12}, {}}, Key{1}), memory = randn({kF64, {2, 7, 10}, {}}, Key{2});
      const auto expect_equal = [](const Tensor& got, const Tensor& want) {
        const auto a = got.to_vector<double>(), b = want.to_vector<double>();
        ASSERT_EQ(a.size(), b.size());
        for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-12) << i;
      };
      expect_equal(m(x, memory), by_formula(m, x, memory, {}));
      // Memories of 4 and 6 tokens, the rest is padding.
      const Tensor lengths = Tensor::from<int64_t>({4, 6}, {2, 1}), real = lt(arange(7), lengths);
      const Tensor key_begins = cast(where(real, 0.0, lengths), kI32);
      expect_equal(m(x, memory, key_begins), by_formula(m, x, memory, unsqueeze(real, 1)));
      // Two tokens attend to the first document of each memory, two to the second one.
      const Tensor later = ge(unsqueeze(arange(4), 0), 2), begins = cast(where(later, lengths, 0.0), kI32);
      expect_equal(m(x, memory, key_begins, begins),
                   by_formula(m, x, memory, eq(unsqueeze(cast(begins, kI64), 2), unsqueeze(cast(key_begins, kI64), 1))));
    }
}

// The output and all gradients of sum(y * c), those of x and the memory included.
Values values_on(const Way& way, bool documents) {
  Values out;
  run_local(way.ranks(), [&](World& w) {
    const Mesh mesh = w.mesh(way.axes);
    nn::CrossAttention m(config(3, true));
    ShardOptions options{.strategy = way.strategy};
    Layout layout(mesh.spec, Placement::shard(0));
    for (int a = 0; a < layout.num_axes(); ++a) {
      const std::string& name = mesh.spec->name(a);
      if (name == "data") continue;
      layout[a] = Placement::shard(1);
      (name == "model" ? options.tensor_axis : options.context_axis) = name;
    }
    shard(m, mesh, options);
    materialize(m, w.device(), {.seed = 4, .dtype = kF64});
    const auto place = [&](const Tensor& x) { return redistribute(x, layout); };
    const auto random = [&](const Shape& s, uint64_t key) { return place(randn({kF64, s, {}}, Key{key})); };
    const Tensor x = random({3, 7, 12}, 1), memory = random({3, 5, 10}, 2), factors = random({3, 7, 12}, 3);
    const Tensor lengths = Tensor::from<int64_t>({5, 2, 4}, {3, 1});
    Tensor key_begins, begins;
    if (documents) {
      key_begins = place(cast(where(lt(arange(5), lengths), 0.0, lengths), kI32));
      begins = place(cast(where(ge(arange(7), 4), lengths, 0.0), kI32));  // of the first sequence they see nothing from token 4 on
    }
    Values mine;
    {
      Recording recording;
      const Tensor in[] = {recording.watch(x), recording.watch(memory)};
      const Tensor loss = sum(m(in[0], in[1], key_begins, begins) * factors);
      const auto d = recording.gradient(loss, in, {.keep = true});
      for (int i = 0; i < 2; ++i) mine[i ? "memory" : "x"] = full_tensor(d[static_cast<size_t>(i)]).to_vector<double>();
      recording.backward(loss);
      recording.take();
    }
    mine["y"] = full_tensor(m(x, memory, key_begins, begins)).to_vector<double>();
    for (const nn::Parameter& p : m.parameters()) mine[p.name()] = full_gradient(p).to_vector<double>();
    if (w.rank() == 0) out = mine;
  }, {.threads_per_rank = 1});
  return out;
}

TEST(CrossAttention, HasTheSameGradientsOnEveryMesh) {
  for (const bool documents : {false, true}) {
    const Values expected = values_on({{{"data", 1}}, Strategy::replicate}, documents);
    ASSERT_EQ(expected.size(), 11u);
    const Way ways[] = {{{{"data", 2}}},
                        {{{"data", 4}}, Strategy::zero1},
                        {{{"data", 1}, {"context", 2}}},
                        {{{"data", 1}, {"context", 3}}},
                        {{{"data", 1}, {"model", 2}}},
                        {{{"data", 1}, {"model", 3}}},
                        {{{"data", 2}, {"model", 2}}, Strategy::replicate},
                        {{{"data", 1}, {"context", 2}, {"model", 2}}}};
    for (const Way& way : ways) {
      testing::expect_near(values_on(way, documents), expected, 1e-11, " on " + way.axes.back().name);
    }
  }
}

TEST(CrossAttention, SaysWhatItDoesNotTake) {
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [] { nn::CrossAttention({.width = 10, .heads = 4}); }),
              HasSubstr("[cross_attention] width 10 is not a multiple of 4 heads"));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [] { nn::CrossAttention({.width = 8, .heads = 4, .kv_heads = 3}); }),
              HasSubstr("4 heads are not a multiple of 3"));
  nn::CrossAttention m({.width = 8, .heads = 2});
  materialize(m);
  const Tensor x = full({2, 3, 8}, 0.5), memory = full({2, 4, 8}, 0.5);
  EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { m(x, memory, zeros({2, 3}, kI32)); }),
              HasSubstr("wants key_begins as [B,S] [2,4]"));
  EXPECT_THAT(message_of<DTypeError>(ExitCode::kConfig, [&] { m(x, memory, zeros({2, 4})); }), HasSubstr("is i32"));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { m(x, x, Tensor(), zeros({2, 3}, kI32)); }), HasSubstr("begins want key_begins"));
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { m(x, memory, zeros({2, 4}, kI32), full({2, 3}, 1, kI32)); }),
              HasSubstr("begins[0,0] is 1: wants the first of a document's keys, of 4 in all"));
  const auto with = [](AttentionOptions o) { return o.key_begins = zeros({2, 4}, kI32), o; };
  const Tensor q = full({2, 3, 2, 4}, 0.5), k = full({2, 4, 2, 4}, 0.5);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { attention(q, k, k, with({})); }),
              HasSubstr("with a causal mask; wants causal = false"));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { packed_attention(full({2, 4, 12}, 1), 2, 2, with({.causal = false})); }),
              HasSubstr("its keys are those of the queries' tokens; wants begins"));
}

}  // namespace
}  // namespace sheaf
