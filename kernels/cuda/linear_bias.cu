#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/gemm.h"
#include "sheaf/kernels/linear.h"

// The sum of the rows of dy in the order of the CPU's kernel: blocks of 64 rows, each in row order,
// then the blocks in order. The first kernel sums blocks, a column or a pack of columns to a
// thread, the second the blocks' sums.
namespace sheaf::kernels::cuda {
namespace {

constexpr const char* kName = "linear_bias_gradient";
constexpr int kBlockRows = 64, kThreads = 128, kWarps = 8;

/// All dimensions but the last, merged where they can be.
struct RowMap {
  int rank = 0;
  int64_t count = 1, shape[kMaxDims], strides[kMaxDims];

  explicit RowMap(const View& v) {
    for (int d = 0; d + 1 < v.rank(); ++d) {
      const int64_t size = v.shape[d];
      count *= size;
      if (size == 1) continue;
      const bool merges = rank > 0 && strides[rank - 1] == size * v.strides[d];
      if (!merges) shape[rank++] = 1;
      shape[rank - 1] *= size, strides[rank - 1] = v.strides[d];
    }
  }
  __device__ int64_t offset(int64_t row) const {
    int64_t out = 0;
    for (int d = rank - 1; d > 0; --d) {
      const int64_t rest = row / shape[d];
      out += (row - rest * shape[d]) * strides[d];
      row = rest;
    }
    return out + (rank > 0 ? row * strides[0] : 0);
  }
};

template <class T, int kColumns>
__global__ void sum_blocks(const T* dy, RowMap rows, int64_t columns, Compute<T>* sums) {
  using C = Compute<T>;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kColumns;
  if (at >= columns) return;
  const int64_t blocks = blocks_for(rows.count, kBlockRows);
  for (int64_t block = blockIdx.y; block < blocks; block += gridDim.y) {
    const int64_t first = block * kBlockRows;
    const int count =
        rows.count - first < kBlockRows ? static_cast<int>(rows.count - first) : kBlockRows;
    C sum[kColumns] = {};
#pragma unroll 8
    for (int r = 0; r < count; ++r) {
      const T* row = dy + rows.offset(first + r) + at;
      if constexpr (kColumns == 1) {
        sum[0] += convert_to<C>(row[0]);
      } else {
        const Pack<T> pack = load_pack(row);
        for (int k = 0; k < kColumns; ++k) sum[k] += convert_to<C>(pack.v[k]);
      }
    }
    for (int k = 0; k < kColumns; ++k) sums[block * columns + at + k] = sum[k];
  }
}

/// A block has 32 columns: all warps fetch sums of the blocks, one adds them up in order.
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
  check<ShapeError>(dy.strides.back() == 1 || dy.shape.back() <= 1 || dy.numel() == 0, '[', kName,
                    "] the last dimension must be dense, its stride is ", dy.strides.back());
  check<DTypeError>(
      is_floating(dy.dtype) && (dbias.dtype == dy.dtype || is_wide_of(dbias.dtype, dy.dtype)), '[',
      kName, "] ", dy.dtype, " into ", dbias.dtype);
}

}  // namespace

size_t linear_bias_gradient_workspace(const View& dy, const View& dbias) {
  check_operands(dy, dbias);
  return align_part(
      static_cast<size_t>(blocks_for(RowMap(dy).count, kBlockRows) * dy.shape.back()) *
      (dy.dtype == kF64 ? sizeof(double) : sizeof(float)));
}

void linear_bias_gradient(const Stream& stream, const View& dy, const View& dbias,
                          Workspace workspace) {
  void* const sums = Parts(kName, workspace).take(linear_bias_gradient_workspace(dy, dbias));
  const RowMap rows(dy);
  const int64_t columns = dy.shape.back(), blocks = blocks_for(rows.count, kBlockRows);
  visit_floating(kName, dy.dtype, [&]<class T>() {
    using C = Compute<T>;
    bool packs = columns % Pack<T>::kSize == 0 && aligned16(dy.data);
    for (int d = 0; d < rows.rank; ++d) packs = packs && rows.strides[d] % Pack<T>::kSize == 0;
    const auto blocks_of = [&](int wide) {
      return LaunchShape{.blocks = blocks_for(columns, kThreads * wide),
                         .threads = kThreads,
                         .blocks_y = std::min<int64_t>(blocks, 65535)};
    };
    if (packs)
      launch(kName, stream, blocks_of(Pack<T>::kSize), sum_blocks<T, Pack<T>::kSize>, dy.as<T>(),
             rows, columns, static_cast<C*>(sums));
    else
      launch(kName, stream, blocks_of(1), sum_blocks<T, 1>, dy.as<T>(), rows, columns,
             static_cast<C*>(sums));
    launch(kName, stream, {.blocks = blocks_for(columns, kWarp), .threads = kWarps * kWarp},
           sum_sums<C>, static_cast<const C*>(sums), blocks, columns, dbias.dtype, dbias.data,
           dbias.strides[0]);
  });
}

}  // namespace sheaf::kernels::cuda
