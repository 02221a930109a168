// "0.1 wte.* 2 blocks.*.ln*": different factors for parameters, by name.
#pragma once

#include <string>

#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::models {

/// Factors and patterns alternating, separated by spaces; a pattern is a shell's (fnmatch), for a parameter's whole name, in which *
/// matches dots, too. A parameter has the factor of the first pattern that its name matches, else that of `otherwise`. Throws
/// ConfigError naming `option` for text that is not of that form, for a factor that is not finite and at least 0, and for a pattern
/// that no parameter of `model` matches.
optim::FactorRule factors_by_name(const char* option, const std::string& text, nn::Module& model, optim::FactorRule otherwise);

}  // namespace sheaf::models
