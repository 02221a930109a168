#include "sheaf/kernels/linear.h"

#include <cstdlib>

#include "sheaf/kernels/cuda/product.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

Array wide(const Array& x) { return x.view().rank() == 0 ? Array() : in_f64(x); }
OnGpu on_gpu(const Array& x) { return x.view().rank() == 0 ? OnGpu() : OnGpu(x); }

Array forward(const Array& x, const Array& w, const Array& bias, const Array& blank) {
  const OnGpu gx(x), gw(w), gb = on_gpu(bias), gy(blank);
  const GpuScratch scratch(cuda::linear_workspace(without_data(x), without_data(w),
                                                  without_data(bias.view()), without_data(blank)));
  cuda::linear(OnGpu::stream(), gx, gw, gb, gy, scratch);
  return gy.back();
}
Array weight_gradient(const Array& dy, const Array& x, const Array& blank) {
  const OnGpu gdy(dy), gx(x), gw(blank);
  const GpuScratch scratch(cuda::linear_weight_gradient_workspace(without_data(dy), without_data(x),
                                                                  without_data(blank)));
  cuda::linear_weight_gradient(OnGpu::stream(), gdy, gx, gw, scratch);
  return gw.back();
}
Array bias_gradient(const Array& dy, const Array& blank) {
  const OnGpu gdy(dy), gb(blank);
  const GpuScratch scratch(
      cuda::linear_bias_gradient_workspace(without_data(dy), without_data(blank)));
  cuda::linear_bias_gradient(OnGpu::stream(), gdy, gb, scratch);
  return gb.back();
}

/// Both gradients at once; `blank_bias` may be of another dtype than `blank`.
std::pair<Array, Array> gradients(const Array& dy, const Array& x, const Array& blank,
                                  const Array& blank_bias) {
  const OnGpu gdy(dy), gx(x), gw(blank), gb(blank_bias);
  const GpuScratch scratch(cuda::linear_gradients_workspace(
      without_data(dy), without_data(x), without_data(blank), without_data(blank_bias)));
  cuda::linear_gradients(OnGpu::stream(), gdy, gx, gw, gb, scratch);
  return {gw.back(), gb.back()};
}

struct Case {
  Shape lead;
  int64_t in, out;
  Shape x_strides, dy_strides;  // empty: dense
};
const Case kCases[] = {{{5}, 7, 3, {}, {}},
                       {{2, 9}, 33, 65, {}, {}},
                       {{}, 8, 4, {}, {}},
                       {{3, 4}, 16, 40, {200, 20, 1}, {}},
                       {{3, 4}, 6, 5, {7, 70, 1}, {5, 80, 1}},
                       {{3, 4}, 16, 8, {16, 80, 1}, {8, 40, 1}},
                       {{2, 3, 5}, 16, 24, {16 * 40, 16, 64, 1}, {}},
                       {{64}, 32, 128, {}, {}},
                       {{130}, 1, 1, {}, {}}};

Shape with(Shape lead, int64_t last) {
  lead.push_back(last);
  return lead;
}

TEST(CudaLinear, ForwardAndGradients) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Case& c : kCases)
      for (bool with_bias : {false, true}) {
        const Array x = Array::random(d, with(c.lead, c.in), 1, 1, c.x_strides),
                    w = Array::random(d, {c.out, c.in}, 2),
                    bias = with_bias ? Array::random(d, {c.out}, 3) : Array(),
                    dy = Array::random(d, with(c.lead, c.out), 4, 1, c.dy_strides);
        const Array wx = wide(x), ww = wide(w), wb = wide(bias), wdy = wide(dy),
                    y(kF64, with(c.lead, c.out)), dw(kF64, {c.out, c.in});
        const View b = with_bias ? wb.view() : View{};
        cpu::linear(wx, ww, b, y, Scratch(cpu::linear_workspace(wx, ww, b, y)));
        cpu::linear_weight_gradient(wdy, wx, dw,
                                    Scratch(cpu::linear_weight_gradient_workspace(wdy, wx, dw)));
        const double bound = 4 * epsilon(d);
        // The output has the strides of a slice, too.
        const Array blank(d, with(c.lead, c.out), c.dy_strides), blank_w(d, {c.out, c.in});
        const Array got = forward(x, w, bias, blank);
        EXPECT_LT(scaled_error(got, values(y)), bound) << name(d) << c.in << ' ' << with_bias;
        EXPECT_TRUE(gaps_kept(blank, got));
        EXPECT_LT(scaled_error(weight_gradient(dy, x, blank_w), values(dw)), bound)
            << name(d) << c.in;
        const Array db(d, {c.out});
        cpu::linear_bias_gradient(dy, db);
        EXPECT_TRUE(same_bits(bias_gradient(dy, Array(d, {c.out})), db)) << name(d) << c.in;
        const auto [dw_too, db_too] = gradients(dy, x, blank_w, Array(d, {c.out}));
        EXPECT_LT(scaled_error(dw_too, values(dw)), bound) << name(d) << c.in;
        EXPECT_LT(scaled_error(db_too, values(db)), bound) << name(d) << c.in;
      }
}

TEST(CudaLinear, BiasGradientSumsInTheOrderOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (int64_t rows : {1, 63, 64, 65, 1000, 4300})  // more than 64 blocks of 64 rows
      for (int64_t columns : {1, 33, 40, 264}) {
        if (rows * columns > 500000) continue;
        const Array dy = Array::random(d, {rows, columns}, 1), want(d, {columns});
        cpu::linear_bias_gradient(dy, want);
        EXPECT_TRUE(same_bits(bias_gradient(dy, Array(d, {columns})), want))
            << name(d) << rows << 'x' << columns;
      }
  with_threads(1, [] {  // which flushes subnormal numbers, as all threads of a rank do
    const Array dy = with_subnormals(Array::random(kF32, {130, 40}, 1, 1e-37)), want(kF32, {40});
    cpu::linear_bias_gradient(dy, want);
    EXPECT_TRUE(same_bits(bias_gradient(dy, Array(kF32, {40})), want));
  });
  // Into every second element of f32.
  const Array dy = Array::random(kBF16, {2, 70, 48}, 1, 1, {70 * 48 * 2, 96, 1}),
              blank(kF32, {48}, {2}), want(kF32, {48});
  cpu::linear_bias_gradient(dy, want);
  const Array got = bias_gradient(dy, blank);
  EXPECT_TRUE(same_bits(got, want));
  EXPECT_TRUE(gaps_kept(blank, got));
}

TEST(CudaLinear, NoRowsAndNoInputs) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16}) {
    const Array dy(d, {0, 3}), x(d, {0, 4});
    EXPECT_EQ(values(weight_gradient(dy, x, Array(d, {3, 4}))), std::vector<double>(12, 0.0));
    EXPECT_EQ(values(bias_gradient(dy, Array(d, {3}))), std::vector<double>(3, 0.0));
    forward(x, Array::random(d, {3, 4}, 1), Array(), dy);
    // A product of depth 0 leaves the bias.
    const Array bias = Array::random(d, {3}, 1);
    const Array y = forward(Array(d, {2, 0}), Array(d, {3, 0}), bias, Array(d, {2, 3}));
    for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(y.at(i), bias.at(i % 3));
  }
}

TEST(CudaLinear, NarrowGradientsIntoF32) {
  SHEAF_NEEDS_GPU();
  const Array dy = Array::random(kBF16, {200, 20}, 1), x = Array::random(kBF16, {200, 30}, 2),
              dw(kF64, {20, 30}), wdy = wide(dy), wx = wide(x);
  cpu::linear_weight_gradient(wdy, wx, dw,
                              Scratch(cpu::linear_weight_gradient_workspace(wdy, wx, dw)));
  EXPECT_LT(scaled_error(weight_gradient(dy, x, Array(kF32, {20, 30})), values(dw)), 1e-6);
}

TEST(CudaLinear, GradientsTogether) {
  SHEAF_NEEDS_GPU();
  // With rows at 16 bytes in one kernel; otherwise, for other dtypes and strides of the bias's gradient and for no rows, in two: then the
  // bias's gradient has the CPU's bits.
  for (int64_t rows : {192, 0})
    for (int64_t in : {48, 50}) {
      const Array dy = Array::random(kBF16, {rows, 40}, 1), x = Array::random(kBF16, {rows, in}, 2);
      for (DType weight : {kBF16, kF32})
        for (DType bias : {kBF16, kF32})
          for (int64_t step : {1, 2}) {
            const Array blank(weight, {40, in}), blank_bias(bias, {40}, {step}), want(bias, {40});
            cpu::linear_bias_gradient(dy, want);
            const auto [dw, db] = gradients(dy, x, blank, blank_bias);
            const std::string where = str(rows, ' ', in, ' ', weight, ' ', bias, ' ', step);
            // Sums in tensor cores are truncated, not rounded, and the two kernels truncate at different places.
            constexpr double kCut = 1e-6;
            EXPECT_LT(scaled_error(dw, values(weight_gradient(dy, x, Array(kF32, {40, in})))),
                      2 * epsilon(weight) + kCut)
                << where;
            EXPECT_LT(scaled_error(db, values(want)), 2 * epsilon(bias) + kCut) << where;
            EXPECT_TRUE(gaps_kept(blank_bias, db)) << where;
            if (weight != bias || step != 1 || rows == 0 || (emulated_cuda() && in == 50)) {
              EXPECT_TRUE(same_bits(db, want)) << where;
            }
          }
    }
}

// While products are timed, the kernels for a fused product's second step are loaded, but not run: results equal those of a product in two
// steps, and no gradient is multiplied by the activation's derivative twice.
TEST(CudaLinear, KernelsAreLoadedBesideFusedProducts) {
  SHEAF_NEEDS_GPU();
  constexpr int64_t kRows = 40, kIn = 56, kOut = 24;  // not used in any other test here
  const Array x = Array::random(kBF16, {kRows, kIn}, 1), w = Array::random(kBF16, {kOut, kIn}, 2),
              dy = Array::random(kBF16, {kRows, kOut}, 3), b = Array::random(kBF16, {kOut}, 4),
              in(kBF16, {kRows, kIn}), out(kBF16, {kRows, kOut});
  const OnGpu gx(x), gw(w), gdy(dy), gb(b);
  const auto run = [&] {
    const OnGpu before(out), value(out), dbefore(in), dw(w), db(b);
    cuda::linear_gelu(OnGpu::stream(), gx, gw, gb, before, value,
                      GpuScratch(cuda::linear_gelu_workspace(gx, gw, gb, before, value)));
    cuda::gelu_linear_backward(
        OnGpu::stream(), gdy, gw, gx, dbefore,
        GpuScratch(cuda::gelu_linear_backward_workspace(gdy, gw, gx, dbefore)));
    cuda::linear_gradients(OnGpu::stream(), gdy, gx, dw, db,
                           GpuScratch(cuda::linear_gradients_workspace(gdy, gx, dw, db)));
    return std::vector{before.back(), value.back(), dbefore.back(), dw.back(), db.back()};
  };
  std::vector<Array> timed;
  {
    const cuda::TuneProducts tune;
    timed = run();
  }
  setenv("SHEAF_FUSED_PRODUCTS", "0", 1);
  const std::vector<Array> apart = run();
  unsetenv("SHEAF_FUSED_PRODUCTS");
  for (size_t i = 0; i < apart.size(); ++i)
    EXPECT_LT(scaled_error(timed[i], values(apart[i])), 8 * epsilon(kBF16)) << i;
}

TEST(CudaLinear, Refuses) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {5, 4}), w(kF32, {3, 4});
  EXPECT_THROW(forward(x, w, Array(kF32, {4}), Array(kF32, {5, 3})), ShapeError);
  EXPECT_THROW(forward(x, w, Array(kF32, {3}, {2}), Array(kF32, {5, 3})), ShapeError);
  EXPECT_THROW(forward(x, Array(kF32, {3, 5}), Array(), Array(kF32, {5, 3})), ShapeError);
  EXPECT_THROW(bias_gradient(x, Array(kF32, {3})), ShapeError);
  EXPECT_THROW(bias_gradient(x, Array(kBF16, {4})), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels
