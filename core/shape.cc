#include "sheaf/core/shape.h"

#include <algorithm>

namespace sheaf {

Shape broadcast_shapes(std::string_view who, const Shape& a, const Shape& b) {
  const int rank = std::max(a.rank(), b.rank());
  Shape out = Shape::filled(rank, 1);
  for (int i = 1; i <= rank; ++i) {
    const int64_t x = i <= a.rank() ? a[a.rank() - i] : 1, y = i <= b.rank() ? b[b.rank() - i] : 1;
    if (x != y && x != 1 && y != 1) fail<ShapeError>("[", who, "] cannot broadcast ", a, " with ", b);
    out[rank - i] = x == 1 ? y : x;
  }
  return out;
}

std::optional<int64_t> byte_size(size_t element, const Shape& shape) {
  auto bytes = static_cast<int64_t>(element);
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) empty = true;
    else if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return empty ? 0 : bytes;
}

}  // namespace sheaf
