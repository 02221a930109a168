// Norms of each parameter and of its gradient: they show where a model begins to diverge.
#pragma once

#include <span>
#include <vector>

#include "sheaf/nn/module.h"
#include "sheaf/nn/optim/loss_scaler.h"

namespace sheaf {

/// The 2-norms of these parameters' gradients, in their order, f64 [n], whole on every rank; 0 for one that is frozen, steered
/// (nn::Parameter::steer) or has none. Before clipping, whose scale is stored separately. One pass over gradients and, if parameters
/// are sharded, one all_reduce for all of them; sums are exact as clip_grad_norm's are. Recorded as part of the update if there is a
/// recording.
Tensor grad_norms(std::span<const nn::Parameter> parameters);
/// For gradients that contain the scaler's factor: norms without it.
Tensor grad_norms(std::span<const nn::Parameter> parameters, const optim::LossScaler& scaler);
/// The same for the parameters themselves (their masters).
Tensor parameter_norms(std::span<const nn::Parameter> parameters);

inline Tensor grad_norms(const std::vector<nn::Parameter>& parameters) { return grad_norms(std::span(parameters)); }
inline Tensor parameter_norms(const std::vector<nn::Parameter>& parameters) { return parameter_norms(std::span(parameters)); }
/// Of all parameters of a module, in the order of Module::parameters().
inline Tensor grad_norms(nn::Module& module) { return grad_norms(module.parameters()); }
inline Tensor grad_norms(nn::Module& module, const optim::LossScaler& scaler) { return grad_norms(module.parameters(), scaler); }
inline Tensor parameter_norms(nn::Module& module) { return parameter_norms(module.parameters()); }

}  // namespace sheaf
