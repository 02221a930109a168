#include "sheaf/tools/config.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include <toml++/toml.h>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/presets.h"
#include "sheaf/models/published_config.h"

namespace sheaf::tools {
namespace {

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

// Reads all sections, or `only` one.
void read_file(const std::string& path, std::vector<ConfigField>& fields, std::set<std::string>& given,
               std::string_view only = "") {
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
    if (!only.empty() && prefix != only) continue;
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
      fail<ConfigError>("[config] ", where, ": expected --section.key, found ", json_string(argument));
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

// What an option needs to change anything: null if it has that.
const char* unused(const std::string& key, const TrainConfig& config) {
  if (key == "model.bias" && config.model.type != "gpt2") return "only model.type gpt2 has biases";
  if (key.starts_with("model.rope_") && config.model.type != "llama") return "only model.type llama has rotary embeddings";
  const std::string& scaling = config.model.rope_scaling.rope_type;
  if (key == "model.rope_scaling.factor" && scaling == "default")
    return "only model.rope_scaling.rope_type linear and llama3 have it";
  if (key.starts_with("model.rope_scaling.") && !key.ends_with("type") && !key.ends_with(".factor") && scaling != "llama3")
    return "only model.rope_scaling.rope_type llama3 has it";
  if (key.starts_with("train.decay_") && config.train.schedule == "constant")
    return "train.schedule constant has no decay";
  if (key == "data.tokenizer_folder" && !models::is_published(config.data.tokenizer))
    return "only data.tokenizer gpt2 and llama3 come from files";
  if (key == "sharding.min_parameters" && config.sharding.units != "count")
    return "only sharding.units count goes by parameters";
  return nullptr;
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

void apply_preset(TrainConfig& config, std::vector<ConfigField>& fields, const std::set<std::string>& given) {
  if (config.model.preset.empty()) return;
  TrainConfig preset = config;
  const std::string name = config.model.preset;
  preset.model = models::presets().at(name);
  preset.model.preset = name;
  if (given.contains("model.type")) preset.model.type = config.model.type;
  if (given.contains("model.rope_scaling.rope_type")) preset.model.rope_scaling.rope_type = config.model.rope_scaling.rope_type;
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
  if (file.empty()) return;
  TrainConfig published = config;
  published.model = models::read_published_config(file);
  const auto source = config_fields(published);
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::string& key = fields[i].key;
    const bool open = key == "model.vocab" && config.model.vocab == 0;
    if (!key.starts_with("model.") || key == "model.weights" || key == "model.dropout" || key == "model.preset") continue;
    if (!open && (given.contains(key) || !config.model.preset.empty())) continue;
    std::visit([&](const auto* value) { set(file, fields[i], *value); }, source[i].target);
  }
  models::check_published_shape(config.model, published.model, file);
}

}  // namespace

std::vector<ConfigField> config_fields(TrainConfig& c) {
  std::vector<std::string> sizes = {""};
  for (const auto& [name, model] : models::presets()) sizes.push_back(name);
  auto &m = c.model;
  auto &rope = m.rope_scaling;
  auto &d = c.data;
  auto &t = c.train;
  auto &s = c.sharding;
  auto &g = c.generate;
  const std::vector<std::string> any;
  return {
      {"model.type", &m.type, "architecture", {"gpt2", "llama"}},
      {"model.preset", &m.preset, "a published size; fields given beside it win", sizes},
      {"model.weights", &m.weights, "to start from: a folder or file of Hugging Face's; its config.json is the model's shape"},
      {"model.layers", &m.layers, "transformer blocks", any, 1, 10000},
      {"model.heads", &m.heads, "query heads", any, 1, 10000},
      {"model.kv_heads", &m.kv_heads, "key and value heads; 0: as many as heads", any, 0, 10000},
      {"model.width", &m.width, "size of the residual stream", any, 1, 1e6},
      {"model.mlp_width", &m.mlp_width, "hidden size of the MLP; 0: chosen by the type", any, 0, 1e7},
      {"model.context", &m.context, "tokens per sequence", any, 1, 1e8},
      {"model.vocab", &m.vocab, "vocabulary size; 0: that of the tokenizer", any, 0, 1e8},
      {"model.bias", &m.bias, "biases in linear layers and layer norms (gpt2)"},
      {"model.tie_embeddings", &m.tie_embeddings, "the output head is the token embedding"},
      {"model.dropout", &m.dropout, "probability", any, 0, 0.999},
      {"model.rope_theta", &m.rope_theta, "base of the rotary frequencies (llama)", any, 1},
      {"model.rope_scaling.rope_type", &rope.rope_type, "how rotary frequencies are scaled (llama); default: not at all",
       {"default", "linear", "llama3"}, {}, {}, {"dynamic", "longrope", "yarn"}},
      {"model.rope_scaling.factor", &rope.factor, "what slow frequencies (linear: all) are divided by", any, 1, 1e6},
      {"model.rope_scaling.low_freq_factor", &rope.low_freq_factor,
       "turns in the original context up to which one is slow (llama3)", any, 0, 1e6},
      {"model.rope_scaling.high_freq_factor", &rope.high_freq_factor, "turns from which on one stays as it is (llama3)", any, 0, 1e6},
      {"model.rope_scaling.original_max_position_embeddings", &rope.original_max_position_embeddings,
       "the original context, that of the first training (llama3)", any, 1, 1e9},
      {"model.norm_eps", &m.norm_eps, "added to the variance in norms", any, 0, 1},

      {"data.corpus", &d.corpus, "UTF-8 text file"},
      {"data.tokenizer", &d.tokenizer, "how a text becomes tokens, and tokens text", {"char", "byte", "gpt2", "llama3"}},
      {"data.tokenizer_folder", &d.tokenizer_folder,
       "of gpt2: encoder.json, vocab.bpe (or vocab.json, merges.txt); of llama3: tokenizer.model"},
      {"data.val_fraction", &d.val_fraction, "tail of the text held out for validation", any, 0, 0.999},
      {"data.train_file", &d.train_file, "token file to train on, instead of a text; 'name_*.bin' takes several"},
      {"data.val_file", &d.val_file, "token file to validate on, or several"},

      {"train.steps", &t.steps, "optimizer steps", any, 0, 1e12},
      {"train.batch", &t.batch, "sequences per step, over all ranks and micro-batches", any, 1, 1e9},
      {"train.micro_batches", &t.micro_batches, "parts of the batch, accumulated one after the other", any, 1, 1e6},
      {"train.seed", &t.seed, "of weights, dropout and the order of data", any, 0},
      {"train.lr", &t.lr, "peak learning rate", any, 0, 1e6},
      {"train.min_lr", &t.min_lr, "learning rate where the decay ends, and after it", any, 0, 1e6},
      {"train.warmup", &t.warmup, "steps of linear warm-up", any, 0, 1e12},
      {"train.schedule", &t.schedule, "of the learning rate after the warm-up", {"cosine", "linear", "constant"}},
      {"train.decay_start", &t.decay_start, "step at which the learning rate starts to fall; 0: after the warm-up", any, 0,
       1e12},
      {"train.decay_end", &t.decay_end, "step at which it is min_lr; 0: train.steps", any, 0, 1e12},
      {"train.weight_decay", &t.weight_decay, "AdamW, of parameters with two dimensions and more", any, 0, 1e6},
      {"train.beta1", &t.beta1, "AdamW", any, 0, 0.999999999},
      {"train.beta2", &t.beta2, "AdamW", any, 0, 0.999999999},
      {"train.eps", &t.eps, "AdamW", any, 0, 1},
      {"train.clip", &t.clip, "largest norm of the gradient; 0: no clipping", any, 0},
      {"train.eval_every", &t.eval_every, "steps between evaluations; 0: only at the end", any, 0},
      {"train.eval_tokens", &t.eval_tokens, "targets per evaluation; 0: the whole validation split", any, 0},
      {"train.log_every", &t.log_every, "steps between lines of metrics.jsonl", any, 1},
      {"train.save_every", &t.save_every, "steps between checkpoints; 0: only at the end", any, 0},
      {"train.dtype", &t.dtype, "of the computation; masters, gradients and statistics are f32", {"f32", "bf16"}, {}, {},
       {"f16"}, "gradients below f16's range vanish unless the loss is scaled, which steps cannot do"},
      {"train.recompute", &t.recompute, "what the backward computes again, block by block, instead of keeping it", {"none", "block"}},
      {"train.cuda_graph", &t.cuda_graph, "on a GPU: replay a captured step, which is one launch"},
      {"train.tune_products", &t.tune_products, "on a GPU: choose algorithms of products by timing, in the first step"},

      {"sharding.strategy", &s.strategy, "who holds what", {"full_shard", "shard_grad_op", "zero1", "replicate"}, {}, {},
       {"secondary_shard", "tensor_parallel"}},
      {"sharding.replicas", &s.replicas, "groups of ranks, neighbours, that each hold the model (hybrid sharding, HSDP)", any, 1,
       1e6},
      {"sharding.units", &s.units, "what is gathered at once", {"block", "count", "none"}},
      {"sharding.min_parameters", &s.min_parameters, "parameters of a unit, for units = \"count\"", any, 1},
      {"sharding.prefetch_bytes", &s.prefetch_bytes, "gathered ahead of use; -1: the largest unit; 0: none", any, -1},

      {"output.folder", &c.output.folder, "metrics.jsonl, checkpoints and the configuration"},
      {"output.keep_checkpoints", &c.output.keep_checkpoints, "newest ones kept, at least 2; 0: all", any, 0},

      {"generate.prompt", &g.prompt, "text to continue"},
      {"generate.tokens", &g.tokens, "tokens to add", any, 0, 1e9},
      {"generate.temperature", &g.temperature, "divides the logits; 0: always the likeliest token", any, 0, 1e6},
      {"generate.top_k", &g.top_k, "choose among the k likeliest; 0: among all", any, 0},
      {"generate.seed", &g.seed, "of the choices", any, 0},
  };
}

TrainConfig load_config(const std::string& path, std::span<const std::string> overrides, bool resume) {
  TrainConfig config;
  auto fields = config_fields(config);
  std::set<std::string> given, flags;
  if (!path.empty()) read_file(path, fields, given);
  read_overrides(overrides, fields, flags);
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

models::GenerateConfig load_generate_config(const std::string& path, std::span<const std::string> overrides) {
  TrainConfig config;
  auto fields = config_fields(config);
  std::set<std::string> given, flags;
  if (path_exists(path)) read_file(path, fields, given, "generate");
  read_overrides(overrides, fields, flags);
  for (const std::string& key : flags)
    if (!key.starts_with("generate."))
      fail<ConfigError>("[generate] --", key, " is not for sampling: the model is that of the run; only --generate.* may ",
                        "be given");
  return config.generate;
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

std::string config_help(std::string_view section) {
  TrainConfig defaults;
  std::string out;
  for (const auto& field : config_fields(defaults)) {
    if (!field.key.starts_with(section)) continue;
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

void validate(const TrainConfig& config, const std::function<std::string(const char*)>& origin) {
  const auto require = [](bool condition, const auto&... parts) {
    if (!condition) fail<ConfigError>("[config] ", parts...);
  };
  const auto& m = config.model;
  const std::string width = str("model.width ", m.width, origin("model.width")),
                    heads = str("model.heads ", m.heads, origin("model.heads")),
                    kv_heads = str("model.kv_heads ", m.kv_heads, origin("model.kv_heads"));
  require(m.width % m.heads == 0, width, " is not a multiple of ", heads);
  require(m.kv_heads == 0 || m.heads % m.kv_heads == 0, heads, " is not a multiple of ", kv_heads);
  require(m.type != "gpt2" || m.kv_heads == 0 || m.kv_heads == m.heads, kv_heads,
          ": gpt2 has as many key as query heads");
  require(m.type != "llama" || m.width / m.heads % 2 == 0, width, " / ", heads, " is ", m.width / m.heads,
          "; rotary embedding needs an even size");
  const std::string scaling = models::rotary_scaling(m.rope_scaling).problem();
  require(scaling.empty(), "model.rope_scaling.", scaling);
  const auto& d = config.data;
  require(d.corpus.empty() || (d.train_file.empty() && d.val_file.empty()),
          "data.corpus and data.train_file or data.val_file exclude each other");
  require(d.corpus.empty() || d.val_fraction > 0, "data.val_fraction is 0: nothing is left to validate on");
  require(!models::is_published(d.tokenizer) || !d.tokenizer_folder.empty(), "data.tokenizer ", d.tokenizer,
          " needs data.tokenizer_folder, the folder with its published files");
  require(d.train_file.empty() == d.val_file.empty(), "data.train_file and data.val_file go together");
  const auto& t = config.train;
  require(t.batch >= t.micro_batches, "train.batch ", t.batch, " is less than train.micro_batches ", t.micro_batches);
  require(t.min_lr <= t.lr || t.schedule == "constant", "train.min_lr ", t.min_lr, " is above train.lr ", t.lr);
  require(t.decay_start == 0 || t.decay_start >= t.warmup, "train.decay_start ", t.decay_start,
          " lies in the warm-up: train.warmup is ", t.warmup);
  const auto r = models::resolved(t);
  require((t.decay_start == 0 && t.decay_end == 0) || r.decay_start < r.decay_end, "the decay would start at step ",
          r.decay_start, t.decay_start ? " (train.decay_start)" : " (train.warmup)", " and end at step ", r.decay_end,
          t.decay_end ? " (train.decay_end)" : " (train.steps)");
  require(config.output.keep_checkpoints != 1, "output.keep_checkpoints must be 0 or at least 2: if the newest ",
          "checkpoint is damaged, the one before it is needed");
  require(!config.output.folder.empty(), "output.folder is empty");
}

}  // namespace sheaf::tools
