// View: a kernel's view of a tensor: memory, element type, sizes and strides; no ownership, no placement, no tape.
#pragma once

#include "sheaf/core/dtype.h"
#include "sheaf/core/shape.h"

namespace sheaf {

struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape;
  Shape strides;  ///< in elements; 0 for a broadcast dimension

  int rank() const { return shape.rank(); }
  int64_t numel() const { return shape.numel(); }
  int64_t bytes() const { return numel() * static_cast<int64_t>(size_of(dtype)); }
  /// From the first element to the end of the last one.
  int64_t extent_bytes() const {
    if (numel() == 0) return 0;
    int64_t last = 0;
    for (int d = 0; d < rank(); ++d) last += (shape[d] - 1) * strides[d];
    return (last + 1) * static_cast<int64_t>(size_of(dtype));
  }
  template <class T> T* as() const { return static_cast<T*>(data); }
  /// True if the elements are dense in row-major order (dimensions of size 1 may have any stride).
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = shape.rank() - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return shape.numel() == 0;
      expected *= shape[i];
    }
    return true;
  }
  static View dense(void* data, DType dtype, const Shape& shape) {
    return {data, dtype, shape, shape.contiguous_strides()};
  }
};

}  // namespace sheaf
