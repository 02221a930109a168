// StepInputs: the data that change from step to step (samples, the state that keys random numbers, the optimizer's scalars), in one
// block of memory. One copy brings it to a GPU, to the same address every time: a captured step finds the inputs of the next one
// there.
#pragma once

#include <vector>

#include "sheaf/core/tensor.h"
#include "sheaf/distributed/device_mesh.h"
#include "sheaf/models/sample_block.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

class StepInputs {
 public:
  struct MicroBatch {
    Tensor tokens, targets;  ///< i32 [rows, context], this rank's block
    Tensor random_state;     ///< i64 [3]: see Recording::random_state
  };

  /// Memory on `device` for a step of `config`, whose optimizer reads `scalars` numbers. All axes of the mesh shard the rows, except
  /// "context" and "model", which shard the sequences, and "stage": tokens are on its first rank, targets on its last.
  StepInputs(const TrainConfig& config, const Mesh& mesh, Device device, int64_t scalars);

  /// Samples [first, first + batch) of the run, by micro-batch.
  void set_samples(int64_t first, const FillBatch& fill);
  /// All inputs of step `step`, whose first sample is `first`; `targets` of its targets count, on all ranks.
  void set_step(int64_t step, int64_t first, const FillBatch& fill, const std::vector<double>& scalars, double targets);

  int64_t num_micro_batches() const { return static_cast<int64_t>(samples_.size()); }
  int64_t num_rows() const;  ///< of all micro-batches, on all ranks
  const MicroBatch& micro_batch(int64_t i) const { return device_.micro_batches[i]; }
  /// One micro-batch's share of the memory that holds all of them.
  int64_t bytes_of_micro_batch(int64_t i) const;
  const Tensor& scalars() const { return device_.scalars; }
  /// f64: targets of the step that count.
  const Tensor& num_targets() const { return device_.num_targets; }

 private:
  struct Block {
    Tensor bytes;
    std::vector<MicroBatch> micro_batches;
    Tensor scalars, num_targets;
  };
  Block make(Device device) const;
  void write_samples(int64_t first, const FillBatch& fill);
  void send();

  struct Samples {
    Type tokens, targets;
  };
  std::vector<Samples> samples_;  // of the micro-batches
  int64_t scalar_count_, seed_;
  Block device_;  // in the memory of the device that computes
  Block host_;    // in the host's: the same block if that computes
};

}  // namespace sheaf::models
