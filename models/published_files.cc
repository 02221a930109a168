#include "sheaf/models/published_files.h"

#include <algorithm>
#include <filesystem>

#include "sheaf/core/json.h"

namespace sheaf::models {
namespace {

constexpr int64_t kSampled = 4096;  // bytes of each tensor that the digest reads
constexpr std::string_view kIndexEnding = ".index.json";

// The file in a folder, or an error that lists the possible ones.
std::string file_of(const std::string& folder) {
  for (const char* name : {"/model.safetensors", "/model.safetensors.index.json"})
    if (path_exists(folder + name)) return folder + name;
  const char* pickled = path_exists(folder + "/pytorch_model.bin") || path_exists(folder + "/pytorch_model.bin.index.json")
                            ? " (pytorch_model.bin is Python's pickle, which is a program: save it as safetensors)"
                            : "";
  const char* adapters = path_exists(folder + "/adapter_model.safetensors")
                             ? " (adapter_model.safetensors holds adapters alone: give the model that they belong to, or one merged with them)"
                             : "";
  fail<ConfigError>("[weights] '", folder, "' has neither model.safetensors nor model.safetensors.index.json", pickled, adapters);
}

}  // namespace

PublishedFiles PublishedFiles::open(const std::string& path) {
  if (!path_exists(path)) fail<ConfigError>("[weights] there is no '", path, "'");
  PublishedFiles result;
  result.path_ = path;
  const std::string file = std::filesystem::is_directory(path) ? file_of(path) : path;
  if (file.ends_with(kIndexEnding)) result.read_index(file);
  else result.add(file);
  return result;
}

void PublishedFiles::add(const std::string& file) {
  files_.push_back(std::make_unique<SafetensorsFile>(SafetensorsFile::open(file)));
  const SafetensorsFile& opened = *files_.back();
  if (opened.metadata().contains("sheaf"))
    fail<CheckpointError>("[weights] '", file, "' has the names of our own models: export it with --format huggingface");
  for (const auto& [name, entry] : opened.tensors())
    if (const auto [at, first] = tensors_.emplace(name, &opened); !first)
      fail<CheckpointError>("[weights] ", json_string(name), " is in '", at->second->path(), "' and in '", file, "'");
}

void PublishedFiles::read_index(const std::string& index) {
  const auto refuse = [&](const auto&... parts) { fail<CheckpointError>("[weights] '", index, "': ", parts...); };
  std::map<std::string, std::string> places;  // tensor -> file
  try {
    const Json json = Json::parse(File::open<CheckpointError>(index).read_all(), index);
    for (const auto& [name, file] : json.at("weight_map").as_object()) places[name] = file.as_string();
  } catch (const DataError& e) {
    refuse("not an index of weights: ", e.what());
  }
  std::vector<std::string> names;
  for (const auto& [tensor, file] : places) names.push_back(file);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  for (const std::string& name : names) {
    // It may name files next to itself, but no others on this machine.
    if (name.empty() || name.find('/') != std::string::npos || !name.ends_with(".safetensors"))
      refuse(json_string(name), " is not the name of a safetensors file next to it");
    const std::string file = parent_of(index) + "/" + name;
    if (!path_exists(file)) refuse("names ", json_string(name), ", which is missing");
    add(file);
  }
  for (const auto& [tensor, file] : places) {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end() || std::filesystem::path(found->second->path()).filename() != file)
      refuse("says that ", json_string(tensor), " is in ", json_string(file), ", which has no such tensor");
  }
  for (const auto& [tensor, file] : tensors_)
    if (!places.contains(tensor)) refuse("does not name ", json_string(tensor), " of '", file->path(), "'");
}

std::string PublishedFiles::digest() const {
  ContentHash hash;
  std::vector<char> bytes(kSampled);
  for (const auto& [tensor, file] : tensors_) {
    const SafetensorsEntry& entry = file->at(tensor);
    const std::string head = str(tensor, '\0', entry.dtype, entry.shape, '\0');
    hash.update(head.data(), static_cast<int64_t>(head.size()));
    const auto width = static_cast<int64_t>(size_of(entry.dtype)), count = std::min(entry.bytes(), kSampled) / width;
    file->read(tensor, 0, count, bytes.data());
    hash.update(bytes.data(), count * width);
  }
  return hash.digest();
}

}  // namespace sheaf::models
