// AdamW.
#pragma once

#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::optim {

struct AdamWOptions {
  double lr = 1e-3;      ///< learning rate, unless step() is told another
  double beta1 = 0.9;    ///< decay of the first moment
  double beta2 = 0.999;  ///< decay of the second moment
  double eps = 1e-8;
  double weight_decay = 0.01;  ///< decoupled, times the learning rate
  Factors factors = {};        ///< of learning rate and weight decay, per parameter
  StateOptions state = {};     ///< of both moments
};

/// AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, algorithm 2); the formula and its roundings are in
/// kernels/optimizer.h. One pass over each unit's flat shard, with two state tensors.
class AdamW final : public Optimizer {
 public:
  explicit AdamW(std::span<const nn::Parameter> parameters, const AdamWOptions& options = {});
  explicit AdamW(const std::vector<nn::Parameter>& parameters, const AdamWOptions& options = {})
      : AdamW(std::span(parameters), options) {}
  explicit AdamW(nn::Module& module, const AdamWOptions& options = {}) : AdamW(module.parameters(), options) {}

 private:
  std::vector<double> scalars(const StepOptions& options, int64_t step) const override;
  bool corrects_bias() const override { return true; }
  void update(ShardState& shard, const Tensor& scalars) override;
  AdamWOptions options_;
};

namespace detail {
/// The scalars of kernels::cpu::adamw in its order, without clipping.
std::vector<double> adamw_scalars(const AdamWOptions& options, double lr, int64_t step);
}  // namespace detail

}  // namespace sheaf::optim
