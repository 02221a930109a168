// The version of Sheaf, defined only here.
#pragma once

#include <string_view>

namespace sheaf {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace sheaf
