// A short convolution of each channel over each token and those before it, optionally followed by silu, as in front of recurrent
// layers (Mamba: Gu and Dao, https://arxiv.org/abs/2312.00752).
//
//   B sequences   T tokens   C channels   W taps
//
//   y[b, t, c] = f(Σ_j weight[c, j] x[b, t - W + 1 + j, c]),   tokens before the document of t counting as zeros
//
// x, y: [B, T, C], weight: [C, W], of one floating dtype, any strides but a dense last dimension. Sums are f32 (f64 for f64), over j in
// order.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

struct CausalConvOperands {
  View x, weight;
  View begins;  ///< i32[B, T]: the place of the first token of each token's document; without a shape: one document
  bool silu;    ///< f is silu, else the identity
};

namespace cpu {

/// A token's result depends on it and the W - 1 before it. Throws DataError for invalid begins.
void causal_conv(const CausalConvOperands& x, const View& y);

/// Gradients, stored; pass View{} for one that is not needed. silu's input is recomputed. dweight, f32 (f64 for f64), sums over the
/// tokens of a sequence in blocks of 64: a block's tokens in order, then the blocks in order.
size_t causal_conv_backward_workspace(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight);
void causal_conv_backward(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Begins are not checked.
namespace cuda {

void causal_conv(const Stream& stream, const CausalConvOperands& x, const View& y);
size_t causal_conv_backward_workspace(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight);
void causal_conv_backward(const Stream& stream, const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight,
                          Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
