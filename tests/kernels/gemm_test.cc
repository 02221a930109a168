// Every kernel for matrix products, also those this machine would not choose, on operands larger than its blocks.
#include "sheaf/kernels/cpu/gemm.h"

#include <cstring>

#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/kernels/cpu/gemm_bf16.h"
#include "sheaf/kernels/cpu/gemm_part.h"
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels {

SHEAF_SIMD_DECLARE(gemm_scratch)
SHEAF_SIMD_DECLARE(gemm_part)

namespace cpu {
namespace {

using namespace sheaf::testing;

struct Kernel {
  const char* name;
  decltype(gemm_scratch)* scratch;
  decltype(gemm_part)* multiply;
};

std::vector<Kernel> kernels(DType d) {
  std::vector<Kernel> out{{"v3", v3::gemm_scratch, v3::gemm_part}};
  if (has_v4()) out.push_back({"v4", v4::gemm_scratch, v4::gemm_part});
  if (d == kBF16 && dot::available()) out.push_back({"dot", dot::gemm_scratch, dot::gemm});
  if (d == kBF16 && amx::available()) out.push_back({"amx", amx::gemm_scratch, amx::gemm});
  return out;
}

MatrixOperand operand(const View& v) {
  return {v.as<char>(), v.dtype, v.strides[0], v.strides[1]};
}

struct Shapes {
  int64_t rows, cols, depth;
};

/// A matrix in rows with gaps between them, in columns, with gaps between all elements, or dense in rows.
constexpr int kDense = 3;
Array matrix(DType d, int64_t rows, int64_t cols, int layout, int seed) {
  const Shape strides[] = {{cols + 3, 1}, {1, rows + 1}, {2 * cols + 1, 2}, {cols, 1}};
  return Array::random(d, {rows, cols}, seed, 1, strides[layout]);
}

/// old + a b + bias in f64.
std::vector<double> reference(const Shapes& s, const View& a, const View& b, const View* bias, const View* old) {
  const std::vector<double> x = values(a), y = values(b);
  std::vector<double> out = old ? values(*old) : std::vector<double>(static_cast<size_t>(s.rows * s.cols));
  for (int64_t i = 0; i < s.rows; ++i) {
    double* row = out.data() + i * s.cols;
    for (int64_t k = 0; k < s.depth; ++k)
      for (int64_t j = 0; j < s.cols; ++j) row[j] += x[static_cast<size_t>(i * s.depth + k)] * y[static_cast<size_t>(k * s.cols + j)];
    for (int64_t j = 0; bias && j < s.cols; ++j) row[j] += Array::read(*bias, j);
  }
  return out;
}

/// c has gaps between its rows, which must not change.
Array multiply(const Kernel& kernel, const Shapes& s, DType c_dtype, const View& a, const View& b, const View* bias,
               const View* old) {
  Array c(c_dtype, {s.rows, s.cols}, {s.cols + 5, 1});
  for (int64_t i = 0; old && i < s.rows * s.cols; ++i) c.set(i, Array::read(*old, i));
  const GemmPart part{s.rows, s.cols, s.depth, operand(a), operand(b), operand(c.view()),
                      bias ? MatrixOperand{bias->as<char>(), bias->dtype, 0, bias->strides[0]} : MatrixOperand{},
                      old != nullptr};
  GemmPart unknown = part;  // how much scratch is needed is asked before there are addresses
  for (MatrixOperand* m : {&unknown.a, &unknown.b, &unknown.c}) m->data = nullptr;
  const Scratch scratch(kernel.scratch(unknown));
  kernel.multiply(part, static_cast<Workspace>(scratch).data);
  for (int64_t i = 0; i + 1 < s.rows; ++i)
    for (int64_t j = s.cols; j < s.cols + 5; ++j) {
      const char* gap = c.view().as<char>() + (i * (s.cols + 5) + j) * static_cast<int64_t>(size_of(c_dtype));
      for (size_t n = 0; n < size_of(c_dtype); ++n) EXPECT_EQ(gap[n], '\xff') << kernel.name;
    }
  return c;
}

void expect_right(DType d, const Shapes& s, int a_layout, int b_layout, bool with_bias, bool accumulate) {
  const DType compute = d == kF64 ? kF64 : kF32;
  const Array a = matrix(d, s.rows, s.depth, a_layout, 1), b = matrix(d, s.depth, s.cols, b_layout, 2),
              bias = Array::random(d, {s.cols}, 3, 1, {2}), old = Array::random(compute, {s.rows, s.cols}, 4);
  const View *bias_view = with_bias ? &bias.view() : nullptr, *old_view = accumulate ? &old.view() : nullptr;
  const std::vector<double> expected = reference(s, a, b, bias_view, old_view);
  Array first;
  for (const Kernel& kernel : kernels(d)) {
    const std::string what = str(kernel.name, " ", d, " ", s.rows, "x", s.cols, "x", s.depth, " layouts ", a_layout, b_layout);
    const Array c = multiply(kernel, s, compute, a, b, bias_view, old_view);
    EXPECT_LT(scaled_error(c, expected), 20 * epsilon(compute)) << what;
    const std::string_view name = kernel.name;
    if (name == "v3") first = c;
    EXPECT_TRUE(name != "v4" || same_bits(c, first)) << what;
    if ((name == "amx" || name == "dot") && !accumulate) {
      const Array narrow = multiply(kernel, s, kBF16, a, b, bias_view, nullptr);
      EXPECT_LT(scaled_error(narrow, expected), 4 * epsilon(kBF16)) << what;
    }
  }
}

TEST(Gemm, PartsLargerThanTheBlocks) {
  for (DType d : {kF32, kBF16, kF64})
    for (const Shapes& s : {Shapes{250, 800, 400}, {530, 70, 1000}, {33, 1570, 390}, {70, 50, 5000}})
      for (int layout = 0; layout < 4; ++layout)
        expect_right(d, s, layout & 1, layout >> 1, layout == 1, layout == 2);
}

// Rows of a that are read where they are, rows that would collide in the cache, columns, and a depth in chunks.
TEST(Gemm, SeveralBlocksOfTheResidentOperand) {
  for (const auto& [s, a_layout] : {std::pair{Shapes{544, 1570, 320}, kDense}, {{544, 900, 1024}, kDense}, {{160, 1100, 640}, 1}, {{70, 500, 2500}, 1}})
    for (int layout = 0; layout < 2; ++layout) expect_right(kBF16, s, a_layout, layout, layout == 0, layout == 1);
}

// The same bits as from where they are.
TEST(Gemm, RowsThatBeginAnywhere) {
  const Shapes s{544, 800, 96};
  const Array a = matrix(kBF16, s.rows, s.depth, kDense, 1), b = matrix(kBF16, s.depth, s.cols, kDense, 2);
  std::vector<char> moved(static_cast<size_t>(s.rows * s.depth * 2) + 128);
  for (const Kernel& kernel : kernels(kBF16)) {
    const Array expected = multiply(kernel, s, kF32, a, b, nullptr, nullptr);
    for (size_t by : {size_t{0}, size_t{2}, size_t{32}}) {
      char* const to = moved.data() + 64 - reinterpret_cast<uintptr_t>(moved.data()) % 64 + by;
      std::memcpy(to, a.view().data, static_cast<size_t>(s.rows * s.depth * 2));
      EXPECT_TRUE(same_bits(multiply(kernel, s, kF32, View::dense(to, kBF16, {s.rows, s.depth}), b, nullptr, nullptr), expected)) << kernel.name << by;
    }
  }
}

TEST(Gemm, EverySmallSizeAndLayout) {
  int n = 0;
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (int64_t rows : {1, 2, 7, 8, 15, 33, 65})
      for (int64_t cols : {1, 15, 16, 17, 47, 49, 97})
        for (int64_t depth : {1, 2, 16, 31, 63, 100})
          ++n, expect_right(d, {rows, cols, depth}, n % 3, n / 3 % 3, n % 2 == 0, n % 5 == 0 && n % 2 == 1);
}

// Memory around the operands is not read, or at least does not matter: Array fills it with NaN patterns. Infinities in a row stay in that
// row.
TEST(Gemm, InfinityStaysInItsRow) {
  for (DType d : {kF32, kBF16}) {
    const Shapes s{40, 50, 70};
    Array a = matrix(d, s.rows, s.depth, 0, 1);
    const Array b = matrix(d, s.depth, s.cols, 1, 2);
    a.set(17 * s.depth + 69, INFINITY);
    for (const Kernel& kernel : kernels(d)) {
      const Array c = multiply(kernel, s, kF32, a, b, nullptr, nullptr);
      for (int64_t i = 0; i < s.rows * s.cols; ++i)
        EXPECT_EQ(std::isfinite(c.at(i)), i / s.cols != 17) << kernel.name << " element " << i;
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace sheaf::kernels
