// The units that an update works on: whole flat shards, so whole units.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// The units that hold trainable ones of these parameters, each once, in order. ConfigError, prefixed with `who`, if a unit has
/// trainable parameters that are not among them; LifetimeError before materialize().
std::vector<std::shared_ptr<Unit>> trainable_units(std::string_view who, std::span<const Parameter> parameters);

/// How the units of `second`, a model like `first`, differ from its: in what they are, in the parameters of a flat buffer (by names within
/// the models, and shapes), or in their types and placements. Empty if they are alike.
std::string difference_of_units(const Module& first, std::span<const std::shared_ptr<Unit>> units, const Module& second,
                                std::span<const std::shared_ptr<Unit>> others);

/// Reduces those gradients of these units whose reduction is pending (strategy zero1, replicas); collective.
void reduce_waiting(std::span<const std::shared_ptr<Unit>> units);

}  // namespace sheaf::nn
