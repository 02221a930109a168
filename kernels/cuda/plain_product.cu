#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/product.h"

namespace sheaf::kernels::cuda {
namespace {

/// Where the elements of a product are: (i, j) at i * row + j * col.
struct Steps {
  DType dtype;
  int64_t row, col, batch;
};

constexpr int kTile = 32, kThreads = 256, kPerThread = kTile * kTile / kThreads;

/// A block computes tiles of 32 x 32 of D, for its batches. Neighbouring threads compute elements of one column,
/// which are adjacent.
template <class C>
__global__ void multiply_plain(ProductShape s, Steps a, Steps b, Steps d, const void* a_data,
                               const void* b_data, void* d_data, const void* bias) {
  __shared__ C tile_a[kTile][kTile + 1], tile_b[kTile][kTile + 1];
  const int64_t tiles = blocks_for(s.m, kTile);
  const int64_t first_i = blockIdx.x % tiles * kTile, first_j = blockIdx.x / tiles * kTile;
  const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  for (int64_t batch = blockIdx.y; batch < s.batches; batch += gridDim.y) {
    C sum[kPerThread] = {};
    for (int64_t first_k = 0; first_k < s.k; first_k += kTile) {
      __syncthreads();  // until the previous round's tiles have been read
      for (int p = 0; p < kPerThread; ++p) {
        const int line = y + p * (kTile / kPerThread);
        const int64_t i = first_i + x, k = first_k + line;
        tile_a[line][x] = i < s.m && k < s.k ? load_any<C>(a.dtype, a_data,
                                                           batch * a.batch + i * a.row + k * a.col)
                                             : C(0);
        const int64_t kb = first_k + x, j = first_j + line;
        tile_b[line][x] =
            j < s.n && kb < s.k
                ? load_any<C>(b.dtype, b_data, batch * b.batch + kb * b.row + j * b.col)
                : C(0);
      }
      __syncthreads();
      for (int k = 0; k < kTile; ++k)
        for (int p = 0; p < kPerThread; ++p)
          sum[p] += tile_a[k][x] * tile_b[y + p * (kTile / kPerThread)][k];
    }
    const int64_t i = first_i + x;
    for (int p = 0; p < kPerThread; ++p) {
      const int64_t j = first_j + y + p * (kTile / kPerThread);
      if (i >= s.m || j >= s.n) continue;
      const int64_t at = batch * d.batch + i * d.row + j * d.col;
      C value = sum[p];
      if (s.epilogue == Epilogue::bias) value += load_any<C>(s.out, bias, i);
      if (s.accumulate) value += load_any<C>(s.out, d_data, at);
      store_any<C>(s.out, d_data, at, value);
    }
  }
}

}  // namespace

void run_plain_product(const Stream& stream, const Product& product) {
  const ProductShape& s = product.shape;
  const auto steps = [](DType dtype, bool transpose, int64_t ld, int64_t batch) {
    return transpose ? Steps{dtype, ld, 1, batch} : Steps{dtype, 1, ld, batch};
  };
  const LaunchShape shape{.blocks = blocks_for(s.m, kTile) * blocks_for(s.n, kTile),
                          .threads = kThreads,
                          .blocks_y = std::min<int64_t>(s.batches, 65535)};
  const Steps a = steps(s.in, s.transpose_a, s.ld_a, s.stride_a),
              b = steps(s.in, s.transpose_b, s.ld_b, s.stride_b),
              d = steps(s.out, false, s.ld_d, s.stride_d);
  if (s.in == kF64)
    launch(product.who, stream, shape, multiply_plain<double>, s, a, b, d, product.a, product.b,
           product.d, product.vector);
  else
    launch(product.who, stream, shape, multiply_plain<float>, s, a, b, d, product.a, product.b,
           product.d, product.vector);
}

}  // namespace sheaf::kernels::cuda
