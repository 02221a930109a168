#include "sheaf/kernels/cuda/fp8.h"

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/workspace.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr const char* kName = "fp8";
constexpr int kThreads = 256;

/// The magnitude of a value as an integer in the same order, NaN last.
template <class T>
__device__ inline unsigned size_of_value(T x) {
  return __float_as_uint(convert_to<float>(x)) & 0x7fffffffu;
}

/// How the values of a row are rounded.
struct Rounding {
  float scale, inverse;

  static __device__ Rounding of(unsigned largest) {
    return {__uint_as_float(fp8_scale_bits(largest)), __uint_as_float(fp8_inverse_bits(largest))};
  }
  __device__ float rounded(float x) const {
    const float part = x * inverse;
    const float round = __uint_as_float(fp8_rounding_bits(__float_as_uint(part)));
    return rounded_sum(rounded_sum(part, round), -round);
  }
  /// Rounds two neighbours, to codes if Out is uint8_t, else to their values.
  template <class Out>
  __device__ void two(float x, float y, Out* out) const {
    if constexpr (!std::is_same_v<Out, uint8_t>) {
      out[0] = element<Out>(rounded(x) * scale), out[1] = element<Out>(rounded(y) * scale);
    } else {
#ifdef __CUDA_ARCH__
      unsigned short codes;  // the second operand is the low byte
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
          : "=h"(codes)
          : "f"(y * inverse), "f"(x * inverse));
      out[0] = static_cast<uint8_t>(codes & 255), out[1] = static_cast<uint8_t>(codes >> 8);
#else
      out[0] = fp8_code(__float_as_uint(rounded(x)));
      out[1] = fp8_code(__float_as_uint(rounded(y)));
#endif
    }
  }
};

// A block rounds a row, in place if requested: it has been read before the result is written.
template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    round_rows(Rows<const T> rows, Out* out, int64_t pitch, float* scales) {
  constexpr int kSize = Pack<T>::kSize;
  __shared__ unsigned scratch[kThreads / kWarp];
  const int64_t r = blockIdx.x, step = static_cast<int64_t>(blockDim.x) * kSize;
  const T* row = rows[r];
  unsigned largest = 0;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kSize; at < rows.cols; at += step) {
    const Pack<T> pack = load_chunk(row, at, rows.cols);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const unsigned size = size_of_value(pack.v[k]);
      largest = size > largest ? size : largest;
    }
  }
  const Rounding to = Rounding::of(block_max(largest, scratch));
  if (scales && threadIdx.x == 0) scales[r] = to.scale;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kSize; at < pitch; at += step) {
    const Pack<T> pack = load_chunk(row, at, rows.cols);
    Group<Out, kSize> group;
#pragma unroll
    for (int k = 0; k < kSize; k += 2)
      to.two(convert_to<float>(pack.v[k]), convert_to<float>(pack.v[k + 1]), group.v + k);
    if constexpr (std::is_same_v<Out, uint8_t>) {  // at multiples of 16 bytes, up to the padded end
      reinterpret_cast<Group<Out, kSize>*>(out + r * pitch)[at / kSize] = group;
    } else {
      Pack<Out> values;
#pragma unroll
      for (int k = 0; k < kSize; ++k) values.v[k] = group.v[k];
      store_chunk(out + r * pitch, at, pitch, values);
    }
  }
}

// For column-major operands: from[.., R, K] with adjacent rows. Tiles go through shared memory so that both sides are accessed along
// their own lines.
constexpr int kTile = 64, kWarps = kThreads / kWarp;
constexpr int64_t kMostParts = 32;  // into which a column is divided to find its largest magnitude

template <class T>
struct Columns {
  const T* data;
  Layout<1> outer;  // the other dimensions
  int64_t rows, depth, step, tiles, parts;

  __device__ const T* matrix(int64_t i) const { return data + outer.offset(0, i); }
};

template <class T>
Columns<T> columns_of(const View& v) {
  Shape heads = v.shape, strides = v.strides;
  for (int i = 0; i < 2; ++i) heads.erase(heads.rank() - 1), strides.erase(strides.rank() - 1);
  return {.data = v.as<const T>(),
          .outer = Layout<1>(heads, {strides}, Order::row_major),
          .rows = v.shape.dim(-2),
          .depth = v.shape.back(),
          .step = v.strides.back(),
          .tiles = blocks_for(v.shape.dim(-2), kTile),
          .parts = std::min(kMostParts, blocks_for(v.shape.back(), kTile))};
}

// largest[matrix, part, row]: block (tile of rows of a matrix, part).
template <class T>
__global__ void __launch_bounds__(kThreads) largest_of_parts(Columns<T> c, unsigned* largest) {
  __shared__ unsigned of_warps[kWarps * kTile];
  const int64_t matrix = blockIdx.x / c.tiles, first = blockIdx.x % c.tiles * kTile;
  const int64_t part = blockIdx.y, begin = c.depth * part / c.parts,
                end = c.depth * (part + 1) / c.parts;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const T* from = c.matrix(matrix);
  unsigned most[2] = {0, 0};
  for (int64_t k = begin + warp; k < end; k += kWarps) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t r = first + lane + half * kWarp;
      if (r >= c.rows) continue;
      const unsigned size = size_of_value(from[r + k * c.step]);
      most[half] = size > most[half] ? size : most[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) of_warps[warp * kTile + lane + half * kWarp] = most[half];
  __syncthreads();
  if (threadIdx.x >= kTile || first + threadIdx.x >= c.rows) return;
  unsigned all = 0;
  for (int w = 0; w < kWarps; ++w) {
    const unsigned size = of_warps[w * kTile + threadIdx.x];
    all = size > all ? size : all;
  }
  largest[(matrix * c.parts + part) * c.rows + first + threadIdx.x] = all;
}

// Block (tile of rows of a matrix, tile of the depth).
template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    round_columns(Columns<T> c, const unsigned* largest, Out* out, int64_t pitch, float* scales) {
  // A row has an odd number of whole words: neighbours in a column are in different banks.
  constexpr int kPitch = kTile + (sizeof(Out) < 4 ? 4 / static_cast<int>(sizeof(Out)) : 1);
  constexpr int kEach = kTile / kWarps;
  __shared__ uint32_t words[kTile * kPitch * sizeof(Out) / 4];
  Out* const tile = reinterpret_cast<Out*>(words);
  __shared__ unsigned most[kTile];
  const int64_t matrix = blockIdx.x / c.tiles, first = blockIdx.x % c.tiles * kTile,
                k0 = blockIdx.y * int64_t{kTile};
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (threadIdx.x < kTile && first + threadIdx.x < c.rows) {
    unsigned all = 0;
    for (int64_t part = 0; part < c.parts; ++part) {
      const unsigned size = largest[(matrix * c.parts + part) * c.rows + first + threadIdx.x];
      all = size > all ? size : all;
    }
    most[threadIdx.x] = all;
    if (scales && blockIdx.y == 0)
      scales[matrix * c.rows + first + threadIdx.x] = Rounding::of(all).scale;
  }
  __syncthreads();
  const T* from = c.matrix(matrix);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = lane + half * kWarp;
    const int64_t r = first + place;
    if (r >= c.rows) continue;
    const Rounding to = Rounding::of(most[place]);
#pragma unroll
    for (int k = warp * kEach; k < (warp + 1) * kEach; k += 2) {
      const auto at = [&](int64_t i) {
        return i < c.depth ? convert_to<float>(from[r + i * c.step]) : 0.0f;
      };
      to.two(at(k0 + k), at(k0 + k + 1), tile + place * kPitch + k);
    }
  }
  __syncthreads();
  // Codes are written four at a time: their rows are multiples of 16 bytes.
  using Unit = std::conditional_t<std::is_same_v<Out, uint8_t>, uint32_t, Out>;
  constexpr int kWidth = sizeof(Unit) / sizeof(Out), kUnits = kTile / kWidth;
  for (int i = threadIdx.x; i < kTile * kUnits; i += kThreads) {
    const int place = i / kUnits, k = i % kUnits * kWidth;
    if (first + place >= c.rows || k0 + k >= pitch) continue;
    *reinterpret_cast<Unit*>(out + (matrix * c.rows + first + place) * pitch + k0 + k) =
        *reinterpret_cast<const Unit*>(tile + place * kPitch + k);
  }
}

bool in_rows(const View& v) { return v.strides.back() == 1 || v.shape.back() <= 1; }
bool in_columns(const View& v) {
  return v.rank() >= 2 && (v.strides.dim(-2) == 1 || v.shape.dim(-2) <= 1);
}

/// `out`: [.., R, pitch], dense.
template <class Out>
void round_to(const Stream& stream, const View& from, Out* out, int64_t pitch, float* scales,
              Workspace workspace) {
  if (from.numel() == 0) return;
  visit_floating(kName, from.dtype, [&]<class T>() {
    constexpr bool kSame = std::is_same_v<Out, uint8_t> || std::is_same_v<Out, T>;
    if constexpr (kSame && !std::is_same_v<T, double>) {
      if (in_rows(from)) {
        const Rows<const T> rows = rows_of<const T>(kName, from);
        const int threads = threads_for(blocks_for(pitch, Pack<T>::kSize), kThreads);
        return launch(kName, stream, {.blocks = rows.count, .threads = threads}, round_rows<T, Out>,
                      rows, out, pitch, scales);
      }
      const Columns<T> c = columns_of<T>(from);
      Carver carver(kName, workspace);
      auto* const largest = carver.take<unsigned>(c.outer.numel * c.parts * c.rows);
      const LaunchShape shape{.blocks = c.outer.numel * c.tiles, .threads = kThreads};
      LaunchShape parts = shape, depth = shape;
      parts.blocks_y = c.parts, depth.blocks_y = blocks_for(pitch, kTile);
      launch(kName, stream, parts, largest_of_parts<T>, c, largest);
      launch(kName, stream, depth, round_columns<T, Out>, c, largest, out, pitch, scales);
    }
  });
}

}  // namespace

bool can_round_to_fp8(const View& v) { return in_rows(v) || in_columns(v); }

size_t round_to_fp8_workspace(const View& from) {
  if (in_rows(from) || !in_columns(from) || from.numel() == 0) return 0;
  const int64_t parts = std::min(kMostParts, blocks_for(from.shape.back(), kTile));
  return line_align(static_cast<size_t>(from.numel() / from.shape.back() * parts) *
                    sizeof(unsigned));
}

void to_fp8_codes(const Stream& stream, const View& from, uint8_t* codes, float* scales,
                  Workspace workspace) {
  check<DTypeError>(is_floating(from.dtype) && from.dtype != kF64, "[fp8] no codes of ",
                    from.dtype);
  check<ShapeError>(can_round_to_fp8(from) && reinterpret_cast<uintptr_t>(codes) % 16 == 0,
                    "[fp8] rows ", from.shape, " of strides ", from.strides, " to codes");
  round_to(stream, from, codes, fp8_pitch(from.shape.back()), scales, workspace);
}

void round_to_fp8(const Stream& stream, const View& from, const View& to, Workspace workspace) {
  check_fp8(from, to);
  check<ShapeError>(to.contiguous(), "[fp8] to rows that are not dense: strides ", to.strides);
  const bool copies = !can_round_to_fp8(from);
  if (copies) copy(stream, from, to);
  visit_floating(kName, to.dtype, [&]<class T>() {
    round_to(stream, copies ? to : from, to.as<T>(), to.shape.back(), nullptr, workspace);
  });
}

}  // namespace sheaf::kernels::cuda
