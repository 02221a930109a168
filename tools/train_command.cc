#include <algorithm>
#include <csignal>
#include <cstdio>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/file.h"
#include "sheaf/distributed/init.h"
#include "sheaf/distributed/launcher.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/trainer.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/run_lines.h"
#include "sheaf/tools/same_options.h"
#include "sheaf/tools/stop_signals.h"

namespace sheaf::tools {
namespace {

// A resumed run needs no configuration: its folder has it.
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

// After a signal the current step is completed. Before and after training there is nothing to save.
models::TrainReport train(models::Trainer& trainer) {
  if (trainer.complete()) return trainer.run();
  const StopSignals signals;
  try {
    return trainer.run([&] { return signals.asked(); });
  } catch (const Error& error) {
    const int signal = std::max(signals.asked(), trainer.stopped_by());
    if (signal == 0) throw;
    throw Error(static_cast<ExitCode>(error.exit_code()), distributed::after_signal(signal) + error.what());
  }
}

// A job restarted by its launcher resumes, even without --resume. With torchrun's agents on several hosts, only the agent that saw
// the failure counts the restart.
bool started_again(World& world) {
  int64_t restarts = read_rendezvous().restarts;
  world.communicator().all_reduce(&restarts, 1, kI64, Reduction::max, "restarts").sync();
  return restarts > 0;
}

// Before anything else can fail. Where ranks are on several hosts, only all of them together know whether they were started again.
void refuse_earlier_run(const TrainArguments& arguments) {
  const Rendezvous r = read_rendezvous();
  if (arguments.resume || r.restarts > 0 || r.local_world < r.world) return;
  models::OutputConfig output;
  try {
    output = read_config(arguments).output;
  } catch (const Error&) {
    return;  // which ends the others' wait once they are connected
  }
  models::refuse_earlier_run(output);
}

}  // namespace

int train_command(const TrainArguments& arguments) {
  if (arguments.print_config) {
    say(print_config(read_config(arguments)));
    return 0;
  }
  // `sheaf train | head -1` must not prevent checkpoints: writing to the closed pipe fails instead of raising a signal.
  std::signal(SIGPIPE, SIG_IGN);
  refuse_earlier_run(arguments);
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
    options.warn = warn_on_stderr;
    if (first) options.print = [&](const std::string& line) { if (!arguments.quiet) lines.say(line); };
    models::Trainer trainer(config, world, world.device(), options);
    // Check at the start what is needed only at the end.
    if (const auto& tokenizer = trainer.corpus().tokenizer; tokenizer && !arguments.quiet)
      models::encode_prompt(*tokenizer, config.generate), models::ends_of(*tokenizer, config.generate);
    if (first) {
      replace_file(config.output.folder + "/config.toml", print_config(config));
      describe_start(config, world, trainer, lines);
    }
    const models::TrainReport result = train(trainer);
    stopped_by = result.stopped_by;
    if (stopped_by != 0 && first)
      lines.say(str("stopped by signal ", stopped_by, " after step ", result.done, " of ", result.steps, "; saved to ",
                    config.output.folder, "/checkpoints/step-", result.done, ", from where --resume goes on"));
    if (stopped_by == 0 && !arguments.quiet) describe_end(config, world, trainer, result, threads, lines);
  });
  return stopped_by == 0 ? 0 : 128 + stopped_by;
}

}  // namespace sheaf::tools
