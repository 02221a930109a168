// Gathers, scatters, running sums and padding. Any strides; values of any dtype unless said
// otherwise; indices i64, i32, u32, u16 or u8. An index outside the dimension throws DataError,
// before anything is written.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu {

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
/// out = x surrounded by `value`: before[i] elements in front of dimension i, the rest behind.
void pad(const View& x, const Shape& before, double value, const View& out);

}  // namespace sheaf::kernels::cpu
