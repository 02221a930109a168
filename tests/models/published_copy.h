// Published files that a test may break.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_weights.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::testing {

inline std::string text_of(const std::string& path) { return File::open(path).read_all(); }
inline void write_text(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// The model of a folder's config.json.
inline models::ModelConfig config_of(const std::string& folder) { return models::read_published_config(folder + "/config.json"); }

/// EXPECTs that they have the same shape and context length.
inline void expect_same(const models::ModelConfig& a, const models::ModelConfig& b) {
  models::check_published_shape(a, b, "config.json");
  models::check_published_shape(b, a, "config.json");
}
/// EXPECTs that a config.json for `model` is read back as the same.
inline void expect_read_again(const models::ModelConfig& model, const Json& json) {
  const ScratchFolder scratch;
  write_text(scratch / "config.json", json.dump());
  expect_same(config_of(scratch.path()), model);
}

/// The elements of a bf16 tensor.
inline std::vector<float> floats_of(const SafetensorsFile& file, const std::string& name) {
  std::vector<bf16> read(static_cast<size_t>(file.at(name).shape.numel()));
  EXPECT_EQ(file.at(name).dtype, kBF16);
  file.read(name, 0, std::ssize(read), read.data());
  std::vector<float> out;
  for (const bf16 x : read) out.push_back(static_cast<float>(x));
  return out;
}

/// A copy of published files for a test to break.
struct Copy : ScratchFolder {
  explicit Copy(const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().filename() != "logits.safetensors")
        write_text(*this / entry.path().filename(), text_of(entry.path()));
  }
  /// Replaces the first `from` in a file.
  void replace(const std::string& file, const std::string& from, const std::string& to) const {
    std::string text = text_of(*this / file);
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write_text(*this / file, text.replace(at, from.size(), to));
  }
  void remove(const std::string& file) const { std::filesystem::remove(*this / file); }
  /// Writes all tensors, as `edit` leaves them, into one model.safetensors.
  struct Stored {
    DType dtype;
    Shape shape;
    std::vector<std::byte> bytes;
  };
  void rewrite(const std::function<void(std::map<std::string, Stored>&)>& edit) const {
    std::map<std::string, Stored> all;
    {
      const auto files = models::PublishedFiles::open(path());
      for (const auto& [name, file] : files.tensors()) {
        const SafetensorsEntry& entry = file->at(name);
        all[name] = {entry.dtype, entry.shape, std::vector<std::byte>(static_cast<size_t>(entry.bytes()))};
        file->read(name, 0, entry.shape.numel(), all[name].bytes.data());
      }
    }
    edit(all);
    std::vector<SafetensorsInput> inputs;
    for (const auto& [name, t] : all) inputs.push_back({name, t.dtype, t.shape, {t.bytes}});
    write_safetensors(*this / "model.safetensors", inputs);
  }

  int64_t load() const {
    const auto model = models::make_language_model(models::read_published_config(*this / "config.json"), 0);
    materialize(*model);
    return models::load_weights(*model, path());
  }
  std::string refused() const {
    return message_of<CheckpointError>(ExitCode::kData, [&] { load(); });
  }
};

using Changes = std::vector<std::pair<const char*, Json>>;

/// A folder's config.json with these keys changed and those in `without` removed.
inline models::ModelConfig config_with(const std::string& folder, const Changes& changes, const std::set<std::string>& without = {}) {
  const Copy copy(folder);
  Json::Object members = Json::parse(text_of(copy / "config.json"), "config.json").as_object();
  std::erase_if(members, [&](const auto& m) { return without.contains(m.first); });
  Json json(members);
  for (const auto& [key, value] : changes) json.set(key, value);
  write_text(copy / "config.json", json.dump());
  return config_of(copy.path());
}

}  // namespace sheaf::testing
