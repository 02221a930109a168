// local_map: a function of what each rank holds, with placements that are declared and not derived. For what no op has a rule
// for, such as a cut dimension that is worked on piece by piece and summed.
//
//   // log Σ exp over a dimension that is cut: each rank's addend, and one all-reduce.
//   const Type addends{x.dtype(), {rows}, x.layout().with(axis, Placement::partial())};
//   const Tensor sums = local_map([](const Tensor& mine) { return sum(exp(mine), 1); }, addends, x);  // x: Shard(1)
//   const Tensor y = log(redistribute(sums, "data", Placement::replicate()));
//
// [Note: local_map] Inside, everything is Replicate and has its local shape: "the whole value, entering rank-varying compute",
// of a value that is each rank's own. So gradients are Partial there, and what f captures (Replicate, gathered weights) gets the
// sum over ranks. Entering and leaving are recorded, move no byte and are each other's adjoints. What f computes is of one rank
// and no logical value, which is why rowwise() is to be preferred where it does.
#pragma once

#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

/// f on what this rank holds of each input: of a Shard its slice, of a Partial its addend, of a Replicate all of it. Its results
/// come back as `outputs`, a type each, whose local shapes and dtypes they must have (ShapeError, DTypeError). Nothing in f may
/// communicate but the gathers of units. That the results are what the types say is believed, not checked:
///   - Shard: each rank computed its slice; Partial: addends; Replicate: all ranks computed the same;
///   - of an input that is Partial f is linear, with the same coefficients on all ranks (a product in FP8 is not).
/// PlacementError for inputs or outputs that are Invariant (redistribute to or from Replicate, where gradients add up) or on one
/// rank of an axis, and for several meshes. Random ops draw the same numbers on all ranks.
std::vector<Tensor> local_map(const TensorFunction& f, std::span<const Type> outputs, std::span<const Tensor> inputs);

/// The same for an f that takes tensors and returns one.
template <class F, class... Inputs>
  requires detail::AllTensors<Inputs...>
Tensor local_map(F&& f, const Type& output, const Inputs&... inputs) {
  return detail::run_on_list(
      f, [&](const TensorFunction& g, std::span<const Tensor> all) { return local_map(g, std::span(&output, 1), all); }, inputs...);
}
/// For one that returns a vector of them.
template <class F, class... Inputs>
  requires detail::AllTensors<Inputs...>
std::vector<Tensor> local_map(F&& f, const std::vector<Type>& outputs, const Inputs&... inputs) {
  return detail::run_on_list(
      f, [&](const TensorFunction& g, std::span<const Tensor> all) { return local_map(g, std::span(outputs), all); }, inputs...);
}

}  // namespace sheaf
