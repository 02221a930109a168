#include <cmath>
#include <filesystem>

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

TEST(Line, GoesOnFromWhatWasSaved) {
  const std::string folder = ::testing::TempDir() + "/line";
  std::vector<float> half, resumed;
  sheaf::run_local(2, [&](sheaf::World& world) {
    const std::vector<float> line = my_project::fit(world, folder, 5);
    if (world.rank() == 0) half = line;
  });
  EXPECT_GT(std::abs(half[0] - 3), 0.1);
  sheaf::run_local(1, [&](sheaf::World& world) { resumed = my_project::fit(world, folder); });
  EXPECT_NEAR(resumed[0], 3, 1e-4);
  EXPECT_NEAR(resumed[1], -1, 1e-4);
  EXPECT_TRUE(std::filesystem::exists(folder + "/step-100"));
}

TEST(SquaredError, HasRightGradients) {
  EXPECT_EQ(sheaf::testing::check_gradient(
                {.op = "squared_error",
                 .inputs = {{3, 2}, {3, 2}},
                 .f = [](auto& x) { return my_project::squared_error(x[0], x[1]); }}),
            "");
}
