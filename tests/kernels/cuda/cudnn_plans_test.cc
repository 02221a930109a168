#include <fstream>
#include <iterator>

#include <dlfcn.h>
#include <gtest/gtest.h>

#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"
#include "sheaf/kernels/cuda/runtime.h"

// cuDNN is asked to plan our attention for an H200. It compiles the kernels on the CPU, so this needs no GPU and says nothing about their
// results: cudnn_attention_test covers those, on a GPU.
namespace sheaf::kernels::cuda::cudnn {
namespace {

constexpr const char* kFolder = "tests/kernels/cuda/";

std::string h200() {
  std::ifstream file(std::string(kFolder) + "h200.json");
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Case {
  int64_t batch, tokens, heads, groups, width;
};

Attention attention_of(const View& q, const View& k, const View& v, bool backward) {
  const int64_t batch = q.shape[0], tokens = q.shape[1], heads = q.shape[2];
  const View rows = View::dense(nullptr, q.dtype, {batch, tokens, heads, v.shape[3]});
  Attention a{.q = q,
              .k = k,
              .v = v,
              .out = rows,
              .lse = View::dense(nullptr, kF32, {batch, heads, tokens})};
  if (backward) a.dout = rows, a.dq = q, a.dk = k, a.dv = v;
  return a;
}

/// The operands that the op of a packed projection [B, T, (H + 2 G) D] passes: its heads, and those of its gradient.
Attention attention_of(const Case& c, DType dtype, bool backward) {
  const View packed = View::dense(nullptr, dtype,
                                  {c.batch, c.tokens, (c.heads + 2 * c.groups) * c.width});
  const PackedHeads x(packed, c.heads, c.groups, c.width);
  return attention_of(x.q, x.k, x.v, backward);
}

/// The same with dense operands and values of another width.
Attention attention_of(const Case& c, int64_t value_width, DType dtype, bool backward) {
  const auto dense = [&](int64_t heads, int64_t width) {
    return View::dense(nullptr, dtype, {c.batch, c.tokens, heads, width});
  };
  return attention_of(dense(c.heads, c.width), dense(c.groups, c.width), dense(c.groups, value_width), backward);
}

constexpr bool kRealCuda = kHasCuda && !SHEAF_CUDA_EMULATED;

class CudnnPlans : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kRealCuda) GTEST_SKIP() << "not run: built without CUDA";
    // From now on every lookup of the driver finds this one.
    ASSERT_TRUE(dlopen((std::string(kFolder) + "libcuda.so.1").c_str(), RTLD_NOW | RTLD_GLOBAL))
        << dlerror();
    ASSERT_FALSE(h200().empty());
    int64_t workspace = 0;
    if constexpr (kRealCuda)
      if (refusal_on("", attention_of({1, 64, 1, 1, 64}, kBF16, false), &workspace) ==
          "built without cuDNN 9.8 or later")
        GTEST_SKIP() << "not run: built without cuDNN 9.8 or later";
  }
};

/// A step is planned on machines without a GPU, too. First test, while nothing has looked for a driver yet.
TEST(CudnnHere, WithoutAGpuIsARefusal) {
  if constexpr (kRealCuda) {
    if (device_count() > 0) GTEST_SKIP() << "not run: there is a GPU";
    EXPECT_NE(refusal(attention_of({1, 64, 1, 1, 64}, kBF16, false)), "");
  }
}

TEST_F(CudnnPlans, GptAndGroupedQueryShapesAreTaken) {
  if constexpr (kRealCuda)
    for (const Case& c : {Case{8, 1024, 12, 12, 64}, Case{4, 1024, 25, 25, 64},
                          Case{1, 2048, 32, 8, 128}, Case{2, 256, 6, 6, 64}})
      for (DType dtype : {kBF16, kF16})
        for (bool backward : {false, true})
          for (bool deterministic : {true, false}) {
            if (!backward && !deterministic) continue;
            if (dtype == kF16 && c.batch != 8) continue;  // each takes a second
            Attention a = attention_of(c, dtype, backward);
            a.deterministic = deterministic;
            int64_t workspace = -1;
            EXPECT_EQ(refusal_on(h200(), a, &workspace), "")
                << c.heads << '/' << c.groups << ' ' << name(dtype) << ' ' << backward;
            RecordProperty(str(c.heads, '_', c.groups, '_', name(dtype), '_',
                               !backward       ? "forward"
                               : deterministic ? "backward"
                                               : "backward_adding"),
                           str(workspace));
            EXPECT_GE(workspace, backward ? a.lse.bytes() : 0);
          }
}

TEST_F(CudnnPlans, DocumentsAreTaken) {
  if constexpr (kRealCuda)
    for (const Case& c : {Case{8, 1024, 12, 12, 64}, Case{1, 2048, 32, 8, 128}})
      for (bool backward : {false, true}) {
        Attention a = attention_of(c, kBF16, backward);
        int64_t of_one = -1, workspace = -1;
        EXPECT_EQ(refusal_on(h200(), a, &of_one), "");
        a.begins = View::dense(nullptr, kI32, {c.batch, c.tokens});
        EXPECT_EQ(refusal_on(h200(), a, &workspace), "") << c.heads << ' ' << backward;
        EXPECT_EQ(workspace, of_one);
      }
}

// Alone and with documents; the width of windows is not part of the plan.
TEST_F(CudnnPlans, WindowsAreTaken) {
  if constexpr (kRealCuda)
    for (const Case& c : {Case{8, 1024, 12, 12, 64}, Case{1, 2048, 32, 8, 128}})
      for (bool backward : {false, true}) {
        Attention a = attention_of(c, kBF16, backward);
        int64_t of_all = -1, workspace = -1;
        EXPECT_EQ(refusal_on(h200(), a, &of_all), "");
        a.window = 256;
        EXPECT_EQ(refusal_on(h200(), a, &workspace), "") << c.heads << ' ' << backward;
        EXPECT_EQ(workspace, of_all);
        const std::vector<int64_t> key = plan_key(a);
        a.window = 7;
        EXPECT_EQ(plan_key(a), key);
        a.window = 0;
        EXPECT_NE(plan_key(a), key);
        a.window = 256, a.begins = View::dense(nullptr, kI32, {c.batch, c.tokens});
        EXPECT_EQ(refusal_on(h200(), a, &workspace), "") << c.heads << ' ' << backward;
        EXPECT_EQ(workspace, of_all);
      }
}

// DeepSeek-V3's, also with documents and a window, and those of small models: values narrower and wider than keys.
TEST_F(CudnnPlans, ValuesOfAnotherWidthAreTaken) {
  if constexpr (kRealCuda) {
    const auto workspace_of = [](const Attention& a) {
      int64_t workspace = -1;
      const std::string where = str(a.q.shape, " values ", a.v.shape, a.dout.rank() ? " backward" : "",
                                    a.deterministic ? "" : ", adding", a.window ? ", a window" : "");
      EXPECT_EQ(refusal_on(h200(), a, &workspace), "") << where;
      RecordProperty(where, str(workspace));
      return workspace;
    };
    const Case latent{1, 2048, 16, 16, 192};
    workspace_of(attention_of(latent, 128, kBF16, false));
    for (Attention a : {attention_of(latent, 128, kBF16, false), attention_of(latent, 128, kBF16, true)}) {
      a.window = 100, a.begins = View::dense(nullptr, kI32, {1, 2048});
      workspace_of(a);
    }
    Attention adding = attention_of(latent, 128, kBF16, true);
    adding.deterministic = false;
    workspace_of(adding);
    for (const auto& [c, value_width, dtype] : {std::tuple{latent, 128, kBF16}, {Case{2, 384, 4, 2, 192}, 128, kF16},
                                                {Case{2, 256, 8, 2, 24}, 16, kBF16}, {Case{2, 256, 6, 3, 40}, 96, kBF16}}) {
      const int64_t rows = c.batch * c.heads * c.tokens, scores = 2 * rows * ((c.tokens + 127) / 128 * 128),
                    of_heads = c.heads == c.groups ? 0 : 2 * rows * (c.width + value_width);
      const int64_t workspace = workspace_of(attention_of(c, value_width, dtype, true));
      EXPECT_GE(workspace, scores + of_heads);
      EXPECT_LE(workspace, (scores + of_heads) * 9 / 8);
    }
  }
}

/// Queries of an interval, in packed projections, and gathered keys and values; lse is part of a longer one.
Attention part_of(const Case& c, int64_t keys, bool backward) {
  Attention a = attention_of(c, kBF16, backward);
  a.k = a.v = View::dense(nullptr, kBF16, {c.batch, keys, c.groups, c.width});
  if (backward) a.dk = a.dv = a.k;
  a.lse.strides = {c.heads * 2 * c.tokens, 2 * c.tokens, 1};
  return a;
}

TEST_F(CudnnPlans, PartsOfAContextAreTaken) {
  if constexpr (kRealCuda)
    for (const Case& c : {Case{1, 512, 8, 8, 64}, Case{2, 512, 8, 2, 128}})
      for (const bool backward : {false, true}) {
        const Attention whole = attention_of(c, kBF16, backward);
        for (const auto& [keys, documents, window] : {std::tuple{1024, false, 0}, {1024, true, 0}, {1024, false, 256},
                                                      {4096, false, 0}, {4096, true, 256}}) {
          Attention a = part_of(c, keys, backward);
          if (documents) a.begins = View::dense(nullptr, kI32, {c.batch, c.tokens});
          a.window = window;
          const std::string where = str(c.heads, '/', c.groups, " keys ", keys, backward ? " backward" : "",
                                        documents ? " documents" : "", window ? " window" : "");
          int64_t workspace = -1;
          EXPECT_EQ(refusal_on(h200(), a, &workspace), "") << where;
          RecordProperty(where, str(workspace));
          if (!backward || keys > 1024 || documents || window) continue;
          int64_t without = -1;  // of lse that need not be copied
          a.lse = View::dense(nullptr, kF32, a.lse.shape);
          EXPECT_EQ(refusal_on(h200(), a, &without), "");
          EXPECT_EQ(workspace, without + static_cast<int64_t>(a.lse.bytes())) << where;
        }
        Attention other = whole;
        other.lse.strides = part_of(c, 1024, backward).lse.strides;
        EXPECT_NE(plan_key(other), plan_key(whole));
        EXPECT_NE(plan_key(part_of(c, 1024, backward)), plan_key(part_of(c, 4096, backward)));
      }
}

TEST_F(CudnnPlans, ManyTokensKeepToTheWorkspace) {
  if constexpr (kRealCuda)
    for (const Attention& a : {attention_of({1, 8192, 32, 8, 128}, kBF16, true), attention_of({64, 1024, 12, 12, 64}, kBF16, true),
                               attention_of({16, 2048, 16, 16, 32}, kBF16, true), attention_of({16, 2048, 16, 16, 96}, kBF16, true),
                               attention_of({1, 8192, 128, 128, 192}, 128, kBF16, true)}) {
      EXPECT_GT(parts_of(a).size(), 1u);
      int64_t workspace = -1;
      EXPECT_EQ(refusal_on(h200(), a, &workspace), "") << a.q.shape.to_string();
      RecordProperty(a.q.shape.to_string(), str(workspace));
      EXPECT_LE(workspace, a.most_workspace + (64 << 20)) << a.q.shape.to_string();
      EXPECT_GE(workspace, a.most_workspace / 2) << "more parts than need be";
    }
}

TEST_F(CudnnPlans, ARefusalHasWords) {
  if constexpr (kRealCuda) {
    int64_t workspace = -1;
    const Attention a = attention_of({2, 128, 4, 4, 64}, kBF16, false);
    EXPECT_NE(refusal_on("{}", a, &workspace), "");
    EXPECT_EQ(workspace, -1);
  }
}

}  // namespace
}  // namespace sheaf::kernels::cuda::cudnn
