// In which order a stage of a pipeline takes micro-batches, and which blocks are where.
#pragma once

#include <cstdint>
#include <vector>

namespace sheaf {

/// One turn of a stage: it records the forward of a micro-batch, or differentiates it. Of stages that micro-batches go round
/// several times it is about one part of either.
struct Turn {
  bool backward;
  int64_t micro_batch;
  int64_t run = 0;  ///< which of the stage's runs of blocks
  bool operator==(const Turn&) const = default;
};

/// One forward, one backward (1F1B; Harlap et al., https://arxiv.org/abs/1806.03377, and Narayanan et al.,
/// https://arxiv.org/abs/2104.04473): of `stages`, stage `stage` begins with as many forwards as there are stages from it on,
/// then each backward is followed by the forward that it makes room for. A stage holds the activations of that many micro-batches, of a single stage one; of
/// its time it waits (stages - 1) / (micro_batches + stages - 1). Stages take turns of different micro-batches: forwards may
/// only send values on, to later stages, and not to all of them at once.
///
/// With several `runs` (interleaved 1F1B; section 2.2.2 of the second paper) each stage has as many runs of blocks, and
/// micro-batches, whose number is a multiple of the stages', go round the stages that often. A turn is shorter, so a stage
/// waits (stages - 1) / (micro_batches runs + stages - 1) of its time; it holds what it computed in up to
/// (runs + 1) stages - 2 stage - 1 turns, and sends `runs` times as much. Throws ConfigError for what cannot be.
std::vector<Turn> one_forward_one_backward(int stage, int stages, int64_t micro_batches, int64_t runs = 1);

/// The stage of block `block` of so many: in their order, as many in each run of each stage.
int stage_of_block(int64_t block, int64_t blocks, int stages, int64_t runs = 1);
/// A stage's forward of run `run` ends before this block, where its next run begins, or after the last: between its own
/// blocks it records what other stages compute.
int64_t end_of_run(int64_t run, int stage, int64_t blocks, int stages, int64_t runs = 1);

}  // namespace sheaf
