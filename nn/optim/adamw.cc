// AdamW as one op over a flat shard: parameters, gradient and both moments are read and written once.
#include "sheaf/nn/optim/adamw.h"

#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/optimizer.h"

namespace sheaf::optim {
namespace {

using namespace kernels::cpu;  // the order of the scalars

// param, grad, m, v, segments, scalars [, clip scale [, found_inf]] -> param, m, v, in place.
struct AdamWStep {
  static constexpr const char* kName = "adamw";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), adamw, c.output(0), c.input(1), c.output(1), c.output(2), c.input(4),
                    c.input(5), optional_input(c, 6), optional_input(c, 7));
  }
};

}  // namespace

AdamW::AdamW(std::span<const nn::Parameter> parameters, const AdamWOptions& options)
    : Optimizer("adamw", parameters, options.factors, {"m", "v"}, options.state), options_(options) {
  detail::expect_valid("adamw", {{"lr", options.lr}, {"beta1", options.beta1, true}, {"beta2", options.beta2, true}, {"eps", options.eps},
                                 {"weight_decay", options.weight_decay}});
}

std::vector<double> detail::adamw_scalars(const AdamWOptions& options, double lr, int64_t step) {
  std::vector<double> s(kAdamWScalars, 1.0);
  s[kLearningRate] = lr;
  s[kBeta1] = options.beta1;
  s[kBeta2] = options.beta2;
  s[kEpsilon] = options.eps;
  s[kWeightDecay] = options.weight_decay;
  s[kBiasCorrection1] = 1.0 - power(options.beta1, step);
  s[kBiasCorrection2] = 1.0 - power(options.beta2, step);
  s[kStep] = static_cast<double>(step);
  return s;
}

std::vector<double> AdamW::scalars(const StepOptions& step_options, int64_t step) const {
  return detail::adamw_scalars(options_, step_options.lr.value_or(options_.lr), step);
}

void AdamW::update(ShardState& shard, const Tensor& scalars) {
  apply_step(op_def<AdamWStep>(), nullptr, shard, scalars);
}

}  // namespace sheaf::optim
