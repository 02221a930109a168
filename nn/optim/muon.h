// Muon: momentum, orthogonalised, for the matrices inside of a model; AdamW for the rest.
//
// Units shard their parameters anywhere, and an orthogonal factor needs a whole matrix; see [Note: matrices on one rank] in
// matrix_batches.h. A step is
//
//   momentum     gradient, momentum -> direction [n]   of each unit, elementwise, in the shard's order
//   all_to_all   direction                             every matrix whole on one rank
//   stack        directions -> [k, M, N]               those of equal shape, of all units: each rank's own; a rank takes
//                                                      no part in those of other owners
//   orthogonalize [k, M, N]                            public ops, without communication
//   unstack
//   all_to_all   direction
//   step         parameters                            elementwise
//
// On one rank both redistributions do nothing; for replicated parameters (strategy replicate) the first is a slice and the second an
// all_gather, so that ranks share the work. All units are sent before the first matrix is computed, and back after the last, so that
// only a rank's total work matters. Replicas (ShardOptions::replica_axis) share a batch further and all_gather the results; ranks of
// a tensor axis collect the blocks of a matrix on one of them.
#pragma once

#include <map>
#include <vector>

#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/matrix_batches.h"
#include "sheaf/nn/optim/orthogonalize.h"

namespace sheaf::optim {

/// The scale of an orthogonal [M, N] update.
enum class MuonScale : uint8_t {
  match_rms,  ///< 0.2 sqrt(max(M, N)): the size of AdamW's updates (Liu et al., https://arxiv.org/abs/2502.16982), so that its learning
              ///< rates and weight decays apply here, too
  original,   ///< sqrt(max(1, M / N)), as in the original, which needs its own learning rate, such as 0.02
};

/// Chooses the matrices that are orthogonalised.
using MatrixRule = std::function<bool(const nn::Parameter&)>;
/// The default: parameters of two dimensions that are not tables. nn::Embedding's are tables, and so are heads marked as such
/// (nn::Parameter::set_table), as those of Gpt and Llama are.
bool hidden_matrices(const nn::Parameter& p);

struct MuonOptions {
  double lr = 1e-3;        ///< learning rate of the matrices, unless step() is told another
  double momentum = 0.95;  ///< in [0, 1)
  bool nesterov = true;
  double weight_decay = 0.1;  ///< of the matrices: decoupled, times the learning rate. Of the others: adamw.weight_decay
  MuonScale scale = MuonScale::match_rms;
  OrthogonalizeOptions orthogonalize = {};
  /// The dtype in which directions are sent and orthogonalised: bf16 halves the bytes and is the original's choice. Absent: the
  /// masters' dtype.
  std::optional<DType> compute_dtype = std::nullopt;
  MatrixRule matrices = hidden_matrices;
  Factors factors = {};     ///< of the matrices; of the others: adamw.factors
  StateOptions state = {};  ///< of the momentum; of the others: adamw.state
  /// For all other parameters. Their learning rate follows the one passed to step(), in the ratio of adamw.lr to lr.
  AdamWOptions adamw = {};
};

/// Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), for each matrix p [M, N] with gradient g and clip scale c:
///
///   b = momentum b + c g,   d = c g + momentum b if nesterov, else b
///   p = p - lr (scale orthogonalize(d) + weight_decay p)
///
/// A matrix whose cut names parts (nn::Parameter::set_cut: queries, keys and values of one projection), or set_matrices() does, is orthogonalised part by
/// part, as separate projections would be: their storage in one parameter does not matter. Matrices have one state tensor and other
/// parameters two; neither depends on how they are sharded.
///
/// Up to rounding, results depend neither on how masters are sharded nor over which axes. ConfigError for a parameter that `matrices`
/// chooses and that does not have two dimensions, and for options out of range.
class Muon final : public Optimizer {
 public:
  explicit Muon(std::span<const nn::Parameter> parameters, const MuonOptions& options = {});
  explicit Muon(const std::vector<nn::Parameter>& parameters, const MuonOptions& options = {})
      : Muon(std::span(parameters), options) {}
  explicit Muon(nn::Module& module, const MuonOptions& options = {}) : Muon(module.parameters(), options) {}

  /// One for each of shards().
  const std::vector<Bundle>& bundles() const { return bundles_; }

 private:
  std::vector<double> scalars(const StepOptions& options, int64_t step) const override;
  bool corrects_bias() const override { return true; }
  void update(ShardState& shard, const Tensor& scalars) override;
  void update_all(std::span<ShardState* const> shards, const Tensor& scalars) override;
  void add_shard(const ShardState& all, std::vector<Matrix> matrices, std::vector<int> leaves, std::span<const kernels::Segment> of_leaf);
  const Bundle& bundle_of(const ShardState& shard) const;
  Tensor direction(ShardState& shard, const Bundle& bundle, const Tensor& scalars) const;
  void move(ShardState& shard, const Bundle& bundle, Tensor direction, const Tensor& scalars) const;
  void orthogonalize_batch(const Batch& batch, std::vector<Tensor>& held) const;

  MuonOptions options_;
  std::vector<Bundle> bundles_;
  std::map<std::vector<int>, std::vector<Batch>> batches_;  // by the bundles that have a gradient: of all units, or of one
};

}  // namespace sheaf::optim
