// A recorded training step, including backward and optimizer, runs again from its tape and the values that leaves, state and inputs had
// before it, after the model and the recording are destroyed.
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

struct Case {
  int world;
  const char* strategy;
  int micro_batches;
  const char* type;
  const char* dtype = "f32";
  int replicas = 1, context = 1;
  bool secondary = false;
  const char* optimizer = "adamw";
  int tensor = 1;
  int experts = 0;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.type << " " << c.dtype << " " << c.strategy << " at " << c.world << " in " << c.replicas << " by " << c.context
       << (c.secondary ? " secondary " : " ") << c.optimizer << " beside " << c.tensor << (c.experts ? " experts" : "");
}

class Replay : public ::testing::TestWithParam<Case> {};

TEST_P(Replay, IsBitwiseEqual) {
  const Case& c = GetParam();
  models::TrainConfig config = tiny_config();
  config.sharding.strategy = c.strategy;
  config.sharding.replicas = c.replicas;
  config.sharding.secondary = c.secondary;
  config.sharding.context = c.context;
  config.sharding.tensor = c.tensor;
  config.train.micro_batches = c.micro_batches;
  config.model.type = c.type;
  config.train.dtype = c.dtype;
  config.train.optimizer = c.optimizer;
  config.model.dropout = 0.1;
  if (c.experts) config.model.experts = 4, config.model.capacity_factor = 1.1, config.model.aux_loss = 0.1;
  if (c.experts) config.sharding.experts = c.experts;
  run_local(c.world, [&](World& world) {
    models::RecordedStep recorded;
    recorded.capture_leaves = true;
    std::vector<float> loss, norm;
    std::map<std::string, std::vector<float>> after;  // master shards by unit, after the step
    {
      models::TrainingStep step(config, config.model.vocab, world, Device::cpu());
      step.run(0, fill_tiny);
      step.run(1, fill_tiny);  // from this step on the order of gathers is known, and they are prefetched
      const auto result = step.run(2, fill_tiny, &recorded);
      loss = result.loss.to_vector();
      norm = result.grad_norm.to_vector();
      for (const auto& unit : units(step.model()))
        for (const FlatBuffer& b : unit->buffers()) after[b.name] = b.shard.to_vector();
    }
    const ValueId wanted[] = {recorded.loss, recorded.grad_norm};
    const auto values = replay(recorded.tape, [&](ValueId v) { return recorded.leaves.at(v); }, wanted);
    EXPECT_EQ(values[0].to_vector(), loss);
    EXPECT_EQ(values[1].to_vector(), norm);
    size_t compared = 0;
    for (ValueId v : recorded.tape.leaves()) {  // the optimizer wrote to the copies
      const auto it = after.find(recorded.tape.leaf_name(v));
      if (it == after.end()) continue;
      ++compared;
      EXPECT_EQ(recorded.leaves.at(v).to_vector(), it->second) << it->first;
    }
    EXPECT_EQ(compared, after.size());
    for (const Finding& f : check_tape(recorded.tape)) ADD_FAILURE() << f.message;
  }, {.threads_per_rank = 1});
}

INSTANTIATE_TEST_SUITE_P(Steps, Replay,
                         ::testing::Values(Case{1, "full_shard", 1, "gpt2"}, Case{3, "full_shard", 1, "gpt2"},
                                           Case{3, "shard_grad_op", 2, "gpt2"}, Case{3, "replicate", 2, "gpt2"},
                                           Case{3, "full_shard", 2, "llama"}, Case{1, "replicate", 2, "llama"},
                                           Case{3, "full_shard", 2, "gpt2", "bf16"},
                                           Case{1, "full_shard", 1, "llama", "bf16"},
                                           Case{3, "zero1", 2, "gpt2", "bf16"},
                                           Case{3, "full_shard", 2, "gpt2", "f16"}, Case{1, "replicate", 1, "llama", "f16"},
                                           Case{4, "full_shard", 2, "gpt2", "bf16", 2},
                                           Case{4, "zero1", 2, "llama", "f32", 2},
                                           Case{4, "full_shard", 2, "llama", "bf16", 1, 2},
                                           Case{4, "full_shard", 2, "gpt2", "bf16", 2, 1, true},
                                           Case{3, "full_shard", 2, "gpt2", "bf16", 3, 1, true},
                                           Case{4, "zero1", 2, "llama", "f32", 2, 1, true},
                                           Case{3, "full_shard", 2, "gpt2", "f32", 1, 1, false, "muon"},
                                           Case{3, "replicate", 1, "llama", "f32", 1, 1, false, "muon"},
                                           Case{4, "zero1", 2, "gpt2", "bf16", 2, 1, false, "muon"},
                                           Case{4, "full_shard", 2, "gpt2", "bf16", 2, 1, true, "muon"},
                                           Case{4, "full_shard", 1, "llama", "f32", 1, 1, false, "muon", 2},
                                           Case{4, "zero1", 2, "gpt2", "bf16", 1, 1, false, "muon", 2},
                                           Case{4, "full_shard", 2, "llama", "f32", 1, 1, false, "adamw", 1, 2},
                                           Case{4, "full_shard", 2, "llama", "bf16", 1, 1, true, "adamw", 1, 2},
                                           Case{3, "zero1", 1, "llama", "f32", 1, 1, false, "adamw", 1, 3}));

}  // namespace
}  // namespace sheaf::testing
