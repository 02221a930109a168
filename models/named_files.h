// "web=web_*.bin chat=chat.bin": files with names.
#pragma once

#include <string>
#include <vector>

namespace sheaf::models {

struct NamedFile {
  std::string name;  ///< "" for files without one
  std::string path;
};

/// One file without a name or, if no file has the path `text`, names and paths separated by spaces. Throws ConfigError, in which
/// `what` describes them, for a name twice, or one with other characters than letters, digits, - and _.
std::vector<NamedFile> named_files(const std::string& text, const char* what);

}  // namespace sheaf::models
