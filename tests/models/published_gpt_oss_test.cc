// gpt-oss as published, with experts in one tensor or in MXFP4: every element of ours comes from where plain formulas say, on any cut.
// (published_weights_test checks that our model computes the same from it.)
#include <bit>
#include <cmath>
#include <random>
#include <set>
#include <span>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/models/published_names.h"
#include "sheaf/models/published_source.h"
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

const std::string kDense = "tests/models/published/gpt_oss_bf16", kMxfp4 = "tests/models/published/gpt_oss_mxfp4";

struct Value {
  Shape shape;
  std::vector<float> data;
};

/// The expected parameters of the blocks, by the formulas of `transformers` for this layout.
std::map<std::string, Value> expected_parameters(const std::string& folder) {
  const ModelConfig m = config_of(folder);
  const auto file = SafetensorsFile::open(folder + "/model.safetensors");
  const auto floats = [&](const std::string& name) { return testing::floats_of(file, name); };
  const auto bytes = [&](const std::string& name) {
    std::vector<uint8_t> out(static_cast<size_t>(file.at(name).shape.numel()));
    file.read(name, 0, std::ssize(out), out.data());
    return out;
  };
  const int64_t n = m.experts, c = m.width, h = m.expert_hidden, q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
  std::map<std::string, Value> out;
  for (int64_t layer = 0; layer < m.layers; ++layer) {
    const std::string theirs = str("model.layers.", layer, '.'), own = str("blocks.", layer, '.');
    Value &weight = out[own + "attention.qkv.weight"], &bias = out[own + "attention.qkv.bias"];
    weight.shape = {q + 2 * kv, c}, bias.shape = {q + 2 * kv};
    for (const char* part : {"q", "k", "v"})
      for (Value* to : {&weight, &bias}) {
        const auto read = floats(theirs + "self_attn." + part + (to == &bias ? "_proj.bias" : "_proj.weight"));
        to->data.insert(to->data.end(), read.begin(), read.end());
      }
    out[own + "attention.projection.weight"] = {{c, q}, floats(theirs + "self_attn.o_proj.weight")};
    out[own + "attention.projection.bias"] = {{c}, floats(theirs + "self_attn.o_proj.bias")};
    out[own + "attention.sinks"] = {{m.heads}, floats(theirs + "self_attn.sinks")};
    out[own + "moe.router.weight"] = {{n, c}, floats(theirs + "mlp.router.weight")};
    out[own + "moe.router.bias"] = {{n}, floats(theirs + "mlp.router.bias")};

    const std::string experts = theirs + "mlp.experts.", mine = own + "moe.experts.";
    const auto both_bias = floats(experts + "gate_up_proj_bias");
    std::map<std::string, std::vector<float>> dense;
    std::map<std::string, std::vector<uint8_t>> blocks, scales;
    for (const std::string name : {"gate_up_proj", "down_proj"}) {
      if (folder == kDense) dense[name] = floats(experts + name);
      else blocks[name] = bytes(experts + name + "_blocks"), scales[name] = bytes(experts + name + "_scales");
    }
    // The factor by which expert e multiplies its input i for its output o.
    const auto at = [&](const std::string& name, int64_t e, int64_t outputs, int64_t o, int64_t inputs, int64_t i) {
      if (folder == kDense) return dense[name][static_cast<size_t>((e * inputs + i) * outputs + o)];
      const int64_t row = e * outputs + o;
      const uint8_t byte = blocks[name][static_cast<size_t>(row * inputs / 2 + i / 2)];
      const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
      const uint8_t scale = scales[name][static_cast<size_t>((row * inputs + i) / 32)];
      return static_cast<float>(std::ldexp(values[i % 2 == 0 ? byte & 15 : byte >> 4], scale - 127));
    };
    for (int64_t k : {0, 1}) {
      const std::string name = mine + (k == 0 ? "gate" : "up");
      Value &w = out[name] = {{n, h, c}, {}}, &b = out[name + "_bias"] = {{n, h}, {}};
      for (int64_t e = 0; e < n; ++e)
        for (int64_t o = 0; o < h; ++o) {
          for (int64_t i = 0; i < c; ++i) w.data.push_back(at("gate_up_proj", e, 2 * h, 2 * o + k, c, i));
          b.data.push_back(both_bias[static_cast<size_t>(e * 2 * h + 2 * o + k)]);
        }
    }
    Value& down = out[mine + "down"] = {{n, c, h}, {}};
    for (int64_t e = 0; e < n; ++e)
      for (int64_t o = 0; o < c; ++o)
        for (int64_t i = 0; i < h; ++i) down.data.push_back(at("down_proj", e, c, o, h, i));
    out[mine + "down_bias"] = {{n, c}, floats(experts + "down_proj_bias")};
  }
  return out;
}

TEST(PublishedGptOss, EachElementIsWhereTheFormulaSays) {
  for (const std::string& folder : {kDense, kMxfp4}) {
    const ModelConfig config = config_of(folder);
    const auto files = models::PublishedFiles::open(folder);
    const auto expected = expected_parameters(folder);
    std::set<std::string> others;
    for (const models::PublishedTensor& t : models::published_tensors(config, {.mxfp4 = folder == kMxfp4}))
      if (!expected.contains(t.own)) others.insert(t.own);
    EXPECT_EQ(others.size(), 3u + 2u * 3u) << "norms, table and head";
    for (const testing::Cut& cut : testing::cuts()) {
      SCOPED_TRACE(str(folder, ", ", cut.to_string()));
      int64_t bytes = 0, held = 0, pieces = 0;
      for (int rank = 0; rank < cut.world(); ++rank) {
        std::vector<nn::StatePiece> mine;
        std::vector<std::vector<float>> memory;
        for (const auto& [name, value] : expected)
          for (const Runs& runs : cut.runs(value.shape, rank)) {
            memory.emplace_back(static_cast<size_t>(runs.numel()), NAN);
            mine.push_back({name, kF32, value.shape, runs, Device::cpu(), memory.back().data()});
            const bool packed = folder == kMxfp4 && value.shape.rank() == 3;
            held += packed ? runs.numel() * 17 / 32 : runs.numel() * 2;
          }
        bytes += models::fill_weights(mine, files, config);
        pieces += std::ssize(mine);
        for (size_t p = 0; p < mine.size(); ++p)
          for (int64_t i = 0; i < mine[p].runs.numel(); ++i)
            ASSERT_EQ(memory[p][static_cast<size_t>(i)], expected.at(mine[p].name).data[static_cast<size_t>(mine[p].runs.at(i))])
                << mine[p].name << ' ' << mine[p].runs.at(i);
      }
      // Each byte is read by one rank; in MXFP4, a piece is rounded to whole bytes.
      EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(held), folder == kMxfp4 ? static_cast<double>(pieces) : 0.0);
    }
  }
}

// Files that we write can be read back: every element of a tensor is in exactly one part.
TEST(PublishedGptOss, PartsAreTheWhole) {
  for (const bool mxfp4 : {false, true}) {
    std::map<std::string, std::vector<int>> there, ours;
    for (const models::PublishedTensor& t : models::published_tensors(config_of(kMxfp4), {.mxfp4 = mxfp4})) {
      std::vector<int>& counts = there[t.name];
      counts.resize(static_cast<size_t>(t.shape.numel()));
      for (int64_t i = 0; i < t.held().numel(); ++i) ++counts.at(static_cast<size_t>(t.place(i)));
      EXPECT_EQ(t.held().numel(), t.rows() * t.row_size());
      std::vector<int>& own = ours[t.own];
      const int64_t begin = t.first_row * t.row_size(), end = begin + t.held().numel();
      own.resize(std::max(own.size(), static_cast<size_t>(end)));
      for (int64_t i = begin; i < end; ++i) ++own[static_cast<size_t>(i)];
    }
    for (const auto& all : {there, ours})
      for (const auto& [name, counts] : all) EXPECT_EQ(std::ranges::count(counts, 1), std::ssize(counts)) << name;
  }
}

/// A file of one tensor, from which parts are read.
struct OneTensor : ScratchFolder {
  OneTensor(DType dtype, std::span<const std::byte> data, std::span<const std::byte> scales = {}) {
    std::vector<SafetensorsInput> inputs = {{"x", dtype, {std::ssize(data) / static_cast<int64_t>(size_of(dtype))}, {data}}};
    if (!scales.empty()) inputs.push_back({"scales", kU8, {std::ssize(scales)}, {scales}});
    write_safetensors(*this / "x", inputs);
    file = SafetensorsFile::open(*this / "x");
  }
  models::PublishedSource source(models::PublishedTensor t) const {
    if (t.mxfp4) return {std::move(t), &file, "x", kF32, &file, "scales"};
    return {std::move(t), &file, "x", file.at("x").dtype};
  }
  SafetensorsFile file;
};

template <class T>
std::vector<T> read(const models::PublishedSource& source, int64_t begin, int64_t end) {
  std::vector<T> out(static_cast<size_t>(end - begin));
  source.read(begin, end, out.data());
  return out;
}

// Every exponent and every code, in ranges that begin and end within bytes, within blocks, and within what is read at a time.
TEST(PublishedGptOss, Mxfp4IsDecodedWhereverItIsCut) {
  const int64_t count = 2 * 65536 + 96, blocks = count / 32;
  std::mt19937 random(7);
  std::vector<uint8_t> bytes(static_cast<size_t>(count / 2)), scales(static_cast<size_t>(blocks));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < blocks; ++i) scales[static_cast<size_t>(i)] = static_cast<uint8_t>(i % 255);
  const OneTensor folder(kU8, std::as_bytes(std::span(bytes)), std::as_bytes(std::span(scales)));
  const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<float> expected;
  for (int64_t i = 0; i < count; ++i) {
    const int code = bytes[static_cast<size_t>(i / 2)] / (i % 2 == 0 ? 1 : 16) % 16;
    expected.push_back(static_cast<float>(std::ldexp(code < 8 ? values[code] : -values[code - 8], scales[static_cast<size_t>(i / 32)] - 127)));
  }
  const auto source = folder.source({.name = "x", .shape = {1, blocks, 32}, .own = "", .mxfp4 = true});
  const std::vector<int64_t> cuts = {0, 1, 2, 15, 16, 31, 32, 33, 8000, 65535, 65536, 65537, 65568,
                                     131071, 131072, count - 32, count - 1, count};
  for (const int64_t begin : cuts)
    for (const int64_t end : cuts) {
      if (end < begin) continue;
      const auto got = read<float>(source, begin, end);
      const auto wide = read<double>(source, begin, end);
      const auto exact = read<bf16>(source, begin, end);
      const auto rounded = read<f16>(source, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        const auto k = static_cast<size_t>(i - begin);
        const float x = expected[static_cast<size_t>(i)];
        ASSERT_EQ(std::bit_cast<uint32_t>(got[k]), std::bit_cast<uint32_t>(x)) << begin << ' ' << end << ' ' << i;
        ASSERT_EQ(wide[k], static_cast<double>(x));
        ASSERT_EQ(std::bit_cast<uint32_t>(static_cast<float>(exact[k])), std::bit_cast<uint32_t>(x)) << i;
        ASSERT_EQ(rounded[k].bits, f16(x).bits);
      }
    }
}

// Every second row, and every second element, however it is cut.
TEST(PublishedGptOss, WhatIsApartIsReadWhereverItIsCut) {
  std::vector<double> values(2 * 70000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sqrt(static_cast<double>(i));  // more bits than f32 has
  const OneTensor folder(kF64, std::as_bytes(std::span(values)));
  const int64_t half = std::ssize(values) / 2;
  for (const int64_t run : {1, 7, 500})
    for (const int64_t k : {0, 1}) {
      const models::PublishedTensor t = {.name = "x", .shape = {2 * half}, .own = "", .part = {half}, .first = k * run, .run = run, .step = 2};
      const auto source = folder.source(t);
      for (const int64_t begin : {0, 1, 6, 7, 8, 499, 32767, 32768, 40000})
        for (const int64_t end : {0, 1, 7, 8, 13, 14, 15, 501, 32768, 32769, 65537, 70000}) {
          if (end < begin) continue;
          const auto got = read<double>(source, begin, end);
          for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i / run, at = (2 * row + k) * run + i % run;
            ASSERT_EQ(got[static_cast<size_t>(i - begin)], values[static_cast<size_t>(at)]) << run << ' ' << begin << ' ' << end << ' ' << i;
          }
        }
    }
}

TEST(PublishedGptOss, FilesThatDoNotFit) {
  const auto refused = [](const std::string& folder, const std::function<void(Tensors&)>& edit) {
    const Copy broken(folder);
    broken.rewrite(edit);
    const auto files = models::PublishedFiles::open(broken.path());
    return message_of<CheckpointError>(ExitCode::kData, [&] { models::check_weights(files, config_of(folder)); });
  };
  const std::string experts = "model.layers.1.mlp.experts.", both = experts + "gate_up_proj", down = experts + "down_proj";
  EXPECT_EQ(refused(kDense, [](Tensors&) {}), "no exception");
  EXPECT_EQ(refused(kMxfp4, [](Tensors&) {}), "no exception");
  EXPECT_THAT(refused(kMxfp4, [&](Tensors& t) { t.erase(both + "_scales"); }),
              HasSubstr("has no \"" + both + "_scales\" [4,128,1], of which the model's blocks.1.moe.experts.gate is made"));
  EXPECT_THAT(refused(kMxfp4, [&](Tensors& t) { t.erase(down + "_blocks"); }), HasSubstr("has no \"" + down + "_blocks\" [4,32,2,16]"));
  EXPECT_THAT(refused(kMxfp4, [&](Tensors& t) { t.at(down + "_scales").shape = {4, 64, 1}; }),
              AllOf(HasSubstr("\"" + down + "_scales\" is u8[4,64,1]"), HasSubstr("blocks.1.moe.experts.down asks for [4,32,2]")));
  EXPECT_THAT(refused(kMxfp4, [&](Tensors& t) { t.at(down + "_blocks").shape = {4, 32, 32}; }), HasSubstr("asks for [4,32,2,16]"));
  EXPECT_THAT(refused(kMxfp4, [&](Tensors& t) { t.at(both + "_blocks").dtype = kI8; }),
              HasSubstr("_blocks\" is i8[4,128,1,16]; MXFP4 is bytes"));
  EXPECT_THAT(refused(kMxfp4, [&](Tensors& t) { t.erase(both + "_bias"); }), HasSubstr("has no \"" + both + "_bias\" [4,128]"));
  EXPECT_THAT(refused(kMxfp4, [&](Tensors& t) { t[down] = t.at("lm_head.weight"); }),
              HasSubstr("\"" + down + "\" bf16[31,32] is nothing that this llama"));
  EXPECT_THAT(refused(kDense, [&](Tensors& t) { t[down + "_scales"] = t.at(down + "_bias"); }),
              HasSubstr("is nothing that this llama of 3 layers has"));
  EXPECT_THAT(refused(kDense, [&](Tensors& t) { t.at(both).shape = {4, 48, 16}; }), HasSubstr("experts.gate asks for [4,16,48]"));
  EXPECT_THAT(refused(kDense, [](Tensors& t) { t.erase("model.layers.2.self_attn.sinks"); }),
              HasSubstr("has no \"model.layers.2.self_attn.sinks\" [4], of which the model's blocks.2.attention.sinks is made"));
  // A model without them does not ignore them.
  ModelConfig without = config_of(kDense);
  without.attention_sinks = false;
  std::vector<nn::StatePiece> none;
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { models::fill_weights(none, models::PublishedFiles::open(kDense), without); }),
              HasSubstr("self_attn.sinks\" bf16[4] is nothing"));
  // Blocks are of 32.
  const Copy narrow(kMxfp4);
  narrow.replace("config.json", "\"intermediate_size\": 64", "\"intermediate_size\": 48");
  narrow.rewrite([](Tensors& t) {
    const std::string first = "model.layers.0.mlp.experts.gate_up_proj";
    t.at(first + "_blocks").shape = {4, 96, 1, 16}, t.at(first + "_blocks").bytes.resize(4 * 96 * 16);
    t.at(first + "_scales").shape = {4, 96, 1}, t.at(first + "_scales").bytes.resize(4 * 96);
  });
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] {
                models::check_weights(models::PublishedFiles::open(narrow.path()), config_of(narrow.path()));
              }), HasSubstr("experts.down_proj\" is in MXFP4, in blocks of 32, and rows of the model's blocks.0.moe.experts.down have 48"));
}

}  // namespace
}  // namespace sheaf
