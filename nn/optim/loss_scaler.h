// LossScaler: training in f16, whose range is too small for unscaled gradients.
#pragma once

#include <memory>

#include "sheaf/core/tensor.h"

namespace sheaf::optim {

struct LossScalerOptions {
  double initial = 65536;          ///< factor of the loss in the first step
  double growth_factor = 2;        ///< of the factor, at least 1; powers of two change no bit of a gradient
  double backoff_factor = 0.5;     ///< of the factor, in (0, 1]
  int64_t growth_interval = 2000;  ///< consecutive steps without overflow after which the factor grows
  double minimum = 1;              ///< lower bound of the factor
  double maximum = 0x1p64;         ///< upper bound: 1 / factor has to be an f32 number
};

/// Multiplies the loss by a factor that it adapts: it grows gradually, and if a gradient is infinite or NaN the step changes nothing
/// and the next factor is smaller (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740).
///
///   optim::LossScaler scaler(world.device());
///   ...
///   recording.backward(scaler.scale(loss));
///   clip_grad_norm(model, 1.0, scaler);  // of the unscaled gradients; infinity: no clipping
///   optimizer.step();                    // skipped on all ranks if the global norm is not finite
///   scaler.update();
///   optimizer.zero_grad();
///
/// Only state on the device changes: a recorded step may be replayed unchanged, as a program or as a graph, and nothing is copied to
/// the host except by state(). Gradients contain the factor until the optimizer reads them (full_gradient()). With several
/// optimizers, each steps or is skipped by the norm of the clip_grad_norm() over its parameters; the factor depends on all of them.
class LossScaler {
 public:
  /// ConfigError for options out of range.
  explicit LossScaler(Device device, const LossScalerOptions& options = {});

  /// The scalar `loss` times the factor, to be differentiated; also of each of several micro-batches.
  Tensor scale(const Tensor& loss) const;
  /// Adapts the factor by what the clip_grad_norm() calls since the last update() found: LifetimeError if there was none. Recorded as
  /// part of the update if there is a recording.
  void update();

  struct State {
    double factor = 0;
    int64_t good_steps = 0;     ///< without overflow, since the factor changed or a step was skipped
    int64_t lost_steps = 0;     ///< consecutive steps skipped although the factor was at its minimum
    int64_t skipped_steps = 0;  ///< in all
    bool operator==(const State&) const = default;
  };
  /// Its current state: waits for the device. With set_state() all that resuming needs.
  State state() const;
  void set_state(const State& state);

  // --- for clip_grad_norm() ---
  const Tensor& factor() const { return factor_; }  ///< f32 []
  /// i32 [], not 0 if a gradient is infinite or NaN.
  void found(const Tensor& found_inf);

 private:
  void name_leaves() const;
  void note_looked(bool has);

  LossScalerOptions options_;
  Tensor factor_, counts_;  // counts: i64 [3], see kernels/loss_scale.h
  Tensor found_inf_;        // i32 []: not 0 if one was found since the last update
  std::shared_ptr<bool> has_looked_ = std::make_shared<bool>(false);  // since then; programs note it, too
};

}  // namespace sheaf::optim
