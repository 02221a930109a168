#include "sheaf/models/matrix_blocks.h"

#include <algorithm>

namespace sheaf::models {

std::vector<MatrixBlock> blocks_of(const Runs& runs, int64_t row_size) {
  std::vector<MatrixBlock> out;
  if (runs.numel() == 0) return out;
  if (!runs.is_interval() && runs.stride == row_size && runs.begin % row_size + runs.size <= row_size)
    return {{runs.begin / row_size, runs.count, runs.begin % row_size, runs.size, 0}};
  for (int64_t k = 0; k < runs.count; ++k)
    for (auto [begin, end] = runs[k]; begin < end;) {
      const int64_t row = begin / row_size, column = begin % row_size;
      // From the beginning of a row, all whole ones at once.
      const int64_t rows = column == 0 ? std::max<int64_t>((end - begin) / row_size, 1) : 1;
      const int64_t columns = std::min(end - begin, row_size - column);
      const int64_t at = out.empty() ? 0 : out.back().at + out.back().numel();
      out.push_back({row, rows, column, columns, at});
      begin += rows * columns;
    }
  return out;
}

MatrixBlock overlap(const MatrixBlock& a, const MatrixBlock& b) {
  const int64_t row = std::max(a.row, b.row), column = std::max(a.column, b.column);
  const int64_t rows = std::min(a.row + a.rows, b.row + b.rows) - row;
  const int64_t columns = std::min(a.column + a.columns, b.column + b.columns) - column;
  if (rows <= 0 || columns <= 0) return {};
  return {row, rows, column, columns, 0};
}

}  // namespace sheaf::models
