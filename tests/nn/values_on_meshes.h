// For tests of what must not depend on the mesh: named values, and the ways to compute them.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "sheaf/nn/shard.h"

namespace sheaf::testing {

using Values = std::map<std::string, std::vector<double>>;

struct MeshAndStrategy {
  std::vector<MeshSpec::Axis> axes;
  Strategy strategy = Strategy::full_shard;
  int ranks() const {
    int n = 1;
    for (const auto& axis : axes) n *= axis.size;
    return n;
  }
};

inline void expect_near(const Values& actual, const Values& expected, double tolerance, const std::string& where) {
  ASSERT_EQ(actual.size(), expected.size()) << where;
  for (const auto& [name, want] : expected) {
    const std::vector<double>& got = actual.at(name);
    ASSERT_EQ(got.size(), want.size()) << where;
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << name << ' ' << i << where;
  }
}

}  // namespace sheaf::testing
