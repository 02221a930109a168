#include "sheaf/kernels/cuda/attention_decode.h"

#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/tests/kernels/attention_sizes.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Few queries to many keys: the CPU's numbers in f64, and the bits of the kernel for many queries, which attention_test compares with the
// CPU's.
namespace sheaf::kernels::cuda {
namespace {

using namespace sheaf::testing;

using Sizes = AttentionSizes;

struct Inputs {
  Array q, k, v;
  Inputs(DType d, const Sizes& s, double scale = 1)
      : q(Array::random(d, s.q(), 1, scale)), k(Array::random(d, s.k(), 2, scale)), v(Array::random(d, s.v(), 3)) {}
};

/// A mask for the GPU and the same for the host; with `begins`, those of each sequence's queries. Also the scale of scores, times the root
/// of the width.
struct Mask {
  bool causal = true;
  std::vector<std::vector<int64_t>> begins = {};
  int64_t window = 0;
  double factor = 1.5;
  double softcap = 0;
  int64_t seen_keys = 0;  ///< not 0: of each sequence these keys are a document, and those behind them another one

  AttentionMask with(const View& documents, const View& of_keys) const {
    AttentionMask m(causal, begins.empty() ? View() : documents, window, softcap);
    if (seen_keys) m.key_begins = of_keys;
    return m;
  }
  Array documents() const {
    Array out(kI32, {std::ssize(begins), begins.empty() ? 0 : std::ssize(begins[0])});
    out.fill([&](int64_t i) {
      const int64_t queries = std::ssize(begins[0]);
      return static_cast<double>(begins[static_cast<size_t>(i / queries)][static_cast<size_t>(i % queries)]);
    });
    return out;
  }
  Array documents_of_keys(int64_t keys) const {
    Array out(kI32, {std::ssize(begins), keys});
    out.fill([&](int64_t i) { return i % keys < seen_keys ? 0 : static_cast<double>(seen_keys); });
    return out;
  }
};

struct Results {
  Array out, lse;
};
bool same(const Results& a, const Results& b) { return same_bits(a.out, b.out) && same_bits(a.lse, b.lse); }

double scale_of(const Sizes& s, const Mask& mask) { return mask.factor / std::sqrt(static_cast<double>(s.width)); }

/// By one of the kernels; results with strides, if any are given.
Results run(bool decode, const Sizes& s, const View& q, const View& k, const View& v, const Mask& mask,
            const Shape& out_strides = {}, const Shape& lse_strides = {}) {
  const Array out(q.dtype, s.out(), out_strides), lse(kF32, s.lse(), lse_strides);
  const OnGpu on_out(out), on_lse(lse), begins(mask.documents()), of_keys(mask.documents_of_keys(s.keys));
  const AttentionMask on_gpu = mask.with(begins, of_keys);
  if (decode) {
    EXPECT_TRUE(decode::takes(without_data(q), without_data(v)));
    const GpuScratch scratch(decode::attention_workspace(without_data(q), without_data(k), without_data(v),
                                                         mask.with(without_data(begins), without_data(of_keys))));
    decode::attention(OnGpu::stream(), q, k, v, on_gpu, scale_of(s, mask), on_out, on_lse, scratch);
    Results got{on_out.back(), on_lse.back()};
    EXPECT_TRUE(gaps_kept(out, got.out) && gaps_kept(lse, got.lse)) << s.to_string();
    return got;
  }
  blocked::attention(OnGpu::stream(), q, k, v, on_gpu, scale_of(s, mask), on_out, on_lse);
  return {on_out.back(), on_lse.back()};
}
Results decode_of(const Sizes& s, const Inputs& in, const Mask& mask) {
  return run(true, s, OnGpu(in.q), OnGpu(in.k), OnGpu(in.v), mask);
}

void expect_the_cpus(DType d, const Sizes& s, const Mask& mask) {
  const Inputs in(d, s);
  const OnGpu q(in.q), k(in.k), v(in.v);
  const Results got = run(true, s, q, k, v, mask);
  const std::string where = str(d, s.to_string(), mask.causal ? " causal" : "", " window ", mask.window);
  EXPECT_TRUE(same(got, run(false, s, q, k, v, mask))) << where;

  const Array q64 = in_f64(in.q), k64 = in_f64(in.k), v64 = in_f64(in.v), out(kF64, s.out()), lse(kF64, s.lse()),
              begins = mask.documents(), of_keys = mask.documents_of_keys(s.keys);
  const AttentionMask on_host = mask.with(begins, of_keys);
  cpu::attention(q64, k64, v64, on_host, scale_of(s, mask), out, lse,
                 Scratch(cpu::attention_workspace(q64, k64, v64, on_host, out, lse)));
  EXPECT_LT(scaled_error(got.out, values(out)), (d == kF32 ? 20 : 2) * epsilon(d)) << where;
  for (int64_t i = 0; i < s.lse().numel(); ++i)
    if (std::isinf(lse.at(i))) EXPECT_EQ(got.lse.at(i), lse.at(i)) << where;
    else EXPECT_NEAR(got.lse.at(i), lse.at(i), 8e-6) << where;
}

// Up to one segment of keys and over several; with fewer keys than queries the first queries see none.
TEST(CudaAttentionDecode, MatchesTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const int64_t queries : {1, 2, 3, 5})
    for (const int64_t keys : {1, 63, 64, 65, 256, 257, 1000, 3000})
      for (const bool causal : {true, false}) {
        const int64_t group = queries == 5 ? 8 : queries == 3 ? 4 : queries;
        const DType d = keys % 2 ? kF32 : queries % 2 ? kBF16 : kF16;
        expect_the_cpus(d, {keys < 100 ? 2 : 1, queries, keys, 2 * group, 2, 8}, {.causal = causal});
      }
}

// More segments than are combined at once.
TEST(CudaAttentionDecode, ManyKeysMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  expect_the_cpus(kF32, {1, 2, 33500, 1, 1, 8}, {});
  expect_the_cpus(kBF16, {1, 1, 65800, 1, 1, 4}, {.window = 33200});
}

TEST(CudaAttentionDecode, ScalesThatAreNotPositive) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kF32, kBF16})
    for (const double factor : {-1.5, 0.0}) expect_the_cpus(d, {1, 2, 300, 2, 1, 24}, {.factor = factor});
}

TEST(CudaAttentionDecode, GroupsMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const int64_t group : {1, 2, 3, 4, 8, 17})
    for (const int64_t queries : {1, 3, 16}) expect_the_cpus(kBF16, {1, queries, 300, group, 1, 16}, {});
}

TEST(CudaAttentionDecode, WidthsMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const auto& [width, value_width] : {std::pair{1, 1}, {8, 8}, {20, 7}, {64, 64}, {63, 40}, {40, 96}, {80, 80}, {128, 128},
                                           {192, 128}, {100, 160}, {256, 256}})
    for (const DType d : {kF32, kBF16, kF16}) {
      expect_the_cpus(d, {1, 1, 321, 4, 2, width, value_width}, {});
      expect_the_cpus(d, {1, 3, 130, 8, 1, width, value_width}, {});
    }
}

// Windows of the query alone, within a tile and a segment, over several, and of all keys.
TEST(CudaAttentionDecode, WindowsMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const int64_t window : {1, 2, 64, 100, 255, 256, 257, 600, 1000, 2000})
    for (const int64_t queries : {1, 4, 16})
      for (const int64_t keys : {700, 1025}) expect_the_cpus(keys % 2 ? kBF16 : kF32, {1, queries, keys, 2, 1, 8}, {.window = window});
  expect_the_cpus(kBF16, {2, 5, 3, 2, 1, 8}, {.window = 2});
}

TEST(CudaAttentionDecode, SoftcapsMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const double cap : {0.7, 50.0})
    for (const int64_t window : {0, 300})
      for (const DType d : {kF32, kBF16, kF16}) expect_the_cpus(d, {2, 3, 700, 4, 2, 24}, {.window = window, .softcap = cap});
}

// The first document began before the queries or with them, the others between them; a window in each of them.
TEST(CudaAttentionDecode, DocumentsMatchTheCpu) {
  SHEAF_NEEDS_GPU();
  const std::vector<std::vector<int64_t>> begins{{0, 0, 997, 997, 999}, {123, 123, 123, 123, 123}, {995, 996, 997, 998, 999}};
  for (const int64_t window : {0, 1, 300, 800})
    for (const int64_t group : {1, 4}) {
      for (const DType d : {kF32, kF16}) expect_the_cpus(d, {3, 5, 1000, 2 * group, 2, 8}, {.begins = begins, .window = window});
      expect_the_cpus(kBF16, {1, 1, 1000, 2 * group, 2, 8}, {.begins = {{321}}, .window = window});
    }
  for (const DType d : {kF32, kF16}) expect_the_cpus(d, {2, 5, 5, 4, 2, 8}, {.causal = false, .begins = {{0, 0, 2, 2, 4}, {0, 0, 0, 0, 0}}});
  for (const DType d : {kF32, kF16})
    for (const int64_t seen : {70, 300, 600})
      expect_the_cpus(d, {2, 5, 700, 4, 2, 8}, {.causal = false, .begins = {{0, 0, seen, seen, 700}, {0, 0, 0, 0, 0}}, .seen_keys = seen});
}

TEST(CudaAttentionDecode, QueriesThatSeeNothingGiveZeros) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, keys] : {std::pair{kF32, 0}, {kF32, 2}, {kBF16, 0}, {kBF16, 2}}) {
    const Sizes s{1, 4, keys, 2, 1, 8, 12};
    const Results got = decode_of(s, Inputs(d, s), {});
    const int64_t blind = 4 - keys;
    for (int64_t i = 0; i < blind * 24; ++i) EXPECT_EQ(got.out.at(i), 0.0);
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t t = 0; t < 4; ++t) EXPECT_EQ(std::isinf(got.lse.at(h * 4 + t)), t < blind);
    if (keys) {
      EXPECT_NE(got.out.at(blind * 24), 0.0);
    }
  }
}

// Heads without elements have scores of 0, results without elements only lse.
TEST(CudaAttentionDecode, HeadsWithoutElements) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, of_values] : {std::pair{kF32, false}, {kF32, true}, {kBF16, false}, {kBF16, true}}) {
    const auto array = [d = d](int64_t tokens, bool empty) { return OnGpu(Array::random(d, {1, tokens, 1, empty ? 0 : 3}, 1)); };
    const OnGpu q = array(2, !of_values), k = array(300, !of_values), v = array(300, of_values), out = array(2, of_values),
                lse(Array(kF32, {1, 1, 2}));
    decode::attention(OnGpu::stream(), q, k, v, true, 1, out, lse, GpuScratch(decode::attention_workspace(q, k, v, true)));
    const Array got = lse.back();
    if (!of_values) {
      EXPECT_NEAR(got.at(1), std::log(300.0), 1e-6);
    }
    EXPECT_TRUE(std::isfinite(got.at(0)));
  }
}

/// The first `keys` rows of heads [first, first + count) of a cache [B, capacity, heads, D].
View of_cache(const View& cache, int64_t first, int64_t count, int64_t keys) {
  View v = cache;
  v.shape[1] = keys, v.shape[2] = count;
  v.data = v.as<char>() + first * v.strides[2] * static_cast<int64_t>(size_of(v.dtype));
  return v;
}

// Keys and values interleaved in partly filled memory, whose rest is poisoned. Queries and results in wider rows, in f32 and 16 bits,
// aligned to 16 bytes and not.
TEST(CudaAttentionDecode, ReadsACacheInPlace) {
  SHEAF_NEEDS_GPU();
  for (const DType d : {kF32, kBF16, kF16})
    for (const int64_t width : {16, 21}) {
      const Sizes s{2, 2, 300, 4, 2, width};
      const Inputs in(d, s);
      Array cache(d, {2, 500, 4, width});
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t t = 0; t < 300; ++t)
          for (int64_t i = 0; i < 2 * width; ++i) {
            const int64_t from = (b * 300 + t) * 2 * width + i, to = (b * 500 + t) * 4 * width + i;
            cache.set(to, in.k.at(from)), cache.set(to + 2 * width, in.v.at(from));
          }
      const int64_t row = 6 * width + 3;
      Array q(d, s.q(), {2 * row, row, width, 1});
      q.fill([&](int64_t i) { return in.q.at(i); });
      const OnGpu on(cache), queries(q);
      const Results want = decode_of(s, in, {}),
                    got = run(true, s, queries, of_cache(on, 0, 2, 300), of_cache(on, 2, 2, 300), {},
                              {2 * row + 5, row, width + 1, 1}, {40, 3, 1});
      EXPECT_TRUE(same(got, want)) << str(d, ' ', width);
    }
}

/// Rows [first, first + count) of sequences [b, b + sequences), dense.
Array part(const Array& x, int64_t b, int64_t sequences, int64_t first, int64_t count) {
  const Shape shape = x.view().shape;
  const int64_t row = shape[2] * shape[3];
  Array out(x.view().dtype, {sequences, count, shape[2], shape[3]});
  out.fill([&](int64_t i) {
    const int64_t sequence = i / (count * row);
    return x.at(((b + sequence) * shape[1] + first) * row + i % (count * row));
  });
  return out;
}

// A sequence of a batch gives the same as that sequence alone, one of several queries the same as that query alone, and both the same as a
// row of one pass over all tokens.
TEST(CudaAttentionDecode, ARowIsThatOfOnePass) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, width, value_width] :
       {std::tuple{kF32, 24, 40}, {kBF16, 24, 40}, {kF16, 24, 40}, {kBF16, 128, 128}, {kBF16, 192, 128}})
    for (const auto& [window, softcap] : {std::pair{0, 0.0}, {70, 0.0}, {0, 2.0}}) {
      if ((window || softcap != 0) && width > 100) continue;
      const Sizes whole{2, 330, 330, 4, 2, width, value_width};
      const Inputs in(d, whole);
      const Results all = run(false, whole, OnGpu(in.q), OnGpu(in.k), OnGpu(in.v), {.window = window, .softcap = softcap});
      for (const auto& [last, count] : {std::pair{330, 1}, {330, 7}, {257, 1}, {256, 3}, {65, 16}, {1, 1}}) {
        const OnGpu q(part(in.q, 1, 1, last - count, count)), k(part(in.k, 1, 1, 0, last)), v(part(in.v, 1, 1, 0, last));
        const Results got = run(true, {1, count, last, 4, 2, width, value_width}, q, k, v, {.window = window, .softcap = softcap});
        EXPECT_TRUE(same_bits(got.out, part(all.out, 1, 1, last - count, count))) << str(d, ' ', last, ' ', count);
        const OnGpu both(part(in.q, 0, 2, last - count, count)), keys(part(in.k, 0, 2, 0, last)), vals(part(in.v, 0, 2, 0, last));
        const Results of_two = run(true, {2, count, last, 4, 2, width, value_width}, both, keys, vals, {.window = window, .softcap = softcap});
        EXPECT_TRUE(same_bits(part(of_two.out, 1, 1, 0, count), got.out)) << str(d, ' ', last, ' ', count);
      }
    }
}

// NaN among the keys of a tile would spread, even where they count nothing.
TEST(CudaAttentionDecode, TilesOutsideOfAWindowAreNotTouched) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 2, 640, 2, 1, 8};
  for (const DType d : {kF32, kBF16}) {
    const Inputs in(d, s);
    Array k = in.k.clone(), v = in.v.clone();
    for (int64_t i = 0; i < 320 * 8; ++i) k.set(i, NAN), v.set(i, NAN);
    const Mask mask{.window = 300};  // from query 638 on: keys 339 to 639, in the tile from 320 on
    EXPECT_TRUE(same(run(true, s, OnGpu(in.q), OnGpu(k), OnGpu(v), mask), decode_of(s, in, mask))) << name(d);
  }
}

TEST(CudaAttentionDecode, WorkspaceOfAWindowIsThatOfItsSegments) {
  if constexpr (!kHasCuda) {
    GTEST_SKIP() << "not run: built without CUDA";
  } else {
    const auto bytes = [](int64_t keys, int64_t window) {
      const Sizes s{1, 1, keys, 32, 8, 128};
      const View q = View::dense(nullptr, kBF16, s.q()), k = View::dense(nullptr, kBF16, s.k());
      return decode::attention_workspace(q, k, k, {true, {}, window});
    };
    EXPECT_EQ(bytes(8192, 0), size_t{32 * 32 * (128 + 2) * 4});
    EXPECT_EQ(bytes(8192, 512), size_t{32 * 3 * (128 + 2) * 4});
    EXPECT_EQ(bytes(131072, 512), bytes(8192, 512));
    EXPECT_EQ(bytes(200, 0), bytes(1, 0));
  }
}

TEST(CudaAttentionDecode, WhatIsNoBeginOfADocumentDoesNoHarm) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 6, 600, 4, 1, 8};
  for (const std::vector<int64_t>& begins : {std::vector<int64_t>{-5, -5, -5, -5, -5, -5}, {9999, 9999, 9999, 9999, 9999, 9999},
                                             {5, 300, 17, 598, 2, 0}})
    for (const int64_t window : {0, 40})
      for (const DType d : {kF32, kF16}) decode_of(s, Inputs(d, s), {.begins = {begins}, .window = window});
}

TEST(CudaAttentionDecode, LargeScoresStayFinite) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 2, 700, 2, 1, 16};
  for (const DType d : {kF32, kBF16})
    for (const double x : values(decode_of(s, Inputs(d, s, 100), {}).out)) EXPECT_TRUE(std::isfinite(x)) << name(d);
}

TEST(CudaAttentionDecode, NaNStaysNaN) {
  SHEAF_NEEDS_GPU();
  const Sizes s{1, 3, 600, 1, 1, 8};
  for (const DType d : {kF32, kBF16}) {
    Inputs in(d, s);
    in.q.set(8, std::nan(""));  // of query 1
    const Results got = decode_of(s, in, {});
    EXPECT_FALSE(std::isnan(got.out.at(0)) || std::isnan(got.out.at(16)));
    EXPECT_TRUE(std::isnan(got.out.at(8)) && std::isnan(got.lse.at(1)));
  }
}

TEST(CudaAttentionDecode, LeavesTheRest) {
  if constexpr (!kHasCuda) {
    GTEST_SKIP() << "not run: built without CUDA";
  } else {
    const auto takes = [](DType d, int64_t queries, int64_t width, int64_t value_width) {
      const auto heads = [&](int64_t w) { return View::dense(nullptr, d, {1, queries, 4, w}); };
      return decode::takes(heads(width), heads(value_width));
    };
    EXPECT_TRUE(takes(kBF16, 16, 256, 256));
    EXPECT_FALSE(takes(kBF16, 17, 64, 64) || takes(kF64, 1, 64, 64) || takes(kF32, 1, 257, 64) || takes(kF32, 1, 64, 257));
  }
}

}  // namespace
}  // namespace sheaf::kernels::cuda
