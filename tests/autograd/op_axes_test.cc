#include "sheaf/tests/autograd/sample_suite.h"

namespace sheaf::testing {

TEST_P(Op, PlacementsOnSeveralAxes) { EXPECT_EQ(check_axes(GetParam()), ""); }

SHEAF_FOR_ALL_SAMPLES();

}  // namespace sheaf::testing
