#include "sheaf/tools/run_lines.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>

#include <poll.h>
#include <unistd.h>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/gpu.h"
#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/utf8.h"
#include "sheaf/tools/output.h"

namespace sheaf::tools {
namespace {

// "3000 training tokens in 50 files".
std::string tokens_line(const auto& data) {
  return str(data.size(), " training tokens", data.num_files() > 1 ? str(" in ", data.num_files(), " files") : "");
}

// ", 2.1 epochs": how many times the whole run reads a source.
std::string epochs_line(const models::Trainer& trainer, int source) {
  const models::OptimizationConfig& t = trainer.config().train;
  return str(", ", rounded(trainer.windows().epochs(source, t.steps * t.batch)), " epochs");
}

// "2 ranks (shm) x 1 thread, full_shard over groups of 2 that share layers, ".
std::string ranks_line(const models::TrainConfig& config, World& world, models::Trainer& trainer) {
  const auto& s = config.sharding;
  const int threads = RankContext::current().threads;
  std::string line = str(counted(world.size(), "rank"), " (", world.kind(), ") x ", counted(threads, "thread"), ", ");
  if (config.train.islands > 1)
    line += str(config.train.islands, " islands that agree every ", config.train.inner_steps, " steps, ");
  line += s.strategy;
  if (s.replicas > 1) line += str(" in ", s.replicas, " replicas");
  if (s.context > 1) line += str(" over groups of ", s.context, " that share sequences", s.context_comm == "all_gather" ? " by all_gather" : "");
  if (s.experts > 1) line += str(" over groups of ", s.experts, " that share experts");
  if (s.pipeline > 1) {
    line += str(" in ", s.pipeline, " stages");
    if (s.pipeline_runs > 1) line += str(" of ", s.pipeline_runs, " runs");
    line += str(" (", trainer.step().cut().to_string(), " blocks)");
  }
  if (s.pipeline_schedule == "zero_bubble") line += ", zero bubble";
  if (s.tensor > 1) line += str(" over groups of ", s.tensor, " that share layers");
  return line + (s.secondary ? " with secondary shards, " : ", ");
}

void describe_data(const models::TrainConfig& config, const models::Trainer& trainer, RunLines& lines) {
  const models::TokenMixture& data = trainer.corpus().train;
  const bool mixed = data.sources().size() > 1;
  const auto say_examples = [&](const std::string& what, const models::PackedExamples* examples) {
    if (examples) lines.say(examples_line(what, *examples, config.model.context));
  };
  for (int s = 0; s < static_cast<int>(data.sources().size()); ++s) {
    const models::Tokens& tokens = data.sources()[static_cast<size_t>(s)].tokens;
    if (mixed)
      lines.say(str("  ", rounded(100 * data.share(s)), " % of the samples from '", tokens.name(), "': ", tokens_line(tokens),
                    epochs_line(trainer, s)));
    say_examples("", trainer.windows().examples(s));
  }
  for (const models::Validation& v : trainer.validation())
    say_examples(str("to validate on", v.name.empty() ? "" : " as ", v.name, ": "), v.windows.examples());
  for (const models::AnsweredQuestions& set : trainer.questions())
    lines.say("  to answer in evaluations: " + models::questions_line(set.questions));
}

void note_surprises(const models::TrainConfig& config, World& world, models::Trainer& trainer, RunLines& lines) {
  if (config.train.dtype == "bf16" && world.device().is_cpu() && !kernels::cpu::dot::available())
    lines.say("note: this CPU has no instructions for bf16 (AMX, AVX512_BF16); f32 is faster here");
  if (config.train.dtype == "f16" && world.device().is_cpu())
    lines.say("note: f16 is for GPUs; on CPUs it is computed in f32, and f32 is faster");
  if (const models::OptimizationConfig& t = trainer.config().train; t.warmup > t.steps && !trainer.complete())
    lines.say(str("note: train.warmup ", t.warmup, " is more than the run's ", t.steps, " steps: the learning rate never reaches train.lr ", t.lr));
}

// The plan is for a step in which prefetch knows the order of gathers, or for a program: the first steps of a process differ.
void report_peaks(World& world, const models::Trainer& trainer, const models::TrainReport& result, int threads, RunLines& lines) {
  const models::TrainConfig& config = trainer.fitted();
  // The other ranks have ended, and of a large model on many ranks all plans would take hours.
  const std::vector<MemoryLedger::Peak> planned = models::plan_peaks_within(std::chrono::seconds(10), config, config.model.vocab, world.size(),
                                                                            threads, std::string(world.kind()), world.device());
  const bool early = result.steps_here < (config.train.compile ? 4 : 2);
  lines.say(result.steps_here == 1 ? "peak memory of the first step" : "peak memory of a step");
  for (size_t r = 0; r < result.peaks.size(); ++r) {
    std::string line = str("  rank ", r, "  measured ", result.peaks[r], " B = ", mebibytes(result.peaks[r]));
    if (r < planned.size())
      line += str("  predicted by the tape ", early ? "for later steps " : "", planned[r].bytes, " B",
                  early ? "" : result.peaks[r] == planned[r].bytes ? "  (equal)" : "  (DIFFERENT)");
    lines.say(line);
  }
  lines.say("  held for " + to_words(*std::ranges::max_element(planned, {}, &MemoryLedger::Peak::bytes)));
}

}  // namespace

std::string examples_line(const std::string& what, const models::PackedExamples& e, int64_t context) {
  const auto tokens = static_cast<double>(e.num_tokens()), places = static_cast<double>(e.num_windows() * (context + 1));
  const auto note = [](int64_t count, const char* what) { return count == 0 ? str() : str("; ", count, what); };
  return str("  ", what, counted(e.num_examples(), "example"), " in ", counted(e.num_windows(), "window"), ", ", rounded(100 * tokens / places),
             " % full, ", rounded(100 * static_cast<double>(e.num_targets()) / tokens), " % of their tokens are learned",
             note(e.num_shortened(), " longer than a window, without their ends"),
             note(e.num_left_out(), " left out, where nothing is learned within a window"));
}

// A signal ends no wait: what the handler notes is seen after the step.
static bool can_write(int descriptor, std::chrono::milliseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd wanted{descriptor, POLLOUT, 0};
    const int ready = poll(&wanted, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;  // an error that writing will report
    if (ready == 0) return false;
  }
}

void RunLines::say(const std::string& line) {
  if (broken_) return;
  const std::chrono::milliseconds patience(left_out_ > 0 ? 0 : 1000);
  std::string text = line + "\n";
  if (left_out_ > 0) text = str("(", counted(left_out_, "line"), " left out, which nobody read)\n") + text;
  try {
    for (std::string_view rest = text; !rest.empty();) {
      if (!can_write(STDOUT_FILENO, patience)) return leave_out();
      const std::string_view piece = rest.substr(0, PIPE_BUF);  // as much as a pipe takes now
      put(piece);
      rest.remove_prefix(piece.size());
    }
    left_out_ = 0;
  } catch (const IoError& error) {
    broken_ = true;
    warn_on_stderr(str(error.what(), "; training goes on without it"));
  }
}

void RunLines::leave_out() {
  if (left_out_++ > 0 || !can_write(STDERR_FILENO, std::chrono::milliseconds(0))) return;
  warn_on_stderr("[output] nobody reads standard output; training goes on, and leaves lines out until somebody does");
}

void describe_start(const models::TrainConfig& config, World& world, models::Trainer& trainer, RunLines& lines) {
  const models::TokenMixture& data = trainer.corpus().train;
  lines.say(str("sheaf train: ", ranks_line(config, world, trainer), trainer.num_parameters(), " parameters, ",
                config.model.lora_rank ? str(trainer.step().num_trained(), " of them trained, ") : "", tokens_line(data),
                data.sources().size() > 1 ? "" : epochs_line(trainer, 0)));
  describe_data(config, trainer, lines);
  if (world.device().is_cuda()) lines.say("on " + RankContext::current().gpu->name() + ", " + world.device().to_string());
  note_surprises(config, world, trainer, lines);
}

void describe_end(const models::TrainConfig& config, World& world, models::Trainer& trainer, const models::TrainReport& result,
                  int threads, RunLines& lines) {
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
    lines.say(str("\ncollectives of one step", config.sharding.pipeline > 1 ? " of rank 0" : "", ", as the tape lists them\n", collective_summary(result.tape)));
  if (result.steps_here > 0) report_peaks(world, trainer, result, threads, lines);
  if (result.train_loss != 0) lines.say(str("\ntraining loss    ", result.train_loss));
  const char* const of = trainer.corpus().val.example_end() ? "nats per token that is learned" : "nats per token";
  lines.say(
      str("validation loss  ", result.val_loss, models::losses_by_name(result), "  (", of, ", whole split unless train.eval_tokens says less)"));
  if (result.best)
    lines.say(
        str("lowest of all    ", result.best->val_loss, "  (after step ", result.best->step, "; its weights are in ", trainer.best_folder(), ")"));
  for (const auto& [name, of] : result.accuracies) lines.say(models::accuracy_line(name, of));
}

}  // namespace sheaf::tools
