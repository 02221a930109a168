#include "sheaf/models/checkpoint_store.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <thread>

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

// Whether this rank sees what another one has written.
bool sees(const std::string& path) { return !detail::file_fault("look", path) && path_exists(path); }

// The same in the end, for what rank 0 has seen or made.
bool comes_to_see(const std::string& path, const CheckpointGroup& group) {
  const auto until = std::chrono::steady_clock::now() + group.patience;
  for (auto wait = std::chrono::milliseconds(1); group.rank != 0 && !sees(path); wait = std::min(2 * wait, std::chrono::milliseconds(100))) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(wait);
  }
  return true;
}

std::string manifest_in(const std::string& step_folder) { return step_folder + "/manifest.json"; }

// On all ranks, unless it is not there or a rank has lost patience, which that finds out when it opens it.
void wait_for_manifest(const std::string& step_folder, const CheckpointGroup& group) {
  if (group.rank == 0) recover_folder(step_folder);
  if (group.of_first(path_exists(manifest_in(step_folder)))) comes_to_see(manifest_in(step_folder), group);
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
  const FileDigest digest = write_file(manifest_in(pending), manifest.dump() + "\n");
  write_file(manifest_in(pending) + ".xxh128", digest.xxh3 + "  manifest.json\n");
}

// Collective: does this rank's part. Throws its error; false if another rank's part has thrown.
template <class F>
bool together(const CheckpointGroup& group, F&& part) {
  std::exception_ptr error;
  try {
    part();
  } catch (const Error&) {
    error = std::current_exception();
  }
  const bool everywhere = group.all_true(!error);
  if (error) std::rethrow_exception(error);
  return everywhere;
}

// The steps in a folder, on rank 0; the others get as many, which they must ask it for. If rank 0 cannot list them, all throw.
std::vector<int64_t> steps_on_first(const std::string& folder, const CheckpointGroup& group) {
  std::vector<int64_t> steps;
  const bool listed = together(group, [&] {
    if (group.rank == 0) steps = list_steps(folder);
  });
  check<IoError>(listed, "[checkpoint] rank 0 cannot list '", folder, "'");
  steps.resize(static_cast<size_t>(group.of_first(std::ssize(steps))));
  return steps;
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

// The same for a part of a save; says what another rank could not do.
template <class F>
void save_together(const PendingCheckpoint& p, const CheckpointGroup& group, const char* failed_elsewhere, F&& part) {
  check<IoError>(together(group, part), "[checkpoint] cannot save '", p.target(), "': ", failed_elsewhere);
}

}  // namespace

std::string PendingCheckpoint::target() const { return step_folder(folder, step); }
std::string PendingCheckpoint::note(int rank) const { return str(pending, "/", shard_name(rank, world), ".json"); }

PendingCheckpoint PendingCheckpoint::begin(const std::string& folder, int64_t step, const CheckpointGroup& group, Warn warn) {
  PendingCheckpoint p{folder, step, group.rank, group.world, "", std::move(warn)};
  const int64_t tag = group.of_first(fresh_tag());
  p.pending = pending_path(p.target(), tag);
  save_together(p, group, "rank 0 could not make a folder for it", [&] {
    if (p.rank == 0) saving(p.target(), [&] { begin_folder(p.target(), tag, p.warn); });
  });
  save_together(p, group, "another rank does not see the folder that rank 0 has made", [&] {
    check<IoError>(comes_to_see(p.pending, group), "[checkpoint] cannot save '", p.target(), "': rank ", p.rank, " cannot see '", p.pending,
                   "', which rank 0 has made; do all ranks see the same file system?");
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
  while (from < world && sees(note(from))) ++from;
  return from;
}

void PendingCheckpoint::commit(const Json& state, int64_t keep, const std::vector<int64_t>& abandoned) const {
  saving(target(), [&] {
    std::vector<std::string> notes;
    for (int r = 0; r < world; ++r) notes.push_back(note(r));
    write_manifest(pending, notes, step, state);
    commit_folder(pending, target(), warn);
    if (keep == 0) return;
    for (const int64_t other : list_steps(folder)) {  // the newest first
      const bool is_abandoned = other != step && std::ranges::find(abandoned, other) != abandoned.end();
      if (other > step && !is_abandoned) continue;  // of another history, perhaps somebody's
      if (is_abandoned || --keep < 0) remove_folder(step_folder(folder, other), warn);
    }
  });
}

void check_save(int64_t step, int64_t keep) {
  check<ConfigError>(step >= 0, "[checkpoint] step ", step, ": they count from 0");
  check<ConfigError>(keep >= 0, "[checkpoint] keep ", keep, ": the newest checkpoints that stay; 0 keeps all");
}

void save_checkpoint(const std::string& folder, int64_t step, const std::vector<CheckpointPiece>& pieces,
                     const Json& state, int64_t keep, const CheckpointGroup& group, const Warn& warn,
                     const std::vector<int64_t>& abandoned) {
  check_save(step, keep);
  check<ConfigError>(!folder.empty(), "[checkpoint] an empty name of a folder");
  const PendingCheckpoint p = PendingCheckpoint::begin(folder, step, group, warn);
  save_together(p, group, "another rank could not write its part", [&] { p.write(pieces); });
  save_together(p, group, "rank 0 could not commit it", [&] {
    if (p.rank == 0) p.commit(state, keep, abandoned);
  });
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
    files_.push_back({path_ + "/" + expected, {files[i].at("bytes").as_int(), files[i].at("xxh3").as_string()}, {}, {}});
  }
  tensors_ = tensors_of(manifest.at("tensors"), world);
}

Checkpoint Checkpoint::with_manifest(const std::string& step_folder) {
  Checkpoint checkpoint;
  checkpoint.path_ = step_folder;
  recover_folder(step_folder);
  const std::string path = manifest_in(step_folder);
  const std::string text = File::open<CheckpointError>(path).read_all();
  const std::string sum = File::open<CheckpointError>(path + ".xxh128").read_all();
  checkpoint.digest_ = digest_of_text(text).xxh3;
  check<CheckpointError>(sum == checkpoint.digest_ + "  manifest.json\n", "[checkpoint] '", path,
                         "' does not match its checksum");
  try {
    checkpoint.parse(Json::parse(text, "manifest"));
  } catch (const Error& error) {
    fail<CheckpointError>("[checkpoint] '", path, "': ", error.what());
  }
  return checkpoint;
}

void Checkpoint::verify(const CheckpointGroup& group) {
  if (group.others_may_remove)
    for (ShardFile& file : files_) file.held = File::open<CheckpointError>(file.path);
  for (size_t i = static_cast<size_t>(group.rank); i < files_.size(); i += static_cast<size_t>(group.world)) {
    const ShardFile& file = files_[i];
    const auto check_data = [&](const File& data) {
      check<CheckpointError>(data.size() == file.digest.bytes, "[checkpoint] '", file.path, "' has ", data.size(),
                             " bytes, the manifest says ", file.digest.bytes);
      check<CheckpointError>(digest_of_file(data) == file.digest, "[checkpoint] '", file.path, "' does not match its checksum");
    };
    if (file.held) check_data(*file.held);
    else check_data(File::open<CheckpointError>(file.path));
  }
}

Checkpoint Checkpoint::open(const std::string& step_folder, const CheckpointGroup& group) {
  Checkpoint checkpoint = with_manifest(step_folder);
  checkpoint.verify(group);
  return checkpoint;
}

Checkpoint Checkpoint::open_step(const std::string& folder, int64_t step, const CheckpointGroup& group) {
  const std::vector<int64_t> steps = steps_on_first(folder, group);
  if (!group.of_first(std::ranges::find(steps, step) != steps.end())) {
    std::string there;
    for (const int64_t other : steps) there += str(there.empty() ? "; there are " : ", ", group.of_first(other));
    fail<CheckpointError>("[checkpoint] no checkpoint of step ", step, " in '", folder, "'", there);
  }
  wait_for_manifest(step_folder(folder, step), group);
  std::optional<Checkpoint> opened;
  const bool everywhere = together(group, [&] { opened = open(step_folder(folder, step), group); });
  check<CheckpointError>(everywhere, "[checkpoint] '", opened->path(), "' is broken or cannot be read, as another rank found");
  return std::move(*opened);
}

std::optional<Checkpoint> Checkpoint::open_newest(const std::string& folder, const Warn& warn, const CheckpointGroup& group) {
  std::vector<int64_t> steps = steps_on_first(folder, group);
  std::vector<int64_t> broken;
  std::string newest_reason;
  for (int64_t& step : steps) {
    step = group.of_first(step);
    const std::string path = step_folder(folder, step);
    wait_for_manifest(path, group);
    std::optional<Checkpoint> candidate;
    std::string reason;
    bool is_damage = false;
    try {
      candidate = open(path, group);
    } catch (const IoError& error) {
      reason = error.what();
    } catch (const Error& error) {
      reason = error.what();
      is_damage = true;
    }
    if (group.all_true(candidate.has_value())) {
      candidate->broken_ = std::move(broken);
      return candidate;
    }
    if (group.of_first(!path_exists(path))) {
      if (newest_reason.empty()) newest_reason = "it has been removed meanwhile";
      continue;
    }
    const bool may_be_whole = group.all_true(!is_damage);
    if (!may_be_whole) broken.push_back(step);
    // One line is enough: rank 0's, or else one from each of the ranks that know the reason.
    const bool first_knows = !group.all_true(group.rank != 0 || reason.empty());
    if (!reason.empty() && (group.rank == 0 || !first_knows))
      warn(str("checkpoint '", path, is_damage ? "' is broken" : "' cannot be read", " and is not used: ", reason));
    if (reason.empty()) reason = may_be_whole ? "another rank cannot read it" : "another rank found it broken";
    if (newest_reason.empty()) newest_reason = reason;
  }
  if (steps.empty()) return std::nullopt;
  const std::vector<int64_t> now = steps_on_first(folder, group);
  if (group.of_first(!now.empty() && now != steps)) return open_newest(folder, warn, group);
  const std::string newest = str("in '", folder, "'; the newest, step ", steps[0], ": ", newest_reason);
  if (broken.size() < steps.size()) fail<IoError>("[checkpoint] no whole checkpoint can be read ", newest);
  fail<CheckpointError>("[checkpoint] no whole checkpoint is left ", newest);
}

std::optional<Json> Checkpoint::newest_state(const std::string& folder, const CheckpointGroup& group) {
  for (int64_t step : steps_on_first(folder, group)) {
    step = group.of_first(step);
    wait_for_manifest(step_folder(folder, step), group);
    std::optional<Json> state;
    try {
      state = with_manifest(step_folder(folder, step)).state_;
    } catch (const CheckpointError&) {  // one before it has a state, too
    }
    if (group.all_true(state.has_value())) return state;
  }
  return std::nullopt;
}

}  // namespace sheaf::models
