// Saving and resuming: a model and its optimizers as a checkpoint folder, written by all ranks and read by any number of
// them.
//
//   if (const auto saved = models::load_checkpoint("out/run", model, {&optimizer}, world)) step = saved->step;
//   ...
//   models::save_checkpoint("out/run", step, model, {&optimizer}, world);
//
// async_saver.h saves while training continues.
//
// A checkpoint contains logical tensors by name, so that a run continues bit for bit where it stopped, and it fits any number of
// ranks, any strategy and any choice of units: only the names, shapes and dtypes of the parameters and buffers have to agree. The
// files are described in checkpoint_store.h.
#pragma once

#include "sheaf/distributed/world.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/nn/optim/diloco.h"
#include "sheaf/nn/optim/loss_scaler.h"
#include "sheaf/nn/optim/optimizer.h"

namespace sheaf::models {

/// None, one, or several over disjoint parameters; always in the same order.
using Optimizers = std::vector<optim::Optimizer*>;

/// A further module in a model's checkpoint, such as an average of its weights (optim::Ema): its tensors have their names after
/// `prefix`. Sharded over the same ranks as the model.
struct PrefixedModule {
  std::string prefix;            ///< "average."; not empty, nor "optimizer."
  nn::Module* module = nullptr;  ///< materialized
};
using PrefixedModules = std::vector<PrefixedModule>;

struct SaveOptions {
  Json state = {};   ///< rank 0's: whatever else a program needs to continue, such as its options; returned on loading
  int64_t keep = 2;  ///< newest checkpoints that stay in the folder; 0 keeps all
  std::vector<int64_t> abandoned = {};  ///< rank 0's: steps that do not count among them, and are removed, see checkpoint_store.h
  const optim::LossScaler* scaler = nullptr;  ///< saved, too
  const optim::DiLoCo* outer = nullptr;       ///< for a model that islands train: saved, too, with each island's own state
  PrefixedModules also = {};  ///< saved in the same checkpoint, parameters and buffers: {{"average.", &average}}; not with `outer`
  Warn warn = warn_on_stderr;  ///< called on rank 0 if an older checkpoint cannot be removed; maybe by the thread of an AsyncSaver
};

/// Saves parameters, buffers, the optimizers' state and step counts, and the state of a loss scaler, as checkpoint `step` of
/// `folder`, collectively and outside of any recording; all ranks must see the same file system. When it returns, the checkpoint is
/// committed; an older one of the same step is replaced. Throws IoError if the disk fails; then existing checkpoints are untouched.
void save_checkpoint(const std::string& folder, int64_t step, nn::Module& module, const Optimizers& optimizers,
                     World& world, const SaveOptions& options = {});

struct LoadOptions {
  std::optional<int64_t> step = {};  ///< which checkpoint; absent: the newest whole one
  Warn warn = warn_on_stderr;            ///< called for every newer checkpoint that is broken and was skipped
  optim::LossScaler* scaler = nullptr;   ///< restored, too: required if one was saved
  const optim::DiLoCo* outer = nullptr;  ///< the same, with as many islands
  PrefixedModules also = {};             ///< filled, too; if the checkpoint lacks a tensor of one, that is an error that names it
  /// Skips tensors whose names begin with this, if the module has none: "average.", to load a model without its average. "": none.
  std::string_view passes_over = {};
};

struct LoadedCheckpoint {
  std::string path;  ///< of the step folder
  int64_t step = 0;
  Json state;  ///< as passed to save_checkpoint()
};

/// Fills a materialized module and its optimizers from the newest whole checkpoint of `folder`, or from that of LoadOptions::step,
/// collectively. Returns nothing if there is no checkpoint at all; for a step that is missing, CheckpointError lists those there are.
/// Without optimizers, their saved state is skipped: to evaluate or to continue from weights alone; adapters
/// (nn::add_lora) that are not in the checkpoint are then unchanged. Throws CheckpointError if there are checkpoints but none is
/// whole, or naming the first tensor that is missing, left over, or of another shape or dtype. Frozen parameters may be stored in any
/// of f32, bf16 and f16, which are converted to each other; bf16 and f16 are also converted to trained f32.
[[nodiscard]] std::optional<LoadedCheckpoint> load_checkpoint(const std::string& folder, nn::Module& module,
                                                              const Optimizers& optimizers, World& world,
                                                              const LoadOptions& options = {});

// --- the parts, for a program that reads or writes checkpoints in another order ---

/// All ranks, as a group for the checkpoint store.
CheckpointGroup checkpoint_group(World& world);
/// The same for the ranks that share `module`, and the modules beside it. ConfigError if the world has several and nothing shards one of
/// them over them.
CheckpointGroup checkpoint_group(nn::Module& module, World& world, const optim::DiLoCo* outer = nullptr, const PrefixedModules& also = {});
/// Collective: waits for the slowest rank, without a deadline. For ranks that have read files, each at the speed of its disk.
void wait_for_all(World& world);
/// Host memory for copies of what is saved, reused: it grows to the requested size.
class HostCopy {
 public:
  char* reserve(size_t bytes);

 private:
  std::unique_ptr<char[]> data_;
  size_t bytes_ = 0;
};
/// This rank's pieces for save_checkpoint(): parameters, buffers and the optimizers' state; the live ones, or, with `copy`, snapshots
/// in its memory.
std::vector<CheckpointPiece> checkpoint_pieces(nn::Module& module, const Optimizers& optimizers,
                                               const SaveOptions& options = {}, HostCopy* copy = nullptr);
/// Fills this rank's pieces from an open checkpoint; see load_checkpoint().
void load_state(Checkpoint& checkpoint, nn::Module& module, const Optimizers& optimizers, const LoadOptions& options = {});

}  // namespace sheaf::models
