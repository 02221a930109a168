// Gathers, scatters, running sums, padding and document_begins. Any strides; values of any dtype unless stated otherwise; indices
// i64, i32, u32, u16 or u8. An index outside the dimension throws DataError, before anything is written.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// out[..., i, ...] = x[..., index[..., i, ...], ...] along `dim`; index and out have one shape,
/// which equals x's in the other dimensions.
void gather(const View& x, int dim, const View& index, const View& out);
/// out[..., i, ...] = x[..., index[i], ...] along `dim` for a 1-D index.
void take(const View& x, int dim, const View& index, const View& out);
/// out[..., index[..., i, ...], ...] += src[..., i, ...] along `dim`; index and src have one shape.
/// Contributions to one element are added in the order of i, each sum computed in the wider type
/// and rounded to out's dtype.
void scatter_add(const View& out, int dim, const View& index, const View& src);
/// out[..., index[i], ...] += src[..., i, ...]: the adjoint of take, in the same order.
void take_add(const View& out, int dim, const View& index, const View& src);
/// Running sums along `dim`, from its end if `reverse`; floats in f64 and rounded at each output,
/// integers in i64.
void cumsum(const View& x, int dim, bool reverse, const View& out);
/// out = x surrounded by `value`: before[i] elements in front of dimension i, the rest after it.
void pad(const View& x, const Shape& before, double value, const View& out);
/// out[.., t] = the position after the last `end_of_text` among tokens[.., 0] to tokens[.., t - 1], 0 if there is none: where the
/// document of token t begins. Tokens are indices; out is i32 of their shape, the last dimension dense.
void document_begins(const View& tokens, int64_t end_of_text, const View& out);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`; sums in the same order, except cumsum's. A GPU cannot report an index outside the
/// dimension: gather and take give NaN (0 for integers), sums skip it.
namespace cuda {

void gather(const Stream& stream, const View& x, int dim, const View& index, const View& out);
void take(const Stream& stream, const View& x, int dim, const View& index, const View& out);
void scatter_add(const Stream& stream, const View& out, int dim, const View& index,
                 const View& src);
void take_add(const Stream& stream, const View& out, int dim, const View& index, const View& src);
/// Every 32 elements are scanned (Hillis and Steele 1986) and added to the sum of all before them.
void cumsum(const Stream& stream, const View& x, int dim, bool reverse, const View& out);
void pad(const Stream& stream, const View& x, const Shape& before, double value, const View& out);
void document_begins(const Stream& stream, const View& tokens, int64_t end_of_text, const View& out);

}  // namespace cuda
}  // namespace sheaf::kernels
