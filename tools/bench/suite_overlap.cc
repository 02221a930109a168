// overlap: a step with tensor, sequence or expert parallelism over two ranks, whose activations and their gradients are sent over a
// link of a given rate, with products computed while rows and other gradients are in transit, against the same step that waits for
// every transfer. Results are bit-identical. Ranks are threads of this process, with one compute thread each.
#include <algorithm>
#include <utility>

#include "sheaf/distributed/run_local.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

constexpr int kRanks = 2;

struct Steps {
  std::vector<double> seconds;  // by rank 0's clock
  double megabytes = 0;         // received by it per step
};

Steps steps_of(const models::TrainConfig& config, double bytes_per_second, bool overlap, int count) {
  Steps out;
  const auto train = [&](World& world) {
    models::TrainingStep step(config, config.model.vocab, world, world.device(), {.overlap = overlap});
    const models::FillBatch fill = random_tokens(config);
    int64_t done = 0;
    for (int warm = 0; warm < 3; ++warm) step.run(done++, fill).loss.item();
    const Mesh& mesh = step.mesh();
    const auto received = [&] {
      int64_t bytes = 0;
      for (int a = 0; a < mesh.spec->num_axes(); ++a)
        bytes += mesh.runtime->gather_lane(a).bytes_received() + mesh.runtime->reduce_lane(a).bytes_received();
      return bytes;
    };
    for (int i = 0; i < count; ++i) {
      world.communicator().barrier("bench").sync();
      const int64_t before = received();
      const double begin = now();
      step.run(done++, fill).loss.item();
      if (world.rank() != 0) continue;
      out.seconds.push_back(now() - begin);
      out.megabytes = static_cast<double>(received() - before) / 1e6;
    }
  };
  run_local(kRanks, train, {.ranks_per_host = 1, .bytes_per_second_between_hosts = bytes_per_second, .threads_per_rank = 1});
  return out;
}

void measure(Session& session, const models::TrainConfig& config, double bytes_per_second, Line& line) {
  const int samples = session.options().quick ? 2 : session.samples(12), rounds = std::min(3, (samples + 3) / 4);
  std::vector<double> peers;
  for (int round = 0; round < rounds; ++round) {
    const Steps own = steps_of(config, bytes_per_second, true, samples / rounds), other = steps_of(config, bytes_per_second, false, samples / rounds);
    line.samples_s.insert(line.samples_s.end(), own.seconds.begin(), own.seconds.end());
    peers.insert(peers.end(), other.seconds.begin(), other.seconds.end());
    line.more = {{"MB received", own.megabytes}};
  }
  line.peer = "waiting for all";
  line.peer_value = quantile(peers, 0.5);
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
