#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/rotary.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Rotation {
  const T* x;
  T* y;
  int64_t batch, positions;
  int heads, width;                ///< H and D
  int rotated, half;               ///< heads of which elements are rotated, and pairs of one
  int tile;                        ///< positions of a block
  int64_t xb, xt, xh, yb, yt, yh;  ///< strides
  RotaryFrequencies frequency;
  int64_t first_position;
  const int32_t* begins;  ///< of rows that do not begin at 0, else null
  int64_t begins_stride;
  bool inverse;
};

// Sines and cosines of `tile` tokens of sequence b from `first` on.
template <class T>
__device__ void fill_tables(const Rotation<T>& r, int64_t b, int64_t first, int tile, Compute<T>* cosine, Compute<T>* sine) {
  for (int n = threadIdx.x; n < tile * r.half; n += kThreads) {
    const int64_t t = first + n / r.half;
    const int64_t position = r.first_position + t - (r.begins ? r.begins[b * r.begins_stride + t] : 0);
    double s, c;
    ::sincos(static_cast<double>(position) * r.frequency(n % r.half), &s, &c);
    s *= r.frequency.amplitude(), c *= r.frequency.amplitude();
    cosine[n] = static_cast<Compute<T>>(c), sine[n] = static_cast<Compute<T>>(r.inverse ? -s : s);
  }
}

// A block processes `tile` tokens, computes their sines and cosines, once for all sequences that begin at the same position, and uses
// them for all heads of sequences blockIdx.y, blockIdx.y + gridDim.y, ... A thread owns both elements of the pairs that it rotates, 2
// x 16 bytes at a time. Other elements are copied, or, in place, not touched.
template <class T, bool kNeighbours>
__global__ void __launch_bounds__(kThreads) rotate(Rotation<T> r) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  C* cosine = dynamic_shared<C>();
  C* sine = cosine + r.tile * r.half;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * r.tile;
  const int tile = static_cast<int>(std::min<int64_t>(r.tile, r.positions - first));
  const int kept = r.width - 2 * r.half;  // the first elements
  const int chunks = static_cast<int>(blocks_for(r.half, kSize)),
            wide_chunks = static_cast<int>(blocks_for(r.width, kSize));
  const bool copied = r.x != r.y && (kept > 0 || r.rotated < r.heads);
  const int pieces = tile * r.rotated * chunks;  // of one sequence, here and below
  const int copies = copied ? tile * r.heads * wide_chunks : 0;
  for (int64_t b = blockIdx.y; b < r.batch; b += gridDim.y) {
    if (r.begins || b == blockIdx.y) {
      __syncthreads();
      fill_tables(r, b, first, tile, cosine, sine);
      __syncthreads();
    }
    for (int n = threadIdx.x; n < pieces; n += kThreads) {
      const int row = n / chunks, t = row / r.rotated, h = row - t * r.rotated;
      const int at = (n - row * chunks) * kSize;  // the first of kSize pairs
      const T* x = r.x + b * r.xb + (first + t) * r.xt + h * r.xh + kept;
      T* y = r.y + b * r.yb + (first + t) * r.yt + h * r.yh + kept;
      const int from[] = {kNeighbours ? 2 * at : at, kNeighbours ? 2 * at + kSize : r.half + at},
                end[] = {kNeighbours ? 2 * r.half : r.half, 2 * r.half};
      const uint4 raw[] = {load_raw(x, from[0], end[0]), load_raw(x, from[1], end[1])};
      Pack<T> packs[] = {unpressed<T>(raw[0]), unpressed<T>(raw[1])};
      const C *c = cosine + t * r.half + at, *s = sine + t * r.half + at;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        if (at + k >= r.half) break;
        T& low = kNeighbours ? packs[2 * k / kSize].v[2 * k % kSize] : packs[0].v[k];
        T& high = kNeighbours ? packs[2 * k / kSize].v[2 * k % kSize + 1] : packs[1].v[k];
        const C p = convert_to<C>(low), q = convert_to<C>(high);
        low = element<T>(p * c[k] - q * s[k]), high = element<T>(q * c[k] + p * s[k]);
      }
      store_chunk(y, from[0], end[0], packs[0]), store_chunk(y, from[1], end[1], packs[1]);
    }
    for (int n = threadIdx.x; n < copies; n += kThreads) {
      const int row = n / wide_chunks, t = row / r.heads, h = row - t * r.heads;
      const int at = (n - row * wide_chunks) * kSize, end = h < r.rotated ? kept : r.width;
      const T* x = r.x + b * r.xb + (first + t) * r.xt + h * r.xh;
      T* y = r.y + b * r.yb + (first + t) * r.yt + h * r.yh;
      if (at < end) store_chunk(y, at, end, load_chunk(x, at, end));
    }
  }
}

}  // namespace

size_t rotary_workspace(const View&, const RotaryPart&, const RotaryPositions&) { return 0; }

void rotary(const Stream& stream, const View& x, double theta, const RotaryScaling& scaling,
            const RotaryPositions& positions, const RotaryPart& part, bool inverse, const View& y,
            Workspace) {
  const char* who = "rotary";
  check_rotary(x, theta, positions, part, y);
  if (x.numel() == 0) return;
  const int64_t half = part.width / 2;
  const size_t bytes_each = 2 * half * (x.dtype == kF64 ? 8 : 4);  // of a position's angles
  check<ShapeError>(bytes_each <= (200 << 10) && x.shape[2] * x.shape[3] <= INT32_MAX / kThreads,
                    "[rotary] heads are too wide or too many: ", x.shape);
  const int64_t tile = std::clamp<int64_t>(kThreads / std::max<int64_t>(half, 1), 1, x.shape[1]),
                tiles = blocks_for(x.shape[1], tile);
  visit_floating(who, x.dtype, [&]<class T>() {
    // The last dimensions are dense, as rows_of checks.
    launch(who, stream,
           {.blocks = tiles,
            .threads = kThreads,
            .blocks_y = std::min<int64_t>(x.shape[0], blocks_for(2048, tiles)),
            .shared_bytes = tile * bytes_each},
           part.neighbours ? rotate<T, true> : rotate<T, false>,
           Rotation<T>{rows_of<const T>(who, x).data, rows_of<T>(who, y).data, x.shape[0],
                       x.shape[1], static_cast<int>(x.shape[2]), static_cast<int>(x.shape[3]),
                       static_cast<int>(std::clamp<int64_t>(part.heads, 0, x.shape[2])),
                       static_cast<int>(half), static_cast<int>(tile), x.strides[0], x.strides[1],
                       x.strides[2], y.strides[0], y.strides[1], y.strides[2],
                       RotaryFrequencies(theta, half, scaling), positions.first,
                       given(positions.begins) ? positions.begins.as<int32_t>() : nullptr,
                       given(positions.begins) ? positions.begins.strides[0] : 0, inverse});
  });
}

}  // namespace sheaf::kernels::cuda
