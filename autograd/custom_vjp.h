// custom_vjp: a function of public ops with a derivative of one's own. A straight-through estimator, a gradient that is
// scaled or clipped on its way, a formula that is stabler or takes less memory than what the tape derives.
//
//   Tensor rounded = custom_vjp([](const Tensor& x) { return floor(x + 0.5); }, [](Vjp& c) { c.set(0, c.grad()); }, x);
//
// [Note: custom_vjp] What the function computes is recorded on inputs without gradient, so nothing of it is saved. A node
// `custom_vjp` then views its results and has the inputs, too: the reverse pass meets it like any other op, and what the
// derivative calls lands on the tape, which therefore runs again without either function. The derivative itself is kept by
// the recording, not by the tape, as long as the recording lives.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

/// Sets the gradients of the inputs (Vjp::set), each in the dual of the input's layout, from input(i), output(i) and grad(i),
/// in public ops. An input whose gradient it does not set gets none.
using VjpFunction = std::function<void(Vjp&)>;

/// What is kept for the derivative: bit i stands for input i, or output i. It may read nothing else of them.
struct CustomVjpOptions {
  uint64_t saved_inputs = ~uint64_t{0};
  uint64_t saved_outputs = ~uint64_t{0};
};

/// f(inputs), differentiated by `vjp`. Outside of a recording, or if no input has a gradient, it is f(inputs) alone. f may
/// be given parameters as inputs; of values that it captures none may have a gradient: LifetimeError, as it would be lost.
/// What `vjp` captures must be constants that live as long as the recording.
///
/// The derivative is not checked against f (often it is another on purpose); testing::gradcheck does. It can be
/// differentiated itself, as far as the ops that it calls can. At most 64 inputs and outputs together.
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
