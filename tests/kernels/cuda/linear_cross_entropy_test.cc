#include "sheaf/kernels/linear_cross_entropy.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernels in f64 on the same (rounded) operands.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

constexpr int64_t kIgnore = -100;

Array targets_of(DType d, const Shape& shape, int64_t vocabulary, Shape strides = {}) {
  Array t(d, shape, strides);
  t.fill([&](int64_t i) {
    const bool has_sign = d == kI64 || d == kI32;
    return has_sign && i % 5 == 3 ? static_cast<double>(kIgnore)
                                  : static_cast<double>((i * 31 + 4) % vocabulary);
  });
  return t;
}

struct Results {
  Array loss, lse, dx, dw;
};

/// Forward, then backward with `upstream` as the loss's gradient.
Results expected(const Array& x, const Array& w, const Array& targets, double upstream, HeadRules rules = kIgnore) {
  const Array wide_x = in_f64(x), wide_w = in_f64(w), dloss = Array::of(kF64, Shape{}, {upstream});
  Results r{Array(kF64, Shape{}), Array(kF64, targets.view().shape), Array(kF64, x.view().shape),
            Array(kF64, w.view().shape)};
  cpu::linear_cross_entropy(wide_x, wide_w, targets, rules, r.loss, r.lse,
                            Scratch(cpu::linear_cross_entropy_workspace(wide_x, wide_w)));
  cpu::linear_cross_entropy_backward(
      wide_x, wide_w, targets, rules, r.lse, dloss, r.dx, r.dw,
      Scratch(cpu::linear_cross_entropy_backward_workspace(wide_x, wide_w, r.dx, r.dw)));
  return r;
}

Results on_gpu(const Array& x, const Array& w, const Array& targets, double upstream,
               DType dw_dtype, HeadRules rules = kIgnore) {
  const DType stat = statistics_of(x.view().dtype);
  const Stream& s = OnGpu::stream();
  const OnGpu gx(x), gw(w), gt(targets), dloss(Array::of(stat, Shape{}, {upstream})),
      loss(Array(stat, Shape{})), lse(Array(stat, targets.view().shape)),
      dx(Array(x.view().dtype, x.view().shape)), dw(Array(dw_dtype, w.view().shape));
  cuda::linear_cross_entropy(
      s, gx, gw, gt, rules, loss, lse,
      GpuScratch(cuda::linear_cross_entropy_workspace(without_data(x), without_data(w))));
  cuda::linear_cross_entropy_backward(
      s, gx, gw, gt, rules, lse, dloss, dx, dw,
      GpuScratch(cuda::linear_cross_entropy_backward_workspace(
          without_data(x), without_data(w), without_data(dx.view()), without_data(dw.view()))));
  return {loss.back(), lse.back(), dx.back(), dw.back()};
}

Results fused_on_gpu(const Array& x, const Array& w, const Array& targets, DType dw_dtype,
                     double dloss = 1, HeadRules rules = kIgnore) {
  const DType stat = statistics_of(x.view().dtype);
  const OnGpu gx(x), gw(w), gt(targets), loss(Array(stat, Shape{})),
      dx(Array(x.view().dtype, x.view().shape)), dw(Array(dw_dtype, w.view().shape));
  cuda::linear_cross_entropy_fused(
      OnGpu::stream(), gx, gw, gt, rules, loss, dx, dw,
      GpuScratch(cuda::linear_cross_entropy_fused_workspace(
          without_data(x), without_data(w), without_data(dx.view()), without_data(dw.view()))),
      dloss);
  return {loss.back(), Array(), dx.back(), dw.back()};
}

TEST(CudaLinearCrossEntropy, ForwardAndBackward) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (auto [rows, vocabulary, width] : {std::array<int64_t, 3>{9, 13, 8},
                                           {40, 300, 33},
                                           {33, 1160, 16},
                                           {8300, 16, 8}}) {  // two chunks
      const Array x = Array::random(d, {rows, width}, 1),
                  w = Array::random(d, {vocabulary, width}, 2, 0.5),
                  targets = targets_of(kI32, {rows}, vocabulary);
      for (auto [dw_dtype, cap, z_loss] : {std::tuple{d, 0.0, 0.0}, {d, 1.5, 0.0}, {kF32, 0.0, 0.0}, {kF32, 1.5, 0.1}, {d, 0.0, 0.1}}) {
        if (d == kF64 && dw_dtype != d) continue;
        const HeadRules rules(kIgnore, cap, z_loss);
        const Results want = expected(x, w, targets, 0.5, rules), one = expected(x, w, targets, 1, rules);
        const std::string where = str(d, ' ', dw_dtype, ' ', rows, " softcap ", cap, " z ", z_loss);
        const double most = (z_loss != 0 && rows > 1000 ? 40 : 15) * epsilon(d);  // a product may add a chunk's rows sequentially
        const Results got = on_gpu(x, w, targets, 0.5, dw_dtype, rules);
        EXPECT_LT(scaled_error(got.loss, values(want.loss)), d == kF64 ? 1e-13 : 1e-6) << where;
        EXPECT_LT(scaled_error(got.lse, values(want.lse)), d == kF64 ? 1e-13 : 1e-6) << where;
        EXPECT_LT(scaled_error(got.dx, values(want.dx)), most) << where;
        EXPECT_LT(scaled_error(got.dw, values(want.dw)), most) << where;
        const Results fused = fused_on_gpu(x, w, targets, dw_dtype, 1, rules),
                      two = on_gpu(x, w, targets, 1, dw_dtype, rules);
        EXPECT_LT(scaled_error(fused.dx, values(one.dx)), most) << where;
        EXPECT_TRUE(same_bits(fused.loss, two.loss) && same_bits(fused.dx, two.dx) &&
                    same_bits(fused.dw, two.dw))
            << where;
        const double dloss = d == kF16 ? 250 : 256;  // otherwise the products multiply by it, which only powers of two may do later
        const Results large = fused_on_gpu(x, w, targets, dw_dtype, dloss, rules),
                      apart = on_gpu(x, w, targets, dloss, dw_dtype, rules);
        EXPECT_TRUE(same_bits(large.dx, apart.dx) && same_bits(large.dw, apart.dw)) << where;
      }
    }
}

// Rows of which shared memory holds half, and rows of which it holds too little even for a block with
// a multiprocessor to itself.
TEST(CudaLinearCrossEntropy, LongRows) {
  SHEAF_NEEDS_GPU();
  for (auto [d, vocabulary] :
       {std::pair<DType, int64_t>{kBF16, 50261}, {kBF16, 70003}, {kF32, 30002}, {kF64, 40001}}) {
    const Array x = Array::random(d, {3, 8}, 1), w = Array::random(d, {vocabulary, 8}, 2, 2.0),
                targets = targets_of(kI32, {3}, vocabulary);
    const Results want = expected(x, w, targets, 1), two = on_gpu(x, w, targets, 1, d),
                  fused = fused_on_gpu(x, w, targets, d);
    EXPECT_LT(scaled_error(fused.loss, values(want.loss)), d == kF64 ? 1e-13 : 1e-6) << name(d);
    // A product may add up the whole vocabulary sequentially.
    const double most = (statistics_of(d) == d ? 100 : 10) * epsilon(d);
    EXPECT_LT(scaled_error(fused.dx, values(want.dx)), most) << name(d);
    EXPECT_TRUE(same_bits(fused.loss, two.loss) && same_bits(fused.dx, two.dx) &&
                same_bits(fused.dw, two.dw))
        << name(d);
  }
}

TEST(CudaLinearCrossEntropy, StridesAndIndexTypes) {
  SHEAF_NEEDS_GPU();
  const int64_t vocabulary = 45, width = 24;
  const Array w = Array::random(kBF16, {vocabulary, width}, 2, 0.5, {40, 1});
  for (DType index : {kI64, kI32, kU16, kU8}) {
    // Such as all positions but the last of every sequence: rows and targets are not evenly spaced.
    const Array x = Array::random(kBF16, {3, 6, width}, 1, 1, {10 * width, width, 1});
    const Array targets = targets_of(index, {3, 6}, vocabulary, {7, 1});
    const Results want = expected(x, w, targets, 1);
    const Results got = on_gpu(x, w, targets, 1, kF32), fused = fused_on_gpu(x, w, targets, kF32);
    EXPECT_LT(scaled_error(got.loss, values(want.loss)), 1e-6);
    EXPECT_LT(scaled_error(got.dx, values(want.dx)), 0.05);
    EXPECT_LT(scaled_error(got.dw, values(want.dw)), 0.05);
    EXPECT_TRUE(same_bits(got.loss, fused.loss) && same_bits(got.dx, fused.dx) &&
                same_bits(got.dw, fused.dw));
  }
}

TEST(CudaLinearCrossEntropy, OneGradientAlone) {
  SHEAF_NEEDS_GPU();
  const Array x = Array::random(kF32, {30, 8}, 1), w = Array::random(kF32, {11, 8}, 2),
              targets = targets_of(kI64, {30}, 11), blank_x(kF32, {30, 8}, {13, 1}),
              blank_w(kF32, {11, 8}, {9, 1});
  const Results both = fused_on_gpu(x, w, targets, kF32);
  const OnGpu gx(x), gw(w), gt(targets), loss(Array(kF32, Shape{})), dx(blank_x), dw(blank_w);
  cuda::linear_cross_entropy_fused(
      OnGpu::stream(), gx, gw, gt, kIgnore, loss, dx, View{},
      GpuScratch(cuda::linear_cross_entropy_fused_workspace(x, w, dx, View{})));
  cuda::linear_cross_entropy_fused(
      OnGpu::stream(), gx, gw, gt, kIgnore, loss, View{}, dw,
      GpuScratch(cuda::linear_cross_entropy_fused_workspace(x, w, View{}, dw)));
  const Array got_dx = dx.back(), got_dw = dw.back();
  EXPECT_LT(scaled_error(got_dx, values(both.dx)), 1e-6);
  EXPECT_LT(scaled_error(got_dw, values(both.dw)), 1e-6);
  EXPECT_TRUE(gaps_kept(blank_x, got_dx) && gaps_kept(blank_w, got_dw));
}

TEST(CudaLinearCrossEntropy, NoRowsAndTargetsOutOfRange) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16}) {
    const Array w = Array::random(d, {16, 8}, 2);
    for (const Results& r : {on_gpu(Array(d, {0, 8}), w, Array(kI64, {0}), 1, d),
                             fused_on_gpu(Array(d, {0, 8}), w, Array(kI64, {0}), d)}) {
      EXPECT_EQ(r.loss.at(0), 0.0);
      EXPECT_EQ(values(r.dw), std::vector<double>(128, 0.0));
    }
    const Array x = Array::random(d, {4, 8}, 1),
                targets = Array::of(kI64, {4}, {3, 16, kIgnore, -1});
    const Results r = fused_on_gpu(x, w, targets, d);
    EXPECT_TRUE(std::isnan(r.loss.at(0)));
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_TRUE(std::isfinite(r.dx.at(i)));
      EXPECT_TRUE(std::isnan(r.dx.at(8 + i)) && std::isnan(r.dx.at(24 + i)));
      EXPECT_EQ(r.dx.at(16 + i), 0.0);
    }
  }
}

// Part of a vocabulary, the first, a middle one and an empty one; one gradient per row, strided; 8,300 rows make two chunks.
TEST(CudaLinearLse, PartsOfAVocabulary) {
  SHEAF_NEEDS_GPU();
  const int64_t all = 61, width = 16;
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (auto [first, n, rows] :
         {std::array<int64_t, 3>{0, 20, 40}, {20, 37, 40}, {57, 4, 8300}, {57, 0, 40}}) {
      const std::string where = str(d, ' ', first, ' ', rows);
      const TablePart part{first, all};
      const HeadRules rules(kIgnore, first == 20 ? 1.5 : 0);
      const DType stat = statistics_of(d);
      const Array x = Array::random(d, {rows, width}, 1), w = Array::random(d, {n, width}, 2),
                  targets = targets_of(kI32, {rows}, all),
                  dlse = Array::random(stat, {rows}, 3, 1, {2}),
                  dtarget = Array::random(stat, {rows}, 4), wide_x = in_f64(x), wide_w = in_f64(w);
      const Array want_lse(kF64, {rows}), want_logits(kF64, {rows}), want_dx(kF64, {rows, width}),
          want_dw(kF64, {n, width});
      cpu::linear_lse(wide_x, wide_w, part, targets, rules, want_lse, want_logits,
                      Scratch(cpu::linear_lse_workspace(wide_x, wide_w)));
      cpu::linear_lse_backward(
          wide_x, wide_w, part, targets, rules, want_lse, in_f64(dlse), in_f64(dtarget), want_dx,
          want_dw, Scratch(cpu::linear_lse_backward_workspace(wide_x, wide_w, want_dx, want_dw)));
      const Stream& s = OnGpu::stream();
      const OnGpu gx(x), gw(w), gt(targets), gdlse(dlse), gdtarget(dtarget),
          lse(Array(stat, {rows})), logits(Array(stat, {rows})), dx(Array(d, {rows, width})),
          dw(Array(stat, {n, width}));
      cuda::linear_lse(s, gx, gw, part, gt, rules, lse, logits,
                       GpuScratch(cuda::linear_lse_workspace(without_data(x), without_data(w))));
      cuda::linear_lse_backward(
          s, gx, gw, part, gt, rules, lse, gdlse, gdtarget, dx, dw,
          GpuScratch(cuda::linear_lse_backward_workspace(
              without_data(x), without_data(w), without_data(dx.view()), without_data(dw.view()))));
      const double most = 15 * epsilon(d);  // as above
      const Array got = lse.back();
      for (int64_t r = 0; r < rows; ++r) {
        if (std::isinf(want_lse.at(r)))
          EXPECT_EQ(got.at(r), want_lse.at(r)) << where;
        else
          EXPECT_NEAR(got.at(r), want_lse.at(r), d == kF64 ? 1e-13 : 1e-5) << where;
      }
      if (n == 0) {
        EXPECT_EQ(values(dx.back()), values(want_dx)) << where;
        continue;
      }
      EXPECT_LT(scaled_error(logits.back(), values(want_logits)), d == kF64 ? 1e-13 : 1e-6)
          << where;
      EXPECT_LT(scaled_error(dx.back(), values(want_dx)), most) << where;
      EXPECT_LT(scaled_error(dw.back(), values(want_dw)), most) << where;
    }
  const OnGpu x(Array(kF32, {3, 4})), w(Array(kF32, {3, 4})), t(Array::of(kI64, {3}, {-1, 11, 9})),
      lse(Array(kF32, {3})), logits(Array(kF32, {3}));
  cuda::linear_lse(OnGpu::stream(), x, w, {4, 11}, t, kIgnore, lse, logits,
                   GpuScratch(cuda::linear_lse_workspace(x, w)));
  const Array y = logits.back();
  EXPECT_TRUE(std::isnan(y.at(0)) && std::isnan(y.at(1)));
  EXPECT_EQ(y.at(2), 0.0);
}

TEST(CudaLinearCrossEntropy, ChunksAreBounded) {
  if constexpr (!kHasCuda) {
    GTEST_SKIP() << "not run: built without CUDA";
  } else {
    for (int64_t vocabulary : {1, 256, 50257, 50304, 128256, 1 << 20, 40'000'000}) {
      const int64_t rows = cuda::linear_cross_entropy_chunk(vocabulary);
      const int64_t bytes = (vocabulary + 7) / 8 * 8 * rows * 4;
      EXPECT_TRUE(rows >= 1 && rows <= 8192 && bytes <= int64_t{512} << 20) << vocabulary;
    }
    EXPECT_EQ(cuda::linear_cross_entropy_chunk(50304), 2560);
    EXPECT_EQ(cuda::linear_cross_entropy_chunk(128256), 1024);
  }
}

TEST(CudaLinearCrossEntropy, Refuses) {
  SHEAF_NEEDS_GPU();
  const Array x(kF32, {4, 8}), w(kF32, {16, 8}), t(kI64, {4});
  EXPECT_THROW(on_gpu(x, Array(kF32, {16, 9}), t, 1, kF32), ShapeError);
  EXPECT_THROW(on_gpu(x, w, Array(kI64, {5}), 1, kF32), ShapeError);
  EXPECT_THROW(on_gpu(x, w, Array(kF32, {4}), 1, kF32), DTypeError);
  EXPECT_THROW(on_gpu(x, Array(kF64, {16, 8}), t, 1, kF32), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels
