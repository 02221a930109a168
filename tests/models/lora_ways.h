// Ways to shard and to store a model that is fine-tuned with adapters.
#pragma once

#include "sheaf/models/train_config.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {

struct Way {
  const char* name;
  int world;
  void (*set)(models::ShardingConfig&);
};
inline const Way kLoraWays[] = {
    {"full_shard", 3, [](models::ShardingConfig&) {}},
    {"shard_grad_op", 4, [](models::ShardingConfig& s) { s.strategy = "shard_grad_op"; }},
    {"zero1", 2, [](models::ShardingConfig& s) { s.strategy = "zero1"; }},
    {"replicate", 2, [](models::ShardingConfig& s) { s.strategy = "replicate"; }},
    {"hybrid", 4, [](models::ShardingConfig& s) { s.replicas = 2; }},
    {"secondary", 4, [](models::ShardingConfig& s) { s.replicas = 2, s.secondary = true; }},
    {"tensor", 4, [](models::ShardingConfig& s) { s.tensor = 2; }},
    {"tensor_of_three", 3, [](models::ShardingConfig& s) { s.tensor = 3, s.strategy = "zero1"; }},
    {"tensor_of_four", 4, [](models::ShardingConfig& s) { s.tensor = 4; }},  // more than Llama's key heads
    {"context", 5, [](models::ShardingConfig& s) { s.context = 5; }},
    {"stages", 4, [](models::ShardingConfig& s) { s.pipeline = 2; }},
    {"zero_bubble", 2, [](models::ShardingConfig& s) { s.pipeline = 2, s.pipeline_schedule = "zero_bubble"; }},
};

/// EXPECTs that three ranks train `c`, with dropout and in this dtype, to the same bits however much of it they keep from the forward to
/// the backward: with different strategies, recomputation and programs.
inline void expect_bits_of_all_holdings(models::TrainConfig c, const char* dtype, int steps) {
  c.train.dtype = dtype;
  c.model.dropout = 0.1;
  const TrainedRun expected = train_tiny(c, 3, steps);
  for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
    models::TrainConfig other = c;
    other.sharding.strategy = strategy;
    expect_same_bits(expected, train_tiny(other, 3, steps));
  }
  for (const char* recompute : {"block", "selective"}) {
    models::TrainConfig other = c;
    other.train.recompute = recompute;
    expect_same_bits(expected, train_tiny(other, 3, steps));
    other.train.compile = true;
    expect_same_bits(expected, train_tiny(other, 3, steps));
  }
}

}  // namespace sheaf::testing
