// Runs one row of the table: draws its inputs and evaluates outputs and gradients. Shared by the checks.
#pragma once

#include <string>
#include <vector>

#include "sheaf/autograd/recording.h"
#include "sheaf/tests/op_samples.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {

std::string name_of(const OpSample& sample);

/// Values of every input, row-major; integers where `sample.exact`.
std::vector<Values> draw_inputs(const OpSample& sample, const std::string& stream);
/// Weights for the inner product with the given output.
Values draw_weights(const OpSample& sample, size_t output, const Shape& shape);

/// The tensors of a run, without layout. `dtype` replaces kF64.
std::vector<Tensor> make_inputs(const OpSample& sample, const std::vector<Values>& values, DType dtype);

struct Run {
  std::vector<Tensor> outputs;         ///< all of them
  std::vector<Tensor> gradients;       ///< of Σ <weight, floating output>, with respect to the differentiable inputs
  std::vector<size_t> differentiated;  ///< which inputs those are
  std::vector<Tensor> seconds;         ///< if asked for: of Σ <weight, gradient>, likewise
};
/// Evaluates f and the gradients of its floating outputs inside `recording`, on the device of the inputs; and, if `second` is set and the
/// sample has them, second derivatives.
Run run_sample(const OpSample& sample, Recording& recording, const std::vector<Tensor>& inputs,
               const ProbeOptions& options = {}, bool second = false);

/// The values of a run, and its types.
struct Result {
  std::vector<Values> outputs, gradients, seconds;
  std::vector<Type> output_types;
};
Result evaluate(const OpSample& sample, const std::vector<Tensor>& inputs, const ProbeOptions& options = {},
                bool second = false);

/// Compares outputs and gradients; "" if all scaled errors are within `bound`, and those of second derivatives within `of_seconds`, if
/// given.
std::string compare(const Result& got, const Result& want, double bound, double of_seconds = -1);

}  // namespace sheaf::testing
