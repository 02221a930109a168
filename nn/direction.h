// Directions in a model's parameter space, for second derivatives. A direction is itself a model, created, sharded and materialized
// like the one it is for: so its values are placed and gathered as the parameters are, and are never whole anywhere. The product of
// the loss's Hessian with a direction, and the curvature along it:
//
//   Recording recording({.higher_order = true});
//   const Tensor loss = model.loss(tokens, targets);
//   recording.backward(derivative_along(loss, model, direction));  // H v is stored like gradients: in the model's units
//   ...
//   const double curvature = gradient_along(model, direction).item<double>();  // <H v, v>
//
// docs/own_models.md has the largest eigenvalue of a Hessian in twenty lines.
//
// All but derivative_along() work on whole units: of a part of a model that shares a unit with other trained parameters they are a
// ConfigError.
#pragma once

#include "sheaf/nn/module.h"

namespace sheaf {

/// Recording::derivative_along() of `loss`, a value of the current recording, along the parameters of `direction`, the n-th of which
/// belongs to the n-th of `model`. Frozen and steered ones are excluded. ShapeError, naming the parameter, if the two do not match.
Tensor derivative_along(const Tensor& loss, nn::Module& model, nn::Module& direction);

/// The inner product of the model's gradients with the parameters of `direction`: f64 scalar, whole on every rank. Parameters without
/// a gradient count as 0. Collective if parameters are sharded. Gradients are used as they are: not clipped, and still multiplied by
/// a loss scaler's factor. It reads the direction's masters, whereas derivative_along() reads values, which may be rounded
/// (compute_dtype, gather_int8).
Tensor gradient_along(nn::Module& model, nn::Module& direction);

/// Sets the parameters of `direction` to the model's gradients, as gradient_along() uses them, times `scale`. Outside of recordings.
void set_to_gradient(nn::Module& direction, nn::Module& model, double scale = 1);

/// Moves the model along the direction: adds `scale` times its parameters to the model's, in the masters' dtype, where they are, without
/// communication: a step against the gradient's (SAM: Foret et al., https://arxiv.org/abs/2010.01412), a line search, a difference of
/// weights (task vectors: Ilharco et al., https://arxiv.org/abs/2212.04089). Frozen and steered parameters stay. Moving back by -scale
/// is exact up to rounding, if the direction is finite: with a loss scaler, whose gradients may not be, look at grad_norm() first. Outside
/// of recordings.
void move_along(nn::Module& model, nn::Module& direction, double scale = 1);

/// Drops the gradients of a module's parameters, as Optimizer::zero_grad() does.
void zero_grad(nn::Module& module);

}  // namespace sheaf
