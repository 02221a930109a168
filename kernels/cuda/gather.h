// Elements picked by index: what embedding, gather and take have in common.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cuda {

/// Throws DTypeError unless `index` has an index type.
void check_index_type(const char* name, const View& index);

/// out[p] = x[p], moved by index[p] * step, for all positions p of `out`; x and index have out's
/// shape, with 0 strides where they do not change. x and out have one dtype. An index outside
/// [0, size) gives NaN, or 0 where out is integral.
void pick(const char* name, const Stream& stream, const View& x, int64_t size, int64_t step,
          const View& index, const View& out);

}  // namespace sheaf::kernels::cuda
