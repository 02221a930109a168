#include "sheaf/kernels/linear_of_blocks.h"

#include <gmock/gmock.h>

#include <cstring>

#include "sheaf/core/parallel.h"
#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/quantize.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

Array blocks_of(const Array& weight, BlockFormat format) {
  Array out(kU8, blocks_shape(weight.view().shape, format));
  const auto count = static_cast<size_t>(weight.view().numel());
  EXPECT_TRUE(quantize(std::span(weight.view().as<float>(), count), format, out.view().as<uint8_t>()));
  return out;
}

// Bitwise, for each way of computing: rows in registers, in the cache, all of them; depths of more than one of the product's blocks.
TEST(LinearOfBlocks, HasTheBitsOfDequantizeAndLinear) {
  for (const BlockFormat format : {BlockFormat::int8, BlockFormat::nf4})
    for (const DType dtype : {kF32, kBF16, kF16, kF64})
      for (const int64_t inputs : {64, 384, 832})
        for (const int64_t outputs : {1, 15, 16, 47, 48, 131})
          for (const int64_t rows : {1, 2, 3, 4, 5, 32, 33}) {
            if (dtype != kF32 && (outputs % 16 || rows > 5)) continue;
            const Array weight = Array::random(kF32, {outputs, inputs}, 1, 0.3), blocks = blocks_of(weight, format);
            const Array x = Array::random(dtype, {rows, inputs}, 2), bias = Array::random(dtype, {outputs}, 3);
            Array values(dtype, {outputs, inputs});
            dequantize(blocks, format, values);
            for (const View& b : {bias.view(), View{}}) {
              Array y(dtype, {rows, outputs}), want(dtype, {rows, outputs});
              linear(x, values, b, want, Scratch(linear_workspace(x, values, b, want)));
              linear_of_blocks(x, blocks, format, b, y,
                               Scratch(linear_of_blocks_workspace(without_data(x), without_data(blocks), format, b, without_data(y))));
              ASSERT_EQ(std::memcmp(y.view().data, want.view().data, y.bytes()), 0)
                  << name(format) << " " << name(dtype) << " " << rows << " x " << inputs << " x " << outputs << (b.rank() ? " bias" : "");
            }
          }
}

TEST(LinearOfBlocks, TakesOperandsOfAnyStrides) {
  const Array weight = Array::random(kF32, {24, 128}, 1), blocks = blocks_of(weight, BlockFormat::nf4);
  const Array x = Array::random(kF32, {2, 3, 128}, 2, 1, {3 * 200, 200, 1}), dense = Array::random(kF32, {2, 3, 128}, 2);
  Array y(kF32, {2, 3, 24}, {3 * 50, 50, 1}), want(kF32, {2, 3, 24});
  const auto run = [&](const View& in, const View& out) {
    linear_of_blocks(in, blocks, BlockFormat::nf4, {}, out, Scratch(linear_of_blocks_workspace(in, blocks, BlockFormat::nf4, {}, out)));
  };
  run(x, y), run(dense, want);
  EXPECT_EQ(values(y), values(want));
}

TEST(LinearOfBlocks, RefusesWhatDoesNotFit) {
  const Array weight = Array::random(kF32, {24, 128}, 1), blocks = blocks_of(weight, BlockFormat::nf4);
  const Array x = Array::random(kF32, {2, 64}, 2);
  Array y(kF32, {2, 24});
  EXPECT_THROW(linear_of_blocks(x, blocks, BlockFormat::nf4, {}, y, {}), ShapeError);
  EXPECT_THROW(linear_of_blocks(x, blocks, BlockFormat::int8, {}, y, {}), ShapeError);
  EXPECT_THROW(linear_of_blocks(x, weight, BlockFormat::nf4, {}, y, {}), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
