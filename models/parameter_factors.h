// "0.1 wte.* 2 blocks.*.norm*": parameters, by their names, that differ from the others.
#pragma once

#include <string>

#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::models {

/// Factors and patterns in turn, separated by blanks; a pattern is a shell's (fnmatch), for a parameter's whole name, in which *
/// matches dots, too. A parameter has the factor of the first pattern that its name matches, else what `otherwise` says. Throws
/// ConfigError naming `option` for text that is not of that form, for a factor that is not finite and at least 0, and for a pattern
/// that no parameter of `model` matches.
optim::FactorRule factors_by_name(const char* option, const std::string& text, nn::Module& model, optim::FactorRule otherwise);

}  // namespace sheaf::models
