// For tests of training steps: the gradients must not depend on the ranks.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/sheaf.h"

namespace examples {

using Gradients = std::map<std::string, std::vector<float>>;

inline Gradients gradients(sheaf::nn::Module& model) {
  Gradients out;
  for (const sheaf::nn::Parameter& p : model.parameters())
    out[p.name()] = full_gradient(p).to_vector<float>();
  return out;
}

// All other ranks must have the first rank's first gradients.
inline void expect_gradients(sheaf::nn::Module& model, Gradients& expected, int rank, const std::string& where, double tolerance = 1e-6) {
  const Gradients got = gradients(model);
  if (rank != 0) return;
  if (expected.empty()) expected = got;
  for (const auto& [name, values] : expected)
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(got.at(name)[i], values[i], tolerance) << name << " at " << where;
}

}  // namespace examples
