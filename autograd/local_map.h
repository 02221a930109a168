// local_map: a function of each rank's local values, with placements that are declared, not derived. For computations that no op has
// a placement rule for, such as processing a sharded dimension piece by piece and summing.
//
//   // log Σ exp over a sharded dimension: each rank's addend, and one all-reduce.
//   const Type addends{x.dtype(), {rows}, x.layout().with(axis, Placement::partial())};
//   const Tensor sums = local_map([](const Tensor& mine) { return sum(exp(mine), 1); }, addends, x);  // x: Shard(1)
//   const Tensor y = log(redistribute(sums, "data", Placement::replicate()));
//
// [Note: local_map] Inside, everything is Replicate and has its local shape: a rank's own value is typed as "the whole value,
// entering rank-varying compute". So gradients are Partial there, and captured values (Replicate, gathered weights) get the sum over
// ranks. Entering and leaving are recorded, move no data and are each other's adjoints. Intermediate values of f are one rank's, not
// logical values, which is why rowwise() is preferable where it applies.
#pragma once

#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

/// f on this rank's local part of each input: of a Shard its slice, of a Partial its addend, of a Replicate all of it. Its results
/// are returned as `outputs`, one type each, whose local shapes and dtypes they must have (ShapeError, DTypeError). f may not
/// communicate, except for gathers of units. That the results are what the types claim is not checked:
///   - Shard: each rank computed its slice; Partial: addends; Replicate: all ranks computed the same;
///   - in an input that is Partial, f is linear, with the same coefficients on all ranks (a product in FP8 is not).
/// PlacementError for inputs or outputs that are Invariant (redistribute to or from Replicate, where gradients are summed) or on one
/// rank of an axis, and for several meshes. Random ops draw the same numbers on all ranks.
std::vector<Tensor> local_map(const TensorFunction& f, std::span<const Type> outputs, std::span<const Tensor> inputs);

/// The same for an f that takes tensors and returns one.
template <class F, class... Inputs>
  requires detail::AllTensors<Inputs...>
Tensor local_map(F&& f, const Type& output, const Inputs&... inputs) {
  return detail::run_on_list(
      f, [&](const TensorFunction& g, std::span<const Tensor> all) { return local_map(g, std::span(&output, 1), all); }, inputs...);
}
/// The same for an f that returns a vector of tensors.
template <class F, class... Inputs>
  requires detail::AllTensors<Inputs...>
std::vector<Tensor> local_map(F&& f, const std::vector<Type>& outputs, const Inputs&... inputs) {
  return detail::run_on_list(
      f, [&](const TensorFunction& g, std::span<const Tensor> all) { return local_map(g, std::span(outputs), all); }, inputs...);
}

}  // namespace sheaf
