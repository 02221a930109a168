#include "sheaf/models/checkpoint_store.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/models/checkpoint_manifest.h"

namespace sheaf::models {
namespace {

constexpr int64_t kVersion = 1;
constexpr std::string_view kFormat = "sheaf-checkpoint";

std::string shard_name(int rank, int world) {
  char name[64];
  std::snprintf(name, sizeof name, "shard-%05d-of-%05d.safetensors", rank, world);
  return name;
}

Json file_note(const std::string& file, const FileDigest& digest) {
  return Json::Object{{"name", file}, {"bytes", digest.bytes}, {"xxh3", digest.xxh3}};
}

// A rank's entries for the manifest, which rank 0 writes; passed through the file system like the shards themselves.
Json shard_note(const std::vector<CheckpointPiece>& pieces, int rank, const std::string& file, const FileDigest& digest) {
  Json::Array tensors;
  for (const auto& piece : pieces) {
    tensors.push_back(Json::Object{{"name", piece.name},
                                   {"dtype", name(piece.dtype)},
                                   {"shape", json_of(piece.shape)},
                                   {"part", json_of(Checkpoint::Part{rank, simplified(piece.runs)})}});
  }
  return Json::Object{{"file", file_note(file, digest)}, {"tensors", tensors}};
}

FileDigest write_shard(const std::string& path, const std::vector<CheckpointPiece>& pieces, const PendingCheckpoint& p) {
  std::vector<SafetensorsInput> inputs;
  for (const auto& piece : pieces) {
    const Runs runs = simplified(piece.runs);
    if (runs.numel() == 0) continue;
    inputs.push_back({part_key(piece.name, piece.shape, runs),
                      piece.dtype,
                      part_shape(piece.shape, runs),
                      {{static_cast<const std::byte*>(piece.data), runs.numel() * size_of(piece.dtype)}}});
  }
  return write_safetensors(path, std::move(inputs),
                           {{"format", "pt"},
                            {"sheaf.rank", std::to_string(p.rank)},
                            {"sheaf.step", std::to_string(p.step)},
                            {"sheaf.world", std::to_string(p.world)}});
}

// Gathers the notes of all ranks into the manifest and removes them.
void write_manifest(const std::string& pending, const std::vector<std::string>& notes, int64_t step, const Json& state) {
  const int world = static_cast<int>(notes.size());
  Json::Array files;
  Checkpoint::Tensors tensors;
  for (const std::string& path : notes) {
    const Json note = Json::parse(File::open(path).read_all(), path);
    files.push_back(note.at("file"));
    for (const Json& item : note.at("tensors").as_array()) {
      const std::string& name = item.at("name").as_string();
      add_part(tensors, name, dtype_of_name(item.at("dtype").as_string()), shape_of(item.at("shape")),
               part_of(item.at("part"), name, world));
    }
    unlink(path.c_str());
  }
  check_coverage(tensors);
  const Json manifest = Json::Object{{"format", kFormat}, {"version", kVersion}, {"step", step}, {"world", world},
                                     {"files", files},    {"state", state},      {"tensors", json_of(tensors)}};
  const FileDigest digest = write_file(pending + "/manifest.json", manifest.dump() + "\n");
  write_file(pending + "/manifest.json.xxh128", digest.xxh3 + "  manifest.json\n");
}

template <class F>
auto saving(const std::string& target, F&& f) {
  try {
    return f();
  } catch (const CheckpointError& error) {
    fail<CheckpointError>("[checkpoint] cannot save '", target, "': ", error.what());
  } catch (const IoError& error) {
    fail<IoError>("[checkpoint] cannot save '", target, "': ", error.what());
  }
}

}  // namespace

std::string PendingCheckpoint::target() const { return step_folder(folder, step); }
std::string PendingCheckpoint::note(int rank) const { return str(pending, "/", shard_name(rank, world), ".json"); }

PendingCheckpoint PendingCheckpoint::begin(const std::string& folder, int64_t step, const CheckpointGroup& group) {
  PendingCheckpoint p{folder, step, group.rank, group.world, ""};
  saving(p.target(), [&] {
    if (p.rank == 0) p.pending = begin_folder(p.target());
    group.barrier();  // The folder exists, and it is the only one of its kind.
    if (p.rank != 0) p.pending = pending_folder(p.target());
  });
  return p;
}

void PendingCheckpoint::write(const std::vector<CheckpointPiece>& pieces) const {
  saving(target(), [&] {
    const std::string file = shard_name(rank, world);
    const FileDigest digest = write_shard(pending + "/" + file, pieces, *this);
    // A rank that sees the note can read all of it, and may commit the folder, which then has another name: this must be the last
    // step.
    const std::string part = note(rank) + ".part";
    write_file(part, shard_note(pieces, rank, file, digest).dump());
    rename_path(part, note(rank));
  });
}

int PendingCheckpoint::first_missing(int from) const {
  while (from < world && path_exists(note(from))) ++from;
  return from;
}

void PendingCheckpoint::commit(const Json& state, int64_t keep) const {
  saving(target(), [&] {
    std::vector<std::string> notes;
    for (int r = 0; r < world; ++r) notes.push_back(note(r));
    write_manifest(pending, notes, step, state);
    commit_folder(pending, target());
    // Later steps, if there are any, belong to a history that was abandoned because it was broken: they do not count.
    std::vector<int64_t> steps = list_steps(folder);
    std::erase_if(steps, [&](int64_t other) { return other > step; });
    for (size_t i = static_cast<size_t>(keep); keep > 0 && i < steps.size(); ++i) remove_folder(step_folder(folder, steps[i]));
  });
}

void save_checkpoint(const std::string& folder, int64_t step, const std::vector<CheckpointPiece>& pieces,
                     const Json& state, int64_t keep, const CheckpointGroup& group) {
  const PendingCheckpoint p = PendingCheckpoint::begin(folder, step, group);
  p.write(pieces);
  group.barrier();  // All shards are on disk.
  if (p.rank == 0) p.commit(state, keep);
  group.barrier();  // Committed: no rank returns before.
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
  tensors_ = tensors_of(manifest.at("tensors"), world);
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
    // One line is enough: rank 0's, or else one from each of the ranks that know the reason.
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

}  // namespace sheaf::models
