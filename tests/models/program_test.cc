// Training steps that run as programs (train.compile): the bits of eager steps, in the planned memory, without any allocation on the way.
#include <gtest/gtest.h>

#include "sheaf/models/batch_sampler.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 6;  // the last three run as a program

struct Case {
  int world;
  const char* strategy;
  const char* type = "gpt2";
  const char* dtype = "f32";
  int replicas = 1, context = 1, tensor = 1;
  bool secondary = false;
  const char* optimizer = "adamw";
  const char* recompute = "none";
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.type << " " << c.dtype << " " << c.strategy << " at " << c.world << " in " << c.replicas << " by " << c.context << " by "
       << c.tensor << (c.secondary ? " secondary " : " ") << c.optimizer << " recompute " << c.recompute;
}

models::TrainConfig config_of(const Case& c, bool compile) {
  models::TrainConfig config = tiny_rank_config(c.strategy);
  config.model = tiny_model(c.type, 6, 2);
  config.model.dropout = 0.1;
  config.train.dtype = c.dtype;
  config.train.optimizer = c.optimizer;
  config.train.recompute = c.recompute;
  config.sharding.replicas = c.replicas;
  config.sharding.context = c.context;
  config.sharding.tensor = c.tensor;
  config.sharding.secondary = c.secondary;
  config.train.compile = compile;
  return config;
}

class ProgramTraining : public ::testing::TestWithParam<Case> {};

TEST_P(ProgramTraining, HasTheBitsOfEagerSteps) {
  const Case& c = GetParam();
  const TrainedRun expected = train_tiny(config_of(c, false), c.world, kSteps);
  expect_same_bits(train_tiny(config_of(c, true), c.world, kSteps), expected);
  models::TrainConfig all_kept = config_of(c, true);
  all_kept.sharding.memory_budget = int64_t{1} << 40;
  expect_same_bits(train_tiny(all_kept, c.world, kSteps), expected);
}

TEST_P(ProgramTraining, TakesTheBytesOfItsPlan) {
  const Case& c = GetParam();
  models::TrainConfig config = config_of(c, true);
  expect_planned_tapes(config, c.world);
  config.sharding.memory_budget = int64_t{1} << 40;
  expect_planned_tapes(config, c.world);
}

INSTANTIATE_TEST_SUITE_P(
    Steps, ProgramTraining,
    ::testing::Values(Case{1, "full_shard"}, Case{2, "full_shard", "llama"}, Case{3, "full_shard", "gpt2", "bf16"},
                      Case{5, "full_shard"}, Case{3, "shard_grad_op", "llama"}, Case{3, "zero1", "gpt2", "bf16"},
                      Case{3, "replicate", "llama", "bf16"}, Case{4, "full_shard", "gpt2", "f32", 2},
                      Case{4, "full_shard", "llama", "bf16", 2, 1, 1, true}, Case{4, "full_shard", "llama", "f32", 1, 2},
                      Case{4, "full_shard", "gpt2", "f32", 1, 1, 2}, Case{2, "full_shard", "llama", "f32", 1, 1, 2},
                      Case{3, "full_shard", "gpt2", "f32", 1, 1, 1, false, "muon"},
                      Case{3, "full_shard", "llama", "f32", 1, 1, 1, false, "adamw", "block"}));

TEST(ProgramTraining, AllocatesItsArenaAndWhatItReturns) {
  run_local(2, [](World& w) {
    models::TrainingStep step(config_of({2, "full_shard"}, true), 13, w, Device::cpu());
    for (int s = 0; s < 4; ++s) step.run(s, fill_tiny);
    const Allocator& memory = *RankContext::current().memory(Device::cpu());
    const int64_t before = memory.stats().allocations;
    const auto result = step.run(4, fill_tiny);
    EXPECT_EQ(memory.stats().allocations - before, 2) << "loss and norm";
  }, {.threads_per_rank = 1});
}

// Evaluations, and recorded steps with their leaves, in between.
TEST(ProgramTraining, MayBeInterrupted) {
  std::vector<int32_t> tokens(200);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i % 13);
  const models::SequentialWindows windows(models::Tokens::from_ids(tokens, 13, "squares"), tiny_config().model.context);
  for (const Case& c : {Case{1, "full_shard", "gpt2", "bf16"}, Case{3, "full_shard"}, Case{2, "zero1", "llama", "bf16"},
                        Case{4, "full_shard", "gpt2", "f32", 2, 1, 1, true}}) {
    std::vector<double> seen[2];
    for (const bool compile : {false, true})
      run_local(c.world, [&](World& w) {
        models::TrainingStep step(config_of(c, compile), 13, w, Device::cpu());
        std::vector<double> mine;
        for (int s = 0; s < 7; ++s) {
          models::RecordedStep recorded;
          recorded.capture_leaves = s == 5;
          const auto result = step.run(s, fill_tiny, s >= 2 ? &recorded : nullptr);
          mine.push_back(result.loss.item<double>());
          if (s != 3) mine.push_back(step.evaluate(windows));
          if (s != 5) continue;
          const ValueId wanted[] = {recorded.loss};
          EXPECT_EQ(replay(recorded.tape, [&](ValueId v) { return recorded.leaves.at(v); }, wanted)[0].to_vector(),
                    result.loss.to_vector());
        }
        if (w.rank() == 0) seen[compile] = mine;
      }, {.threads_per_rank = 1});
    EXPECT_EQ(seen[1], seen[0]) << c.world;
  }
}

}  // namespace
}  // namespace sheaf::testing
