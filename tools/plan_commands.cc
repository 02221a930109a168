// The costs of a step, without running it: `sheaf tape`, `sheaf plan`.
#include <cstdio>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/cores.h"
#include "sheaf/core/file.h"
#include "sheaf/distributed/init.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/models/flops.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/trainer.h"
#include "sheaf/models/config_search.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"

namespace sheaf::tools {
namespace {

// The memory not included in the plan of a GPU's memory.
constexpr const char* kOfAGpu =
    "\nThis is what Sheaf asks of its allocator, which rounds each block up to 256 bytes. Not in it: what the driver and "
    "NCCL hold for themselves, and workspaces that only a plan of cuDNN's on the GPU itself tells.";

int64_t vocabulary_of(const char* command, const models::TrainConfig& config) {
  if (config.model.vocab > 0) return config.model.vocab;
  const models::DataConfig& data = config.data;
  if (models::is_published(data.tokenizer)) return models::open_tokenizer(data.tokenizer, data.tokenizer_folder)->vocab_size();
  if (data.corpus.empty()) fail<ConfigError>("[", command, "] the size of the vocabulary is not known: give --model.vocab N");
  check<DataError>(path_exists(data.corpus), "[", command, "] the vocabulary is that of '", data.corpus, "', which does not exist: give "
                     "--model.vocab N");
  return models::load_corpus(data, 0).vocab;
}

// Checks whether the training files, as far as they exist on this machine, hold examples: then steps count targets, and examples are
// kept separate.
void look_at_data(const char* command, models::DataConfig& data, int64_t vocab) {
  const auto holds_examples = [&](const auto& open, const std::string& files) {
    try {
      return !files.empty() && open(files, vocab).example_end().has_value();
    } catch (const DataError& error) {
      warn_on_stderr(str("[", command, "] whether there are examples is not known, and none are planned for: ", error.what()));
      return false;
    }
  };
  data.examples = holds_examples(models::TokenMixture::open, data.train_file);
  data.separate_documents |= data.examples || holds_examples(models::ValidationSets::open, data.val_file);
}

// What the data say of a step. The plan does not depend on which token ends a document.
void complete(const char* command, models::TrainConfig& config) {
  config.model.vocab = vocabulary_of(command, config);
  look_at_data(command, config.data, config.model.vocab);
  if (config.data.separate_documents && config.data.end_of_text < 0) config.data.end_of_text = 0;
}

template <class... Args>
std::string formatted(const char* format, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, format, args...);
  return text;
}

std::string row(const models::PlannedConfig& planned, const Machine& machine, int world) {
  const models::StepTime& t = planned.time;
  const double ranks_seconds = t.seconds * world;
  return formatted("%12.3f  %10.0f  %5.1f  %7.1f  %8.1f  %7.1f  ", t.seconds,
                   static_cast<double>(planned.config.train.batch * planned.config.model.context) / ranks_seconds,
                   100 * models::flops_per_step(planned.config) / (ranks_seconds * machine.peak),
                   static_cast<double>(t.peak_bytes) * 1e-9,
                   static_cast<double>(t.received) / (1 << 30), 100 * (1 - t.computing / t.seconds)) +
         planned.options;
}

}  // namespace

int tape_command(const TapeArguments& arguments) {
  models::TrainConfig config = load_config(arguments.config, arguments.overrides);
  if (arguments.world < 1) fail<ConfigError>("[tape] --world must be at least 1, not ", arguments.world);
  if (arguments.rank < 0 || arguments.rank >= arguments.world)
    fail<ConfigError>("[tape] --rank must be in [0, ", arguments.world, "), not ", arguments.rank);
  const int threads = arguments.threads_per_rank > 0 ? arguments.threads_per_rank
                                                     : threads_per_rank(arguments.world);
  if (arguments.device != "cpu" && arguments.device != "cuda")
    fail<ConfigError>("[tape] unknown device '", arguments.device, "'; known: cpu, cuda");
  if (arguments.format == "svg" && config.train.compile)
    fail<ConfigError>("[tape] --format svg draws when memory is taken and freed, and a program (train.compile) does neither");
  complete("tape", config);
  const bool gpu = arguments.device == "cuda";
  // Assumes the ranks of a job on one host, unless SHEAF_COMM requests Gloo; GPUs use NCCL.
  const std::string wanted = wanted_comm(), comm = gpu ? "nccl" : wanted == "auto" ? "shm" : wanted;
  const models::Plan plan = models::plan_step(config, config.model.vocab, arguments.rank, arguments.world, threads, comm,
                                              gpu ? Device::cuda() : Device::cpu());
  const std::string outer = config.train.islands == 1 ? "" : str("\nan outer step, after each ", config.train.inner_steps, " of these\n",
      to_text(plan.outer), "\ncollectives\n", collective_summary(plan.outer));
  if (arguments.format == "json") say(to_json(plan.tape));
  else if (arguments.format == "dot") say(to_dot(plan.tape));
  else if (arguments.format == "svg")
    say(to_svg(plan.tape, plan.memory, str("one step of rank ", arguments.rank, " of ", counted(arguments.world, "rank"), ", ", config.sharding.strategy, ", ", plan.parameters,
                                          " parameters: at most ", mebibytes(plan.peak.bytes))));
  else if (arguments.format == "text")
    say(to_text(plan.tape) + "\ncollectives\n" + collective_summary(plan.tape) + outer +
        str("\nparameters ", plan.parameters, plan.trained < plan.parameters ? str(", of them trained ", plan.trained) : "",
            ", ranks ", arguments.world, ", rank ", arguments.rank,
            gpu ? ", on a GPU" : str(", threads ", threads), ": peak ", plan.peak.bytes, " bytes (",
            mebibytes(plan.peak.bytes), ")",
            plan.host_peak.bytes ? str(", and of the host's memory ", plan.host_peak.bytes, " bytes (", mebibytes(plan.host_peak.bytes), ")") : "",
            gpu ? kOfAGpu : "", "\n\nat the peak\n", to_text(plan.peak),
            plan.host_peak.bytes ? "\nof the host's memory, at its own peak\n" + to_text(plan.host_peak) : ""));
  else
    fail<ConfigError>("[tape] unknown format '", arguments.format, "'; known: text, json, dot, svg");
  return 0;
}

int plan_command(const PlanArguments& arguments) {
  check<ConfigError>(kernels::kHasCuda,
                     "[plan] configurations are planned for GPUs, and this build has no CUDA: one that found CUDA needs no GPU for that; "
                     "`sheaf tape` prints a step on CPUs");
  models::TrainConfig config = load_config(arguments.config, arguments.overrides);
  constexpr int kMostRanks = 1 << 20;
  if (arguments.world < 1 || arguments.world > kMostRanks)
    fail<ConfigError>("[plan] --world must be at least 1 and at most ", kMostRanks, ", not ", arguments.world);
  if (config.train.recompute == "fit")
    fail<ConfigError>("[plan] train.recompute fit: it looks for what fits by itself; --memory says what to fit into");
  Machine machine = machine_named(arguments.machine);
  complete("plan", config);
  if (arguments.ranks_per_host > 0) machine.ranks_per_host = arguments.ranks_per_host;
  if (arguments.memory > 0) machine.memory = arguments.memory;
  if (arguments.network > 0) machine.between.bytes_per_second = arguments.network;
  if (!arguments.trace.empty()) expect_writable_file("plan", arguments.trace);  // before all the work
  models::ConfigSearchOptions options;
  options.threads = available_cores();
  for (const std::string& word : arguments.overrides)
    if (word.starts_with("--")) options.keep.insert(word.substr(2, word.find('=') - 2));
  const models::ConfigSearchResult found = models::search_configs(config, config.model.vocab, arguments.world, machine, options);
  if (found.fitting.empty())
    fail<OutOfMemory>("[plan] none of ", found.planned, " configurations fits ", machine.memory, " bytes a rank: the least takes ", found.least_bytes,
                      config.train.offload_parameters && config.train.offload_optimizer ? "" : "; train.offload_parameters and "
                      "train.offload_optimizer leave masters, gradients and states to the host's memory");
  say(str(counted(config.train.batch, "sequence"), " of ", counted(config.model.context, "token"), ", ", counted(arguments.world, "rank"), " ",
          config.train.islands > 1 ? str("in ", config.train.islands, " islands ") : "", "on ", machine.name, ", ",
          machine.ranks_per_host, " to a host: ", counted(found.planned, "configuration"), " planned, ", found.fitting.size(), " of them within ",
          formatted("%.1f GB", static_cast<double>(machine.memory) * 1e-9)));
  say(" estimated s  tok/s/rank  MFU %  peak GB  recv GiB  waits %  options");
  for (const models::PlannedConfig& planned : arguments.all ? found.fitting : found.front) say(row(planned, machine, arguments.world));
  const models::PlannedConfig& best = found.fitting[0];
  if (!best.time.waits.empty()) {
    std::string waits;
    for (const auto& [name, seconds] : best.time.waits)
      waits += str(waits.empty() ? "" : ", ", name, formatted(" %.4f s", seconds));
    say("the first one waits for " + waits);
  }
  if (!arguments.trace.empty()) {
    write_file(arguments.trace, models::trace_step(best.config, config.model.vocab, arguments.world, machine));
    say("its time line is in " + arguments.trace);
  }
  return 0;
}

}  // namespace sheaf::tools
