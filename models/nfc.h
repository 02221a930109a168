// Unicode's normal form C, in which letters and their marks are one character where there is one.
#pragma once

#include <string>
#include <string_view>

namespace sheaf::models {

/// False only of a text that nfc() would not change: no character of it is above U+02FF.
bool may_change_in_nfc(std::string_view text);
/// The normal form C of a valid UTF-8 text. Where a space or what follows a line break begins, a text may be cut: the
/// form of the whole is those of its parts.
std::string nfc(std::string_view text);

}  // namespace sheaf::models
