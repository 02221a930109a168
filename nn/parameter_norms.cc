#include "sheaf/nn/parameter_norms.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/sum_of_squares.h"
#include "sheaf/nn/square_sums.h"

namespace sheaf {
namespace {

using kernels::cpu::kSquareLimbs;

// Inputs: limbs i64 [rows, 24], whole on this rank, of each group of units [, factor of the loss f32 []]; output: norms f64 [rows].
struct Norms {
  static constexpr const char* kName = "norms";
  struct Attrs { int64_t groups; };
  static constexpr int64_t kScaleBytes = 256;
  static int64_t workspace(const Attrs& a, const Execute& c) { return kScaleBytes + (a.groups > 1 ? c.input(0).bytes() : 0); }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View scale = View::dense(c.workspace.data, kF64, {}), factor = c.num_inputs() > a.groups ? c.input(static_cast<int>(a.groups)) : View{};
    const View limbs = nn::sum_of_limbs(c, a.groups, static_cast<char*>(c.workspace.data) + kScaleBytes);
    for (int64_t row = 0; row < limbs.shape[0]; ++row)
      SHEAF_ON_DEVICE(stream, clip_scale, View::dense(limbs.as<int64_t>() + row * kSquareLimbs, kI64, {kSquareLimbs}),
                      std::numeric_limits<double>::infinity(), View::dense(c.output(0).as<double>() + row, kF64, {}), scale, factor);
  }
};

Tensor norms(std::span<const nn::Parameter> parameters, nn::FlatValues of, const Tensor& factor = {}) {
  const PhaseScope phase(Phase::update);
  std::vector<std::shared_ptr<Unit>> units;
  std::map<std::pair<const Unit*, int>, int64_t> rows;
  for (const nn::Parameter& p : parameters) {
    if (!p.unit())
      fail<LifetimeError>("[norms] parameter '", p.name(), "' has no memory: materialize() its model first");
    rows.try_emplace({p.unit().get(), p.index()}, static_cast<int64_t>(rows.size()));
    if (std::ranges::find(units, p.unit()) == units.end()) units.push_back(p.unit());
  }
  if (rows.size() != parameters.size()) fail<ConfigError>("[norms] a parameter is given twice");
  const auto count = static_cast<int64_t>(parameters.size());
  std::vector<Tensor> limbs = nn::square_sums(units, of, {count, [&](const Unit& unit, int leaf) {
    const auto found = rows.find({&unit, leaf});
    return found == rows.end() ? -1 : found->second;
  }});
  if (limbs.empty()) return zeros({count}, kF64);
  const OutputSpec spec{.type = {kF64, {count}, limbs[0].layout()}};
  const Norms::Attrs attrs{std::ssize(limbs)};
  if (factor) limbs.push_back(factor);
  return apply_typed(op_def<Norms>(), &attrs, limbs, std::span(&spec, 1))[0];
}

}  // namespace

Tensor grad_norms(std::span<const nn::Parameter> parameters) { return norms(parameters, nn::FlatValues::gradients); }
Tensor grad_norms(std::span<const nn::Parameter> parameters, const optim::LossScaler& scaler) {
  return norms(parameters, nn::FlatValues::gradients, scaler.factor());
}
Tensor parameter_norms(std::span<const nn::Parameter> parameters) { return norms(parameters, nn::FlatValues::masters); }

}  // namespace sheaf
