// Normalisation over the last dimension: of a tensor, or of the residual stream of pre-norm blocks.
#pragma once

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// The residual stream between pre-norm blocks: x, and the last layer's output, which the next norm adds in the same pass. Moved into
/// the norm, it is freed there.
struct Residual {
  Tensor x;
  Tensor branch = {};  ///< undefined at the start of the stream
  Tensor begins = {};  ///< i32 [B, T], where the document of each token begins; undefined where each sequence is one document
  template <class F>
  void for_each_tensor(F&& f) {
    f(x);
    if (branch) f(branch);
    if (begins) f(begins);
  }
  /// The stream as one tensor.
  void join() {
    if (branch) x = add(x, branch);
    branch = {};
  }
};

struct LayerNormOptions {
  bool bias = true;
  double eps = 1e-5;  ///< added to the variance
};

/// (x - mean) / sqrt(var + eps) * weight + bias over rows of `width` (Ba et al., https://arxiv.org/abs/1607.06450).
struct LayerNorm : Module {
  Parameter weight, bias;
  double eps;

  explicit LayerNorm(int64_t width, const LayerNormOptions& options = {})
      : weight({width}, Init::ones()), eps(options.eps) {
    if (options.bias) bias = Parameter({width}, Init::zeros());
  }
  Tensor forward(const Tensor& x) { return layer_norm(x, weight, bias, eps); }
  /// x + branch, or x if there is no branch, and its norm.
  NormedSum forward(Residual r) {
    return r.branch ? add_layer_norm(r.x, r.branch, weight, bias, eps) : NormedSum{r.x, forward(r.x)};
  }
  SHEAF_FIELDS(weight, bias);
};

/// x / sqrt(mean(x²) + eps) * weight over rows of `width` (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).
struct RMSNorm : Module {
  Parameter weight;
  double eps;

  explicit RMSNorm(int64_t width, double eps = 1e-5) : weight({width}, Init::ones()), eps(eps) {}
  Tensor forward(const Tensor& x) { return rms_norm(x, weight, eps); }
  /// As LayerNorm's.
  NormedSum forward(Residual r) {
    return r.branch ? add_rms_norm(r.x, r.branch, weight, eps) : NormedSum{r.x, forward(r.x)};
  }
  SHEAF_FIELDS(weight);
};

/// RMSNorm of rows xs[i][.., width] that ranks share, as those of a tensor axis share a token's heads, with weights sharded alike:
/// one number per row is sent, its sum of squares, all at once. Rows that are not shared use rms_norm().
std::vector<Tensor> rms_norms_of_shared_rows(const std::vector<Tensor>& xs, const std::vector<const RMSNorm*>& norms);

}  // namespace sheaf::nn
