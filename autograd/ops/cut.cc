#include "sheaf/autograd/ops/cut.h"

#include <algorithm>

namespace sheaf {

std::vector<int64_t> Cut::counts() const {
  std::vector<int64_t> out;
  for (size_t r = 0; r < owned.size(); ++r) out.push_back(elements(static_cast<int>(r)));
  return out;
}

void Cut::count_elements() {
  for (auto& intervals : owned)
    for (Interval& i : intervals) i = {i.begin * row, i.end * row};
  row = 1;
}

int64_t Cut::total(const std::vector<Interval>& rows) {
  int64_t n = 0;
  for (const Interval& i : rows) n += i.size();
  return n;
}

Cut cut_of(const Type& type, int axis, const Placement& p) {
  const Layout whole = type.layout.with(axis, Placement::replicate());
  const Shape shape = whole.local_shape(type.shape);
  Cut cut;
  const int n = type.layout.mesh()->size(axis);
  for (int r = 0; r < n; ++r) cut.owned.push_back(p.map().owned_intervals(r, n, shape));
  cut.flat = p.map().is_flat() || p.map().is_single();
  if (cut.flat) return cut;
  cut.dim = p.map().dim();
  cut.contiguous = !p.map().is_scattered();
  for (int d = 0; d < shape.rank(); ++d) {
    if (d != cut.dim) cut.row *= shape[d];
    if (d < cut.dim && shape[d] != 1) cut.contiguous = false;
  }
  return cut;
}

std::vector<Interval> shared_rows(const std::vector<Interval>& own, const std::vector<Interval>& others) {
  std::vector<Interval> out;
  int64_t at = 0;
  for (const Interval& a : own) {
    for (const Interval& b : others) {
      const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
      if (both.size() > 0) out.push_back({at + both.begin - a.begin, at + both.end - a.begin});
    }
    at += a.size();
  }
  return out;
}

View flattened(const View& dense) { return View::dense(dense.data, dense.dtype, {dense.numel()}); }

View block_of_rows(const View& v, int dim, int64_t rows, void* data) {
  Shape shape = v.shape;
  shape[dim] = rows;
  return View::dense(data, v.dtype, shape);
}

View rows_of(View v, int dim, Interval rows) {
  if (v.data) v.data = v.as<char>() + rows.begin * v.strides[dim] * static_cast<int64_t>(size_of(v.dtype));
  v.shape[dim] = rows.size();
  return v;
}

}  // namespace sheaf
