#include "sheaf/nn/optim/sgd.h"

#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/optimizer.h"

namespace sheaf::optim {
namespace {

using namespace kernels::cpu;  // the order of the scalars

// param, grad [, momentum], segments, scalars [, clip scale [, found_inf]] -> param [, momentum], in place.
struct SgdStep {
  static constexpr const char* kName = "sgd";
  static constexpr OpKind kKind = OpKind::step;
  struct Attrs { int32_t momentum, nesterov; };
  static void execute(const Attrs& a, Execute& c) {
    const int segments = 2 + a.momentum;
    SHEAF_ON_DEVICE(c.stream(), sgd, c.output(0), c.input(1), a.momentum ? c.output(1) : View{}, c.input(segments),
                    c.input(segments + 1), a.nesterov != 0, optional_input(c, segments + 2),
                    optional_input(c, segments + 3));
  }
  static void describe(const Attrs& a, std::string& out) { out += a.nesterov ? "nesterov" : ""; }
};

}  // namespace

SGD::SGD(std::span<const nn::Parameter> parameters, const SgdOptions& options)
    : Optimizer("sgd", parameters, options.factors,
                options.momentum != 0.0 ? std::vector<std::string>{"momentum"} : std::vector<std::string>{},
                options.state),
      options_(options) {
  detail::expect_valid("sgd", {{"lr", options.lr}, {"momentum", options.momentum}, {"weight_decay", options.weight_decay}});
  if (options.nesterov && options.momentum == 0.0) fail<ConfigError>("[sgd] nesterov needs momentum");
}

std::vector<double> SGD::scalars(const StepOptions& step_options, int64_t step) const {
  std::vector<double> s(kSgdScalars, 1.0);
  s[kSgdLearningRate] = step_options.lr.value_or(options_.lr);
  s[kSgdMomentum] = options_.momentum;
  s[kSgdWeightDecay] = options_.weight_decay;
  s[kSgdStep] = static_cast<double>(step);
  return s;
}

void SGD::update(ShardState& shard, const Tensor& scalars) {
  const SgdStep::Attrs attrs{options_.momentum != 0.0, options_.nesterov};
  apply_step(op_def<SgdStep>(), &attrs, shard, scalars);
}

void detail::nesterov_step(const Tensor& param, const Tensor& grad, const Tensor& momentum, const Tensor& segments,
                           const Tensor& scalars) {
  const SgdStep::Attrs attrs{1, 1};
  const Tensor inputs[] = {param, grad, momentum, segments, scalars};
  const OutputSpec outputs[] = {{.type = param.type(), .into = param}, {.type = momentum.type(), .into = momentum}};
  apply_typed(op_def<SgdStep>(), &attrs, inputs, outputs);
}

}  // namespace sheaf::optim
