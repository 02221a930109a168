#include "sheaf/core/shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/tensor.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

constexpr Shape kShape{2, 3, 5};
static_assert(kShape.dim(0) == 2 && kShape.dim(2) == 5 && kShape.dim(-1) == 5 && kShape.dim(-3) == 2);

TEST(Shape, HasNoDimensionsBeyondItsRank) {
  for (const int i : {3, -4, 8, -9, 100}) {
    EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { (void)kShape.dim(i); }), HasSubstr(str("[size] [2,3,5] has no dimension ", i)));
    EXPECT_THROW((void)Shape().dim(i), ShapeError);
  }
  for (const int i : {0, -1}) EXPECT_THROW((void)Shape().dim(i), ShapeError) << "of a scalar";
}

TEST(Tensor, HasNoSizesBeyondItsRank) {
  const Tensor x = Tensor::empty({kF32, {2, 3}, {}});
  EXPECT_EQ(x.size(1), 3);
  EXPECT_EQ(x.size(-2), 2);
  for (const int i : {2, -3})
    EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { (void)x.size(i); }), HasSubstr(str("[size] [2,3] has no dimension ", i)));
  EXPECT_THROW((void)Tensor::scalar(1).size(0), ShapeError);
}

}  // namespace
}  // namespace sheaf
