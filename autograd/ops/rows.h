// Shared code of the ops over rows: making an input's last dimension dense, rules for shards of the leading dimensions, and tables whose
// rows are sharded.
#pragma once

#include "sheaf/autograd/ops/common.h"
#include "sheaf/kernels/table_part.h"

namespace sheaf::ops {

/// x itself if its last dimension is dense, as kernels want it, else a copy. What is undefined stays so, for apply() to refuse.
inline Tensor dense_rows(const Tensor& x) {
  return !x || x.rank() == 0 || x.local_strides().back() == 1 ? x : contiguous(x);
}

/// Which operands of an op have rows; bit i: input or output i.
struct RowOperands {
  int like = 0;  ///< the input whose dimensions, all but the last, index the rows: dimension d of it is dimension d of all
  uint64_t inputs = 0, outputs = 0;
  int num_outputs = 1;
};
/// A rule for rows that are sharded: those operands have the same shard, other inputs are Replicate, other outputs (gradients of those)
/// Partial.
inline void row_rules(Place& p, const RowOperands& rows) {
  for (int i = 0; i < p.num_inputs(); ++i) {
    if (!((rows.inputs >> i) & 1) || !p.in(i).is_shard()) continue;
    const OwnershipMap& map = p.in(i).map();
    if (map.is_flat() || map.dim() >= p.shape(rows.like).rank() - 1) return;
    std::vector<Placement> in, out;
    for (int j = 0; j < p.num_inputs(); ++j) in.push_back((rows.inputs >> j) & 1 ? p.in(i) : kR);
    for (int o = 0; o < rows.num_outputs; ++o) out.push_back((rows.outputs >> o) & 1 ? p.in(i) : kP);
    p.rule(in, out);
    return;
  }
}

/// Whether each rank has one contiguous run of a table's rows, in mesh order.
inline bool cuts_table(const Placement& p) { return p.is_shard(0) && !p.map().is_scattered() && !p.map().is_inner(); }

/// The rows of a table that this rank has.
inline kernels::TablePart part_of(const Type& table) {
  const auto rows = table.layout.local_rows(table.shape, 0);
  return {rows.empty() ? 0 : rows[0].begin, table.shape[0]};
}

/// The number of shards of a table.
inline int64_t table_parts(const Layout& table) {
  int64_t parts = 1;
  for (int a = 0; a < table.num_axes(); ++a)
    if (cuts_table(table[a])) parts *= table.mesh()->size(a);
  return parts;
}

/// The shape without its last dimension.
inline Shape leading(Shape s) {
  s.erase(s.rank() - 1);
  return s;
}

/// The dtype of statistics of values of dtype d.
inline DType statistics_dtype(DType d) { return d == kF64 ? kF64 : kF32; }
/// x in the dtype of its statistics.
inline Tensor in_statistics_dtype(const Tensor& x) { return cast(x, statistics_dtype(x.dtype())); }

}  // namespace sheaf::ops
