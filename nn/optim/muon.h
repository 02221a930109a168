// Muon: momentum, orthogonalised, for the matrices inside of a model; AdamW for the rest.
//
// [Note: matrices on one rank] Units cut their parameters anywhere, and an orthogonal factor takes a whole matrix. What is
// needed in between is two redistributions, nodes of the tape like any other; a step is
//
//   momentum     gradient, momentum -> direction [n]   Shard(0 uneven)   as the unit's shard has its matrices: elementwise
//   all_to_all   direction                             Shard(0 owned)    every matrix whole on one rank
//   orthogonalize x [1, M, N] of each matrix           Shard(0 uneven)   a row of the cut is a matrix: the owner has it all,
//                                                                        the others have none; public ops, nothing is sent
//   all_to_all   direction                             Shard(0 uneven)
//   step         parameters                            Shard(flat)       elementwise
//
// On one rank both are nothing; of parameters that each rank holds (strategy replicate) the first is a slice and the
// second an all_gather, so that ranks share the work. Owners follow from shapes alone: each matrix, the costliest first,
// goes to the rank with the least to do so far, over all units. All units are sent before the first matrix is computed, and
// back after the last, so that what counts is a rank's sum. Replicas (ShardOptions::replica_axis) compute the same.
#pragma once

#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/orthogonalize.h"

namespace sheaf::optim {

/// What an orthogonal [M, N] is multiplied with.
enum class MuonScale : uint8_t {
  match_rms,  ///< 0.2 sqrt(max(M, N)): the size of AdamW's updates (Liu et al., https://arxiv.org/abs/2502.16982), so that its
              ///< learning rates and weight decays serve here, too
  original,   ///< sqrt(max(1, M / N)), as in the original, whose learning rate is its own, such as 0.02
};

/// Chooses the matrices that are orthogonalised.
using MatrixRule = std::function<bool(const nn::Parameter&)>;
/// The default: parameters of two dimensions that are no tables: nn::Embedding's are, and heads that say so
/// (nn::Parameter::set_table), as those of Gpt and Llama do.
bool hidden_matrices(const nn::Parameter& p);

struct MuonOptions {
  double lr = 1e-3;            ///< learning rate of the matrices, unless step() is told another
  double momentum = 0.95;      ///< in [0, 1)
  bool nesterov = true;
  double weight_decay = 0.1;   ///< of the matrices: decoupled, times the learning rate. Of the others: adamw.weight_decay
  MuonScale scale = MuonScale::match_rms;
  OrthogonalizeOptions orthogonalize = {};
  /// What is sent and orthogonalised in: bf16 halves the bytes and is the original's choice. Absent: the masters' dtype.
  std::optional<DType> compute_dtype = std::nullopt;
  MatrixRule matrices = hidden_matrices;
  DecayRule decays = decays_matrices;  ///< of the matrices
  /// Of all other parameters. Their learning rate follows the one that step() is told, in the ratio of adamw.lr to lr.
  AdamWOptions adamw = {};
};

/// Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), for each matrix p [M, N] with gradient g:
///
///   b = momentum b + clip_scale g,   d = clip_scale g + momentum b if nesterov, else b
///   p = p - lr (scale orthogonalize(d) + weight_decay p)
///
/// A matrix whose cut names parts (nn::Parameter::set_cut: queries, keys and values of one projection) is orthogonalised
/// part by part, as the separate projections that it stands for would be: that they are one parameter is how it is laid
/// out, no mathematics. Of the state, matrices have one tensor and the others two; none of it depends on how ranks cut it.
///
/// Masters may be whole or cut over one axis of the mesh. ConfigError for a parameter that a tensor axis cuts
/// (ShardOptions::tensor_axis), for secondary shards, for one that `matrices` chooses and that has not two dimensions, and
/// for options out of range.
class Muon final : public Optimizer {
 public:
  explicit Muon(std::span<const nn::Parameter> parameters, const MuonOptions& options = {});
  explicit Muon(const std::vector<nn::Parameter>& parameters, const MuonOptions& options = {})
      : Muon(std::span(parameters), options) {}
  explicit Muon(nn::Module& module, const MuonOptions& options = {}) : Muon(module.parameters(), options) {}

  struct Matrix {
    int leaf;                      ///< of its unit
    int64_t rows, cols;
    std::vector<int64_t> columns;  ///< of the parts that it has side by side
    int owner = 0;                 ///< the rank, of the axis that shares the work
  };
  /// Matrices that are sent together, one after another; of a unit's other parameters there are none.
  struct Bundle {
    std::vector<Matrix> matrices;
    int axis = -1;                                ///< of the mesh, that shares the work
    Layout at_rest, owned;                        ///< of all elements, [n], as the shard has them and as owners do
    const std::vector<int64_t>* parts = nullptr;  ///< this rank's; see muon.cc
  };
  /// One for each of shards().
  const std::vector<Bundle>& bundles() const { return bundles_; }

 private:
  std::vector<double> scalars(const StepOptions& options, int64_t step) const override;
  void update(ShardState& shard, const Tensor& scalars, const Tensor& clip_scale) override;
  void update_all(std::span<ShardState* const> shards, const Tensor& scalars) override;
  void add_shard(const ShardState& all, std::vector<Matrix> matrices, std::vector<int> leaves, const std::vector<bool>& decays);
  void choose_owners();
  Tensor direction(ShardState& shard, const Bundle& bundle, const Tensor& scalars) const;
  Tensor orthogonal(const ShardState& shard, const Bundle& bundle, const Tensor& directions) const;

  MuonOptions options_;
  std::vector<Bundle> bundles_;
};

}  // namespace sheaf::optim
