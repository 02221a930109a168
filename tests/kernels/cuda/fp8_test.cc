#include "sheaf/kernels/cuda/fp8.h"

#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/experts.h"
#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/matmul.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

// Rows and columns, whole and partial tiles, batches, gaps, and layouts that must be copied.
struct Case {
  Shape shape, strides;  // empty: dense
};
const Case kCases[] = {{{3, 40}, {}},       {{2, 5, 300}, {}},        {{65, 1}, {}},
                       {{1, 2000}, {}},     {{3, 7, 33}, {7 * 40, 40, 1}}, {{130, 70}, {1, 130}},
                       {{64, 128}, {1, 80}}, {{2, 65, 200}, {65 * 200, 1, 65}}, {{2, 3, 50}, {300, 100, 2}},
                       {{1, 257}, {1, 3}}};

Array cpu_rounded(const Array& x) {
  Array out(x.view().dtype, x.view().shape);
  cpu::round_to_fp8(x, out);
  return out;
}

Array some(DType d, const Case& c) {
  Array x = Array::random(d, c.shape, 1, 3, c.strides);
  const int64_t depth = c.shape.back(), rows = x.view().numel() / depth;
  for (int64_t i = 0; i < x.view().numel(); ++i)  // of many sizes, and zeros
    x.set(i, x.at(i) * std::pow(10.0, static_cast<double>(i / depth % 7 - 3)) * (i % 11 == 0 ? 0 : i % 3 == 0 ? 1e-3 : 1));
  if (rows > 2) x.set(depth * 2 - 1, NAN);  // the last element of row 1
  return x;
}

TEST(CudaFp8, RoundsAsTheCpuDoes) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16})
    for (const Case& c : kCases) {
      const Array x = some(d, c), want = cpu_rounded(x), blank(d, c.shape);
      const OnGpu gx(x), gy(blank);
      cuda::round_to_fp8(OnGpu::stream(), gx, gy, GpuScratch(cuda::round_to_fp8_workspace(without_data(gx))));
      const Array got = gy.back();
      for (int64_t i = 0; i < x.view().numel(); ++i)
        ASSERT_TRUE(got.at(i) == want.at(i) || (std::isnan(got.at(i)) && std::isnan(want.at(i))))
            << str(name(d), c.shape, c.strides) << " at " << i << ": " << got.at(i) << " is not " << want.at(i);
    }
}

TEST(CudaFp8, CodesStandForTheSame) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16})
    for (const Case& c : kCases) {
      const Array x = some(d, c), want = cpu_rounded(x);
      const OnGpu gx(x);
      if (!cuda::can_round_to_fp8(gx)) continue;
      const int64_t depth = c.shape.back(), pitch = cuda::fp8_pitch(depth), rows = x.view().numel() / depth;
      const Array no_codes(kU8, {rows * pitch}), no_scales(kF32, {rows});
      const OnGpu codes_memory(Array(kU8, {rows * pitch + 16})), scales(no_scales);
      auto* const at = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(codes_memory.view().data) + 15) / 16 * 16);
      cuda::to_fp8_codes(OnGpu::stream(), gx, at, scales.view().as<float>(),
                         GpuScratch(cuda::round_to_fp8_workspace(without_data(gx))));
      const Array codes = codes_memory.back(), found = scales.back();
      const auto* const bytes = codes.view().as<uint8_t>() + (at - codes_memory.view().as<uint8_t>());
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < pitch; ++k) {
          const uint8_t code = bytes[r * pitch + k];
          const double got = static_cast<double>(fp8_value(code)) * found.at(r), wanted = k < depth ? want.at(r * depth + k) : 0;
          if (std::isnan(found.at(r))) {
            ASSERT_TRUE(std::isnan(want.at(r * depth)));
          } else {
            ASSERT_EQ(got, wanted) << str(name(d), c.shape, c.strides) << " at " << r << ", " << k;
          }
        }
    }
}

/// How often the library has, or has not, supported an FP8 product so far.
struct Known {
  int64_t yes = 0, no = 0;
};
Known known() {
  Known out;
  const std::string text = cuda::export_product_choices(0);
  for (size_t at = 0; (at = text.find("\nu8 ", at)) != text.npos; ++at) {
    const std::string line = text.substr(at + 1, text.find('\n', at + 1) - at - 1);
    EXPECT_TRUE(cuda::ProductShape::parse(line.substr(0, line.find(" : ")))) << line;
    ++(line.find("plain") == line.npos ? out.yes : out.no);
  }
  return out;
}

/// The error bound of its sums: Hopper's FP8 products accumulate in fewer bits than f32 has, in 14 according to DeepSeek-V3's report
/// (section 3.3.2). Relative to the largest result.
double bound_of(DType d) { return std::max(2 * epsilon(d), 0x1p-11); }

// The three products of a linear layer against those of the CPU, whose bits the CPU's fp8_test pins to the definition: where cuBLASLt may
// have FP8 products (rows of a multiple of 16 bytes, narrow biases), where it may not, and where it refuses them (the emulated one refuses
// depth 48).
TEST(CudaFp8, ProductsOfLinearLayers) {
  SHEAF_NEEDS_GPU();
  struct Sizes {
    int64_t rows, in, out;
  };
  for (DType d : {kF32, kBF16, kF16})
    for (const Sizes s : {Sizes{21, 48, 64}, Sizes{1, 32, 16}, Sizes{40, 50, 33}, Sizes{16, 70, 80}, Sizes{128, 64, 128}})
      for (const bool has_bias : {false, true}) {
        const Array x = Array::random(d, {s.rows, s.in}, 1), w = Array::random(d, {s.out, s.in}, 2),
                    bias = has_bias ? Array::random(d, {s.out}, 3) : Array(), dy = Array::random(d, {s.rows, s.out}, 4, 0.1);
        const OnGpu gx(x), gw(w), gb = has_bias ? OnGpu(bias) : OnGpu(), gdy(dy), gy(Array(d, {s.rows, s.out})),
                    gdx(Array(d, {s.rows, s.in})), gdw(Array(kF32, {s.out, s.in})), gdb(Array(kF32, {s.out}));
        const View no_x = without_data(gx), no_w = without_data(gw), no_dy = without_data(gdy);
        cuda::linear(OnGpu::stream(), gx, gw, gb, gy, GpuScratch(cuda::linear_workspace(no_x, no_w, without_data(gb.view()), gy, true)),
                     true);
        cuda::matmul(OnGpu::stream(), gdy, gw, gdx, GpuScratch(cuda::matmul_workspace(no_dy, no_w, gdx, true)), true);
        cuda::linear_gradients(OnGpu::stream(), gdy, gx, gdw, gdb,
                               GpuScratch(cuda::linear_gradients_workspace(no_dy, no_x, gdw, gdb, true)), true);
        const auto f32 = [](const Array& a) {
          Array out(kF32, a.view().shape);
          out.fill([&](int64_t i) { return a.at(i); });
          return out;
        };
        const Array wx = f32(x), ww = f32(w), wdy = f32(dy), y(kF32, {s.rows, s.out}), dx(kF32, {s.rows, s.in}), dw(kF32, {s.out, s.in});
        const Array wb = has_bias ? f32(bias) : Array();
        const View b = has_bias ? wb.view() : View{};
        cpu::linear(wx, ww, b, y, Scratch(cpu::linear_workspace(wx, ww, b, y, true)), true);
        cpu::matmul(wdy, ww, dx, Scratch(cpu::matmul_workspace(wdy, ww, dx, true)), true);
        cpu::linear_weight_gradient(wdy, wx, dw, Scratch(cpu::linear_weight_gradient_workspace(wdy, wx, dw, true)), true);
        EXPECT_LT(scaled_error(gy.back(), values(y)), bound_of(d)) << name(d) << s.rows << has_bias;
        EXPECT_LT(scaled_error(gdx.back(), values(dx)), bound_of(d)) << name(d) << s.rows;
        EXPECT_LT(scaled_error(gdw.back(), values(dw)), bound_of(kF32)) << name(d) << s.rows;
      }
  if (emulated_cuda() && !std::getenv("SHEAF_SHIFT_OPERANDS")) {
    EXPECT_GT(known().yes, 10);
    EXPECT_GE(known().no, 3);
  }
}

// On a GPU that has FP8 at all, cuBLASLt must support this product.
TEST(CudaFp8, ALargeProductIsOneOfCodes) {
  SHEAF_NEEDS_GPU();
  const Array x = Array::random(kBF16, {256, 256}, 1), w = Array::random(kBF16, {256, 256}, 2), y(kBF16, {256, 256});
  const OnGpu gx(x), gw(w), gy(y);
  const int64_t before = known().yes;
  for (int times = 0; times < 2; ++times)
    cuda::linear(OnGpu::stream(), gx, gw, View{}, gy, GpuScratch(cuda::linear_workspace(without_data(gx), without_data(gw), View{}, gy, true)),
                 true);
  cpu::linear(x, w, View{}, y, Scratch(cpu::linear_workspace(x, w, View{}, y, true)), true);
  EXPECT_LT(scaled_error(gy.back(), values(y)), bound_of(kBF16));
  if (!std::getenv("SHEAF_SHIFT_OPERANDS")) {
    EXPECT_EQ(known().yes, before + 1);
  }
}

TEST(CudaFp8, ProductsOfExperts) {
  SHEAF_NEEDS_GPU();
  for (const bool cut : {false, true}) {  // groups of a rank, which are not contiguous
    const int64_t experts = 3, groups = 2, places = 22, in = 32, out = 48;
    const auto strides = [&](int64_t cols) {
      const int64_t step = places * cols;
      return Shape{(cut ? groups + 2 : groups) * step, step, cols, 1};
    };
    Array counts(kI32, {experts, groups});
    counts.fill([&](int64_t) { return static_cast<double>(places); });
    const Array x = Array::random(kBF16, {experts, groups, places, in}, 1, 1, strides(in)),
                weight = Array::random(kBF16, {experts, out, in}, 3), y(kBF16, {experts, groups, places, out});
    const OnGpu gx(x), gweight(weight), gcounts(counts), gy(y);
    cuda::expert_linear(
        OnGpu::stream(), gx, gweight, View{}, gcounts, gy,
        GpuScratch(cuda::expert_linear_workspace(without_data(gx), without_data(gweight), View{}, without_data(gcounts), gy, {.fp8 = true})),
        {.fp8 = true});
    cpu::expert_linear(x, weight, View{}, counts, y, Scratch(cpu::expert_linear_workspace(x, weight, View{}, counts, y, {.fp8 = true})),
                       {.fp8 = true});
    EXPECT_LT(scaled_error(gy.back(), values(y)), bound_of(kBF16)) << cut;
  }
}

TEST(CudaFp8, ProductsOfExpertsInParts) {
  SHEAF_NEEDS_GPU();
  const int64_t experts = 3, parts = 2, groups = 2, room = 40, in = 32, out = 48;
  const Array counts = Array::of(kI32, {experts, groups}, {40, 3, 20, 0, 19, 40}), bias = Array::random(kBF16, {experts, out}, 4);
  const Array x = Array::random(kBF16, {parts, groups, room, in}, 1), y(kBF16, {parts, groups, room, out});
  for (const bool turned : {false, true}) {
    const Array weight = Array::random(kBF16, {experts, out, in}, 3, 1, turned ? Shape{out * in, 1, out} : Shape{});
    const OnGpu gx(x), gweight(weight), gcounts(counts), gbias(bias), gy(y);
    cuda::expert_linear(OnGpu::stream(), gx, gweight, gbias, gcounts, gy,
                        GpuScratch(cuda::expert_linear_workspace(without_data(gx), without_data(gweight), without_data(gbias), without_data(gcounts),
                                                                 gy, {.fp8 = true})),
                        {.fp8 = true});
    cpu::expert_linear(x, weight, bias, counts, y, Scratch(cpu::expert_linear_workspace(x, weight, bias, counts, y, {.fp8 = true})), {.fp8 = true});
    EXPECT_LT(scaled_error(gy.back(), values(y)), bound_of(kBF16)) << turned;
  }
}

}  // namespace
}  // namespace sheaf::kernels
