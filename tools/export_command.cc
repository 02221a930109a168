#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <vector>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/file.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_names.h"
#include "sheaf/models/run_state.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/export_adapters.h"
#include "sheaf/tools/export_companions.h"
#include "sheaf/tools/output.h"

namespace sheaf::tools {
namespace {

// Refuses to overwrite files that this command did not write: they are a user's data, or the weights that a run started from.
void check_is_ours(const std::string& to) {
  const auto there = std::filesystem::status(to).type();
  check<IoError>(there == std::filesystem::file_type::not_found || there == std::filesystem::file_type::regular, "[export] '", to,
                 "' is no regular file");
  if (there == std::filesystem::file_type::not_found) return;
  const auto is_ours = [&] {
    try {
      return SafetensorsFile::open(to).metadata().contains("step");
    } catch (const Error&) {
      return false;
    }
  };
  check<ConfigError>(is_ours(), "[export] '", to, "' exists and was not written by sheaf export: remove it, or name another");
}

// Refuses to write into a folder with another model: files next to weights are ours only if the weights are.
void check_folder_is_free(const std::string& folder, const std::string& weights) {
  if (path_exists(weights)) return;  // check_is_ours() checks who wrote them
  std::vector<const char*> names = {"config.json", "adapter_config.json"};
  names.insert(names.end(), std::begin(kCompanions), std::end(kCompanions));
  for (const char* name : names)
    check<ConfigError>(!path_exists(folder + "/" + name), "[export] '", folder, "' has a ", name,
                       ", which was not written by sheaf export: remove it, or name another folder");
}

models::Checkpoint open_checkpoint(const ExportArguments& arguments) {
  const std::string folder = models::checkpoints_in(arguments.folder);
  const models::CheckpointGroup reader{.others_may_remove = true};
  if (arguments.step >= 0) return models::Checkpoint::open_step(folder, arguments.step, reader);
  auto newest = models::Checkpoint::open_newest(folder, warn_on_stderr, reader);
  if (!newest) fail<CheckpointError>("[export] no checkpoint in ", folder);
  return std::move(*newest);
}

// [rows, columns] of elements of `width` bytes, as [columns, rows].
std::vector<std::byte> transposed(const std::vector<std::byte>& whole, int64_t rows, int64_t columns, size_t width) {
  std::vector<std::byte> out(whole.size());
  for (int64_t from = 0; from < columns; from += 16)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = from; column < std::min(from + 16, columns); ++column)
        std::memcpy(&out[static_cast<size_t>(column * rows + row) * width],
                    &whole[static_cast<size_t>(row * columns + column) * width], width);
  return out;
}

// Subtracts 1 from the factors of norms.
void subtract_one(std::vector<std::byte>& factors, DType dtype) {
  visit_floating("export", dtype, [&]<class T>() {
    T* const values = reinterpret_cast<T*>(factors.data());
    for (size_t i = 0; i < factors.size() / sizeof(T); ++i) values[i] = static_cast<T>(static_cast<float>(values[i]) - 1.0f);
  });
}

// The contents of a published tensor, or of a part of one, and where they are stored.
struct Part {
  models::PublishedTensor t;
  RestingWeight weight;
  std::optional<Adapter> adapter;

  bool lies_as_published() const { return !adapter && !weight.blocks && !t.above_one && !t.transposed; }
  std::vector<std::byte> values(DType dtype) const {
    std::vector<std::byte> out;
    if (adapter || weight.blocks) out = merged(weight, adapter, dtype);
    else for (const auto& piece : weight.bytes) out.insert(out.end(), piece.begin(), piece.end());
    if (t.above_one) subtract_one(out, dtype);
    return t.transposed ? transposed(out, t.rows(), t.row_size(), size_of(dtype)) : out;
  }
};

// Assembles a tensor from several parts.
std::vector<std::byte> put_together(const std::vector<Part>& parts, DType dtype) {
  const size_t width = size_of(dtype);
  std::vector<std::byte> out(static_cast<size_t>(parts[0].t.shape.numel()) * width);
  for (const Part& part : parts) {
    const std::vector<std::byte> values = part.values(dtype);
    const int64_t count = part.t.held().numel(), run = part.t.step == 1 ? count : part.t.run;
    for (int64_t i = 0; i < count; i += run)
      std::memcpy(&out[static_cast<size_t>(part.t.place(i)) * width], &values[static_cast<size_t>(i) * width], static_cast<size_t>(run) * width);
  }
  return out;
}

std::vector<SafetensorsInput> own_tensors(models::Checkpoint& checkpoint) {
  std::vector<SafetensorsInput> tensors;
  for (const auto& [name, info] : checkpoint.tensors())
    if (!name.starts_with("optimizer.")) tensors.push_back({name, info.dtype, info.shape, checkpoint.data(name)});
  return tensors;
}

// Block-quantized weights are written in `dtype`, everything else in its stored dtype.
std::vector<SafetensorsInput> published_tensors(models::Checkpoint& checkpoint, models::ModelConfig model, const models::PublishedForm& form,
                                                DType dtype) {
  // Published GPT-2 has biases: where our model has none, they are zeros.
  const bool zeros = model.type == "gpt2" && !model.bias;
  model.bias = model.type == "gpt2";
  std::vector<SafetensorsInput> tensors;
  const std::vector<models::PublishedTensor> table = models::published_tensors(model, form);
  for (auto first = table.begin(), last = first; first != table.end(); first = last) {
    last = std::find_if(first, table.end(), [&](const models::PublishedTensor& t) { return t.name != first->name; });
    tensors.push_back({first->name, kF32, first->shape, {}});
    SafetensorsInput& tensor = tensors.back();
    if (zeros && first->name.ends_with(".bias")) {
      tensor.make = [n = first->shape.numel()] { return std::vector<std::byte>(static_cast<size_t>(n) * size_of(kF32)); };
      continue;
    }
    std::vector<Part> parts;
    for (auto t = first; t != last; ++t) parts.push_back({*t, weight_of(checkpoint, model, *t), adapter_of(checkpoint, model, *t)});
    const RestingWeight& weight = parts[0].weight;
    tensor.dtype = weight.blocks ? dtype : weight.dtype;
    for (const Part& part : parts)  // all parts of a tensor have one dtype
      check<CheckpointError>(part.weight.dtype == weight.dtype, "[export] ", checkpoint.path(), ": ", part.t.own, " is ", part.weight.dtype,
                             ", and ", first->own, " ", weight.dtype);
    if (parts.size() > 1) tensor.make = [parts, as = tensor.dtype] { return put_together(parts, as); };
    else if (parts[0].lies_as_published()) tensor.pieces = weight.bytes;
    else tensor.make = [part = parts[0], as = tensor.dtype] { return part.values(as); };
  }
  return tensors;
}

// The compute dtype of a run with block-quantized weights.
DType dtype_of(const models::RunState& state) {
  return state.model.quantize == "none" ? kF32 : models::compute_dtype_from("train", state.train.dtype).value_or(kF32);
}

}  // namespace

// The model is not assembled in memory: its parts are written to the file directly from memory-mapped shards.
int export_command(const ExportArguments& arguments) {
  const std::string& format = arguments.format;
  if (format != "huggingface" && format != "peft" && format != "sheaf")
    fail<ConfigError>("[export] unknown format '", format, "'; known: sheaf, huggingface, peft");
  models::Checkpoint checkpoint = open_checkpoint(arguments);
  std::string file = arguments.file;
  check<ConfigError>(!file.empty(), "[export] '' cannot be the name of a ", format == "sheaf" ? "file" : "folder");
  std::map<std::string, std::string> metadata = {{"format", "pt"}, {"step", str(checkpoint.step())}};
  std::vector<SafetensorsInput> tensors;
  std::function<std::string()> finish = [] { return ""; };  // writes the files that belong next to the weights, and reports them
  if (format != "sheaf") {
    const models::RunState state = models::RunState::from_json(checkpoint.state());
    models::ModelConfig model = state.model;
    model.vocab = state.vocab;
    if (format == "peft" && model.lora_rank == 0)
      fail<ConfigError>("[export] --format peft is for adapters, and this run has none (model.lora_rank)");
    const bool adapters = format == "peft";
    if (const std::string config = state.weights ? models::published_config_file(state.weights->path) : ""; adapters && !config.empty())
      check<ConfigError>(!Json::parse(File::open(config).read_all(), config).find("text_config"), "[export] --format peft: '", config,
                         "' is of a model of images and text, in which `peft` finds none of these layers; --format huggingface adds the ",
                         "adapters to them");
    const models::PublishedForm form = models::PublishedForm::to_write(model, published_like(state));
    // A reader of a folder with both would add the adapters to weights that already contain them.
    const std::string other = arguments.file + (adapters ? "/config.json" : "/adapter_config.json");
    check<ConfigError>(!path_exists(other), "[export] there is '", other, "': ", adapters ? "adapters and a model" : "a model and adapters",
                       " want folders of their own");
    const std::string parts = arguments.file + "/model.safetensors.index.json";
    check<ConfigError>(!path_exists(parts), "[export] there is '", parts, "': weights in parts, which were not written by sheaf export");
    make_folders(arguments.file);
    file += adapters ? "/adapter_model.safetensors" : "/model.safetensors";
    check_folder_is_free(arguments.file, file);
    tensors = adapters ? adapter_tensors(checkpoint, model, form) : published_tensors(checkpoint, model, form, dtype_of(state));
    finish = [=, folder = arguments.file, dtype = tensors.front().dtype] {
      if (adapters)
        replace_file(folder + "/adapter_config.json", adapter_config(model, form, state.weights ? state.weights->path : "").dump() + "\n");
      else export_config(state, model, dtype, folder);
      const bool leaves_out = model.mtp_layers > 0 && !adapters && !models::publishes_mtp(model);
      return export_tokenizer(state, folder) +
             (leaves_out ? ", without model.mtp_layers, which are published with DeepSeek-V3's and GLM-4.5's mixtures alone" : "");
    };
  } else {
    tensors = own_tensors(checkpoint);
    metadata["sheaf"] = checkpoint.state().dump();
  }
  check_is_ours(file);
  const size_t count = tensors.size();
  int64_t elements = 0;
  for (const SafetensorsInput& tensor : tensors) elements += tensor.shape.numel();
  FileDigest digest;
  replace_file(file, [&](const std::string& pending) { digest = write_safetensors(pending, std::move(tensors), metadata); });
  const std::string beside = finish();
  say(str(file, ": ", count, " tensors, ", elements, " elements, ", digest.bytes, " bytes", beside, ", of ", checkpoint.path()));
  return 0;
}

}  // namespace sheaf::tools
