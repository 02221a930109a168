#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/linear_of_blocks.h"
#include "sheaf/kernels/quantize.h"

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

TEST(CudaDequantize, RefusesWhatIsNoBlocks) {
  SHEAF_NEEDS_GPU();
  const OnGpu out{Array(kF32, {1, 64})};
  EXPECT_THROW(cuda::dequantize(OnGpu::stream(), OnGpu(Array(kU8, {1, 66})), BlockFormat::nf4, out), ShapeError);
  EXPECT_THROW(cuda::dequantize(OnGpu::stream(), OnGpu(Array(kI8, {1, 66})), BlockFormat::int8, out), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels
