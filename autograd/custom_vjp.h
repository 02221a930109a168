// custom_vjp: a function of public ops with a user-defined derivative: a straight-through estimator, a gradient that is scaled or
// clipped, a formula that is stabler or takes less memory than the derived one.
//
//   Tensor binary = custom_vjp([](const Tensor& w) { return sign(w); }, [](Vjp& c) { c.set(0, c.grad()); }, weight);
//
// [Note: custom_vjp] The function's ops are recorded on inputs without gradient, so nothing is saved for them. A node `custom_vjp`
// then views its results and has the inputs, too: the reverse pass treats it like any other op, and the ops that the derivative calls
// are recorded, so the tape can be replayed without either function. The derivative itself is kept by the recording, not by the tape,
// as long as the recording lives.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

/// Sets the gradients of the inputs (Vjp::set), each in the dual of the input's layout, from input(i), output(i) and grad(i), using
/// public ops. An input whose gradient it does not set gets none. Of several outputs only those that something depends on have a
/// gradient: has_grad(i) says so, and elsewhere grad(i) is undefined.
using VjpFunction = std::function<void(Vjp&)>;

/// Which inputs and outputs are saved for the derivative (bit i: input i, output i). It must not read others.
struct CustomVjpOptions {
  uint64_t saved_inputs = ~uint64_t{0};
  uint64_t saved_outputs = ~uint64_t{0};
};

/// f(inputs), differentiated by `vjp`. Outside of a recording, or if no input has a gradient, it is just f(inputs). f may be given
/// parameters as inputs; values that it captures must not have a gradient (LifetimeError), as it would be lost. Values that `vjp`
/// captures must be constants that live as long as the recording.
///
/// The derivative is not checked against f (often it differs on purpose); testing::gradcheck does that. It can itself be
/// differentiated if the ops that it calls can. At most 64 inputs and outputs together.
std::vector<Tensor> custom_vjp(const TensorFunction& f, const VjpFunction& vjp, const CustomVjpOptions& options,
                               std::span<const Tensor> inputs);

/// The same for an f that takes tensors and returns one, or a vector of them.
template <class F, class... Inputs>
  requires detail::AllTensors<Inputs...>
auto custom_vjp(F&& f, const VjpFunction& vjp, const CustomVjpOptions& options, const Inputs&... inputs) {
  return detail::run_on_list(
      f, [&](const TensorFunction& g, std::span<const Tensor> all) { return custom_vjp(g, vjp, options, all); }, inputs...);
}
template <class F, class... Inputs>
  requires detail::AllTensors<Inputs...>
auto custom_vjp(F&& f, const VjpFunction& vjp, const Inputs&... inputs) {
  return custom_vjp(f, vjp, CustomVjpOptions{}, inputs...);
}

}  // namespace sheaf
