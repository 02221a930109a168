#include "sheaf/kernels/cuda/numbers.h"
#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/kernels/sum_of_squares.h"

// Compiled with -fmad=false -ftz=true: a block's sum has the bits of the CPU. Limbs are integers,
// so threads add to them in any order.
namespace sheaf::kernels::cuda {
namespace {

using cpu::kSquareLimbs;
using Limb = unsigned long long;  // of an i64: the type that atomicAdd takes

constexpr int kFlag = kSquareLimbs - 1;
constexpr int kLowestBit = -384;
constexpr int kBlock = 32;  // elements
constexpr Limb kInfinite = 1, kNan = Limb{1} << 32;
constexpr int kWarps = 4;                  // of a thread block
constexpr int64_t kTile = kBlock * kWarp;  // elements a warp takes at a time, a block each lane

__device__ double square_sum(double a, double b) { return a * a + b * b; }
/// Squares of f32 are exact in f64.
__device__ double square_sum(float a, float b) {
  const double wide_a = a, wide_b = b;
  return fma(wide_b, wide_b, wide_a * wide_a);
}

/// The sum of 32 squares in the CPU's order: lane i of 16 is x[i]² + x[i + 16]², then lanes fold in
/// halves.
template <class T>
__device__ double block_sum(const uint4* packs) {
  constexpr int kSize = Pack<T>::kSize;
  Compute<T> x[kBlock];
#pragma unroll
  for (int p = 0; p < kBlock / kSize; ++p) {
    Pack<T> pack;
    memcpy(static_cast<void*>(&pack), &packs[p], sizeof pack);
#pragma unroll
    for (int k = 0; k < kSize; ++k) x[p * kSize + k] = convert_to<Compute<T>>(pack.v[k]);
  }
  const auto lane = [&](int i) { return square_sum(x[i], x[i + 16]); };
  double four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = (lane(i) + lane(i + 8)) + (lane(i + 4) + lane(i + 12));
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/// A block sum as three digits of limbs `limb`, `limb` + 1 and `limb` + 2.
struct Digits {
  int limb = 0;
  Limb digit[3] = {};
};
/// `block` is not negative and at most 2^320.
__device__ Digits digits_of(double block) {
  Digits out;
  const Limb bits = static_cast<Limb>(__double_as_longlong(block));
  const int exponent = static_cast<int>(bits >> 52);
  if (exponent == 0) return out;
  Limb mantissa = (bits & 0xfffffffffffffull) | 0x10000000000000ull;
  int position = exponent - 1075 - kLowestBit;
  if (position < 0) {
    mantissa = position > -64 ? mantissa >> -position : 0;
    position = 0;
  }
  const int shift = position % 32;
  const Limb low = mantissa << shift;
  out.limb = position / 32;
  out.digit[0] = low & 0xffffffffu, out.digit[1] = low >> 32;
  out.digit[2] = shift == 0 ? 0 : mantissa >> (64 - shift);
  return out;
}

/// Four neighbouring limbs in each lane's registers: enough for most block sums of a tensor, which have similar magnitudes. `base` is
/// the same in the whole warp.
struct Window {
  int base = -2;  // no limb yet
  Limb sum[4] = {};

  /// Adds the lanes' values to `limbs`.
  __device__ void flush(Limb* limbs) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Limb total = sum[k];
      for (int step = kWarp / 2; step > 0; step /= 2)
        total += __shfl_xor_sync(kFullWarp, total, step);
      if (threadIdx.x % kWarp == 0 && total != 0) atomicAdd(&limbs[base + k], total);
      sum[k] = 0;
    }
  }
  /// Called by all lanes together.
  __device__ void add(const Digits& x, Limb* limbs) {
    const bool zero = (x.digit[0] | x.digit[1] | x.digit[2]) == 0;
    if (!__all_sync(kFullWarp, zero || x.limb == base || x.limb == base + 1)) {
      flush(limbs);
      base = zero ? kFlag : x.limb;
      for (int step = kWarp / 2; step > 0; step /= 2)
        base = std::min(base, __shfl_xor_sync(kFullWarp, base, step));
    }
    if (x.limb == base)
      sum[0] += x.digit[0], sum[1] += x.digit[1], sum[2] += x.digit[2];
    else if (x.limb == base + 1)
      sum[1] += x.digit[0], sum[2] += x.digit[1], sum[3] += x.digit[2];
    else if (!zero)  // far above the others
      for (int k = 0; k < 3; ++k) atomicAdd(&limbs[x.limb + k], x.digit[k]);
  }
};

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    add_squares(const T* x, int64_t numel, Limb* limbs, bool packs) {
  constexpr int kSize = Pack<T>::kSize, kPacks = kBlock / kSize;
  // Lanes load neighbouring packs and read their blocks from here; one pack of padding keeps the rows that eight lanes read at a time
  // in different banks.
  __shared__ uint4 tiles[kWarps][kWarp][kPacks + 1];
  __shared__ Limb block_limbs[kSquareLimbs];
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  if (threadIdx.x < kSquareLimbs) block_limbs[threadIdx.x] = 0;
  __syncthreads();

  Window window;
  uint4(*tile)[kPacks + 1] = tiles[warp];
  const int64_t step = int64_t{gridDim.x} * kWarps * kTile;
  for (int64_t begin = (int64_t{blockIdx.x} * kWarps + warp) * kTile; begin < numel;
       begin += step) {
    uint4 raw[kPacks];
    const T* from = x + begin + lane * kSize;
    if (packs && numel - begin >= kTile) {  // around the loop: else each load would be waited for
#pragma unroll
      for (int j = 0; j < kPacks; ++j) raw[j] = *reinterpret_cast<const uint4*>(from + j * kWarp * kSize);
    } else {
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        const int64_t at = begin + (j * kWarp + lane) * kSize;
        Pack<T> pack;
#pragma unroll
        for (int k = 0; k < kSize; ++k) pack.v[k] = at + k < numel ? x[at + k] : T{};
        memcpy(&raw[j], &pack, sizeof pack);
      }
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int p = j * kWarp + lane;
      tile[p / kPacks][p % kPacks] = raw[j];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPacks; ++j) raw[j] = tile[lane][j];
    __syncwarp();
    double block = block_sum<T>(raw);
    if (!(block <= 0x1p320)) {
      atomicAdd(&block_limbs[kFlag], block != block ? kNan : kInfinite);
      block = 0;
    }
    window.add(digits_of(block), block_limbs);
  }
  window.flush(block_limbs);
  __syncthreads();
  if (threadIdx.x < kSquareLimbs && block_limbs[threadIdx.x] != 0)
    atomicAdd(&limbs[threadIdx.x], block_limbs[threadIdx.x]);
}

/// Leaves 32 bits in each limb but the topmost, as the CPU does.
__global__ void propagate_carries(Limb* limbs) {
  if (threadIdx.x != 0) return;
  Limb carry = 0;
  for (int i = 0; i < kFlag - 1; ++i) {
    const Limb value = limbs[i] + carry;
    limbs[i] = value & 0xffffffffu, carry = value >> 32;
  }
  limbs[kFlag - 1] += carry;
  limbs[kFlag] = limbs[kFlag] >= kNan ? kNan : limbs[kFlag] > 0 ? kInfinite : 0;
}

/// The value to nearest even, as cpu::sum_of_squares_finish finds it.
__device__ double value_of(const Limb* given) {
  if (given[kFlag] != 0)
    return __longlong_as_double(given[kFlag] >= kNan ? 0x7ff8000000000000ll : 0x7ff0000000000000ll);
  Limb digit[kSquareLimbs];
  Limb carry = 0;
  for (int i = 0; i < kFlag; ++i) {
    const Limb value = given[i] + carry;
    digit[i] = value & 0xffffffffu, carry = value >> 32;
  }
  digit[kFlag] = carry;  // what the topmost limb holds beyond 32 bits
  int top = kFlag;
  while (top > 0 && digit[top] == 0) --top;
  const auto at = [&](int i) { return i >= 0 ? digit[i] : 0; };
  if (at(top) == 0) return 0;
  // 64 bits from the leading one on, and whether anything below is not zero.
  const int empty = __clzll(static_cast<long long>(at(top))) - 32;  // above the leading one
  const Limb high = (at(top) << 32) | at(top - 1), low = at(top - 2);
  const Limb head = empty == 0 ? high : (high << empty) | (low >> (32 - empty));
  bool below = ((low << empty) & 0xffffffffu) != 0;
  for (int i = top - 3; i >= 0; --i) below |= digit[i] != 0;
  Limb mantissa = head >> 11;
  const Limb rest = head & 0x7ff, half = 0x400;
  if (rest > half || (rest == half && (below || (mantissa & 1)))) ++mantissa;
  return ldexp(static_cast<double>(mantissa), 11 - empty + 32 * (top - 1) + kLowestBit);
}

__global__ void finish(const Limb* limbs, double* out) {
  if (threadIdx.x == 0) *out = value_of(limbs);
}
__global__ void finish_clip(const Limb* limbs, double max_norm, double* norm, double* scale,
                            const float* loss_scale, int32_t* found_inf) {
  if (threadIdx.x != 0) return;
  const double loss = loss_scale ? *loss_scale : 1.0;
  const double root = ::sqrt(value_of(limbs)) / loss, ratio = max_norm / (root + 1e-6);
  *norm = root, *scale = (ratio >= 1.0 ? 1.0 : ratio) / loss;
  if (found_inf) *found_inf = root - root != 0.0;  // infinity or NaN
}

void check_finish(const char* who, const View& limbs, const View& out) {
  check<ShapeError>(limbs.contiguous() && limbs.numel() == kSquareLimbs && limbs.dtype == kI64 &&
                        out.numel() == 1 && out.dtype == kF64,
                    '[', who, "] wants i64[24] and f64[], got ", limbs.dtype, limbs.shape, " and ",
                    out.dtype, out.shape);
}

}  // namespace

size_t sum_of_squares_workspace(const View&) { return 0; }

void sum_of_squares(const Stream& stream, const View& x, const View& limbs, Workspace) {
  check<ShapeError>(
      x.contiguous() && limbs.contiguous() && limbs.numel() == kSquareLimbs && limbs.dtype == kI64,
      "[sum_of_squares] ", x.shape, " must be dense, and limbs i64[24], not ", limbs.dtype,
      limbs.shape);
  check<DTypeError>(is_floating(x.dtype), "[sum_of_squares] is not defined for ", x.dtype);
  fill_bytes(stream, limbs.data, 0, static_cast<size_t>(limbs.bytes()));
  // A few blocks per multiprocessor: a block adds its limbs to the result once.
  const int64_t most = 12 * multiprocessors(stream.device.index);
  visit_floating("sum_of_squares", x.dtype, [&]<class T>() {
    launch("sum_of_squares", stream,
           {.blocks = std::min(blocks_for(x.numel(), kWarps * kTile), most),
            .threads = kWarps * kWarp},
           add_squares<T>, x.as<T>(), x.numel(), limbs.as<Limb>(), aligned16(x.data));
  });
  launch("sum_of_squares_carries", stream, {.blocks = 1, .threads = kWarp}, propagate_carries, limbs.as<Limb>());
}

void sum_of_squares_finish(const Stream& stream, const View& limbs, const View& out) {
  check_finish("sum_of_squares_finish", limbs, out);
  launch("sum_of_squares_finish", stream, {.blocks = 1, .threads = kWarp}, finish, limbs.as<Limb>(),
         out.as<double>());
}

void clip_scale(const Stream& stream, const View& limbs, double max_norm, const View& norm,
                const View& scale, const View& loss_scale, const View& found_inf) {
  check_finish("clip_scale", limbs, norm), check_finish("clip_scale", limbs, scale);
  check<ShapeError>(!loss_scale.data || (loss_scale.numel() == 1 && loss_scale.dtype == kF32),
                    "[clip_scale] the loss scale is f32[], not ", loss_scale.dtype,
                    loss_scale.shape);
  check<ShapeError>(!found_inf.data || (found_inf.numel() == 1 && found_inf.dtype == kI32),
                    "[clip_scale] found_inf is i32[], not ", found_inf.dtype, found_inf.shape);
  launch("clip_scale", stream, {.blocks = 1, .threads = kWarp}, finish_clip, limbs.as<Limb>(),
         max_norm, norm.as<double>(), scale.as<double>(), loss_scale.as<float>(),
         found_inf.as<int32_t>());
}

}  // namespace sheaf::kernels::cuda
