// Stochastic gradient descent.
#pragma once

#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::optim {

struct SgdOptions {
  double lr = 1e-2;       ///< learning rate, unless step() is told another
  double momentum = 0.0;  ///< 0: no momentum, and no state
  bool nesterov = false;
  double weight_decay = 0.0;  ///< added to the gradient
  Factors factors = {};       ///< of learning rate and weight decay, per parameter
  StateOptions state = {};    ///< of the momentum
};

/// SGD with momentum (Sutskever et al. 2013, in PyTorch's form without dampening); the formula is in
/// kernels/optimizer.h. One pass over each unit's flat shard.
class SGD final : public Optimizer {
 public:
  explicit SGD(std::span<const nn::Parameter> parameters, const SgdOptions& options = {});
  explicit SGD(const std::vector<nn::Parameter>& parameters, const SgdOptions& options = {})
      : SGD(std::span(parameters), options) {}
  explicit SGD(nn::Module& module, const SgdOptions& options = {}) : SGD(module.parameters(), options) {}

 private:
  std::vector<double> scalars(const StepOptions& options, int64_t step) const override;
  void update(ShardState& shard, const Tensor& scalars) override;
  SgdOptions options_;
};

namespace detail {
/// One step of SGD with Nesterov's momentum, in place, on tensors of one type, parameters or not; `scalars` in the order of
/// kernels::cpu::sgd.
void nesterov_step(const Tensor& param, const Tensor& grad, const Tensor& momentum, const Tensor& segments, const Tensor& scalars);
}  // namespace detail

}  // namespace sheaf::optim
