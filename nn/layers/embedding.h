// A table of rows, looked up by index.
#pragma once

#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/layers/tensor_region.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// y[.., width] = weight[tokens[..], width]; tokens of any integer type. A token outside [0, rows) is a DataError. A tensor axis
/// shards the table by `cut`, along dimension 0: each rank looks up the tokens of its rows, and y is placed as tokens are.
struct Embedding : Module {
  Parameter weight;

  Embedding(int64_t rows, int64_t width, Init init = Init::normal(1.0), const std::optional<OwnershipMap>& cut = std::nullopt)
      : weight({rows, width}, init) {
    weight.set_table();
    if (cut) weight.set_cut(*cut);
  }
  Tensor forward(const Tensor& tokens) {
    const TensorRegion region(tokens, weight);
    return region.leave(embedding(region.enter(tokens), weight));
  }
  SHEAF_FIELDS(weight);
};

}  // namespace sheaf::nn
