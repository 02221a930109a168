// A "/" that describes the machine a test needs.
#pragma once

#include <fstream>

#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {

struct FakeRoot : ScratchFolder {
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(*this / path).parent_path());
    std::ofstream(*this / path) << text;
  }
};

}  // namespace sheaf
