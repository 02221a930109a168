#include "sheaf/kernels/sum_of_squares.h"

#include <bit>
#include <cmath>
#include <limits>

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/read_ahead.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

constexpr int kFlag = kSquareLimbs - 1;
constexpr int kLowestBit = -384;
constexpr int64_t kBlock = 32;
constexpr int64_t kInfinite = 1, kNan = int64_t{1} << 32;

/// The sum of 32 squares: lane i of 16 is x[i]² + x[i + 16]², then lanes fold in halves, as
/// sum(Lanes) does.
SHEAF_INLINE double block_sum(const float* x) {
  auto squares = [&](int i) {
    const __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(x + i));
    return _mm256_mul_pd(v, v);
  };
  auto lanes = [&](int i) { return _mm256_add_pd(squares(i), squares(i + kLanes)); };
  const __m256d four =
      _mm256_add_pd(_mm256_add_pd(lanes(0), lanes(8)), _mm256_add_pd(lanes(4), lanes(12)));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
SHEAF_INLINE double block_sum(const double* x) {
  const Lanes<double> a = load_lanes(x), b = load_lanes(x + kLanes);
  return sum(a * a + b * b);
}
template <class T>
SHEAF_INLINE double block_sum(const T* x) {
  float wide[kBlock];
  load_lanes(x).store(wide), load_lanes(x + kLanes).store(wide + kLanes);
  return block_sum(wide);
}

/// Adds a block sum, which is not negative, to the limbs.
SHEAF_INLINE void accumulate(double block, int64_t* limbs) {
  if (!(block <= 0x1p320)) [[unlikely]] {
    limbs[kFlag] += block != block ? kNan : kInfinite;
    return;
  }
  const uint64_t bits = std::bit_cast<uint64_t>(block);
  const int exponent = static_cast<int>(bits >> 52);
  if (exponent == 0) return;
  uint64_t mantissa = (bits & 0xfffffffffffffull) | 0x10000000000000ull;
  int position = exponent - 1075 - kLowestBit;
  if (position < 0) [[unlikely]] {
    mantissa = position > -64 ? mantissa >> -position : 0;
    position = 0;
  }
  const int limb = position / 32;
  const unsigned __int128 wide = static_cast<unsigned __int128>(mantissa) << (position % 32);
  limbs[limb] += static_cast<int64_t>(static_cast<uint64_t>(wide) & 0xffffffffu);
  limbs[limb + 1] += static_cast<int64_t>(static_cast<uint64_t>(wide) >> 32);
  limbs[limb + 2] += static_cast<int64_t>(wide >> 64);
}

template <class T>
void add_blocks(const T* x, int64_t n, int64_t* limbs) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    constexpr size_t kLine = 64 / sizeof(T);
    for (size_t at = 0; at < kBlock; at += kLine) read_ahead(x + i + at);
    accumulate(block_sum(x + i), limbs);
  }
  if (i < n) {
    T rest[kBlock] = {};
    std::copy_n(x + i, n - i, rest);
    accumulate(block_sum(rest), limbs);
  }
}

int64_t slots_of(const View& x) { return slot_count((x.numel() + kBlock - 1) / kBlock, 1024); }

void check_loss_scale(const View& loss_scale, const View& found_inf) {
  check<ShapeError>(!loss_scale.data || (loss_scale.numel() == 1 && loss_scale.dtype == kF32),
                    "[clip_scale] the loss scale is f32[], not ", loss_scale.dtype,
                    loss_scale.shape);
  check<ShapeError>(!found_inf.data || (found_inf.numel() == 1 && found_inf.dtype == kI32),
                    "[clip_scale] found_inf is i32[], not ", found_inf.dtype, found_inf.shape);
}

}  // namespace

size_t sum_of_squares_workspace(const View& x) {
  return line_align(static_cast<size_t>(slots_of(x) * kSquareLimbs) * sizeof(int64_t));
}

void sum_of_squares(const View& x, const View& limbs, Workspace workspace) {
  check<ShapeError>(
      x.contiguous() && limbs.contiguous() && limbs.numel() == kSquareLimbs && limbs.dtype == kI64,
      "[sum_of_squares] ", x.shape, " must be dense, and limbs i64[24], not ", limbs.dtype,
      limbs.shape);
  const int64_t slots = slots_of(x), blocks = (x.numel() + kBlock - 1) / kBlock;
  int64_t* parts = Carver("sum_of_squares", workspace).take<int64_t>(slots * kSquareLimbs);
  visit_floating("sum_of_squares", x.dtype, [&]<class T>() {
    parallel_slots(blocks, slots, [&](int64_t slot, int64_t begin, int64_t end) {
      int64_t local[kSquareLimbs] = {};
      add_blocks(x.as<T>() + begin * kBlock, std::min(end * kBlock, x.numel()) - begin * kBlock,
                 local);
      std::copy_n(local, kSquareLimbs, parts + slot * kSquareLimbs);
    });
  });
  uint64_t carry = 0;
  for (int64_t i = 0; i < kSquareLimbs; ++i) {
    uint64_t sum = carry;
    for (int64_t s = 0; s < slots; ++s) sum += static_cast<uint64_t>(parts[s * kSquareLimbs + i]);
    const bool carries = i < kFlag - 1;  // the topmost limb keeps its own: no sum of squares that is finite comes that far
    carry = carries ? sum >> 32 : 0;
    limbs.as<int64_t>()[i] = static_cast<int64_t>(carries ? sum & 0xffffffffu : sum);
  }
  int64_t& flag = limbs.as<int64_t>()[kFlag];
  flag = flag >= kNan ? kNan : flag > 0 ? kInfinite : 0;
}

void sum_of_squares_finish(const View& limbs, const View& out) {
  check<ShapeError>(limbs.contiguous() && limbs.numel() == kSquareLimbs && limbs.dtype == kI64 &&
                        out.numel() == 1 && out.dtype == kF64,
                    "[sum_of_squares_finish] wants i64[24] and f64[], got ", limbs.dtype,
                    limbs.shape, " and ", out.dtype, out.shape);
  const int64_t* given = limbs.as<int64_t>();
  double& result = *out.as<double>();
  if (given[kFlag] != 0) {
    result = given[kFlag] >= kNan ? std::numeric_limits<double>::quiet_NaN()
                                  : std::numeric_limits<double>::infinity();
    return;
  }
  // Carries propagate up; the topmost limb has room to spare. One more limb takes what it holds beyond 32 bits.
  uint64_t digit[kSquareLimbs] = {};
  uint64_t carry = 0;
  for (int i = 0; i < kFlag; ++i) {
    const uint64_t value = static_cast<uint64_t>(given[i]) + carry;
    digit[i] = value & 0xffffffffu, carry = value >> 32;
  }
  digit[kFlag] = carry;
  int top = kFlag;
  while (top > 0 && digit[top] == 0) --top;
  // The leading 96 bits or more decide the rounding, together with whether anything below is not zero.
  unsigned __int128 head = 0;
  for (int i = top; i > top - 3; --i) head = (head << 32) | (i >= 0 ? digit[i] : 0);
  bool sticky = false;
  for (int i = top - 3; i >= 0; --i) sticky |= digit[i] != 0;
  if (head == 0) {
    result = 0;
    return;
  }
  int length = 0;
  for (unsigned __int128 h = head; h != 0; h >>= 1) ++length;
  const int drop = std::max(length - 53, 0);
  uint64_t mantissa = static_cast<uint64_t>(head >> drop);
  if (drop > 0) {
    const unsigned __int128 rest = head & ((static_cast<unsigned __int128>(1) << drop) - 1),
                            half = static_cast<unsigned __int128>(1) << (drop - 1);
    if (rest > half || (rest == half && (sticky || (mantissa & 1)))) ++mantissa;
  }
  result = std::ldexp(static_cast<double>(mantissa), drop + 32 * (top - 2) + kLowestBit);
}

void clip_scale(const View& limbs, double max_norm, const View& norm, const View& scale,
                const View& loss_scale, const View& found_inf) {
  check<ShapeError>(scale.numel() == 1 && scale.dtype == kF64, "[clip_scale] scale is f64[], not ",
                    scale.dtype, scale.shape);
  check_loss_scale(loss_scale, found_inf);
  const double loss = loss_scale.data ? *loss_scale.as<float>() : 1.0;
  sum_of_squares_finish(limbs, norm);
  double& root = *norm.as<double>();
  root = std::sqrt(root) / loss;
  const double ratio = max_norm / (root + 1e-6);
  *scale.as<double>() = (ratio >= 1.0 ? 1.0 : ratio) / loss;
  if (found_inf.data) *found_inf.as<int32_t>() = !std::isfinite(root);
}

}  // namespace sheaf::kernels::cpu
