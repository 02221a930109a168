#include "sheaf/kernels/cuda/product.h"

#include "sheaf/kernels/cuda/gemm.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::kernels::cuda {
namespace {

using namespace sheaf::testing;

using Choice = ProductChoices::Choice;

ProductShape some_shape(int64_t m) {
  return {.in = kBF16,
          .out = kF32,
          .transpose_b = true,
          .accumulate = true,
          .alignment = {16, 8, 2, 16},
          .m = m,
          .n = 7,
          .k = 1000000000000,
          .batches = 3,
          .ld_a = 11,
          .ld_b = 12,
          .ld_d = 13,
          .stride_a = 14,
          .stride_d = 15};
}

TEST(Product, WhatAnEpilogueMovesByItself) {
  if constexpr (kHasCuda) {
    ProductShape s{.in = kBF16, .out = kF32, .m = 30, .n = 50, .k = 700};
    const auto bytes = [&](Epilogue e) {
      s.epilogue = e;
      return bytes_of_epilogue(s);
    };
    EXPECT_EQ(bytes(Epilogue::sums_of_a), 30 * 700 * 2);
    EXPECT_EQ(bytes(Epilogue::sums_of_b), 50 * 700 * 2);
    EXPECT_EQ(bytes(Epilogue::bias_gelu), 2 * 30 * 50 * 4);
    EXPECT_EQ(bytes(Epilogue::gelu_gradient), 3 * 30 * 50 * 4);
    EXPECT_EQ(bytes(Epilogue::bias), 0);
    for (Epilogue e : {Epilogue::sums_of_a, Epilogue::gelu, Epilogue::gelu_gradient})
      EXPECT_EQ(without_kernels(e), Epilogue::none);
    EXPECT_EQ(without_kernels(Epilogue::bias_gelu), Epilogue::bias);
    EXPECT_EQ(without_kernels(Epilogue::bias), Epilogue::bias);
  }
}

TEST(ProductChoices, TextAndBack) {
  if constexpr (kHasCuda) {
    EXPECT_EQ(ProductShape::parse(some_shape(5).to_string()), some_shape(5));
    for (Epilogue e : {Epilogue::bias, Epilogue::sums_of_a, Epilogue::sums_of_b, Epilogue::gelu,
                       Epilogue::bias_gelu, Epilogue::gelu_gradient}) {
      ProductShape shape = some_shape(5);
      shape.epilogue = e;
      EXPECT_EQ(ProductShape::parse(shape.to_string()), shape);
    }
    ProductChoices choices;
    choices.set(some_shape(5), {{1, 0x123456789abcdef0, 3, 4, 5, 6, 7, UINT64_MAX}, true, false});
    choices.set(some_shape(4), {{}, false, false});
    const std::string text = choices.text("a library");
    EXPECT_EQ(text,
              "sheaf products 1 a library\n"
              "bf16 f32 n t - add 16 8 2 16 4 7 1000000000000 3 11 12 13 14 0 15 : plain\n"
              "bf16 f32 n t - add 16 8 2 16 5 7 1000000000000 3 11 12 13 14 0 15 : "
              "0000000000000001123456789abcdef000000000000000030000000000000004"
              "000000000000000500000000000000060000000000000007ffffffffffffffff\n");
    ProductChoices other;
    EXPECT_EQ(other.read("another library", text), 0);
    EXPECT_EQ(other.text("a library"), "sheaf products 1 a library\n");
    EXPECT_EQ(other.read("a library", text), 2);
    EXPECT_EQ(other.text("a library"), text);
    ASSERT_TRUE(other.find(some_shape(5)));
    EXPECT_TRUE(other.find(some_shape(5))->timed);
    EXPECT_FALSE(other.find(some_shape(4))->supported);
    EXPECT_FALSE(other.find(some_shape(6)));
    // Damaged text is refused as a whole: truncated anywhere, or with any character removed or
    // replaced.
    for (size_t cut = 0; cut < text.size(); ++cut) {
      ProductChoices none;
      const std::string_view part = std::string_view(text).substr(0, cut);
      if (cut == 0 || part.back() != '\n') {
        EXPECT_THROW(none.read("a library", part), DataError) << cut;
      }
    }
    for (const char* line : {"", "x", "bf16 f32 n t - add 16 8 2 16 4 7 1 3 11 12 13 14 0 : plain",
                             "bf16 i32 n t - add 16 8 2 16 4 7 1 3 11 12 13 14 0 15 : plain",
                             "bf16 f32 n t - add 16 8 2 16 4 7 1 3 11 12 13 14 0 15 : fast",
                             "bf16 f32 n t - add 16 8 2 16 4 7 1 3 11 12 13 14 0 15",
                             "bf16 f32 n t - add 16 8 2 999 4 7 1 3 11 12 13 14 0 15 : plain"}) {
      ProductChoices none;
      EXPECT_THROW(none.read("a library", str("sheaf products 1 a library\n", line, '\n')),
                   DataError)
          << line;
      EXPECT_EQ(none.text("l"), "sheaf products 1 l\n");
    }
  } else {
    GTEST_SKIP() << "not run: built without CUDA";
  }
}

TEST(Product, TheLibrarysWorkspaceBeginsWhereItMust) {
  SHEAF_NEEDS_GPU();
  const Array a = Array::random(kF32, {16, 16}, 1), b = Array::random(kF32, {16, 16}, 2),
              c(kF32, {16, 16});
  const OnGpu ga(a), gb(b), gc(c);
  const Gemm g{"test", ga, gb, gc, {}};
  const size_t bytes = gemm_workspace(g);
  const GpuScratch scratch(bytes + kProductWorkspaceAlignment);
  for (const size_t at : {0, 16, 128, 256}) {
    const Workspace from{static_cast<char*>(Workspace(scratch).data) + at, bytes};
    if (at % kProductWorkspaceAlignment == 0)
      EXPECT_NO_THROW(gemm(OnGpu::stream(), g, from)) << at;
    else
      EXPECT_THROW(gemm(OnGpu::stream(), g, from), ShapeError) << at;
  }
  synchronize(OnGpu::stream());
}

TEST(Product, PlainKernelMultipliesWhatTheLibraryRefuses) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF64})
    for (int64_t batches : {1, 3})
      for (bool transpose_a : {false, true})
        for (bool transpose_b : {false, true}) {
          const int64_t m = 70, n = 33, k = 65;
          const DType to = d == kF64 ? kF64 : kF32;
          const Array a = Array::random(d, {batches, k, m}, 1, 1,
                                        transpose_a ? Shape{k * m, 1, k} : Shape{k * m, m, 1}),
                      b = Array::random(d, {batches, n, k}, 2, 1,
                                        transpose_b ? Shape{k * n, 1, n} : Shape{k * n, k, 1}),
                      c = Array::random(to, {batches, n, m}, 3), bias = Array::random(to, {m}, 4);
          for (bool with_bias : {false, true}) {
            const OnGpu ga(a), gb(b), gc(c), gbias(bias);
            Product p{.who = "test",
                      .shape = {.in = d,
                                .out = to,
                                .transpose_a = transpose_a,
                                .transpose_b = transpose_b,
                                .accumulate = !with_bias,
                                .epilogue = with_bias ? Epilogue::bias : Epilogue::none,
                                .m = m,
                                .n = n,
                                .k = k,
                                .batches = batches,
                                .ld_a = transpose_a ? k : m,
                                .ld_b = transpose_b ? n : k,
                                .ld_d = m,
                                .stride_a = k * m,
                                .stride_b = n * k,
                                .stride_d = n * m},
                      .a = ga.view().data,
                      .b = gb.view().data,
                      .d = gc.view().data,
                      .vector = gbias.view().data};
            run_plain_product(OnGpu::stream(), p);
            const Array got = gc.back();
            std::vector<double> want;
            for (int64_t e = 0; e < batches; ++e)
              for (int64_t j = 0; j < n; ++j)
                for (int64_t i = 0; i < m; ++i) {
                  double sum = with_bias ? bias.at(i) : c.at((e * n + j) * m + i);
                  for (int64_t l = 0; l < k; ++l)
                    sum += a.at((e * k + l) * m + i) * b.at((e * n + j) * k + l);
                  want.push_back(sum);
                }
            EXPECT_LT(scaled_error(got, want), 4 * epsilon(to)) << name(d) << batches;
          }
        }
}

TEST(Product, AccumulatesIntoAnyStrides) {
  SHEAF_NEEDS_GPU();
  for (const Shape& strides : {Shape{48, 1}, Shape{1, 33}, Shape{150, 3}})
    for (int64_t k : {16, 5, 0}) {
      const Array a = Array::random(kBF16, {33, k}, 1), b = Array::random(kBF16, {k, 48}, 2),
                  c = Array::random(kF32, {33, 48}, 3, 1, strides);
      const OnGpu ga(a), gb(b), gc(c);
      const Gemm g{"test", ga, gb, gc, {}, true};
      gemm(OnGpu::stream(), g, GpuScratch(gemm_workspace(g)));
      std::vector<double> want;
      for (int64_t i = 0; i < 33; ++i)
        for (int64_t j = 0; j < 48; ++j) {
          double sum = c.at(i * 48 + j);
          for (int64_t l = 0; l < k; ++l) sum += a.at(i * k + l) * b.at(l * 48 + j);
          want.push_back(sum);
        }
      const Array got = gc.back();
      EXPECT_LT(scaled_error(got, want), 1e-6) << strides.to_string() << k;
      EXPECT_TRUE(gaps_kept(c, got));
    }
  const Array narrow(kBF16, {2, 2});
  const OnGpu g(narrow);
  EXPECT_THROW(gemm_workspace({"test", g, g, g, {}, true}), DTypeError);
}

TEST(Product, VectorsThatLieAnywhere) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16}) {
    const Array a = Array::random(d, {16, 8}, 1), b = Array::random(d, {8, 24}, 2),
                longer = Array::random(d, {25}, 3), c(d, {16, 24}), sums(d, {17});
    const OnGpu ga(a), gb(b), glonger(longer), gc(c), gsums(sums);
    const auto behind_the_first = [&](View v) {
      v.data = v.as<char>() + size_of(d), --v.shape[0];
      return v;
    };
    const Gemm g{"test", ga, gb, gc, behind_the_first(glonger)}, bare{"test", ga, gb, gc, {}};
    gemm(OnGpu::stream(), g, GpuScratch(gemm_workspace(g)));
    std::vector<double> want;
    for (int64_t i = 0; i < 16; ++i)
      for (int64_t j = 0; j < 24; ++j) {
        double sum = longer.at(j + 1);
        for (int64_t l = 0; l < 8; ++l) sum += a.at(i * 8 + l) * b.at(l * 24 + j);
        want.push_back(sum);
      }
    EXPECT_LT(scaled_error(gc.back(), want), 4 * epsilon(d)) << name(d);
    EXPECT_FALSE(gemm_with(OnGpu::stream(), bare, Fused::row_sums, behind_the_first(gsums),
                           GpuScratch(gemm_workspace(bare))));
  }
}

TEST(Product, SumsRowsOnItsWay) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kBF16, kF16})
    for (DType to : {d, kF32})
      for (bool transposed : {false, true}) {  // a result in columns is computed as its transpose
        const int64_t m = 40, n = 56, k = 72;
        const Array a = Array::random(d, {m, k}, 1, 1, {1, m}), b = Array::random(d, {k, n}, 2),
                    c(to, {m, n}, transposed ? Shape{1, m} : Shape{n, 1}), sums(to, {m});
        const OnGpu ga(a), gb(b), gc(c), gsums(sums);
        const Gemm g{"test", ga, gb, gc, {}};
        const GpuScratch scratch(gemm_workspace(g));
        if (!gemm_with(OnGpu::stream(), g, Fused::row_sums, gsums, scratch)) {
          EXPECT_FALSE(emulated_cuda()) << name(d);
          continue;  // cuBLASLt's word
        }
        std::vector<double> want, want_sums;
        for (int64_t i = 0; i < m; ++i) {
          double row = 0;
          for (int64_t l = 0; l < k; ++l) row += a.at(i * k + l);
          want_sums.push_back(row);
          for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t l = 0; l < k; ++l) sum += a.at(i * k + l) * b.at(l * n + j);
            want.push_back(sum);
          }
        }
        const Array got = gc.back(), got_sums = gsums.back();
        EXPECT_LT(scaled_error(got, want), 4 * epsilon(to)) << name(d) << transposed;
        EXPECT_LT(scaled_error(got_sums, want_sums), 4 * epsilon(to)) << name(d) << transposed;
        ASSERT_TRUE(gemm_with(OnGpu::stream(), g, Fused::row_sums, gsums, scratch));
        EXPECT_TRUE(same_bits(gc.back(), got) && same_bits(gsums.back(), got_sums));
      }
}

TEST(Product, AppliesGeluAndItsDerivativeOnItsWay) {
  SHEAF_NEEDS_GPU();
  constexpr double kRoot = 0.7978845608028654;  // of 2 / pi
  const auto bend = [](double x) { return std::tanh(kRoot * (x + 0.044715 * x * x * x)); };
  const auto slope = [&](double x) {
    const double t = bend(x);
    return (1 + t) / 2 + x / 2 * (1 - t * t) * kRoot * (1 + 3 * 0.044715 * x * x);
  };
  for (DType d : {kBF16, kF16})
    for (bool with_bias : {false, true}) {
      const int64_t m = 40, n = 56, k = 72;
      const Array a = Array::random(d, {m, k}, 1), b = Array::random(d, {k, n}, 2, 1, {1, k}),
                  bias = Array::random(d, {n}, 3), c(d, {m, n}), other(d, {m, n}),
                  given = Array::random(d, {m, n}, 4, 2);
      const OnGpu ga(a), gb(b), gbias(bias), gc(c), gother(other), ggiven(given);
      const Gemm g{"test", ga, gb, gc, with_bias ? gbias.view() : View{}};
      const GpuScratch scratch(gemm_workspace(g));
      if (!gemm_with(OnGpu::stream(), g, Fused::gelu, gother, scratch)) {
        EXPECT_FALSE(emulated_cuda()) << name(d);
        continue;  // cuBLASLt's word
      }
      std::vector<double> before, after, gradient;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
          double sum = 0;
          for (int64_t l = 0; l < k; ++l) sum += a.at(i * k + l) * b.at(l * n + j);
          gradient.push_back(sum * slope(given.at(i * n + j)));
          const double x = sum + (with_bias ? bias.at(j) : 0);
          before.push_back(x), after.push_back(x / 2 * (1 + bend(x)));
        }
      const double bound = 16 * epsilon(d);
      EXPECT_LT(scaled_error(gother.back(), before), bound) << name(d) << with_bias;
      EXPECT_LT(scaled_error(gc.back(), after), bound) << name(d) << with_bias;
      if (with_bias) continue;
      if (!gemm_with(OnGpu::stream(), g, Fused::gelu_gradient, ggiven, scratch)) {
        EXPECT_FALSE(emulated_cuda()) << name(d);
        continue;
      }
      EXPECT_LT(scaled_error(gc.back(), gradient), bound) << name(d);
      EXPECT_TRUE(same_bits(ggiven.back(), given));
    }
}

TEST(Product, AppliesGeluOnlyWhereOneKernelCan) {
  SHEAF_NEEDS_GPU();
  const auto some = [](DType d, Shape shape, Shape strides = {}) {
    return Array::random(d, shape, 5, 1, strides);
  };
  const auto refuses = [&](const Array& c, const Array& other) {
    const int64_t m = c.view().shape[0], n = c.view().shape[1];
    const OnGpu ga(some(kBF16, {m, 8})), gb(some(kBF16, {8, n})), gc(c), gother(other);
    const Gemm g{"test", ga, gb, gc, {}};
    const GpuScratch scratch(gemm_workspace(g));
    for (Fused fused : {Fused::gelu, Fused::gelu_gradient})
      EXPECT_FALSE(gemm_with(OnGpu::stream(), g, fused, gother, scratch));
    EXPECT_TRUE(same_bits(gc.back(), c) && same_bits(gother.back(), other));
  };
  refuses(some(kF32, {16, 24}), some(kF32, {16, 24}));  // for its precision
  refuses(some(kBF16, {16, 24}), some(kF32, {16, 24}));
  refuses(some(kBF16, {16, 24}), some(kBF16, {16, 24}, {32, 1}));
  refuses(some(kBF16, {16, 24}, {32, 1}), some(kBF16, {16, 24}));
  refuses(some(kBF16, {16, 12}), some(kBF16, {16, 12}));
  refuses(some(kBF16, {16, 24}, {1, 16}), some(kBF16, {16, 24}));
  const OnGpu g(some(kBF16, {16, 24})), a(some(kBF16, {16, 8})), b(some(kBF16, {8, 24}));
  EXPECT_THROW(gemm_with(OnGpu::stream(), {"test", a, b, g, {}}, Fused::gelu, a, Workspace{}),
               ShapeError);
}

TEST(Product, DoesNothingOnItsWayWhereThatIsNotWanted) {
  SHEAF_NEEDS_GPU();
  const OnGpu a(Array::random(kBF16, {16, 8}, 1)), b(Array::random(kBF16, {8, 24}, 2)),
      c(Array(kBF16, {16, 24})), other(Array(kBF16, {16, 24})), sums(Array(kBF16, {16}));
  const Gemm g{"test", a, b, c, {}};
  const GpuScratch scratch(gemm_workspace(g));
  const auto both = [&] {
    return gemm_with(OnGpu::stream(), g, Fused::row_sums, sums, scratch) ||
           gemm_with(OnGpu::stream(), g, Fused::gelu, other, scratch);
  };
  setenv("SHEAF_FUSED_PRODUCTS", "0", 1);
  EXPECT_FALSE(both());
  unsetenv("SHEAF_FUSED_PRODUCTS");
  if (emulated_cuda()) {
    EXPECT_TRUE(both());
  }
}

TEST(Product, SumsOnlyWhatOneKernelCan) {
  SHEAF_NEEDS_GPU();
  const Array a = Array::random(kBF16, {16, 8}, 1), b = Array::random(kBF16, {8, 24}, 2),
              c = Array::random(kBF16, {16, 24}, 4), sums(kBF16, {16}), wide(kF32, {16}),
              gaps(kBF16, {16}, {2}), few(kBF16, {8}),
              odd = Array::random(kBF16, {16, 8}, 3, 1, {9, 1});
  const OnGpu ga(a), gb(b), gc(c), godd(odd);
  const Gemm g{"test", ga, gb, gc, {}};
  const GpuScratch scratch(gemm_workspace(g));
  EXPECT_FALSE(gemm_with(OnGpu::stream(), g, Fused::row_sums, OnGpu(wide), scratch));
  EXPECT_FALSE(gemm_with(OnGpu::stream(), g, Fused::row_sums, OnGpu(gaps), scratch));
  EXPECT_TRUE(same_bits(gc.back(), c));  // nothing was done
  EXPECT_THROW(gemm_with(OnGpu::stream(), g, Fused::row_sums, OnGpu(few), scratch), ShapeError);
  const Gemm added{"test", ga, gb, OnGpu(Array(kF32, {16, 24})), {}, true};
  EXPECT_THROW(gemm_with(OnGpu::stream(), added, Fused::row_sums, OnGpu(wide), scratch),
               ShapeError);
  if (emulated_cuda()) {  // it refuses rows that are not aligned to 16 bytes
    EXPECT_FALSE(gemm_with(OnGpu::stream(), {"test", godd, gb, gc, {}}, Fused::row_sums,
                           OnGpu(sums), scratch));
    EXPECT_TRUE(same_bits(gc.back(), c));
  }
}

TEST(Product, ChoicesAreTimedOnceExportedAndTakenOver) {
  SHEAF_NEEDS_GPU();
  const int64_t odd = 24;  // a size that no other test here has
  const Array a = Array::random(kF32, {odd, 40}, 1), b = Array::random(kF32, {40, 88}, 2),
              c(kF32, {odd, 88});
  const OnGpu ga(a), gb(b), gc(c);
  const Gemm g{"test", ga, gb, gc, {}};
  const GpuScratch scratch(gemm_workspace(g));
  const auto line = [&] {
    const std::string text = export_product_choices(0);
    const size_t at = text.find("f32 f32 n n - store 16 16 16 16 88 24 40 ");
    return at == text.npos ? "" : text.substr(at, text.find('\n', at) - at);
  };
  gemm(OnGpu::stream(), g, scratch);
  const Array by_estimate = gc.back();
  const std::string estimated = line();
  EXPECT_NE(estimated, "");
  {
    const TuneProducts tune;
    gemm(OnGpu::stream(), g, scratch);
  }
  const Array tuned = gc.back();
  EXPECT_LT(scaled_error(tuned, values(by_estimate)), 1e-6);
  const std::string chosen = line(), all = export_product_choices(0);
  if (emulated_cuda()) {
    EXPECT_NE(chosen, estimated);
  }
  EXPECT_EQ(import_product_choices(0, all.substr(0, all.find('\n') + 1) + estimated + '\n'), 1);
  EXPECT_EQ(line(), estimated);
  {
    const TuneProducts tune;  // imported choices count as timed
    gemm(OnGpu::stream(), g, scratch);
  }
  EXPECT_EQ(line(), estimated);
  EXPECT_TRUE(same_bits(gc.back(), by_estimate));
  EXPECT_EQ(import_product_choices(0, "sheaf products 1 something else\n"), 0);
  EXPECT_THROW(import_product_choices(0, "something else\n"), DataError);
}

TEST(Product, TuningLeavesASumAsItIs) {
  SHEAF_NEEDS_GPU();
  const Array a = Array::random(kF32, {56, 40}, 1), b = Array::random(kF32, {40, 88}, 2),
              c = Array::random(kF32, {56, 88}, 3);
  const OnGpu ga(a), gb(b), tuned(c), plain(c);
  const auto add = [&](const View& to) {
    const Gemm g{"test", ga, gb, to, {}, true};
    gemm(OnGpu::stream(), g, GpuScratch(gemm_workspace(g)));
  };
  {
    const TuneProducts tune;
    add(tuned);
  }
  add(plain);
  EXPECT_TRUE(same_bits(tuned.back(), plain.back()));
}

}  // namespace
}  // namespace sheaf::kernels::cuda
