// step: whole steps of training, forward, backward, clipping and AdamW. Other programs run the same
// cases by these names.
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

// A step takes too long for Google Benchmark's calibration, and steps are not alike: the first
// allocates, the second knows the order of gathers.
void measure_step(Session& session, std::string_view name, Line& line) {
  const models::TrainConfig config = training_config(name);
  World world = solo_world();
  models::TrainingStep step(config, config.model.vocab, world, Device::cpu());
  const models::FillBatch fill = random_tokens(config);
  int64_t done = 0;
  const Session::Sample one = [&] {
    const double begin = now();
    step.run(done++, fill).loss.item();
    return now() - begin;
  };
  Probe& probe = session.probe();
  const Session::Sample peak = [&] {
    return probe.flops_per_piece() / probe.read().fma_gflops / 1e9;
  };
  for (int warm = session.options().quick ? 2 : 4; warm > 0; --warm) one();
  auto [steps, peaks] = session.turns(one, peak);
  const double flops = flops_per_step(config), seconds = quantile(steps, 0.5);
  const double piece_rate = probe.flops_per_piece() / quantile(peaks, 0.5);
  line.samples_s = std::move(steps);
  // The step that did nothing but its products, as fast as the machine multiplies and adds in f32.
  line.peer = "FMA peak";
  line.peer_value = flops / piece_rate;
  line.gflops = flops / seconds / 1e9;
  line.peak = config.train.dtype == "bf16" ? Peak::bf16 : Peak::f32;
  line.more = {{"tokens/s", static_cast<double>(step.tokens_per_step()) / seconds},
               {"GFLOP/s", line.gflops},
               {"GFLOP/step", flops / 1e9}};
}

}  // namespace

void step_suite(Session& session) {
  for (const TrainingCase& c : training_cases())
    session.line("step", c.name, Unit::seconds,
                 [&](Line& line) { measure_step(session, c.name, line); });
}

}  // namespace sheaf::bench
