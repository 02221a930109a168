#include "sheaf/kernels/cuda/cudnn_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/tests/kernels/attention_shards.h"
#include "sheaf/tests/kernels/cuda/attention_data.h"

// Against the CPU's kernel in f64. On the emulated GPU the CPU's kernel replaces cuDNN, so that there this tests what is refused and how
// operands are passed in and out.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;
using cuda::cudnn::Attention;

constexpr AttentionCase kCases[] = {{2, 128, 3, 3, 64},       {1, 192, 4, 2, 128},     {3, 64, 2, 1, 32},
                                    {1, 128, 2, 2, 192, 128}, {1, 192, 4, 2, 40, 96}, {2, 64, 2, 1, 24, 16}};

Attention forward_of(const AttentionOnGpu& g, double scale) {
  return {.q = g.x.q, .k = g.x.k, .v = g.x.v, .out = g.out, .lse = g.lse, .begins = g.mask.begins,
          .window = g.mask.window, .scale = scale};
}
Attention backward_of(const AttentionOnGpu& g, double scale) {
  Attention a = forward_of(g, scale);
  a.dout = g.dout, a.dq = g.d.q, a.dk = g.d.k, a.dv = g.d.v;
  return a;
}
void run(const Attention& a) {
  cuda::cudnn::attention(OnGpu::stream(), a, GpuScratch(cuda::cudnn::attention_workspace(a)));
}

// Why cuDNN takes nothing at all on this GPU; "" in emulation. What it takes of the shapes below is for the tests to say.
std::string no_cudnn() {
  if (emulated_cuda()) return "";
  const AttentionData data({1, 128, 1, 1, 64}, kBF16);
  return cuda::cudnn::refusal(forward_of(AttentionOnGpu(data), data.scale));
}
#define SHEAF_NEEDS_CUDNN() \
  SHEAF_NEEDS_GPU();        \
  if (const std::string why = no_cudnn(); !why.empty()) GTEST_SKIP() << "not run: cuDNN refuses on this GPU: " << why

void check_forward_and_backward(const std::vector<int64_t>& documents, std::span<const AttentionCase> cases = kCases,
                                int64_t window = 0) {
  for (DType dtype : {kBF16, kF16})
    for (const AttentionCase& c : cases) {
      const AttentionData data(c, dtype, documents, window);
      const ExpectedAttention want(data);
      const AttentionOnGpu g(data);
      const Attention forward = forward_of(g, data.scale);
      ASSERT_EQ(cuda::cudnn::refusal(forward), "");
      run(forward);
      // bf16 rounds probabilities, outputs and inputs of sums.
      const double bound = 4 * epsilon(dtype);
      const Array first = g.out.back();
      EXPECT_LT(scaled_error(first, values(want.out)), bound) << name(dtype) << c.heads;
      EXPECT_LT(scaled_error(g.lse.back(), values(want.lse)), 1e-5) << name(dtype) << c.heads;
      run(forward);
      EXPECT_TRUE(same_bits(g.out.back(), first));

      for (bool deterministic : {true, false}) {
        Attention backward = backward_of(g, data.scale);
        backward.deterministic = deterministic;
        if (c.tokens % 128 != 0) {
          EXPECT_EQ(cuda::cudnn::refusal(backward), str("backward for whole blocks of 128 tokens only, not for ", c.tokens));
          continue;
        }
        ASSERT_EQ(cuda::cudnn::refusal(backward), "");
        run(backward);
        const Array got = g.dqkv.back();
        EXPECT_LT(scaled_error(got, values(want.dqkv)), 2 * bound) << name(dtype) << c.heads;
        if (!deterministic) continue;
        run(backward);
        EXPECT_TRUE(same_bits(g.dqkv.back(), got));
      }
    }
}

TEST(CudnnAttention, VersionsWithBugsAreRefused) {
  if constexpr (kHasCuda) {
    const auto why = [](int64_t version, int64_t tokens, bool backward, int64_t queries = 0, int64_t window = 0) {
      const auto rows = [](int64_t n) { return View::dense(nullptr, kBF16, {2, n, 3, 64}); };
      const View k = rows(tokens), q = rows(queries ? queries : tokens);
      Attention a{.q = q, .k = k, .v = k, .out = q, .lse = {}, .window = window};
      if (backward) a.dout = a.dq = q, a.dk = a.dv = k;
      return cuda::cudnn::version_refusal(version, a);
    };
    for (const bool backward : {false, true}) {
      EXPECT_EQ(why(90400, 128, backward), "cuDNN 9.4.0 was never tried, only 9.5 and later");
      EXPECT_EQ(why(90500, 128, backward), "");
      EXPECT_NE(why(91000, 128, backward), "");
      EXPECT_EQ(why(91001, 128, backward),
                "cuDNN 9.10.1 has bugs in attention of bf16 and f16, as NVIDIA says; 9.10.2 has "
                "not");
      EXPECT_EQ(why(91002, 128, backward), "");
      EXPECT_EQ(why(90500, 256, backward, 128), "");
      EXPECT_EQ(why(90500, 256, backward, 0, 50), "");
      EXPECT_EQ(why(90500, 256, backward, 128, 50),
                "cuDNN 9.5.0: windows over as many keys as queries only; 9.6 and later take others");
      EXPECT_EQ(why(90600, 256, backward, 128, 50), "");
    }
    Attention a;
    EXPECT_EQ(cuda::cudnn::masked_score(90900, a), std::numeric_limits<float>::lowest());
    EXPECT_EQ(cuda::cudnn::masked_score(91002, a), -std::numeric_limits<float>::infinity());
    a.window = 128;
    EXPECT_EQ(cuda::cudnn::masked_score(91002, a), -1e30f);
  }
}

TEST(CudnnAttention, ForwardAndBackward) {
  SHEAF_NEEDS_CUDNN();
  check_forward_and_backward({});
}

// Documents of one token, within a tile of any size, longer than one; the tokens before them are hidden.
TEST(CudnnAttention, DocumentsAreKeptApart) {
  SHEAF_NEEDS_CUDNN();
  check_forward_and_backward({1, 37, 2, 24, 65});
  check_forward_and_backward({64, 1, 31});
  // Whole tiles of queries after whole tiles of keys that they do not see: the largest score so far is then a hidden one.
  constexpr AttentionCase kLong[] = {{1, 512, 2, 1, 64}};
  check_forward_and_backward({256, 200}, kLong);
}

// Windows of a few keys, up to a tile and beyond, wider than the context, and together with documents. Where whole tiles of keys precede
// the window, the largest score so far is a hidden one.
TEST(CudnnAttention, WindowsHideWhatComesBeforeThem) {
  SHEAF_NEEDS_CUDNN();
  constexpr AttentionCase kLong[] = {{1, 512, 2, 1, 64}};
  for (const int64_t window : {2, 50, 64, 1000}) check_forward_and_backward({}, kCases, window);
  for (const int64_t window : {3, 130}) check_forward_and_backward({}, kLong, window);
  check_forward_and_backward({1, 37, 2, 24, 65}, kCases, 20);
  check_forward_and_backward({256, 200}, kLong, 100);
}

// Queries of an interval and all keys up to its end, results in slices of the whole's; documents and windows cross the borders.
TEST(CudnnAttention, PartsOfAContext) {
  SHEAF_NEEDS_CUDNN();
  for (const auto& [c, documents, window] :
       {std::tuple{AttentionCase{2, 256, 4, 2, 64}, std::vector<int64_t>{}, 0}, {{2, 256, 3, 3, 64}, {100, 20, 70}, 0},
        {{1, 384, 4, 2, 128}, {}, 90}, {{2, 256, 2, 1, 40, 96}, {50, 30, 90}, 70}, {{1, 256, 2, 2, 192, 128}, {200}, 0}}) {
    const AttentionData data(c, kBF16, documents, window);
    const ExpectedAttention want(data);
    const AttentionOnGpu g(data);
    const PackedHeads wanted = c.heads_of(want.dqkv);
    std::vector<double> dk_sum(static_cast<size_t>(wanted.k.numel())), dv_sum(static_cast<size_t>(wanted.v.numel()));
    const std::vector<int64_t> borders{0, 128, c.tokens};
    for (size_t n = 1; n < borders.size(); ++n) {
      const int64_t begin = borders[n - 1], end = borders[n];
      const auto part = [&](const View& x) { return rows_of(x, 1, begin, end); };
      const auto gradient = [&](int64_t width) { return OnGpu(Array(kBF16, {c.batch, end, c.groups, width})); };
      const OnGpu dk = gradient(c.width), dv = gradient(c.of_values());
      Attention a{.q = part(g.x.q), .k = rows_of(g.x.k, 1, 0, end), .v = rows_of(g.x.v, 1, 0, end), .out = part(g.out),
                  .lse = rows_of(g.lse, 2, begin, end), .begins = data.apart ? part(g.begins) : View(),
                  .window = window, .scale = data.scale};
      ASSERT_EQ(cuda::cudnn::refusal(a), "");
      run(a);
      a.dout = part(g.dout), a.dq = part(g.d.q), a.dk = dk, a.dv = dv;
      a.most_workspace = 1;  // also cut by sequences or heads
      ASSERT_EQ(cuda::cudnn::refusal(a), "");
      run(a);
      for (const auto& [got, sum] : {std::pair{dk.back(), &dk_sum}, {dv.back(), &dv_sum}}) {
        const int64_t row = got.view().strides[1];
        for (int64_t i = 0; i < got.view().numel(); ++i)
          (*sum)[static_cast<size_t>(i / (end * row) * c.tokens * row + i % (end * row))] += got.at(i);
      }
    }
    const std::string where = str(c.packed(), documents.empty() ? "" : " documents", " window ", window);
    const double bound = 4 * epsilon(kBF16);
    EXPECT_LT(scaled_error(g.out.back(), values(want.out)), bound) << where;
    EXPECT_LT(scaled_error(g.lse.back(), values(want.lse)), 1e-5) << where;
    const Array gradients = g.dqkv.back();
    EXPECT_LT(scaled_error(c.heads_of(gradients).q, values(wanted.q)), 2 * bound) << where;
    EXPECT_LT(scaled_error(Array::of(kF64, wanted.k.shape, dk_sum), values(wanted.k)), 2 * bound) << where;
    EXPECT_LT(scaled_error(Array::of(kF64, wanted.v.shape, dv_sum), values(wanted.v)), 2 * bound) << where;
  }
}

// Rows whose scores are all far below zero: exp(x - lse) is infinite from lse = -89 down where a kernel treats hidden scores as 0, or
// reads rows past the last query (https://github.com/NVIDIA/cudnn-frontend/issues/1072): also with queries that fill no tile of 128.
TEST(CudnnAttention, FarNegativeScoresGiveFiniteGradients) {
  SHEAF_NEEDS_CUDNN();
  constexpr AttentionCase kTiles[] = {
      {1, 128, 2, 2, 64}, {2, 384, 4, 2, 128}, {1, 256, 2, 1, 64}, {1, 128, 2, 2, 192, 128}, {1, 384, 2, 2, 192, 128}};
  for (const AttentionCase& c : kTiles)
    for (bool deterministic : {true, false}) {
      AttentionData data(c, kBF16);
      const Array noise = Array::random(kBF16, c.packed(), 1, 0.1);
      data.qkv.fill([&](int64_t i) {  // a score of -120 by the first elements
        const int64_t at = i % c.packed()[2], head = at / c.width;
        if (at % c.width != 0 || head >= c.heads + c.groups) return noise.at(i);
        return head < c.heads ? 1.0 : -120 / data.scale;
      });
      const ExpectedAttention want(data);
      const AttentionOnGpu g(data);
      Attention a = backward_of(g, data.scale);
      a.deterministic = deterministic;
      ASSERT_EQ(cuda::cudnn::refusal(a), "");
      run(forward_of(g, data.scale));
      EXPECT_LT(scaled_error(g.lse.back(), values(want.lse)), 1e-3) << c.tokens;
      EXPECT_LT(scaled_error(g.out.back(), values(want.out)), 8 * epsilon(kBF16)) << c.tokens;
      const auto expect_finite = [&](int64_t queries) {
        const std::vector<double> got = values(g.dqkv.back());
        EXPECT_TRUE(std::ranges::all_of(got, [](double x) { return std::isfinite(x); }))
            << queries << " of " << c.tokens << (deterministic ? "" : ", adding");
      };
      run(a);
      expect_finite(c.tokens);
      // The last queries alone, as a part of a context; not in half a block, which would have others of scores that nothing hides.
      const auto of_last = [&](int64_t queries) {
        const auto last = [&](const View& x, int dim = 1) { return rows_of(x, dim, c.tokens - queries, c.tokens); };
        Attention part = a;
        part.q = last(a.q), part.out = last(a.out), part.dout = last(a.dout), part.dq = last(a.dq), part.lse = last(a.lse, 2);
        return part;
      };
      EXPECT_EQ(cuda::cudnn::refusal(of_last(64)), "backward for whole blocks of 128 tokens only, not for 64");
      ASSERT_EQ(cuda::cudnn::refusal(of_last(128)), "");
      run(of_last(128));
      expect_finite(128);
    }
}

TEST(CudnnAttention, PartsKeepToAWorkspace) {
  SHEAF_NEEDS_CUDNN();
  // The gradients of a head's scores take 128 KiB, a sequence's 512. Each sequence has its own documents.
  const AttentionData data({3, 256, 4, 2, 24, 16}, kBF16, {100, 20, 70});
  const ExpectedAttention want(data);
  const AttentionOnGpu g(data);
  Attention a = backward_of(g, data.scale);
  ASSERT_EQ(cuda::cudnn::refusal(a), "");
  run(forward_of(g, data.scale));
  const struct {
    int64_t kib;
    size_t parts;
  } kCuts[] = {{1536, 1}, {1535, 3}, {512, 3}, {511, 6}, {1, 6}};
  for (const auto& [kib, parts] : kCuts) {
    a.most_workspace = kib << 10;
    EXPECT_EQ(cuda::cudnn::parts_of(a).size(), parts) << kib;
    ASSERT_EQ(cuda::cudnn::refusal(a), "") << kib;
    kernels::cuda::fill_bytes(OnGpu::stream(), g.dqkv.view().data, 0xff, data.dqkv.bytes());
    run(a);
    EXPECT_LT(scaled_error(g.dqkv.back(), values(want.dqkv)), 8 * epsilon(kBF16)) << kib;
  }
  a.most_workspace = 1;
  EXPECT_EQ(cuda::cudnn::parts_of(forward_of(g, 1)).size(), 1u);
  a.deterministic = false;
  EXPECT_EQ(cuda::cudnn::parts_of(a).size(), 1u);
}

TEST(CudnnAttention, PlansAreMadeBeforeACapture) {
  SHEAF_NEEDS_CUDNN();
  if constexpr (kHasCuda) {
    RankContext context;
    context.gpu = cuda::make_gpu(0);
    const RankScope scope(context);
    const AttentionData data({1, 128, 5, 5, 16}, kBF16);  // a shape that no other test here has
    const AttentionOnGpu g(data);
    const Attention forward = forward_of(g, data.scale), backward = backward_of(g, data.scale);
    ASSERT_EQ(cuda::cudnn::refusal(forward), "");
    {
      const GpuCapture capture(*context.gpu);
      cuda::cudnn::attention_workspace(forward);
      for (const auto& ask : {+[](const Attention& a) { cuda::cudnn::refusal(a); },
                              +[](const Attention& a) { cuda::cudnn::attention_workspace(a); }})
        try {
          ask(backward);
          ADD_FAILURE() << "a plan was made";
        } catch (const CudaError& e) {
          EXPECT_STREQ(e.what(),
                       "[attention] cuDNN, backward, queries [1,128,5,16], keys [1,128,5,16], "
                       "values [1,128,5,16] of bf16: there is no plan for these yet, and none is compiled while a "
                       "graph is captured; compute it once before");
        }
    }
    EXPECT_EQ(cuda::cudnn::refusal(backward), "");
    const GpuCapture capture(*context.gpu);
    EXPECT_GT(cuda::cudnn::attention_workspace(backward), 0u);
  }
}

TEST(CudnnAttention, RefusesWhatItWasNotTriedFor) {
  if constexpr (!kHasCuda) {
    GTEST_SKIP() << "not run: built without CUDA";
  } else {
    const AttentionData data({2, 128, 4, 2, 64}, kBF16);
    const PackedHeads x = data.sizes.heads_of(data.qkv), d = data.sizes.heads_of(data.dqkv);
    const Attention good{.q = x.q, .k = x.k, .v = x.v, .out = data.out, .lse = data.lse};
    using cuda::cudnn::layout_refusal;
    EXPECT_EQ(layout_refusal(good), "");
    const auto refuses = [&](const char* word, auto change) {
      Attention a = good;
      change(a);
      EXPECT_NE(layout_refusal(a).find(word), std::string::npos)
          << word << ": " << layout_refusal(a);
    };
    refuses("not f32", [](Attention& a) { a.q.dtype = kF32; });
    refuses("one type", [](Attention& a) { a.v.dtype = kF16; });
    refuses("causal", [](Attention& a) { a.causal = false; });
    refuses("without a softcap", [](Attention& a) { a.softcap = 50; });
    refuses("last dense", [](Attention& a) { a.k.strides[3] = 2; });
    refuses("last dense", [](Attention& a) { a.k.strides[1] += 4; });
    refuses("last dense", [](Attention& a) { a.k.strides[2] = 0; });
    refuses("last dense", [](Attention& a) { a.k.data = a.k.as<char>() + 2; });
    refuses("one type", [](Attention& a) { a.dout = Array(kBF16, {2, 128, 4, 64}).view(); });
    refuses("fit together", [](Attention& a) { a.k.shape[2] = a.v.shape[2] = 3; });
    refuses("fit together", [](Attention& a) { a.v.shape[1] = 64; });
    refuses("fit together", [](Attention& a) { a.v.shape[3] = 32; });
    refuses("fit together", [](Attention& a) { a.out.shape[3] = 32; });
    refuses("fit together", [](Attention& a) { a.k.shape[3] = 32; });
    refuses("as many keys", [](Attention& a) { a.k.shape[1] = a.v.shape[1] = 64; });
    refuses("not for 200", [](Attention& a) { a.k.shape[1] = a.v.shape[1] = 200; });
    Attention more_keys = good;
    more_keys.k.shape[1] = more_keys.v.shape[1] = 192;
    EXPECT_EQ(layout_refusal(more_keys), "");
    EXPECT_NE(cuda::cudnn::plan_key(more_keys), cuda::cudnn::plan_key(good));
    refuses("nothing",
            [](Attention& a) { a.q.shape[0] = a.k.shape[0] = a.v.shape[0] = a.out.shape[0] = 0; });
    refuses("nothing", [](Attention& a) { a.v.shape[3] = a.out.shape[3] = 0; });
    refuses("not for 96",
            [](Attention& a) { a.q.shape[1] = a.k.shape[1] = a.v.shape[1] = a.out.shape[1] = 96; });
    const auto of_widths = [&](int64_t width, int64_t of_values) {
      Attention a = good;
      a.q.shape[3] = a.k.shape[3] = width, a.v.shape[3] = a.out.shape[3] = of_values;
      return layout_refusal(a);
    };
    for (const auto& [d, e] : {std::pair{60, 60}, {64, 60}, {60, 64}, {136, 136}, {192, 192}, {192, 120}, {128, 192}, {184, 128}})
      EXPECT_EQ(of_widths(d, e), str("heads of 8, 16, .., 128 elements, or of 192 with values of 128, not of ", d,
                                     " with values of ", e));
    for (const auto& [d, e] : {std::pair{192, 128}, {8, 128}, {128, 8}}) EXPECT_EQ(of_widths(d, e), "");
    Array begins(kI32, {2, 128}), wide(kI32, {2, 129});
    const auto with = [&](View v) { return [v](Attention& a) { a.begins = v; }; };
    Attention documents = good;
    documents.begins = begins;
    EXPECT_EQ(layout_refusal(documents), "");
    refuses("i32[B, T]", with(Array(kF32, {2, 128})));
    refuses("i32[B, T]", with(Array(kI32, {1, 128})));
    View rows = wide.view();
    rows.shape[1] = 128;
    refuses("i32[B, T]", with(rows));
    refuses("lse", [](Attention& a) { a.lse.dtype = kF64; });
    refuses("lse", [](Attention& a) { a.lse.strides[2] = 2; });
    refuses("lse", [](Attention& a) { a.lse.strides[1] = 130; });
    refuses("lse", [](Attention& a) { a.lse.data = a.lse.as<char>() + 4; });
    Attention of_longer = good;
    of_longer.lse.strides = {4 * 256, 256, 1};
    EXPECT_EQ(layout_refusal(of_longer), "");
    EXPECT_NE(cuda::cudnn::plan_key(of_longer), cuda::cudnn::plan_key(good));
    Attention backward = good;
    backward.dout = data.dout, backward.dq = d.q, backward.dk = d.k, backward.dv = d.v;
    EXPECT_EQ(layout_refusal(backward), "");
    for (View Attention::*gradient : {&Attention::dout, &Attention::dq, &Attention::dk, &Attention::dv}) {
      Attention other = backward;
      (other.*gradient).shape[3] = 32;
      EXPECT_NE(layout_refusal(other).find("fit together"), std::string::npos);
    }
    backward.dk.shape[2] = 4;
    EXPECT_NE(layout_refusal(backward), "");

    // Values of half as many elements, interleaved as before.
    Attention narrow = good;
    narrow.v.shape[3] = narrow.out.shape[3] = 32;
    EXPECT_NE(cuda::cudnn::plan_key(narrow), cuda::cudnn::plan_key(good));
  }
}

}  // namespace
}  // namespace sheaf::kernels
