// Normalisation over the last dimension. x, y and their gradients share one floating dtype T;
// weight and bias have it too and are optional (View{}); mean and rstd are [rows], f32 (f64 for f64). Leading
// dimensions may have any strides, the last is dense. A row's value depends only on that row.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// Layer normalisation (Ba et al., https://arxiv.org/abs/1607.06450): y = (x - mean) * rstd *
/// weight + bias, with the biased variance, in two passes over the row.
void layer_norm(const View& x, const View& weight, const View& bias, double eps, const View& y,
                const View& mean, const View& rstd);
/// The same for sum = x + r, which is rounded to T and also stored: the bits of an addition followed by a norm.
void add_layer_norm(const View& x, const View& r, const View& weight, const View& bias, double eps,
                    const View& sum, const View& y, const View& mean, const View& rstd);

/// Gradients, stored; pass View{} for those not needed. dweight and dbias sum over rows in blocks of 64: a block's rows in order,
/// then the blocks in order. If `dsum`, another contribution to the gradient of x, is given, dx is the sum of both, rounded once.
size_t layer_norm_backward_workspace(const View& x, const View& dx, const View& dweight,
                                     const View& dbias);
void layer_norm_backward(const View& dy, const View& x, const View& weight, const View& mean,
                         const View& rstd, const View& dx, const View& dweight, const View& dbias,
                         Workspace workspace, const View& dsum = {});

/// Root-mean-square normalisation (Zhang and Sennrich, https://arxiv.org/abs/1910.07467): y = x *
/// rstd * weight, with rstd = 1 / sqrt(mean(x²) + eps).
void rms_norm(const View& x, const View& weight, double eps, const View& y, const View& rstd);
void add_rms_norm(const View& x, const View& r, const View& weight, double eps, const View& sum,
                  const View& y, const View& rstd);
size_t rms_norm_backward_workspace(const View& x, const View& dx, const View& dweight);
void rms_norm_backward(const View& dy, const View& x, const View& weight, const View& rstd,
                       const View& dx, const View& dweight, Workspace workspace,
                       const View& dsum = {});

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`; forwards need no workspace. Sums within a row are over elements a block's width apart,
/// then over the block in order. dweight and dbias sum the rows r, r + n, r + 2n, ... in order and then these n partial sums in
/// order; n depends on the shape.
namespace cuda {

void layer_norm(const Stream& stream, const View& x, const View& weight, const View& bias,
                double eps, const View& y, const View& mean, const View& rstd);
void add_layer_norm(const Stream& stream, const View& x, const View& r, const View& weight,
                    const View& bias, double eps, const View& sum, const View& y, const View& mean,
                    const View& rstd);
size_t layer_norm_backward_workspace(const View& x, const View& dx, const View& dweight,
                                     const View& dbias);
void layer_norm_backward(const Stream& stream, const View& dy, const View& x, const View& weight,
                         const View& mean, const View& rstd, const View& dx, const View& dweight,
                         const View& dbias, Workspace workspace, const View& dsum = {});
void rms_norm(const Stream& stream, const View& x, const View& weight, double eps, const View& y,
              const View& rstd);
void add_rms_norm(const Stream& stream, const View& x, const View& r, const View& weight,
                  double eps, const View& sum, const View& y, const View& rstd);
size_t rms_norm_backward_workspace(const View& x, const View& dx, const View& dweight);
void rms_norm_backward(const Stream& stream, const View& dy, const View& x, const View& weight,
                       const View& rstd, const View& dx, const View& dweight, Workspace workspace,
                       const View& dsum = {});

}  // namespace cuda
}  // namespace sheaf::kernels
