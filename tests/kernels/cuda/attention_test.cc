#include "sheaf/kernels/attention.h"

#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Our own kernels against the CPU's in f64, which have tests of their own. Who computes where cuDNN
// would is attention_choice_test's.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Sizes {
  int64_t batch, queries, keys, heads, key_heads, width;
  Shape q() const { return {batch, queries, heads, width}; }
  Shape k() const { return {batch, keys, key_heads, width}; }
  Shape lse() const { return {batch, heads, queries}; }
  std::string to_string() const { return q().to_string() + k().to_string(); }
};
const Sizes kSizes[] = {{2, 5, 5, 3, 3, 8},     {1, 64, 64, 2, 1, 64},  {2, 130, 130, 4, 2, 16},
                        {1, 1, 200, 4, 2, 32},  {1, 70, 193, 2, 2, 20}, {1, 100, 40, 2, 1, 16},
                        {3, 33, 33, 1, 1, 1},   {1, 65, 65, 2, 2, 80},  {1, 31, 95, 4, 2, 63},
                        {1, 100, 40, 2, 1, 96}, {2, 50, 50, 1, 1, 128}, {1, 70, 70, 2, 1, 256},
                        {1, 66, 129, 1, 1, 200}};

struct Inputs {
  Array q, k, v, dout;
};
Inputs inputs_of(DType d, const Sizes& s, Shape q_strides = {}, Shape k_strides = {}) {
  return {Array::random(d, s.q(), 1, 1, q_strides), Array::random(d, s.k(), 2, 1, k_strides),
          Array::random(d, s.k(), 3, 1, k_strides), Array::random(d, s.q(), 4, 1, q_strides)};
}
struct Results {
  Array out, lse, dq, dk, dv;
};

Results on_gpu(const Sizes& s, const Inputs& in, const AttentionMask& mask, double scale) {
  const DType d = in.q.view().dtype, stat = d == kF64 ? kF64 : kF32;
  const Shape &q_strides = in.q.view().strides, &k_strides = in.k.view().strides;
  const Stream& stream = OnGpu::stream();
  const OnGpu q(in.q), k(in.k), v(in.v), dout(in.dout), out(Array(d, s.q(), q_strides)),
      lse(Array(stat, s.lse())), dq(Array(d, s.q(), q_strides)), dk(Array(d, s.k(), k_strides)),
      dv(Array(d, s.k(), k_strides));
  cuda::blocked::attention(stream, q, k, v, mask, scale, out, lse);
  const GpuScratch scratch(cuda::blocked::attention_backward_workspace(without_data(q)));
  cuda::blocked::attention_backward(stream, q, k, v, out, lse, dout, mask, scale, dq, dk, dv,
                                    scratch);
  return {out.back(), lse.back(), dq.back(), dk.back(), dv.back()};
}

Results on_cpu_in_f64(const Sizes& s, const Inputs& in, bool causal, double scale) {
  const Array q = in_f64(in.q), k = in_f64(in.k), v = in_f64(in.v), dout = in_f64(in.dout);
  const Results r{Array(kF64, s.q()), Array(kF64, s.lse()), Array(kF64, s.q()), Array(kF64, s.k()),
                  Array(kF64, s.k())};
  cpu::attention(q, k, v, causal, scale, r.out, r.lse,
                 Scratch(cpu::attention_workspace(q, k, v, causal, r.out, r.lse)));
  cpu::attention_backward(q, k, v, r.out, r.lse, dout, causal, scale, r.dq, r.dk, r.dv,
                          Scratch(cpu::attention_backward_workspace(q, k, v, r.out, r.lse, dout,
                                                                    causal, r.dq, r.dk, r.dv)));
  return r;
}

bool same(const Results& a, const Results& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) &&
         same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

TEST(CudaAttention, MatchesTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Sizes& s : kSizes)
      for (bool causal : {false, true}) {
        if (d == kF16 && s.width > 32) continue;
        const Inputs in = inputs_of(d, s);
        const double scale = 1.5 / std::sqrt(static_cast<double>(s.width));
        const Results got = on_gpu(s, in, causal, scale),
                      want = on_cpu_in_f64(s, in, causal, scale);
        const double bound = (d == kF64 ? 32 : d == kF32 ? 20 : 4) * epsilon(d);
        const std::string where = std::string(name(d)) + s.to_string() + (causal ? " causal" : "");
        EXPECT_LT(scaled_error(got.out, values(want.out)), bound) << where;
        EXPECT_LT(scaled_error(got.dq, values(want.dq)), bound) << where;
        EXPECT_LT(scaled_error(got.dk, values(want.dk)), bound) << where;
        EXPECT_LT(scaled_error(got.dv, values(want.dv)), bound) << where;
        for (int64_t i = 0; i < s.lse().numel(); ++i)
          if (std::isinf(want.lse.at(i)))
            EXPECT_EQ(got.lse.at(i), want.lse.at(i)) << where;
          else
            EXPECT_NEAR(got.lse.at(i), want.lse.at(i), d == kF64 ? 1e-13 : 4e-6) << where;
      }
}

TEST(CudaAttention, QueriesThatSeeNothingGiveZeros) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 70, 3, 1, 1, 8};
  const Results got = on_gpu(s, inputs_of(kF32, s), true, 1.0);
  for (int64_t i = 0; i < 67 * 8; ++i) {
    EXPECT_EQ(got.out.at(i), 0.0);
    EXPECT_EQ(got.dq.at(i), 0.0);
  }
  for (int64_t t = 0; t < 67; ++t) EXPECT_EQ(got.lse.at(t), -INFINITY);
  EXPECT_NE(got.out.at(67 * 8), 0.0);
}

TEST(CudaAttention, NoKeysNoQueries) {
  SHEAF_NEEDS_GPU();
  const Sizes no_keys{1, 3, 0, 1, 1, 4}, no_queries{1, 0, 3, 1, 1, 4};
  const Results a = on_gpu(no_keys, inputs_of(kF32, no_keys), false, 1),
                b = on_gpu(no_queries, inputs_of(kF32, no_queries), true, 1);
  EXPECT_EQ(values(a.out), std::vector<double>(12, 0.0));
  EXPECT_EQ(values(a.dq), std::vector<double>(12, 0.0));
  EXPECT_EQ(values(b.dk), std::vector<double>(12, 0.0));
  EXPECT_EQ(values(b.dv), std::vector<double>(12, 0.0));
}

TEST(CudaAttention, StridesChangeNothing) {
  SHEAF_NEEDS_GPU();
  const Sizes s{2, 70, 90, 4, 2, 24};
  for (DType d : {kF32, kBF16}) {
    const Results want = on_gpu(s, inputs_of(d, s), true, 0.2);
    EXPECT_TRUE(same(on_gpu(s, inputs_of(d, s), true, 0.2), want)) << name(d);
    // Heads beside each other in wider rows, and heads before time; rows at 16 bytes or not.
    for (int64_t row : {136, 133})
      for (bool head_first : {false, true}) {
        const Shape q_strides = head_first ? Shape{4 * 70 * row, row, 70 * row, 1}
                                           : Shape{80 * row, row, 25 + row % 8, 1},
                    k_strides = head_first ? Shape{2 * 90 * row, row, 90 * row, 1}
                                           : Shape{99 * row, row, 32, 1};
        const Results got = on_gpu(s, inputs_of(d, s, q_strides, k_strides), true, 0.2);
        EXPECT_TRUE(same(got, want)) << name(d) << row << head_first;
        EXPECT_TRUE(gaps_kept(Array(d, s.q(), q_strides), got.out) &&
                    gaps_kept(Array(d, s.q(), q_strides), got.dq) &&
                    gaps_kept(Array(d, s.k(), k_strides), got.dk) &&
                    gaps_kept(Array(d, s.k(), k_strides), got.dv));
      }
  }
}

TEST(CudaAttention, BatchAndTimeChangeNothing) {
  SHEAF_NEEDS_GPU();
  const Sizes s{2, 150, 150, 4, 2, 48};
  const Inputs in = inputs_of(kF32, s);
  const Results all = on_gpu(s, in, true, 0.3);
  // Batch entry 1 alone; its first 37 positions alone; its last position with all keys.
  const auto part = [&](const Array& x, int64_t b, int64_t first, int64_t count) {
    const Shape shape = x.view().shape;
    const int64_t row = shape[2] * shape[3];
    Array out(x.view().dtype, {1, count, shape[2], shape[3]});
    out.fill([&](int64_t i) { return x.at((b * shape[1] + first) * row + i); });
    return out;
  };
  const auto parts = [&](int64_t first, int64_t count, int64_t keys) {
    return Inputs{part(in.q, 1, first, count), part(in.k, 1, 0, keys), part(in.v, 1, 0, keys),
                  part(in.dout, 1, first, count)};
  };
  const Results alone = on_gpu({1, 150, 150, 4, 2, 48}, parts(0, 150, 150), true, 0.3),
                past = on_gpu({1, 37, 37, 4, 2, 48}, parts(0, 37, 37), true, 0.3),
                last = on_gpu({1, 1, 150, 4, 2, 48}, parts(149, 1, 150), true, 0.3);
  EXPECT_TRUE(same_bits(alone.out, part(all.out, 1, 0, 150)) &&
              same_bits(alone.dq, part(all.dq, 1, 0, 150)) &&
              same_bits(alone.dk, part(all.dk, 1, 0, 150)) &&
              same_bits(alone.dv, part(all.dv, 1, 0, 150)));
  EXPECT_TRUE(same_bits(past.out, part(all.out, 1, 0, 37)));
  EXPECT_TRUE(same_bits(past.dq, part(all.dq, 1, 0, 37)));
  EXPECT_TRUE(same_bits(last.out, part(all.out, 1, 149, 1)));
  EXPECT_TRUE(same_bits(last.dq, part(all.dq, 1, 149, 1)));
}

// Of one token, of whole tiles, ending and beginning anywhere in one; the second sequence is one document.
TEST(CudaAttention, PackedDocumentsHaveTheBitsThatTheyHaveAlone) {
  SHEAF_NEEDS_GPU();
  constexpr int64_t kLengths[] = {1, 64, 2, 63, 97, 7}, kTokens = 234;
  Array begins(kI32, {2, kTokens});
  begins.fill([](int64_t) { return 0; });
  int64_t begin = 0;
  for (const int64_t n : kLengths) {
    for (int64_t t = begin; t < begin + n; ++t) begins.set(t, static_cast<double>(begin));
    begin += n;
  }
  const OnGpu on(begins);
  // Tiles of all widths, and of f64.
  for (const auto& [d, width] : {std::pair{kF32, 24}, {kBF16, 64}, {kF32, 80}, {kF16, 136}, {kF64, 20}}) {
    const Sizes s{2, kTokens, kTokens, 2, 1, width};
    const Inputs in = inputs_of(d, s);
    const Results got = on_gpu(s, in, {true, on}, 0.4);
    // `count` positions of sequence b, along dimension 1, or of lse 2.
    const auto part = [](const Array& x, int64_t b, int dim, int64_t first, int64_t count) {
      View v = x.view();
      v.data = v.as<char>() + (b * v.strides[0] + first * v.strides[dim]) * static_cast<int64_t>(size_of(v.dtype));
      v.shape[0] = 1, v.shape[dim] = count;
      return v;
    };
    const auto compare = [&](int64_t b, int64_t first, int64_t count) {
      const auto copy = [&](const Array& x) {
        const View v = part(x, b, 1, first, count);
        return Array::of(v.dtype, v.shape, values(v));
      };
      const Results alone = on_gpu({1, count, count, s.heads, s.key_heads, s.width}, {copy(in.q), copy(in.k), copy(in.v), copy(in.dout)},
                                   true, 0.4);
      const std::string where = str(d, s.to_string(), " document from ", first, " of ", b);
      EXPECT_TRUE(same_bits(alone.out, part(got.out, b, 1, first, count))) << where;
      EXPECT_TRUE(same_bits(alone.lse, part(got.lse, b, 2, first, count))) << where;
      EXPECT_TRUE(same_bits(alone.dq, part(got.dq, b, 1, first, count))) << where;
      EXPECT_TRUE(same_bits(alone.dk, part(got.dk, b, 1, first, count))) << where;
      EXPECT_TRUE(same_bits(alone.dv, part(got.dv, b, 1, first, count))) << where;
    };
    begin = 0;
    for (const int64_t n : kLengths) compare(0, begin, n), begin += n;
    compare(1, 0, kTokens);
  }
}

// They cannot be reported from there; nothing outside of the operands is touched.
TEST(CudaAttention, WhatIsNoBeginOfADocumentDoesNoHarm) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 130, 130, 1, 1, 8};
  for (const int which : {0, 1, 2}) {
    Array begins(kI32, {1, 130});
    begins.fill([&](int64_t t) { return which == 0 ? -5.0 : which == 1 ? 1e6 : static_cast<double>((t * 37) % 130); });
    const OnGpu on(begins);
    on_gpu(s, inputs_of(kF32, s), {true, on}, 1.0);
  }
}

TEST(CudaAttention, LargeScoresStayFinite) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 80, 80, 1, 1, 16};
  Inputs in = inputs_of(kF32, s);
  in.q = Array::random(kF32, s.q(), 1, 100), in.k = Array::random(kF32, s.k(), 2, 100);
  const Results got = on_gpu(s, in, true, 1.0), want = on_cpu_in_f64(s, in, true, 1.0);
  EXPECT_LT(scaled_error(got.out, values(want.out)), 1e-2);
}

TEST(CudaAttention, NaNStaysNaN) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 4, 4, 1, 1, 8};
  Inputs in = inputs_of(kF32, s);
  in.q.set(8, std::nan(""));  // of query 1
  const Results got = on_gpu(s, in, true, 1.0);
  EXPECT_FALSE(std::isnan(got.out.at(0)));
  EXPECT_TRUE(std::isnan(got.out.at(8)) && std::isnan(got.lse.at(1)));
  EXPECT_FALSE(std::isnan(got.out.at(16)));
}

TEST(CudaAttention, RefusesWhatTheCpuRefuses) {
  SHEAF_NEEDS_GPU();
  const Array q(kF32, {1, 4, 3, 8}), k(kF32, {1, 4, 2, 8}), lse(kF32, {1, 3, 4}),
      wide(kF32, {1, 4, 3, 257});
  const Stream& stream = OnGpu::stream();
  EXPECT_THROW(cuda::attention(stream, q, k, k, true, 1, q, lse, Workspace{}), ShapeError);
  EXPECT_THROW(cuda::attention(stream, wide, wide, wide, true, 1, wide, lse, Workspace{}),
               ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
