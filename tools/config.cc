#include "sheaf/tools/config.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include <toml++/toml.h>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/presets.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_files.h"

namespace sheaf::tools {
namespace {

using models::DataConfig;
using models::TrainConfig;

// Edits (insert, delete, replace, swap of neighbours) that turn a into b.
int edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<int>> d(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = static_cast<int>(i + j);
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

std::string join(const std::vector<std::string>& items) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + item;
  return out;
}

[[noreturn]] void unknown_key(const std::string& where, const std::string& key, const std::vector<ConfigField>& fields) {
  const ConfigField* nearest = nullptr;
  int distance = 4;  // beyond three edits, a guess is worse than none
  const std::string name = key.substr(key.find('.') + 1);
  for (const auto& field : fields) {
    // A right name in a wrong section, or a section's, is as near as one slip of the finger.
    const bool same_name = field.key.substr(field.key.find('.') + 1) == name || field.key.starts_with(key + ".");
    const int d = same_name ? 1 : edit_distance(key, field.key);
    if (d < distance) {
      distance = d;
      nearest = &field;
    }
  }
  fail<ConfigError>("[config] ", where, ": unknown key ", json_string(key),
                    nearest ? "; did you mean \"" + nearest->key + "\"?" : "; see --help for all keys");
}

ConfigField& find_field(std::vector<ConfigField>& fields, const std::string& where, const std::string& key) {
  for (auto& field : fields) {
    if (field.key == key) return field;
  }
  unknown_key(where, key, fields);
}

std::string_view type_name(const ConfigField& field) {
  constexpr std::string_view kNames[] = {"true or false", "an integer", "a number", "a string"};
  return kNames[field.target.index()];
}

std::string number_text(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

[[noreturn]] void wrong_type(const std::string& where, const ConfigField& field, const std::string& found) {
  fail<ConfigError>("[config] ", where, ": '", field.key, "' takes ", type_name(field), ", not ", found);
}

void check_range(const std::string& where, const ConfigField& field, double value) {
  if (value >= field.min && value <= field.max) return;
  const std::string bounds = field.max >= 1e300 ? "at least " + number_text(field.min)
                                                : "in [" + number_text(field.min) + ", " + number_text(field.max) + "]";
  fail<ConfigError>("[config] ", where, ": '", field.key, "' must be ", bounds, ", not ", number_text(value));
}

void set(const std::string& where, ConfigField& field, bool value) {
  if (auto** target = std::get_if<bool*>(&field.target)) **target = value;
  else wrong_type(where, field, value ? "true" : "false");
}
void set(const std::string& where, ConfigField& field, int64_t value) {
  if (auto** target = std::get_if<int64_t*>(&field.target)) {
    check_range(where, field, static_cast<double>(value));
    **target = value;
  } else if (auto** real = std::get_if<double*>(&field.target)) {
    check_range(where, field, static_cast<double>(value));
    **real = static_cast<double>(value);
  } else {
    wrong_type(where, field, std::to_string(value));
  }
}
void set(const std::string& where, ConfigField& field, double value) {
  auto** target = std::get_if<double*>(&field.target);
  if (!target) wrong_type(where, field, number_text(value));
  check_range(where, field, value);  // refuses NaN
  **target = value;
}
void set(const std::string& where, ConfigField& field, const std::string& value) {
  auto** target = std::get_if<std::string*>(&field.target);
  if (!target) wrong_type(where, field, json_string(value));
  if (std::find(field.later.begin(), field.later.end(), value) != field.later.end()) {
    fail<ConfigError>("[config] ", where, ": '", field.key, "' cannot be ", json_string(value),
                      " yet", field.missing.empty() ? "" : ": " + field.missing, "; it is one of ",
                      join(field.choices));
  }
  if (!field.choices.empty() && std::find(field.choices.begin(), field.choices.end(), value) == field.choices.end()) {
    fail<ConfigError>("[config] ", where, ": '", field.key, "' is one of ", join(field.choices), "; not ",
                      json_string(value));
  }
  **target = value;
}

// A value from the command line, read as the field's type.
void set_from_text(const std::string& where, ConfigField& field, const std::string& text) {
  const auto number = [&]<class T>(T value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) wrong_type(where, field, json_string(text));
    set(where, field, value);
  };
  if (std::holds_alternative<std::string*>(field.target)) return set(where, field, text);
  if (std::holds_alternative<int64_t*>(field.target)) return number(int64_t{0});
  if (std::holds_alternative<double*>(field.target)) return number(0.0);
  if (text != "true" && text != "false") wrong_type(where, field, json_string(text));
  set(where, field, text == "true");
}

// Reads all options, or the `wanted` ones alone.
void read_file(const std::string& path, std::vector<ConfigField>& fields, std::set<std::string>& given,
               const std::function<bool(const std::string&)>& wanted = {}) {
  const std::string text = File::open<ConfigError>(path).read_all();
  toml::table document;
  try {
    document = toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    fail<ConfigError>("[config] ", path, ":", static_cast<int64_t>(error.source().begin.line), ": ",
                      error.description());
  }
  const auto line_of = [&](const toml::node& node) {
    return str(path, ":", static_cast<int64_t>(node.source().begin.line));
  };
  const auto is_section = [&](const std::string& prefix) {
    return std::any_of(fields.begin(), fields.end(), [&](const auto& field) { return field.key.starts_with(prefix + "."); });
  };
  // [model] has a section of its own, [model.rope_scaling].
  const auto read_section = [&](const auto& self, const std::string& prefix, const toml::node& node) -> void {
    const toml::table* table = node.as_table();
    if (!table) fail<ConfigError>("[config] ", line_of(node), ": [", prefix, "] is a section, not a value");
    for (const auto& [name, value] : *table) {
      const std::string where = line_of(value), key = prefix + "." + std::string(name.str());
      if (is_section(key)) {
        self(self, key, value);
        continue;
      }
      if (wanted && !wanted(key)) continue;
      ConfigField& field = find_field(fields, where, key);
      if (auto* flag = value.as_boolean()) set(where, field, flag->get());
      else if (auto* integer = value.as_integer()) set(where, field, integer->get());
      else if (auto* real = value.as_floating_point()) set(where, field, real->get());
      else if (auto* string = value.as_string()) set(where, field, string->get());
      else wrong_type(where, field, value.is_array() ? "an array" : value.is_table() ? "a table" : "a date");
      given.insert(key);
    }
  };
  for (const auto& [section, node] : document) {
    const std::string prefix(section.str());
    if (wanted && !is_section(prefix)) continue;
    if (!is_section(prefix)) unknown_key(line_of(node), node.is_table() ? "[" + prefix + "]" : prefix, fields);
    read_section(read_section, prefix, node);
  }
}

void read_overrides(std::span<const std::string> overrides, std::vector<ConfigField>& fields,
                    std::set<std::string>& given) {
  const std::string where = "command line";
  for (size_t i = 0; i < overrides.size(); ++i) {
    const std::string& argument = overrides[i];
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(std::min<size_t>(2, argument.size()), equals - 2);
    if (!argument.starts_with("--") || key.empty()) {
      const std::string before = i >= 2 ? overrides[i - 2] : "";
      fail<ConfigError>("[config] ", where, ": expected --section.key, found ", json_string(argument),
                        before == "--data.train_file" || before == "--data.val_file"
                            ? str("; a pattern of several files needs quotes to keep the shell from it: ", before, " 'name_*.bin'")
                            : "");
    }
    ConfigField& field = find_field(fields, where, key);
    if (equals != std::string::npos) {
      set_from_text(where, field, argument.substr(equals + 1));
    } else {
      if (++i == overrides.size()) fail<ConfigError>("[config] ", where, ": --", key, " lacks a value");
      set_from_text(where, field, overrides[i]);
    }
    given.insert(key);
  }
}

std::string value_text(const ConfigField& field) {
  if (auto* flag = std::get_if<bool*>(&field.target)) return **flag ? "true" : "false";
  if (auto* integer = std::get_if<int64_t*>(&field.target)) return std::to_string(**integer);
  if (auto* real = std::get_if<double*>(&field.target)) return json_number(**real);
  return json_string(**std::get_if<std::string*>(&field.target));
}

// A file may hold all options (config.toml does), so there the default of one that is not used is no contradiction.
void refuse_unused(const TrainConfig& config, const std::vector<ConfigField>& fields,
                   const std::set<std::string>& flags) {
  TrainConfig defaults;
  const auto usual = config_fields(defaults);
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::string& key = fields[i].key;
    if (!flags.contains(key) && value_text(fields[i]) == value_text(usual[i])) continue;
    if (const char* reason = unused(key, config)) fail<ConfigError>("[config] '", key, "' would change nothing: ", reason);
  }
}

// Whether published sizes and a config.json have a say in it: the others are of a run, not of the model's shape.
bool is_of_shape(const std::string& key) {
  return key.starts_with("model.") && key != "model.preset" && key != "model.weights" && key != "model.dropout" &&
         key != "model.quantize" && !key.starts_with("model.lora_");
}

// What the file says of the model's shape stands back behind a preset of the command line.
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

// The shape of published weights is that of the model.
void apply_weights(TrainConfig& config, std::vector<ConfigField>& fields, const std::set<std::string>& given, bool resume) {
  const std::string& weights = config.model.weights;
  if (weights.empty()) return;
  if (!path_exists(weights)) {
    if (resume && !list_steps(config.output.folder + "/checkpoints").empty()) return;
    fail<ConfigError>("[config] model.weights: there is no '", weights, "'");
  }
  const std::string file = models::published_config_file(weights);
  if (file.empty()) {  // the options say the shape, of weights that are there
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
    std::visit([&](const auto* value) { set(file, fields[i], *value); }, source[i].target);
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
  // A run that goes on by its own config.toml has that preset already, with what was given beside it.
  const bool again = resume && path == config.output.folder + "/config.toml" && config.model.preset == preset_of_file;
  if (flags.contains("model.preset") && !config.model.preset.empty() && !again) forget_shape(fields, given, flags);
  given.insert(flags.begin(), flags.end());
  apply_preset(config, fields, given);
  apply_weights(config, fields, given, resume);
  refuse_unused(config, fields, flags);
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

// [generate] of a file, and the options that are `allowed` beside it.
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
    check<ConfigError>(key != "generate.prompt" && key != "generate.drafts", "[generate] --", key, " would change nothing beside --prompts");
    bool known = key.starts_with("generate.");
    for (const char* cut : {"sharding.strategy", "sharding.units", "sharding.min_parameters", "sharding.prefetch_bytes", "sharding.tensor",
                            "sharding.experts"})
      known |= key == cut;
    check<ConfigError>(known, "[generate] --", key, " is not for sampling: the model is that of the run; only --generate.*, ",
                       "--sharding.strategy, .units, .min_parameters, .prefetch_bytes, .tensor and .experts may be given");
  });
}

namespace {

// What a run was validated on, and how.
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
