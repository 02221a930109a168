// What //:sheaf_testing checks for a user-defined op.
#include "sheaf/examples/snake.h"

#include <gtest/gtest.h>

#include "sheaf/tests/check_op.h"
#include "sheaf/tests/check_rowwise.h"

namespace examples {
namespace {

using namespace sheaf::testing;

TEST(Snake, IsWhatItsFormulaSays) {
  const std::vector<double> y =
      snake(sheaf::Tensor::from<double>({-1, 0, 0.5}, {3}), 2.0).to_vector<double>();
  EXPECT_NEAR(y[0], -1 + std::pow(std::sin(-2.0), 2) / 2, 1e-15);
  EXPECT_EQ(y[1], 0);
  EXPECT_NEAR(y[2], 0.5 + std::pow(std::sin(1.0), 2) / 2, 1e-15);
}

// Gradients to second order, f32 and bf16, strides, sizes of 0, meta, replay, every placement at
// worlds 1 to 5.
TEST(Snake, PassesEveryCheckOfAnOp) {
  EXPECT_EQ(check_op({.op = "snake",
                      .inputs = {{3, 5}},
                      .f = [](Args x) { return snake(x[0], 1.5); },
                      .rules = {"S0 -> S0", "S1 -> S1", "F -> F"}}),
            "");
}

TEST(Snake, ChecksItsArguments) {
  EXPECT_THROW(snake(sheaf::Tensor::from<float>({1}, {1}), 0.0), sheaf::ConfigError);
  EXPECT_THROW(snake(sheaf::Tensor::from<int64_t>({1}, {1})), sheaf::DTypeError);
}

TEST(Snake, TreatsRowsAlone) {
  const auto f = [](std::span<const sheaf::Tensor> x) { return std::vector{snake(x[0])}; };
  EXPECT_EQ(check_rowwise(f, {sheaf::Tensor::from<float>({1, 2, 3, 4, 5, 6}, {3, 2})}), "");
}

}  // namespace
}  // namespace examples
