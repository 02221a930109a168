#include "sheaf/tests/kernels/attention_shards.h"

#include "sheaf/kernels/cuda/attention_blocked.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Our own kernels on the parts of a context against the whole context, which attention_test compares with the CPU's.
namespace sheaf::kernels::cuda {
namespace {

using namespace sheaf::testing;

const std::vector<int64_t> kDocuments{1, 64, 7, 60, 5};

void expect_parts(const ContextCase& c, const std::vector<int64_t>& borders) {
  expect_parts_are_the_whole<OnGpu>(c, borders, [](const AttentionOperands& a, const AttentionMask& mask) {
    blocked::attention(OnGpu::stream(), a.q, a.k, a.v, mask, 0.3, a.out, a.lse);
    blocked::attention_backward(OnGpu::stream(), a.q, a.k, a.v, a.out, a.lse, a.dout, mask, 0.3, a.dq, a.dk, a.dv,
                                GpuScratch(blocked::attention_backward_workspace(a.q)));
  });
}

// Intervals of no query, of one, within a tile, of whole tiles, over several; some parts end where documents do.
void expect_parts_of(const std::vector<int64_t>& documents, const std::vector<int64_t>& windows, bool causal = true) {
  for (const int64_t window : windows) {
    expect_parts({kF64, 2, 150, 2, 1, 12, 12, documents, window, causal}, {0, 64, 64, 150});
    expect_parts({kF32, 2, 150, 2, 2, 16, 24, documents, window, causal}, {0, 37, 40, 150});
    expect_parts({kBF16, 2, 150, 4, 2, 24, 8, documents, window, causal}, {0, 1, 65, 129, 150});
    expect_parts({kF16, 1, 150, 1, 1, 80, 80, documents, window, causal}, {0, 100, 150});
  }
}

TEST(CudaAttentionShards, HaveTheBitsOfTheWhole) {
  SHEAF_NEEDS_GPU();
  expect_parts_of({}, {0});
}

TEST(CudaAttentionShards, WindowsCrossTheirBorders) {
  SHEAF_NEEDS_GPU();
  expect_parts_of({}, {1, 20, 66});
}

TEST(CudaAttentionShards, DocumentsCrossTheirBorders) {
  SHEAF_NEEDS_GPU();
  expect_parts_of(kDocuments, {0});
}

TEST(CudaAttentionShards, DocumentsWithoutACausalMaskCrossTheirBorders) {
  SHEAF_NEEDS_GPU();
  expect_parts_of(kDocuments, {0}, false);
}

TEST(CudaAttentionShards, WindowsAndDocumentsCrossTheirBorders) {
  SHEAF_NEEDS_GPU();
  expect_parts_of(kDocuments, {20, 64});
}

// A GPU kernel cannot report them; nothing outside the operands is touched.
TEST(CudaAttentionShards, WhatIsNoBeginOfADocumentDoesNoHarm) {
  SHEAF_NEEDS_GPU();
  const auto array = [](int64_t tokens, int seed) { return OnGpu(Array::random(kF32, {1, tokens, 1, 8}, seed)); };
  const OnGpu q = array(70, 1), k = array(150, 2), v = array(150, 3), dout = array(70, 4), out = array(70, 5),
              dq = array(70, 6), dk = array(150, 7), dv = array(150, 8), lse(Array(kF32, {1, 1, 70}));
  for (const bool negative : {true, false}) {
    Array begins(kI32, {1, 70});
    begins.fill([&](int64_t t) { return negative ? -5.0 : static_cast<double>(1000 + t); });
    const OnGpu on(begins);
    Array of_keys(kI32, {1, 150});
    of_keys.fill([&](int64_t t) { return negative ? -5.0 : static_cast<double>(1000 + t); });
    const OnGpu on_keys(of_keys);
    AttentionMask both_ways(false, on);
    both_ways.key_begins = on_keys;
    for (const AttentionMask& mask : {AttentionMask(true, on), AttentionMask(true, on, 30), both_ways}) {
      blocked::attention(OnGpu::stream(), q, k, v, mask, 1, out, lse);
      blocked::attention_backward(OnGpu::stream(), q, k, v, out, lse, dout, mask, 1, dq, dk, dv,
                                  GpuScratch(blocked::attention_backward_workspace(q)));
    }
  }
}

}  // namespace
}  // namespace sheaf::kernels::cuda
