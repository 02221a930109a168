#include "sheaf/nn/optim/ema.h"

#include <type_traits>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/nn/shard.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf::optim {

Ema::Ema(nn::Module& model, nn::Module& average, double decay)
    : model_(units(model)), average_(units(average)), model_buffers_(model.buffers()), average_buffers_(average.buffers()), decay_(decay) {
  check(decay);
  if (model_.empty() || average_.empty())
    fail<LifetimeError>("[ema] the ", model_.empty() ? "model, a " : "average, a ", (model_.empty() ? model : average).type_name(),
                        ", has no memory: call materialize()");
  if (const std::string how = nn::difference_of_units(model, model_, average, average_); !how.empty())
    fail<ConfigError>("[ema] the average is sharded otherwise than the model: ", how);
  for (nn::Module* module : {&model, &average}) expect_own_units("ema", "average", *module);
  if (model_buffers_.size() != average_buffers_.size())
    fail<ConfigError>("[ema] the average has ", average_buffers_.size(), " buffers, the model ", model_buffers_.size());
  for (size_t b = 0; b < model_buffers_.size(); ++b)
    if (const Tensor from = model_buffers_[b].value(), to = average_buffers_[b].value(); !(from.type() == to.type()))
      fail<ConfigError>("[ema] the average's buffer '", average_buffers_[b].name(), "' is ", to.type(), ", the model's '",
                        model_buffers_[b].name(), "' ", from.type());
}

void Ema::check(double decay) {
  sheaf::check<ConfigError>(decay >= 0 && decay < 1, "[ema] decay ", decay, ": a number from 0 up to, and without, 1");
}

void Ema::update() { move(1 - decay_); }

void Ema::update(double decay) {
  check(decay);
  move(1 - decay);
}

void Ema::update(const Tensor& decay) {
  if (decay.numel() != 1) fail<ShapeError>("[ema] a decay is a scalar, not ", decay.type());
  const PhaseScope phase(Phase::update);
  move(1.0 - reshape(decay, {}));
}

// By this share of the way.
template <class Share>
void Ema::move(const Share& share) {
  const PhaseScope phase(Phase::update);
  for (size_t u = 0; u < model_.size(); ++u) {
    const PathScope path(average_[u]->name());
    average_[u]->close_for_change();
    if (Recording* r = Recording::current()) r->on_rerun([unit = average_[u]] { unit->close_for_change(); });
    for (size_t b = 0; b < model_[u]->buffers().size(); ++b) {
      const FlatBuffer &from = model_[u]->buffers()[b], &to = average_[u]->buffers()[b];
      if (!from.trainable) continue;
      // Not decay average + (1 - decay) model: rounded to f32, the factors do not sum to 1, and weights would shrink or grow.
      if constexpr (std::is_same_v<Share, Tensor>) store_into(to.shard, to.shard + (from.shard - to.shard) * cast(share, to.dtype));
      else store_into(to.shard, to.shard + (from.shard - to.shard) * share);
    }
  }
  for (size_t b = 0; b < model_buffers_.size(); ++b) store_into(average_buffers_[b].value(), model_buffers_[b].value());
}

}  // namespace sheaf::optim
