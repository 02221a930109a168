// A short convolution of each channel along the tokens, of each token and those before it, with or without silu behind it: what stands
// in front of recurrent layers (Mamba: Gu and Dao, https://arxiv.org/abs/2312.00752).
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
  View begins;  ///< i32[B, T]: the place of the first token of each token's document; without a shape: there is one document
  bool silu;    ///< f is silu, else the identity
};

namespace cpu {

/// A token's result follows from it and the W - 1 before it. Throws DataError for begins that are none.
void causal_conv(const CausalConvOperands& x, const View& y);

/// Gradients, stored; pass View{} for one that is not wanted. What silu was applied to is computed again. dweight, f32 (f64 for f64),
/// sums over the tokens of a sequence in blocks of 64: a block's in order, then the blocks in order.
size_t causal_conv_backward_workspace(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight);
void causal_conv_backward(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Begins are trusted.
namespace cuda {

void causal_conv(const Stream& stream, const CausalConvOperands& x, const View& y);
size_t causal_conv_backward_workspace(const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight);
void causal_conv_backward(const Stream& stream, const CausalConvOperands& x, const View& dy, const View& dx, const View& dweight,
                          Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
