// A table of rows, looked up by index.
#pragma once

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// y[.., width] = weight[tokens[..], width]; tokens of any integer type. A token outside [0, rows) is a DataError.
struct Embedding : Module {
  Parameter weight;

  Embedding(int64_t rows, int64_t width, Init init = Init::normal(1.0)) : weight({rows, width}, init) {}
  Tensor forward(const Tensor& tokens) { return embedding(tokens, weight); }
  SHEAF_FIELDS(weight);
};

}  // namespace sheaf::nn
