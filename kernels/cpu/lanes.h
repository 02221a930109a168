// Lanes<C>: sixteen values of a compute type (float or double). Sixteen on every instruction set, so that a sum over lanes has one
// order whether the machine processes 8 or 16 floats at a time. Tails are masked: lanes past the end read as zero and are not
// written.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <immintrin.h>

#include "sheaf/core/dtype.h"
#include "sheaf/kernels/cpu/inline.h"

namespace sheaf::kernels::cpu {

inline constexpr int kLanes = 16;

/// The type that elements of storage type S are computed in.
template <class S>
struct ComputeTypeImpl {
  using type = float;
};
template <>
struct ComputeTypeImpl<double> {
  using type = double;
};
template <class S>
using ComputeType = typename ComputeTypeImpl<S>::type;

template <class C>
struct Lanes;

#ifdef __AVX512F__
template <>
struct Lanes<float> {
  __m512 v;

  Lanes() = default;
  SHEAF_INLINE Lanes(__m512 x) : v(x) {}
  SHEAF_INLINE explicit Lanes(float x) : v(_mm512_set1_ps(x)) {}
  static SHEAF_INLINE __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1); }
  static SHEAF_INLINE Lanes load(const float* p) { return _mm512_loadu_ps(p); }
  static SHEAF_INLINE Lanes load(const float* p, int n) {
    return _mm512_maskz_loadu_ps(mask(n), p);
  }
  SHEAF_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  SHEAF_INLINE void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  SHEAF_INLINE Lanes operator+(Lanes o) const { return _mm512_add_ps(v, o.v); }
  SHEAF_INLINE Lanes operator-(Lanes o) const { return _mm512_sub_ps(v, o.v); }
  SHEAF_INLINE Lanes operator*(Lanes o) const { return _mm512_mul_ps(v, o.v); }
  SHEAF_INLINE Lanes operator/(Lanes o) const { return _mm512_div_ps(v, o.v); }
  friend SHEAF_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
    return _mm512_fmadd_ps(a.v, b.v, c.v);
  }
  friend SHEAF_INLINE Lanes sqrt(Lanes a) { return _mm512_sqrt_ps(a.v); }
  /// b where either is NaN.
  friend SHEAF_INLINE Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a.v, b.v); }
  friend SHEAF_INLINE Lanes min(Lanes a, Lanes b) { return _mm512_min_ps(a.v, b.v); }
  /// 0 where a < b, else y (also where either is NaN).
  friend SHEAF_INLINE Lanes zero_if_less(Lanes a, Lanes b, Lanes y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), y.v);
  }
  /// 2^n for n in the low bits of `shifted` = n + 1.5 * 2^23, as the product of two factors.
  static SHEAF_INLINE void powers_of_two(Lanes shifted, Lanes& s1, Lanes& s2) {
    const __m512i e =
        _mm512_sub_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(0x4b400000));
    const __m512i half = _mm512_srai_epi32(e, 1), bias = _mm512_set1_epi32(127);
    s1.v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
    s2.v = _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(e, half), bias), 23));
  }
  SHEAF_INLINE __m256 low() const { return _mm512_castps512_ps256(v); }
  SHEAF_INLINE __m256 high() const { return _mm512_extractf32x8_ps(v, 1); }
  static SHEAF_INLINE Lanes join(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
};
#else
template <>
struct Lanes<float> {
  __m256 l, h;

  Lanes() = default;
  SHEAF_INLINE Lanes(__m256 low_half, __m256 high_half) : l(low_half), h(high_half) {}
  SHEAF_INLINE explicit Lanes(float x) : l(_mm256_set1_ps(x)), h(l) {}
  static SHEAF_INLINE __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static SHEAF_INLINE Lanes load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  static SHEAF_INLINE Lanes load(const float* p, int n) {
    return {_mm256_maskload_ps(p, mask(n)), _mm256_maskload_ps(p + 8, mask(n - 8))};
  }
  SHEAF_INLINE void store(float* p) const { _mm256_storeu_ps(p, l), _mm256_storeu_ps(p + 8, h); }
  SHEAF_INLINE void store(float* p, int n) const {
    _mm256_maskstore_ps(p, mask(n), l), _mm256_maskstore_ps(p + 8, mask(n - 8), h);
  }
  SHEAF_INLINE Lanes operator+(Lanes o) const {
    return {_mm256_add_ps(l, o.l), _mm256_add_ps(h, o.h)};
  }
  SHEAF_INLINE Lanes operator-(Lanes o) const {
    return {_mm256_sub_ps(l, o.l), _mm256_sub_ps(h, o.h)};
  }
  SHEAF_INLINE Lanes operator*(Lanes o) const {
    return {_mm256_mul_ps(l, o.l), _mm256_mul_ps(h, o.h)};
  }
  SHEAF_INLINE Lanes operator/(Lanes o) const {
    return {_mm256_div_ps(l, o.l), _mm256_div_ps(h, o.h)};
  }
  friend SHEAF_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.l, b.l, c.l), _mm256_fmadd_ps(a.h, b.h, c.h)};
  }
  friend SHEAF_INLINE Lanes sqrt(Lanes a) { return {_mm256_sqrt_ps(a.l), _mm256_sqrt_ps(a.h)}; }
  /// b where either is NaN.
  friend SHEAF_INLINE Lanes max(Lanes a, Lanes b) {
    return {_mm256_max_ps(a.l, b.l), _mm256_max_ps(a.h, b.h)};
  }
  friend SHEAF_INLINE Lanes min(Lanes a, Lanes b) {
    return {_mm256_min_ps(a.l, b.l), _mm256_min_ps(a.h, b.h)};
  }
  /// 0 where a < b, else y (also where either is NaN).
  friend SHEAF_INLINE Lanes zero_if_less(Lanes a, Lanes b, Lanes y) {
    return {_mm256_and_ps(_mm256_cmp_ps(a.l, b.l, _CMP_NLT_UQ), y.l),
            _mm256_and_ps(_mm256_cmp_ps(a.h, b.h, _CMP_NLT_UQ), y.h)};
  }
  /// 2^n for n in the low bits of `shifted` = n + 1.5 * 2^23, as the product of two factors.
  static SHEAF_INLINE void powers_of_two(Lanes shifted, Lanes& s1, Lanes& s2) {
    half_powers(shifted.l, s1.l, s2.l), half_powers(shifted.h, s1.h, s2.h);
  }
  SHEAF_INLINE __m256 low() const { return l; }
  SHEAF_INLINE __m256 high() const { return h; }
  static SHEAF_INLINE Lanes join(__m256 low, __m256 high) { return {low, high}; }

 private:
  static SHEAF_INLINE void half_powers(__m256 shifted, __m256& s1, __m256& s2) {
    const __m256i e = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000));
    const __m256i half = _mm256_srai_epi32(e, 1), bias = _mm256_set1_epi32(127);
    s1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    s2 = _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), bias), 23));
  }
};
#endif

/// The sum of the lanes: i + (i+8), then i + (i+4), then i + (i+2), then the last two.
SHEAF_INLINE float sum(Lanes<float> a) {
  const __m256 eight = _mm256_add_ps(a.low(), a.high());
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
SHEAF_INLINE float max_lane(Lanes<float> a) {
  const __m256 eight = _mm256_max_ps(a.low(), a.high());
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/// e^x, within 2 units in the last place; 0 below the smallest normal number. The same bits as
/// vector_math.h's exp (polynomial: S. Moshier, Cephes, single/expf.c).
SHEAF_INLINE Lanes<float> exp(Lanes<float> x) {
  using L = Lanes<float>;
  const L c = max(L(-88.0f), min(L(89.0f), x));  // NaN passes: it is the second operand
  const L shifted = fma(c, L(1.44269504088896341f), L(0x1.8p23f));
  const L n = shifted - L(0x1.8p23f);
  L r = fma(n, L(-0.693359375f), c);
  r = fma(n, L(2.12194440e-4f), r);
  L p = L(1.9875691500e-4f);
  p = fma(p, r, L(1.3981999507e-3f));
  p = fma(p, r, L(8.3334519073e-3f));
  p = fma(p, r, L(4.1665795894e-2f));
  p = fma(p, r, L(1.6666665459e-1f));
  p = fma(p, r, L(5.0000001201e-1f));
  p = fma(p, r * r, r) + L(1.0f);
  L s1, s2;
  L::powers_of_two(shifted, s1, s2);
  return zero_if_less(x, L(-87.3365448f), p * s1 * s2);
}

/// Doubles are for checking, so plain loops and libm are good enough.
template <>
struct Lanes<double> {
  double v[kLanes];

  Lanes() = default;
  SHEAF_INLINE explicit Lanes(double x) {
    for (double& e : v) e = x;
  }
  template <class F>
  static SHEAF_INLINE Lanes make(F f) {
    Lanes out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = f(i);
    return out;
  }
  static SHEAF_INLINE Lanes load(const double* p) {
    return make([=](int i) { return p[i]; });
  }
  static SHEAF_INLINE Lanes load(const double* p, int n) {
    return make([=](int i) { return i < n ? p[i] : 0.0; });
  }
  SHEAF_INLINE void store(double* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = v[i];
  }
  SHEAF_INLINE void store(double* p, int n) const {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }
  SHEAF_INLINE Lanes operator+(const Lanes& o) const {
    return make([&](int i) { return v[i] + o.v[i]; });
  }
  SHEAF_INLINE Lanes operator-(const Lanes& o) const {
    return make([&](int i) { return v[i] - o.v[i]; });
  }
  SHEAF_INLINE Lanes operator*(const Lanes& o) const {
    return make([&](int i) { return v[i] * o.v[i]; });
  }
  SHEAF_INLINE Lanes operator/(const Lanes& o) const {
    return make([&](int i) { return v[i] / o.v[i]; });
  }
  friend SHEAF_INLINE Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
    return make([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  friend SHEAF_INLINE Lanes sqrt(const Lanes& a) {
    return make([&](int i) { return std::sqrt(a.v[i]); });
  }
  friend SHEAF_INLINE Lanes max(const Lanes& a, const Lanes& b) {
    return make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
};
SHEAF_INLINE double sum(const Lanes<double>& a) {
  double eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}
SHEAF_INLINE double max_lane(const Lanes<double>& a) {
  double out = a.v[0];
  for (double e : a.v) out = e > out ? e : out;
  return out;
}
inline Lanes<double> exp(const Lanes<double>& x) {
  return Lanes<double>::make([&](int i) { return std::exp(x.v[i]); });
}

/// Sixteen elements of storage type S, widened to its compute type.
SHEAF_INLINE Lanes<float> load_lanes(const float* p) { return Lanes<float>::load(p); }
SHEAF_INLINE Lanes<double> load_lanes(const double* p) { return Lanes<double>::load(p); }
SHEAF_INLINE Lanes<float> load_lanes(const bf16* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i l = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), 16);
  const __m256i h = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)), 16);
  return Lanes<float>::join(_mm256_castsi256_ps(l), _mm256_castsi256_ps(h));
}
SHEAF_INLINE Lanes<float> load_lanes(const f16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return Lanes<float>::join(_mm256_cvtph_ps(_mm_loadu_si128(q)),
                            _mm256_cvtph_ps(_mm_loadu_si128(q + 1)));
}
/// The first n of them, the others zero.
SHEAF_INLINE Lanes<float> load_lanes(const float* p, int n) { return Lanes<float>::load(p, n); }
SHEAF_INLINE Lanes<double> load_lanes(const double* p, int n) { return Lanes<double>::load(p, n); }
template <class S>
SHEAF_INLINE Lanes<float> load_lanes(const S* p, int n) {
  S buffer[kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load_lanes(buffer);
}

namespace detail {
/// Eight floats to bf16, to nearest even, NaN kept quiet, in the low halves of 32-bit lanes.
SHEAF_INLINE __m256i to_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
}  // namespace detail

/// Stores sixteen values, rounded to the storage type.
SHEAF_INLINE void store_lanes(float* p, Lanes<float> x) { x.store(p); }
SHEAF_INLINE void store_lanes(double* p, const Lanes<double>& x) { x.store(p); }
SHEAF_INLINE void store_lanes(bf16* p, Lanes<float> x) {
  const __m256i packed = _mm256_packus_epi32(detail::to_bf16(x.low()), detail::to_bf16(x.high()));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
SHEAF_INLINE void store_lanes(f16* p, Lanes<float> x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.low(), _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.high(), _MM_FROUND_TO_NEAREST_INT));
}
/// Stores the first n.
SHEAF_INLINE void store_lanes(float* p, Lanes<float> x, int n) { x.store(p, n); }
SHEAF_INLINE void store_lanes(double* p, const Lanes<double>& x, int n) { x.store(p, n); }
template <class S>
SHEAF_INLINE void store_lanes(S* p, Lanes<float> x, int n) {
  S buffer[kLanes];
  store_lanes(buffer, x);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

/// As if stored and loaded.
template <class S>
SHEAF_INLINE Lanes<float> rounded_lanes(Lanes<float> x) {
  if constexpr (std::is_same_v<S, bf16>) {
#ifdef __AVX512F__
    const __m512i u = _mm512_castps_si512(x.v), kept = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    return Lanes<float>(_mm512_castsi512_ps(_mm512_and_si512(_mm512_mask_mov_epi32(rounded, nan, quiet), kept)));
#else
    const auto half = [](__m256 h) { return _mm256_castsi256_ps(_mm256_slli_epi32(detail::to_bf16(h), 16)); };
    return Lanes<float>::join(half(x.low()), half(x.high()));
#endif
  } else {
    static_assert(std::is_same_v<S, f16>);
    const auto half = [](__m256 h) { return _mm256_cvtph_ps(_mm256_cvtps_ph(h, _MM_FROUND_TO_NEAREST_INT)); };
    return Lanes<float>::join(half(x.low()), half(x.high()));
  }
}

/// Calls f(i, n) for i = 0, 16, 32 ... below `size`, n being std::integral_constant 16 but in the
/// last, partial step.
template <class F>
SHEAF_INLINE void for_lanes(int64_t size, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, std::integral_constant<int, kLanes>());
  if (i < size) f(i, static_cast<int>(size - i));
}
/// load_lanes and store_lanes under for_lanes: whole steps need no mask.
template <class S>
SHEAF_INLINE auto load_lanes(const S* p, std::integral_constant<int, kLanes>) {
  return load_lanes(p);
}
template <class S, class L>
SHEAF_INLINE void store_lanes(S* p, const L& x, std::integral_constant<int, kLanes>) {
  store_lanes(p, x);
}

}  // namespace sheaf::kernels::cpu
