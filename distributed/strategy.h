// How the ranks along the axis of a unit share its parameters.
#pragma once

#include <cstdint>
#include <string_view>

namespace sheaf {

enum class Strategy : uint8_t {
  none,           ///< no mesh: one rank holds everything
  replicate,      ///< DDP: Invariant at rest, gradients all-reduced
  zero1,          ///< ZeRO-1: Shard at rest, gathered once per step, gradients Partial until the step reduces them
  shard_grad_op,  ///< ZeRO-2: Shard at rest, kept gathered until the unit's backward is done
  full_shard,     ///< ZeRO-3: Shard at rest, discarded after forward and gathered again
};
std::string_view name(Strategy s);
/// The strategy with this name(); throws a ConfigError that lists the known ones, or suggests a replacement.
Strategy strategy_from(std::string_view name);

}  // namespace sheaf
