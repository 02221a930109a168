// Shared by the generated tests: a parameterised suite over the table of samples, with readable names.
#pragma once

#include <gtest/gtest.h>

#include <cctype>

#include "sheaf/tests/check_op.h"

namespace sheaf::testing {

/// So that GoogleTest prints a sample by its name.
inline void PrintTo(const OpSample& sample, std::ostream* out) { *out << sample.op << ' ' << sample.variant; }

class Op : public ::testing::TestWithParam<OpSample> {};

inline std::string test_name(const ::testing::TestParamInfo<OpSample>& info) {
  std::string name = info.param.op + (info.param.variant.empty() ? "" : "_" + info.param.variant);
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name;
}

#define SHEAF_FOR_ALL_SAMPLES() \
  INSTANTIATE_TEST_SUITE_P(Table, Op, ::testing::ValuesIn(op_samples()), test_name)

}  // namespace sheaf::testing
