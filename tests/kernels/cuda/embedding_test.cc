#include "sheaf/kernels/embedding.h"

#include <optional>

#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

/// Tokens of decreasing frequency: token 0 makes up about `share` of all.
Array tokens_of(DType d, const Shape& shape, int64_t vocabulary, double share = 0,
                const Shape& strides = {}, int seed = 1) {
  Array t(d, shape, strides);
  std::mt19937 engine(static_cast<unsigned>(seed));
  std::uniform_real_distribution<double> uniform(0, 1);
  t.fill([&](int64_t) {
    const double u = uniform(engine), v = uniform(engine);
    return u < share ? 0.0 : std::floor(v * static_cast<double>(vocabulary));
  });
  return t;
}

void run_backward(const OnGpu& tokens, const OnGpu& dout, const OnGpu& dtable, bool accumulate,
                  std::optional<TablePart> part = {}) {
  const GpuScratch scratch(cuda::embedding_backward_workspace(
      without_data(tokens), without_data(dout), without_data(dtable)));
  cuda::embedding_backward(OnGpu::stream(), tokens, dout, part.value_or(whole_table(dtable)),
                           dtable, accumulate, scratch);
  cuda::synchronize(OnGpu::stream());  // before the scratch is freed
}

TEST(CudaEmbedding, Forward) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (DType index : {kI64, kI32, kU32, kU16, kU8})
      for (int64_t width : {1, 16, 37, 264}) {
        const Array tokens = tokens_of(index, {3, 21}, 11), out(d, {3, 21, width}),
                    table = Array::random(d, {11, width}, 1), want(d, {3, 21, width});
        const OnGpu gtokens(tokens), gtable(table), gout(out);
        cuda::embedding(OnGpu::stream(), gtokens, gtable, whole_table(gtable), gout);
        cpu::embedding(tokens, table, whole_table(table), want);
        EXPECT_TRUE(same_bits(gout.back(), want)) << name(d) << name(index) << width;
      }
}

TEST(CudaEmbedding, ForwardWithStrides) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16})
    for (auto [table_pitch, pitch] : {std::pair{40, 40}, {40, 41}, {41, 40}, {42, 48}, {48, 44}}) {
      const Array tokens = tokens_of(kI64, {4, 5}, 9, 0, {1, 7}),
                  table = Array::random(d, {9, 40}, 1, 1, {table_pitch, 1}),
                  out(d, {4, 5, 40}, {pitch, 4 * pitch, 1}), want = out.clone();
      const OnGpu gtokens(tokens), gtable(table), gout(out);
      cuda::embedding(OnGpu::stream(), gtokens, gtable, whole_table(gtable), gout);
      cpu::embedding(tokens, table, whole_table(table), want);
      EXPECT_TRUE(same_bits(gout.back(), want)) << name(d) << pitch;
      EXPECT_TRUE(gaps_kept(out, gout.back())) << name(d) << pitch;
    }
}

TEST(CudaEmbedding, TokensOutsideGiveRowsOfNaN) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (int64_t width : {5, 32}) {
      Array tokens = tokens_of(kI64, {40}, 7);
      tokens.set(3, -1), tokens.set(17, 7), tokens.set(39, 1e15);
      const Array table = Array::random(d, {7, width}, 1), out(d, {40, width});
      const OnGpu gtokens(tokens), gtable(table), gout(out);
      cuda::embedding(OnGpu::stream(), gtokens, gtable, whole_table(gtable), gout);
      const Array y = gout.back();
      for (int64_t r = 0; r < 40; ++r)
        for (int64_t j = 0; j < width; ++j) {
          const auto t = static_cast<int64_t>(tokens.at(r));
          if (t < 0 || t >= 7)
            EXPECT_TRUE(std::isnan(y.at(r * width + j)));
          else
            EXPECT_EQ(y.at(r * width + j), table.at(t * width + j));
        }
    }
}

TEST(CudaEmbedding, PartsOfATable) {
  SHEAF_NEEDS_GPU();
  const int64_t all = 40, rows = 9;
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (int64_t width : {5, 32})
      for (int64_t first : {0, 17, 31}) {
        const Array tokens = tokens_of(kI32, {3, 50}, all),
                    table = Array::random(d, {rows, width}, 1), out(d, {3, 50, width}),
                    dout = Array::random(d, {3, 50, width}, 2), want_out = out.clone(),
                    want = table.clone();
        const TablePart part{first, all};
        const OnGpu gtokens(tokens), gtable(table), gout(out), gdout(dout);
        cuda::embedding(OnGpu::stream(), gtokens, gtable, part, gout);
        cpu::embedding(tokens, table, part, want_out);
        EXPECT_TRUE(same_bits(gout.back(), want_out)) << name(d) << width << ' ' << first;
        for (bool accumulate : {false, true}) {
          run_backward(gtokens, gdout, gtable, accumulate, part);
          cpu::embedding_backward(tokens, dout, part, want, accumulate,
                                  Scratch(cpu::embedding_backward_workspace(tokens, dout, want)));
          EXPECT_TRUE(same_bits(gtable.back(), want)) << name(d) << width << ' ' << first;
        }
      }
  const Array tokens = Array::of(kI64, {4}, {-1, 40, 39, 18}), table(kF32, {9, 3}),
              out(kF32, {4, 3});
  const OnGpu gtokens(tokens), gtable(table), gout(out);
  cuda::embedding(OnGpu::stream(), gtokens, gtable, {17, 40}, gout);
  const Array y = gout.back();
  EXPECT_TRUE(std::isnan(y.at(0)) && std::isnan(y.at(3)));
  EXPECT_EQ(y.at(6), 0.0);
}

/// Gradients of tokens with few rows have the CPU's bits, others are close to its sums in f64: f32
/// sums of hundreds of numbers of both signs.
void compare(DType d, DType into, const Array& tokens, int64_t vocabulary, int64_t width,
             bool few) {
  Shape shape = tokens.view().shape;
  shape.push_back(width);
  const Array dout = Array::random(d, shape, 2), blank(into, {vocabulary, width});
  const OnGpu gtokens(tokens), gdout(dout), gdtable(blank);
  Array wide(kF64, shape), sum(kF64, {vocabulary, width});
  wide.fill([&](int64_t i) { return dout.at(i); });
  const Array want = blank.clone();
  for (bool accumulate : {false, true}) {
    run_backward(gtokens, gdout, gdtable, accumulate);
    cpu::embedding_backward(tokens, dout, whole_table(want), want, accumulate,
                            Scratch(cpu::embedding_backward_workspace(tokens, dout, want)));
    cpu::embedding_backward(tokens, wide, whole_table(sum), sum, accumulate, Scratch(0));
    const std::string what = str(d, ' ', into, ' ', vocabulary, ' ', width, ' ', accumulate);
    if (few)
      EXPECT_TRUE(same_bits(gdtable.back(), want)) << what;
    else
      EXPECT_LT(scaled_error(gdtable.back(), values(sum)), 16 * epsilon(into)) << what;
  }
}

TEST(CudaEmbedding, BackwardOfRareTokens) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (DType into : {d, kF32}) {
      if (d == kF64 && into == kF32) continue;
      for (int64_t width : {1, 16, 37, 264})
        for (int64_t vocabulary : {11, 530, 5000})
          compare(d, into, tokens_of(kI32, {3, 40}, vocabulary), vocabulary, width, true);
      compare(d, into, tokens_of(kI64, {5000}, 200), 200, 8, true);
    }
}

TEST(CudaEmbedding, BackwardOfCommonTokens) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64}) {
    compare(d, d, tokens_of(kU16, {2, 3000}, 700, 0.4), 700, 16, false);
    compare(d, d, tokens_of(kU8, {129}, 3, 1), 3, 37, false);
    compare(d, d, tokens_of(kI64, {2500}, 1), 1, 40, false);
    if (d == kBF16 || d == kF16)
      compare(d, kF32, tokens_of(kU16, {4, 1025}, 20, 0.3), 20, 24, false);
  }
}

TEST(CudaEmbedding, VocabulariesOfAllSizes) {
  SHEAF_NEEDS_GPU();  // one to three digits
  for (int64_t vocabulary : {1, 2, 511, 512, 513, 65536, 262144})
    compare(kF32, kF32, tokens_of(kI64, {777}, vocabulary, 0.05), vocabulary, 1, vocabulary > 10);
}

TEST(CudaEmbedding, MoreTilesThanTheScanTakesAtOnce) {
  SHEAF_NEEDS_GPU();
  compare(kF32, kF32, tokens_of(kU16, {70000}, 2000, 0, {}, 3), 2000, 1, true);
  compare(kF32, kF32, tokens_of(kU16, {50000}, 300), 300, 1, false);
}

TEST(CudaEmbedding, BackwardWithStrides) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16})
    for (int64_t pitch : {64, 72, 65}) {
      const Array tokens = tokens_of(kI32, {6, 50}, 30, 0, {1, 8}),
                  dout = Array::random(d, {6, 50, 64}, 1, 1, {pitch, 6 * pitch, 1}),
                  dtable(d, {30, 64}, {pitch + 8, 1}), want = dtable.clone();
      const OnGpu gtokens(tokens), gdout(dout), gdtable(dtable);
      run_backward(gtokens, gdout, gdtable, false);
      cpu::embedding_backward(tokens, dout, whole_table(want), want, false,
                              Scratch(cpu::embedding_backward_workspace(tokens, dout, want)));
      EXPECT_TRUE(same_bits(gdtable.back(), want)) << name(d) << pitch;
      EXPECT_TRUE(gaps_kept(dtable, gdtable.back())) << name(d) << pitch;
    }
}

TEST(CudaEmbedding, TokensOutsideAreLeftOutOfTheGradient) {
  SHEAF_NEEDS_GPU();
  const Array all = tokens_of(kI64, {300}, 20);
  Array some = all.clone(), dout = Array::random(kF32, {300, 24}, 1), less = dout.clone();
  for (int64_t r : {0, 5, 31, 32, 299}) {
    some.set(r, r % 2 == 0 ? -1 : 20);
    for (int64_t j = 0; j < 24; ++j) less.set(r * 24 + j, 0), dout.set(r * 24 + j, NAN);
  }
  const Array blank(kF32, {20, 24}), want(kF32, {20, 24});
  const OnGpu gtokens(some), gdout(dout), gdtable(blank);
  run_backward(gtokens, gdout, gdtable, false);
  cpu::embedding_backward(all, less, whole_table(want), want, false, Scratch(0));
  EXPECT_EQ(values(gdtable.back()), values(want));
}

TEST(CudaEmbedding, AGradientDependsOnItsOwnRowsAlone) {
  SHEAF_NEEDS_GPU();
  // Token 5's rows stay the same; the number of tokens with smaller ids changes.
  const Array dout = Array::random(kF32, {4000, 40}, 1), blank(kF32, {9, 40});
  std::vector<Array> seen;
  for (int turn = 0; turn < 3; ++turn) {
    Array tokens(kI32, {4000});
    tokens.fill([&](int64_t i) {
      return i % 3 == 0 ? 5.0 : turn == 2 ? static_cast<double>(i % 5) : 7;
    });
    const OnGpu gtokens(tokens), gdout(dout), gdtable(blank);
    run_backward(gtokens, gdout, gdtable, false);
    seen.push_back(gdtable.back());
  }
  EXPECT_TRUE(same_bits(seen[0], seen[1]));
  for (int64_t j = 0; j < 40; ++j) EXPECT_EQ(seen[0].at(5 * 40 + j), seen[2].at(5 * 40 + j));
}

TEST(CudaEmbedding, NothingToDo) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16}) {
    const Array tokens(kI64, {0}), dout(d, {0, 5}), dtable(d, {4, 5});
    const OnGpu gtokens(tokens), gdout(dout), gdtable(dtable);
    run_backward(gtokens, gdout, gdtable, false);
    EXPECT_EQ(values(gdtable.back()), std::vector<double>(20, 0.0));
    const Array out(d, {0, 5});
    const OnGpu gout(out);
    cuda::embedding(OnGpu::stream(), gtokens, gdtable, whole_table(gdtable), gout);
  }
}

TEST(CudaEmbedding, NamesWhatDoesNotFit) {
  SHEAF_NEEDS_GPU();
  const Array tokens(kI64, {3}), table(kF32, {7, 4}), out(kF32, {3, 5}), narrow(kBF16, {3, 4});
  const Stream& s = OnGpu::stream();
  EXPECT_THROW(cuda::embedding(s, tokens, table, whole_table(table), out), ShapeError);
  EXPECT_THROW(cuda::embedding(s, tokens, table, whole_table(table), narrow), DTypeError);
  EXPECT_THROW(cuda::embedding(s, Array(kF32, {3}), table, whole_table(table), Array(kF32, {3, 4})),
               DTypeError);
  EXPECT_THROW(cuda::embedding_backward(s, tokens, Array(kF32, {3, 4}), whole_table(table), table,
                                        false, {}),
               ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
