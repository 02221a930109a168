#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/file.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/output.h"

namespace sheaf::tools {
namespace {

models::Checkpoint open_checkpoint(const ExportArguments& arguments) {
  const std::string folder = arguments.folder + "/checkpoints";
  if (arguments.step >= 0) return models::Checkpoint::open(step_folder(folder, arguments.step));
  auto newest = models::Checkpoint::open_newest(folder, models::warn_on_stderr);
  if (!newest) fail<CheckpointError>("[export] no checkpoint in ", folder);
  return std::move(*newest);
}

}  // namespace

// Nothing is put together in memory: the parts go from maps of the shards to the file.
int export_command(const ExportArguments& arguments) {
  models::Checkpoint checkpoint = open_checkpoint(arguments);
  std::vector<SafetensorsInput> tensors;
  int64_t elements = 0;
  for (const auto& [name, info] : checkpoint.tensors()) {
    if (name.starts_with("optimizer.")) continue;
    tensors.push_back({name, info.dtype, info.shape, checkpoint.data(name)});
    elements += info.shape.numel();
  }
  const size_t count = tensors.size();
  const std::string pending = arguments.file + ".tmp";
  const FileDigest digest = write_safetensors(pending, std::move(tensors), {{"format", "pt"},
                                                                            {"step", str(checkpoint.step())},
                                                                            {"sheaf", checkpoint.state().dump()}});
  rename_path(pending, arguments.file);
  say(str(arguments.file, ": ", count, " tensors, ", elements, " elements, ", digest.bytes, " bytes, of ", checkpoint.path()));
  return 0;
}

}  // namespace sheaf::tools
