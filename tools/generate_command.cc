#include <chrono>
#include <cstdio>

#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/init.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/models/generate.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/same_options.h"

namespace sheaf::tools {
namespace {

int generate_one(const GenerateArguments& arguments) {
  if (const Rendezvous r = read_rendezvous(); r.world > 1)
    fail<ConfigError>("[generate] one prompt takes one process, and this is rank ", r.rank, " of ", r.world, "; several ranks share --prompts");
  const models::GenerateLinesOptions none, &given = arguments.lines;
  for (const auto& [name, is_given] : {std::pair{"--output", given.output != none.output},
                                       {"--prompt-field", given.prompt_field != none.prompt_field},
                                       {"--field", given.field != none.field},
                                       {"--samples", given.samples != none.samples},
                                       {"--at-once", given.at_once != none.at_once},
                                       {"--resume", given.resume}})
    check<ConfigError>(!is_given, "[generate] ", name, " is for --prompts");
  const models::GenerateConfig config = load_generate_config(arguments.folder + "/config.toml", arguments.overrides);
  RankContext::current().threads = arguments.threads_per_rank > 0 ? arguments.threads_per_rank : threads_per_rank(1);
  const RankScope scope(RankContext::current());
  models::generate_from_folder(arguments.folder, config, distributed::init_device(), [](const std::string& text) { put(text); });
  put("\n");
  return 0;
}

// "1,280 of 5,000 continuations, 93.1% ended, 8,412 tok/s"; after a resumption "93.1% of 280 ended"
std::string line_of(const models::GenerateLinesProgress& now, int64_t before, double seconds) {
  const auto made = static_cast<double>(now.done - before);
  const std::string of = before > 0 ? str(" of ", now.done - before) : "";
  char rates[128];
  std::snprintf(rates, sizeof rates, "%.1f%%%s ended, %.0f tok/s", made > 0 ? 100 * static_cast<double>(now.ended) / made : 0.0, of.c_str(),
                seconds > 0 ? static_cast<double>(now.tokens) / seconds : 0.0);
  return str(now.done, " of ", now.all, " continuations, ", rates);
}

int generate_many_lines(const GenerateArguments& arguments) {
  check<ConfigError>(!arguments.lines.output.empty(), "[generate] --prompts ", arguments.lines.prompts, " wants --output, the file to write");
  World world = distributed::init_from_env();
  world.guard([&] {
    const models::TrainConfig config = load_generate_lines_config(arguments.folder + "/config.toml", arguments.overrides);
    const models::GenerateLinesOptions& o = arguments.lines;
    require_same_options(world, config, {{"--prompt-field", o.prompt_field}, {"--field", o.field}, {"--samples", str(o.samples)},
                                         {"--at-once", str(o.at_once)}});
    if (arguments.threads_per_rank > 0) RankContext::current().threads = arguments.threads_per_rank;
    const RankScope scope(RankContext::current());
    int64_t before = -1;  // the number in the output at the start
    auto began = std::chrono::steady_clock::now();
    models::generate_lines(arguments.folder, config, world, world.device(), o, [&](const models::GenerateLinesProgress& now) {
      if (before < 0) {
        before = now.done, began = std::chrono::steady_clock::now();
        if (now.done > 0 && world.rank() == 0)
          say(now.done < now.all ? str("goes on after ", now.done, " lines of ", o.output) : str(o.output, " has all ", now.all, " lines"));
        return;
      }
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
      if (world.rank() == 0) say(line_of(now, before, seconds.count()));
    });
  });
  return 0;
}

}  // namespace

int generate_command(const GenerateArguments& arguments) {
  return arguments.lines.prompts.empty() ? generate_one(arguments) : generate_many_lines(arguments);
}

}  // namespace sheaf::tools
