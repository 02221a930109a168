// An optimizer that the library does not have: shows how to add one from outside.
#pragma once

#include "sheaf/sheaf.h"

namespace examples {

/// The op: one pass over a rank's flat shard, regardless of which parameters are in it.
struct LionStep {
  static constexpr const char* kName = "lion";
  static constexpr sheaf::OpKind kKind = sheaf::OpKind::step;
  using Attrs = sheaf::NoAttrs;
  enum Scalar { kLearningRate, kBeta1, kBeta2, kWeightDecay, kScalars };

  /// parameters, gradient, m, segments, scalars [, clip scale [, found_inf]] -> parameters, m
  static void execute(const Attrs&, sheaf::Execute& c) {
    const sheaf::View clip = sheaf::optim::optional_input(c, 5), inf = sheaf::optim::optional_input(c, 6);
    if (inf.data && inf.as<int32_t>()[0] != 0) return;
    sheaf::visit_floating(kName, c.output(0).dtype, [&]<class T>() {
      // Masters are f32 or f64.
      if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
        T scale = 1;
        if (clip.data)
          sheaf::visit_floating(kName, clip.dtype, [&]<class S>() {
            if constexpr (std::is_same_v<S, float> || std::is_same_v<S, double>) scale = static_cast<T>(*clip.as<S>());
          });
        update<T>(c, scale);
      }
    });
  }

 private:
  template <class T>
  static void update(sheaf::Execute& c, T scale) {
    T *x = c.output(0).as<T>(), *m = c.output(1).as<T>();
    const T* g = c.input(1).as<T>();
    const double* s = c.input(4).as<double>();
    const auto lr = static_cast<T>(s[kLearningRate]), beta1 = static_cast<T>(s[kBeta1]), beta2 = static_cast<T>(s[kBeta2]),
               decay = static_cast<T>(s[kWeightDecay]);
    const auto* segments = c.input(3).as<sheaf::kernels::Segment>();
    for (int64_t k = 0; k < c.input(3).shape[0]; ++k) {
      const auto first = static_cast<int64_t>(segments[k].begin), last = static_cast<int64_t>(segments[k].end);
      const T rate = lr * static_cast<T>(segments[k].lr), shrinks = decay * static_cast<T>(segments[k].weight_decay);
      sheaf::parallel_for(last - first, 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t i = first + begin; i < first + end; ++i) {
          const T gradient = scale * g[i], u = beta1 * m[i] + (1 - beta1) * gradient;
          x[i] -= rate * (static_cast<T>((u > 0) - (u < 0)) + shrinks * x[i]);
          m[i] = beta2 * m[i] + (1 - beta2) * gradient;
        }
      });
    }
  }
};

struct LionOptions {
  double lr = 1e-4;  ///< unless step() is told another
  double beta1 = 0.9, beta2 = 0.99;
  double weight_decay = 1.0;           ///< decoupled, times the learning rate
  sheaf::optim::Factors factors = {};  ///< of both, per parameter
};

/// Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2): steps by the sign of an average of gradients. It works on
/// shards, so it needs to know nothing of ranks; clip_grad_norm, loss scalers, checkpoints and programs treat it like AdamW. Its kernel is
/// for CPUs.
struct Lion final : sheaf::optim::Optimizer {
  LionOptions options;

  explicit Lion(sheaf::nn::Module& model, const LionOptions& how = {})
      : Optimizer("lion", model.parameters(), how.factors, /*states=*/{"m"}, {}), options(how) {}

 private:
  std::vector<double> scalars(const sheaf::optim::StepOptions& step, int64_t /*number*/) const override {
    return {step.lr.value_or(options.lr), options.beta1, options.beta2, options.weight_decay};
  }
  void update(sheaf::optim::ShardState& shard, const sheaf::Tensor& scalars) override {
    sheaf::optim::apply_step(sheaf::op_def<LionStep>(), nullptr, shard, scalars);
  }
};

}  // namespace examples
