// Qwen3-Next as published, whose heads are packed differently from ours: every element of ours comes from where plain formulas say, on any
// cut. (published_weights_test checks that our model computes the same from it.)
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/models/published_names.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/models/cuts.h"
#include "sheaf/tests/models/published_copy.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using models::ModelConfig;
using testing::Copy;
using testing::config_of;
using Tensors = std::map<std::string, Copy::Stored>;

const std::string kFolder = "tests/models/published/qwen3_next_bf16";

struct Value {
  Shape shape;
  std::vector<float> data;
};

/// The expected value of each parameter, by the formulas of `transformers`: fix_query_key_value_ordering, torch.chunk of q_proj's output,
/// and rotary positions that rotate the first elements of a head, where ours rotate the last.
std::map<std::string, Value> expected_parameters() {
  const ModelConfig m = config_of(kFolder);
  const auto file = SafetensorsFile::open(kFolder + "/model.safetensors");
  const auto floats = [&](const std::string& name) { return testing::floats_of(file, name); };
  std::map<std::string, Value> out;
  const int64_t c = m.width;
  // Row by row: `from(i)` is the published row that becomes row i of ours.
  const auto put = [&](const std::string& own, const std::string& name, int64_t rows, int64_t row_size, auto from, float more = 0) {
    const std::vector<float> read = floats(name);
    Value& value = out[own];
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < row_size; ++k) value.data.push_back(read.at(static_cast<size_t>(from(i) * row_size + k)) + more);
    value.shape = row_size == 1 ? Shape{std::ssize(value.data)} : Shape{std::ssize(value.data) / row_size, row_size};
  };
  const auto same = [](int64_t i) { return i; };
  const auto norm = [&](const std::string& own, const std::string& name) { put(own + ".weight", name + ".weight", c, 1, same, 1.0f); };
  const auto linear = [&](const std::string& own, const std::string& name, int64_t rows, int64_t columns) {
    put(own + ".weight", name + ".weight", rows, columns, same);
  };
  linear("embedding", "model.embed_tokens", m.vocab, c);
  linear("head", "lm_head", m.vocab, c);
  norm("norm", "model.norm");
  for (int64_t layer = 0; layer < m.layers; ++layer) {
    const std::string theirs = str("model.layers.", layer, '.'), own = str("blocks.", layer, '.');
    norm(own + "attention_norm", theirs + "input_layernorm");
    norm(own + "mlp_norm", theirs + "post_attention_layernorm");
    if (layer == 2) {
      const std::string their = theirs + "self_attn.", mine = own + "attention.";
      const int64_t d = m.head_dim, rotated = d / 4, q = m.heads * d, kv = m.kv_heads * d;
      const auto element = [&](int64_t i) { return (i % d + rotated) % d; };  // of a head: our last `rotated` elements are the first there
      put(mine + "qkv.weight", their + "q_proj.weight", q, c, [&](int64_t i) { return i / d * 2 * d + element(i); });
      put(mine + "qkv.weight", their + "k_proj.weight", kv, c, [&](int64_t i) { return i / d * d + element(i); });
      put(mine + "qkv.weight", their + "v_proj.weight", kv, c, same);
      put(mine + "gate.weight", their + "q_proj.weight", q, c, [&](int64_t i) { return i / d * 2 * d + d + i % d; });
      put(mine + "query_norm.weight", their + "q_norm.weight", d, 1, element, 1.0f);
      put(mine + "key_norm.weight", their + "k_norm.weight", d, 1, element, 1.0f);
      linear(mine + "projection", their + "o_proj", c, q);
    } else {
      const std::string their = theirs + "linear_attn.", mine = own + "linear_attention.";
      const int64_t g = m.linear_key_heads, d = m.linear_key_head_dim, h = m.linear_value_heads;
      const int64_t readers = h / g, e = readers * m.linear_value_head_dim;
      const auto packed = [&](int64_t i, int64_t each, int64_t before) { return i / each * (2 * d + 2 * e) + before + i % each; };
      for (const int64_t before : {int64_t{0}, d})
        put(mine + "qkv.weight", their + "in_proj_qkvz.weight", g * d, c, [&](int64_t i) { return packed(i, d, before); });
      put(mine + "qkv.weight", their + "in_proj_qkvz.weight", g * e, c, [&](int64_t i) { return packed(i, e, 2 * d); });
      put(mine + "gate.weight", their + "in_proj_qkvz.weight", g * e, c, [&](int64_t i) { return packed(i, e, 2 * d + e); });
      for (const int64_t k : {0, 1})
        put(mine + "rates.weight", their + "in_proj_ba.weight", h, c, [&](int64_t i) { return (i / readers * 2 + k) * readers + i % readers; });
      put(mine + "taps", their + "conv1d.weight", 2 * g * d + g * e, m.linear_conv_kernel, same);
      put(mine + "log_decay", their + "A_log", h, 1, same);
      put(mine + "decay_bias", their + "dt_bias", h, 1, same);
      put(mine + "norm.weight", their + "norm.weight", m.linear_value_head_dim, 1, same);
      linear(mine + "projection", their + "out_proj", c, g * e);
    }
    const std::string mlp = theirs + "mlp.", moe = own + "moe.";
    const int64_t hidden = m.expert_hidden;
    linear(moe + "router", mlp + "gate", m.experts, c);
    linear(moe + "shared.gate", mlp + "shared_expert.gate_proj", 2 * hidden, c);
    linear(moe + "shared.up", mlp + "shared_expert.up_proj", 2 * hidden, c);
    linear(moe + "shared.down", mlp + "shared_expert.down_proj", c, 2 * hidden);
    linear(moe + "shared_gate", mlp + "shared_expert_gate", 1, c);
    for (int64_t n = 0; n < m.experts; ++n) {
      const std::string expert = str(mlp, "experts.", n, '.');
      put(moe + "experts.gate", expert + "gate_proj.weight", hidden, c, same);
      put(moe + "experts.up", expert + "up_proj.weight", hidden, c, same);
      put(moe + "experts.down", expert + "down_proj.weight", c, hidden, same);
    }
    for (const char* name : {"gate", "up", "down"}) {
      Shape& shape = out.at(moe + "experts." + name).shape;
      shape = {m.experts, shape[0] / m.experts, shape[1]};
    }
  }
  return out;
}

TEST(PublishedQwen3Next, EachElementIsWhereTheFormulaSays) {
  const auto expected = expected_parameters();
  const auto files = models::PublishedFiles::open(kFolder);
  const auto model = models::make_language_model(config_of(kFolder), 0);
  std::map<std::string, Shape> parameters, shapes;
  for (const nn::Parameter& p : model->parameters()) parameters[p.name()] = p.shape();
  for (const auto& [name, value] : expected) shapes[name] = value.shape;
  EXPECT_EQ(shapes, parameters);
  for (const testing::Cut& cut : testing::cuts()) {
    SCOPED_TRACE(cut.to_string());
    int64_t bytes = 0, held = 0;
    for (int rank = 0; rank < cut.world(); ++rank) {
      std::vector<nn::StatePiece> mine;
      std::vector<std::vector<float>> memory;
      for (const auto& [name, value] : expected)
        for (const Runs& runs : cut.runs(value.shape, rank)) {
          memory.emplace_back(static_cast<size_t>(runs.numel()), NAN);
          mine.push_back({name, kF32, value.shape, runs, Device::cpu(), memory.back().data()});
          held += runs.numel() * 2;
        }
      bytes += models::fill_weights(mine, files, config_of(kFolder));
      for (size_t p = 0; p < mine.size(); ++p)
        for (int64_t i = 0; i < mine[p].runs.numel(); ++i)
          ASSERT_EQ(memory[p][static_cast<size_t>(i)], expected.at(mine[p].name).data[static_cast<size_t>(mine[p].runs.at(i))])
              << mine[p].name << ' ' << mine[p].runs.at(i);
    }
    EXPECT_EQ(bytes, held);  // each rank reads only its own part
  }
}

// Files that we write can be read back: every element of a tensor is in exactly one part. Also if whole heads are rotated.
TEST(PublishedQwen3Next, PartsAreTheWhole) {
  for (const int64_t rotated : {4, 0}) {
    ModelConfig m = config_of(kFolder);
    m.rotary_dim = rotated;
    std::map<std::string, std::vector<int>> there, ours;
    for (const models::PublishedTensor& t : models::published_tensors(m)) {
      std::vector<int>& counts = there[t.name];
      counts.resize(static_cast<size_t>(t.shape.numel()));
      EXPECT_GT(t.held().numel(), 0) << t.name;
      EXPECT_EQ(t.held().numel(), t.rows() * t.row_size());
      for (int64_t i = 0; i < t.held().numel(); ++i) ++counts.at(static_cast<size_t>(t.place(i)));
      std::vector<int>& own = ours[t.own];
      const int64_t begin = t.first_row * t.row_size(), end = begin + t.held().numel();
      own.resize(std::max(own.size(), static_cast<size_t>(end)));
      for (int64_t i = begin; i < end; ++i) ++own[static_cast<size_t>(i)];
    }
    for (const auto& all : {there, ours})
      for (const auto& [name, counts] : all) EXPECT_EQ(std::ranges::count(counts, 1), std::ssize(counts)) << name;
  }
}

TEST(PublishedQwen3Next, FilesThatDoNotFit) {
  const auto refused = [](const std::function<void(Tensors&)>& edit) {
    const Copy broken(kFolder);
    broken.rewrite(edit);
    return broken.refused();
  };
  const std::string linear = "model.layers.1.linear_attn.", full = "model.layers.2.self_attn.", mlp = "model.layers.3.mlp.";
  EXPECT_EQ(refused([](Tensors&) {}), "no exception");
  EXPECT_THAT(refused([&](Tensors& t) { t.erase(linear + "in_proj_qkvz.weight"); }),
              AllOf(HasSubstr("has no \"" + linear + "in_proj_qkvz.weight\" [148,14], of which the"),
                    HasSubstr("model's blocks.1.linear_attention.qkv.weight is made")));
  EXPECT_THAT(refused([&](Tensors& t) { t.erase(linear + "A_log"); }), HasSubstr("has no \"" + linear + "A_log\" [6]"));
  EXPECT_THAT(refused([&](Tensors& t) { t.erase(mlp + "shared_expert_gate.weight"); }),
              HasSubstr("has no \"" + mlp + "shared_expert_gate.weight\" [1,14]"));
  EXPECT_THAT(refused([&](Tensors& t) { t.at(linear + "conv1d.weight").shape = {94, 3}; }),
              AllOf(HasSubstr("conv1d.weight\" is bf16[94,3]"), HasSubstr("blocks.1.linear_attention.taps asks for [94,1,3]")));
  EXPECT_THAT(refused([&](Tensors& t) { t.at(full + "q_proj.weight").shape = {64, 28}; }),
              HasSubstr("blocks.2.attention.qkv.weight asks for [128,14]"));
  EXPECT_THAT(refused([&](Tensors& t) { t[full + "gate_proj.weight"] = t.at(full + "k_proj.weight"); }),
              HasSubstr("gate_proj.weight\" bf16[32,14] is nothing that this llama of 4 layers has"));
  EXPECT_THAT(refused([&](Tensors& t) { t[full + "q_proj.bias"] = t.at(full + "q_norm.weight"); }),
              HasSubstr("q_proj.bias\" bf16[16] is nothing"));
}

// The published files have an MTP layer, which `transformers` does not have.
TEST(PublishedQwen3Next, TheLayerForAFurtherTokenIsPassedOver) {
  const Copy without(kFolder), with(kFolder), other("tests/models/published/qwen3_moe_bf16");
  with.rewrite([](Tensors& t) {
    t["mtp.fc.weight"] = t.at("lm_head.weight");
    t["mtp.layers.0.self_attn.q_norm.weight"] = t.at("model.norm.weight");
  });
  EXPECT_EQ(with.load(), without.load());
  other.rewrite([](Tensors& t) { t["mtp.fc.weight"] = t.at("lm_head.weight"); });
  EXPECT_THAT(other.refused(), HasSubstr("\"mtp.fc.weight\" bf16[31,16] is nothing"));
}

}  // namespace
}  // namespace sheaf
