#include "sheaf/kernels/attention.h"

#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/tests/kernels/attention_sizes.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Our own kernels against the CPU's in f64, which have their own tests. attention_choice_test covers which kernel computes where cuDNN
// could.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

using Sizes = AttentionSizes;
const Sizes kSizes[] = {{2, 5, 5, 3, 3, 8},     {1, 64, 64, 2, 1, 64},  {2, 130, 130, 4, 2, 16},
                        {1, 1, 200, 4, 2, 32},  {1, 70, 193, 2, 2, 20}, {1, 100, 40, 2, 1, 16},
                        {3, 33, 33, 1, 1, 1},   {1, 65, 65, 2, 2, 80},  {1, 31, 95, 4, 2, 63},
                        {1, 100, 40, 2, 1, 96}, {2, 50, 50, 1, 1, 128}, {1, 70, 70, 2, 1, 256},
                        {1, 66, 129, 1, 1, 200}, {1, 70, 193, 4, 2, 24, 16}, {2, 66, 66, 2, 1, 32, 64},
                        {1, 33, 70, 2, 2, 20, 7}, {1, 1, 130, 4, 2, 7, 20}, {1, 66, 66, 2, 1, 40, 96},
                        {1, 65, 70, 2, 1, 192, 128}, {1, 50, 66, 1, 1, 136, 24}, {1, 66, 65, 2, 1, 100, 160},
                        {1, 66, 66, 1, 1, 200, 128}};

struct Inputs {
  Array q, k, v, dout;
};
Inputs inputs_of(DType d, const Sizes& s, Shape q_strides = {}, Shape k_strides = {}) {
  return {Array::random(d, s.q(), 1, 1, q_strides), Array::random(d, s.k(), 2, 1, k_strides),
          Array::random(d, s.v(), 3, 1, k_strides), Array::random(d, s.out(), 4, 1, q_strides)};
}
struct Results {
  Array out, lse, dq, dk, dv;
};

Results on_gpu(const Sizes& s, const Inputs& in, const AttentionMask& mask, double scale) {
  const DType d = in.q.view().dtype, stat = d == kF64 ? kF64 : kF32;
  const Shape &q_strides = in.q.view().strides, &k_strides = in.k.view().strides;
  const Stream& stream = OnGpu::stream();
  const OnGpu q(in.q), k(in.k), v(in.v), dout(in.dout), out(Array(d, s.out(), in.dout.view().strides)),
      lse(Array(stat, s.lse())), dq(Array(d, s.q(), q_strides)), dk(Array(d, s.k(), k_strides)),
      dv(Array(d, s.v(), in.v.view().strides));
  cuda::blocked::attention(stream, q, k, v, mask, scale, out, lse);
  const GpuScratch scratch(cuda::blocked::attention_backward_workspace(without_data(q)));
  cuda::blocked::attention_backward(stream, q, k, v, out, lse, dout, mask, scale, dq, dk, dv,
                                    scratch);
  return {out.back(), lse.back(), dq.back(), dk.back(), dv.back()};
}

Results on_cpu_in_f64(const Sizes& s, const Inputs& in, const AttentionMask& mask, double scale) {
  const Array q = in_f64(in.q), k = in_f64(in.k), v = in_f64(in.v), dout = in_f64(in.dout);
  const Results r{Array(kF64, s.out()), Array(kF64, s.lse()), Array(kF64, s.q()), Array(kF64, s.k()),
                  Array(kF64, s.v())};
  cpu::attention(q, k, v, mask, scale, r.out, r.lse,
                 Scratch(cpu::attention_workspace(q, k, v, mask, r.out, r.lse)));
  cpu::attention_backward(q, k, v, r.out, r.lse, dout, mask, scale, r.dq, r.dk, r.dv,
                          Scratch(cpu::attention_backward_workspace(q, k, v, r.out, r.lse, dout,
                                                                    mask, r.dq, r.dk, r.dv)));
  return r;
}

bool same(const Results& a, const Results& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) &&
         same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

/// The masks' begins are those on the GPU and on the host.
void expect_the_cpus(DType d, const Sizes& s, const AttentionMask& mask, const AttentionMask& on_host, double factor = 1.5) {
  const Inputs in = inputs_of(d, s);
  const double scale = factor / std::sqrt(static_cast<double>(s.width));
  const Results got = on_gpu(s, in, mask, scale), want = on_cpu_in_f64(s, in, on_host, scale);
  const double bound = (d == kF64 ? 32 : d == kF32 ? 20 : 4) * epsilon(d);
  const std::string where = str(d, s.to_string(), mask.causal ? " causal" : "", " window ", mask.window, " softcap ", mask.softcap);
  EXPECT_LT(scaled_error(got.out, values(want.out)), bound) << where;
  EXPECT_LT(scaled_error(got.dv, values(want.dv)), bound) << where;
  if (mask.window == 1) {  // each probability is 1, whatever the scores
    for (const Array* gradient : {&got.dq, &got.dk}) {
      double largest = 0;
      for (const double x : values(*gradient)) largest = std::isnan(x) ? INFINITY : std::max(largest, std::abs(x));
      EXPECT_LT(largest, 8 * bound) << where;
    }
  } else {
    EXPECT_LT(scaled_error(got.dq, values(want.dq)), bound) << where;
    EXPECT_LT(scaled_error(got.dk, values(want.dk)), bound) << where;
  }
  for (int64_t i = 0; i < s.lse().numel(); ++i)
    if (std::isinf(want.lse.at(i)))
      EXPECT_EQ(got.lse.at(i), want.lse.at(i)) << where;
    else
      EXPECT_NEAR(got.lse.at(i), want.lse.at(i), d == kF64 ? 1e-13 : 4e-6 + 1e-7 * mask.softcap) << where;
}

TEST(CudaAttention, MatchesTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16, kF64})
    for (const Sizes& s : kSizes)
      for (bool causal : {false, true})
        if (d != kF16 || s.width <= 32 || s.width == 96) expect_the_cpus(d, s, causal, causal);
}

// Sums over several segments of keys, which all threads of a block combine.
TEST(CudaAttention, ManyKeysMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, s] : {std::pair{kF32, Sizes{1, 70, 600, 2, 1, 16}}, {kBF16, {1, 70, 600, 2, 1, 96}}, {kF16, {1, 70, 300, 2, 1, 40}},
                             {kBF16, {1, 70, 300, 2, 1, 256}}, {kBF16, {1, 66, 520, 2, 1, 192, 128}}})
    for (const bool causal : {false, true}) expect_the_cpus(d, s, causal, causal);
}

TEST(CudaAttention, ScalesThatAreNotPositive) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kF32, kBF16}) {
    const Sizes s{1, 70, 90, 2, 1, 24};
    expect_the_cpus(d, s, true, true, -1.5);
    const Inputs in = inputs_of(d, s);  // without a scale all scores are equal: results are means
    EXPECT_LT(scaled_error(on_gpu(s, in, true, 0.0).out, values(on_cpu_in_f64(s, in, true, 0.0).out)), 4 * epsilon(d));
  }
}

// Windows of the query alone, within a tile, up to one tile, over several and wider than the context. With windows of two keys, and of a
// tile and two, the last query that sees a tile of keys is the first of its own tile.
TEST(CudaAttention, WindowsMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, s] : {std::pair{kF32, Sizes{1, 150, 150, 4, 2, 24}}, {kBF16, {1, 70, 193, 2, 1, 64}}, {kF16, {2, 1, 200, 4, 2, 32}},
                             {kF32, {1, 100, 40, 1, 1, 80}}, {kF64, {1, 90, 90, 2, 1, 20}}, {kF32, {1, 66, 130, 1, 1, 136}},
                             {kF32, {1, 100, 100, 2, 1, 20, 7}}, {kF16, {1, 70, 100, 1, 1, 40, 96}}, {kBF16, {1, 70, 70, 1, 1, 192, 128}},
                             {kBF16, {1, 200, 200, 2, 1, 32}}})
    for (const int64_t window : {1, 2, 5, 32, 64, 66, 100, 1000}) expect_the_cpus(d, s, {true, {}, window}, {true, {}, window});
}

// Caps that scores come close to, and one that they do not; also with a scale that is not positive.
TEST(CudaAttention, SoftcapsMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, s] : {std::pair{kF32, Sizes{1, 150, 150, 4, 2, 24}}, {kBF16, {1, 70, 193, 2, 1, 64}}, {kF16, {2, 1, 200, 4, 2, 32}},
                             {kF64, {1, 90, 90, 2, 1, 20}}, {kF32, {1, 66, 130, 1, 1, 136}}, {kBF16, {1, 70, 70, 1, 1, 192, 128}},
                             {kBF16, {1, 66, 66, 1, 1, 256}}})
    for (const double cap : {0.7, 2.0, 50.0})
      for (const auto& [causal, window] : {std::pair{false, 0}, {true, 0}, {true, 50}}) {
        const AttentionMask mask(causal, {}, window, cap);
        expect_the_cpus(d, s, mask, mask);
        if (cap == 2 && !window) expect_the_cpus(d, s, mask, mask, -1.5);
      }
}

TEST(CudaAttention, WindowsAndDocumentsTogether) {
  SHEAF_NEEDS_GPU();
  Array begins(kI32, {2, 150});
  begins.fill([](int64_t t) { return t >= 150 || t < 20 ? 0 : t < 120 ? 20 : 120; });
  const OnGpu on(begins);
  for (const DType d : {kF32, kF64})
    for (const int64_t window : {1, 30, 64})
      for (const int64_t value_width : {16, 40})
        expect_the_cpus(d, {2, 150, 150, 2, 1, 16, value_width}, {true, on, window}, {true, begins, window});
  for (const auto& [d, width] : {std::pair{kBF16, 16}, {kF16, 80}, {kBF16, 136}})
    for (const int64_t window : {30, 64}) expect_the_cpus(d, {2, 150, 150, 2, 1, width}, {true, on, window}, {true, begins, window});
}

TEST(CudaAttention, DocumentsWithoutACausalMask) {
  SHEAF_NEEDS_GPU();
  Array begins(kI32, {2, 150});
  begins.fill([](int64_t t) { return t >= 150 || t < 20 ? 0 : t < 120 ? 20 : 120; });
  const OnGpu on(begins);
  for (const auto& [d, width, value_width] : {std::tuple{kF32, 16, 16}, {kF64, 16, 40}, {kF32, 136, 136}, {kBF16, 64, 64}, {kF16, 80, 80},
                                              {kBF16, 192, 128}, {kF16, 136, 136}})
    expect_the_cpus(d, {2, 150, 150, 2, 1, width, value_width}, {false, on}, {false, begins});
}

TEST(CudaAttention, DocumentsOfOtherKeys) {
  SHEAF_NEEDS_GPU();
  // Of 150 queries and 200 keys; the last queries of the first sequence see none, nor does a query its second document of keys.
  Array begins(kI32, {2, 150}), of_keys(kI32, {2, 200});
  begins.fill([](int64_t t) { return t >= 150 || t < 20 ? 0 : t < 30 ? 120 : t < 145 ? 130 : 200; });
  of_keys.fill([](int64_t s) { return s >= 200 ? (s < 290 ? 0 : 90) : s < 70 ? 0 : s < 120 ? 70 : s < 130 ? 120 : 130; });
  const OnGpu on(begins), keys_on(of_keys);
  AttentionMask mask(false, on), on_host(false, begins);
  mask.key_begins = keys_on, on_host.key_begins = of_keys;
  for (const auto& [d, width, value_width] : {std::tuple{kF32, 16, 16}, {kF64, 16, 40}, {kBF16, 64, 64}, {kF16, 136, 136}})
    expect_the_cpus(d, {2, 150, 200, 2, 1, width, value_width}, mask, on_host);
}

TEST(CudaAttention, QueriesThatSeeNothingGiveZeros) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 70, 3, 1, 1, 8, 12};
  for (const DType d : {kF32, kBF16}) {
    const Results got = on_gpu(s, inputs_of(d, s), true, 1.0);
    for (int64_t i = 0; i < 67 * 12; ++i) EXPECT_EQ(got.out.at(i), 0.0);
    for (int64_t i = 0; i < 67 * 8; ++i) EXPECT_EQ(got.dq.at(i), 0.0);
    for (int64_t t = 0; t < 67; ++t) EXPECT_EQ(got.lse.at(t), -INFINITY);
    EXPECT_NE(got.out.at(67 * 12), 0.0);
  }
}

TEST(CudaAttention, NoKeysNoQueries) {
  SHEAF_NEEDS_GPU();
  const Sizes no_keys{1, 3, 0, 1, 1, 4, 2}, no_queries{1, 0, 3, 1, 1, 4, 2};
  for (const DType d : {kF32, kF16}) {
    const Results a = on_gpu(no_keys, inputs_of(d, no_keys), false, 1), b = on_gpu(no_queries, inputs_of(d, no_queries), true, 1);
    EXPECT_EQ(values(a.out), std::vector<double>(6, 0.0));
    EXPECT_EQ(values(a.dq), std::vector<double>(12, 0.0));
    EXPECT_EQ(values(b.dk), std::vector<double>(12, 0.0));
    EXPECT_EQ(values(b.dv), std::vector<double>(6, 0.0));
  }
}

// Heads without elements have scores of 0, results without elements only lse.
TEST(CudaAttention, HeadsWithoutElements) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, of_values] : {std::pair{kF32, false}, {kF32, true}, {kBF16, false}, {kBF16, true}}) {
    const double error = d == kF32 ? 1e-6 : 1e-2;
    const auto array = [&, d = d](uint64_t seed, bool empty) { return Array::random(d, {1, 5, 2, empty ? 0 : 3}, seed); };
    const Array q = array(1, !of_values), k = array(2, !of_values), v = array(3, of_values), dout = array(4, of_values),
                lse(kF32, {1, 2, 5});
    const OnGpu gq(q), gk(k), gv(v), gdout(dout), glse(lse), gout(v), gdq(q), gdk(k), gdv(v);
    cuda::blocked::attention(OnGpu::stream(), gq, gk, gv, true, 1, gout, glse);
    cuda::blocked::attention_backward(OnGpu::stream(), gq, gk, gv, gout, glse, gdout, true, 1, gdq, gdk, gdv,
                                      GpuScratch(cuda::blocked::attention_backward_workspace(gq)));
    const Array got = glse.back();
    if (of_values) {
      EXPECT_GT(got.at(4), 0.0);
      for (const Array& gradient : {gdq.back(), gdk.back()}) EXPECT_EQ(values(gradient), std::vector<double>(30, 0.0));
      continue;
    }
    for (int64_t t = 0; t < 5; ++t) EXPECT_NEAR(got.at(t), std::log(static_cast<double>(t + 1)), 1e-6);
    for (int64_t i = 0; i < 3; ++i) {  // of head 0
      EXPECT_NEAR(gout.back().at(6 + i), (v.at(i) + v.at(6 + i)) / 2, error);
      EXPECT_NEAR(gdv.back().at(24 + i), dout.at(24 + i) / 5, error);
    }
  }
}

TEST(CudaAttention, StridesChangeNothing) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, s] : {std::pair{kF32, Sizes{2, 70, 90, 4, 2, 24}}, {kBF16, {2, 70, 90, 4, 2, 24}},
                             {kF32, {2, 70, 90, 4, 2, 24, 16}}, {kBF16, {2, 70, 90, 4, 2, 12, 23}}}) {
    const Results want = on_gpu(s, inputs_of(d, s), true, 0.2);
    EXPECT_TRUE(same(on_gpu(s, inputs_of(d, s), true, 0.2), want)) << name(d);
    // Interleaved heads in wider rows, and heads before time; rows aligned to 16 bytes or not.
    for (int64_t row : {136, 133})
      for (bool head_first : {false, true}) {
        const Shape q_strides = head_first ? Shape{4 * 70 * row, row, 70 * row, 1}
                                           : Shape{80 * row, row, 25 + row % 8, 1},
                    k_strides = head_first ? Shape{2 * 90 * row, row, 90 * row, 1}
                                           : Shape{99 * row, row, 32, 1};
        const Results got = on_gpu(s, inputs_of(d, s, q_strides, k_strides), true, 0.2);
        EXPECT_TRUE(same(got, want)) << name(d) << row << head_first;
        EXPECT_TRUE(gaps_kept(Array(d, s.out(), q_strides), got.out) &&
                    gaps_kept(Array(d, s.q(), q_strides), got.dq) &&
                    gaps_kept(Array(d, s.k(), k_strides), got.dk) &&
                    gaps_kept(Array(d, s.v(), k_strides), got.dv));
      }
  }
}

TEST(CudaAttention, BatchAndTimeChangeNothing) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kF32, kBF16}) {
    const Sizes s{2, 150, 150, 4, 2, 48, 80};
    const Inputs in = inputs_of(d, s);
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
    const auto of = [&](int64_t queries, int64_t keys) { return Sizes{1, queries, keys, 4, 2, s.width, s.value_width}; };
    const Results alone = on_gpu(of(150, 150), parts(0, 150, 150), true, 0.3),
                  past = on_gpu(of(37, 37), parts(0, 37, 37), true, 0.3),
                  last = on_gpu(of(1, 150), parts(149, 1, 150), true, 0.3);
    EXPECT_TRUE(same_bits(alone.out, part(all.out, 1, 0, 150)) &&
                same_bits(alone.dq, part(all.dq, 1, 0, 150)) &&
                same_bits(alone.dk, part(all.dk, 1, 0, 150)) &&
                same_bits(alone.dv, part(all.dv, 1, 0, 150)));
    EXPECT_TRUE(same_bits(past.out, part(all.out, 1, 0, 37)));
    EXPECT_TRUE(same_bits(past.dq, part(all.dq, 1, 0, 37)));
    EXPECT_TRUE(same_bits(last.out, part(all.out, 1, 149, 1)));
    EXPECT_TRUE(same_bits(last.dq, part(all.dq, 1, 149, 1)));
  }
}

// Documents of one token, of whole tiles, beginning and ending anywhere in a tile; the second sequence is one document.
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
  constexpr struct {
    DType d;
    int64_t width, value_width;
    bool causal = true;
  } kWidths[] = {{kF32, 24, 24},    {kBF16, 64, 64}, {kF32, 80, 80}, {kF16, 136, 136},      {kF64, 20, 20},
                 {kBF16, 192, 128}, {kF32, 20, 7},   {kF16, 40, 96}, {kF32, 24, 40, false}, {kBF16, 64, 64, false}};
  for (const auto& [d, width, value_width, causal] : kWidths) {
    const Sizes s{2, kTokens, kTokens, 2, 1, width, value_width};
    const Inputs in = inputs_of(d, s);
    const Results got = on_gpu(s, in, {causal, on}, 0.4);
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
      const Results alone = on_gpu({1, count, count, s.heads, s.key_heads, s.width, s.value_width},
                                   {copy(in.q), copy(in.k), copy(in.v), copy(in.dout)}, causal, 0.4);
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

// More than a segment of keys.
TEST(CudaAttention, LongDocumentsHaveTheBitsThatTheyHaveAlone) {
  SHEAF_NEEDS_GPU();
  constexpr int64_t kFirst = 300, kTokens = 570;
  Array begins(kI32, {1, kTokens});
  begins.fill([](int64_t t) { return t < kFirst ? 0.0 : static_cast<double>(kFirst); });
  const OnGpu on(begins);
  const Sizes s{1, kTokens, kTokens, 2, 1, 24};
  const Inputs in = inputs_of(kBF16, s);
  const Results got = on_gpu(s, in, {true, on}, 0.4);
  const auto part = [](const Array& x) {  // of the second document
    const View v = x.view();
    Array out(v.dtype, {1, kTokens - kFirst, v.shape[2], v.shape[3]});
    out.fill([&](int64_t i) { return x.at(kFirst * v.shape[2] * v.shape[3] + i); });
    return out;
  };
  const Results alone = on_gpu({1, kTokens - kFirst, kTokens - kFirst, 2, 1, 24}, {part(in.q), part(in.k), part(in.v), part(in.dout)}, true, 0.4);
  EXPECT_TRUE(same_bits(alone.out, part(got.out)) && same_bits(alone.dq, part(got.dq)) && same_bits(alone.dk, part(got.dk)) &&
              same_bits(alone.dv, part(got.dv)));
}

TEST(CudaAttention, AWindowOfAllKeysIsNone) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, s] : {std::pair{kF32, Sizes{1, 130, 130, 2, 1, 24}}, {kF32, {1, 70, 193, 2, 2, 20}}, {kBF16, {1, 70, 193, 2, 1, 24}}}) {
    const Inputs in = inputs_of(d, s);
    const Results want = on_gpu(s, in, true, 0.4);
    for (const int64_t window : {s.keys, s.keys + 1, std::numeric_limits<int64_t>::max()})
      EXPECT_TRUE(same(on_gpu(s, in, {true, {}, window}, 0.4), want)) << window;
    EXPECT_FALSE(same(on_gpu(s, in, {true, {}, s.keys - 1}, 0.4), want));
  }
}

// NaN among a tile's keys or queries would spread through its products, even where it counts nothing.
TEST(CudaAttention, TilesOutsideOfAWindowAreNotTouched) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, width] : {std::pair{kF32, 32}, {kBF16, 32}, {kBF16, 80}}) {
    const Sizes s{1, 256, 256, 2, 1, width};
    const Inputs in = inputs_of(d, s);
    Inputs early = inputs_of(d, s), late = inputs_of(d, s);
    for (int64_t i = 0; i < 64 * width; ++i) early.k.set(i, NAN), early.v.set(i, NAN);
    for (int64_t i = 192 * 2 * width; i < 256 * 2 * width; ++i) late.q.set(i, NAN), late.dout.set(i, NAN);
    const AttentionMask mask(true, {}, 64);
    const Results want = on_gpu(s, in, mask, 0.4), without_first = on_gpu(s, early, mask, 0.4),
                  without_last = on_gpu(s, late, mask, 0.4);
    const auto rows = [](const Array& x, int64_t first, int64_t count) {
      View v = x.view();
      v.data = v.as<char>() + first * v.strides[1] * static_cast<int64_t>(size_of(v.dtype)), v.shape[1] = count;
      return v;
    };
    EXPECT_TRUE(same_bits(rows(without_first.out, 128, 128), rows(want.out, 128, 128)));
    EXPECT_TRUE(same_bits(rows(without_first.dq, 128, 128), rows(want.dq, 128, 128)));
    EXPECT_TRUE(same_bits(rows(without_first.dk, 128, 128), rows(want.dk, 128, 128)));
    // No query of the last tile sees keys before 128.
    EXPECT_TRUE(same_bits(rows(without_last.dk, 0, 128), rows(want.dk, 0, 128)));
    EXPECT_TRUE(same_bits(rows(without_last.dv, 0, 128), rows(want.dv, 0, 128)));
  }
}

// A GPU kernel cannot report them; nothing outside the operands is touched.
TEST(CudaAttention, WhatIsNoBeginOfADocumentDoesNoHarm) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 130, 130, 1, 1, 8};
  for (const int which : {0, 1, 2}) {
    Array begins(kI32, {1, 130});
    begins.fill([&](int64_t t) { return which == 0 ? -5.0 : which == 1 ? 1e6 : static_cast<double>((t * 37) % 130); });
    const OnGpu on(begins);
    for (const DType d : {kF32, kF16})
      for (const bool causal : {true, false}) on_gpu(s, inputs_of(d, s), {causal, on}, 1.0);
  }
}

TEST(CudaAttention, LargeScoresStayFinite) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 80, 80, 1, 1, 16};
  for (const DType d : {kF32, kBF16}) {
    Inputs in = inputs_of(d, s);
    in.q = Array::random(d, s.q(), 1, 100), in.k = Array::random(d, s.k(), 2, 100);
    const Results got = on_gpu(s, in, true, 1.0), want = on_cpu_in_f64(s, in, true, 1.0);
    EXPECT_LT(scaled_error(got.out, values(want.out)), 1e-2) << name(d);
  }
}

TEST(CudaAttention, NaNStaysNaN) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 4, 4, 1, 1, 8};
  for (const DType d : {kF32, kBF16}) {
    Inputs in = inputs_of(d, s);
    in.q.set(8, std::nan(""));  // of query 1
    const Results got = on_gpu(s, in, true, 1.0);
    EXPECT_FALSE(std::isnan(got.out.at(0)));
    EXPECT_TRUE(std::isnan(got.out.at(8)) && std::isnan(got.lse.at(1)));
    EXPECT_FALSE(std::isnan(got.out.at(16)));
  }
}

TEST(CudaAttention, RefusesWhatTheCpuRefuses) {
  SHEAF_NEEDS_GPU();
  const Array q(kF32, {1, 4, 3, 8}), k(kF32, {1, 4, 2, 8}), lse(kF32, {1, 3, 4}),
      wide(kF32, {1, 4, 3, 257}), keys(kF32, {1, 4, 3, 8});
  const Stream& stream = OnGpu::stream();
  EXPECT_THROW(cuda::attention(stream, q, k, k, true, 1, q, lse, Workspace{}), ShapeError);
  for (const auto& [x, v] : {std::pair{&wide, &wide}, {&wide, &keys}, {&keys, &wide}})
    EXPECT_THROW(cuda::attention(stream, *x, *x, *v, true, 1, *v, lse, Workspace{}), ShapeError);
  EXPECT_THROW(cuda::attention(stream, keys, keys, wide, true, 1, keys, lse, Workspace{}), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
