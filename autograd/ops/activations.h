// Derivatives of activation functions for the ops that contain one.
#pragma once

#include "sheaf/autograd/ops.h"

namespace sheaf::ops {

/// dy gelu'(x), as one op, itself differentiable.
Tensor gelu_gradient(const Tensor& x, const Tensor& dy, GeluKind kind);
/// gelu''(x). Exact: phi(x) (2 - x^2). Approximate: y = x s(w), w = k (x + c x^3); y'' = 2 s' + x s''.
Tensor gelu_second(const Tensor& x, GeluKind kind);
/// silu''(x) = s (1 - s) (2 + x (1 - 2 s)), s = sigmoid(x).
Tensor silu_second(const Tensor& x);

}  // namespace sheaf::ops
