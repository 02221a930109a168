#include <cstdlib>

#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"
#include "sheaf/tests/kernels/cuda/attention_data.h"

// cuDNN computes what it supports, our own kernels the rest; on the emulated GPU the CPU's kernel replaces cuDNN, so that the choice shows
// in the counter and in the bits.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Results {
  Array out, lse, dqkv;
  int64_t by_cudnn;  ///< of two calls
};

/// Forward and backward; the workspace is queried without memory, and `less` bytes less are given.
Results run(const AttentionData& data, bool causal = true, size_t less = 0) {
  const AttentionOnGpu g(data);
  const AttentionMask mask(causal, g.mask.begins, data.window),
      asked(causal, data.apart ? without_data(g.begins) : View(), data.window);
  const auto blank = [](const View& x) { return without_data(x); };
  const auto scratch = [&](size_t bytes) { return GpuScratch(bytes > less ? bytes - less : 0); };
  const int64_t before = cuda::cudnn::attention_calls();
  cuda::attention(OnGpu::stream(), g.x.q, g.x.k, g.x.v, mask, data.scale, g.out, g.lse,
                  scratch(cuda::attention_workspace(blank(g.x.q), blank(g.x.k), blank(g.x.v),
                                                    asked, blank(g.out), blank(g.lse))));
  cuda::attention_backward(OnGpu::stream(), g.x.q, g.x.k, g.x.v, g.out, g.lse, g.dout, mask,
                           data.scale, g.d.q, g.d.k, g.d.v,
                           scratch(cuda::attention_backward_workspace(
                               blank(g.x.q), blank(g.x.k), blank(g.x.v), blank(g.out), blank(g.lse),
                               blank(g.dout), asked, blank(g.d.q), blank(g.d.k), blank(g.d.v))));
  return {g.out.back(), g.lse.back(), g.dqkv.back(), cuda::cudnn::attention_calls() - before};
}

/// By our own kernels.
Results run_blocked(const AttentionData& data, bool causal = true) {
  const AttentionOnGpu g(data);
  const AttentionMask mask(causal, g.mask.begins, data.window);
  cuda::blocked::attention(OnGpu::stream(), g.x.q, g.x.k, g.x.v, mask, data.scale, g.out, g.lse);
  cuda::blocked::attention_backward(OnGpu::stream(), g.x.q, g.x.k, g.x.v, g.out, g.lse, g.dout,
                                    mask, data.scale, g.d.q, g.d.k, g.d.v,
                                    GpuScratch(cuda::blocked::attention_backward_workspace(g.x.q)));
  return {g.out.back(), g.lse.back(), g.dqkv.back(), 0};
}

bool same(const Results& a, const Results& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dqkv, b.dqkv);
}

const AttentionCase kGpt{2, 128, 3, 3, 64}, kGrouped{1, 256, 4, 2, 128}, kLatent{1, 128, 2, 2, 192, 128},
    kWideValues{1, 128, 4, 2, 40, 96};

#define SHEAF_NEEDS_CUDNN()                                            \
  SHEAF_NEEDS_GPU();                                                   \
  if (!emulated_cuda() && run({{1, 128, 1, 1, 64}, kBF16}).by_cudnn == 0) \
  GTEST_SKIP() << "not run: cuDNN takes nothing here"

TEST(AttentionChoice, CudnnComputesWhatItTakes) {
  SHEAF_NEEDS_CUDNN();
  for (const AttentionCase& c : {kGpt, kGrouped, kLatent, kWideValues})
    for (DType d : {kBF16, kF16})
      for (const auto& [documents, window] : {std::pair{std::vector<int64_t>{}, 0}, {{50}, 0}, {{}, 70}, {{50}, 30}}) {
        const AttentionData data(c, d, documents, window);
        const ExpectedAttention want(data);
        const Results got = run(data);
        const std::string where = str(d, c.width, '/', c.of_values(), documents.empty() ? "" : ", documents", ", window ", window);
        EXPECT_EQ(got.by_cudnn, 2) << where;
        EXPECT_LT(scaled_error(got.out, values(want.out)), 4 * epsilon(d)) << where;
        EXPECT_LT(scaled_error(got.lse, values(want.lse)), 1e-5) << where;
        EXPECT_LT(scaled_error(got.dqkv, values(want.dqkv)), 8 * epsilon(d)) << where;
      }
}

TEST(AttentionChoice, OurOwnKernelsComputeTheRest) {
  SHEAF_NEEDS_GPU();
  const auto is_ours = [](const AttentionData& data, bool causal, const char* what) {
    const Results got = run(data, causal);
    EXPECT_EQ(got.by_cudnn, 0) << what;
    EXPECT_TRUE(same(got, run_blocked(data, causal))) << what;
  };
  is_ours({kGpt, kF32}, true, "f32");
  is_ours({kGpt, kF64}, true, "f64");
  is_ours({kGpt, kBF16}, false, "without a mask");
  is_ours({{2, 100, 3, 3, 64}, kBF16}, true, "100 tokens");
  is_ours({{2, 100, 3, 3, 64}, kBF16, {50}}, true, "100 tokens of documents");
  is_ours({{2, 100, 3, 3, 64}, kBF16, {}, 30}, true, "100 tokens with a window");
  is_ours({{1, 64, 2, 1, 160}, kBF16}, true, "wide heads");
  is_ours({{1, 64, 2, 1, 192, 64}, kBF16}, true, "wide heads, narrow values");
  is_ours({{1, 64, 2, 1, 64, 160}, kBF16}, true, "wide values");
  is_ours({kLatent, kF32}, true, "f32, values of another width");
  is_ours({{1, 64, 3, 3, 20}, kBF16}, true, "rows not at 16 bytes");
}

// Its bits are the same as the others': the workspace shows which one ran.
TEST(AttentionChoice, FewQueriesHaveAKernelOfTheirOwn) {
  SHEAF_NEEDS_GPU();
  const auto workspace = [](DType d, int64_t queries, int64_t keys) {
    const auto heads = [&](int64_t tokens, int64_t count) { return View::dense(nullptr, d, {1, tokens, count, 64}); };
    const View q = heads(queries, 4), k = heads(keys, 2);
    return cuda::attention_workspace(q, k, k, true, q, View::dense(nullptr, d == kF64 ? kF64 : kF32, {1, 4, queries}));
  };
  for (const DType d : {kF32, kBF16, kF16}) {
    EXPECT_EQ(workspace(d, 16, 1000), size_t{4 * 16 * 4 * (64 + 2) * 4}) << name(d);
    EXPECT_EQ(workspace(d, 17, 1000), 0u) << name(d);
  }
  EXPECT_EQ(workspace(kF64, 1, 1000), 0u);
  for (const DType d : {kF32, kBF16, kF64}) {
    const AttentionData few({1, 16, 4, 2, 64}, d);
    EXPECT_TRUE(same(run(few), run_blocked(few))) << name(d);
  }
}

TEST(AttentionChoice, OursRunWhereTheWorkspaceIsTooSmall) {
  SHEAF_NEEDS_CUDNN();
  const AttentionData data(kGpt, kBF16);
  const AttentionOnGpu g(data);
  // Our kernels need no workspace forward, and the stated size backward.
  const size_t wants = cuda::attention_backward_workspace(g.x.q, g.x.k, g.x.v, g.out, g.lse, g.dout,
                                                          true, g.d.q, g.d.k, g.d.v),
               ours = cuda::blocked::attention_backward_workspace(g.x.q);
  ASSERT_GT(wants, ours);
  const Results got = run(data, true, wants - ours);
  EXPECT_EQ(got.by_cudnn, cuda::attention_workspace(g.x.q, g.x.k, g.x.v, true, g.out, g.lse) == 0);
  EXPECT_LT(scaled_error(got.dqkv, values(run_blocked(data).dqkv)), 8 * epsilon(kBF16));
}

TEST(AttentionChoice, OursRunWhereMemoryIsNotAligned) {
  SHEAF_NEEDS_CUDNN();
  // The same values two elements further: a view without memory does not show the misalignment, so the workspace was queried as if cuDNN
  // took them. In emulation cuDNN wants less workspace than our own kernels.
  const AttentionData data({3, 256, 4, 4, 32}, kBF16);
  Array wide(kBF16, {data.qkv.view().numel() + 2});
  wide.fill([&](int64_t i) { return i < 2 ? 0.0 : data.qkv.at(i - 2); });
  const OnGpu memory(wide);
  const AttentionOnGpu g(data);
  View packed = data.qkv.view();
  packed.data = memory.view().as<char>() + 4;
  const PackedHeads x = data.sizes.heads_of(packed);
  const View q = without_data(x.q), k = without_data(x.k), v = without_data(x.v);
  const GpuScratch scratch(cuda::attention_workspace(q, k, v, true, g.out, g.lse)),
      backward_scratch(cuda::attention_backward_workspace(q, k, v, g.out, g.lse, g.dout, true,
                                                          g.d.q, g.d.k, g.d.v));
  const int64_t before = cuda::cudnn::attention_calls();
  cuda::attention(OnGpu::stream(), x.q, x.k, x.v, true, data.scale, g.out, g.lse, scratch);
  cuda::attention_backward(OnGpu::stream(), x.q, x.k, x.v, g.out, g.lse, g.dout, true, data.scale,
                           g.d.q, g.d.k, g.d.v, backward_scratch);
  EXPECT_EQ(cuda::cudnn::attention_calls(), before);
  EXPECT_TRUE(same({g.out.back(), g.lse.back(), g.dqkv.back(), 0}, run_blocked(data)));
}

TEST(AttentionChoice, TheEnvironmentSwitchesCudnnOff) {
  SHEAF_NEEDS_CUDNN();
  const AttentionData data(kGpt, kBF16);
  setenv("SHEAF_CUDNN_ATTENTION", "0", 1);
  const Results off = run(data);
  setenv("SHEAF_CUDNN_ATTENTION", "1", 1);
  const Results on = run(data);
  unsetenv("SHEAF_CUDNN_ATTENTION");
  EXPECT_EQ(off.by_cudnn, 0);
  EXPECT_TRUE(same(off, run_blocked(data)));
  EXPECT_EQ(on.by_cudnn, 2);
}

}  // namespace
}  // namespace sheaf::kernels
