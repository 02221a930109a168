#include "sheaf/kernels/loss_scale.h"

#include <gmock/gmock.h>

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

struct Case {
  const char* what;
  LossScaleRule rule;
  double initial;
  const char* steps;  ///< "." without, "x" with an overflow
  std::vector<double> scales;  ///< after each
  std::vector<double> counts;  ///< good, lost and skipped, in the end
};

TEST(LossScale, GrowsAndBacksOff) {
  const LossScaleRule usual{2, 0.5, 1, 0x1p64, 3};
  const Case cases[] = {
      {"grows each third good step", usual, 8, ".......", {8, 8, 16, 16, 16, 32, 32}, {1, 0, 0}},
      {"an overflow begins the count anew", usual, 8, "..x...", {8, 8, 4, 4, 4, 8}, {0, 0, 1}},
      {"an overflow right after growth", usual, 8, "...xx.", {8, 8, 16, 8, 4, 4}, {1, 0, 2}},
      {"stops at the minimum", usual, 4, "xxxxx", {2, 1, 1, 1, 1}, {0, 3, 5}},
      {"a good step ends what is lost", usual, 1, "xx.x", {1, 1, 1, 1}, {0, 1, 3}},
      {"the way down is no loss", usual, 8, "xx", {4, 2}, {0, 0, 2}},
      {"others", {3, 0.25, 0.5, 0x1p64, 1}, 4, "..xxx", {12, 36, 9, 2.25, 0.5625}, {0, 0, 3}},
      {"a minimum between", {2, 0.5, 3, 0x1p64, 1}, 8, "xxx.", {4, 3, 3, 6}, {0, 0, 3}},
      {"a minimum that is no f32 number", {2, 0.5, 0.1, 0x1p64, 1}, 0.125, "xxx", {0.1f, 0.1f, 0.1f}, {0, 2, 3}},
      {"no higher than the maximum", {2, 0.5, 1, 20, 1}, 8, "...", {16, 20, 20}, {0, 0, 0}},
      {"a constant", {1, 1, 1, 0x1p64, 2}, 128, "..x..", {128, 128, 128, 128, 128}, {0, 0, 1}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    const Array scale = Array::of(kF32, {}, {c.initial}), counts = Array::of(kI64, {3}, {0, 0, 0});
    std::vector<double> seen;
    for (const char* s = c.steps; *s; ++s) {
      cpu::update_loss_scale(Array::of(kI32, {}, {*s == 'x' ? 1.0 : 0.0}), c.rule, scale, counts);
      seen.push_back(scale.at(0));
    }
    EXPECT_EQ(seen, c.scales);
    EXPECT_EQ(values(counts), c.counts);
  }
}

TEST(LossScale, RefusesOtherTypes) {
  const Array flag = Array::of(kI32, {}, {0}), scale = Array::of(kF32, {}, {1}),
              wide = Array::of(kF64, {}, {1}), counts = Array::of(kI64, {3}, {0, 0, 0}),
              few = Array::of(kI64, {2}, {0, 0});
  EXPECT_THROW(cpu::update_loss_scale(flag, {}, wide, counts), ShapeError);
  EXPECT_THROW(cpu::update_loss_scale(flag, {}, scale, few), ShapeError);
  EXPECT_THROW(cpu::update_loss_scale(scale, {}, scale, counts), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
