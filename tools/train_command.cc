#include <algorithm>
#include <csignal>
#include <cstdio>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/file.h"
#include "sheaf/core/gpu.h"
#include "sheaf/distributed/init.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/trainer.h"
#include "sheaf/models/utf8.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/same_options.h"
#include "sheaf/tools/stop_signals.h"

namespace sheaf::tools {
namespace {

// The lines of a run, which goes on when nobody can read them any more.
class RunLines {
 public:
  void say(const std::string& line) {
    if (broken_) return;
    try {
      tools::say(line);
    } catch (const IoError& error) {
      broken_ = true;
      models::warn_on_stderr(str(error.what(), "; training goes on without it"));
    }
  }

 private:
  bool broken_ = false;
};

// The plan is that of a step in which prefetch knows the order of gathers, or of a program: the first ones of a process differ.
void report_peaks(World& world, const models::Trainer& trainer, const models::TrainReport& result, int threads, RunLines& lines) {
  const models::TrainConfig& config = trainer.config();
  std::vector<MemoryLedger::Peak> planned;
  for (int r = 0; r < world.size(); ++r)
    planned.push_back(models::plan_step(config, config.model.vocab, r, world.size(), threads, std::string(world.kind()), world.device()).peak);
  const bool early = result.steps_here < (config.train.compile ? 4 : 2);
  lines.say(result.steps_here == 1 ? "peak memory of the first step" : "peak memory of a step");
  for (int r = 0; r < world.size() && r < static_cast<int>(result.peaks.size()); ++r) {
    lines.say(str("  rank ", r, "  measured ", result.peaks[r], " B = ", mebibytes(result.peaks[r]),
                  "  predicted by the tape ", early ? "for later steps " : "", planned[r].bytes, " B",
                  early ? "" : result.peaks[r] == planned[r].bytes ? "  (equal)" : "  (DIFFERENT)"));
  }
  lines.say("  held for " + to_words(*std::ranges::max_element(planned, {}, &MemoryLedger::Peak::bytes)));
}

// What a newcomer wants to see at the end. Collective: the sample is computed by all ranks together.
void report(const models::TrainConfig& config, World& world, models::Trainer& trainer,
            const models::TrainReport& result, int threads, RunLines& lines) {
  const bool first = world.rank() == 0;
  if (const auto& tokenizer = trainer.corpus().tokenizer) {
    const std::vector<int32_t> prompt = models::encode_prompt(*tokenizer, config.generate);
    const auto end = static_cast<int32_t>(trainer.config().data.end_of_text);  // of documents; -1: none is known
    const auto tokens = models::generate(trainer.step().model(), prompt, config.model.context, tokenizer->vocab_size(),
                                         config.generate, {}, models::ends_of(*tokenizer, config.generate, std::span(&end, end < 0 ? 0 : 1)));
    models::Utf8Assembler text;
    if (first)
      lines.say("\nsample\n------\n" + text.add(tokenizer->decode(prompt) + tokenizer->decode_more(tokens)) + text.finish() +
                "\n------");
  }
  if (!first) return;
  if (result.tape.num_nodes() > 0)
    lines.say("\ncollectives of one step, as the tape lists them\n" + collective_summary(result.tape));
  if (result.steps_here > 0) report_peaks(world, trainer, result, threads, lines);
  if (result.train_loss != 0) lines.say(str("\ntraining loss    ", result.train_loss));
  const char* const of = trainer.corpus().val.example_end() ? "nats per token that is learned" : "nats per token";
  lines.say(str("validation loss  ", result.val_loss, models::losses_by_name(result), "  (", of, ", whole split unless train.eval_tokens says less)"));
  if (result.best)
    lines.say(str("lowest of all    ", result.best->val_loss, "  (after step ", result.best->step, "; its weights are in ", trainer.best_folder(), ")"));
  for (const auto& [name, of] : result.accuracies) lines.say(models::accuracy_line(name, of));
}

// "3000 training tokens in 50 files".
std::string tokens_line(const auto& data) {
  return str(data.size(), " training tokens", data.num_files() > 1 ? str(" in ", data.num_files(), " files") : "");
}

// ", 2.1 epochs", which the whole run reads of a source.
std::string epochs_line(const models::Trainer& trainer, int source) {
  const models::OptimizationConfig& t = trainer.config().train;
  return str(", ", rounded(trainer.windows().epochs(source, t.steps * t.batch)), " epochs");
}

// Of examples, which are packed: how well, and what becomes of those that do not fit.
std::string examples_line(const std::string& what, const models::PackedExamples& e, int64_t context) {
  const auto tokens = static_cast<double>(e.num_tokens()), places = static_cast<double>(e.num_windows() * (context + 1));
  const auto note = [](int64_t count, const char* what) { return count == 0 ? str() : str("; ", count, what); };
  return str("  ", what, e.num_examples(), e.num_examples() == 1 ? " example in " : " examples in ", e.num_windows(),
             e.num_windows() == 1 ? " window, " : " windows, ", rounded(100 * tokens / places), " % full, ",
             rounded(100 * static_cast<double>(e.num_targets()) / tokens), " % of their tokens are learned",
             note(e.num_shortened(), " longer than a window, without their ends"),
             note(e.num_left_out(), " left out, where nothing is learned within a window"));
}

// A run that goes on need not be described again: its folder says what it was.
models::TrainConfig read_config(const TrainArguments& arguments) {
  std::string file = arguments.config;
  if (arguments.resume && file.empty()) {
    const std::string own = config_of_run(arguments.overrides);
    if (path_exists(own)) file = own;
    else if (std::ranges::none_of(arguments.overrides, [](const std::string& word) { return word.starts_with("--data."); }))
      fail<ConfigError>("[train] --resume: there is no '", own, "', and no options say what to train");
  }
  return load_config(file, arguments.overrides, arguments.resume);
}

// A signal lets the step under way come to its end. Before and after there is nothing to save.
models::TrainReport train(models::Trainer& trainer) {
  if (trainer.complete()) return trainer.run();
  const StopSignals signals;
  return trainer.run([&] { return signals.asked(); });
}

// A job whose launcher started it again goes on, whether it was told to or not. Of torchrun's agents on several hosts only
// the one that saw the failure counts it.
bool started_again(World& world) {
  int64_t restarts = read_rendezvous().restarts;
  world.communicator().all_reduce(&restarts, 1, kI64, Reduction::max, "restarts").sync();
  return restarts > 0;
}

}  // namespace

int train_command(const TrainArguments& arguments) {
  if (arguments.print_config) {
    say(print_config(read_config(arguments)));
    return 0;
  }
  // `sheaf train | head -1` must not cost the run its checkpoints: writing to the closed pipe fails instead.
  std::signal(SIGPIPE, SIG_IGN);
  RunLines lines;
  World world = distributed::init_from_env();
  int stopped_by = 0;
  world.guard([&] {
    const models::TrainConfig config = read_config(arguments);
    require_same_options(world, config, {{"--resume", str(arguments.resume)}, {"--quiet", str(arguments.quiet)}});
    if (arguments.threads_per_rank > 0) RankContext::current().threads = arguments.threads_per_rank;
    const RankScope scope(RankContext::current());
    const int threads = RankContext::current().threads;
    const bool first = world.rank() == 0;
    models::TrainOptions options;
    options.resume = arguments.resume || started_again(world);
    options.warn = models::warn_on_stderr;
    if (first) options.print = [&](const std::string& line) { if (!arguments.quiet) lines.say(line); };
    models::Trainer trainer(config, world, world.device(), options);
    // What is needed only at the end is checked at the start.
    if (const auto& tokenizer = trainer.corpus().tokenizer; tokenizer && !arguments.quiet)
      models::encode_prompt(*tokenizer, config.generate), models::ends_of(*tokenizer, config.generate);
    if (first) {
      replace_file(config.output.folder + "/config.toml", print_config(config));
      const models::TokenMixture& data = trainer.corpus().train;
      const bool mixed = data.sources().size() > 1;
      lines.say(str("sheaf train: ", world.size(), world.size() == 1 ? " rank" : " ranks", " (", world.kind(), ") x ", threads,
              threads == 1 ? " thread, " : " threads, ",
              config.train.islands > 1 ? str(config.train.islands, " islands that agree every ", config.train.inner_steps, " steps, ") : "",
              config.sharding.strategy,
              config.sharding.replicas > 1 ? str(" in ", config.sharding.replicas, " replicas") : "",
              config.sharding.context > 1 ? str(" over groups of ", config.sharding.context, " that share sequences", config.sharding.context_comm == "all_gather" ? " by all_gather" : "") : "",
              config.sharding.experts > 1 ? str(" over groups of ", config.sharding.experts, " that share experts") : "",
              config.sharding.pipeline > 1 ? str(" in ", config.sharding.pipeline, " stages") : "",
              config.sharding.pipeline_runs > 1 ? str(" of ", config.sharding.pipeline_runs, " runs") : "",
              config.sharding.pipeline > 1 ? str(" (", trainer.step().cut().to_string(), " blocks)") : "",
              config.sharding.pipeline_schedule == "zero_bubble" ? ", zero bubble" : "",
              config.sharding.tensor > 1 ? str(" over groups of ", config.sharding.tensor, " that share layers") : "",
              config.sharding.secondary ? " with secondary shards, " : ", ", trainer.num_parameters(), " parameters, ",
              config.model.lora_rank ? str(trainer.step().num_trained(), " of them trained, ") : "", tokens_line(data),
              mixed ? str() : epochs_line(trainer, 0)));
      const auto say_examples = [&](const std::string& what, const models::PackedExamples* examples) {
        if (examples) lines.say(examples_line(what, *examples, config.model.context));
      };
      if (!mixed) say_examples("", trainer.windows().examples(0));
      for (int s = 0; mixed && s < static_cast<int>(data.sources().size()); ++s) {
        const models::Tokens& tokens = data.sources()[static_cast<size_t>(s)].tokens;
        lines.say(str("  ", rounded(100 * data.share(s)), " % of the samples from '", tokens.name(), "': ", tokens_line(tokens),
                      epochs_line(trainer, s)));
        say_examples("", trainer.windows().examples(s));
      }
      for (const models::Validation& v : trainer.validation())
        say_examples(str("to validate on", v.name.empty() ? "" : " as ", v.name, ": "), v.windows.examples());
      for (const models::AnsweredQuestions& set : trainer.questions())
        lines.say("  to answer in evaluations: " + models::questions_line(set.questions));
      if (world.device().is_cuda()) lines.say("on " + RankContext::current().gpu->name() + ", " + world.device().to_string());
      if (config.train.dtype == "bf16" && world.device().is_cpu() && !kernels::cpu::dot::available())
        lines.say("note: this CPU has no instructions for bf16 (AMX, AVX512_BF16); f32 is faster here");
      if (config.train.dtype == "f16" && world.device().is_cpu())
        lines.say("note: f16 is for GPUs; on CPUs it is computed in f32, and f32 is faster");
      if (const models::OptimizationConfig& t = trainer.config().train; t.warmup > t.steps && !trainer.complete())
        lines.say(str("note: train.warmup ", t.warmup, " is more than the run's ", t.steps, " steps: the learning rate never reaches train.lr ",
                      t.lr));
    }
    const models::TrainReport result = train(trainer);
    stopped_by = result.stopped_by;
    if (stopped_by != 0 && first)
      lines.say(str("stopped by signal ", stopped_by, " after step ", result.done, " of ", result.steps, "; saved to ",
                    config.output.folder, "/checkpoints/step-", result.done, ", from where --resume goes on"));
    if (stopped_by == 0 && !arguments.quiet) report(config, world, trainer, result, threads, lines);
  });
  return stopped_by == 0 ? 0 : 128 + stopped_by;
}

}  // namespace sheaf::tools
