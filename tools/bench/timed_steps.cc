#include "sheaf/tools/bench/timed_steps.h"

#include <utility>

#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

void add_samples(const StepsToTime& of, int samples, TimedSteps& out) {
  const auto train = [&](World& world) {
    models::TrainingStep step(of.config, of.config.model.vocab, world, world.device(), of.options);
    const models::FillBatch fill = random_tokens(of.config);
    int64_t done = 0;
    const auto sample = [&] {
      for (int64_t k = 0; k < of.at_once; ++k) step.run(done++, fill).loss.item();
    };
    const auto received = [&] { return of.received ? of.received(step) : 0.0; };
    for (int64_t w = 0; w < of.warm; ++w) sample();
    for (int i = 0; i < samples; ++i) {
      world.communicator().barrier("bench").sync();
      const double before = received(), begin = now();
      sample();
      if (world.rank() != 0) continue;
      const auto steps = static_cast<double>(of.at_once);
      out.seconds.push_back((now() - begin) / steps);
      out.megabytes = (received() - before) / 1e6 / steps;
    }
  };
  run_local(of.ranks, train, of.links);
}

}  // namespace

std::vector<TimedSteps> time_steps(const std::vector<StepsToTime>& all, int samples) {
  std::vector<TimedSteps> out(all.size());
  const Rounds rounds(samples);
  for (int round = 0; round < rounds.count; ++round)
    for (size_t i = 0; i < all.size(); ++i) add_samples(all[i], rounds.samples_each, out[i]);
  return out;
}

std::vector<TimedSteps> compare_steps(Line& line, int samples, const StepsToTime& own, std::string peer, const StepsToTime& of_peer) {
  std::vector<TimedSteps> timed = time_steps({own, of_peer}, samples);
  line.samples_s = timed[0].seconds;
  line.peer = std::move(peer);
  line.peer_value = quantile(timed[1].seconds, 0.5);
  return timed;
}

}  // namespace sheaf::bench
