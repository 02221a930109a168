// pipeline: a step with the interleaved schedule (several runs of blocks per stage) against one run per stage; with delayed weight
// gradients (zero_bubble) against 1F1B; and with the head counted as blocks of the last stage against stages of as many blocks: the
// reduction of the pipeline bubble. Ranks are threads of this process, one per stage, with one compute thread each.
#include <algorithm>
#include <cmath>

#include "sheaf/models/flops.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/timed_steps.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

struct Pipeline {
  int stages, micro_batches, runs;
  bool head = false;  // costs as much as two blocks, else next to nothing
  bool counts = true;
  bool later = false;  // zero_bubble
};

models::TrainConfig config_of(const Session& session, const Pipeline& p) {
  // Untied, so that each stage has only its blocks and at most one table.
  std::vector<std::string> more = {str("--model.layers=", p.head ? 6 : 8), "--train.batch=8", "--model.tie_embeddings=false",
                                   "--sharding.strategy=zero1", str("--train.micro_batches=", p.micro_batches),
                                   str("--sharding.pipeline=", p.stages), str("--sharding.pipeline_runs=", p.runs),
                                   str("--sharding.pipeline_head=", p.counts ? -1 : 0),
                                   str("--sharding.pipeline_schedule=", p.later ? "zero_bubble" : "1f1b")};
  if (session.options().quick) more.push_back("--model.context=16");
  models::TrainConfig config = training_config(session.options().quick ? "nanogpt-f32-12x64" : "char-f32-16x256", more);
  if (p.head) {
    const models::FlopsOfParts parts = models::flops_of_parts(config);
    config.model.vocab = std::llround(static_cast<double>(config.model.vocab) * 2 * parts.block / parts.head);
  }
  return config;
}

void measure(Session& session, const Pipeline& p, const Pipeline& peer, Line& line) {
  const auto steps = [&](const Pipeline& of) {
    return StepsToTime{.config = config_of(session, of), .ranks = of.stages, .links = {.threads_per_rank = 1}};
  };
  compare_steps(line, session.samples(12), steps(p), p.head ? "as many blocks in each stage" : p.later ? "1F1B" : "one run of blocks in each stage",
                steps(peer));
  // One turn is a forward and a backward of all of a stage's blocks, without the embedding, the head and the update. In units of
  // blocks, of the longest stage and of the others, each of which a step waits for once. A forward, the input gradients and the
  // weight gradients are assumed to take equally long.
  const auto turns = [](const Pipeline& of) {
    const bool waits = of.head && !of.counts;
    return of.micro_batches * (waits ? 5.0 : 4.0) + (of.stages - 1) * (waits ? 3.0 : 4.0) * (of.later ? 1.0 / 3 : 1.0) / of.runs;
  };
  line.more = {{"ideal ratio", turns(peer) / turns(p)}};
}

}  // namespace

void pipeline_suite(Session& session) {
  for (const int stages : {2, 4}) {
    if (stages > std::max(2, session.machine().threads)) break;
    for (const int rounds : {1, 2})
      for (const int runs : {2, 4}) {
        if (stages * runs > 8) continue;
        const Pipeline p{stages, rounds * stages, runs};
        session.line("pipeline", str(stages, "-stages-of-", runs, "-runs-", p.micro_batches, "-micro-batches"), Unit::seconds,
                     [&](Line& line) { measure(session, p, {stages, p.micro_batches, 1}, line); });
      }
  }
  for (const int stages : {2, 4}) {
    if (stages > std::max(2, session.machine().threads)) break;
    for (const int rounds : {1, 2})
      for (const int runs : {1, 2}) {
        Pipeline p{stages, rounds * stages, runs};
        const Pipeline peer = p;
        p.later = true;
        session.line("pipeline", str(stages, "-stages-", runs > 1 ? str("of-", runs, "-runs-") : "", p.micro_batches, "-micro-batches-zero-bubble"),
                     Unit::seconds, [&](Line& line) { measure(session, p, peer, line); });
      }
  }
  const Pipeline counts{2, 4, 1, true, true}, even{2, 4, 1, true, false};
  session.line("pipeline", "2-stages-and-a-head-of-2-blocks-4-micro-batches", Unit::seconds,
               [&](Line& line) { measure(session, counts, even, line); });
}

}  // namespace sheaf::bench
