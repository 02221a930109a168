// The command `sheaf`.
#include <fcntl.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>

#include <CLI/CLI.hpp>

#include "sheaf/core/error.h"
#include "sheaf/core/mapped_files.h"
#include "sheaf/core/version.h"
#include "sheaf/distributed/launcher.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/tools/bench/bench_command.h"
#include "sheaf/tools/bench/rank_job.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"

namespace {

// Reports an error in one line on standard error; the exit code gives its kind. Under `sheaf launch` the launcher prints the line: it
// collects those of all ranks and knows which failure came first.
int report(std::string what, int code) {
  std::replace(what.begin(), what.end(), '\n', ' ');
  if (sheaf::distributed::tell_launcher(what)) return code;
  const char *rank = std::getenv("RANK"), *world = std::getenv("WORLD_SIZE");
  if (rank && world)
    std::fprintf(stderr, "sheaf: rank %s of %s: %s\n", rank, world, what.c_str());
  else
    std::fprintf(stderr, "sheaf: %s\n", what.c_str());
  return code;
}

// A newly opened file must not get the descriptor of a closed standard stream: output would be written into it. Descriptors that
// refuse reading or writing, as closed ones do, take their place.
void keep_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
}

using namespace sheaf::tools;
using Words = std::vector<std::string>;

const CLI::Range kThreads(1, 65536);

void add_options(CLI::App& command, TrainArguments& train) {
  command.add_option("--config", train.config, "TOML file");
  command.add_flag("--resume", train.resume,
                   "continue from the newest whole checkpoint in output.folder; without --config, with the options in its "
                   "config.toml");
  command.add_flag("--print-config", train.print_config, "print the resulting configuration and end");
  command.add_flag("--quiet", train.quiet, "no progress lines");
  command.add_option("--threads-per-rank", train.threads_per_rank, "compute threads of each rank")->check(kThreads);
  command.allow_extras();
  command.footer("Every option of the configuration is also a flag, --section.key value:\n" + config_help());
}

void add_options(CLI::App& command, GenerateArguments& generate) {
  command.add_option("folder", generate.folder,
                     "output folder of a run, or folder of published weights with their config.json and tokenizer")->required();
  sheaf::models::GenerateLinesOptions& lines = generate.lines;
  command.add_option("--prompts", lines.prompts, "many prompts: a file of JSON lines, continued together; under `sheaf launch`, on several ranks");
  command.add_option("--output", lines.output, "file for the same lines with what follows each prompt");
  command.add_option("--prompt-field", lines.prompt_field,
                     "the member that is a prompt: a text or, with generate.chat, also a list of messages (prompt)");
  command.add_option("--field", lines.field, "the member for what follows (completion)");
  command.add_option("--samples", lines.samples, "continuations of each prompt (1)")->check(CLI::Range(int64_t{1}, int64_t{1'000'000}));
  command.add_option("--at-once", lines.at_once, "sequences that a rank reads together (32)")->check(CLI::Range(int64_t{1}, int64_t{1'000'000}));
  command.add_flag("--resume", lines.resume, "go on after the lines that the output has");
  command.add_option("--threads-per-rank", generate.threads_per_rank, "compute threads of each rank")->check(kThreads);
  command.allow_extras();
  command.footer("Options, by default those of the run's config.toml:\n" + config_help("generate.") +
                 "With --prompts also --sharding.strategy (each rank has all of the model: replicate), .units, .min_parameters, .prefetch_bytes,\n"
                 ".tensor and .experts.");
}

void add_options(CLI::App& command, EvaluateArguments& evaluate) {
  command.add_option("folder", evaluate.folder, "output folder of a run, or folder of published weights with their config.json")->required();
  command.add_option("--context", evaluate.context, "tokens of a window; by default the model's context, but at most 4096")
      ->check(CLI::Range(int64_t{1}, int64_t{100'000'000}));
  command.add_option("--threads-per-rank", evaluate.threads_per_rank, "compute threads of each rank")->check(kThreads);
  command.allow_extras();
  command.footer("Evaluated is what data.val_file, data.corpus (all of it, or with data.val_fraction its tail) and data.choices say; if none is\n"
                 "given, what validated the run. Options of [train] are the run's by default:\n" + evaluate_config_help());
}

void add_options(CLI::App& command, ExportArguments& exported) {
  command.add_option("folder", exported.folder, "output folder of a run")->required();
  command.add_option("file", exported.file, "to write; for huggingface and peft, a folder")->required();
  command.add_option("--format", exported.format,
                     "sheaf: one file with the names of the model's fields (default); huggingface: model.safetensors and "
                     "config.json, as `transformers` reads them; peft: a run's adapters (model.lora_rank), as `peft` reads them");
  command.add_option("--step", exported.step, "of that checkpoint; by default the newest whole one")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
}

void add_texts(CLI::App& command, TextArguments& texts) {
  command.add_flag("--jsonl", texts.json_lines, "all texts are JSON lines, an object each, as those named .jsonl or .ndjson are");
  command.add_option("--field", texts.field, "the member of these objects that is a document (text)");
}

void add_options(CLI::App& command, TokenizeArguments& tokenize) {
  command.add_option("files", tokenize.files,
                     "texts, a document each or JSON lines, - for standard input, and last the file to write")->required();
  add_texts(command, tokenize.texts);
  command.add_option("--prompt-field", tokenize.examples.prompt_field,
                     "examples for fine-tuning: the member that is a prompt; --field is its answer (completion), which is learned");
  command.add_option("--chat", tokenize.examples.chat_format,
                     "the same of conversations: chatml, llama3 or gemma; --field is the list of messages (messages), each a role "
                     "and a content, and what the assistant says is learned");
  command.add_flag("--special-tokens", tokenize.examples.special_tokens,
                   "prompts and answers may have special tokens in them, by their names");
  command.add_option("--end-token", tokenize.examples.end,
                     "the special token that ends an example (that for the end of a text)");
  command.add_option("--tokenizer", tokenize.tokenizer, "gpt2, llama3, huggingface or byte")->required();
  command.add_option("--tokenizer-folder", tokenize.tokenizer_folder,
                     "of gpt2: encoder.json, vocab.bpe (or vocab.json, merges.txt); of llama3: tokenizer.model; of huggingface: "
                     "tokenizer.json");
  command.add_option("--threads", tokenize.threads, "all cores by default")->check(kThreads);
  command.footer("The token for the end of a text, where there is one, follows each document.");
}

void add_options(CLI::App& command, TrainTokenizerArguments& learned) {
  command.add_option("files", learned.files, "texts, - for standard input, and last the file to write, FOLDER/tokenizer.json")
      ->required();
  add_texts(command, learned.texts);
  command.add_option("--vocab", learned.options.vocab, "tokens, the 256 bytes and the special ones included (32768)");
  command.add_option("--pattern", learned.options.pattern,
                     "by which texts are cut into words, whose ends no token crosses: llama3 (default), gpt2, qwen2, "
                     "tekken (Mistral Nemo's) or o200k (GPT-4o's)");
  command.add_option("--special", learned.special,
                     "a token that no text makes, the first ids, in this order; may be repeated (<|endoftext|>)")
      ->allow_extra_args(false);
  command.add_option("--min-frequency", learned.options.min_frequency, "of two neighbours that join (2)");
  command.add_option("--threads", learned.threads, "all cores by default")->check(kThreads);
  command.footer("The token between documents, for `sheaf tokenize`, is <|endoftext|>, <|end_of_text|>, </s> or <eos>.");
}

void add_options(CLI::App& command, TapeArguments& tape) {
  command.add_option("--config", tape.config, "TOML file");
  command.add_option("--world", tape.world, "ranks")->check(CLI::Range(1, 1 << 20));
  command.add_option("--rank", tape.rank, "whose step");
  command.add_option("--threads-per-rank", tape.threads_per_rank, "compute threads of each rank")->check(kThreads);
  command.add_option("--format", tape.format, "text, json, dot (Graphviz) or svg (a picture of its memory and units)");
  command.add_option("--device", tape.device, "cpu or cuda: whose kernels count their workspaces; it need not be here");
  command.allow_extras();
}

void add_options(CLI::App& command, PlanArguments& plan) {
  command.add_option("--config", plan.config, "TOML file");
  command.add_option("--world", plan.world, "ranks");
  command.add_option("--machine", plan.machine, "h200 (default), h100 or a100");
  command.add_option("--ranks-per-host", plan.ranks_per_host, "8 by default")->check(kThreads);
  command.add_option("--memory", plan.memory, "bytes that a rank may take; by default those of the machine")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000'000'000'000}));
  command.add_option("--network", plan.network, "bytes per second that each rank receives from other hosts")
      ->check([](const std::string& word) -> std::string {  // CLI::Range takes NaN
        const double rate = std::strtod(word.c_str(), nullptr);
        return rate >= 1 && rate <= 1e18 ? "" : "must be at least 1 and at most 1e18, not " + word;
      });
  command.add_flag("--all", plan.all, "all ways that fit, not only those that no other beats in both time and memory");
  command.add_option("--trace", plan.trace, "file for the time line of the first one, for https://ui.perfetto.dev");
  command.allow_extras();
  command.footer(
      "Options of the configuration, --section.key value, stay as they are given here; otherwise the search chooses\n"
      "sharding.strategy, .replicas, .secondary, .tensor, .context, .context_comm, .experts, .pipeline, .pipeline_runs,\n"
      "sharding.pipeline_schedule, train.micro_batches and train.recompute. Rates are those that large operations reach; nothing is measured.");
}

void add_options(CLI::App& command, sheaf::distributed::LaunchOptions& launch) {
  command.add_option("--nproc-per-node", launch.nproc, "ranks")->required();
  command.add_option("--threads-per-rank", launch.threads_per_rank, "compute threads of each rank")->check(kThreads);
  command.add_flag("--pin,!--no-pin", launch.pin, "each rank to cores of its own, where there are enough (default)");
  command.add_option("--max-restarts", launch.max_restarts,
                     "how often all ranks are started again, in all, when one fails (0): `sheaf train` then goes on from its "
                     "newest checkpoint. Not after exit codes 64, 65, 73, 75 and 76, which would come again, nor after "
                     "signals by which somebody ends the job");
  command.allow_extras();
  command.footer(
      "sheaf launch --nproc-per-node N -- COMMAND ...\n"
      "Environment: SHEAF_TIMEOUT, seconds after which a collective that hangs ends the job (300); SHEAF_INIT_TIMEOUT, the "
      "same for ranks that do not come (300); SHEAF_COMM, shm or gloo: shared memory or TCP between "
      "the ranks (auto: shared memory where they share a host).");
}

void add_options(CLI::App& command, sheaf::bench::Options& bench) {
  bench.program = "/proc/self/exe";
  command.add_option("suites", bench.suites, sheaf::bench::suite_names() + "; all by default");
  command.add_option("--filter", bench.filter, "only lines whose suite/name contains this");
  command.add_option("--threads", bench.threads, "compute threads; all cores by default")->check(kThreads);
  command.add_option("--samples", bench.samples, "samples of each line")->check(kThreads);
  command.add_flag("--quick", bench.quick, "few short samples of small cases: a smoke test of about a minute on two cores");
  command.add_option("--json", bench.json, "file for the lines with all their samples");
  command.add_option("--markdown", bench.markdown, "file for the table, as Markdown");
  command.add_option("--traces", bench.traces, "folder for the time line of one more step of each case of `step`");
  command.add_option("--device", bench.device, "cpu, cuda or auto; by default what SHEAF_DEVICE says");
}

// The options with which `sheaf bench` starts itself again as a rank.
void add_options(CLI::App& command, Words& words) {
  command.group("")->add_option("words", words);
}

// Words that are not options of the subcommand: overrides of the configuration, where it takes them.
void take_rest(auto& arguments, const Words& rest) {
  if constexpr (requires { arguments.overrides; }) arguments.overrides = rest;
}

// The command to launch follows "--" verbatim.
void take_rest(sheaf::distributed::LaunchOptions& launch, const Words& rest) {
  const auto dashes = std::ranges::find(rest, "--");
  if (dashes != rest.end()) launch.command.assign(dashes + 1, rest.end());
  if (launch.command.empty() || dashes != rest.begin())
    sheaf::fail<sheaf::ConfigError>(
        "[launch] ", launch.command.empty() ? "no command to run" : "unknown " + rest[0],
        "; usage: sheaf launch --nproc-per-node N [--threads-per-rank T] [--no-pin] [--max-restarts R] -- COMMAND ...");
}

// Paths that begin with '[' get "./" prepended: the parser would take them for lists.
Words with_paths(Words words) {
  for (size_t i = 1; i < words.size(); ++i)
    if (words[i].starts_with('[') && !words[i - 1].starts_with("--")) words[i].insert(0, "./");
  return words;
}

// A configuration option and its value become one word, whatever the value begins with.
Words with_values(const Words& words) {
  Words out;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    const bool names_key = word.starts_with("--") && word.find('.') != std::string::npos && word.find('=') == std::string::npos;
    out.push_back(names_key && i + 1 < words.size() ? word + "=" + words[++i] : word);
  }
  return out;
}

// The words of a command line, prepared for the parser of a subcommand with these arguments.
template <class Arguments>
Words words_for(const Words& words) {
  if constexpr (requires(Arguments a) { a.overrides; }) return with_values(words);
  else if constexpr (requires(Arguments a) { a.files; }) return with_paths(words);
  else return words;
}

int run(int argc, char** argv) {
  CLI::App app("Sheaf: a deep-learning framework in which sharding is a tensor's type.", "sheaf");
  app.set_version_flag("--version", sheaf::str("sheaf ", sheaf::kVersion, " (CPU",
                                               !sheaf::kernels::kHasCuda         ? ")"
                                               : sheaf::kernels::emulated_cuda() ? ", CUDA emulated)"
                                                                                 : ", CUDA)"));
  app.require_subcommand(1);
  // A subcommand's options are parsed into its arguments, with which it then runs.
  struct Subcommand {
    Words (*words)(const Words&);
    std::function<int(const Words& rest)> run;
  };
  std::map<CLI::App*, Subcommand> subcommands;
  const auto add = [&]<class Arguments>(const char* name, const char* summary, int (*command)(const Arguments&)) {
    CLI::App* const parser = app.add_subcommand(name, summary);
    const auto arguments = std::make_shared<Arguments>();
    add_options(*parser, *arguments);
    subcommands[parser] = {words_for<Arguments>, [=](const Words& rest) {
      take_rest(*arguments, rest);
      return command(*arguments);
    }};
  };
  add("train", "train a model; under `sheaf launch`, on several ranks", train_command);
  add("generate", "continue a prompt with a trained or published model, or many of them; these under `sheaf launch`, on several ranks",
      generate_command);
  add("evaluate", "the loss of a trained or published model, and how many questions it answers right; under `sheaf launch`, on several ranks",
      evaluate_command);
  add("export", "write a trained model's weights to one safetensors file", export_command);
  add("tokenize", "write texts as a token file of llm.c's form, for data.train_file and data.val_file", tokenize_command);
  add("train-tokenizer", "learn a byte-pair vocabulary of texts, for --tokenizer and data.tokenizer huggingface",
      train_tokenizer_command);
  add("tape", "print one training step at any world size, without data or memory", tape_command);
  add("plan", "estimate how long a step takes on GPUs that need not be here, under the ways to share it out that fit",
      plan_command);
  add("launch", "run a command as several ranks on this machine", sheaf::distributed::launch);
  add("bench", "measure this machine and what Sheaf makes of it", sheaf::bench::bench_command);
  add("bench-rank", "", sheaf::bench::bench_rank_command);

  const std::string_view word = argc > 1 ? argv[1] : "";
  const auto named = std::ranges::find_if(subcommands, [&](const auto& s) { return s.first->get_name() == word; });
  if (!word.starts_with('-') && named == subcommands.end())
    sheaf::fail<sheaf::ConfigError>("[sheaf] ", argc > 1 ? sheaf::str("unknown command '", word, "'") : "a subcommand is missing",
                                    "; known: train, launch, generate, evaluate, export, tape, plan, tokenize, train-tokenizer, bench");
  // The words after "--" belong to the launched command, not to the parser.
  char** const end = word == "launch" ? std::find(argv, argv + argc, std::string_view("--")) : argv + argc;
  try {
    Words words(argv + 1, end);
    if (named != subcommands.end()) words = named->second.words(words);
    std::ranges::reverse(words);  // the order that the parser expects
    app.parse(std::move(words));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) return report(e.what(), static_cast<int>(sheaf::ExitCode::kConfig));
    app.exit(e);  // --help
    put("");      // flushed, and checked
    return 0;
  }
  CLI::App* const command = app.get_subcommands().at(0);
  Words rest = command->remaining();
  rest.insert(rest.end(), end, argv + argc);
  return subcommands.at(command).run(rest);
}

}  // namespace

int main(int argc, char** argv) {
  keep_standard_descriptors();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow makes its write fail with a message
  sheaf::name_files_that_lose_pages();
  try {
    return run(argc, argv);
  } catch (const sheaf::Error& e) {
    return report(e.what(), e.exit_code());
  } catch (const std::bad_alloc&) {
    return report("out of memory", static_cast<int>(sheaf::ExitCode::kOutOfMemory));
  } catch (const std::filesystem::filesystem_error& e) {
    return report(e.what(), static_cast<int>(sheaf::ExitCode::kIo));
  } catch (const std::system_error& e) {
    if (e.code() != std::errc::resource_unavailable_try_again) return report(e.what(), static_cast<int>(sheaf::ExitCode::kDesync));
    return report("this process may start no more threads (ulimit -u)", static_cast<int>(sheaf::ExitCode::kIo));
  } catch (const std::exception& e) {
    return report(e.what(), static_cast<int>(sheaf::ExitCode::kDesync));
  }
}
