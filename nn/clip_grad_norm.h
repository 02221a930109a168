// Clipping of the gradient by its global norm, without any copy to the host.
#pragma once

#include <span>

#include "sheaf/nn/module.h"
#include "sheaf/nn/optim/loss_scaler.h"

namespace sheaf {

/// Limits the 2-norm of the gradients of all these parameters, together, to `max_norm`. Returns the norm before clipping (f64 scalar,
/// whole on every rank) and stores scale = min(1, max_norm / (norm + 1e-6)) as a scalar tensor with each gradient, by which the
/// optimizer's step multiplies: the gradients themselves are unchanged. The last call applies, until a further
/// backward changes a gradient: clip after the last one.
///
/// The sum of squares is exact to the last rounding: f64 sums of 32-element blocks, added in fixed point, as integers across ranks.
/// It depends neither on the number of ranks, nor on strategy, units or threads. Collective if parameters are sharded; recorded as
/// part of the update if there is a recording. Pascanu, Mikolov and Bengio 2013, https://arxiv.org/abs/1211.5063.
Tensor clip_grad_norm(std::span<const nn::Parameter> parameters, double max_norm);
/// The same for gradients of scaler.scale(loss): norm and scale are divided by the scaler's factor, so they are those of the loss
/// itself; if the norm is not finite, the optimizer's step is skipped and the scaler is notified. With an infinite `max_norm` it does
/// only that.
Tensor clip_grad_norm(std::span<const nn::Parameter> parameters, double max_norm, optim::LossScaler& scaler);
/// The norm alone; nothing is clipped.
Tensor grad_norm(std::span<const nn::Parameter> parameters);

inline Tensor clip_grad_norm(const std::vector<nn::Parameter>& parameters, double max_norm) {
  return clip_grad_norm(std::span(parameters), max_norm);
}
inline Tensor clip_grad_norm(nn::Module& module, double max_norm) {
  return clip_grad_norm(module.parameters(), max_norm);
}
inline Tensor clip_grad_norm(const std::vector<nn::Parameter>& parameters, double max_norm, optim::LossScaler& scaler) {
  return clip_grad_norm(std::span(parameters), max_norm, scaler);
}
inline Tensor clip_grad_norm(nn::Module& module, double max_norm, optim::LossScaler& scaler) {
  return clip_grad_norm(module.parameters(), max_norm, scaler);
}
inline Tensor grad_norm(nn::Module& module) { return grad_norm(module.parameters()); }

}  // namespace sheaf
