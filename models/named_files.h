// "web=web_*.bin chat=chat.bin": files that have names of their own.
#pragma once

#include <string>
#include <vector>

namespace sheaf::models {

struct NamedFile {
  std::string name;  ///< "" of what has none
  std::string path;
};

/// One without a name or, if no file has the name `text`, names and paths apart by blanks. Throws ConfigError for a name twice, or one
/// that is not made of letters, digits, - and _; `what` they are says so.
std::vector<NamedFile> named_files(const std::string& text, const char* what);

}  // namespace sheaf::models
