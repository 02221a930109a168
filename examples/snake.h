// An op and a layer that the library does not have: shows how to add them from outside.
#pragma once

#include <cmath>

#include "sheaf/sheaf.h"

namespace examples {

/// The op. The tape stores which op it is and the bytes of Attrs, no closure, so a recorded step
/// replays even after the model is gone.
struct Snake {
  static constexpr const char* kName = "snake";
  struct Attrs {
    double frequency;
  };
  static constexpr uint64_t kSavedInputs = 0b1;  // backward reads x

  static void infer(const Attrs& a, sheaf::Infer& c) {
    if (!sheaf::is_floating(c.dtype(0)))
      sheaf::fail<sheaf::DTypeError>("[snake] needs a floating type, not ", c.input(0));
    if (!(a.frequency > 0))
      sheaf::fail<sheaf::ConfigError>("[snake] frequency ", a.frequency, " is not positive");
    c.output(c.dtype(0), c.shape(0));
  }
  /// Elementwise: the result is cut as x is. The backward's placement rule follows from this one.
  static void place(const Attrs&, sheaf::Place& p) { sheaf::rules::pointwise_nonlinear(p); }

  /// Local elements; x is dense (see snake()). Threads may take any ranges: elements are
  /// independent of each other.
  static void execute(const Attrs& a, sheaf::Execute& c) {
    sheaf::visit_floating(kName, c.input(0).dtype, [&]<class T>() {
      using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
      const auto frequency = static_cast<Compute>(a.frequency);
      const T* x = c.input(0).as<T>();
      T* y = c.output(0).as<T>();
      sheaf::parallel_for(c.input(0).numel(), 4096, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const auto v = static_cast<Compute>(x[i]), s = std::sin(frequency * v);
          y[i] = static_cast<T>(v + s * s / frequency);
        }
      });
    });
  }
  /// d/dx = 1 + sin(2 frequency x), in public ops, so it is recorded, placed and differentiable
  /// again.
  static void vjp(const Attrs& a, sheaf::Vjp& c) {
    c.set(0, c.grad() * (sin(c.input(0) * (2 * a.frequency)) + 1.0));
  }
  static void describe(const Attrs& a, std::string& out) {
    out += sheaf::str("frequency ", a.frequency);
  }
};

/// x + sin²(frequency x) / frequency, an activation that extrapolates periodic functions (Ziyin,
/// Hartwig and Ueda 2020, https://arxiv.org/abs/2006.08195). The op's kernel is for CPUs; on a GPU
/// the formula in the library's ops is used instead.
inline sheaf::Tensor snake(const sheaf::Tensor& x, double frequency = 1.0) {
  if (x.device().is_cuda()) return x + square(sin(x * frequency)) / frequency;
  return sheaf::apply<Snake>({frequency}, {contiguous(x)});
}

/// The layer: snake(x weightᵀ + bias). It knows nothing of ranks.
struct SnakeLayer : sheaf::nn::Module {
  sheaf::nn::Parameter weight, bias;
  double frequency;

  SnakeLayer(int64_t in, int64_t out, double frequency = 1.0)
      : weight({out, in}, sheaf::nn::Init::uniform(std::sqrt(3.0 / static_cast<double>(in)))),
        bias({out}, sheaf::nn::Init::uniform(1.0)),
        frequency(frequency) {}
  sheaf::Tensor forward(const sheaf::Tensor& x) {
    return snake(linear(x, weight, bias), frequency);
  }
  SHEAF_FIELDS(weight, bias);
};

}  // namespace examples
