// TokenStream: batches of a token sequence as tensors, sharded over the axes of a mesh.
#pragma once

#include <string>

#include "sheaf/core/tensor.h"
#include "sheaf/distributed/device_mesh.h"
#include "sheaf/models/training_windows.h"

namespace sheaf::models {

struct TokenStreamOptions {
  int64_t batch_per_rank = 32;                ///< sequences; ranks that share sequences count as one
  int64_t context = 1024;                     ///< tokens per sequence
  uint64_t seed = 0;                          ///< of the order of samples
  WindowOrder order = WindowOrder::shuffled;  ///< in epochs, or at random positions
  std::string axis = "data";                  ///< of the mesh, that shards the batch; "": none
  std::string replica_axis = "";              ///< that shards it too, under hybrid sharding; "": none
  std::string expert_axis = "";               ///< that shards it too: the expert axis of ShardOptions; "": none
  std::string context_axis = "";              ///< that shards each sequence: the context axis of ShardOptions; "": none
  bool from_both_ends = false;                ///< its ranks have tokens of both halves, for ContextComm::all_gather
  std::string stage_axis = "";                ///< whose first rank has the tokens and whose last the targets: that of ShardOptions; "": none
  std::string sequence_axis = "";             ///< that shards each sequence, too: the tensor axis of ShardOptions; "": none
};

struct TokenBatch {
  Tensor tokens, targets;    ///< i32[B, T], Shard(0), on axes of the sequence Shard(1), on the rank's device; targets are shifted by one
                             ///< token
  int64_t first_sample = 0;  ///< global index of the batch's first sample: part of a recording's dropout key
};

/// The windows of TrainingWindows in batches. batch() is a pure function of the step, so a resumed run sees the same data as an
/// uninterrupted one, and k ranks see the global batch that one rank with k times the rows would.
class TokenStream {
 public:
  /// Throws DataError for fewer than context + 1 tokens of a source, ConfigError for an unknown axis or an empty batch.
  TokenStream(TokenMixture tokens, const TokenStreamOptions& options, const Mesh& mesh);
  TokenBatch batch(int64_t step) const;
  /// How many targets of that batch count, on all ranks: the divisor of its mean loss (CrossEntropyOptions::divisor, as a tensor, or
  /// divide_by). All of them, except for examples, which a model has to separate by their Tokens::example_end().
  int64_t num_targets(int64_t step) const;

 private:
  TokenStreamOptions options_;
  TrainingWindows windows_;
  Type tokens_, targets_;
};

}  // namespace sheaf::models
