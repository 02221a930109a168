// Turns any outputs into a scalar that can be differentiated, in any placement: the inner product of outputs with weights.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf::testing {

struct ProbeOptions {
  bool strided_gradients = false;  ///< the outputs' gradients arrive with gaps between their elements
};

/// f64[], Σ_i <outputs[i], weights[i]>: Partial on every mesh axis (Invariant where an output is). weights[i] has the
/// dtype and shape of outputs[i] and, per axis, its placement, except Replicate where the output is Partial. Where an
/// output is Replicate, the axis' rank 0 contributes it. Differentiable any number of times, with respect to both.
Tensor probe(std::span<const Tensor> outputs, std::span<const Tensor> weights, const ProbeOptions& options = {});

/// The layout that probe() needs for the weight of a tensor in `layout`.
Layout probe_weight_layout(const Layout& layout);

/// Values are computed in f64 on the host; a tensor is a vector in row-major order.
using Values = std::vector<double>;

/// Deterministic random numbers, a stream per name.
class Generator {
 public:
  explicit Generator(const std::string& name);
  uint64_t bits();
  double uniform(double low, double high) { return low + (high - low) * (static_cast<double>(bits() >> 11) * 0x1p-53); }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

/// A tensor of `dtype` from values, rounded to nearest.
Tensor make_tensor(const Values& values, const Shape& shape, DType dtype);
/// A cut of a dimension of `rows` rows into two or three parts, of several units unless the number is prime.
OwnershipMap parts_of(int dim, int64_t rows);
/// A cut of a dimension of `rows` rows into intervals whose owners are not in rank order; with three ranks or more, rank 1 owns none.
OwnershipMap owned_of(int dim, int64_t rows, int ranks);
/// The part of a whole value that this rank holds under `layout`. For Partial axes: addends that sum to the value, drawn from `stream`,
/// integers if the values are.
Tensor make_local(const Values& whole, const Type& type, const std::string& stream);

/// One rank's part of a tensor.
struct LocalPart {
  Type type;
  Values values;
  std::vector<int> coordinates;  ///< of the rank on the mesh
};
LocalPart local_part(const Tensor& t);
/// The whole value from all ranks' parts, summed in rank order where Partial. Parts of the same elements must agree; otherwise, or if an
/// element is missing, `error` says so.
Values assemble(std::span<const LocalPart> parts, std::string& error);

/// max |a − b| / max |b|, or max |a − b| if b is 0. NaN counts as infinite unless both are NaN.
double scaled_error(const Values& a, const Values& b);

}  // namespace sheaf::testing
