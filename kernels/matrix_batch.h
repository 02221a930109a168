// One operand of a matrix product: a batch of matrices of any strides.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// The last two dimensions of a view, and how to step from batch to batch; dimensions of the batch
/// that the view lacks or broadcasts have stride 0.
struct MatrixBatch {
  char* data;
  DType dtype;
  int64_t rows, cols, row_stride, col_stride;
  Shape batch_strides;

  MatrixBatch(const View& v, const Shape& batch)
      : data(v.as<char>()),
        dtype(v.dtype),
        rows(v.shape.dim(-2)),
        cols(v.shape.dim(-1)),
        row_stride(v.strides.dim(-2)),
        col_stride(v.strides.dim(-1)),
        batch_strides(Shape::filled(batch.rank(), 0)) {
    for (int i = batch.rank() - 1, j = v.rank() - 3; j >= 0; --i, --j)
      batch_strides[i] = v.shape[j] == 1 ? 0 : v.strides[j];
  }
  bool row_major() const {
    return (col_stride == 1 || cols == 1) && (row_stride >= cols || rows == 1);
  }
};

}  // namespace sheaf::kernels
