// Checkpoints on disk: named pieces of tensors, written by N ranks, readable by any number of them.
//
//   <folder>/step-1200/shard-00000-of-00002.safetensors   what rank 0 holds
//                      shard-00001-of-00002.safetensors
//                      manifest.json                      step, files with size and XXH3-128, tensors, state
//                      manifest.json.xxh128               its own checksum, as xxh128sum prints it
//
// A step folder appears by one rename when all of it is on disk (see [Note: commit by one rename] in core/atomic_folder.h). Whatever
// order the process, its peers or the machine fail in, every folder named step-N is a complete checkpoint, and later damage on disk
// is found by the checksums before anything is used.
//
// Nothing here knows modules or placements: a piece is an interval of the row-major flat index of a tensor, or, if columns are
// sharded, runs of it at a distance of one row. A checkpoint written with one sharding can be read with any other.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/core/runs.h"
#include "sheaf/core/safetensors.h"
#include "sheaf/core/warning.h"

namespace sheaf::models {

/// A part of a tensor that this rank writes; it may write several of one tensor. Over all ranks they must cover it exactly once: of a
/// replicated tensor, one rank passes it. Parts that are not intervals all have the same stride, the row length, and none of their
/// runs crosses the end of its row.
struct CheckpointPiece {
  std::string name;  ///< of the tensor, such as "blocks.0.mlp.up.weight"
  DType dtype = DType::f32;
  Shape shape;                           ///< global
  Runs runs;                             ///< of the row-major flat index; empty if this rank holds nothing of it
  const void* data = nullptr;            ///< runs.numel() elements, in host memory
  std::shared_ptr<void> keep = nullptr;  ///< owns `data` if it is a copy from a GPU
};

/// How the ranks of a job cooperate. The default is one rank alone. All ranks must see the same file system, but what a folder lists
/// on one machine may lag behind what another has written: only rank 0 lists, and tells the others.
struct CheckpointGroup {
  int rank = 0, world = 1;
  std::function<bool(bool)> all_true = [](bool mine) { return mine; };        ///< true if it is true on every rank
  std::function<int64_t(int64_t)> of_first = [](int64_t mine) { return mine; };  ///< rank 0's, on every rank
  /// The folder's run may go on, and remove what it replaces: a rank then holds all files from the beginning, not only those it reads.
  bool others_may_remove = false;
  /// How long a rank waits for what another has written: NFS remembers for up to a minute (acdirmax) that a file was not there.
  std::chrono::milliseconds patience = std::chrono::minutes(2);
};

/// Throws ConfigError for numbers that cannot be those of a save: a step that no reader would find, or fewer checkpoints than none to keep.
void check_save(int64_t step, int64_t keep);

/// Writes checkpoint `step` into `folder`, collectively; when it returns, the checkpoint is committed. An older checkpoint of the
/// same step is replaced. Unless `keep` is 0, which keeps all, all but the newest `keep` of the checkpoints up to this step are then
/// removed, and all of `abandoned`: steps that the run does not go on from, such as broken ones, which must not push out good ones.
/// `state` is any JSON of rank 0: training position, configuration, tokenizer. Throws IoError if the disk fails, CheckpointError if the
/// pieces do not cover a tensor exactly, on all ranks if on one; then existing checkpoints are untouched. Rank 0 calls `warn` for what
/// cannot be removed.
void save_checkpoint(const std::string& folder, int64_t step, const std::vector<CheckpointPiece>& pieces,
                     const Json& state, int64_t keep = 2, const CheckpointGroup& group = {}, const Warn& warn = warn_on_stderr,
                     const std::vector<int64_t>& abandoned = {});

/// A checkpoint being written, of which nothing is visible yet: save_checkpoint() in parts, for callers that write while they do
/// something else. Only the beginning is collective, and nothing after it communicates with other ranks.
struct PendingCheckpoint {
  std::string folder;
  int64_t step = 0;
  int rank = 0, world = 1;
  std::string pending;  ///< where it is built
  Warn warn = warn_on_stderr;  ///< called on rank 0 for what cannot be removed

  /// Collective. One at a time may be begun in a folder.
  static PendingCheckpoint begin(const std::string& folder, int64_t step, const CheckpointGroup& group, Warn warn = warn_on_stderr);
  /// Writes this rank's pieces.
  void write(const std::vector<CheckpointPiece>& pieces) const;
  /// The first rank, from this one on, whose part is missing; `world` if none is.
  int first_missing(int from) const;
  /// On rank 0, when all parts exist: makes it visible, and removes those that are not to be kept.
  void commit(const Json& state, int64_t keep, const std::vector<int64_t>& abandoned) const;
  std::string target() const;  ///< its final path

 private:
  std::string note(int rank) const;  ///< appears when this rank's part is on disk
};

/// An open checkpoint. Moves; one thread at a time.
class Checkpoint {
 public:
  /// Elements of a tensor that are contiguous in one of the files.
  struct Part {
    int file = 0;
    Runs runs;          ///< an interval, or runs at a distance of one row
    int64_t reach = 0;  ///< the largest end of this part and of those before it
  };
  struct TensorInfo {
    DType dtype = DType::f32;
    Shape shape;              ///< global
    int64_t row = 0;          ///< the stride of all parts that are not intervals; 0 if there are none
    std::vector<Part> parts;  ///< by their first element; each element of the tensor is in one of them
  };
  using Tensors = std::map<std::string, TensorInfo, std::less<>>;

  /// Opens a step folder, collectively: the ranks share the work of verifying the files. Throws CheckpointError naming the file and
  /// the problem on the rank that finds it; IoError if a file is there and cannot be read.
  static Checkpoint open(const std::string& step_folder, const CheckpointGroup& group = {});

  /// Opens checkpoint `step` of `folder`, collectively. Throws CheckpointError on all ranks if it is broken, or if there is none: then
  /// with the steps that there are. IoError on the ranks that cannot read it.
  static Checkpoint open_step(const std::string& folder, int64_t step, const CheckpointGroup& group = {});

  /// Opens the newest whole checkpoint of `folder`, the same on all ranks. Every newer one that is broken, or that a rank cannot read, is
  /// named to `warn` in one line, on rank 0 if it sees that, else on the ranks that do. What a run removes meanwhile is not broken: it
  /// has saved newer ones. Returns nothing if there is no checkpoint; throws CheckpointError if there are some, but all are broken, and
  /// IoError if some of them may be whole.
  static std::optional<Checkpoint> open_newest(const std::string& folder, const Warn& warn, const CheckpointGroup& group = {});

  /// The state in the newest whole manifest of `folder`, if there is one, the same on all ranks. Of other files, which may be large,
  /// nothing is read. Throws IoError on the ranks that cannot read a manifest.
  static std::optional<Json> newest_state(const std::string& folder, const CheckpointGroup& group = {});

  const std::string& path() const { return path_; }
  int64_t step() const { return step_; }
  const std::string& digest() const { return digest_; }  ///< XXH3-128 of the manifest, which has those of all files
  /// Newer steps that open_newest() found broken, on some rank; not those that could not be read, which may pass.
  const std::vector<int64_t>& broken() const { return broken_; }
  int world() const { return static_cast<int>(files_.size()); }  ///< ranks that wrote it
  const Json& state() const { return state_; }
  const Tensors& tensors() const { return tensors_; }
  /// Throws CheckpointError if there is no such tensor.
  const TensorInfo& at(std::string_view name) const;
  /// Copies elements of the flat index of a tensor, in their order, from whichever files hold them. Reads those bytes, and
  /// short gaps between them. Throws CheckpointError, IoError.
  void read(std::string_view name, const Runs& runs, void* dst);
  /// The same for elements [begin, end).
  void read(std::string_view name, int64_t begin, int64_t end, void* dst) { read(name, Runs::of({begin, end}), dst); }
  /// The bytes of a whole tensor, laid end to end, in maps of the files; valid while this object lives. If columns were sharded, that
  /// is a span for each part of each row.
  std::vector<std::span<const std::byte>> data(std::string_view name);

 private:
  struct ShardFile {
    std::string path;
    FileDigest digest;
    std::optional<File> held;  // until it is read
    std::optional<SafetensorsFile> open;
  };
  static Checkpoint with_manifest(const std::string& step_folder);
  void parse(const Json& manifest);
  /// This rank's share of the files.
  void verify(const CheckpointGroup& group);
  /// The file that holds this part of a tensor, and its name there.
  std::pair<SafetensorsFile*, std::string> holder(std::string_view name, const TensorInfo& info, const Part& part);

  std::string path_, digest_;
  int64_t step_ = 0;
  std::vector<int64_t> broken_;
  Json state_;
  std::vector<ShardFile> files_;
  Tensors tensors_;
};

}  // namespace sheaf::models
