// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", SC'11). A value is a pure function of a key and of an element's
// global index, so any world size, placement, thread count, instruction set and device draws the
// same bits. Nothing here calls libm (sqrt is an IEEE operation) or relies on contraction;
// everything is inline so that device code compiles the same text (-fmad=false).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

#ifdef __CUDACC__
#define SHEAF_HOST_DEVICE __host__ __device__
#else
#define SHEAF_HOST_DEVICE
#endif

namespace sheaf {

/// Names one stream of random numbers.
struct Key {
  uint64_t value = 0;
  bool operator==(const Key&) const = default;
};

/// The stream of a name under a seed, such as a parameter's path. The same on every platform.
Key key_of(std::string_view name, uint64_t seed);

namespace detail {
/// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64 bits that spreads every bit.
SHEAF_HOST_DEVICE inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
}  // namespace detail

/// A separate stream for each `data`: a step, a call, a layer.
SHEAF_HOST_DEVICE inline Key fold_in(Key key, uint64_t data) {
  return {detail::mix(key.value ^ detail::mix(data))};
}

namespace philox {

struct Block {
  uint32_t word[4];
};

/// One block of 128 random bits: ten rounds.
SHEAF_HOST_DEVICE inline Block block(const Block& counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0,
                   n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c0 = n0, c1 = static_cast<uint32_t>(p1), c2 = n2, c3 = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
/// Block number `index` of a stream.
SHEAF_HOST_DEVICE inline Block block(Key key, uint64_t index) {
  return block(Block{{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0}},
               static_cast<uint32_t>(key.value), static_cast<uint32_t>(key.value >> 32));
}

}  // namespace philox

/// 32 random bits of element `index`: four elements share a block.
SHEAF_HOST_DEVICE inline uint32_t random_u32(Key key, uint64_t index) {
  return philox::block(key, index >> 2).word[index & 3];
}
/// 64 random bits of element `index`: two elements share a block.
SHEAF_HOST_DEVICE inline uint64_t random_u64(Key key, uint64_t index) {
  const philox::Block b = philox::block(key, index >> 1);
  const int at = static_cast<int>(index & 1) * 2;
  return uint64_t{b.word[at + 1]} << 32 | b.word[at];
}

/// Uniform in [0, 1): multiples of 2^-24, exact in f32.
SHEAF_HOST_DEVICE inline float uniform_from(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

namespace detail {
/// Natural logarithm of a positive normal number within 1 ulp, of IEEE operations only (fdlibm's
/// e_log.c).
SHEAF_HOST_DEVICE inline double portable_log(double x) {
#ifdef __CUDA_ARCH__
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x));
#else
  const uint64_t bits = std::bit_cast<uint64_t>(x);
#endif
  // x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)).
  const int64_t k = static_cast<int64_t>(bits - 0x3fe6a09e667f3bcdull) >> 52;
  const uint64_t scaled = bits - (static_cast<uint64_t>(k) << 52);
#ifdef __CUDA_ARCH__
  const double f = __longlong_as_double(static_cast<long long>(scaled)) - 1.0;
#else
  const double f = std::bit_cast<double>(scaled) - 1.0;
#endif
  const double s = f / (2.0 + f), z = s * s, w = z * z;
  const double t1 = w * (3.999999999940941908e-01 +
                         w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double t2 = z * (6.666666666666735130e-01 +
                         w * (2.857142874366239149e-01 +
                              w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const double half = 0.5 * f * f, n = static_cast<double>(k);
  return n * 6.93147180369123816490e-01 -
         ((half - (s * (half + (t1 + t2)) + n * 1.90821492927058770002e-10)) - f);
}

/// normal_quantile(q + 1/2) for q at most kMiddle from 0. Without branches, so that compilers vectorize it.
inline constexpr double kMiddle = 0.425;
SHEAF_HOST_DEVICE inline double normal_quantile_middle(double q) {
  const double r = 0.180625 - q * q;
  return q *
         (((((((2509.0809287301226727 * r + 33430.575583588128105) * r + 67265.770927008700853) *
                  r +
              45921.953931549871457) *
                 r +
             13731.693765509461125) *
                r +
            1971.5909503065514427) *
               r +
           133.14166789178437745) *
              r +
          3.387132872796366608) /
         (((((((5226.495278852545925 * r + 28729.085735721942674) * r + 39307.89580009271061) *
                  r +
              21213.794301586595867) *
                 r +
             5394.1960214247511077) *
                r +
            687.1870074920579083) *
               r +
           42.313330701600911252) *
              r +
          1.0);
}
/// The same further out, where p = q + 1/2.
SHEAF_HOST_DEVICE inline double normal_quantile_tail(double p, double q) {
  double r = std::sqrt(-detail::portable_log(q < 0.0 ? p : 1.0 - p)), tail;
  if (r <= 5.0) {
    r -= 1.6;
    tail = (((((((7.7454501427834140764e-4 * r + 0.0227238449892691845833) * r +
                 0.24178072517745061177) *
                    r +
                1.27045825245236838258) *
                   r +
               3.64784832476320460504) *
                  r +
              5.7694972214606914055) *
                 r +
             4.6303378461565452959) *
                r +
            1.42343711074968357734) /
           (((((((1.05075007164441684324e-9 * r + 5.475938084995344946e-4) * r +
                 0.0151986665636164571966) *
                    r +
                0.14810397642748007459) *
                   r +
               0.68976733498510000455) *
                  r +
              1.6763848301838038494) *
                 r +
             2.05319162663775882187) *
                r +
            1.0);
  } else {
    r -= 5.0;
    tail = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r +
                 0.0012426609473880784386) *
                    r +
                0.026532189526576123093) *
                   r +
               0.29656057182850489123) *
                  r +
              1.7848265399172913358) *
                 r +
             5.4637849111641143699) *
                r +
            6.6579046435011037772) /
           (((((((2.04426310338993978564e-15 * r + 1.4215117583164458887e-7) * r +
                 1.8463183175100546818e-5) *
                    r +
                7.868691311456132591e-4) *
                   r +
               0.0148753612908506148525) *
                  r +
              0.13692988092273580531) *
                 r +
             0.59983220655588793769) *
                r +
            1.0);
  }
  return q < 0.0 ? -tail : tail;
}
}  // namespace detail

/// The standard normal quantile of p in (0, 1), relative error 1e-16: algorithm AS 241, PPND16
/// (Wichura 1988).
SHEAF_HOST_DEVICE inline double normal_quantile(double p) {
  const double q = p - 0.5;
  return q >= -detail::kMiddle && q <= detail::kMiddle ? detail::normal_quantile_middle(q)
                                                       : detail::normal_quantile_tail(p, q);
}

namespace detail {
/// The middle of one of 2^52 equal cells of (0, 1), chosen by 64 bits. Also without branches.
SHEAF_HOST_DEVICE inline double cell_from(uint64_t bits) {
#ifdef __CUDA_ARCH__
  const double cell = static_cast<double>(bits >> 12);
#else
  // 2^52 + (bits >> 12), whose lowest bit counts 1, is exact; AVX2 converts no 64-bit integers.
  const double cell = std::bit_cast<double>(bits >> 12 | 0x4330000000000000u) - 0x1p52;
#endif
  return (cell + 0.5) * 0x1p-52;
}
}  // namespace detail

/// Standard normal from 64 bits: the quantile of the middle of their cell.
SHEAF_HOST_DEVICE inline double normal_from(uint64_t bits) {
  return normal_quantile(detail::cell_from(bits));
}

}  // namespace sheaf
