#include "sheaf/kernels/matmul.h"

#include <cstring>

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's product in f64 of the same (rounded) operands. Without a GPU this tests the
// code around cuBLASLt: which layouts, batches and copies make up a product.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

std::vector<double> reference(const Array& a, const Array& b, const Shape& shape) {
  const Array wide_a = in_f64(a), wide_b = in_f64(b), c(kF64, shape);
  cpu::matmul(wide_a, wide_b, c, Scratch(cpu::matmul_workspace(wide_a, wide_b, c)));
  return values(c);
}

Array multiply(const Array& a, const Array& b, const Array& blank) {
  const OnGpu ga(a), gb(b), gc(blank);
  const GpuScratch scratch(
      cuda::matmul_workspace(without_data(a), without_data(b), without_data(blank)));
  cuda::matmul(OnGpu::stream(), ga, gb, gc, scratch);
  return gc.back();
}

void expect_product(const Array& a, const Array& b, const Array& blank, double bound) {
  const Array c = multiply(a, b, blank);
  EXPECT_LT(scaled_error(c, reference(a, b, blank.view().shape)), bound)
      << a.view().shape.to_string() << a.view().strides.to_string() << " x "
      << b.view().shape.to_string() << b.view().strides.to_string() << " into "
      << blank.view().strides.to_string() << name(blank.view().dtype);
  EXPECT_TRUE(gaps_kept(blank, c)) << blank.view().strides.to_string();
  EXPECT_TRUE(same_bits(multiply(a, b, blank), c));
}

TEST(CudaMatmul, EveryDTypeAndTranspose) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (auto [m, n, k] : {std::array<int64_t, 3>{5, 7, 3},
                           {64, 48, 32},
                           {1, 65, 129},
                           {130, 1, 40},
                           {17, 96, 1},
                           {1, 1, 1},
                           {33, 31, 63}})
      for (int transposes = 0; transposes < 8; ++transposes) {
        const Array a = Array::random(d, {m, k}, 1, 1, transposes & 1 ? Shape{1, m} : Shape{k, 1});
        const Array b = Array::random(d, {k, n}, 2, 1, transposes & 2 ? Shape{1, k} : Shape{n, 1});
        expect_product(a, b, Array(d, {m, n}, transposes & 4 ? Shape{1, m} : Shape{n, 1}),
                       4 * epsilon(d));
      }
}

TEST(CudaMatmul, NarrowTypesIntoF32) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kBF16, kF16})
    for (int64_t n : {32, 30})  // 30: rows that are not aligned
      expect_product(Array::random(d, {40, 70}, 1), Array::random(d, {70, n}, 2),
                     Array(kF32, {40, n}), 4e-6);
}

TEST(CudaMatmul, BatchesAndStrides) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16}) {
    struct Case {
      Shape a, a_strides, b, b_strides, c, c_strides;
    } cases[] = {
        {{3, 4, 9, 8}, {}, {3, 4, 8, 16}, {}, {3, 4, 9, 16}, {}},
        {{4, 9, 8}, {}, {8, 16}, {}, {4, 9, 16}, {}},         // more rows
        {{3, 1, 9, 8}, {}, {4, 8, 5}, {}, {3, 4, 9, 5}, {}},  // broadcast both ways
        {{1, 9, 8}, {}, {4, 8, 5}, {}, {4, 9, 5}, {}},        // a shared by the batches
        {{9, 8}, {}, {3, 4, 8, 5}, {}, {3, 4, 9, 5}, {}},     // of lower rank
        // Heads of a packed projection: [B, T, H, D] as [B, H, T, D], by a transpose.
        {{2, 3, 8, 16}, {8 * 48, 16, 48, 1}, {2, 3, 16, 8}, {8 * 48, 16, 1, 48}, {2, 3, 8, 8}, {}},
        // The result is written back between other heads.
        {{2, 3, 8, 8}, {}, {2, 3, 8, 16}, {8 * 48, 16, 48, 1}, {2, 3, 8, 16}, {8 * 48, 16, 48, 1}},
        // No unit stride in a, in b, in c.
        {{2, 9, 8}, {900, 3, 40}, {2, 8, 5}, {500, 60, 2}, {2, 9, 5}, {}},
        {{2, 9, 8}, {}, {2, 8, 5}, {}, {2, 9, 5}, {300, 30, 2}},
        {{3, 2, 9, 8}, {0, 900, 3, 40}, {2, 8, 5}, {0, 60, 2}, {3, 2, 9, 5}, {}},
        // Broadcast rows, batches of either operand.
        {{2, 9, 8}, {0, 8, 1}, {2, 8, 5}, {40, 0, 1}, {2, 9, 5}, {}},
        {{2, 9, 8}, {8, 0, 1}, {2, 8, 5}, {40, 5, 1}, {2, 9, 5}, {}},
        // Rows closer together than they are long: overlapping windows.
        {{9, 8}, {1, 1}, {8, 5}, {}, {9, 5}, {}},
        {{9, 8}, {3, 1}, {8, 5}, {}, {9, 5}, {}},
        {{90, 6, 8}, {}, {90, 8, 5}, {}, {90, 6, 5}, {}},
        {{2, 1, 3, 2, 5, 8}, {}, {2, 1, 1, 2, 8, 16}, {}, {2, 1, 3, 2, 5, 16}, {}},
        {{9, 8}, {16, 1}, {8, 16}, {24, 1}, {9, 16}, {32, 1}},  // gaps after rows
    };
    for (const Case& x : cases)
      expect_product(Array::random(d, x.a, 1, 1, x.a_strides),
                     Array::random(d, x.b, 2, 1, x.b_strides), Array(d, x.c, x.c_strides),
                     4 * epsilon(d));
  }
}

TEST(CudaMatmul, OperandsThatAreNotAligned) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16}) {
    const Array a = Array::random(d, {65, 40}, 1), b = Array::random(d, {40, 72}, 2),
                blank(d, {65, 72});
    const int64_t size = static_cast<int64_t>(size_of(d));
    const OnGpu ga(a), gb(b), gc(blank);
    // Without their first rows and columns.
    const auto inner = [&](View v, int64_t rows, int64_t cols) {
      v.data = v.as<char>() + (rows * v.strides[0] + cols) * size;
      v.shape[0] -= rows, v.shape[1] -= cols;
      return v;
    };
    const View va = inner(ga.view(), 1, 3), vb = inner(gb.view(), 3, 1),
               vc = inner(gc.view(), 1, 1);
    cuda::matmul(OnGpu::stream(), va, vb, vc, GpuScratch(cuda::matmul_workspace(va, vb, vc)));
    const Array c = gc.back();
    View got = inner(c.view(), 1, 1);
    const View wa = inner(a.view(), 1, 3), wb = inner(b.view(), 3, 1);
    std::vector<double> want;
    for (int64_t i = 0; i < 64; ++i)
      for (int64_t j = 0; j < 71; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < 37; ++k)
          sum += Array::read(wa, i * 37 + k) * Array::read(wb, k * 71 + j);
        want.push_back(sum);
      }
    EXPECT_LT(scaled_error(got, want), 4 * epsilon(d)) << name(d);
    for (int64_t j = 0; j < 72; ++j)  // the row before is untouched
      EXPECT_EQ(0, std::memcmp(c.view().as<char>() + j * size, blank.view().as<char>() + j * size,
                               static_cast<size_t>(size)));
  }
}

TEST(CudaMatmul, ZeroSizes) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF64}) {
    EXPECT_EQ(values(multiply(Array(d, {2, 3, 0}), Array(d, {2, 0, 4}), Array(d, {2, 3, 4}))),
              std::vector<double>(24, 0.0));
    EXPECT_EQ(values(multiply(Array(d, {3, 0}), Array(d, {0, 4}), Array(d, {3, 4}, {9, 2}))),
              std::vector<double>(12, 0.0));
    multiply(Array(d, {0, 3}), Array(d, {3, 4}), Array(d, {0, 4}));
    multiply(Array(d, {0, 2, 3}), Array(d, {0, 3, 4}), Array(d, {0, 2, 4}));
    multiply(Array(d, {2, 3}), Array(d, {3, 0}), Array(d, {2, 0}));
  }
}

TEST(CudaMatmul, RefusesWhatDoesNotMultiply) {
  SHEAF_NEEDS_GPU();
  EXPECT_THROW(multiply(Array(kF32, {2, 3}), Array(kF32, {4, 5}), Array(kF32, {2, 5})), ShapeError);
  EXPECT_THROW(multiply(Array(kF32, {2, 2, 3}), Array(kF32, {3, 3, 5}), Array(kF32, {2, 2, 5})),
               ShapeError);
  EXPECT_THROW(multiply(Array(kF32, {2, 3}), Array(kF64, {3, 5}), Array(kF32, {2, 5})), DTypeError);
  const OnGpu a(Array(kF32, {2, 3})), b(Array(kF32, {3, 5})), c(Array(kF32, {2, 5}));
  EXPECT_THROW(cuda::matmul(OnGpu::stream(), a, b, c, {}), ShapeError);  // no workspace
}

}  // namespace
}  // namespace sheaf::kernels
