// TensorFunction: a function of tensors that is passed to other code (rowwise, custom_vjp, compile).
#pragma once

#include <array>
#include <functional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf {

/// Takes some tensors, returns any number of tensors.
using TensorFunction = std::function<std::vector<Tensor>(std::span<const Tensor>)>;

namespace detail {

/// Calls run(g, inputs), where g is f as a function of a list and run returns g's results. f takes as many tensors as there are
/// inputs and returns one, or a vector of them; so does this.
template <class F, class Run, class... Inputs>
auto run_on_list(F& f, Run&& run, const Inputs&... inputs) {
  const std::array<Tensor, sizeof...(inputs)> all{inputs...};
  constexpr bool kOne = std::is_convertible_v<std::invoke_result_t<F&, const Inputs&...>, Tensor>;
  const auto call = [&]<size_t... I>(std::span<const Tensor> x, std::index_sequence<I...>) {
    if constexpr (kOne) return std::vector<Tensor>{f(x[I]...)};
    else return std::vector<Tensor>(f(x[I]...));
  };
  std::vector<Tensor> out = run(
      TensorFunction([&](std::span<const Tensor> x) { return call(x, std::index_sequence_for<Inputs...>()); }),
      std::span<const Tensor>(all));
  if constexpr (kOne) return std::move(out[0]);
  else return out;
}

template <class... Inputs>
concept AllTensors = sizeof...(Inputs) > 0 && (std::is_convertible_v<const Inputs&, Tensor> && ...);

}  // namespace detail
}  // namespace sheaf
