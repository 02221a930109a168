// Averages of weights.
#pragma once

#include <memory>
#include <vector>

#include "sheaf/distributed/unit.h"
#include "sheaf/nn/module.h"

namespace sheaf::optim {

/// An exponential moving average of a model's parameters, kept in another model of the same shape and sharding, such as its clone():
///
///   models::Gpt average = nn::clone(model, config);
///   optim::Ema ema(model, average, 0.999);
///   for (...) { ...; optimizer.step(); ema.update(); }
///
/// It works on shards: there is no communication, and no bit depends on the number of ranks. The average is a model like others,
/// which can be evaluated, saved (with its model: models::SaveOptions::also) and exported. Parameters frozen in the model are not
/// updated; those in blocks (quantize()) cannot be. Buffers are not averaged but copied, so that the average is evaluated with the
/// model's current statistics.
class Ema {
 public:
  /// Throws ConfigError for a decay outside of [0, 1), models whose units or buffers differ, or a part of a model with parameters in units
  /// around it; LifetimeError for a model without memory.
  Ema(nn::Module& model, nn::Module& average, double decay);
  /// average += (1 - decay) (model - average), in the masters' dtype, and the average's buffers = the model's as they are now; as part
  /// of the update if there is a recording.
  void update();
  /// The same with a decay of this step's own, as schedules have it; as a scalar on the device it can be an input of a compiled step.
  void update(double decay);
  void update(const Tensor& decay);

 private:
  template <class Share>
  void move(const Share& share);
  static void check(double decay);
  std::vector<std::shared_ptr<Unit>> model_, average_;
  std::vector<nn::Buffer> model_buffers_, average_buffers_;
  double decay_;
};

}  // namespace sheaf::optim
