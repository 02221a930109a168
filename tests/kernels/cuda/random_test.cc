#include "sheaf/kernels/random.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// The bits of the CPU's kernels, for every type and layout and any part of the global tensor.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

constexpr DType kFloats[] = {kF32, kBF16, kF16, kF64};

struct Part {
  Shape shape, strides, global, start;  // no strides: dense
};
const Part kParts[] = {
    {{}, {}, {}, {}},
    {{1}, {}, {1}, {0}},
    {{0, 3}, {}, {4, 3}, {2, 0}},
    {{31}, {}, {31}, {0}},
    {{5000}, {}, {5000}, {0}},
    {{3, 5, 300}, {}, {3, 5, 300}, {0, 0, 0}},
    {{1003}, {}, {90000}, {517}},   // flat shards
    {{1003}, {2}, {90000}, {518}},  // with gaps
    {{1003}, {}, {int64_t{1} << 40}, {(int64_t{1} << 36) + 3}},
    {{7, 33}, {}, {7, 99}, {0, 33}},       // columns of a matrix
    {{7, 33}, {40, 1}, {20, 33}, {5, 0}},  // rows, padded
    {{7, 33}, {1, 7}, {7, 33}, {0, 0}},    // transposed
    {{2, 3, 10}, {30, 10, 1}, {4, 6, 20}, {1, 2, 5}},
    {{6, 8}, {}, {3, 8}, {2, 0}},  // beyond the global size
};

std::string what(DType d, const Part& p) {
  return str(d, ' ', p.shape, p.strides, p.global, p.start);
}

TEST(CudaRandom, Uniform) {
  SHEAF_NEEDS_GPU();
  const Key key = key_of("weights", 7);
  for (DType d : kFloats)
    for (const Part& p : kParts) {
      const Array blank(d, p.shape, p.strides), want = blank.clone();
      const OnGpu out(blank);
      cuda::uniform(OnGpu::stream(), out, key, {p.global, p.start}, -0.3, 1.7);
      cpu::uniform(want, key, {p.global, p.start}, -0.3, 1.7);
      const Array got = out.back();
      EXPECT_TRUE(same_bits(got, want)) << what(d, p);
      EXPECT_TRUE(gaps_kept(blank, got)) << what(d, p);
    }
}

TEST(CudaRandom, Normal) {
  SHEAF_NEEDS_GPU();
  const Key key = key_of("weights", 8);
  for (DType d : kFloats)
    for (const Part& p : kParts) {
      const Array blank(d, p.shape, p.strides), want = blank.clone();
      const OnGpu out(blank);
      cuda::normal(OnGpu::stream(), out, key, {p.global, p.start}, 0.1, 0.02);
      cpu::normal(want, key, {p.global, p.start}, 0.1, 0.02);
      const Array got = out.back();
      EXPECT_TRUE(same_bits(got, want)) << what(d, p);
      EXPECT_TRUE(gaps_kept(blank, got)) << what(d, p);
    }
}

TEST(CudaRandom, NormalTails) {
  SHEAF_NEEDS_GPU();  // 60,000 draws: some beyond 4 standard deviations
  const Array blank(kF64, {60000}), want = blank.clone();
  const OnGpu out(blank);
  cuda::normal(OnGpu::stream(), out, Key{3}, GlobalIndex::whole({60000}), 0, 1);
  cpu::normal(want, Key{3}, GlobalIndex::whole({60000}), 0, 1);
  const Array got = out.back();
  EXPECT_TRUE(same_bits(got, want));
  double largest = 0;
  for (double x : values(got)) largest = std::max(largest, std::fabs(x));
  EXPECT_GT(largest, 3.5);
}

TEST(CudaRandom, Dropout) {
  SHEAF_NEEDS_GPU();
  const Key key = fold_in(key_of("dropout", 9), 12);
  for (DType d : kFloats)
    for (const Part& p : kParts)
      for (double probability : {0.0, 0.1, 0.75}) {
        const Array x = Array::random(d, p.shape, 1, 1, p.strides), blank(d, p.shape, p.strides),
                    want = blank.clone();
        const OnGpu gx(x), out(blank);
        cuda::dropout(OnGpu::stream(), gx, probability, key, {p.global, p.start}, out);
        cpu::dropout(x, probability, key, {p.global, p.start}, want);
        const Array got = out.back();
        EXPECT_TRUE(same_bits(got, want)) << what(d, p) << probability;
        EXPECT_TRUE(gaps_kept(blank, got)) << what(d, p);
        cuda::dropout(OnGpu::stream(), gx, probability, key, {p.global, p.start}, gx);  // in place
        EXPECT_TRUE(same_bits(gx.back(), want)) << what(d, p) << probability;
      }
}

TEST(CudaRandom, DropoutFlushesSubnormalNumbersAsTheCpuDoes) {
  SHEAF_NEEDS_GPU();
  with_threads(1, [] {
    const Array x = with_subnormals(Array::random(kF32, {1003}, 1, 1e-37)), blank(kF32, {1003}),
                want = blank.clone();
    for (double probability : {0.0, 0.1}) {
      const OnGpu gx(x), out(blank);
      cuda::dropout(OnGpu::stream(), gx, probability, Key{5}, GlobalIndex::whole({1003}), out);
      cpu::dropout(x, probability, Key{5}, GlobalIndex::whole({1003}), want);
      EXPECT_TRUE(same_bits(out.back(), want)) << probability;
    }
  });
}

// A launch draws by the state at the time it runs, and by the derived key.
TEST(CudaRandom, KeysDerivedFromAStateOnTheDevice) {
  SHEAF_NEEDS_GPU();
  const Key path = key_of("blocks.0.mlp/dropout", 0);
  Array state(kI64, {3});
  const OnGpu gstate(state);
  const Array x = Array::random(kF32, {6, 50}, 1), blank(kF32, {6, 50});
  const OnGpu gx(x), out(blank);
  const DrawKey on_gpu(path, 3, gstate.view().as<int64_t>(), 50),
      on_cpu(path, 3, state.view().as<int64_t>(), 50);
  const GlobalIndex where = GlobalIndex::whole({6, 50});
  for (const int64_t step : {0, 1, 77}) {
    state.set(0, 1337), state.set(1, static_cast<double>(step));
    state.set(2, static_cast<double>(step * 12));
    kernels::cuda::copy_bytes(OnGpu::stream(), gstate.view().data, state.view().data,
                              state.bytes(), kernels::cuda::Copy::to_device);
    const Key key = fold_in(fold_in(fold_in(path, 1337), 3), static_cast<uint64_t>(step));
    const GlobalIndex there{{6, 50}, {step * 12, 0}};
    const Array want = blank.clone(), derived = blank.clone();
    cuda::dropout(OnGpu::stream(), gx, 0.4, on_gpu, where, out);
    cpu::dropout(x, 0.4, key, there, want), cpu::dropout(x, 0.4, on_cpu, where, derived);
    EXPECT_TRUE(same_bits(out.back(), want)) << step;
    EXPECT_TRUE(same_bits(derived, want)) << step;
    cuda::normal(OnGpu::stream(), out, on_gpu, where, 0, 1);
    cpu::normal(want, key, there, 0, 1), cpu::normal(derived, on_cpu, where, 0, 1);
    EXPECT_TRUE(same_bits(out.back(), want)) << step;
    EXPECT_TRUE(same_bits(derived, want)) << step;
  }
}

TEST(CudaRandom, DropoutBetweenTypesAndLayouts) {
  SHEAF_NEEDS_GPU();
  const Shape shape{40, 21};
  for (DType from : kFloats)
    for (DType to : kFloats)
      for (const Shape& strides : {Shape{21, 1}, Shape{0, 1}, Shape{1, 40}}) {
        const Array x = Array::random(from, shape, 1, 1, strides), blank(to, shape),
                    want = blank.clone();
        const OnGpu gx(x), out(blank);
        cuda::dropout(OnGpu::stream(), gx, 0.3, Key{5}, GlobalIndex::whole(shape), out);
        cpu::dropout(x, 0.3, Key{5}, GlobalIndex::whole(shape), want);
        EXPECT_TRUE(same_bits(out.back(), want)) << name(from) << name(to) << strides.to_string();
      }
}

TEST(CudaRandom, MemoryThatStartsAnywhere) {
  SHEAF_NEEDS_GPU();
  for (DType d : kFloats) {
    const Array blank(d, {300}), want = blank.clone();
    const OnGpu out(blank);
    const auto part = [](View v) {
      v.data = v.as<char>() + size_of(v.dtype), v.shape = {257};
      return v;
    };
    cuda::uniform(OnGpu::stream(), part(out), Key{1}, GlobalIndex::whole({257}), 0, 1);
    cpu::uniform(part(want), Key{1}, GlobalIndex::whole({257}), 0, 1);
    EXPECT_TRUE(same_bits(out.back(), want)) << name(d);
  }
}

TEST(CudaRandom, NamesWhatDoesNotFit) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {3, 4}), whole(kI32, {3, 4});
  const Stream& s = OnGpu::stream();
  EXPECT_THROW(cuda::uniform(s, whole, Key{1}, GlobalIndex::whole({3, 4}), 0, 1), DTypeError);
  EXPECT_THROW(cuda::normal(s, x, Key{1}, {{3, 4}, {0, 1}}, 0, 1), ShapeError);
  EXPECT_THROW(cuda::dropout(s, x, 1.0, Key{1}, GlobalIndex::whole({3, 4}), x), ConfigError);
}

}  // namespace
}  // namespace sheaf::kernels
