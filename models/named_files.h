// "web=web_*.bin chat=chat.bin": files that have names of their own.
#pragma once

#include <string>
#include <vector>

namespace sheaf::models {

struct NamedFile {
  std::string name;  ///< "" for files without one
  std::string path;
};

/// One file without a name or, if no file has the name `text`, names and paths separated by blanks. Throws ConfigError, in which
/// `what` says what they are, for a name twice, or one that is not made of letters, digits, - and _.
std::vector<NamedFile> named_files(const std::string& text, const char* what);

}  // namespace sheaf::models
