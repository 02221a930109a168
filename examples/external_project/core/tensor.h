// This project has a core/tensor.h, too: Sheaf's is included as "sheaf/core/tensor.h", so they do not collide.
#pragma once

#include "sheaf/sheaf.h"

namespace my_project {

/// Mean of the squared differences, a scalar.
sheaf::Tensor squared_error(const sheaf::Tensor& a, const sheaf::Tensor& b);

/// y = slope x + offset.
struct Line : sheaf::nn::Module {
  sheaf::nn::Parameter slope{{1}, sheaf::nn::Init::zeros()}, offset{{1}, sheaf::nn::Init::zeros()};
  sheaf::Tensor forward(const sheaf::Tensor& x) { return x * slope + offset; }
  SHEAF_FIELDS(slope, offset);
};

/// Fits a line through y = 3x - 1 by `steps` steps of gradient descent, with parameters sharded over all ranks; returns {slope, offset}.
/// With a folder, resumes from the checkpoint in it, if any, and saves to it.
std::vector<float> fit(sheaf::World& world, const std::string& folder = "", int64_t steps = 100);

}  // namespace my_project
