#include "sheaf/models/stage_cut.h"

#include "sheaf/core/error.h"
#include "sheaf/models/flops.h"

namespace sheaf::models {

double head_in_blocks(const TrainConfig& config, int64_t vocab) {
  if (config.sharding.pipeline_head >= 0) return config.sharding.pipeline_head;
  TrainConfig c = config;
  if (c.model.vocab == 0) c.model.vocab = vocab;
  const auto [block, head, mtp] = flops_of_parts(c);
  // A block's forward once more: two products for each parameter in addition to six.
  const double again = c.train.recompute == "block" && c.train.recompute_blocks < 0 ? 8.0 / 6 : 1;
  return static_cast<double>(1 + c.model.mtp_layers) * head / (block * again) + mtp / block;
}

std::vector<Turn> turns_of(const TrainConfig& config, int stage, int stages, int64_t micro_batches) {
  const std::string& schedule = config.sharding.pipeline_schedule;
  if (schedule == "zero_bubble") return zero_bubble(stage, stages, micro_batches, config.sharding.pipeline_runs);
  check<ConfigError>(schedule == "1f1b", "[train] sharding.pipeline_schedule is ", schedule, ", not 1f1b or zero_bubble");
  return one_forward_one_backward(stage, stages, micro_batches, config.sharding.pipeline_runs);
}

StageCut stage_cut(const TrainConfig& config, int64_t vocab) {
  const int64_t stages = config.sharding.pipeline, runs = config.sharding.pipeline_runs, blocks = config.model.layers;
  if (stages == 1 && runs == 1) return StageCut(std::vector{blocks}, 1);
  if (blocks < stages * runs)
    fail<ConfigError>("[train] sharding.pipeline ", stages, runs > 1 ? str(" with sharding.pipeline_runs ", runs) : "",
                      ": the model has ", blocks, blocks == 1 ? " block" : " blocks");
  return StageCut(blocks, static_cast<int>(stages), runs, head_in_blocks(config, vocab));
}

}  // namespace sheaf::models
