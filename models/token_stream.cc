#include "sheaf/models/token_stream.h"

#include <utility>

#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/models/sample_block.h"

namespace sheaf::models {

TokenStream::TokenStream(TokenMixture tokens, const TokenStreamOptions& options, const Mesh& mesh)
    : options_(options), windows_(std::move(tokens), options.context, options.seed, options.order) {
  check<ConfigError>(options.batch_per_rank > 0, "[token_stream] batch_per_rank is ", options.batch_per_rank);
  int64_t batch = options.batch_per_rank;
  Layout layout(mesh.spec);
  for (const std::string& name : {options.axis, options.replica_axis, options.expert_axis}) {
    if (name.empty()) continue;
    const int axis = mesh.spec->axis(name);
    check<ConfigError>(!layout[axis].is_shard(), "[token_stream] axis '", name, "' is named twice");
    batch *= mesh.spec->size(axis);
    layout[axis] = Placement::shard(0);
  }
  check<ConfigError>(!options.from_both_ends || !options.context_axis.empty(),
                     "[token_stream] from_both_ends says how context_axis cuts sequences, and there is none");
  for (const std::string& name : {options.context_axis, options.sequence_axis}) {
    if (name.empty()) continue;
    const int axis = mesh.spec->axis(name);
    check<ConfigError>(!layout[axis].is_shard(), "[token_stream] axis '", name, "' cuts the batch already");
    const bool both_ends = options.from_both_ends && name == options.context_axis;
    layout[axis] = both_ends ? Placement::shard(OwnershipMap::from_both_ends(1, options.context, mesh.spec->size(axis))) : Placement::shard(1);
  }
  tokens_ = targets_ = {kI32, {batch, options.context}, layout};
  if (options.stage_axis.empty()) return;
  const int axis = mesh.spec->axis(options.stage_axis);
  check<ConfigError>(!layout[axis].is_shard(), "[token_stream] axis '", options.stage_axis, "' cuts the batch already");
  tokens_.layout[axis] = Placement::on(0);
  targets_.layout[axis] = Placement::on(mesh.spec->size(axis) - 1);
}

TokenBatch TokenStream::batch(int64_t step) const {
  TokenBatch batch{Tensor::empty(tokens_), Tensor::empty(targets_), step * tokens_.shape[0]};
  const auto fill = [&](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    windows_.fill(first, count, inputs, targets);
  };
  fill_block(batch.first_sample, fill, batch.tokens, batch.targets);
  const Device device = RankContext::current().device;
  return {batch.tokens.to(device), batch.targets.to(device), batch.first_sample};
}

int64_t TokenStream::num_targets(int64_t step) const {
  const int64_t rows = tokens_.shape[0];
  return windows_.num_targets(step * rows, rows);
}

}  // namespace sheaf::models
