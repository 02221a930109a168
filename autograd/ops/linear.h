// What the ops around a linear layer y = x weightᵀ + bias share. Its input is the op's input 0; the
// weight stands anywhere behind it, the bias (optional) after the weight.
#pragma once

#include "sheaf/autograd/ops/rows.h"

namespace sheaf::ops {

/// Declares y[.., O] of x[.., I], weight[O, I] [, bias[O]].
void infer_linear(const char* op, Infer& c, int weight);
/// Sets the gradients of weight and bias, if they are wanted, by dy[.., O]: one op for both, which may come later. Of ops with
/// kWeightsLater.
void set_parameter_gradients(Vjp& c, const Tensor& dy, int weight);
/// x[.., O] weight[O, I]; a vector is a matrix of one row.
Tensor times(const Tensor& x, const Tensor& weight);
/// dyᵀ x over all rows, [O, I].
Tensor weight_gradient(const Tensor& dy, const Tensor& x);

}  // namespace sheaf::ops
