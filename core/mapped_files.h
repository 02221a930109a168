// Which files are mapped into memory: names them when a page is read that its file no longer has.
#pragma once

#include <cstddef>
#include <string>

namespace sheaf {

/// For main(): from now on, reading a page that a mapped file (File::map) has lost, because it became shorter or its disk fails, writes
/// one line that names the file and ends the process with the code of an IoError. Otherwise that is the signal SIGBUS, without a word.
void name_files_that_lose_pages();

namespace detail {
void note_mapping(const void* begin, size_t bytes, const std::string& path);
void forget_mapping(const void* begin);
}  // namespace detail

}  // namespace sheaf
