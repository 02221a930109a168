// rowwise: the declaration that rows are independent. It runs a function on this rank's rows, for cases where global ops would mean
// something else (a mixture of experts sorts its own tokens, not those of all ranks) or have no placement rule.
//
//   Tensor y = rowwise([&](const Tensor& rows) { return experts(rows); }, x);      // x: Shard(0), y: Shard(0)
//
// [Note: rows] Inside, an input that was Shard(0) on an axis is Replicate there, of its local shape: Replicate means "the whole
// value, entering rank-varying compute", and only the choice of rows varies from rank to rank. So every rule applies unchanged: local
// values meet gathered weights (Replicate) without communication, gradients are Partial, and a weight's gradient is, as it should be,
// the sum over ranks. Entering and leaving are two recorded ops that move no data, each the adjoint of the other: a row's cotangent,
// one rank's addend inside, is Shard(0) outside.
#pragma once

#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

/// A function of rows: k tensors with one row per sample in, any number of such tensors out.
using RowFunction = TensorFunction;

/// f on the rows (dimension 0) that this rank holds. The inputs have equally many rows; those that are Replicate where another is
/// sharded are sliced. Every output must have a row for every input row and is returned sharded as the inputs are. Other values that
/// f reads (weights) it captures; nothing inside may communicate but the gathers of units, and f must use the same weights on every
/// rank, even one without rows. Shards of other dimensions stay as they are, visible to f.
///
/// That rows are independent is declared, not proven: testing::check_rowwise tests it. Random ops inside use row indices of the whole
/// batch. Throws ShapeError for different numbers of rows, PlacementError for rows that are Partial, Invariant or sharded in
/// different ways.
std::vector<Tensor> rowwise(const RowFunction& f, std::span<const Tensor> inputs);

/// The same for an f that takes tensors and returns one, or a vector of them.
template <class F, class... Inputs>
  requires detail::AllTensors<Inputs...>
auto rowwise(F&& f, const Inputs&... inputs) {
  return detail::run_on_list(f, [](const RowFunction& g, std::span<const Tensor> all) { return rowwise(g, all); }, inputs...);
}

/// Inside of rowwise: the global index of this rank's first row. 0 outside. Random ops add it to their index.
int64_t first_local_row();

}  // namespace sheaf
