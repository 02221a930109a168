// Copying and filling: every element type, any strides.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// dst = src, converted to dst's dtype; same shape, any strides (0 in src broadcasts), no overlap.
/// Floats round to nearest even; floats to integers truncate and saturate, NaN to 0; anything to
/// bool is "not zero"; integers to narrower integers wrap. Between equal types it copies bits.
void copy(const View& src, const View& dst);
/// dst = value, converted as above from f64.
void fill(const View& dst, double value);
/// dst += src, computed in the wider type and rounded once.
void add_into(const View& dst, const View& src);
/// dst[i] = start + i * step for a 1-D dst: in f64, or in i64 if dst is integral.
void arange(double start, double step, const View& dst);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`: the same bits, except that a NaN cast to bf16 or f16
/// loses its payload.
namespace cuda {

void copy(const Stream& stream, const View& src, const View& dst);
void fill(const Stream& stream, const View& dst, double value);
void add_into(const Stream& stream, const View& dst, const View& src);
void arange(const Stream& stream, double start, double step, const View& dst);

}  // namespace cuda
}  // namespace sheaf::kernels
