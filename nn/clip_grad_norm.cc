#include "sheaf/nn/clip_grad_norm.h"

#include <limits>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/sum_of_squares.h"
#include "sheaf/nn/square_sums.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf {
namespace {

// Inputs: limbs, whole on this rank, of each group of units [, factor of the loss f32 []]; outputs: norm f64 [], scale f64 [] [, i32
// []: 1 if the norm is not finite].
struct ClipScale {
  static constexpr const char* kName = "clip_scale";
  struct Attrs { double max_norm; };
  static bool unscales(const Execute& c) { return c.num_outputs() == 3; }
  static int groups(const Execute& c) { return c.num_inputs() - unscales(c); }
  static int64_t workspace(const Attrs&, const Execute& c) { return groups(c) > 1 ? c.input(0).bytes() : 0; }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    SHEAF_ON_DEVICE(stream, clip_scale, nn::sum_of_limbs(c, groups(c), c.workspace.data), a.max_norm, c.output(0), c.output(1),
                    unscales(c) ? c.input(groups(c)) : View{}, unscales(c) ? c.output(2) : View{});
  }
  static void describe(const Attrs& a, std::string& out) { out += str("max_norm ", a.max_norm); }
};

// Norm and scale of the gradients of `units`; given the factor that these contain, also whether there was an overflow.
Tensors norm_and_scale(const char* who, std::span<const std::shared_ptr<Unit>> units, double max_norm,
                       const Tensor& loss_factor = {}) {
  std::vector<Tensor> limbs = nn::square_sums(units, nn::FlatValues::gradients);
  if (limbs.empty()) fail<LifetimeError>("[", who, "] there are no gradients of these parameters: call recording.backward(loss) first, of ",
                                         "a loss that depends on them");
  const Layout& layout = limbs[0].layout();
  const OutputSpec specs[] = {{.type = {kF64, {}, layout}}, {.type = {kF64, {}, layout}}, {.type = {kI32, {}, layout}}};
  const ClipScale::Attrs attrs{max_norm};
  if (loss_factor) limbs.push_back(loss_factor);
  return apply_typed(op_def<ClipScale>(), &attrs, limbs, std::span(specs, loss_factor ? 3 : 2));
}

Tensors clip(std::span<const nn::Parameter> parameters, double max_norm, const Tensor& loss_factor) {
  check<ConfigError>(max_norm > 0, "[clip_grad_norm] max_norm is ", max_norm, "; it must be positive");
  const PhaseScope phase(Phase::update);
  const auto units = nn::trainable_units("clip_grad_norm", parameters);
  Tensors out = norm_and_scale("clip_grad_norm", units, max_norm, loss_factor);
  for (const auto& unit : units) unit->expect_not_consumed("clip_grad_norm");
  for (const auto& unit : units)
    for (FlatBuffer& b : unit->buffers()) {
      if (!b.trainable || !b.grad) continue;
      b.grad_scale = out[1];
      b.found_inf = loss_factor ? out[2] : Tensor();
    }
  return out;
}

}  // namespace

Tensor clip_grad_norm(std::span<const nn::Parameter> parameters, double max_norm) { return clip(parameters, max_norm, {})[0]; }

Tensor clip_grad_norm(std::span<const nn::Parameter> parameters, double max_norm, optim::LossScaler& scaler) {
  const Tensors out = clip(parameters, max_norm, scaler.factor());
  const PhaseScope phase(Phase::update);
  scaler.found(out[2]);
  return out[0];
}

Tensor grad_norm(std::span<const nn::Parameter> parameters) {
  const PhaseScope phase(Phase::update);
  return norm_and_scale("grad_norm", nn::trainable_units("grad_norm", parameters),
                        std::numeric_limits<double>::infinity())[0];
}

}  // namespace sheaf
