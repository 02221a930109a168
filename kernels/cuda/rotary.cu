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
  int heads, rotated;
  int half;                        ///< D / 2
  int tile;                        ///< positions of a block
  int64_t xb, xt, xh, yb, yt, yh;  ///< strides
  RotaryFrequencies frequency;
  int64_t first_position;
  bool inverse;
};

// A block takes `tile` positions, computes their sines and cosines once, and uses them for all
// heads of sequences blockIdx.y, blockIdx.y + gridDim.y, ... A thread owns both elements of the
// pairs that it rotates, 16 bytes of each at a time.
template <class T>
__global__ void __launch_bounds__(kThreads) rotate(Rotation<T> r) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  C* cosine = dynamic_shared<C>();
  C* sine = cosine + r.tile * r.half;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * r.tile;
  const int tile = static_cast<int>(std::min<int64_t>(r.tile, r.positions - first));
  for (int n = threadIdx.x; n < tile * r.half; n += kThreads) {
    const double angle =
        static_cast<double>(r.first_position + first + n / r.half) * r.frequency(n % r.half);
    double s, c;
    ::sincos(angle, &s, &c);
    s *= r.frequency.amplitude(), c *= r.frequency.amplitude();
    cosine[n] = static_cast<C>(c), sine[n] = static_cast<C>(r.inverse ? -s : s);
  }
  __syncthreads();

  const int chunks = static_cast<int>(blocks_for(r.half, kSize));
  const int pieces = tile * r.heads * chunks;  // of one sequence
  for (int64_t b = blockIdx.y; b < r.batch; b += gridDim.y)
    for (int n = threadIdx.x; n < pieces; n += kThreads) {
      const int row = n / chunks, t = row / r.heads, h = row - t * r.heads;
      const int at = (n - row * chunks) * kSize;
      const T* x = r.x + b * r.xb + (first + t) * r.xt + h * r.xh;
      T* y = r.y + b * r.yb + (first + t) * r.yt + h * r.yh;
      if (h >= r.rotated && x == y) continue;
      Pack<T> low = load_chunk(x, at, r.half), high = load_chunk(x + r.half, at, r.half);
      if (h < r.rotated) {
        const C *c = cosine + t * r.half + at, *s = sine + t * r.half + at;
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          if (at + k >= r.half) break;
          const C p = convert_to<C>(low.v[k]), q = convert_to<C>(high.v[k]);
          low.v[k] = element<T>(p * c[k] - q * s[k]), high.v[k] = element<T>(q * c[k] + p * s[k]);
        }
      }
      store_chunk(y, at, r.half, low), store_chunk(y + r.half, at, r.half, high);
    }
}

}  // namespace

size_t rotary_workspace(const View&) { return 0; }

void rotary(const Stream& stream, const View& x, double theta, const RotaryScaling& scaling,
            int64_t first_position, int64_t heads, bool inverse, const View& y, Workspace) {
  const char* who = "rotary";
  check<ShapeError>(x.rank() == 4 && x.shape[3] % 2 == 0 && y.shape == x.shape,
                    "[rotary] wants [B, T, H, D] with even D, got ", x.shape, " into ", y.shape);
  check<DTypeError>(y.dtype == x.dtype, "[rotary] ", x.dtype, " into ", y.dtype);
  check<ConfigError>(first_position >= 0 && theta > 0, "[rotary] first position ", first_position,
                     ", theta ", theta);
  if (x.numel() == 0) return;
  const int64_t half = x.shape[3] / 2;
  const size_t bytes_each = 2 * half * (x.dtype == kF64 ? 8 : 4);  // of a position's angles
  check<ShapeError>(bytes_each <= (200 << 10) && x.shape[2] * half <= INT32_MAX / kThreads,
                    "[rotary] heads are too wide or too many: ", x.shape);
  const int64_t tile = std::clamp<int64_t>(kThreads / half, 1, x.shape[1]),
                tiles = blocks_for(x.shape[1], tile);
  visit_floating(who, x.dtype, [&]<class T>() {
    // The last dimensions are dense, as rows_of checks.
    launch(who, stream,
           {.blocks = tiles,
            .threads = kThreads,
            .blocks_y = std::min<int64_t>(x.shape[0], blocks_for(2048, tiles)),
            .shared_bytes = tile * bytes_each},
           rotate<T>,
           Rotation<T>{rows_of<const T>(who, x).data, rows_of<T>(who, y).data, x.shape[0],
                       x.shape[1], static_cast<int>(x.shape[2]),
                       static_cast<int>(std::clamp<int64_t>(heads, 0, x.shape[2])),
                       static_cast<int>(half), static_cast<int>(tile), x.strides[0], x.strides[1],
                       x.strides[2], y.strides[0], y.strides[1], y.strides[2],
                       RotaryFrequencies(theta, half, scaling), first_position, inverse});
  });
}

}  // namespace sheaf::kernels::cuda
