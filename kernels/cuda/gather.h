// Selecting elements by index: what embedding, gather and take have in common.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cuda {

/// Throws DTypeError unless `index` has an index type.
void check_index_type(const char* name, const View& index);

/// The indexed dimension: its length, and the stride of its elements. It may be part of a longer one, of length `all`, in which it
/// begins at `first`.
struct Picked {
  int64_t size, step, first = 0, all = size;
};

/// out[p] = x[p], offset by (index[p] - first) * step, for all positions p of `out`; x and index have out's shape, with stride 0
/// where they do not vary. x and out have one dtype. An index outside [0, all) gives NaN, or 0 if out is integral; one in another
/// part gives 0.
void pick(const char* name, const Stream& stream, const View& x, const Picked& dim,
          const View& index, const View& out);

}  // namespace sheaf::kernels::cuda
