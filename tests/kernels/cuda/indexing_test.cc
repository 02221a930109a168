#include "sheaf/kernels/indexing.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels: bit for bit, except for running sums of floats.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

Array indices(DType d, const Shape& shape, int64_t size, const Shape& strides = {}, int seed = 5) {
  Array out(d, shape, strides);
  std::mt19937 engine(static_cast<unsigned>(seed));
  out.fill([&](int64_t) { return static_cast<double>(engine() % static_cast<uint64_t>(size)); });
  return out;
}
Array numbers(DType d, const Shape& shape, int seed, const Shape& strides = {}) {
  Array out = Array::random(d, shape, seed, 1, strides);
  if (!is_floating(d))
    out.fill([&](int64_t i) { return static_cast<double>((i * 37 + seed) % 101); });
  return out;
}
/// Strides with the dimensions in reverse order, and a gap.
Shape reversed(const Shape& shape) {
  Shape out = shape;
  int64_t step = 2;
  for (int d = 0; d < shape.rank(); ++d) out[d] = step, step = step * shape[d] + 1;
  return out;
}

TEST(CudaIndexing, Gather) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kU8, kI64})
    for (DType type : {kI64, kI32, kU32, kU16, kU8})
      for (int dim = 0; dim < 3; ++dim)
        for (bool strided : {false, true}) {
          const Shape shape{5, 6, 70};
          Shape picked = shape;
          picked[dim] = 9;
          const Shape none;
          const Array x = numbers(d, shape, 1, strided ? reversed(shape) : none),
                      index = indices(type, picked, shape[dim], strided ? reversed(picked) : none),
                      blank(d, picked, strided ? reversed(picked) : none), want = blank.clone();
          const OnGpu gx(x), gindex(index), out(blank);
          cuda::gather(OnGpu::stream(), gx, dim, gindex, out);
          cpu::gather(x, dim, index, want);
          EXPECT_TRUE(same_bits(out.back(), want)) << name(d) << name(type) << dim << strided;
          EXPECT_TRUE(gaps_kept(blank, out.back())) << name(d) << name(type) << dim << strided;
        }
}

TEST(CudaIndexing, Take) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kU8})
    for (const Shape& shape : {Shape{50, 64}, Shape{50, 63}, Shape{3, 50, 32}, Shape{3, 50, 4, 24}})
      for (int dim = 0; dim < shape.rank(); ++dim)
        for (int64_t n : {0, 1, 37, 600}) {
          Shape picked = shape;
          picked[dim] = n;
          const Array x = numbers(d, shape, 1), index = indices(kI64, {n}, shape[dim], {3}),
                      blank(d, picked), want = blank.clone();
          const OnGpu gx(x), gindex(index), out(blank);
          cuda::take(OnGpu::stream(), gx, dim, gindex, out);
          cpu::take(x, dim, index, want);
          EXPECT_TRUE(same_bits(out.back(), want)) << name(d) << shape.to_string() << dim << n;
        }
}

TEST(CudaIndexing, IndicesOutsideGiveNaNOrZero) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16, kI64, kI32, kU8, kBool})
    for (int64_t width : {1, 32}) {
      Array index = indices(kI64, {40}, 7);
      for (int64_t i : {0, 11, 39}) index.set(i, i % 2 == 0 ? 7 : -1);
      Array x(d, {7, width});
      x.fill([](int64_t) { return 1.0; });
      const Array blank(d, {40, width});
      const OnGpu gx(x), gindex(index), out(blank);
      cuda::take(OnGpu::stream(), gx, 0, gindex, out);
      const Array y = out.back();
      for (int64_t i = 0; i < 40 * width; ++i) {
        const double j = index.at(i / width), got = y.at(i);
        if (j >= 0 && j < 7)
          EXPECT_EQ(got, 1) << name(d);
        else if (is_floating(d))
          EXPECT_TRUE(std::isnan(got)) << name(d);
        else
          EXPECT_EQ(got, 0) << name(d);
      }
    }
}

void compare_scatter(DType to, DType from, const Shape& shape, int dim, int64_t count,
                     bool strided) {
  Shape added = shape;
  added[dim] = count;
  const Shape none;
  const Array before = numbers(to, shape, 1, strided ? reversed(shape) : none),
              src = numbers(from, added, 2, strided ? reversed(added) : none),
              index = indices(kI32, added, shape[dim], strided ? reversed(added) : none),
              want = before.clone();
  const OnGpu out(before), gsrc(src), gindex(index);
  cuda::scatter_add(OnGpu::stream(), out, dim, gindex, gsrc);
  cpu::scatter_add(want, dim, index, src);
  EXPECT_TRUE(same_bits(out.back(), want))
      << name(to) << name(from) << shape.to_string() << dim << ' ' << count << strided;
  EXPECT_TRUE(gaps_kept(before, out.back())) << name(to) << name(from) << shape.to_string();
}

TEST(CudaIndexing, ScatterAdd) {
  SHEAF_NEEDS_GPU();
  for (auto [to, from] : {std::pair{kF32, kF32},
                          {kBF16, kBF16},
                          {kF16, kF32},
                          {kF32, kBF16},
                          {kF64, kF64},
                          {kI64, kI64},
                          {kU8, kI32}})
    for (bool strided : {false, true}) {
      for (int dim = 0; dim < 3; ++dim) {
        compare_scatter(to, from, {5, 6, 7}, dim, 9, strided);    // a thread per line
        compare_scatter(to, from, {5, 6, 7}, dim, 200, strided);  // several threads per line
        if (to == kF32) compare_scatter(to, from, {70, 3, 65}, dim, 33, strided);
      }
      compare_scatter(to, from, {300}, 0, 1000, strided);    // one line
      compare_scatter(to, from, {5000, 4}, 1, 40, strided);  // many
    }
}

TEST(CudaIndexing, TakeAdd) {
  SHEAF_NEEDS_GPU();
  for (auto [to, from] : {std::pair{kF32, kF32}, {kBF16, kBF16}, {kF32, kBF16}, {kF64, kF64}})
    for (const Shape& shape :
         {Shape{50, 64}, Shape{1, 33}, Shape{300, 5}, Shape{9}, Shape{3, 20, 7}})
      for (int dim = 0; dim < shape.rank(); ++dim)
        for (int64_t n : {0, 1, 31, 32, 129, 700}) {
          Shape added = shape;
          added[dim] = n;
          const Array before = numbers(to, shape, 1), src = numbers(from, added, 2),
                      index = indices(kI64, {n}, shape[dim], {2}), want = before.clone();
          const OnGpu out(before), gsrc(src), gindex(index);
          cuda::take_add(OnGpu::stream(), out, dim, gindex, gsrc);
          cpu::take_add(want, dim, index, src);
          EXPECT_TRUE(same_bits(out.back(), want))
              << name(to) << name(from) << shape.to_string() << dim << ' ' << n;
        }
}

TEST(CudaIndexing, ManyLinesWithOneIndex) {
  SHEAF_NEEDS_GPU();  // more groups of 32 lines than there are useful warps
  const Shape shape{6, 140000};
  const Array before = numbers(kF32, shape, 1), src = numbers(kF32, {9, 140000}, 2),
              index = indices(kI64, {9}, 6), want = before.clone();
  const OnGpu out(before), gsrc(src), gindex(index);
  cuda::take_add(OnGpu::stream(), out, 0, gindex, gsrc);
  cpu::take_add(want, 0, index, src);
  EXPECT_TRUE(same_bits(out.back(), want));
}

TEST(CudaIndexing, SumsLeaveOutIndicesOutside) {
  SHEAF_NEEDS_GPU();
  Array index = indices(kI64, {90}, 8), inside = index.clone();
  Array src = numbers(kF32, {90, 40}, 2), less = src.clone();
  for (int64_t i : {0, 31, 32, 64, 89}) {
    index.set(i, i % 2 == 0 ? 8 : -3), inside.set(i, 0);
    for (int64_t k = 0; k < 40; ++k) src.set(i * 40 + k, NAN), less.set(i * 40 + k, 0);
  }
  const Array before = numbers(kF32, {8, 40}, 1), want = before.clone();
  const OnGpu out(before), gsrc(src), gindex(index);
  cuda::take_add(OnGpu::stream(), out, 0, gindex, gsrc);
  cpu::take_add(want, 0, inside, less);
  EXPECT_EQ(values(out.back()), values(want));
  // The same with one index per line: a thread per line, and several per line.
  for (int64_t n : {20, 90}) {
    const auto part = [n](View v) {
      v.shape = {n, 3};
      v.strides = {v.rank() == 2 ? v.strides[0] : 1, v.rank() == 2 ? 1 : 0};
      return v;
    };
    Array wide(kI64, {n, 3}), wide_inside(kI64, {n, 3});
    wide.fill([&](int64_t i) { return index.at(i / 3); });
    wide_inside.fill([&](int64_t i) { return inside.at(i / 3); });
    const OnGpu again(before), gwide(wide);
    const Array expected = before.clone();
    View to = again, cpu_to = expected;
    to.shape[1] = cpu_to.shape[1] = 3;
    cuda::scatter_add(OnGpu::stream(), to, 0, gwide, part(gsrc));
    cpu::scatter_add(cpu_to, 0, wide_inside, part(less));
    EXPECT_EQ(values(again.back()), values(expected)) << n;
  }
}

TEST(CudaIndexing, Cumsum) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64, kI64, kI32, kU8})
    for (int64_t n : {0, 1, 31, 32, 33, 255, 256, 257, 1000})
      for (bool reverse : {false, true})
        for (const Shape& shape : {Shape{n}, Shape{9, n}, Shape{n, 9}, Shape{2, n, 5}})
          for (bool strided : {false, true}) {
            const Shape none;
            int dim = 0;
            while (shape[dim] != n) ++dim;
            const DType to = d == kBF16 ? kF32 : d;
            const Array x = numbers(d, shape, 1, strided ? reversed(shape) : none),
                        blank(to, shape, strided ? reversed(shape) : none), want = blank.clone();
            const OnGpu gx(x), out(blank);
            cuda::cumsum(OnGpu::stream(), gx, dim, reverse, out);
            cpu::cumsum(x, dim, reverse, want);
            const Array got = out.back();
            if (is_floating(d))
              EXPECT_LT(scaled_error(got, values(want)), 2 * epsilon(to) + 1e-14)
                  << name(d) << shape.to_string() << reverse;
            else
              EXPECT_TRUE(same_bits(got, want)) << name(d) << shape.to_string() << reverse;
            EXPECT_TRUE(gaps_kept(blank, got)) << name(d) << shape.to_string() << reverse;
            cuda::cumsum(OnGpu::stream(), gx, dim, reverse, out);
            EXPECT_TRUE(same_bits(out.back(), got));
          }
}

TEST(CudaIndexing, Pad) {
  SHEAF_NEEDS_GPU();
  struct Case {
    Shape shape, before, to;
  };
  for (DType d : {kF32, kBF16, kI64, kU8})
    for (const Case& c : {Case{{5, 7}, {0, 0}, {5, 7}},
                          {{5, 7}, {2, 3}, {8, 11}},
                          {{50, 64}, {0, 0}, {64, 64}},
                          {{3, 4, 40}, {1, 0, 8}, {5, 4, 48}},
                          {{0, 4}, {2, 1}, {3, 6}},
                          {{9}, {4}, {33}},
                          {{}, {}, {}}})
      for (bool strided : {false, true}) {
        const Shape none;
        const Array x = numbers(d, c.shape, 1, strided ? reversed(c.shape) : none),
                    blank(d, c.to, strided ? reversed(c.to) : none), want = blank.clone();
        const OnGpu gx(x), out(blank);
        cuda::pad(OnGpu::stream(), gx, c.before, 3, out);
        cpu::pad(x, c.before, 3, want);
        EXPECT_TRUE(same_bits(out.back(), want)) << name(d) << c.shape.to_string() << strided;
        EXPECT_TRUE(gaps_kept(blank, out.back())) << name(d) << c.shape.to_string() << strided;
      }
}

TEST(CudaIndexing, NamesWhatDoesNotFit) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {3, 4}), index(kI64, {5}), out(kF32, {5, 4}), other(kF32, {5, 3});
  const Stream& s = OnGpu::stream();
  EXPECT_THROW(cuda::take(s, x, 0, index, other), ShapeError);
  EXPECT_THROW(cuda::take(s, x, 0, Array(kF32, {5}), out), DTypeError);
  EXPECT_THROW(cuda::take(s, x, 0, index, Array(kF64, {5, 4})), DTypeError);
  EXPECT_THROW(cuda::take_add(s, x, 0, Array(kI64, {4}), out), ShapeError);
  EXPECT_THROW(cuda::gather(s, x, 0, index, out), ShapeError);
  EXPECT_THROW(cuda::cumsum(s, x, 0, false, out), ShapeError);
  EXPECT_THROW(cuda::pad(s, x, {1, 0}, 0, x), ShapeError);
}

TEST(CudaIndexing, DocumentsBeginWhereTheCpuSays) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kI64, kI32, kU16, kU8})
    for (const int64_t tokens : {1, 31, 32, 33, 200})
      for (const int ends : {1, 3, 40})  // one token in this many ends a document
        for (const bool strided : {false, true}) {
          Array x(d, {9, tokens}, strided ? Shape{2, 20} : Shape{tokens, 1});
          std::mt19937 engine(static_cast<unsigned>(tokens));
          x.fill([&](int64_t) { return static_cast<double>(engine() % static_cast<unsigned>(ends)); });
          const Array want(kI32, {9, tokens}), blank(kI32, {9, tokens}, {tokens + 3, 1});
          cpu::document_begins(x, 0, want);
          const OnGpu gx(x), out(blank);
          cuda::document_begins(OnGpu::stream(), gx, 0, out);
          EXPECT_TRUE(same_bits(out.back(), want)) << name(d) << tokens << ' ' << ends << strided;
          EXPECT_TRUE(gaps_kept(blank, out.back()));
        }
  const Array none(kI32, {2, 0});
  cuda::document_begins(OnGpu::stream(), none, 0, none);
}

}  // namespace
}  // namespace sheaf::kernels
