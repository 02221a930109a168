// Which blocks a pipeline stage has, and the order in which it processes micro-batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sheaf {

/// One turn of a stage: it records the forward of a micro-batch, or differentiates it. If micro-batches pass through the stages
/// several times, it covers one part of either.
struct Turn {
  enum Kind : uint8_t {
    forward,
    backward,         ///< all of it
    backward_input,   ///< without backward_weight's part: Recording::backward() with defer_weights
    backward_weight,  ///< Recording::backward_weights()
  };
  Kind kind;
  int64_t micro_batch;
  int64_t run = 0;  ///< which of the stage's runs of blocks
  bool operator==(const Turn&) const = default;
};

/// One forward, one backward (1F1B; Harlap et al., https://arxiv.org/abs/1806.03377, and Narayanan et al.,
/// https://arxiv.org/abs/2104.04473): stage `stage` of `stages` begins with as many forwards as there are stages from it on, then
/// each backward is followed by the forward that it makes room for. A stage holds the activations of that many micro-batches, a
/// single stage those of one; it idles for (stages - 1) / (micro_batches + stages - 1) of its time. Stages work on different
/// micro-batches at a time: a forward may only send values to later stages, and not to all of them at once.
///
/// With several `runs` (interleaved 1F1B; section 2.2.2 of the second paper) each stage has as many runs of blocks, and
/// micro-batches, whose number is a multiple of the stages', pass through the stages that often. A turn is shorter, so a stage idles
/// for (stages - 1) / (micro_batches runs + stages - 1) of its time; it holds the activations of up to (runs + 1) stages - 2 stage -
/// 1 turns, and sends `runs` times as much. Throws ConfigError for impossible arguments.
std::vector<Turn> one_forward_one_backward(int stage, int stages, int64_t micro_batches, int64_t runs = 1);

/// The same, except that stages send gradients of inputs before they compute those of weights (ZB-H1; Qi et al., section 2.2 of
/// https://arxiv.org/abs/2401.10241), which fill the time in which a stage would idle. Stage s computes them s turns late, so that
/// each stage holds the results of as many forwards as the first one does; otherwise turns are in the same order. If a forward, the
/// gradients of its inputs and those of its weights take f, b and w, and w is not above f, a stage idles for (stages - 1) (f + b - w)
/// / runs in a step, instead of (stages - 1) (f + b + w) / runs. Throws the same errors.
std::vector<Turn> zero_bubble(int stage, int stages, int64_t micro_batches, int64_t runs = 1);

/// Which blocks each stage has: they are cut in order into runs, equally many per stage, which are assigned to the stages
/// round-robin.
class StageCut {
 public:
  /// Runs that take equally long if all blocks do, and if the head and loss after the last one take as long as `head` blocks. Ties
  /// give later stages more blocks: earlier ones hold more micro-batches. Throws ConfigError unless there is a block for each run.
  explicit StageCut(int64_t blocks, int stages = 1, int64_t runs = 1, double head = 0);
  /// The number of blocks in each run of each stage, one after another.
  StageCut(const std::vector<int64_t>& blocks, int stages);

  int64_t num_blocks() const { return begins_.back(); }
  /// The first block of the `index`-th run, counting all stages' runs in order; after the last, num_blocks().
  int64_t begin(int64_t index) const { return begins_[static_cast<size_t>(index)]; }
  int64_t num_runs() const { return static_cast<int64_t>(begins_.size()) - 1; }  ///< of all stages
  int stage_of(int64_t block) const;
  /// A stage's forward of run `run` ends before this block, where its next run begins, or after the last: between its own blocks it
  /// records (without computing) other stages' blocks.
  int64_t end_of_run(int64_t run, int stage) const;
  /// The ratio of the longest run's time to the mean: 1 if all are equal.
  double imbalance(double head = 0) const;
  /// "8, 9, 9 and 6": the runs of all stages, one after another.
  std::string to_string() const;

 private:
  int stages_;
  std::vector<int64_t> begins_;
};

}  // namespace sheaf
