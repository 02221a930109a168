// Checked standard output: lost output, for instance on a full disk, is an error.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sheaf::tools {

/// Writes `text` and flushes. Throws IoError with the reason.
void put(std::string_view text);
/// Writes a line.
inline void say(const std::string& line) { put(line + "\n"); }

/// For people, to about two digits: "120", "2.1", "0.34", "0.034".
std::string rounded(double value);

/// "1 rank", "2 ranks".
std::string counted(int64_t count, std::string_view what);

/// "77.48 MiB".
std::string mebibytes(int64_t bytes);

}  // namespace sheaf::tools
