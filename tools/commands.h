// The subcommands of `sheaf`. Each takes its arguments and returns an exit code; errors are thrown as sheaf::Error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sheaf/models/bpe_trainer.h"
#include "sheaf/models/example_lines.h"
#include "sheaf/models/generate_lines.h"
#include "sheaf/models/text_reader.h"

namespace sheaf::tools {

struct TrainArguments {
  std::string config;                  ///< TOML file, "" for defaults
  std::vector<std::string> overrides;  ///< --section.key value
  bool resume = false, print_config = false, quiet = false;
  int threads_per_rank = 0;  ///< 0: cores / local ranks
};
int train_command(const TrainArguments& arguments);

struct GenerateArguments {
  std::string folder;                  ///< output folder of a run
  std::vector<std::string> overrides;  ///< --generate.key value; for many prompts also --sharding.key value
  models::GenerateLinesOptions lines;  ///< many prompts: `lines.prompts` is their file; "": one prompt, generate.prompt
  int threads_per_rank = 0;            ///< 0: cores / local ranks
};
int generate_command(const GenerateArguments& arguments);

struct EvaluateArguments {
  std::string folder;                  ///< output folder of a run, or folder of published weights
  std::vector<std::string> overrides;  ///< --section.key value
  int64_t context = 0;                 ///< tokens of a window; 0: the model's context, but at most 4096
  int threads_per_rank = 0;            ///< 0: cores / local ranks
};
int evaluate_command(const EvaluateArguments& arguments);

struct ExportArguments {
  std::string folder;            ///< output folder of a run
  std::string file;              ///< to write; a folder, for huggingface and peft
  std::string format = "sheaf";  ///< "sheaf", "huggingface" or "peft"
  int64_t step = -1;             ///< which checkpoint; -1: the newest whole one
};
int export_command(const ExportArguments& arguments);

/// How a command reads its texts.
struct TextArguments {
  bool json_lines = false;  ///< JSON lines, all of them; else only those named .jsonl are, and others are documents
  std::string field;        ///< the member of a line that is the document; "": "text"
  bool in_json_lines(const std::string& path) const { return json_lines || models::is_json_lines(path); }
  models::JsonLines lines() const { return models::JsonLines(field.empty() ? "text" : field); }
  /// Throws ConfigError for a field if no text has fields.
  void check(const std::vector<std::string>& texts) const;
};

struct TokenizeArguments {
  std::vector<std::string> files;  ///< texts, "-" for standard input, then the token file to write
  TextArguments texts;
  models::ExampleOptions examples;  ///< with a prompt's field or a chat's format: texts are lines of examples
  bool are_examples() const { return !examples.prompt_field.empty() || !examples.chat_format.empty(); }
  std::string tokenizer;         ///< "gpt2", "llama3", "huggingface" or "byte"
  std::string tokenizer_folder;  ///< with its published files
  int threads = 0;               ///< 0: all cores
};
int tokenize_command(const TokenizeArguments& arguments);

struct TrainTokenizerArguments {
  std::vector<std::string> files;  ///< texts, "-" for standard input, then the tokenizer.json to write
  TextArguments texts;
  models::BpeTrainerOptions options;
  std::vector<std::string> special;  ///< in place of the default ones, if there are any
  int threads = 0;                   ///< 0: all cores
};
int train_tokenizer_command(const TrainTokenizerArguments& arguments);

struct TapeArguments {
  std::string config;
  std::vector<std::string> overrides;
  int world = 1;
  int rank = 0;
  int threads_per_rank = 0;     ///< 0: cores / world, as if all ranks were on this machine
  std::string format = "text";  ///< "text", "json", "dot", "svg"
  std::string device = "cpu";   ///< whose kernels: "cpu", "cuda"; it need not exist on this machine
};
int tape_command(const TapeArguments& arguments);

struct PlanArguments {
  std::string config;
  std::vector<std::string> overrides;  ///< fixed options; the search varies the others
  int world = 1;
  std::string machine = "h200";  ///< of each rank: see machine_named()
  int ranks_per_host = 0;        ///< 0: the machine's
  int64_t memory = 0;            ///< bytes available to a rank; 0: the machine's
  double network = 0;            ///< bytes per second received by a rank from other hosts; 0: the machine's
  bool all = false;              ///< print all configurations that fit, not only the Pareto front of time and memory
  std::string trace;             ///< file for the timeline of the first configuration; "": none
};
int plan_command(const PlanArguments& arguments);

}  // namespace sheaf::tools
