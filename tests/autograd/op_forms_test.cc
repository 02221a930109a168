#include "sheaf/tests/autograd/sample_suite.h"

namespace sheaf::testing {

TEST_P(Op, F32) {
  if (!GetParam().low_precision) GTEST_SKIP();
  EXPECT_EQ(check_precision(GetParam(), kF32), "");
}
TEST_P(Op, Bf16) {
  if (!GetParam().low_precision) GTEST_SKIP();
  EXPECT_EQ(check_precision(GetParam(), kBF16), "");
}
TEST_P(Op, F16) {
  if (!GetParam().low_precision) GTEST_SKIP();
  EXPECT_EQ(check_precision(GetParam(), kF16), "");
}
TEST_P(Op, Strides) { EXPECT_EQ(check_strides(GetParam()), ""); }
TEST_P(Op, ZeroSize) { EXPECT_EQ(check_zero_size(GetParam()), ""); }
TEST_P(Op, Slots) { EXPECT_EQ(check_slots(GetParam()), ""); }
TEST_P(Op, Tape) { EXPECT_EQ(check_tape(GetParam()), ""); }

SHEAF_FOR_ALL_SAMPLES();

}  // namespace sheaf::testing
