// Checks derivatives against central differences in f64.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "sheaf/autograd/recording.h"

namespace sheaf::testing {

/// A scalar function of f64 tensors, evaluated inside the given recording.
using ScalarFunction = std::function<Tensor(Recording&, const std::vector<Tensor>&)>;

struct GradcheckOptions {
  double step = 1e-5;                     ///< of the central difference
  double tolerance = 1e-6;                ///< largest |difference|, relative to the largest |entry| of all the gradients (at least 1e-3)
  std::vector<bool> differentiable = {};  ///< per tensor; empty: all of them
};

/// "" if Recording::gradient of f agrees with (f(x + h) − f(x − h)) / 2h in every entry of every differentiable tensor; else a description
/// of the difference.
std::string gradcheck(const ScalarFunction& f, const std::vector<Tensor>& x, const GradcheckOptions& options = {});

/// The same for the gradient of f: checks x → Σ_i <v_i, ∂f/∂x_i> for random v, which is differentiated through the
/// backward ({.keep = true}). Throws LifetimeError naming the op that has no derivative, if one lacks it.
std::string gradgradcheck(const ScalarFunction& f, const std::vector<Tensor>& x, const GradcheckOptions& options = {});

}  // namespace sheaf::testing
