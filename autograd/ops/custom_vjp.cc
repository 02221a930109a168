#include "sheaf/autograd/custom_vjp.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"

namespace sheaf {
namespace {

// Inputs: those of the function, then its results, which the outputs view.
struct CustomVjpNode {
  static constexpr const char* kName = "custom_vjp";
  static constexpr bool kRecipe = true;  // if applied to gathered parameters through views alone: it moves no data
  static constexpr uint64_t kSavedInputs = ~uint64_t{0}, kSavedOutputs = ~uint64_t{0};
  struct Attrs {
    int64_t derivative;  // number in the recording
    CustomVjpOptions saved;
    int64_t inputs;
  };
  static bool alias(const Attrs&, const View& in, View& out) {
    out.strides = in.strides;
    out.data = in.data;
    return true;
  }
  static void saves(const Attrs& a, uint64_t, uint64_t& inputs, uint64_t& outputs) {
    inputs = a.saved.saved_inputs & ((uint64_t{1} << a.inputs) - 1);
    outputs = a.saved.saved_outputs;
  }
  static void vjp(const Attrs& a, Vjp& c) { Recording::current()->derivative(a.derivative)(c); }
};

}  // namespace

std::vector<Tensor> custom_vjp(const TensorFunction& f, const VjpFunction& vjp, const CustomVjpOptions& options,
                               std::span<const Tensor> inputs) {
  check<LifetimeError>(f && vjp, "[custom_vjp] ", path_label(PathScope::current()), ": no function, or no derivative, is given");
  Recording* const r = Recording::current();
  if (!r || std::ranges::none_of(inputs, [&](const Tensor& x) { return r->has_gradient(x); }))
    return f(inputs);
  std::vector<Tensor> operands, constants;
  for (const Tensor& x : inputs) operands.push_back(x), constants.push_back(stop_gradient(x));
  std::vector<Tensor> out = f(constants);
  const auto where = [] { return path_label(PathScope::current()); };
  if (operands.size() + out.size() > 63 || out.empty())
    fail<ShapeError>("[custom_vjp] ", where(), ": ", operands.size(), " inputs and ", out.size(), " outputs: there can be 1 to 63 in all");
  std::vector<OutputSpec> specs;
  for (const Tensor& y : out) {
    if (r->has_gradient(y))
      fail<LifetimeError>("[custom_vjp] ", where(), ": the result ", y.type(), " depends on a value with a gradient that is not ",
                          "among its inputs: that gradient would be lost. Give it as an input, or stop_gradient() it");
    operands.push_back(y);
    specs.push_back({.type = y.type()});
  }
  const CustomVjpNode::Attrs attrs{r->add_derivative(vjp), options, static_cast<int64_t>(inputs.size())};
  const Tensors views = apply_typed(op_def<CustomVjpNode>(), &attrs, operands, specs);
  return {views.begin(), views.end()};
}

}  // namespace sheaf
