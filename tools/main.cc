// The command `sheaf`.
#include <fcntl.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string_view>

#include <CLI/CLI.hpp>

#include "sheaf/core/error.h"
#include "sheaf/core/version.h"
#include "sheaf/distributed/launcher.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/tools/bench/bench_command.h"
#include "sheaf/tools/bench/rank_job.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"

namespace {

// One line on standard error that says where and what; the exit code tells the kind. Under `sheaf
// launch` the line is the launcher's: it hears all ranks and knows which failure came first.
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

// A file that is opened must not get the number of standard input, output or error, if those are closed: what is said there would
// land in it. In their place stands what refuses to be read or written, as they do.
void keep_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
}

int run(int argc, char** argv) {
  using namespace sheaf::tools;
  CLI::App app("Sheaf: a deep-learning framework in which sharding is a tensor's type.", "sheaf");
  app.set_version_flag("--version", sheaf::str("sheaf ", sheaf::kVersion, " (CPU",
                                               !sheaf::kernels::kHasCuda         ? ")"
                                               : sheaf::kernels::emulated_cuda() ? ", CUDA emulated)"
                                                                                 : ", CUDA)"));
  app.require_subcommand(1);
  const CLI::Range threads(1, 65536);

  TrainArguments train;
  CLI::App* train_app =
      app.add_subcommand("train", "train a model; under `sheaf launch`, on several ranks");
  train_app->add_option("--config", train.config, "TOML file");
  train_app->add_flag("--resume", train.resume,
                      "continue from the newest whole checkpoint in output.folder; without --config, with the "
                      "options in its config.toml");
  train_app->add_flag("--print-config", train.print_config,
                      "print the resulting configuration and end");
  train_app->add_flag("--quiet", train.quiet, "no progress lines");
  train_app
      ->add_option("--threads-per-rank", train.threads_per_rank, "compute threads of each rank")
      ->check(threads);
  train_app->allow_extras();
  train_app->footer("Every option of the configuration is also a flag, --section.key value:\n" +
                    config_help());

  GenerateArguments generate;
  CLI::App* generate_app = app.add_subcommand("generate", "continue a prompt with a trained or published model");
  generate_app->add_option("folder", generate.folder, "output folder of a run, or folder of published weights with their config.json and tokenizer")->required();
  generate_app->allow_extras();
  generate_app->footer("Options, by default those of the run's config.toml:\n" + config_help("generate."));

  ExportArguments exported;
  CLI::App* export_app = app.add_subcommand("export", "write a trained model's weights to one safetensors file");
  export_app->add_option("folder", exported.folder, "output folder of a run")->required();
  export_app->add_option("file", exported.file, "to write; for huggingface and peft, a folder")->required();
  export_app->add_option("--format", exported.format,
                         "sheaf: one file with the names of the model's fields (default); huggingface: "
                         "model.safetensors and config.json, as `transformers` reads them; peft: a run's adapters "
                         "(model.lora_rank), as `peft` reads them");
  export_app->add_option("--step", exported.step, "of that checkpoint; by default the newest whole one")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));

  TokenizeArguments tokenize;
  CLI::App* tokenize_app = app.add_subcommand(
      "tokenize", "write texts as a token file of llm.c's form, for data.train_file and data.val_file");
  const auto add_texts = [](CLI::App* command, TextArguments& texts) {
    command->add_flag("--jsonl", texts.json_lines, "all texts are JSON lines, an object each, as those named .jsonl or .ndjson are");
    command->add_option("--field", texts.field, "the member of these objects that is a document (text)");
  };
  tokenize_app->add_option("files", tokenize.files,
                           "texts, a document each or JSON lines, - for standard input, and last the file to write")
      ->required();
  add_texts(tokenize_app, tokenize.texts);
  tokenize_app->add_option("--prompt-field", tokenize.examples.prompt_field,
                           "examples for fine-tuning: the member that is a prompt; --field is its answer (completion), which is learned");
  tokenize_app->add_option("--chat", tokenize.examples.chat_format,
                           "the same of conversations: chatml or llama3; --field is the list of messages (messages), each a role "
                           "and a content, and what the assistant says is learned");
  tokenize_app->add_flag("--special-tokens", tokenize.examples.special_tokens,
                         "prompts and answers may have special tokens in them, by their names");
  tokenize_app->add_option("--end-token", tokenize.examples.end,
                           "the special token that ends an example (that for the end of a text)");
  tokenize_app->add_option("--tokenizer", tokenize.tokenizer, "gpt2, llama3, huggingface or byte")->required();
  tokenize_app->add_option("--tokenizer-folder", tokenize.tokenizer_folder,
                           "of gpt2: encoder.json, vocab.bpe (or vocab.json, merges.txt); of llama3: tokenizer.model; of huggingface: tokenizer.json");
  tokenize_app->add_option("--threads", tokenize.threads, "all cores by default")->check(threads);
  tokenize_app->footer("The token for the end of a text, where there is one, follows each document.");

  TrainTokenizerArguments learned;
  CLI::App* learned_app = app.add_subcommand(
      "train-tokenizer", "learn a byte-pair vocabulary of texts, for --tokenizer and data.tokenizer huggingface");
  learned_app->add_option("files", learned.files, "texts, - for standard input, and last the file to write, FOLDER/tokenizer.json")
      ->required();
  add_texts(learned_app, learned.texts);
  learned_app->add_option("--vocab", learned.options.vocab, "tokens, the 256 bytes and the special ones included (32768)");
  learned_app->add_option("--pattern", learned.options.pattern,
                          "by which texts are cut into words, whose ends no token crosses: llama3 (default), gpt2, qwen2, "
                          "tekken (Mistral Nemo's) or o200k (GPT-4o's)");
  learned_app->add_option("--special", learned.special,
                          "a token that no text makes, the first ids, in this order; may be repeated (<|endoftext|>)")
      ->allow_extra_args(false);
  learned_app->add_option("--min-frequency", learned.options.min_frequency, "of two neighbours that join (2)");
  learned_app->add_option("--threads", learned.threads, "all cores by default")->check(threads);
  learned_app->footer("The token between documents, for `sheaf tokenize`, is <|endoftext|>, <|end_of_text|> or </s>.");

  TapeArguments tape;
  CLI::App* tape_app = app.add_subcommand(
      "tape", "print one training step at any world size, without data or memory");
  tape_app->add_option("--config", tape.config, "TOML file");
  tape_app->add_option("--world", tape.world, "ranks")->check(CLI::Range(1, 1 << 20));
  tape_app->add_option("--rank", tape.rank, "whose step");
  tape_app->add_option("--threads-per-rank", tape.threads_per_rank, "compute threads of each rank")
      ->check(threads);
  tape_app->add_option("--format", tape.format, "text, json or dot (Graphviz)");
  tape_app->add_option("--device", tape.device,
                       "cpu or cuda: whose kernels count their workspaces; it need not be here");
  tape_app->allow_extras();

  PlanArguments plan;
  CLI::App* plan_app = app.add_subcommand(
      "plan", "estimate how long a step takes on GPUs that need not be here, under the ways to share it out that fit");
  plan_app->add_option("--config", plan.config, "TOML file");
  plan_app->add_option("--world", plan.world, "ranks");
  plan_app->add_option("--machine", plan.machine, "h200 (default), h100 or a100");
  plan_app->add_option("--ranks-per-host", plan.ranks_per_host, "8 by default")->check(threads);
  plan_app->add_option("--memory", plan.memory, "bytes that a rank may take; by default those of the machine")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000'000'000'000}));
  plan_app->add_option("--network", plan.network, "bytes per second that each rank receives from other hosts")
      ->check([](const std::string& word) -> std::string {  // CLI::Range takes NaN
        const double rate = std::strtod(word.c_str(), nullptr);
        return rate >= 1 && rate <= 1e18 ? "" : "must be at least 1 and at most 1e18, not " + word;
      });
  plan_app->add_flag("--all", plan.all, "all ways that fit, not only those that no other beats in both time and memory");
  plan_app->add_option("--trace", plan.trace, "file for the time line of the first one, for https://ui.perfetto.dev");
  plan_app->allow_extras();
  plan_app->footer(
      "Options of the configuration, --section.key value, stay as they are given here; otherwise the search chooses\n"
      "sharding.strategy, .replicas, .secondary, .tensor, .context, .experts, .pipeline, .pipeline_runs, .pipeline_schedule,\n"
      "train.micro_batches and train.recompute. Rates are those that large operations reach; nothing is measured.");

  sheaf::distributed::LaunchOptions launch;
  CLI::App* launch_app =
      app.add_subcommand("launch", "run a command as several ranks on this machine");
  launch_app->add_option("--nproc-per-node", launch.nproc, "ranks")->required();
  launch_app
      ->add_option("--threads-per-rank", launch.threads_per_rank, "compute threads of each rank")
      ->check(threads);
  launch_app->add_flag("--pin,!--no-pin", launch.pin,
                       "each rank to cores of its own, where there are enough (default)");
  launch_app->add_option("--max-restarts", launch.max_restarts,
                         "how often all ranks are started again, in all, when one fails (0): `sheaf train` then goes on from its "
                         "newest checkpoint. Not after exit codes 64, 65, 73, 75 and 76, which would come again, nor after "
                         "signals by which somebody ends the job");
  launch_app->footer(
      "sheaf launch --nproc-per-node N -- COMMAND ...\n"
      "Environment: SHEAF_TIMEOUT, seconds after which a collective that hangs ends the job (300); "
      "SHEAF_INIT_TIMEOUT, the "
      "same for ranks that do not come (300); SHEAF_COMM, shm or gloo: shared memory or TCP between "
      "the ranks (auto: shared memory where they share a host).");

  sheaf::bench::Options bench;
  bench.program = "/proc/self/exe";
  CLI::App* bench_app =
      app.add_subcommand("bench", "measure this machine and what Sheaf makes of it");
  bench_app->add_option("suites", bench.suites, sheaf::bench::suite_names() + "; all by default");
  bench_app->add_option("--filter", bench.filter, "only lines whose suite/name contains this");
  bench_app->add_option("--threads", bench.threads, "compute threads; all cores by default")
      ->check(threads);
  bench_app->add_option("--samples", bench.samples, "samples of each line")->check(threads);
  bench_app->add_flag("--quick", bench.quick, "few short samples of small cases: a smoke test");
  bench_app->add_option("--json", bench.json, "file for the lines with all their samples");
  bench_app->add_option("--markdown", bench.markdown, "file for the table, as Markdown");
  bench_app->add_option("--device", bench.device,
                        "cpu, cuda or auto; by default what SHEAF_DEVICE says");

  // How `sheaf bench` starts itself again as a rank.
  std::vector<std::string> bench_rank;
  CLI::App* bench_rank_app = app.add_subcommand("bench-rank", "")->group("");
  bench_rank_app->add_option("words", bench_rank);

  constexpr std::string_view kCommands[] = {"train",           "launch", "generate", "export",    "tokenize",
                                            "train-tokenizer", "tape",   "plan",     "bench",     "bench-rank"};
  if (argc > 1 && argv[1][0] != '-' &&
      std::find(std::begin(kCommands), std::end(kCommands), argv[1]) == std::end(kCommands))
    sheaf::fail<sheaf::ConfigError>("[sheaf] unknown command '", argv[1],
                                    "'; known: train, launch, generate, export, tape, plan, tokenize, train-tokenizer, bench");
  // What stands behind "--" is the command to launch, word for word: not for the parser.
  int own = argc;
  if (argc > 1 && std::string_view(argv[1]) == "launch") {
    own = static_cast<int>(std::find(argv, argv + argc, std::string_view("--")) - argv);
    launch.command.assign(argv + std::min(own + 1, argc), argv + argc);
    launch_app->allow_extras();
  }
  try {
    app.parse(own, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) {  // --help
      app.exit(e);
      put("");  // flushed, and checked
      return 0;
    }
    return report(e.what(), static_cast<int>(sheaf::ExitCode::kConfig));
  }
  if (*train_app) {
    train.overrides = train_app->remaining();
    return train_command(train);
  }
  if (*generate_app) {
    generate.overrides = generate_app->remaining();
    return generate_command(generate);
  }
  if (*tokenize_app) return tokenize_command(tokenize);
  if (*learned_app) return train_tokenizer_command(learned);
  if (*export_app) return export_command(exported);
  if (*tape_app) {
    tape.overrides = tape_app->remaining();
    return tape_command(tape);
  }
  if (*plan_app) {
    plan.overrides = plan_app->remaining();
    return plan_command(plan);
  }
  if (*bench_app) return sheaf::bench::bench_command(bench);
  if (*bench_rank_app) return sheaf::bench::bench_rank_command(bench_rank);
  const std::vector<std::string> unknown = launch_app->remaining();
  if (launch.command.empty() || !unknown.empty())
    sheaf::fail<sheaf::ConfigError>(
        "[launch] ", launch.command.empty() ? "no command to run" : "unknown " + unknown[0],
        "; usage: sheaf launch --nproc-per-node N [--threads-per-rank T] [--no-pin] [--max-restarts R] -- COMMAND ...");
  return sheaf::distributed::launch(launch);
}

}  // namespace

int main(int argc, char** argv) {
  keep_standard_descriptors();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of its writer, with a message
  try {
    return run(argc, argv);
  } catch (const sheaf::Error& e) {
    return report(e.what(), e.exit_code());
  } catch (const std::bad_alloc&) {
    return report("out of memory", static_cast<int>(sheaf::ExitCode::kOutOfMemory));
  } catch (const std::filesystem::filesystem_error& e) {
    return report(e.what(), static_cast<int>(sheaf::ExitCode::kIo));
  } catch (const std::exception& e) {
    return report(e.what(), static_cast<int>(sheaf::ExitCode::kDesync));
  }
}
