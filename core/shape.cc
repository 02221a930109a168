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

}  // namespace sheaf
