// Runs of a matrix's flat index as blocks of the matrix: rows × columns.
#pragma once

#include <vector>

#include "sheaf/core/runs.h"

namespace sheaf::models {

/// Elements [row, row + rows) × [column, column + columns) of a matrix, and their offset in a memory that holds them densely, row by
/// row.
struct MatrixBlock {
  int64_t row = 0, rows = 0, column = 0, columns = 0;
  int64_t at = 0;  ///< of the first
  int64_t numel() const { return rows * columns; }
  /// The offset of one of them.
  int64_t at_of(int64_t r, int64_t c) const { return at + (r - row) * columns + c - column; }
  bool operator==(const MatrixBlock&) const = default;
};

/// The elements of `runs`, which are stored densely from 0, as blocks of a matrix with rows of `row_size`, in order. Runs at a
/// distance of one row that do not cross rows are one block; an interval is at most three: the end of a row, whole rows, and the
/// beginning of one. For others, the blocks of their single runs.
std::vector<MatrixBlock> blocks_of(const Runs& runs, int64_t row_size);

/// The elements that are in both, without an offset; if there are none, numel() is 0.
MatrixBlock overlap(const MatrixBlock& a, const MatrixBlock& b);

}  // namespace sheaf::models
