// Values from safetensors files with other names and dtypes, into modules cut in any way.
#include "sheaf/nn/load_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/safetensors.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Part : nn::Module {
  nn::Linear up{5, 6, {.cut = OwnershipMap::even(0)}}, down{6, 5, {.bias = false, .cut = OwnershipMap::even(1)}};
  SHEAF_FIELDS(up, down);
};

/// A tied, a frozen and a quantized parameter, and buffers.
struct Net : nn::Module {
  std::vector<Part> parts = std::vector<Part>(2);
  nn::Parameter frozen{{4, 3}, nn::Init::normal(1)}, blocks{{3, 128}, nn::Init::normal(1)};
  nn::Buffer mean{{5}, nn::Init::zeros()}, count{{2}, nn::Init::zeros(), kI64};
  Net() {
    tie(parts[1].up.weight, parts[0].up.weight);
    for (nn::Parameter* p : {&frozen, &blocks}) p->freeze_for_good();
    blocks.quantize(BlockFormat::int8);
  }
  SHEAF_FIELDS(parts, frozen, blocks, mean, count);
};

/// Element i of a tensor: exact in every floating dtype.
float value(const std::string& tensor, int64_t i) {
  const auto of_name = static_cast<int64_t>(tensor.size() + static_cast<size_t>(tensor.front()));
  return static_cast<float>((7 * i + of_name) % 41 - 20) / 8;
}
std::vector<float> values(const std::string& tensor, const Shape& shape) {
  std::vector<float> out;
  for (int64_t i = 0; i < shape.numel(); ++i) out.push_back(value(tensor, i));
  return out;
}

SafetensorsInput input(const std::string& name, DType dtype, const Shape& shape) {
  SafetensorsInput out{.name = name, .dtype = dtype, .shape = shape, .pieces = {}};
  out.make = [=] {
    std::vector<std::byte> bytes(static_cast<size_t>(shape.numel()) * size_of(dtype));
    if (dtype == kI64) {
      for (int64_t i = 0; i < shape.numel(); ++i) reinterpret_cast<int64_t*>(bytes.data())[i] = 100 + i;
    } else {
      visit_floating("test", dtype, [&]<class T>() {
        for (int64_t i = 0; i < shape.numel(); ++i) reinterpret_cast<T*>(bytes.data())[i] = static_cast<T>(value(name, i));
      });
    }
    return bytes;
  };
  return out;
}

/// Two files, with a tensor for every parameter and buffer but one, in all dtypes, and one more.
std::vector<std::string> write_files(const ScratchFolder& folder) {
  std::vector<std::string> files = {folder / "a.safetensors", folder / "b.safetensors"};
  write_safetensors(files[0], {input("in.0.w", kF64, {6, 5}), input("in.0.b", kBF16, {6}), input("in.1.b", kF16, {6}), input("extra", kF32, {2})});
  write_safetensors(files[1], {input("out.0.w", kF16, {5, 6}), input("fixed", kF32, {4, 3}), input("codes", kF32, {3, 128}),
                               input("mean", kF64, {5}), input("steps", kI64, {2}), input("also", kF32, {1})});
  return files;
}

const std::map<std::string, std::string> kNames = {
    {"parts.0.up.weight", "in.0.w"}, {"parts.0.up.bias", "in.0.b"}, {"parts.1.up.bias", "in.1.b"}, {"parts.0.down.weight", "out.0.w"},
    {"frozen", "fixed"},             {"blocks", "codes"},           {"mean", "mean"},              {"count", "steps"}};

std::optional<std::string> name_of(const std::string& name) {
  const auto found = kNames.find(name);
  return found == kNames.end() ? std::nullopt : std::optional(found->second);
}

struct Way {
  std::vector<MeshSpec::Axis> axes;
  Strategy strategy = Strategy::full_shard;
  bool units = true, bf16 = false;
};

template <class F>
void on_each_way(F&& f) {
  const Way ways[] = {{{{"data", 1}}},
                      {{{"data", 2}}},
                      {{{"data", 3}}},
                      {{{"data", 3}}, Strategy::full_shard, false},
                      {{{"data", 2}}, Strategy::full_shard, true, true},
                      {{{"data", 3}}, Strategy::zero1},
                      {{{"data", 2}}, Strategy::replicate},
                      {{{"data", 1}, {"model", 2}}},
                      {{{"data", 1}, {"model", 3}}, Strategy::replicate}};
  for (const Way& way : ways) {
    int ranks = 1;
    for (const auto& axis : way.axes) ranks *= axis.size;
    run_local(ranks, [&](World& w) {
      ShardOptions options{.strategy = way.strategy};
      if (way.axes.size() > 1) options.tensor_axis = "model";
      if (way.units) options.units = nn::units_of<Part>();
      if (way.bf16) options.compute_dtype = kBF16;
      f(w, w.mesh(way.axes), options);
    }, {.threads_per_rank = 1});
  }
}

TEST(LoadTensors, FillsWhatIsNamed) {
  const ScratchFolder folder;
  const std::vector<std::string> files = write_files(folder);
  on_each_way([&](World& w, const Mesh& mesh, const ShardOptions& options) {
    Net net, expected;
    for (Net* m : {&net, &expected}) {
      shard(*m, mesh, options);
      materialize(*m, w.device(), {.seed = 3});
    }
    const nn::LoadedTensors loaded = nn::load_tensors(net, files, name_of);
    EXPECT_THAT(loaded.kept, ElementsAre("parts.1.down.weight"));
    EXPECT_THAT(loaded.unused, ElementsAre("also", "extra"));
    for (const nn::Parameter& p : expected.parameters())
      if (const auto tensor = name_of(p.name())) assign(p, cast(Tensor::from<float>(values(*tensor, p.shape()), p.shape()), p.dtype()));
    const auto got = net.parameters(), want = expected.parameters();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(identical(full_parameter(got[i]), full_parameter(want[i]))) << got[i].name();
    EXPECT_EQ(full_parameter(net.parts[1].up.weight).to_vector<float>(), values("in.0.w", {6, 5})) << "tied";
    EXPECT_EQ(net.frozen.dtype(), options.compute_dtype.value_or(kF32));
    EXPECT_EQ(full_parameter(net.frozen).to_vector<float>(), values("fixed", {4, 3}));
    EXPECT_EQ(net.mean.value().to_vector<float>(), values("mean", {5}));
    EXPECT_EQ(net.count.value().to_vector<int64_t>(), (std::vector<int64_t>{100, 101}));
  });
}

// A part of a model, whose unit has other parameters, too.
TEST(LoadTensors, FillsAPartOfAModel) {
  const ScratchFolder folder;
  const std::vector<std::string> files = write_files(folder);
  on_each_way([&](World& w, const Mesh& mesh, const ShardOptions& options) {
    Net net, before;
    for (Net* m : {&net, &before}) {
      shard(*m, mesh, options);
      materialize(*m, w.device(), {.seed = 3});
    }
    const nn::LoadedTensors loaded = nn::load_tensors(net.parts[1], files, name_of);
    EXPECT_THAT(loaded.kept, ElementsAre("parts.1.down.weight"));
    const auto after = net.parameters(), old = before.parameters();
    for (size_t i = 0; i < after.size(); ++i) {
      const std::string& name = after[i].name();
      const bool filled = name == "parts.0.up.weight" || name == "parts.1.up.bias";
      EXPECT_EQ(identical(full_parameter(after[i]), full_parameter(old[i])), !filled) << name;
      const std::vector<float> now = full_parameter(after[i]).to_vector<float>();
      if (filled) {
        EXPECT_EQ(now, values(*name_of(name), after[i].shape())) << name;
      }
    }
  });
}

TEST(LoadTensors, EachRankReadsItsPart) {
  const ScratchFolder folder;
  const std::vector<std::string> files = {folder / "a.safetensors"};
  write_safetensors(files[0], {input("w", kBF16, {7, 40}), input("b", kF32, {7})});
  for (const int ranks : {1, 2, 3}) {
    std::atomic<int64_t> all = 0;
    run_local(ranks, [&](World& w) {
      nn::Linear layer(40, 7);
      shard(layer, w.mesh({{"data", ranks}}));
      materialize(layer, w.device());
      all += nn::load_tensors(layer, files, [](const std::string& name) { return std::optional(name.substr(0, 1)); }).bytes;
      EXPECT_EQ(full_parameter(layer.weight).to_vector<float>(), values("w", {7, 40}));
      EXPECT_EQ(full_parameter(layer.bias).to_vector<float>(), values("b", {7}));
    }, {.threads_per_rank = 1});
    EXPECT_EQ(all, 7 * 40 * 2 + 7 * 4) << ranks;
  }
}

TEST(LoadTensors, ChecksEverythingBeforeItWrites) {
  const ScratchFolder folder;
  const std::vector<std::string> files = write_files(folder);
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& w) {
      Net net;
      const auto load = [&] { nn::load_tensors(net, files, name_of); };
      EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, load), HasSubstr("call materialize() first"));
      shard(net, w.mesh({{"data", ranks}}), {.units = nn::units_of<Part>()});
      materialize(net, w.device());
      const std::vector<float> before = full_parameter(net.parts[0].up.weight).to_vector<float>();
      const auto message = [&](const std::string& of, const std::string& tensor) {
        return message_of<CheckpointError>(ExitCode::kData, [&] {
          nn::load_tensors(net, files, [&](const std::string& name) { return name == of ? std::optional(tensor) : name_of(name); });
        });
      };
      EXPECT_THAT(message("mean", "nowhere"), AllOf(HasSubstr("[load_tensors] \"nowhere\", for the model's 'mean' f32[5], is not in '"),
                                                    HasSubstr("a.safetensors', '"), HasSubstr("b.safetensors'")));
      EXPECT_THAT(message("parts.1.down.weight", "in.0.w"),
                  AllOf(HasSubstr("a.safetensors': \"in.0.w\" is f64[6,5], the model's 'parts.1.down.weight' f32[5,6]")));
      EXPECT_THAT(message("blocks", "fixed"), HasSubstr("\"fixed\" is f32[4,3], the model's 'blocks' f32[3,128]"));
      EXPECT_THAT(message("count", "extra"), HasSubstr("\"extra\" is f32[2], the model's 'count' i64[2]"));
      EXPECT_EQ(full_parameter(net.parts[0].up.weight).to_vector<float>(), before);
      EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { nn::load_tensors(net, {files[0], files[0]}, name_of); }),
                  HasSubstr("\"extra\" is in '"));
      EXPECT_THROW(nn::load_tensors(net, {folder / "none.safetensors"}, name_of), CheckpointError);
      Recording recording;
      EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, load), HasSubstr("recording.take()"));
    }, {.threads_per_rank = 1});
  Net on_meta;
  materialize(on_meta, Device::meta());
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { nn::load_tensors(on_meta, files, name_of); }), HasSubstr("on meta"));
}

}  // namespace
}  // namespace sheaf
