// Requirements of the indexing kernels of all devices on their operands.
#pragma once

#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// The view without dimension `dim`: one element per line along it.
inline View without(View v, int dim) {
  v.shape.erase(dim);
  v.strides.erase(dim);
  return v;
}

inline void check_lines(const char* name, const View& x, int dim, const View& other) {
  check<ShapeError>(x.rank() == other.rank() && without(x, dim).shape == without(other, dim).shape,
                    '[', name, "] shapes ", x.shape, " and ", other.shape,
                    " differ outside dimension ", dim);
}

/// The 1-D index as seen by every line: broadcast over the other dimensions of `like`.
inline View broadcast_index(const char* name, const View& index, int dim, const View& like) {
  check<ShapeError>(index.rank() == 1 && index.shape[0] == like.shape[dim], '[', name,
                    "] index of shape ", index.shape, " does not fit dimension ", dim, " of ",
                    like.shape);
  View wide{index.data, index.dtype, like.shape, Shape::filled(like.rank(), 0)};
  wide.strides[dim] = index.strides[0];
  return wide;
}

inline void check_document_begins(const View& tokens, const View& out) {
  const char* who = "[document_begins] ";
  check<ShapeError>(tokens.shape == out.shape && out.rank() > 0, who, "tokens ", tokens.shape, ", begins ", out.shape);
  check<DTypeError>(out.dtype == kI32, who, "begins are i32, not ", out.dtype);
  check<ShapeError>(out.strides.back() == 1 || out.shape.back() <= 1, who, "begins must be dense in the last dimension");
}

}  // namespace sheaf::kernels
