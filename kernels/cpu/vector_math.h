// Branchless f32 functions that g++ vectorises inside plain loops. Only IEEE operations and
// explicit fma: a vector body and its scalar tail give the same bits, whatever the vector width.
// Errors are within 2 to 3 units in the last place; results and arguments below the smallest normal
// number count as zero, as they do under FTZ and DAZ. Polynomials: S. Moshier, Cephes Mathematical
// Library, single/{expf,logf,tanhf,ndtrf}.c. For f64 the same names call libm.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "sheaf/kernels/cpu/inline.h"

namespace sheaf::kernels::cpu::vm {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

/// x if it is NaN, else `value`, which is computed from x. Of two operands that are NaN the processor returns the first, and which that
/// is may differ between the vectors of a loop and the elements after them: so a kernel says which one it is.
template <class C>
SHEAF_INLINE C nan_or(C x, C value) {
  return x != x ? x : value;
}

/// e^x.
SHEAF_INLINE float exp(float x) {
  // Beyond these bounds the result is 0 or infinite anyway; NaN passes both comparisons unchanged.
  float c = x > 89.0f ? 89.0f : x;
  c = c < -88.0f ? -88.0f : c;
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const float shifted = std::fma(c, 1.44269504088896341f, 0x1.8p23f);
  const float n = shifted - 0x1.8p23f;
  float r = std::fma(n, -0.693359375f, c);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  p = std::fma(p, r * r, r) + 1.0f;
  // 2^n in two factors, since 2^128 is not a float.
  const int32_t e = std::bit_cast<int32_t>(shifted) - 0x4b400000;
  const int32_t half = e >> 1;
  const float s1 = std::bit_cast<float>((half + 127) << 23),
              s2 = std::bit_cast<float>((e - half + 127) << 23);
  const float y = p * s1 * s2;
  return x < -87.3365448f ? 0.0f : y;
}
SHEAF_INLINE double exp(double x) { return std::exp(x); }

/// Natural logarithm; -inf at 0, NaN below.
SHEAF_INLINE float log(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  // x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
  const int32_t e = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float m = std::bit_cast<float>(bits - (static_cast<uint32_t>(e) << 23)) - 1.0f;
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = std::fma(p, m, -1.1514610310e-1f);
  p = std::fma(p, m, 1.1676998740e-1f);
  p = std::fma(p, m, -1.2420140846e-1f);
  p = std::fma(p, m, 1.4249322787e-1f);
  p = std::fma(p, m, -1.6668057665e-1f);
  p = std::fma(p, m, 2.0000714765e-1f);
  p = std::fma(p, m, -2.4999993993e-1f);
  p = std::fma(p, m, 3.3333331174e-1f);
  const float n = static_cast<float>(e);
  float y = std::fma(p * m, z, n * -2.12194440e-4f);
  y = std::fma(-0.5f, z, y);
  float out = std::fma(n, 0.693359375f, m + y);
  out = x < std::numeric_limits<float>::min() ? -kInf : out;
  out = x <= -std::numeric_limits<float>::min() ? std::numeric_limits<float>::quiet_NaN() : out;
  out = x == kInf ? kInf : out;
  return nan_or(x, out);
}
SHEAF_INLINE double log(double x) { return std::log(x); }

/// log(1 + x), corrected for the rounding of 1 + x (W. Kahan; D. Goldberg, 1991, theorem 4).
SHEAF_INLINE float log1p(float x) {
  const float u = 1.0f + x, y = log(u) * (x / (u - 1.0f));
  return u == 1.0f || x == kInf ? x : y;
}
SHEAF_INLINE double log1p(double x) { return std::log1p(x); }

/// e^x - 1, likewise.
SHEAF_INLINE float expm1(float x) {
  const float u = exp(x), y = (u - 1.0f) * (x / log(u));
  return u == 1.0f ? x : u == kInf || u == 0.0f ? u - 1.0f : y;
}
SHEAF_INLINE double expm1(double x) { return std::expm1(x); }

/// 1 / (1 + e^-x). NaN passes unchanged, so that it is the same factor as x.
template <class C>
SHEAF_INLINE C sigmoid(C x) {
  return nan_or(x, C(1) / (C(1) + exp(-x)));
}

SHEAF_INLINE float tanh(float x) {
  const float a = std::fabs(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = std::fma(p, z, 2.06390887954e-2f);
  p = std::fma(p, z, -5.37397155531e-2f);
  p = std::fma(p, z, 1.33314422036e-1f);
  p = std::fma(p, z, -3.33332819422e-1f);
  const float small = std::fma(p * z, x, x);
  const float large = std::copysign(1.0f - 2.0f / (exp(a + a) + 1.0f), x);
  return a < 0.625f ? small : large;
}
SHEAF_INLINE double tanh(double x) { return std::tanh(x); }

/// erf(x) / x for |x| < 1, of z = x^2.
SHEAF_INLINE float erf_slope(float z) {
  float e = 7.853861353153693e-5f;
  e = std::fma(e, z, -8.010193625184903e-4f);
  e = std::fma(e, z, 5.188327685732524e-3f);
  e = std::fma(e, z, -2.685381193529856e-2f);
  e = std::fma(e, z, 1.128358514861418e-1f);
  e = std::fma(e, z, -3.761262582423300e-1f);
  return std::fma(e, z, 1.128379165726710e+0f);
}

/// Standard normal distribution function, (1 + erf(x / sqrt(2))) / 2, with small relative error in
/// the lower tail too.
SHEAF_INLINE float normal_cdf(float x) {
  const float a = x * 0.707106781186547524f, t = std::fabs(a), z = a * a;
  const float middle = std::fma(0.5f * a, erf_slope(z), 0.5f);  // |a| < 1
  // Else erfc = e^(-a^2) / |a| * a polynomial in 1/|a| below 2, in 1/a^2 above. The clamp keeps
  // infinities out.
  const float c = t < 1.0f ? 1.0f : t > 14.0f ? 14.0f : t;
  const float q = 1.0f / c, y = q * q;
  float near = 2.326819970068386e-2f;
  near = std::fma(near, y, -1.387039388740657e-1f);
  near = std::fma(near, y, 3.687424674597105e-1f);
  near = std::fma(near, y, -5.824733027278666e-1f);
  near = std::fma(near, y, 6.210004621745983e-1f);
  near = std::fma(near, y, -4.944515323274145e-1f);
  near = std::fma(near, y, 3.404879937665872e-1f);
  near = std::fma(near, y, -2.741127028184656e-1f);
  near = std::fma(near, y, 5.638259427386472e-1f);
  float far = -1.047766399936249e+1f;
  far = std::fma(far, y, 1.297719955372516e+1f);
  far = std::fma(far, y, -7.495518717768503e+0f);
  far = std::fma(far, y, 2.921019019210786e+0f);
  far = std::fma(far, y, -1.015265279202700e+0f);
  far = std::fma(far, y, 4.218463358204948e-1f);
  far = std::fma(far, y, -2.820767439740514e-1f);
  far = std::fma(far, y, 5.641895067754075e-1f);
  // x^2/2 to twice the precision: its rounding error would become the tail's relative error.
  const float h = 0.5f * x * x, low = std::fma(0.5f * x, x, -h);
  const float upper = 0.5f * (exp(-h) * (1.0f - low)) * q * (t < 2.0f ? near : far);
  const float tail = x > 0.0f ? 1.0f - upper : upper;
  const float out = t < 1.0f ? middle : t > 13.2f ? (x > 0.0f ? 1.0f : 0.0f) : tail;
  return nan_or(x, out);
}
SHEAF_INLINE double normal_cdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }

/// The error function.
SHEAF_INLINE float erf(float x) {
  const float tail = 1.0f - 2.0f * normal_cdf(-1.41421356237309505f * std::fabs(x));
  return std::fabs(x) < 1.0f ? x * erf_slope(x * x) : std::copysign(tail, x);
}
SHEAF_INLINE double erf(double x) { return std::erf(x); }

/// Standard normal density.
template <class C>
SHEAF_INLINE C normal_pdf(C x) {
  return C(0.39894228040143267794) * exp(C(-0.5) * x * x);
}

}  // namespace sheaf::kernels::cpu::vm
