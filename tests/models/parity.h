// Helpers to compare models that were trained in different ways: whole parameters and gradients, assembled from the ranks' parts.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sheaf/autograd/tape.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/models/training_step.h"
#include "sheaf/nn/shard.h"

namespace sheaf::testing {

/// Whole tensors by name, assembled by all ranks of a job.
class Whole {
 public:
  /// Adds this rank's part of every parameter, or of its gradient. Elements that several ranks hold must agree: those that differ become
  /// NaN.
  void collect(nn::Module& module, bool gradients) {
    for (const auto& unit : units(module)) {
      if (gradients) unit->reduce_waiting(), unit->complete_reduction();
      for (FlatBuffer& buffer : unit->buffers()) {
        if (gradients && !buffer.trainable) continue;
        const std::vector<double> local = (gradients ? buffer.grad : buffer.shard).to_vector<double>();
        std::lock_guard lock(mutex_);
        for (const LocalPiece& piece : unit->pieces(buffer)) {
          const LeafSpec& leaf = unit->leaves()[piece.leaf];
          std::vector<double>& whole = values_[leaf.name];
          std::vector<bool>& known = known_[leaf.name];
          whole.resize(leaf.shape.numel());
          known.resize(whole.size());
          for (int64_t i = 0; i < piece.runs.numel(); ++i) {
            const int64_t at = piece.runs.at(i);
            const double value = local[piece.shard_offset + i];
            whole[at] = known[at] && whole[at] != value ? NAN : value;
            known[at] = true;
          }
        }
      }
    }
  }
  const std::map<std::string, std::vector<double>>& values() const { return values_; }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<double>> values_;
  std::map<std::string, std::vector<bool>> known_;
};

using Values = std::map<std::string, std::vector<double>>;

/// Largest |a − b| over all tensors; throws if names or sizes differ.
double max_difference(const Values& a, const Values& b);
double max_magnitude(const Values& a);
/// a − b| / |a|, over all elements.
double relative_difference(const Values& a, const Values& b);

/// The parts of all parameters that this rank holds, concatenated.
std::vector<float> shards(nn::Module& module);

/// A tiny GPT and its training options: 3 layers, sizes that nothing divides.
models::TrainConfig tiny_config();

/// The same for several ranks: with dropout, in two micro-batches, under `strategy`.
models::TrainConfig tiny_rank_config(const std::string& strategy);

/// Deterministic batches for tiny_config().
void fill_tiny(int64_t first, int64_t count, int32_t* inputs, int32_t* targets);
/// The same, or with data.examples batches in which not all targets count, in some rows none.
models::FillBatch tiny_data(const models::TrainConfig& config);
/// Options for a step that reads them.
models::TrainingStepOptions tiny_options(const models::TrainConfig& config, DType masters = kF32);

struct TrainedRun {
  Values parameters;
  std::vector<float> losses, norms;
};
/// Trains `steps` steps on `world` local ranks of one thread each; on a GPU, they share it.
TrainedRun train_tiny(const models::TrainConfig& config, int world, int steps,
                      const std::function<void(models::TrainingStep&)>& inspect = {}, Device device = {});
/// Parameters after `steps` steps in f64 on `world` local ranks.
Values parameters_f64(const models::TrainConfig& config, int world, int steps);
/// EXPECTs the same losses, norms and parameters, bit for bit.
void expect_same_bits(const TrainedRun& a, const TrainedRun& b);
/// Trains `config`, with strategy full_shard, `steps` steps on `world` local ranks: EXPECTs a decreasing loss, and the same bits with the
/// other strategies, with block or selective recomputation in one unit, and as a program.
void expect_ways_change_no_bit(const models::TrainConfig& config, int world, int steps);
/// Trains `config`, which has no stages, on one rank and in `stages` stages, four steps each: EXPECTs the same losses and parameters, up to
/// rounding.
void expect_stages_of_one_rank(models::TrainConfig config, int64_t stages);
/// tiny_config()'s model (or another with its context and vocabulary) in f64 on the CPU or a GPU, with a unit per block, sharded over
/// `mesh`. Its axis "replica", if any, replicates the model ("secondary": with secondary shards); "context" cuts sequences ("gathered": by
/// ContextComm::all_gather), and also parameters if there is no axis "data"; "expert" cuts experts, and also the other parameters if "data"
/// is one rank; "model" cuts layers; and the chain "stage" has successive blocks. `prepare` gets the model and its shard options, before it
/// is sharded.
std::unique_ptr<models::Decoder> tiny_model_f64(const Mesh& mesh, ShardOptions options, Device device = {}, uint64_t seed = 5,
                                                const models::ModelConfig& config = tiny_config().model,
                                                const std::function<void(models::Decoder&, const ShardOptions&)>& prepare = {});
/// Samples [first, first + rows) of fill_tiny, cut over all axes of `mesh`: sequences over "context" or "gathered" and "model", rows over
/// the others; with stages, tokens are on the first and targets on the last one.
struct TinyBatch { Tensor tokens, targets; };
TinyBatch tiny_batch(const Mesh& mesh, int64_t first, int64_t rows, Device device = {});

/// The model of tiny_config() as a "gpt2", "llama" or "untied llama" (which has a separate head) of two blocks, with heads of width 4 and
/// hidden widths that ranks share unevenly. The number of key heads is for Llama. A "latent" is an untied one with latent attention, a
/// "latent without queries" one that has no latent for queries.
models::ModelConfig tiny_model(const std::string& type, int64_t heads, int64_t key_heads);

/// The last of them with mixtures of five experts, three per token: ranks share them unevenly.
models::ModelConfig tiny_mixture(double capacity_factor = 0, double aux_loss = 0.1);

/// Like DeepSeek-V3's: six experts in three parts, two of which serve a token, chosen by sigmoids and a bias that a step moves by 0.02, and
/// a shared expert; the first block has an MLP.
models::ModelConfig tiny_biased_mixture(double capacity_factor = 0);

/// Like gpt-oss's: attention with sinks, a window in every second block and biases everywhere; seven experts, two per token, so that one
/// rank has them in one part, and two ranks have a part each; gates often exceed their limit.
models::ModelConfig tiny_gpt_oss(int64_t heads = 6, int64_t key_heads = 3);

/// An untied Llama of three blocks, the first two with linear attention, with two value heads per key head.
models::ModelConfig tiny_linear_attention(int64_t key_heads = 6);

/// The same like Qwen3-Next's: attention is gated and rotates a part of each head, and there are five experts, two per token, in addition
/// to a gated shared one.
models::ModelConfig tiny_qwen3_next(int64_t key_heads = 6);

/// Five blocks with dropout in four micro-batches, on a pipeline of `stages` stages, which share the blocks unevenly.
models::TrainConfig tiny_pipeline(int64_t stages, const std::string& type = "untied llama", const std::string& strategy = "full_shard");

using Axes = std::vector<MeshSpec::Axis>;
int num_ranks(const Axes& axes);
/// A mesh by the sizes of its axes; 0: no such axis.
struct MeshSizes {
  int replicas, data, context, model;
  Axes axes() const;
  friend void PrintTo(const MeshSizes& s, std::ostream* out) {
    *out << s.replicas << " x " << s.data << " x " << s.context << " x " << s.model;
  }
};

/// The gradients of a batch of `rows` rows in f64.
Values gradients_f64(const Axes& axes, const std::string& strategy, int64_t rows, Device device = {},
                     const models::ModelConfig& config = tiny_config().model);
inline Values gradients_f64(int world, const std::string& strategy, int64_t rows, Device device = {}) {
  return gradients_f64(Axes{{"data", world}}, strategy, rows, device);
}

/// EXPECTs that on `axes` they equal those of one rank, to 1e-12 of the largest.
void expect_gradients_of_one_rank(const Axes& axes, const std::string& strategy, int64_t rows,
                                  const models::ModelConfig& config = tiny_config().model);

/// For a tiny_model_f64(): draws the initial values of a direction, also for its norms and biases.
void draw_all_parameters(models::Decoder& model, const ShardOptions& options);
/// Multiplies the matrices of a materialized model, so that what it generates greedily depends on all of them: initial ones of 0.02 hardly
/// matter beside the last token. Collective.
void magnify(nn::Module& model, double factor = 25);
/// The product of that loss's Hessian with a direction, drawn with another seed; also the direction, their inner product, and the loss's
/// derivative along it, by derivative_along() and from the gradient.
struct HessianProducts {
  Values product, direction;
  double along = 0, slope = 0, slope_by_gradient = 0;
};
HessianProducts hessian_f64(const Axes& axes, const std::string& strategy, int64_t rows, const models::ModelConfig& config = tiny_config().model,
                            Device device = {});

/// Bytes communicated by the collectives of a step's tape, without the update: by name and axis, "all_gather data".
struct Traffic { int64_t count = 0, bytes = 0; };
std::map<std::string, Traffic> traffic(const Tape& tape);

/// EXPECTs that the third step of `config` (with train.compile the fourth) takes the bytes of its plan on each of `world` local ranks, and
/// that their tapes pass all checks (in a pipeline all except the collectives'). On every rank `inspect`, if given, gets its tape.
void expect_planned_tapes(const models::TrainConfig& config, int world,
                          const std::function<void(World&, const Tape&)>& inspect = {});

/// EXPECTs that a model and its AdamW (or Muon), saved in `folder` by ranks on axes `from` after a step, continue alike, to 1e-12 in f64,
/// on each of the meshes `to`.
void expect_checkpoint_moves(const std::string& folder, const Axes& from, const std::vector<Axes>& to,
                             const models::ModelConfig& config = tiny_config().model, bool muon = false);

/// EXPECTs that the results of a model of 13 tokens for a prompt and then token by token, with a cache, are bitwise in f64 those for all
/// tokens at once.
void expect_cached_logits(const models::ModelConfig& config);

/// The message of the ConfigError that planning a step of `config` for `world` ranks throws; "" if it throws none.
std::string refusal(int world, const models::TrainConfig& config);

}  // namespace sheaf::testing
