#include "sheaf/tests/autograd/sample_suite.h"

namespace sheaf::testing {

TEST_P(Op, Gradient) { EXPECT_EQ(check_gradient(GetParam()), ""); }
TEST_P(Op, SecondGradient) { EXPECT_EQ(check_second_gradient(GetParam()), ""); }

SHEAF_FOR_ALL_SAMPLES();

}  // namespace sheaf::testing
