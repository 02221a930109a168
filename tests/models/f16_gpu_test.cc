// Training in f16 on a GPU: steps that overflow are skipped alike whether they are eager, replayed from a graph or run by a program.
#include <gtest/gtest.h>

#include "sheaf/models/plan.h"
#include "sheaf/tests/models/f16_runs.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

const Device kGpu = Device::cuda();

TEST(F16OnGpu, SkipsAlikeAsAGraphAsAProgramAndUnderEveryStrategy) {
  SHEAF_NEEDS_GPU();
  for (const auto& [type, optimizer] : {std::pair{"gpt2", "adamw"}, {"llama", "muon"}}) {
    SCOPED_TRACE(str(type, " ", optimizer));
    models::TrainConfig c = at_the_limit(type);
    c.train.optimizer = optimizer;
    const F16Run expected = train_f16(c, 1, kGpu);
    for (const auto& [graph, compile] : {std::pair{true, false}, {true, true}, {false, true}}) {
      c.train.cuda_graph = graph, c.train.compile = compile;
      expect_same(train_f16(c, 1, kGpu), expected);
    }
  }
  models::TrainConfig c = at_the_limit();
  const F16Run expected = train_f16(c, 3, kGpu);
  for (const char* strategy : {"zero1", "replicate"}) {
    c.sharding.strategy = strategy;
    expect_same(train_f16(c, 3, kGpu), expected);
  }
}

TEST(F16OnGpu, FollowsTheCpu) {
  SHEAF_NEEDS_GPU();
  const models::TrainConfig c = in_f16();
  const TrainedRun gpu = train_tiny(c, 2, 12, {}, kGpu), cpu = train_tiny(c, 2, 12);
  for (size_t s = 0; s < cpu.losses.size(); ++s) {
    EXPECT_NEAR(gpu.losses[s], cpu.losses[s], 5e-3 * cpu.losses[s]) << s;
    EXPECT_NEAR(gpu.norms[s], cpu.norms[s], 5e-2 * cpu.norms[s]) << s;
  }
}

TEST(F16OnGpu, ThePlanIsThePeakToTheByte) {
  SHEAF_NEEDS_GPU();
  for (const char* strategy : {"full_shard", "replicate"}) {
    models::TrainConfig c = in_f16();
    c.sharding.strategy = strategy;
    std::vector<int64_t> peaks(2);
    run_local(2, [&](World& w) {
      models::TrainingStep step(c, c.model.vocab, w, kGpu);
      Allocator& memory = *RankContext::current().memory(kGpu);
      for (int s = 0; s < 3; ++s) {
        memory.reset_peak();
        step.run(s, fill_tiny).loss.item();
      }
      peaks[static_cast<size_t>(w.rank())] = memory.stats().peak;
    }, {.threads_per_rank = 1, .device = kGpu});
    EXPECT_EQ(peaks, models::plan_peaks(c, c.model.vocab, 2, 1, "local", kGpu));
  }
}

}  // namespace
}  // namespace sheaf::testing
