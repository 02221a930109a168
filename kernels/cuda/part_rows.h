// How kernels on the GPU locate the rows of experts in parts (kernels/experts.h).
#pragma once

#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/experts.h"

namespace sheaf::kernels::cuda::part_products {

/// Where experts' rows are in [Q, J, R], J groups. find_rows() must be enqueued before this is used.
struct PartRows {
  ExpertParts parts;
  int64_t groups, room;
  Rows<const int32_t> given;  ///< counts [E, J]
  int32_t *begins, *counts;   ///< [E, J]: where an expert's rows begin in its part's, and how many of them fit

  PartRows(const char* who, const View& of_experts, const View& rows)
      : parts{of_experts.shape[0], rows.shape[0]},
        groups(parts.experts ? of_experts.numel() / parts.experts : 0),
        room(rows.shape.dim(-2)),
        given(elements_of<const int32_t>(who, of_experts)),
        begins(nullptr),
        counts(nullptr) {
    check<ShapeError>(rows.contiguous() && of_experts.dtype == kI32 && parts.parts <= parts.experts && (parts.parts > 0 || parts.experts == 0),
                      '[', who, "] wants dense rows in parts of experts and i32 counts, got ", rows.shape, " and ", of_experts.shape);
  }
  size_t bytes() const { return 2 * line_align(static_cast<size_t>(parts.experts * groups) * 4); }
  void place(Carver& carver) {
    begins = carver.take<int32_t>(parts.experts * groups), counts = carver.take<int32_t>(parts.experts * groups);
  }
  __device__ int64_t count(int64_t expert, int64_t group) const { return counts[expert * groups + group]; }
  /// The first row in a group of an expert of this part, among the rows of all parts.
  __device__ int64_t first_row(int64_t part, int64_t expert, int64_t group) const {
    return (part * groups + group) * room + begins[expert * groups + group];
  }
};

/// For each tile of rows of one expert, counted over all its groups one after another: the expert and the first row; -1 for unused
/// tiles.
struct RowTiles {
  int32_t *experts, *firsts;
  int64_t count;

  static int64_t most(const PartRows& r, int rows) { return blocks_for(r.parts.parts * r.groups * r.room, rows) + r.parts.experts; }
  static size_t bytes(const PartRows& r, int rows) { return 2 * line_align(static_cast<size_t>(most(r, rows)) * 4); }
  RowTiles(const PartRows& r, int rows, Carver& carver) : count(most(r, rows)) {
    experts = carver.take<int32_t>(count), firsts = carver.take<int32_t>(count);
  }
};

/// Iterates over the rows of an expert: those of its groups, one group after another.
struct RowCursor {
  int part;                       ///< the expert's: to find it takes a division, which the compiler would repeat for each row
  int64_t group = 0, offset = 0;  ///< in the group

  __device__ RowCursor(const PartRows& r, int64_t expert) : part(static_cast<int>(r.parts.part_of(expert))) {}
  __device__ void advance(const PartRows& r, int64_t expert, int64_t rows) {
    offset += rows;
    while (group < r.groups && offset >= r.count(expert, group)) offset -= r.count(expert, group), ++group;
  }
  /// The row among those of all parts; -1 after the last.
  __device__ int64_t row(const PartRows& r, int64_t expert) const { return group < r.groups ? r.first_row(part, expert, group) + offset : -1; }
};

}  // namespace sheaf::kernels::cuda::part_products
