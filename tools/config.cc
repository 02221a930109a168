#include "sheaf/tools/config.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/models/presets.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_files.h"
#include "sheaf/tools/config_reading.h"

namespace sheaf::tools {
namespace {

using models::DataConfig;
using models::TrainConfig;

// Whether published sizes and a config.json determine the option: the others belong to a run, not to the model's shape.
bool is_of_shape(const std::string& key) {
  return key.starts_with("model.") && key != "model.preset" && key != "model.weights" && key != "model.dropout" &&
         key != "model.quantize" && !key.starts_with("model.lora_");
}

// A file may hold all options (config.toml does), so an unused option with its default value is no error. Nor are the two below: files set
// them for runs that the command line may turn into others. And published weights have the shape that they have.
// A flag with the default value is one only if the file has not given another: it may turn off what belongs together.
void refuse_unused(const TrainConfig& config, const std::vector<ConfigField>& fields, const std::set<std::string>& of_file,
                   const std::set<std::string>& flags) {
  TrainConfig defaults;
  const auto usual = config_fields(defaults);
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::string& key = fields[i].key;
    const bool may_rest = value_text(fields[i]) == value_text(usual[i]) || key == "train.min_lr" || key == "train.fuse" ||
                          (!config.model.weights.empty() && is_of_shape(key));
    const bool is_flag = flags.contains(key);
    if (may_rest && (!is_flag || of_file.contains(key))) continue;
    if (const char* reason = unused(key, config))
      fail<ConfigError>("[config] '", key, "' would change nothing: ", reason,
                        is_flag ? "" : str("; --", key, ' ', value_text(usual[i]), " sets it back to the default"));
  }
}

// A preset on the command line overrides the file's values for the model's shape.
void forget_shape(std::vector<ConfigField>& fields, std::set<std::string>& given, const std::set<std::string>& flags) {
  TrainConfig defaults;
  const auto usual = config_fields(defaults);
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::string& key = fields[i].key;
    if (!is_of_shape(key) || flags.contains(key)) continue;
    std::visit([&](auto* to) { *to = **std::get_if<decltype(to)>(&usual[i].target); }, fields[i].target);
    given.erase(key);
  }
}

void apply_preset(TrainConfig& config, std::vector<ConfigField>& fields, const std::set<std::string>& given) {
  if (config.model.preset.empty()) return;
  TrainConfig preset = config;
  const std::string name = config.model.preset;
  preset.model = models::presets().at(name);
  preset.model.preset = name;
  if (given.contains("model.type")) preset.model.type = config.model.type;
  if (given.contains("model.rope_scaling.rope_type")) preset.model.rope_scaling.rope_type = config.model.rope_scaling.rope_type;
  if (given.contains("model.window")) preset.model.window = config.model.window;
  if (given.contains("model.linear_key_heads")) preset.model.linear_key_heads = config.model.linear_key_heads;
  if (given.contains("model.shared_experts")) preset.model.shared_experts = config.model.shared_experts;
  const auto source = config_fields(preset);
  for (size_t i = 0; i < fields.size(); ++i) {
    if (!fields[i].key.starts_with("model.") || given.contains(fields[i].key) || unused(fields[i].key, preset)) continue;
    std::visit([&](auto* to) { *to = **std::get_if<decltype(to)>(&source[i].target); }, fields[i].target);
  }
}

// Applies the shape of published weights to the model.
void apply_weights(TrainConfig& config, std::vector<ConfigField>& fields, const std::set<std::string>& given, bool resume) {
  const std::string& weights = config.model.weights;
  if (weights.empty()) return;
  if (!path_exists(weights)) {
    if (resume && !list_steps(models::checkpoints_in(config.output.folder)).empty()) return;
    fail<ConfigError>("[config] model.weights: there is no '", weights, "'");
  }
  const std::string file = models::published_config_file(weights);
  if (file.empty()) {  // the options give the shape of existing weights
    if (std::filesystem::is_directory(weights)) models::PublishedFiles::open(weights);
    return;
  }
  TrainConfig published = config;
  published.model = models::read_published_config(file);
  const auto source = config_fields(published);
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::string& key = fields[i].key;
    const bool open = key == "model.vocab" && config.model.vocab == 0;
    if (!is_of_shape(key)) continue;
    if (!open && (given.contains(key) || !config.model.preset.empty())) continue;
    set_value(file, fields[i], source[i]);
  }
  models::check_published_shape(config.model, published.model, file);
}

}  // namespace

TrainConfig load_config(const std::string& path, std::span<const std::string> overrides, bool resume) {
  TrainConfig config;
  auto fields = config_fields(config);
  std::set<std::string> given, flags;
  if (!path.empty()) read_file(path, fields, given);
  const std::string preset_of_file = config.model.preset;
  read_overrides(overrides, fields, flags);
  // A run that resumes from its own config.toml already has that preset and the options given along with it.
  const bool again = resume && path == config.output.folder + "/config.toml" && config.model.preset == preset_of_file;
  if (flags.contains("model.preset") && !config.model.preset.empty() && !again) forget_shape(fields, given, flags);
  const std::set<std::string> of_file = given;
  given.insert(flags.begin(), flags.end());
  apply_preset(config, fields, given);
  apply_weights(config, fields, given, resume);
  refuse_unused(config, fields, of_file, flags);
  validate(config, [&](const char* key) {
    return config.model.preset.empty() || given.contains(key) ? "" : str(" (of the preset ", config.model.preset, ")");
  });
  return config;
}

std::string config_of_run(std::span<const std::string> overrides) {
  TrainConfig config;
  auto fields = config_fields(config);
  std::set<std::string> given;
  read_overrides(overrides, fields, given);
  return config.output.folder + "/config.toml";
}

namespace {

// Reads [generate] of a file, and the options accepted by `refuse`.
TrainConfig generate_config(const std::string& path, std::span<const std::string> overrides, TrainConfig config,
                            const std::function<void(const std::string& key)>& refuse) {
  auto fields = config_fields(config);
  std::set<std::string> given, flags;
  if (path_exists(path)) read_file(path, fields, given, [](const std::string& key) { return key.starts_with("generate."); });
  read_overrides(overrides, fields, flags);
  for (const std::string& key : flags) refuse(key);
  return config;
}

}  // namespace

models::GenerateConfig load_generate_config(const std::string& path, std::span<const std::string> overrides) {
  return generate_config(path, overrides, {}, [](const std::string& key) {
    check<ConfigError>(key.starts_with("generate."), "[generate] --", key, " is not for sampling: the model is that of the run; only ",
                       "--generate.* may be given");
  }).generate;
}

TrainConfig load_generate_lines_config(const std::string& path, std::span<const std::string> overrides) {
  TrainConfig config;
  config.sharding.strategy = "replicate";
  return generate_config(path, overrides, std::move(config), [](const std::string& key) {
    check<ConfigError>(key != "generate.prompt" && key != "generate.drafts", "[generate] --", key, " would change nothing with --prompts");
    bool known = key.starts_with("generate.");
    for (const char* cut : {"sharding.strategy", "sharding.units", "sharding.min_parameters", "sharding.prefetch_bytes", "sharding.tensor",
                            "sharding.experts"})
      known |= key == cut;
    check<ConfigError>(known, "[generate] --", key, " is not for sampling: the model is that of the run; only --generate.*, ",
                       "--sharding.strategy, .units, .min_parameters, .prefetch_bytes, .tensor and .experts may be given");
  });
}

namespace {

// Options of a run's validation.
bool is_of_validation(const std::string& key) {
  for (const char* known : {"data.corpus", "data.val_fraction", "data.val_file", "data.choices", "train.batch", "train.micro_batches",
                            "train.eval_tokens", "train.eval_questions", "train.dtype", "train.fp8"})
    if (key == known) return true;
  return false;
}

bool is_for_evaluation(const std::string& key) {
  for (const char* known : {"data.tokenizer", "data.tokenizer_folder", "data.separate_documents", "data.end_of_text", "sharding.strategy",
                            "sharding.units", "sharding.min_parameters", "sharding.prefetch_bytes", "sharding.replicas", "sharding.tensor",
                            "sharding.context", "sharding.context_comm", "sharding.experts", "sharding.pipeline", "sharding.pipeline_head",
                            "model.quantize"})
    if (key == known) return true;
  return is_of_validation(key);
}

}  // namespace

EvaluateConfig load_evaluate_config(const std::string& path, std::span<const std::string> overrides) {
  EvaluateConfig out;
  TrainConfig& config = out.config;
  auto fields = config_fields(config);
  std::set<std::string> given, flags;
  if (path_exists(path)) read_file(path, fields, given, is_of_validation);
  const DataConfig of_run = std::exchange(config.data, {});
  read_overrides(overrides, fields, flags);
  for (const std::string& key : flags)
    check<ConfigError>(is_for_evaluation(key), "[evaluate] --", key, " is not for evaluation: the model is that of the folder; ",
                       "`sheaf evaluate --help` lists what may be given");
  auto& data = config.data;
  const bool says_on_what = flags.contains("data.corpus") || flags.contains("data.val_file") || flags.contains("data.choices");
  if (!says_on_what) data.corpus = of_run.corpus, data.val_file = of_run.val_file, data.choices = of_run.choices;
  if (!flags.contains("data.val_fraction")) data.val_fraction = of_run.val_fraction;
  out.whole_text = flags.contains("data.corpus") && !flags.contains("data.val_fraction");
  for (const std::string& key : flags)
    if (const char* reason = unused(key, config)) fail<ConfigError>("[config] '", key, "' would change nothing: ", reason);
  const auto require = [](bool condition, const auto&... parts) { check<ConfigError>(condition, "[config] ", parts...); };
  require(data.separate_documents || !flags.contains("data.separate_documents"), "'data.separate_documents false' would change nothing: ",
          "documents that were kept apart in training, and examples, are so in evaluation");
  require(data.corpus.empty() || data.val_file.empty(), "data.corpus and data.val_file exclude each other");
  require(!flags.contains("data.val_fraction") || !data.corpus.empty(), "'data.val_fraction' would change nothing: it is of a data.corpus");
  require(data.val_fraction > 0, "data.val_fraction is 0: nothing is left to validate on");
  require(!models::is_published(data.tokenizer) || !data.tokenizer_folder.empty(), "data.tokenizer ", data.tokenizer,
          " needs data.tokenizer_folder, the folder with its published files");
  require(config.train.batch >= config.train.micro_batches, "train.batch ", config.train.batch, " is less than train.micro_batches ",
          config.train.micro_batches);
  return out;
}

std::string print_config(const TrainConfig& config) {
  TrainConfig copy = config;
  std::string out, section;
  for (const auto& field : config_fields(copy)) {
    const size_t dot = field.key.find('.');
    if (field.key.substr(0, dot) != section) {
      out += section.empty() ? "[" : "\n[";
      section = field.key.substr(0, dot);
      out += section + "]\n";
    }
    out += field.key.substr(dot + 1) + " = " + value_text(field) + "\n";
  }
  return out;
}

namespace {

std::string help_of(const std::function<bool(const std::string&)>& wanted) {
  TrainConfig defaults;
  std::string out;
  for (const auto& field : config_fields(defaults)) {
    if (!wanted(field.key)) continue;
    std::string line = "  --" + field.key + " ";
    line.resize(std::max<size_t>(line.size(), 30), ' ');
    out += line + field.doc + " [" + value_text(field) + "]";
    if (!field.choices.empty()) {
      std::string choices;
      for (const auto& choice : field.choices) {
        if (!choice.empty()) choices += (choices.empty() ? "" : ", ") + choice;
      }
      out += " (" + choices + ")";
    }
    out += "\n";
  }
  return out;
}

}  // namespace

std::string config_help(std::string_view section) {
  return help_of([&](const std::string& key) { return key.starts_with(section); });
}
std::string evaluate_config_help() { return help_of(is_for_evaluation); }

}  // namespace sheaf::tools
