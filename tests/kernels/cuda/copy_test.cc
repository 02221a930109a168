#include "sheaf/kernels/copy.h"

#include "sheaf/kernels/cuda/few_blocks.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels, bit for bit.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

constexpr DType kAll[] = {kF64, kF32, kBF16, kF16, kI64, kI32, kU32, kU16, kU8, kI8, kBool};
constexpr DType kSizes[] = {kF64, kF32, kBF16, kU8};  // 8, 4, 2, 1 bytes

/// Values that every type distinguishes or saturates: signs, fractions, large ones.
Array values_for(DType d, const Shape& shape, const Shape& strides = {}, int seed = 1) {
  Array x(d, shape, strides);
  std::mt19937 engine(static_cast<unsigned>(seed));
  std::normal_distribution<double> normal(0, 50);
  x.fill([&](int64_t i) {
    const double v = normal(engine) * (i % 11 == 0 && is_floating(d) ? 1e4 : 1);
    if (d == kBool) return static_cast<double>(v > 0);
    if (d == kU32 || d == kU16 || d == kU8) return std::floor(std::min(std::fabs(v), 255.0));
    if (d == kI8) return std::clamp(std::floor(v), -128.0, 127.0);
    return is_floating(d) ? v : std::floor(v);
  });
  return x;
}

struct Case {
  Shape shape, src, dst;  // no strides: dense
};
const Case kCases[] = {
    {{}, {}, {}},
    {{1}, {}, {}},
    {{0, 3}, {}, {}},
    {{31}, {}, {}},
    {{1000}, {}, {}},
    {{4099}, {}, {}},
    {{4099}, {2}, {}},
    {{5, 64}, {96, 1}, {}},                     // rows cut out
    {{5, 64}, {}, {80, 1}},                     // into rows
    {{5, 63}, {96, 1}, {63, 1}},                // no unit fits
    {{70, 130}, {1, 70}, {}},                   // transposes
    {{130, 70}, {}, {1, 130}},                  // the same, with dst in another order
    {{65, 64}, {1, 80}, {70, 1}},               // with gaps
    {{3, 70, 5, 20}, {7000, 1, 1400, 70}, {}},  // inside a batch
    {{2, 3, 40, 33}, {3960, 33, 99, 1}, {}},    // heads to the front
    {{2, 3, 40, 32}, {3840, 32, 96, 1}, {}},    // the same, in units
    {{2, 3, 40, 32}, {}, {3840, 32, 96, 1}},    // and back
    {{40, 9}, {0, 1}, {}},                      // broadcast rows
    {{40, 9}, {1, 0}, {}},                      // and columns
    {{4, 5, 6}, {0, 0, 0}, {}},                 // one element
    {{17, 17}, {2, 70}, {35, 2}},               // gaps in the innermost dimension
};

TEST(CudaCopy, EqualTypes) {
  SHEAF_NEEDS_GPU();
  for (DType d : kSizes)
    for (const Case& c : kCases) {
      const Array x = values_for(d, c.shape, c.src), blank(d, c.shape, c.dst), want = blank.clone();
      const OnGpu gx(x), gy(blank);
      cuda::copy(OnGpu::stream(), gx, gy);
      cpu::copy(x, want);
      const Array y = gy.back();
      EXPECT_TRUE(same_bits(y, want)) << name(d) << c.shape.to_string() << c.src.to_string();
      EXPECT_TRUE(gaps_kept(blank, y)) << name(d) << c.shape.to_string() << c.src.to_string();
    }
}

TEST(CudaCopy, BitsOfEveryPatternSurvive) {
  SHEAF_NEEDS_GPU();
  Array x(kU16, {65536});
  x.fill([](int64_t i) { return static_cast<double>(i); });
  const Array blank(kBF16, {256, 256}, {1, 256});
  const OnGpu gx(x), gy(blank);
  View from = gx.view();
  from.dtype = kBF16, from.shape = {256, 256}, from.strides = {256, 1};
  cuda::copy(OnGpu::stream(), from, gy);
  const Array y = gy.back();
  for (int64_t r = 0; r < 256; ++r)
    for (int64_t c = 0; c < 256; ++c) EXPECT_EQ(y.view().as<bf16>()[r + 256 * c].bits, r * 256 + c);
}

TEST(CudaCopy, PartsThatStartAnywhere) {
  SHEAF_NEEDS_GPU();
  for (DType d : kSizes)
    for (DType to : {d, kF32, kBF16})
      for (int64_t from_at : {0, 1, 2, 4})
        for (int64_t to_at : {0, 1, 3, 8}) {
          const Array x = values_for(d, {700}), blank(to, {700}), want = blank.clone();
          const OnGpu gx(x), gy(blank);
          const auto part = [](View v, int64_t at) {
            v.data = v.as<char>() + at * static_cast<int64_t>(size_of(v.dtype));
            v.shape = {16, 40}, v.strides = {42, 1};
            return v;
          };
          cuda::copy(OnGpu::stream(), part(gx, from_at), part(gy, to_at));
          cpu::copy(part(x, from_at), part(want, to_at));
          EXPECT_TRUE(same_bits(gy.back(), want)) << name(d) << name(to) << from_at << to_at;
        }
}

TEST(CudaCopy, EveryCast) {
  SHEAF_NEEDS_GPU();
  for (DType from : kAll)
    for (DType to : kAll)
      for (const Case& c : kCases) {
        const Array x = values_for(from, c.shape, c.src), blank(to, c.shape, c.dst),
                    want = blank.clone();
        const OnGpu gx(x), gy(blank);
        cuda::copy(OnGpu::stream(), gx, gy);
        cpu::copy(x, want);
        const Array y = gy.back();
        EXPECT_TRUE(same_bits(y, want)) << name(from) << name(to) << c.shape.to_string();
        EXPECT_TRUE(gaps_kept(blank, y)) << name(from) << name(to) << c.shape.to_string();
      }
}

TEST(CudaCopy, NotANumberStaysOne) {
  SHEAF_NEEDS_GPU();
  for (DType to : {kBF16, kF16, kF64}) {
    const Array x = Array::of(kF32, {3}, {NAN, INFINITY, -1e30}), blank(to, {3});
    const OnGpu gx(x), gy(blank);
    cuda::copy(OnGpu::stream(), gx, gy);
    const Array y = gy.back();
    EXPECT_TRUE(std::isnan(y.at(0)) && y.at(1) == INFINITY && y.at(2) < -9e29) << name(to);
  }
}

TEST(CudaCopy, Fill) {
  SHEAF_NEEDS_GPU();
  for (DType d : kAll)
    for (const Case& c : kCases)
      for (double value : {0.0, -3.7, 300.0}) {
        if (value < 0 && (d == kU32 || d == kU16 || d == kU8)) continue;
        const Array blank(d, c.shape, c.dst), want = blank.clone();
        const OnGpu gy(blank);
        cuda::fill(OnGpu::stream(), gy, value);
        cpu::fill(want, value);
        const Array y = gy.back();
        EXPECT_TRUE(same_bits(y, want)) << name(d) << c.shape.to_string() << value;
        EXPECT_TRUE(gaps_kept(blank, y)) << name(d) << c.shape.to_string();
      }
}

TEST(CudaCopy, FillOfPartsThatStartAnywhere) {
  SHEAF_NEEDS_GPU();
  for (DType d : kSizes)
    for (int64_t at : {0, 1, 2, 4, 8})
      for (int64_t n : {1, 5, 16, 37, 2100}) {
        const Array blank(d, {2200}), want = blank.clone();
        const OnGpu gy(blank);
        const auto part = [&](View v) {
          v.data = v.as<char>() + at * static_cast<int64_t>(size_of(v.dtype));
          v.shape = {n};
          return v;
        };
        cuda::fill(OnGpu::stream(), part(gy), 2.5);
        cpu::fill(part(want), 2.5);
        EXPECT_TRUE(same_bits(gy.back(), want)) << name(d) << at << ' ' << n;
      }
}

TEST(CudaCopy, AddInto) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64, kI32})
    for (DType from : {kF32, kBF16, kF16, kF64, kI32}) {
      if (!is_floating(d) && is_floating(from)) continue;
      for (const Case& c : kCases) {
        const Array x = values_for(from, c.shape, c.src, 2), y0 = values_for(d, c.shape, c.dst),
                    want = y0.clone();
        const OnGpu gx(x), gy(y0);
        cuda::add_into(OnGpu::stream(), gy, gx);
        cpu::add_into(want, x);
        const Array y = gy.back();
        EXPECT_TRUE(same_bits(y, want)) << name(d) << name(from) << c.shape.to_string();
        EXPECT_TRUE(gaps_kept(y0, y)) << name(d) << name(from) << c.shape.to_string();
      }
    }
}

// On threads that flush subnormal numbers, as all threads of a rank do: they flush in arithmetic and in conversions between f32 and f64,
// and keep them in conversions from and to narrow types.
TEST(CudaCopy, FewBlocksGoRound) {
  SHEAF_NEEDS_GPU();
  const cuda::FewBlocks few;
  for (const int64_t n : {3, 131071, 300007}) {
    const Array wide = values_for(kF32, {n}), narrow = values_for(kBF16, {n}, {}, 2);
    for (const auto& [src, dst] : {std::pair(&wide, &narrow), {&narrow, &wide}, {&wide, &wide}}) {
      const Array copied = dst->clone(), added = dst->clone();
      const OnGpu from(*src), to(*dst), sum(*dst);
      cpu::copy(*src, copied), cuda::copy(OnGpu::stream(), from, to);
      EXPECT_TRUE(same_bits(to.back(), copied)) << n << " " << name(src->view().dtype) << " to " << name(dst->view().dtype);
      cpu::add_into(added, *src), cuda::add_into(OnGpu::stream(), sum, from);
      EXPECT_TRUE(same_bits(sum.back(), added)) << n << " " << name(src->view().dtype) << " into " << name(dst->view().dtype);
    }
  }
}

TEST(CudaCopy, SubnormalNumbersBecomeWhatTheyBecomeOnTheCpu) {
  SHEAF_NEEDS_GPU();
  with_threads(1, [] {
    std::vector<Array> all{with_subnormals(Array::random(kF32, {1003}, 1)),
                           Array::random(kF64, {1003}, 2, 0x1p-128)};
    for (DType d : {kBF16, kF16}) {  // all that are finite
      Array& x = all.emplace_back(d, Shape{0x7c00});
      for (int i = 0; i < 0x7c00; ++i)
        x.view().as<uint16_t>()[i] = static_cast<uint16_t>(i | (i % 3 == 0 ? 0x8000 : 0));
    }
    for (const Array& x : all)
      for (DType to : kAll)
        for (bool add : {false, true}) {
          if (add && !is_floating(to)) continue;
          const Array y = add && to == kF32 ? with_subnormals(Array::random(to, x.view().shape, 3))
                                            : Array::random(to, x.view().shape, 3),
                      want = y.clone();
          const OnGpu gx(x), gy(y);
          add ? cuda::add_into(OnGpu::stream(), gy, gx) : cuda::copy(OnGpu::stream(), gx, gy);
          add ? cpu::add_into(want, x) : cpu::copy(x, want);
          EXPECT_TRUE(same_bits(gy.back(), want)) << name(x.view().dtype) << name(to) << add;
        }
  });
}

TEST(CudaCopy, Arange) {
  SHEAF_NEEDS_GPU();
  for (DType d : kAll)
    for (int64_t n : {0, 1, 33, 1000})
      for (int64_t stride : {1, 3}) {
        const Array blank(d, {n}, {stride}), want = blank.clone();
        const OnGpu gy(blank);
        const double start = is_floating(d) ? 0.1 : 2, step = is_floating(d) ? 1.0 / 3 : 3;
        cuda::arange(OnGpu::stream(), start, step, gy);
        cpu::arange(start, step, want);
        const Array y = gy.back();
        EXPECT_TRUE(same_bits(y, want)) << name(d) << n;
        EXPECT_TRUE(gaps_kept(blank, y)) << name(d) << n;
      }
}

TEST(CudaCopy, ShapesMustAgree) {
  SHEAF_NEEDS_GPU();
  const Array a(kF32, {3, 4}), b(kF32, {4, 3});
  EXPECT_THROW(cuda::copy(OnGpu::stream(), a, b), ShapeError);
  EXPECT_THROW(cuda::add_into(OnGpu::stream(), a, b), ShapeError);
  EXPECT_THROW(cuda::arange(OnGpu::stream(), 0, 1, a), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
