#include <cmath>
#include <cstdio>

#include "sheaf/distributed/init.h"
#include "sheaf/models/evaluate.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/config.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/same_options.h"

namespace sheaf::tools {
namespace {

std::string perplexity(double loss) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", std::exp(loss));
  return text;
}

void say_all(const models::EvaluationReport& report) {
  for (const models::Validation& v : report.validation)
    say(str("loss ", v.name.empty() ? "" : "of " + v.name + " ", v.loss, ", perplexity ", perplexity(v.loss), "  (nats per token, of ",
            v.windows.num_targets(), v.windows.examples() ? " that are learned)" : ")"));
  for (size_t i = 0; i < report.questions.size(); ++i) {
    const models::ChoiceQuestions& q = report.questions[i];
    say(str(models::accuracy_line(q.name(), report.accuracies[i]), "  (of ", q.questions().size(), " questions",
            q.num_shortened() ? str("; ", q.num_shortened(), " of their ", q.rows().size(), " choices without the beginning of the prompt") : "", ")"));
  }
}

}  // namespace

int evaluate_command(const EvaluateArguments& arguments) {
  World world = distributed::init_from_env();
  world.guard([&] {
    const models::TrainConfig config = load_evaluate_config(arguments.folder + "/config.toml", arguments.overrides);
    require_same_options(world, config, {{"--context", str(arguments.context)}});
    if (arguments.threads_per_rank > 0) RankContext::current().threads = arguments.threads_per_rank;
    const RankScope scope(RankContext::current());
    const models::EvaluationReport report =
        models::evaluate_folder(arguments.folder, config, world, world.device(), {.context = arguments.context});
    if (world.rank() != 0) return;
    say(str("sheaf evaluate: ", world.size(), world.size() == 1 ? " rank, " : " ranks, ", report.parameters, " parameters of ", report.model,
            ", ", config.train.dtype, ", windows of ", report.context, " tokens"));
    say_all(report);
  });
  return 0;
}

}  // namespace sheaf::tools
