// Parameters that are stored in blocks: a rank encodes its bytes from its share of the values, however these are cut.
#include "sheaf/nn/quantize.h"

#include <gmock/gmock.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/kernels/quantize.h"
#include "sheaf/nn/block_piece.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/shard.h"

namespace sheaf::testing {
namespace {

using nn::BlockPiece;

constexpr BlockFormat kFormats[] = {BlockFormat::int8, BlockFormat::nf4};

std::vector<float> ramp(int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) out[static_cast<size_t>(i)] = static_cast<float>((i * 37 % 101) - 50) * 0.02f;
  return out;
}

TEST(BlockPiece, AnyCutGivesTheBytesOfTheWhole) {
  for (const BlockFormat format : kFormats) {
    const int64_t rows = 3, row = 2 * block_bytes(format), elements = 2 * kBlockSize;
    const std::vector<float> values = ramp(rows * elements);
    std::vector<uint8_t> whole(static_cast<size_t>(rows * row));
    ASSERT_TRUE(kernels::cpu::quantize(values, format, whole.data()));
    const auto bytes_of = [&](const Runs& runs) {
      BlockPiece piece("weight", format, runs);
      piece.fill([&](int64_t begin, std::span<float> out) { std::copy_n(values.begin() + begin, out.size(), out.begin()); });
      std::vector<uint8_t> out(static_cast<size_t>(runs.numel()));
      piece.store(Device::cpu(), out.data());
      return out;
    };
    for (int64_t begin = 0; begin <= rows * row; begin += 7)
      for (int64_t end = begin; end <= rows * row; end += 13)
        EXPECT_EQ(bytes_of(Runs::of({begin, end})), std::vector<uint8_t>(whole.begin() + begin, whole.begin() + end));
    // A column of each row, as a tensor axis cuts them; and a part of it, like a flat cut of that.
    for (const int64_t skipped : {int64_t{0}, int64_t{5}}) {
      const Runs runs{row / 2 + skipped, row / 2 - skipped - 3, rows, row};
      std::vector<uint8_t> want;
      for (int64_t k = 0; k < rows; ++k) want.insert(want.end(), whole.begin() + runs[k].begin, whole.begin() + runs[k].end);
      EXPECT_EQ(bytes_of(runs), want);
    }
    EXPECT_THROW(BlockPiece("weight", format, Runs{0, 3, 2, row - 1}), ShapeError);
  }
}

struct Layer : nn::Module {
  nn::Linear linear;
  explicit Layer(int64_t in, int64_t out) : linear(in, out) {}
  Tensor forward(const Tensor& x) { return linear(x); }
  SHEAF_FIELDS(linear);
};

// On 1 to 5 ranks, with flat cuts inside blocks; in each compute dtype like the same values stored without blocks.
TEST(Quantize, IsTheLayerOfTheValues) {
  for (const BlockFormat format : kFormats)
    for (const std::optional<DType> compute : {std::optional<DType>(), {kBF16}, {kF16}})
      for (int world = 1; world <= 5; ++world)
        run_local(world, [&](World& w) {
          const Mesh mesh = w.mesh({{"data", world}});
          Layer blocks(192, 7), values(192, 7);
          for (Layer* layer : {&blocks, &values}) layer->linear.weight.freeze_for_good();
          EXPECT_EQ(nn::quantize(blocks, format), 1);
          for (Layer* layer : {&blocks, &values}) {
            shard(*layer, mesh, {.axis = "data", .compute_dtype = compute});
            materialize(*layer, Device::cpu(), {.seed = 3});
          }
          EXPECT_TRUE(identical(full_parameter(blocks.linear.bias), full_parameter(values.linear.bias)));
          const Tensor stood_for = full_parameter(blocks.linear.weight);
          EXPECT_EQ(stood_for.dtype(), compute.value_or(kF32));
          assign(values.linear.weight, stood_for);
          Tensor x = full_of({compute.value_or(kF32), {4, 192}, {}}, 0.0);
          x = x + reshape(cast(arange(4 * 192), x.dtype()), {4, 192}) * 1e-3;
          const auto run = [&](Layer& layer) {
            {
              Recording recording;
              const Tensor x_R = redistribute(x, Layout(mesh.spec));
              recording.backward(redistribute(sum(layer(x_R)), "data", Placement::partial()));
            }
            return full_gradient(layer.linear.bias);
          };
          const Tensor y_blocks = blocks(redistribute(x, Layout(mesh.spec))), y_values = values(redistribute(x, Layout(mesh.spec)));
          EXPECT_EQ(y_blocks.to_vector<double>(), y_values.to_vector<double>());
          EXPECT_TRUE(identical(run(blocks), run(values)));
          if (compute) return;  // other scales round differently
          assign(blocks.linear.weight, stood_for);
          EXPECT_TRUE(identical(full_parameter(blocks.linear.weight), stood_for));
        }, {.threads_per_rank = 1});
}

TEST(Quantize, ClonesHaveTheirBytes) {
  nn::Linear layer(64, 5);
  for (nn::Parameter& p : layer.parameters()) p.freeze_for_good();
  nn::quantize(layer, BlockFormat::nf4);
  shard(layer, Mesh{}, {.compute_dtype = kBF16});
  materialize(layer, Device::cpu(), {.seed = 9});
  nn::Linear copy = clone(layer, 64, 5);
  EXPECT_EQ(copy.weight.blocks(), BlockFormat::nf4);
  EXPECT_TRUE(identical(full_parameter(copy.weight), full_parameter(layer.weight)));
}

}  // namespace
}  // namespace sheaf::testing
