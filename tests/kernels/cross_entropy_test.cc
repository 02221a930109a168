#include "sheaf/kernels/cross_entropy.h"

#include "sheaf/kernels/linear_cross_entropy.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

constexpr int64_t kIgnore = -100;

Array targets_of(DType d, int64_t rows, int64_t vocabulary, bool ignore) {
  Array t(d, {rows});
  t.fill([&](int64_t i) {
    return ignore && i % 5 == 3 ? static_cast<double>(kIgnore)
                                : static_cast<double>((i * 31 + 4) % vocabulary);
  });
  return t;
}

/// Row losses, log-sum-exps and gradients of logits for unit upstream gradients.
struct Reference {
  std::vector<double> losses, lse, dlogits;
  Reference(const std::vector<double>& logits, const View& targets, int64_t vocabulary)
      : losses(targets.numel()), lse(targets.numel()), dlogits(logits.size()) {
    for (int64_t r = 0; r < targets.numel(); ++r) {
      const int64_t target = static_cast<int64_t>(Array::read(targets, r));
      if (target == kIgnore) continue;
      const double* x = logits.data() + r * vocabulary;
      const double most = *std::max_element(x, x + vocabulary);
      double sum = 0;
      for (int64_t i = 0; i < vocabulary; ++i) sum += std::exp(x[i] - most);
      lse[r] = most + std::log(sum), losses[r] = lse[r] - x[target];
      for (int64_t i = 0; i < vocabulary; ++i)
        dlogits[r * vocabulary + i] = std::exp(x[i] - lse[r]) - (i == target);
    }
  }
};

TEST(CrossEntropy, ForwardAndBackward) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (int64_t vocabulary : {1, 7, 65, 1000}) {
      const int64_t rows = 23;
      const DType stat = d == kF64 ? kF64 : kF32;
      const Array logits = Array::random(d, {rows, vocabulary}, 1, 2),
                  targets = targets_of(kI64, rows, vocabulary, true);
      const Reference want(values(logits), targets, vocabulary);
      const Array losses(stat, {rows}), lse(stat, {rows}), dlogits(d, {rows, vocabulary}),
          scale = Array::of(stat, Shape{}, {0.25});
      cross_entropy(logits, targets, kIgnore, losses, lse);
      cross_entropy_backward(logits, targets, kIgnore, lse, scale, dlogits);
      std::vector<double> gradient = want.dlogits;
      for (double& g : gradient) g *= 0.25;
      if (vocabulary > 1) {
        EXPECT_LT(scaled_error(losses, want.losses), d == kF64 ? 1e-14 : 1e-6)
            << name(d) << vocabulary;
        EXPECT_LT(scaled_error(dlogits, gradient), 4 * epsilon(d)) << name(d) << vocabulary;
      }
      EXPECT_LT(scaled_error(lse, want.lse), d == kF64 ? 1e-14 : 1e-6) << name(d) << vocabulary;
      // One upstream gradient per row, in place, strided.
      Array per_row = Array::random(stat, {rows}, 5),
            strided = Array::random(d, {rows, vocabulary}, 1, 2, {vocabulary + 3, 1});
      cross_entropy_backward(strided, targets, kIgnore, lse, per_row, strided);
      for (int64_t i = 0; i < rows * vocabulary; ++i)
        gradient[i] = want.dlogits[i] * per_row.at(i / vocabulary);
      if (vocabulary > 1) {
        EXPECT_LT(scaled_error(strided, gradient), 4 * epsilon(d)) << name(d) << vocabulary;
      }
    }
}

TEST(CrossEntropy, RefusesTargetsOutsideTheVocabulary) {
  const Array logits(kF32, {2, 5}), losses(kF32, {2}), lse(kF32, {2});
  EXPECT_THROW(cross_entropy(logits, Array::of(kI64, {2}, {0, 5}), kIgnore, losses, lse),
               DataError);
  EXPECT_THROW(cross_entropy(logits, Array::of(kI64, {2}, {0, -1}), kIgnore, losses, lse),
               DataError);
}

struct HeadArrays {
  Array loss, lse, dx, dw;
};
HeadArrays run(const View& x, const View& w, const View& targets, double upstream, DType dw_dtype, HeadRules rules = kIgnore) {
  const DType stat = x.dtype == kF64 ? kF64 : kF32;
  HeadArrays a{Array(stat, Shape{}), Array(stat, targets.shape), Array(x.dtype, x.shape),
               Array(dw_dtype, w.shape)};
  const Array dloss = Array::of(stat, Shape{}, {upstream});
  linear_cross_entropy(x, w, targets, rules, a.loss, a.lse,
                       Scratch(linear_cross_entropy_workspace(without_data(x), without_data(w))));
  linear_cross_entropy_backward(
      x, w, targets, rules, a.lse, dloss, a.dx, a.dw,
      Scratch(linear_cross_entropy_backward_workspace(without_data(x), without_data(w),
                                                      without_data(a.dx), without_data(a.dw))));
  return a;
}

TEST(LinearCrossEntropy, ForwardAndBackward) {
  // 2,100 rows make two chunks.
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (auto [rows, vocabulary, width, softcap, z_loss] :
         {std::tuple<int64_t, int64_t, int64_t, double, double>{9, 13, 8, 0, 0}, {40, 300, 33, 0, 0}, {2100, 17, 16, 0, 0}, {9, 13, 8, 0.8, 0},
          {40, 300, 33, 2, 0}, {40, 300, 33, 0, 0.1}, {2100, 17, 16, 2, 0.1}}) {
      const HeadRules rules(kIgnore, softcap, z_loss);
      const Array x = Array::random(d, {rows, width}, 1),
                  w = Array::random(d, {vocabulary, width}, 2, 0.5),
                  targets = targets_of(kI32, rows, vocabulary, true);
      std::vector<double> logits(rows * vocabulary), dx(rows * width), dw(vocabulary * width);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < vocabulary; ++v)
          for (int64_t i = 0; i < width; ++i)
            logits[r * vocabulary + v] += x.at(r * width + i) * w.at(v * width + i);
      std::vector<double> slopes(logits.size(), 1.0);
      for (size_t i = 0; i < logits.size() && rules.softcap != 0; ++i) {
        const double t = std::tanh(logits[i] / rules.softcap);
        logits[i] = rules.softcap * t, slopes[i] = 1 - t * t;
      }
      const Reference want(logits, targets, vocabulary);
      double loss = 0;
      for (int64_t r = 0; r < rows; ++r) loss += want.losses[r] + z_loss * want.lse[r] * want.lse[r];
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < vocabulary; ++v)
          for (int64_t i = 0; i < width; ++i) {
            const bool counts = targets.at(r) != kIgnore;
            const double of_z = counts ? 2 * z_loss * want.lse[r] * std::exp(logits[r * vocabulary + v] - want.lse[r]) : 0;
            const double g = (want.dlogits[r * vocabulary + v] + of_z) * slopes[static_cast<size_t>(r * vocabulary + v)] * 0.5;
            dx[r * width + i] += g * w.at(v * width + i),
                dw[v * width + i] += g * x.at(r * width + i);
          }
      for (DType dw_dtype : {d, kF32}) {
        if (d == kF64 && dw_dtype != d) continue;
        const HeadArrays got = run(x, w, targets, 0.5, dw_dtype, rules);
        const std::string where = std::string(name(d)) + std::to_string(rows);
        EXPECT_LT(scaled_error(got.loss, {loss}), d == kF64 ? 1e-13 : 1e-6) << where;
        EXPECT_LT(scaled_error(got.dx, dx), 10 * epsilon(d)) << where;
        EXPECT_LT(scaled_error(got.dw, dw), 10 * epsilon(d)) << where;
      }
      // The fused pass gives the same bits.
      for (const double dloss : {1.0, 256.0}) {
        const HeadArrays two = run(x, w, targets, dloss, d, rules);
        const Array fused_loss(two.loss.view().dtype, Shape{}), fused_dx(d, x.view().shape),
            fused_dw(d, w.view().shape);
        linear_cross_entropy_fused(
            x, w, targets, rules, fused_loss, fused_dx, fused_dw,
            Scratch(linear_cross_entropy_fused_workspace(x, w, fused_dx, fused_dw)), dloss);
        EXPECT_TRUE(same_bits(fused_loss, two.loss) && same_bits(fused_dx, two.dx) &&
                    same_bits(fused_dw, two.dw))
            << name(d) << dloss;
      }
    }
}

TEST(LinearCrossEntropy, OneGradientAlone) {
  const Array x = Array::random(kF32, {30, 8}, 1), w = Array::random(kF32, {11, 8}, 2),
              targets = targets_of(kI64, 30, 11, false);
  const HeadArrays both = run(x, w, targets, 1, kF32);
  const Array dx(kF32, {30, 8}), dw(kF32, {11, 8}), dloss = Array::of(kF32, Shape{}, {1});
  linear_cross_entropy_backward(x, w, targets, kIgnore, both.lse, dloss, dx, View{},
                                Scratch(linear_cross_entropy_backward_workspace(x, w, dx, View{})));
  linear_cross_entropy_backward(x, w, targets, kIgnore, both.lse, dloss, View{}, dw,
                                Scratch(linear_cross_entropy_backward_workspace(x, w, View{}, dw)));
  EXPECT_TRUE(same_bits(dx, both.dx) && same_bits(dw, both.dw));
}

// Ranks with some rows of the weight each, one with none; 2,100 rows of x make two chunks, also with one upstream gradient per row.
TEST(LinearLse, PartsOfAVocabulary) {
  const int64_t vocabulary = 17, width = 9;
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const auto& [rows, softcap] : {std::pair<int64_t, double>{23, 0}, {2100, 0}, {23, 1.5}}) {
      const HeadRules rules(kIgnore, softcap);
      const DType stat = d == kF64 ? kF64 : kF32;
      const Array x = Array::random(d, {rows, width}, 1),
                  w = Array::random(d, {vocabulary, width}, 2),
                  targets = targets_of(kI32, rows, vocabulary, true),
                  dlse = Array::random(stat, {rows}, 3), dtarget = Array::random(stat, {rows}, 4);
      int64_t first = 0;
      for (const int64_t n : {5, 0, 11, 1}) {
        const TablePart part{first, vocabulary};
        Array mine(d, {n, width});
        mine.fill([&](int64_t i) { return w.at(first * width + i); });
        std::vector<double> lse(rows), logits(rows), dx(rows * width), dw(n * width);
        for (int64_t r = 0; r < rows; ++r) {
          const auto target = static_cast<int64_t>(targets.at(r));
          const bool ignored = target == kIgnore;
          std::vector<double> z(n);
          double sum = 0;
          for (int64_t v = 0; v < n; ++v) {
            for (int64_t i = 0; i < width; ++i)
              z[v] += x.at(r * width + i) * mine.at(v * width + i);
            if (rules.softcap != 0) z[v] = rules.softcap * std::tanh(z[v] / rules.softcap);
            sum += std::exp(z[v]);
            if (first + v == target) logits[r] = z[v];
          }
          lse[r] = !ignored ? std::log(sum) : first == 0 ? 0 : -INFINITY;
          for (int64_t v = 0; v < n && !ignored; ++v) {
            const double slope = rules.softcap != 0 ? 1 - std::pow(z[v] / rules.softcap, 2) : 1;
            const double g = slope * (std::exp(z[v]) / sum * dlse.at(r) + (first + v == target) * dtarget.at(r));
            for (int64_t i = 0; i < width; ++i) {
              dx[r * width + i] += g * mine.at(v * width + i);
              dw[v * width + i] += g * x.at(r * width + i);
            }
          }
        }
        const Array got_lse(stat, {rows}), got_logits(stat, {rows}), got_dx(d, {rows, width});
        linear_lse(x, mine, part, targets, rules, got_lse, got_logits,
                   Scratch(linear_lse_workspace(without_data(x), without_data(mine))));
        const double close = d == kF64 ? 1e-13 : 1e-5;
        for (int64_t r = 0; r < rows; ++r) {
          if (std::isinf(lse[r]))
            EXPECT_EQ(got_lse.at(r), lse[r]);
          else
            EXPECT_NEAR(got_lse.at(r), lse[r], close);
          EXPECT_NEAR(got_logits.at(r), logits[r], close);
        }
        for (DType dw_dtype : {d, stat}) {
          const Array got_dw(dw_dtype, {n, width});
          linear_lse_backward(x, mine, part, targets, rules, got_lse, dlse, dtarget, got_dx,
                              got_dw,
                              Scratch(linear_lse_backward_workspace(
                                  without_data(x), without_data(mine), got_dx, got_dw)));
          const std::string where =
              std::string(name(d)) + std::to_string(rows) + ' ' + std::to_string(n);
          if (n == 0)
            EXPECT_EQ(values(got_dx), dx) << where;
          else
            EXPECT_LT(scaled_error(got_dx, dx), 10 * epsilon(d)) << where;
          EXPECT_TRUE(n == 0 || scaled_error(got_dw, dw) < 10 * epsilon(d)) << where;
        }
        first += n;
      }
    }
  const Array x(kF32, {1, 4}), w(kF32, {3, 4}), lse(kF32, {1}), logits(kF32, {1});
  for (const double target : {-1.0, 11.0})
    EXPECT_THROW(linear_lse(x, w, {4, 11}, Array::of(kI64, {1}, {target}), kIgnore, lse, logits,
                            Scratch(linear_lse_workspace(x, w))),
                 DataError);
}

TEST(LinearCrossEntropy, NoRowsThreadsAndBadTargets) {
  const Array w = Array::random(kF32, {11, 8}, 2), none(kF32, {0, 8}), no_targets(kI64, {0});
  const HeadArrays empty = run(none, w, no_targets, 1, kF32);
  EXPECT_EQ(empty.loss.at(0), 0.0);
  EXPECT_EQ(values(empty.dw), std::vector<double>(88, 0.0));
  const Array x = Array::random(kF32, {400, 8}, 1), targets = targets_of(kI64, 400, 11, true);
  HeadArrays one, two;
  with_threads(1, [&] { one = run(x, w, targets, 1, kF32); });
  with_threads(2, [&] { two = run(x, w, targets, 1, kF32); });
  EXPECT_TRUE(same_bits(one.loss, two.loss) && same_bits(one.dx, two.dx) &&
              same_bits(one.dw, two.dw));
  EXPECT_THROW(run(x, w, targets_of(kI64, 400, 12, false), 1, kF32), DataError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
