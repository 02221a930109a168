// The language-model head and its loss as one kernel: logits = x Wᵀ exist only for a chunk of rows at a time.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/table_part.h"

namespace sheaf::kernels {

/// Which rows count, how their logits are capped, and the z-loss.
struct HeadRules {
  int64_t ignore_index;  ///< rows with this target add 0
  double softcap;        ///< logits l become softcap tanh(l / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118); 0: no cap
  double z_loss;         ///< z_loss lse² is added to each row's loss (PaLM, https://arxiv.org/abs/2204.02311, section 5)
  HeadRules(int64_t ignored, double cap = 0, double z = 0) : ignore_index(ignored), softcap(cap), z_loss(z) {}  // NOLINT: implicit by design
};

/// One loop over the rows implements all of the functions below; these are its inputs and results per row. Null: not needed, or not
/// given.
struct RowValues {
  const View *loss = nullptr, *target_logits = nullptr;  ///< summed over all rows; of each row
  const View* lse = nullptr;                             ///< of each row: a result, or given
  bool compute_lse = true;
  const View* dloss = nullptr;  ///< gradient of the loss; null: `constant`
  double constant = 1;
  const View *dlse = nullptr, *dtarget = nullptr;  ///< gradients of each row's values, if the weight is a part of the vocabulary
  TablePart part;
};

namespace cpu {

/// Rows whose logits exist at the same time: about 64 MB of logits, 64 to 2,048 rows. Depends on the vocabulary alone.
int64_t linear_cross_entropy_chunk(int64_t vocabulary);

/// loss[] = the sum over rows of cross-entropy(x[.., C] · weight[V, C]ᵀ, targets[..]); rows whose target is
/// rules.ignore_index add 0; another target outside [0, V) is a DataError. Row losses in f32
/// are summed in row order in f64. lse[..] is for the backward pass. x, weight: one floating dtype; targets: any
/// index type; loss and lse: f32 (f64 for f64), lse stored dense.
size_t linear_cross_entropy_workspace(const View& x, const View& weight);
void linear_cross_entropy(const View& x, const View& weight, const View& targets,
                          HeadRules rules, const View& loss, const View& lse,
                          Workspace workspace);

/// dx[.., C] and dweight[V, C] of `dloss[]` times the loss, stored; View{} for one that is not needed. Recomputes the logits. dweight
/// may be f32 if weight is narrower.
size_t linear_cross_entropy_backward_workspace(const View& x, const View& weight, const View& dx,
                                               const View& dweight);
void linear_cross_entropy_backward(const View& x, const View& weight, const View& targets,
                                   HeadRules rules, const View& lse, const View& dloss,
                                   const View& dx, const View& dweight, Workspace workspace);

/// Loss and gradients for a constant dloss in one pass: three products instead of four, with the bits of the two
/// calls above.
size_t linear_cross_entropy_fused_workspace(const View& x, const View& weight, const View& dx,
                                            const View& dweight);
void linear_cross_entropy_fused(const View& x, const View& weight, const View& targets,
                                HeadRules rules, const View& loss, const View& dx,
                                const View& dweight, Workspace workspace, double dloss = 1);

/// For a rank with part of the vocabulary, weight[n, C]: lse[..] = log(sum(exp(x ·
/// weightᵀ))) and target_logits[..] = x · weight[targets], 0 for targets of other parts. A row whose target is
/// rules.ignore_index adds 0: its target logit is 0, and its lse is 0 in the first part of the vocabulary, -inf in
/// the others. Other types as above; lse and target_logits dense.
size_t linear_lse_workspace(const View& x, const View& weight);
void linear_lse(const View& x, const View& weight, TablePart part, const View& targets,
                HeadRules rules, const View& lse, const View& target_logits,
                Workspace workspace);

/// dx[.., C] and dweight[n, C]; a logit's gradient is its row's dlse times exp(logit - lse), plus dtarget for the
/// target's logit; as in linear_cross_entropy_backward.
size_t linear_lse_backward_workspace(const View& x, const View& weight, const View& dx,
                                     const View& dweight);
void linear_lse_backward(const View& x, const View& weight, TablePart part, const View& targets,
                         HeadRules rules, const View& lse, const View& dlse,
                         const View& dtarget, const View& dx, const View& dweight,
                         Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Products are cuBLASLt's (see cuda::matmul); logits are f32 (f64 for f64), their gradients
/// x's type. Chunks are added to dweight in order. A target outside [0, V) other than rules.ignore_index cannot throw there: the loss
/// is NaN, and so are the gradients it contributes to. lse is dense, rows of dx are evenly spaced.
namespace cuda {

/// At most 512 MiB of logits in f32 and 8,192 rows, but at least one row.
int64_t linear_cross_entropy_chunk(int64_t vocabulary);

size_t linear_cross_entropy_workspace(const View& x, const View& weight);
void linear_cross_entropy(const Stream& stream, const View& x, const View& weight,
                          const View& targets, HeadRules rules, const View& loss,
                          const View& lse, Workspace workspace);

size_t linear_cross_entropy_backward_workspace(const View& x, const View& weight, const View& dx,
                                               const View& dweight);
void linear_cross_entropy_backward(const Stream& stream, const View& x, const View& weight,
                                   const View& targets, HeadRules rules, const View& lse,
                                   const View& dloss, const View& dx, const View& dweight,
                                   Workspace workspace);

size_t linear_cross_entropy_fused_workspace(const View& x, const View& weight, const View& dx,
                                            const View& dweight);
void linear_cross_entropy_fused(const Stream& stream, const View& x, const View& weight,
                                const View& targets, HeadRules rules, const View& loss,
                                const View& dx, const View& dweight, Workspace workspace,
                                double dloss = 1);

/// A target outside all parts makes its row's target logit NaN.
size_t linear_lse_workspace(const View& x, const View& weight);
void linear_lse(const Stream& stream, const View& x, const View& weight, TablePart part,
                const View& targets, HeadRules rules, const View& lse,
                const View& target_logits, Workspace workspace);

size_t linear_lse_backward_workspace(const View& x, const View& weight, const View& dx,
                                     const View& dweight);
void linear_lse_backward(const Stream& stream, const View& x, const View& weight, TablePart part,
                         const View& targets, HeadRules rules, const View& lse,
                         const View& dlse, const View& dtarget, const View& dx, const View& dweight,
                         Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
