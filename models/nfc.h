// Unicode's normal form C, in which letters and their marks are one character if there is one.
#pragma once

#include <string>
#include <string_view>

namespace sheaf::models {

/// False only of a text that nfc() would not change: no character of it is above U+02FF.
bool may_change_in_nfc(std::string_view text);
/// The normal form C of a valid UTF-8 text. A text may be split before a space or after a line break: its form is then that of its
/// parts.
std::string nfc(std::string_view text);

}  // namespace sheaf::models
