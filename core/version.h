// The version of Sheaf: the one place where it stands.
#pragma once

#include <string_view>

namespace sheaf {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace sheaf
