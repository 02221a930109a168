#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/linear.h"

// The sum of the rows of dy in the order of the CPU's kernel: blocks of 64 rows, each in row order,
// then the blocks in order. The first kernel sums each block, a column or a pack of columns per thread, the second
// the blocks' sums.
namespace sheaf::kernels::cuda {
namespace {

constexpr const char* kName = "linear_bias_gradient";
constexpr int kBlockRows = 64, kThreads = 128, kWarps = 8;

template <class T, int kColumns>
__global__ void sum_blocks(Rows<const T> rows, Compute<T>* sums) {
  using C = Compute<T>;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kColumns;
  if (at >= rows.cols) return;
  const int64_t blocks = blocks_for(rows.count, kBlockRows);
  for (int64_t block = blockIdx.y; block < blocks; block += gridDim.y) {
    const int64_t first = block * kBlockRows;
    const int count =
        rows.count - first < kBlockRows ? static_cast<int>(rows.count - first) : kBlockRows;
    C sum[kColumns] = {};
    constexpr int kAtOnce = 8;  // loads in flight: past the end, once more of the last row, without a branch
    for (int r = 0; r < count; r += kAtOnce) {
      const T* row[kAtOnce];
      Group<T, kColumns> piece[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) row[k] = rows[first + (r + k < count ? r + k : count - 1)] + at;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) piece[k] = *reinterpret_cast<const Group<T, kColumns>*>(row[k]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (r + k < count)
          for (int j = 0; j < kColumns; ++j) sum[j] += convert_to<C>(piece[k].v[j]);
    }
    for (int k = 0; k < kColumns; ++k) sums[block * rows.cols + at + k] = sum[k];
  }
}

/// A block has 32 columns: all warps load sums of the blocks, one adds them in order.
template <class C>
__global__ void sum_sums(const C* sums, int64_t blocks, int64_t columns, DType dtype, void* out,
                         int64_t step) {
  constexpr int kLines = 64;
  __shared__ C tile[kLines][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  C total = 0;
  for (int64_t first = 0; first < blocks; first += kLines) {
    const int count = blocks - first < kLines ? static_cast<int>(blocks - first) : kLines;
    __syncthreads();
    for (int line = warp; line < count; line += kWarps)
      tile[line][lane] = column < columns ? sums[(first + line) * columns + column] : C(0);
    __syncthreads();
    if (warp == 0)
      for (int line = 0; line < count; ++line) total += tile[line][lane];
  }
  if (warp == 0 && column < columns) store_any<C>(dtype, out, column * step, total);
}

void check_operands(const View& dy, const View& dbias) {
  check<ShapeError>(dbias.rank() == 1 && dy.rank() >= 1 && dbias.shape[0] == dy.shape.back(), '[',
                    kName, "] ", dy.shape, " into ", dbias.shape);
  check<DTypeError>(
      is_floating(dy.dtype) && (dbias.dtype == dy.dtype || is_wide_of(dbias.dtype, dy.dtype)), '[',
      kName, "] ", dy.dtype, " into ", dbias.dtype);
}

}  // namespace

size_t linear_bias_gradient_workspace(const View& dy, const View& dbias) {
  check_operands(dy, dbias);
  const int64_t rows = rows_of<const char>(kName, dy).count;
  return line_align(static_cast<size_t>(blocks_for(rows, kBlockRows) * dy.shape.back()) *
                    (dy.dtype == kF64 ? sizeof(double) : sizeof(float)));
}

void linear_bias_gradient(const Stream& stream, const View& dy, const View& dbias,
                          Workspace workspace) {
  check_operands(dy, dbias);
  visit_floating(kName, dy.dtype, [&]<class T>() {
    using C = Compute<T>;
    const Rows<const T> rows = rows_of<const T>(kName, dy);
    const int64_t columns = rows.cols, blocks = blocks_for(rows.count, kBlockRows);
    C* const sums = Carver(kName, workspace).take<C>(blocks * columns);
    bool packs = columns % Pack<T>::kSize == 0 && aligned16(dy.data);
    for (int d = 0; d < rows.at.rank; ++d)
      packs = packs && rows.at.strides[0][d] % Pack<T>::kSize == 0;
    const auto blocks_of = [&](int wide) {
      return LaunchShape{.blocks = blocks_for(columns, kThreads * wide),
                         .threads = kThreads,
                         .blocks_y = std::min<int64_t>(blocks, 65535)};
    };
    if (packs)
      launch(kName, stream, blocks_of(Pack<T>::kSize), sum_blocks<T, Pack<T>::kSize>, rows, sums);
    else
      launch(kName, stream, blocks_of(1), sum_blocks<T, 1>, rows, sums);
    launch(kName, stream, {.blocks = blocks_for(columns, kWarp), .threads = kWarps * kWarp},
           sum_sums<C>, static_cast<const C*>(sums), blocks, columns, dbias.dtype, dbias.data,
           dbias.strides[0]);
  });
}

}  // namespace sheaf::kernels::cuda
