// A checkpoint whose manifest was changed by somebody who knows the format.
#pragma once

#include <string>

#include "sheaf/core/file.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::testing {

class BrokenManifest {
 public:
  /// From an intact step folder.
  explicit BrokenManifest(const std::string& step_folder)
      : folder_(step_folder), path_(step_folder + "/manifest.json"), good_(File::open(path_).read_all()) {}

  /// The original manifest with the first `from` replaced by `to`, and with a matching checksum. False if it has none.
  bool replace(const std::string& from, const std::string& to) const {
    std::string text = good_;
    const size_t at = text.find(from);
    if (at == std::string::npos) return false;
    text.replace(at, from.size(), to);
    write_file(path_ + ".xxh128", write_file(path_, text).xxh3 + "  manifest.json\n");
    return true;
  }
  /// The error of then opening the folder.
  std::string reason(const std::string& from, const std::string& to) const {
    if (!replace(from, to)) return "nothing to replace: " + good_;
    return message_of<CheckpointError>(ExitCode::kData, [&] { models::Checkpoint::open(folder_); });
  }

 private:
  std::string folder_, path_, good_;
};

}  // namespace sheaf::testing
