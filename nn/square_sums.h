// Sums of squares over the flat shards of units, exact to the last rounding: the basis of norms.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "sheaf/autograd/op_call.h"
#include "sheaf/core/tensor.h"
#include "sheaf/distributed/unit.h"

namespace sheaf::nn {

enum class FlatValues : uint8_t { gradients, masters };

/// The row of leaf `leaf` of a unit, or -1 for one that is excluded.
struct SquareRows {
  int64_t rows = 0;
  std::function<int64_t(const Unit& unit, int leaf)> of = {};
};

/// The squares of what is trained in these units (and not steered: nn::Parameter::steer), as limbs i64 [24]
/// (kernels/sum_of_squares.h), or in rows [rows, 24]; of gradients only those that exist or were consumed. One for each kind of placement, whole on every
/// rank: they are to be summed, as integers. None if there is nothing. Collective; reduces pending gradients first.
std::vector<Tensor> square_sums(std::span<const std::shared_ptr<Unit>> units, FlatValues of, const SquareRows& rows = {});

/// Keeps the squares of this buffer's gradient (FlatBuffer::squares), which is about to be consumed, for square_sums().
void keep_squares(FlatBuffer& buffer);

/// In an op with these as its first `count` inputs: their sum, in `scratch`, as large as one of them, untouched if there is only one.
View sum_of_limbs(const Execute& c, int64_t count, void* scratch);

}  // namespace sheaf::nn
