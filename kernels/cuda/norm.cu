#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/norm.h"
#include "sheaf/kernels/norm_operands.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int64_t kMostKept = 200 << 10;  // bytes of a row in shared memory
constexpr int kBatch = 4;                 // loads in flight for each thread
constexpr int kMostThreads = 512;         // of a block, for registers

/// A forward's inputs and results; layer normalisation if `mean` is given, of x + r if r is given.
template <class T>
struct Forward {
  Rows<const T> x, r;
  Rows<T> sum, y;
  const T *weight, *bias;
  Compute<T>* mean;
  Compute<T>* rstd;
  Compute<T> eps;
  int row_threads;  ///< a warp, or the block
  bool kept;        ///< the row is read once and kept in shared memory
};

// `row_threads` threads process a row, 16 bytes each at a time. A thread reads from shared memory only what it wrote itself, so only
// the sums need barriers; the same holds for global memory, if the row is x + r and too long to be kept.
template <class T, bool kAdds>
__global__ void __launch_bounds__(kMostThreads, 2) norm_forward(Forward<T> f) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  __shared__ C scratch[2][kWarp];
  const int thread = static_cast<int>(threadIdx.x) % f.row_threads;
  const int slot = static_cast<int>(threadIdx.x) / f.row_threads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / f.row_threads) + slot;
  if (row >= f.x.count) return;  // whole warps, of blocks that have no barrier
  const int64_t width = f.x.cols, chunks = blocks_for(width, kSize);
  const T* in = f.x[row];
  const T* more = kAdds ? f.r[row] : nullptr;
  T* total = kAdds ? f.sum[row] : nullptr;
  Pack<T>* kept = dynamic_shared<Pack<T>>() + slot * chunks;
  const auto row_sum = [&](C x, C* place) {
    return f.row_threads == kWarp ? warp_sum(x) : block_sum(x, place);
  };
  const auto again = [&](int64_t c) {
    return f.kept ? kept[c] : load_chunk(kAdds ? total : in, c * kSize, width);
  };

  C sum = C(0);  // of x, or of its squares if there is no mean
  constexpr int kAtOnce = kAdds ? kBatch / 2 : kBatch;
  for (int64_t first = thread; first < chunks; first += kAtOnce * f.row_threads) {
    uint4 raw[kAtOnce], addends[kAtOnce];  // a load of narrow elements would be waited for, to divide it into them
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (const int64_t c = first + u * f.row_threads; c < chunks) {
        raw[u] = load_raw(in, c * kSize, width);
        if (kAdds) addends[u] = load_raw(more, c * kSize, width);
      }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t c = first + u * f.row_threads;
      if (c >= chunks) break;
      Pack<T> pack;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        pack.v[k] = element_of<T>(raw[u], k);
        if (kAdds) pack.v[k] = element<T>(convert_to<C>(pack.v[k]) + convert_to<C>(element_of<T>(addends[u], k)));
      }
      if (kAdds) store_chunk(total, c * kSize, width, pack);
      if (f.kept) kept[c] = pack;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const C x = convert_to<C>(pack.v[k]);  // zeros past the end
        sum += f.mean ? x : x * x;
      }
    }
  }
  sum = row_sum(sum, scratch[0]);
  C centre = C(0), squares = sum;
  if (f.mean) {
    centre = sum / static_cast<C>(width), squares = C(0);
    for (int64_t c = thread; c < chunks; c += f.row_threads) {
      const Pack<T> pack = again(c);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const C d = convert_to<C>(pack.v[k]) - centre;
        if (c * kSize + k < width) squares += d * d;
      }
    }
    squares = row_sum(squares, scratch[1]);
  }
  const C variance = squares / static_cast<C>(width) + f.eps;
  const C scale = C(1) / (std::is_same_v<C, float> ? C(sqrtf(variance)) : C(::sqrt(variance)));
  if (thread == 0) {
    if (f.mean) f.mean[row] = centre;
    f.rstd[row] = scale;
  }
  T* out = f.y[row];
  for (int64_t c = thread; c < chunks; c += f.row_threads) {
    Pack<T> pack = again(c), weight{}, bias{};
    if (f.weight) weight = load_chunk(f.weight, c * kSize, width);
    if (f.bias) bias = load_chunk(f.bias, c * kSize, width);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      C v = (convert_to<C>(pack.v[k]) - centre) * scale;
      if (f.weight) v *= convert_to<C>(weight.v[k]);
      if (f.bias) v += convert_to<C>(bias.v[k]);
      pack.v[k] = element<T>(v);
    }
    store_chunk(out, c * kSize, width, pack);
  }
}

void forward(const char* who, const Stream& stream, const View& x, const View& r,
             const View& weight, const View& bias, double eps, const View& sum, const View& y,
             const View& mean, const View& rstd) {
  if (x.numel() == 0) return;
  visit_floating(who, x.dtype, [&]<class T>() {
    using C = Compute<T>;
    const Rows<const T> in = rows_of<const T>(who, x);
    const int64_t chunks = blocks_for(in.cols, Pack<T>::kSize);
    const bool warp_each = chunks <= 8 * kWarp;
    const int threads =
        warp_each ? 4 * kWarp : threads_for(blocks_for(chunks, kBatch), kMostThreads);
    const int rows = warp_each ? 4 : 1;
    const bool kept = chunks * 16 <= kMostKept, adds = given(r);
    launch(who, stream,
           {.blocks = blocks_for(in.count, rows),
            .threads = threads,
            .shared_bytes = kept ? static_cast<size_t>(rows * chunks * 16) : 0},
           adds ? norm_forward<T, true> : norm_forward<T, false>,
           Forward<T>{in, rows_of<const T>(who, adds ? r : x), rows_of<T>(who, adds ? sum : y),
                      rows_of<T>(who, y), weight.as<const T>(), bias.as<const T>(), mean.as<C>(),
                      rstd.as<C>(), static_cast<C>(eps), warp_each ? kWarp : threads, kept});
  });
}

}  // namespace

void layer_norm(const Stream& stream, const View& x, const View& weight, const View& bias,
                double eps, const View& y, const View& mean, const View& rstd) {
  const char* who = "layer_norm";
  check_forward(who, x, weight, bias, y, &mean, rstd);
  forward(who, stream, x, View{}, weight, bias, eps, View{}, y, mean, rstd);
}

void add_layer_norm(const Stream& stream, const View& x, const View& r, const View& weight,
                    const View& bias, double eps, const View& sum, const View& y, const View& mean,
                    const View& rstd) {
  const char* who = "add_layer_norm";
  check_forward(who, x, weight, bias, y, &mean, rstd, &r, &sum);
  forward(who, stream, x, r, weight, bias, eps, sum, y, mean, rstd);
}

void rms_norm(const Stream& stream, const View& x, const View& weight, double eps, const View& y,
              const View& rstd) {
  const char* who = "rms_norm";
  check_forward(who, x, weight, View{}, y, nullptr, rstd);
  forward(who, stream, x, View{}, weight, View{}, eps, View{}, y, View{}, rstd);
}

void add_rms_norm(const Stream& stream, const View& x, const View& r, const View& weight,
                  double eps, const View& sum, const View& y, const View& rstd) {
  const char* who = "add_rms_norm";
  check_forward(who, x, weight, View{}, y, nullptr, rstd, &r, &sum);
  forward(who, stream, x, r, weight, View{}, eps, sum, y, View{}, rstd);
}

}  // namespace sheaf::kernels::cuda
