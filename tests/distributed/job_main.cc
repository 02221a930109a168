// The main() of tests whose ranks are processes: the program runs itself again, once per rank, with --worker=<scenario>.
#include <gtest/gtest.h>

#include <cstring>

#include "sheaf/tests/distributed/job_scenarios.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], "--worker=", 9) == 0) return sheaf::testing::run_scenario(argv[i] + 9);
  return RUN_ALL_TESTS();
}
