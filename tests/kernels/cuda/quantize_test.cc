#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/linear_of_blocks.h"
#include "sheaf/kernels/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sheaf/kernels/cuda/few_blocks.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

TEST(CudaDequantize, HasTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const BlockFormat format : {BlockFormat::int8, BlockFormat::nf4})
    for (const Shape& shape : {Shape{1, 64}, Shape{3, 192}, Shape{130, 640}, Shape{0, 64}}) {
      const Array values = Array::random(kF32, shape, 1, 0.1);
      const Array blocks(kU8, blocks_shape(shape, format));
      ASSERT_TRUE(cpu::quantize(std::span(values.view().as<float>(), static_cast<size_t>(shape.numel())), format, blocks.view().as<uint8_t>()));
      for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
        const Array want(dtype, shape);
        cpu::dequantize(blocks, format, want);
        const OnGpu out{Array(dtype, shape)};
        cuda::dequantize(OnGpu::stream(), OnGpu(blocks), format, out);
        EXPECT_TRUE(same_bits(out.back(), want)) << name(format) << " " << name(dtype) << " " << shape.to_string();
      }
    }
}

TEST(CudaLinearOfBlocks, IsTheProductOfTheValues) {
  SHEAF_NEEDS_GPU();
  for (const BlockFormat format : {BlockFormat::int8, BlockFormat::nf4})
    for (const DType dtype : {kF32, kBF16}) {
      const Shape shape{48, 128};
      const Array weight = Array::random(kF32, shape, 1, 0.1), x = Array::random(dtype, {5, 128}, 2), bias = Array::random(dtype, {48}, 3);
      const Array blocks(kU8, blocks_shape(shape, format)), values(dtype, shape);
      ASSERT_TRUE(cpu::quantize(std::span(weight.view().as<float>(), static_cast<size_t>(shape.numel())), format, blocks.view().as<uint8_t>()));
      cpu::dequantize(blocks, format, values);
      const OnGpu y{Array(dtype, {5, 48})}, want{Array(dtype, {5, 48})}, gx(x), gblocks(blocks), gvalues(values), gbias(bias);
      cuda::linear_of_blocks(OnGpu::stream(), gx, gblocks, format, gbias, y,
                             GpuScratch(cuda::linear_of_blocks_workspace(gx, gblocks, format, gbias, y)));
      cuda::linear(OnGpu::stream(), gx, gvalues, gbias, want, GpuScratch(cuda::linear_workspace(gx, gvalues, gbias, want)));
      EXPECT_TRUE(same_bits(y.back(), want.back())) << name(format) << " " << name(dtype);
    }
}

TEST(CudaToInt8Blocks, HasTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const DType dtype : {kF32, kBF16, kF16, kF64})
    for (const int64_t blocks : {0, 1, 3, 7, 1000}) {
      const Array values = Array::random(dtype, {blocks * 64}, 1, 0.1);
      if (dtype == kF32 && blocks == 7) {
        auto* v = values.view().as<float>();
        v[70] = std::numeric_limits<float>::infinity(), v[130] = std::nanf(""), v[200] = 1e-39f, v[201] = 1e-27f;
        std::fill(v + 256, v + 320, 0.0f), std::fill(v + 320, v + 384, 1e-30f);
      }
      if (dtype == kF64 && blocks == 7) values.view().as<double>()[70] = 1e-40;  // no normal f32
      const Array want(kU8, {blocks * 66});
      for (const std::optional<uint32_t> key : {std::optional<uint32_t>(), std::optional<uint32_t>(5)}) {
        cpu::to_int8_blocks(values, key, want);
        const OnGpu got{Array(kU8, {blocks * 66})};
        cuda::to_int8_blocks(OnGpu::stream(), OnGpu(values), key, got);
        EXPECT_TRUE(same_bits(got.back(), want)) << name(dtype) << " " << blocks << (key ? " by chance" : "");
        const OnGpu in_rounds{Array(kU8, {blocks * 66})};
        const cuda::FewBlocks few;
        cuda::to_int8_blocks(OnGpu::stream(), OnGpu(values), key, in_rounds);
        EXPECT_TRUE(same_bits(in_rounds.back(), want)) << name(dtype) << " " << blocks << (key ? " by chance" : "");
      }
      for (const int64_t parts : {1, 3}) {
        const Array all(kU8, {parts * blocks * 66});
        for (int64_t p = 0; p < parts; ++p)
          std::copy_n(want.view().as<uint8_t>(), blocks * 66, all.view().as<uint8_t>() + p * blocks * 66);
        const Array sum(dtype, {blocks * 64});
        cpu::sum_of_blocks(all, parts, sum);
        const OnGpu out{Array(dtype, {blocks * 64})};
        cuda::sum_of_blocks(OnGpu::stream(), OnGpu(all), parts, out);
        EXPECT_TRUE(same_bits(out.back(), sum)) << name(dtype) << " " << blocks << " of " << parts;
      }
    }
}

TEST(CudaDequantize, RefusesWhatIsNoBlocks) {
  SHEAF_NEEDS_GPU();
  const OnGpu out{Array(kF32, {1, 64})};
  EXPECT_THROW(cuda::dequantize(OnGpu::stream(), OnGpu(Array(kU8, {1, 66})), BlockFormat::nf4, out), ShapeError);
  EXPECT_THROW(cuda::dequantize(OnGpu::stream(), OnGpu(Array(kI8, {1, 66})), BlockFormat::int8, out), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels
