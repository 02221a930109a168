// The files of published weights: one safetensors file, or several with an index that says which holds what.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/safetensors.h"

namespace sheaf::models {

/// Open files, as one set of named tensors. Only headers have been read. Moves; reading is thread-safe.
class PublishedFiles {
 public:
  /// `path`: a folder with model.safetensors, or with model.safetensors.index.json and the files it names; or one of those two files.
  /// Throws ConfigError if there is no such file; CheckpointError naming the file if one is missing or malformed, or if index and
  /// files do not name the same tensors.
  static PublishedFiles open(const std::string& path);

  const std::string& path() const { return path_; }
  /// The file of each tensor.
  const std::map<std::string, const SafetensorsFile*, std::less<>>& tensors() const { return tensors_; }

  /// XXH3-128 of all names, dtypes, shapes and the first 4 KiB of each tensor: it differs for other weights, other revisions and
  /// other models, but does not depend on the division into files, and it reads next to nothing.
  std::string digest() const;

 private:
  void add(const std::string& file);
  void read_index(const std::string& index);

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*, std::less<>> tensors_;
};

}  // namespace sheaf::models
