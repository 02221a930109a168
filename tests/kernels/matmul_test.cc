#include "sheaf/kernels/matmul.h"

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

void multiply(const View& a, const View& b, const View& c) {
  const Scratch scratch(matmul_workspace(without_data(a), without_data(b), without_data(c)));
  matmul(a, b, c, scratch);
}

/// The f64 product of [.., M, K] and [.., K, N] with leading dimensions as in c.
std::vector<double> reference(const View& a, const View& b, const View& c) {
  const int n = c.rank();
  const int64_t rows = c.shape[n - 2], cols = c.shape[n - 1], depth = a.shape.back();
  std::vector<double> out;
  for (int64_t batch = 0; rows * cols > 0 && batch < c.numel() / (rows * cols); ++batch) {
    auto base = [&](const View& v) {
      View at = v;
      int64_t index = batch, offset = 0;
      for (int i = n - 3, j = v.rank() - 3; i >= 0; --i, --j) {
        if (j >= 0 && v.shape[j] != 1) offset += index % c.shape[i] * v.strides[j];
        index /= c.shape[i];
      }
      at.data = v.as<char>() + static_cast<size_t>(offset) * size_of(v.dtype);
      at.shape = Shape{v.shape.dim(-2), v.shape.dim(-1)},
      at.strides = Shape{v.strides.dim(-2), v.strides.dim(-1)};
      return at;
    };
    const View ma = base(a), mb = base(b);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < depth; ++k)
          sum += Array::read(ma, i * depth + k) * Array::read(mb, k * cols + j);
        out.push_back(sum);
      }
  }
  return out;
}

Shape swapped(Shape s) {
  std::swap(s[s.rank() - 1], s[s.rank() - 2]);
  return s;
}
/// A random matrix (batch) that is the transpose of dense memory.
Array random_transposed(DType d, const Shape& shape, int seed) {
  return Array::random(d, shape, seed, 1, swapped(swapped(shape).contiguous_strides()));
}

TEST(Matmul, EveryDTypeAndTranspose) {
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (auto [m, n, k] :
         {std::array<int64_t, 3>{5, 7, 3}, {64, 48, 33}, {1, 65, 129}, {130, 1, 40}, {17, 96, 1}, {65, 9, 63}})
      for (int transposes = 0; transposes < 4; ++transposes) {
        const Array a =
            transposes & 1 ? random_transposed(d, {m, k}, 1) : Array::random(d, {m, k}, 1);
        const Array b =
            transposes & 2 ? random_transposed(d, {k, n}, 2) : Array::random(d, {k, n}, 2);
        const Array c(d, {m, n}), ct(d, {m, n}, {1, m});
        multiply(a, b, c);
        EXPECT_LT(scaled_error(c, reference(a, b, c)), 4 * epsilon(d))
            << name(d) << m << "," << n << "," << k;
        multiply(a, b, ct);
        EXPECT_TRUE(same_bits(c, ct)) << name(d);
      }
}

TEST(Matmul, NarrowTypesIntoF32) {
  for (DType d : {kBF16, kF16}) {
    const Array a = Array::random(d, {40, 70}, 1), b = Array::random(d, {70, 30}, 2),
                c(kF32, {40, 30});
    multiply(a, b, c);
    EXPECT_LT(scaled_error(c, reference(a, b, c)), 4e-6) << name(d);
  }
}

TEST(Matmul, BatchesAndStrides) {
  for (DType d : {kF32, kF64, kBF16}) {
    struct Case {
      Array a, b;
      Shape c;
    } cases[] = {
        {Array::random(d, {3, 4, 9, 8}, 1), Array::random(d, {3, 4, 8, 5}, 2), {3, 4, 9, 5}},
        {Array::random(d, {4, 9, 8}, 1), Array::random(d, {8, 5}, 2), {4, 9, 5}},
        {Array::random(d, {3, 1, 9, 8}, 1), Array::random(d, {4, 8, 5}, 2), {3, 4, 9, 5}},
        {Array::random(d, {3, 4, 9, 8}, 1, 1, {4 * 9 * 20, 20, 80, 1}),
         Array::random(d, {3, 4, 8, 5}, 2),
         {3, 4, 9, 5}},
        {Array::random(d, {2, 9, 8}, 1, 1, {900, 3, 40}),
         Array::random(d, {2, 8, 5}, 2, 1, {500, 60, 2}),
         {2, 9, 5}},
        {Array::random(d, {2, 9, 8}, 1, 1, {0, 8, 1}),
         Array::random(d, {2, 8, 5}, 2, 1, {40, 0, 1}),
         {2, 9, 5}},
        {Array::random(d, {90, 6, 8}, 1), Array::random(d, {90, 8, 5}, 2), {90, 6, 5}},
    };
    for (const Case& x : cases) {
      const Array c(d, x.c);
      multiply(x.a, x.b, c);
      EXPECT_LT(scaled_error(c, reference(x.a, x.b, c)), 4 * epsilon(d))
          << name(d) << x.a.view().shape.to_string();
    }
  }
}

TEST(Matmul, ZeroSizes) {
  for (DType d : {kF32, kF64}) {
    const Array c(d, {2, 3, 4});
    multiply(Array(d, {2, 3, 0}), Array(d, {2, 0, 4}), c);
    EXPECT_EQ(values(c), std::vector<double>(24, 0.0));
    multiply(Array(d, {0, 3}), Array(d, {3, 4}), Array(d, {0, 4}));
    multiply(Array(d, {0, 2, 3}), Array(d, {0, 3, 4}), Array(d, {0, 2, 4}));
  }
}

TEST(Matmul, RefusesWhatDoesNotMultiply) {
  EXPECT_THROW(multiply(Array(kF32, {2, 3}), Array(kF32, {4, 5}), Array(kF32, {2, 5})), ShapeError);
  EXPECT_THROW(multiply(Array(kF32, {2, 2, 3}), Array(kF32, {3, 3, 5}), Array(kF32, {2, 2, 5})),
               ShapeError);
  EXPECT_THROW(multiply(Array(kF32, {2, 3}), Array(kF64, {3, 5}), Array(kF32, {2, 5})), DTypeError);
}

// A rank's rows of a product must equal those that a single process computes, however the batch is cut.
TEST(Matmul, RowsDoNotDependOnTheOthers) {
  for (auto [rows, n, k] : {std::array<int64_t, 3>{300, 768, 768},
                            {256, 1024, 768},
                            {300, 2304, 128},
                            {200, 100, 3072},
                            {130, 65, 384},
                            {130, 384, 1536},
                            {600, 1024, 1100}})
    for (int variant = 0; variant < 4; ++variant) {
      const DType d = variant & 2 ? kBF16 : kF32;
      const bool transpose = variant & 1;
      const Array a = Array::random(d, {rows, k}, 1);
      const Array b = transpose ? random_transposed(d, {k, n}, 2) : Array::random(d, {k, n}, 2);
      const Array all(d, {rows, n});
      multiply(a, b, all);
      for (int64_t m : {1, 2, 3, 5, 16, 31, 47, 48, 64, 100, 129, 256, 257, 384, 385}) {
        if (m > rows) continue;
        View part = a, expected = all;
        part.shape[0] = expected.shape[0] = m;
        const Array c(d, {m, n});
        multiply(part, b, c);
        EXPECT_TRUE(same_bits(c, expected)) << name(d) << " " << m << " rows of " << rows << "x" << n
                                            << "x" << k << (transpose ? " T" : "");
      }
      // Nor on their address.
      View tail = a, expected = all;
      const int64_t size = static_cast<int64_t>(size_of(d));
      tail.data = a.view().as<char>() + 37 * k * size;
      expected.data = all.view().as<char>() + 37 * n * size;
      tail.shape[0] = expected.shape[0] = 50;
      const Array c(d, {50, n});
      multiply(tail, b, c);
      EXPECT_TRUE(same_bits(c, expected));
    }
}

TEST(Matmul, ThreadsChangeNothing) {
  for (DType d : {kF32, kF64, kBF16})
    for (const Shape& s : {Shape{1, 300, 200, 500}, Shape{7, 30, 40, 50}, Shape{1, 1, 3000, 64},
                           Shape{2, 260, 1024, 100}, Shape{1, 64, 1632, 400}}) {
      const Array a = Array::random(d, {s[0], s[1], s[3]}, 1),
                  b = Array::random(d, {s[0], s[3], s[2]}, 2);
      const Array one(d, {s[0], s[1], s[2]}), two(d, {s[0], s[1], s[2]});
      with_threads(1, [&] { multiply(a, b, one); });
      with_threads(2, [&] { multiply(a, b, two); });
      EXPECT_TRUE(same_bits(one, two)) << name(d) << s.to_string();
    }
}

}  // namespace
}  // namespace sheaf::kernels::cpu
