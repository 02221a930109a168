#include <cmath>
#include <cstdio>

#include "sheaf/distributed/init.h"
#include "sheaf/models/evaluate_folder.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/run_lines.h"
#include "sheaf/tools/same_options.h"

namespace sheaf::tools {
namespace {

std::string perplexity(double loss) {
  constexpr double kLong = 1e9;  // above it digits behind the point only hide how large it is
  const double value = std::exp(loss);
  char text[32];
  std::snprintf(text, sizeof text, value < kLong ? "%.4f" : "%.4g", value);
  return text;
}

void say_all(const models::EvaluationReport& report) {
  for (const models::Validation& v : report.validation)
    say(str("loss ", v.name.empty() ? "" : "of " + v.name + " ", v.loss, ", perplexity ", perplexity(v.loss), "  (nats per token, of ",
            v.windows.num_targets(), v.windows.examples() ? " that are learned)" : ")"));
  for (const auto& [questions, accuracy] : report.questions)
    say(str(models::accuracy_line(questions.name(), accuracy), "  (", models::questions_line(questions), ")"));
}

}  // namespace

int evaluate_command(const EvaluateArguments& arguments) {
  World world = distributed::init_from_env();
  world.guard([&] {
    const auto [config, whole_text] = load_evaluate_config(arguments.folder + "/config.toml", arguments.overrides);
    require_same_options(world, config, {{"--context", str(arguments.context)}, {"all of data.corpus", str(whole_text)}});
    if (arguments.threads_per_rank > 0) RankContext::current().threads = arguments.threads_per_rank;
    const RankScope scope(RankContext::current());
    const models::EvaluationReport report = models::evaluate_folder(arguments.folder, config, world, world.device(),
                                                                    {.context = arguments.context, .whole_text = whole_text});
    if (world.rank() != 0) return;
    say(str("sheaf evaluate: ", counted(world.size(), "rank"), ", ", counted(report.parameters, "parameter"), " of ", report.model, ", ",
            config.train.dtype, config.train.fp8 == "none" ? "" : ", products in FP8", ", windows of ", counted(report.context, "token")));
    for (const models::Validation& v : report.validation)
      if (const models::PackedExamples* examples = v.windows.examples())
        say(examples_line(v.name.empty() ? "" : v.name + ": ", *examples, report.context));
    say_all(report);
  });
  return 0;
}

}  // namespace sheaf::tools
