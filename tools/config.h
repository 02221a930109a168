// Configuration: a TOML file, then --section.key value, over the plain structs of models/train_config.h. One table
// says which keys exist; parsing, type checks, help and --print-config all follow from it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sheaf/models/train_config.h"

namespace sheaf::tools {

/// One option: where its value is stored, and what it may be.
struct ConfigField {
  std::string key;  ///< "section.name"
  std::variant<bool*, int64_t*, double*, std::string*> target;
  std::string doc;
  std::vector<std::string> choices = {};  ///< of a string; empty: any
  double min = -1e300, max = 1e300;       ///< of a number, inclusive
  std::vector<std::string> later = {};    ///< choices that have a name but are not implemented yet
};

/// The table of all options, pointing into `config`.
std::vector<ConfigField> config_fields(models::TrainConfig& config);

/// Reads `path` ("" for none: defaults only) and applies `overrides`: "--section.key", "value" or "--section.key=value".
/// Later ones win; then model.preset fills the fields of [model] that neither gave (one among the overrides also those that only
/// the file gave, unless `resume` and the file is the run's own config.toml with the same preset), and then the config.json of
/// model.weights, if it has one, which the others must not contradict. With `resume`, weights may be gone where the
/// output folder has a checkpoint. Throws CheckpointError for that config.json, and ConfigError with file and
/// line for a missing or malformed file, an unknown key (naming the nearest one), a value of the wrong type or out of
/// range, for options that do not fit together, and for those that others leave without effect.
models::TrainConfig load_config(const std::string& path, std::span<const std::string> overrides = {}, bool resume = false);

/// Where a run with these overrides keeps its configuration: "<output.folder>/config.toml".
std::string config_of_run(std::span<const std::string> overrides);

/// The section [generate] of `path`, if that file exists, and `overrides`, which may only be of that section. Throws ConfigError like
/// load_config().
models::GenerateConfig load_generate_config(const std::string& path, std::span<const std::string> overrides);
/// The same for many prompts, with options of [sharding], by which the model is sharded; by default it is replicated on each rank.
models::TrainConfig load_generate_lines_config(const std::string& path, std::span<const std::string> overrides);

/// The options of `sheaf evaluate`.
struct EvaluateConfig {
  models::TrainConfig config;
  bool whole_text = false;  ///< data.corpus was given without data.val_fraction: all of it is evaluated
};
/// Takes from [data] and [train] of `path`, if that file exists, the data and options of a run's validation; then `overrides`, which
/// may be such options, those of documents and the tokenizer, and of [sharding]. If they name the data to evaluate on, none of it is
/// taken from the file. Throws ConfigError like load_config().
EvaluateConfig load_evaluate_config(const std::string& path, std::span<const std::string> overrides);
/// config_help() of those options.
std::string evaluate_config_help();

/// TOML text from which load_config() makes the same configuration.
std::string print_config(const models::TrainConfig& config);
/// A line per option whose key starts with `section`: key, default, choices, meaning.
std::string config_help(std::string_view section = "");

/// The condition under which the option has an effect, for a message; null if it holds.
const char* unused(const std::string& key, const models::TrainConfig& config);

/// Checks across fields: throws ConfigError naming the keys, each followed by what `origin` returns for it. Called by load_config().
void validate(
    const models::TrainConfig& config,
    const std::function<std::string(const char*)>& origin = [](const char*) { return std::string(); });

}  // namespace sheaf::tools
