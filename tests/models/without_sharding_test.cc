// Check E: a step's tape without its redistributions is the step of one rank, node by node.
#include <gtest/gtest.h>

#include "sheaf/autograd/passes/without_sharding.h"
#include "sheaf/autograd/tape_diff.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

models::TrainConfig config_of(const std::string& type, const std::string& dtype, const std::string& recompute) {
  models::TrainConfig config = tiny_config();
  config.model = tiny_model(type, 6, 2);
  config.model.dropout = 0.1;
  config.train.batch = 12;
  config.train.micro_batches = 2;
  config.train.dtype = dtype;
  config.train.recompute = recompute;
  return config;
}

Tape erased(const models::TrainConfig& config, int rank, int world) {
  return without_sharding(models::plan_step(config, 13, rank, world, 1, "local").tape);
}

TEST(WithoutSharding, EveryStepIsThatOfOneRank) {
  for (const char* type : {"gpt2", "llama", "untied llama"})
    for (const char* dtype : {"f32", "bf16"})
      for (const char* recompute : {"none", "block"}) {
        const Tape one = erased(config_of(type, dtype, recompute), 0, 1);
        EXPECT_GT(one.num_nodes(), 100);
        const auto expect_one = [&](const models::TrainConfig& config, int world, const char* what) {
          for (const int rank : {0, world - 1}) {
            const auto difference = first_difference(one, erased(config, rank, world));
            EXPECT_FALSE(difference) << type << ' ' << dtype << " recompute " << recompute << ' ' << what << ", rank " << rank << " of "
                                     << world << ": " << difference->to_string();
          }
        };
        for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
          for (const int world : {1, 2, 5}) {
            models::TrainConfig config = config_of(type, dtype, recompute);
            config.sharding.strategy = strategy;
            expect_one(config, world, strategy);
            config.sharding.units = "none";
            expect_one(config, world, "one unit");
            config.train.compile = true;
            config.sharding.memory_budget = int64_t{1} << 40;
            expect_one(config, world, "kept");
          }
        models::TrainConfig config = config_of(type, dtype, recompute);
        config.sharding.replicas = 2;
        expect_one(config, 4, "hybrid");
        config.sharding.secondary = true;
        expect_one(config, 4, "secondary");
        config.sharding = {};
        config.sharding.context = 2;
        expect_one(config, 4, "context");
        config.sharding.context_comm = "all_gather";
        const Tape gathers = [&] {
          models::TrainConfig c = config_of(type, dtype, recompute);
          c.sharding.context_comm = "all_gather";
          return erased(c, 0, 1);
        }();
        for (const int64_t ranks : {2, 4}) {
          config.sharding.context = ranks;
          const auto difference = first_difference(gathers, erased(config, 0, 4));
          EXPECT_FALSE(difference) << type << ' ' << dtype << ' ' << recompute << ' ' << ranks << ": " << difference->to_string();
        }
      }
}

// Packed queries, keys and values are cut into parts on the context axis, and put together again; gradients of a rank's part of the
// convolution's taps stay f32.
TEST(WithoutSharding, LinearAttentionOnAContextAxisIsThatOfOneRank) {
  for (const char* dtype : {"f32", "bf16"})
    for (const char* comm : {"all_to_all", "all_gather"}) {
      models::TrainConfig config = config_of("llama", dtype, "none");
      config.model.linear_key_heads = 2, config.model.linear_value_heads = 6, config.model.full_attention_every = 2;
      config.sharding.context_comm = comm;
      const Tape one = erased(config, 0, 1);
      config.sharding.context = 2;
      for (const int world : {2, 4}) {
        const auto difference = first_difference(one, erased(config, world - 1, world));
        EXPECT_FALSE(difference) << dtype << ' ' << comm << " world " << world << ": " << difference->to_string();
      }
    }
}

TEST(WithoutSharding, TellsStepsApart) {
  const Tape one = erased(config_of("gpt2", "f32", "none"), 0, 1);
  models::TrainConfig config = config_of("gpt2", "f32", "none");
  config.model.dropout = 0.2;
  EXPECT_EQ(first_difference(one, erased(config, 0, 2))->message.substr(0, 9), "[dropout]");
  EXPECT_TRUE(first_difference(one, erased(config_of("gpt2", "f32", "block"), 0, 2)));
  EXPECT_FALSE(first_difference(one, one));
}

}  // namespace
}  // namespace sheaf::testing
