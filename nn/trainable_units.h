// The units that an update works on: whole flat shards, so whole units.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "sheaf/nn/parameter.h"

namespace sheaf::nn {

/// The units that hold trainable ones of these parameters, each once, in order. ConfigError, prefixed with `who`, if a unit has
/// trainable parameters that are not among them; LifetimeError before materialize().
std::vector<std::shared_ptr<Unit>> trainable_units(std::string_view who, std::span<const Parameter> parameters);

/// Reduces those gradients of these units whose reduction is pending (strategy zero1, replicas); collective.
void reduce_waiting(std::span<const std::shared_ptr<Unit>> units);

}  // namespace sheaf::nn
