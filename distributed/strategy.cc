#include "sheaf/distributed/strategy.h"

#include "sheaf/core/error.h"

namespace sheaf {

std::string_view name(Strategy s) {
  constexpr std::string_view kNames[] = {"none", "replicate", "zero1", "shard_grad_op", "full_shard"};
  return kNames[static_cast<int>(s)];
}

Strategy strategy_from(std::string_view text) {
  for (Strategy s : {Strategy::replicate, Strategy::zero1, Strategy::shard_grad_op, Strategy::full_shard})
    if (text == name(s)) return s;
  if (text == "hybrid")
    fail<ConfigError>("[shard] strategy 'hybrid' is full_shard (or another that shards) on one axis of a mesh and replicas on ",
                      "another: ShardOptions::replica_axis, --sharding.replicas");
  if (text == "tensor_parallel")
    fail<ConfigError>("[shard] strategy '", text, "' is a tensor axis of the mesh together with one of the strategies full_shard, "
                      "shard_grad_op, zero1 and replicate: ShardOptions::tensor_axis, --sharding.tensor");
  if (text == "secondary_shard")
    fail<ConfigError>("[shard] strategy '", text, "' is a replica axis along which masters are cut as well, together with one of the "
                      "strategies full_shard, shard_grad_op and zero1: ShardOptions::secondary, --sharding.secondary");
  fail<ConfigError>("[shard] unknown strategy '", text, "'; known: full_shard, shard_grad_op, zero1, replicate");
}

}  // namespace sheaf
