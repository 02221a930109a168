#include <gtest/gtest.h>

#include "sheaf/tests/check_op.h"

#include "core/tensor.h"

TEST(Line, IsFittedOnOneRankAndOnTwo) {
  for (int ranks : {1, 2}) {
    sheaf::run_local(ranks, [](sheaf::World& world) {
      const std::vector<float> line = my_project::fit(world);
      EXPECT_NEAR(line[0], 3, 1e-4);
      EXPECT_NEAR(line[1], -1, 1e-4);
    });
  }
}

TEST(SquaredError, HasRightGradients) {
  EXPECT_EQ(sheaf::testing::check_gradient(
                {.op = "squared_error",
                 .inputs = {{3, 2}, {3, 2}},
                 .f = [](auto& x) { return my_project::squared_error(x[0], x[1]); }}),
            "");
}
