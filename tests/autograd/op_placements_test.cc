#include "sheaf/tests/autograd/sample_suite.h"

namespace sheaf::testing {

TEST_P(Op, Placements) {
  for (int ranks = 1; ranks <= 5; ++ranks) EXPECT_EQ(check_placements(GetParam(), ranks), "");
}

SHEAF_FOR_ALL_SAMPLES();

}  // namespace sheaf::testing
