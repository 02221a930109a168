#include "sheaf/models/checkpoint_store.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "sheaf/core/atomic_folder.h"

namespace sheaf::models {
namespace {

constexpr int64_t kVersion = 1;
constexpr std::string_view kFormat = "sheaf-checkpoint";
constexpr int64_t kMaxElements = int64_t{1} << 56;

std::string shard_name(int rank, int world) {
  char name[64];
  std::snprintf(name, sizeof name, "shard-%05d-of-%05d.safetensors", rank, world);
  return name;
}

// A whole tensor keeps its name in the file, so that a plain safetensors reader finds it; a part names its interval.
std::string key_of(std::string_view name, const Shape& shape, const Interval& part) {
  if (part == Interval{0, shape.numel()}) return std::string(name);
  return str(name, "[", part.begin, ":", part.end, "]");
}

Json json_of(const Shape& shape) {
  Json::Array sizes;
  for (int64_t size : shape) sizes.emplace_back(size);
  return sizes;
}

Shape shape_of(const Json& json) {
  Shape shape;
  int64_t elements = 1;
  for (const Json& item : json.as_array()) {
    const int64_t size = item.as_int();
    check<CheckpointError>(size >= 0 && size <= kMaxElements && shape.rank() < kMaxDims, "unusable shape ", json.dump());
    const bool overflow = size > 0 && __builtin_mul_overflow(elements, size, &elements);
    check<CheckpointError>(!overflow && elements <= kMaxElements, "unusable shape ", json.dump());
    shape.push_back(size);
  }
  return shape;
}

DType dtype_of_name(const std::string& text) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name(static_cast<DType>(i)) == text) return static_cast<DType>(i);
  }
  fail<CheckpointError>("unknown dtype ", json_string(text));
}

Json json_of(const std::string& file, const FileDigest& digest) {
  return Json::Object{{"name", file}, {"bytes", digest.bytes}, {"xxh3", digest.xxh3}};
}

using Tensors = std::map<std::string, Checkpoint::TensorInfo, std::less<>>;

// Sorts the parts of each tensor and checks that they cover it exactly once.
void check_coverage(Tensors& tensors) {
  for (auto& [name, info] : tensors) {
    std::sort(info.parts.begin(), info.parts.end(),
              [](const auto& a, const auto& b) { return a.interval.begin < b.interval.begin; });
    int64_t at = 0;
    for (const auto& part : info.parts) {
      check<CheckpointError>(part.interval.begin == at, "tensor ", json_string(name), ": element ",
                             std::min(at, part.interval.begin), " is ",
                             part.interval.begin < at ? "there twice" : "missing");
      at = part.interval.end;
    }
    check<CheckpointError>(at == info.shape.numel(), "tensor ", json_string(name), ": ", at, " elements of ",
                           info.shape.numel());
  }
}

// Adds a part to a tensor that other ranks may have described before.
void add_part(Tensors& tensors, const std::string& name, DType dtype, const Shape& shape, int file, Interval part) {
  auto [found, fresh] = tensors.try_emplace(name, Checkpoint::TensorInfo{dtype, shape, {}});
  auto& info = found->second;
  check<CheckpointError>(fresh || (info.dtype == dtype && info.shape == shape), "tensor ", json_string(name), " is ",
                         info.dtype, info.shape, " on one rank and ", dtype, shape, " on another");
  check<CheckpointError>(0 <= part.begin && part.begin <= part.end && part.end <= shape.numel(), "tensor ",
                         json_string(name), ": elements ", part.begin, " to ", part.end, " of ", shape);
  if (part.size() > 0) info.parts.push_back({file, part});
}

// What a rank wrote, for rank 0 to put into the manifest; goes through the file system like the shards themselves.
Json shard_note(const std::vector<CheckpointPiece>& pieces, const std::string& file, const FileDigest& digest) {
  Json::Array tensors;
  for (const auto& piece : pieces) {
    tensors.push_back(Json::Object{{"name", piece.name},
                                   {"dtype", name(piece.dtype)},
                                   {"shape", json_of(piece.shape)},
                                   {"begin", piece.interval.begin},
                                   {"end", piece.interval.end}});
  }
  return Json::Object{{"file", json_of(file, digest)}, {"tensors", tensors}};
}

FileDigest write_shard(const std::string& path, int64_t step, const std::vector<CheckpointPiece>& pieces,
                       const CheckpointGroup& group) {
  std::vector<SafetensorsInput> inputs;
  for (const auto& piece : pieces) {
    const Interval part = piece.interval;
    if (part.size() == 0) continue;
    const Shape shape = part == Interval{0, piece.shape.numel()} ? piece.shape : Shape{part.size()};
    inputs.push_back({key_of(piece.name, piece.shape, part),
                      piece.dtype,
                      shape,
                      {{static_cast<const std::byte*>(piece.data), part.size() * size_of(piece.dtype)}}});
  }
  return write_safetensors(path, std::move(inputs),
                           {{"format", "pt"},
                            {"sheaf.rank", std::to_string(group.rank)},
                            {"sheaf.step", std::to_string(step)},
                            {"sheaf.world", std::to_string(group.world)}});
}

// Gathers the notes of all ranks into the manifest and removes them.
void write_manifest(const std::string& pending, int64_t step, const Json& state, int world) {
  Json::Array files;
  Tensors tensors;
  for (int rank = 0; rank < world; ++rank) {
    const std::string path = str(pending, "/", shard_name(rank, world), ".json");
    const Json note = Json::parse(File::open(path).read_all(), path);
    files.push_back(note.at("file"));
    for (const Json& item : note.at("tensors").as_array()) {
      add_part(tensors, item.at("name").as_string(), dtype_of_name(item.at("dtype").as_string()),
               shape_of(item.at("shape")), rank, {item.at("begin").as_int(), item.at("end").as_int()});
    }
    unlink(path.c_str());
  }
  check_coverage(tensors);
  Json::Object described;
  for (const auto& [name, info] : tensors) {
    Json::Array parts;
    for (const auto& part : info.parts) {
      parts.push_back(Json::Array{part.file, part.interval.begin, part.interval.end});
    }
    described.emplace_back(name, Json::Object{{"dtype", sheaf::name(info.dtype)},
                                              {"shape", json_of(info.shape)},
                                              {"parts", std::move(parts)}});
  }
  const Json manifest = Json::Object{{"format", kFormat}, {"version", kVersion}, {"step", step}, {"world", world},
                                     {"files", files},    {"state", state},      {"tensors", described}};
  const FileDigest digest = write_file(pending + "/manifest.json", manifest.dump() + "\n");
  write_file(pending + "/manifest.json.xxh128", digest.xxh3 + "  manifest.json\n");
}

}  // namespace

void save_checkpoint(const std::string& folder, int64_t step, const std::vector<CheckpointPiece>& pieces,
                     const Json& state, int64_t keep, const CheckpointGroup& group) {
  const std::string target = step_folder(folder, step);
  try {
    std::string pending;
    if (group.rank == 0) pending = begin_folder(target);
    group.barrier();  // The folder is there, and it is the only one of its kind.
    if (group.rank != 0) pending = pending_folder(target);

    const std::string file = shard_name(group.rank, group.world);
    const FileDigest digest = write_shard(pending + "/" + file, step, pieces, group);
    write_file(str(pending, "/", file, ".json"), shard_note(pieces, file, digest).dump());
    group.barrier();  // All shards are on disk.

    if (group.rank == 0) {
      write_manifest(pending, step, state, group.world);
      commit_folder(pending, target);
      // Later steps, if there are any, belong to a future that was given up because it was broken: they do not count.
      std::vector<int64_t> steps = list_steps(folder);
      std::erase_if(steps, [&](int64_t other) { return other > step; });
      for (size_t i = static_cast<size_t>(keep); keep > 0 && i < steps.size(); ++i) {
        remove_folder(step_folder(folder, steps[i]));
      }
    }
    group.barrier();  // Committed: no rank goes on before.
  } catch (const CheckpointError& error) {
    fail<CheckpointError>("[checkpoint] cannot save '", target, "': ", error.what());
  } catch (const IoError& error) {
    fail<IoError>("[checkpoint] cannot save '", target, "': ", error.what());
  }
}

void Checkpoint::parse(const Json& manifest) {
  check<CheckpointError>(manifest.at("format") == Json(kFormat), "not a manifest of Sheaf");
  check<CheckpointError>(manifest.at("version") == Json(kVersion), "version ", manifest.at("version").dump(),
                         ", this program reads ", kVersion);
  step_ = manifest.at("step").as_int();
  check<CheckpointError>(path_.ends_with(str("/step-", step_)), "it is that of step ", step_);
  state_ = manifest.at("state");
  const auto& files = manifest.at("files").as_array();
  const int64_t world = manifest.at("world").as_int();
  check<CheckpointError>(world >= 1 && world == static_cast<int64_t>(files.size()), files.size(),
                         " files of a world of ", world);
  for (size_t i = 0; i < files.size(); ++i) {
    // Names are ours, so a manifest cannot point outside its folder.
    const std::string expected = shard_name(static_cast<int>(i), static_cast<int>(world));
    check<CheckpointError>(files[i].at("name").as_string() == expected, "file ", i, " is not called ", expected);
    files_.push_back({path_ + "/" + expected, {files[i].at("bytes").as_int(), files[i].at("xxh3").as_string()}, {}});
  }
  for (const auto& [name, item] : manifest.at("tensors").as_object()) {
    const DType dtype = dtype_of_name(item.at("dtype").as_string());
    const Shape shape = shape_of(item.at("shape"));
    tensors_[name] = {dtype, shape, {}};
    for (const Json& part : item.at("parts").as_array()) {
      const auto& numbers = part.as_array();
      check<CheckpointError>(numbers.size() == 3, "a part of ", json_string(name), " is not [file, begin, end]");
      const int64_t file = numbers[0].as_int();
      check<CheckpointError>(0 <= file && file < world, "a part of ", json_string(name), " in file ", file);
      add_part(tensors_, name, dtype, shape, static_cast<int>(file), {numbers[1].as_int(), numbers[2].as_int()});
    }
  }
  check_coverage(tensors_);
}

void warn_on_stderr(const std::string& warning) { std::fprintf(stderr, "sheaf: warning: %s\n", warning.c_str()); }

Checkpoint Checkpoint::open(const std::string& step_folder, const CheckpointGroup& group) {
  Checkpoint checkpoint;
  checkpoint.path_ = step_folder;
  recover_folder(step_folder);
  const std::string path = step_folder + "/manifest.json";
  const std::string text = File::open<CheckpointError>(path).read_all();
  const std::string sum = File::open<CheckpointError>(path + ".xxh128").read_all();
  check<CheckpointError>(sum == digest_of_text(text).xxh3 + "  manifest.json\n", "[checkpoint] '", path,
                         "' does not match its checksum");
  try {
    checkpoint.parse(Json::parse(text, "manifest"));
  } catch (const Error& error) {
    fail<CheckpointError>("[checkpoint] '", path, "': ", error.what());
  }
  for (size_t i = static_cast<size_t>(group.rank); i < checkpoint.files_.size(); i += static_cast<size_t>(group.world)) {
    const ShardFile& file = checkpoint.files_[i];
    const int64_t bytes = File::open<CheckpointError>(file.path).size();
    check<CheckpointError>(bytes == file.digest.bytes, "[checkpoint] '", file.path, "' has ", bytes,
                           " bytes, the manifest says ", file.digest.bytes);
    check<CheckpointError>(digest_of_file(file.path) == file.digest, "[checkpoint] '", file.path,
                           "' does not match its checksum");
  }
  return checkpoint;
}

std::optional<Checkpoint> Checkpoint::open_newest(const std::string& folder,
                                                  const std::function<void(const std::string&)>& warn,
                                                  const CheckpointGroup& group) {
  const std::vector<int64_t> steps = list_steps(folder);
  std::string newest_reason;
  for (int64_t step : steps) {
    const std::string path = step_folder(folder, step);
    std::optional<Checkpoint> candidate;
    std::string reason;
    try {
      candidate = open(path, group);
    } catch (const Error& error) {
      reason = error.what();
    }
    if (group.all_true(candidate.has_value())) return candidate;
    // One line is enough: rank 0's, or else that of the ranks that know the reason.
    const bool first_knows = !group.all_true(group.rank != 0 || reason.empty());
    if (!reason.empty() && (group.rank == 0 || !first_knows))
      warn(str("checkpoint '", path, "' is broken and is not used: ", reason));
    if (reason.empty()) reason = "another rank found it broken";
    if (newest_reason.empty()) newest_reason = reason;
  }
  check<CheckpointError>(steps.empty(), "[checkpoint] no whole checkpoint is left in '", folder, "'; the newest, step ",
                         steps.empty() ? 0 : steps[0], ": ", newest_reason);
  return std::nullopt;
}

const Checkpoint::TensorInfo& Checkpoint::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    fail<CheckpointError>("[checkpoint] '", path_, "' has no tensor ", json_string(name));
  }
  return found->second;
}

std::pair<SafetensorsFile*, std::string> Checkpoint::holder(std::string_view name, const TensorInfo& info,
                                                            const Part& part) {
  ShardFile& file = files_[static_cast<size_t>(part.file)];
  if (!file.open) file.open = SafetensorsFile::open(file.path);
  std::string key = key_of(name, info.shape, part.interval);
  const SafetensorsEntry& entry = file.open->at(key);
  check<CheckpointError>(entry.dtype == info.dtype && entry.shape.numel() == part.interval.size(), "[checkpoint] '",
                         file.path, "': ", json_string(key), " is ", entry.dtype, entry.shape);
  return {&*file.open, std::move(key)};
}

std::vector<std::span<const std::byte>> Checkpoint::data(std::string_view name) {
  const TensorInfo& info = at(name);
  std::vector<std::span<const std::byte>> out;
  for (const Part& part : info.parts) {
    const auto [file, key] = holder(name, info, part);
    out.push_back(file->data(key));
  }
  return out;
}

void Checkpoint::read(std::string_view name, int64_t begin, int64_t end, void* dst) {
  const TensorInfo& info = at(name);
  check<CheckpointError>(0 <= begin && begin <= end && end <= info.shape.numel(), "[checkpoint] '", path_,
                         "': elements ", begin, " to ", end, " of ", name, " ", info.shape, " asked for");
  auto* out = static_cast<std::byte*>(dst);
  // The first part that ends after `begin`.
  auto part = std::partition_point(info.parts.begin(), info.parts.end(),
                                   [&](const Part& p) { return p.interval.end <= begin; });
  while (begin < end) {
    const Interval whole = part->interval;
    const int64_t stop = std::min(end, whole.end);
    const auto [file, key] = holder(name, info, *part);
    file->read(key, begin - whole.begin, stop - whole.begin, out);
    out += (stop - begin) * static_cast<int64_t>(size_of(info.dtype));
    begin = stop;
    ++part;
  }
}

}  // namespace sheaf::models
