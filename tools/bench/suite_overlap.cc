// overlap: a step with tensor, sequence or expert parallelism over two ranks, whose activations and their gradients are sent over a
// link of a given rate, with products computed while rows and other gradients are in transit, against the same step that waits for
// every transfer. Results are bit-identical. Ranks are threads of this process, with one compute thread each.
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/timed_steps.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

constexpr int kRanks = 2;

double bytes_received(const models::TrainingStep& step) {
  const Mesh& mesh = step.mesh();
  int64_t bytes = 0;
  for (int a = 0; a < mesh.spec->num_axes(); ++a)
    bytes += mesh.runtime->gather_lane(a).bytes_received() + mesh.runtime->reduce_lane(a).bytes_received();
  return static_cast<double>(bytes);
}

void measure(Session& session, const models::TrainConfig& config, double bytes_per_second, Line& line) {
  StepsToTime steps{.config = config,
                    .ranks = kRanks,
                    .links = {.ranks_per_host = 1, .bytes_per_second_between_hosts = bytes_per_second, .threads_per_rank = 1},
                    .received = bytes_received};
  StepsToTime waiting = steps;
  waiting.options.overlap = false;
  const auto timed = compare_steps(line, session.options().quick ? 2 : session.samples(12), steps, "waiting for all", waiting);
  line.more = {{"MB received", timed[0].megabytes}};
}

}  // namespace

void overlap_suite(Session& session) {
  const bool quick = session.options().quick;
  struct Case {
    const char *name, *axis, *comm = "all_to_all";
  };
  constexpr Case kCases[] = {{"char-f32-16x256", "tensor"},
                             {"llama-f32-8x256", "tensor"},
                             {"llama-f32-8x256", "context"},
                             {"llama-f32-8x256", "context", "all_gather"},
                             {"mixture-f32-8x256", "experts"},
                             {"mixture-4-of-32-bf16-8x256", "experts"}};
  for (const double gigabytes : {1.25, 0.5}) {  // 10 and 4 Gbit/s
    if (quick && gigabytes < 1.25) break;
    for (const auto& [name, axis, comm] : kCases) {
      std::vector<std::string> more{str("--sharding.", axis, "=", kRanks), str("--sharding.context_comm=", comm)};
      if (quick) more.insert(more.end(), {"--train.batch=2", "--model.context=32", "--model.layers=2"});
      const std::string gathers = comm == std::string("all_gather") ? "-gathered" : "";
      session.line("overlap", str(name, "-", axis, gathers, "-", gigabytes, "GB/s"), Unit::seconds,
                   [&](Line& line) { measure(session, training_config(name, more), 1e9 * gigabytes, line); });
    }
  }
}

}  // namespace sheaf::bench
