// Reductions over any set of dimensions. The output has the input's rank, with size 1 where it is
// reduced (keepdim); callers without keepdim pass such a view of their output.
//
// Order: the K reduced elements of one output, in row-major order of the reduced dimensions, are
// cut into blocks of 1024; in a block, element k goes to lane k mod 16, in f32 (f64 for f64, i64
// for integers); lanes are added as a tree; the blocks' sums are added in f64, in up to 64 groups
// of neighbouring blocks. All of this is a function of K alone, not of strides, threads, or the number of outputs.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// out = scale * sum of x, scaled (in f64) before the one rounding to out's dtype. Zero elements give 0. Integers and bool are summed
/// in i64 and allow no scale but 1.
void sum(const View& x, const View& out, double scale = 1.0);
/// Largest and smallest element; NaN if any is NaN. Zero elements give -inf and +inf (the type's
/// extremes for integers).
void max(const View& x, const View& out);
void min(const View& x, const View& out);
/// out (i64) = position of the largest element along `dim`, the first of equals; a NaN counts as
/// larger than any number. Throws ShapeError if the dimension has no elements.
void argmax(const View& x, int dim, const View& out);
/// log(sum(exp(x))), with the maximum factored out. Zero elements give -inf.
void logsumexp(const View& x, const View& out);
/// sum((x - mean)^2) / (K - correction), by the corrected two-pass algorithm.
void var(const View& x, double correction, const View& out);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. The order differs from the CPU's, but also is a function of K and the
/// element type alone: chunks of 1024 elements in f32 (f64 for f64), chunks joined in f64, in up to 2048 groups.
/// var joins the chunks' means and squares (Chan, Golub, LeVeque 1983). More than 1024 elements per output need a
/// workspace.
namespace cuda {

size_t sum_workspace(const View& x, const View& out);
void sum(const Stream& stream, const View& x, const View& out, double scale, Workspace workspace);
size_t max_workspace(const View& x, const View& out);
void max(const Stream& stream, const View& x, const View& out, Workspace workspace);
size_t min_workspace(const View& x, const View& out);
void min(const Stream& stream, const View& x, const View& out, Workspace workspace);
size_t argmax_workspace(const View& x, int dim, const View& out);
void argmax(const Stream& stream, const View& x, int dim, const View& out, Workspace workspace);
size_t logsumexp_workspace(const View& x, const View& out);
void logsumexp(const Stream& stream, const View& x, const View& out, Workspace workspace);
size_t var_workspace(const View& x, double correction, const View& out);
void var(const Stream& stream, const View& x, double correction, const View& out,
         Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
