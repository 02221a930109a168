// Element types in kernels: conversions, the type they compute in, and 16-byte accesses.
#pragma once

#include <cstring>
#include <type_traits>

#include "sheaf/core/dtype.h"
#include "sheaf/kernels/cuda/launch.h"

namespace sheaf::kernels::cuda {

/// The sum of x over the lanes up to this one, number `lane`; for all lanes of a warp.
template <class C>
__device__ C scan_warp(C x, int lane) {
  for (int by = 1; by < kWarp; by *= 2) {
    const C other = __shfl_up_sync(kFullWarp, x, by);
    if (lane >= by) x += other;
  }
  return x;
}

/// The type in which elements of T are computed: f32 for f32, bf16 and f16; f64; i64 for integers
/// and bool.
template <class T>
using Compute =
    std::conditional_t<std::is_same_v<T, double>, double,
                       std::conditional_t<std::is_same_v<T, float> || std::is_same_v<T, bf16> ||
                                              std::is_same_v<T, f16>,
                                          float, int64_t>>;

template <class T>
inline constexpr bool kIsNarrow = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

__device__ inline float widen(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ inline float widen(f16 x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#else
  return static_cast<float>(x);
#endif
}
/// To nearest even.
template <class T>
__device__ inline T narrow(float x) {
#ifdef __CUDA_ARCH__
  T out;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
#else
  return T(x);
#endif
}

/// x as a C (float, double or int64_t). Floats to integers truncate and saturate, NaN becomes 0.
template <class C, class T>
__device__ inline C convert_to(T x) {
  if constexpr (kIsNarrow<T>)
    return convert_to<C>(widen(x));
  else if constexpr (std::is_floating_point_v<T> && std::is_same_v<C, int64_t>) {
    if (!(x == x)) return 0;
    if (x >= static_cast<T>(9223372036854775808.0)) return INT64_MAX;
    if (x <= static_cast<T>(-9223372036854775808.0)) return INT64_MIN;
    return static_cast<int64_t>(x);
  } else
    return static_cast<C>(x);
}

/// A value of a compute type as an element: floats round once, to nearest even; integers wrap;
/// floats to integers truncate and saturate at the element type's ends, NaN becomes 0; bool is "not
/// zero".
template <class T, class C>
__device__ inline T element(C x) {
  if constexpr (std::is_same_v<T, bool>)
    return x != C(0);
  else if constexpr (kIsNarrow<T>)
    return narrow<T>(static_cast<float>(x));
  else if constexpr (std::is_floating_point_v<T> || !std::is_floating_point_v<C>)
    return static_cast<T>(x);
  else {
    constexpr int64_t kLow =
        std::is_signed_v<T> ? -(int64_t{1} << (8 * sizeof(T) - 1 < 63 ? 8 * sizeof(T) - 1 : 62))
                            : 0;
    if constexpr (sizeof(T) == 8)
      return convert_to<int64_t>(x);
    else {
      constexpr int64_t kHigh =
          std::is_signed_v<T> ? -(kLow + 1) : (int64_t{1} << (8 * sizeof(T))) - 1;
      const int64_t whole = convert_to<int64_t>(x);
      return static_cast<T>(whole < kLow ? kLow : whole > kHigh ? kHigh : whole);
    }
  }
}

/// a * b and a + b, each rounded separately: never contracted with neighbouring operations.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double rounded_sum(double a, double b) { return __dadd_rn(a, b); }
/// a * b + c, rounded once.
__device__ inline float fused_sum(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double fused_sum(double a, double b, double c) { return __fma_rn(a, b, c); }

/// 16 bytes of elements.
template <class T>
struct Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T v[kSize];
};
template <class T>
__device__ inline Pack<T> load_pack(const T* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  Pack<T> out;
  memcpy(static_cast<void*>(&out), &raw, sizeof raw);
  return out;
}
template <class T>
__device__ inline void store_pack(T* to, const Pack<T>& pack) {
  uint4 raw;
  memcpy(&raw, &pack, sizeof raw);
  *reinterpret_cast<uint4*>(to) = raw;
}
/// Stores to global memory in one piece: after a branch on whole or partial packs nvcc would store each pack in four.
template <class T>
__device__ inline void store_global_pack(T* to, const Pack<T>& pack) {
#ifdef __CUDA_ARCH__
  uint4 raw;
  memcpy(&raw, &pack, sizeof raw);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(raw.x), "r"(raw.y), "r"(raw.z),
               "r"(raw.w)
               : "memory");
#else
  store_pack(to, pack);
#endif
}
/// A pack as it is kept in registers until it is used. As separate elements, narrow ones would take a register each; and if it is loaded
/// on one of two branches, each load would be waited for at once, to divide it into them.
template <class T>
__device__ inline uint4 pressed(const Pack<T>& pack) {
  uint4 raw;
  memcpy(&raw, &pack, sizeof raw);
  return raw;
}
template <class T>
__device__ inline Pack<T> unpressed(const uint4& raw) {
  Pack<T> out;
  memcpy(static_cast<void*>(&out), &raw, sizeof raw);
  return out;
}
inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// Neighbours that are read and written together, 16 bytes at a time.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Group {
  T v[kWidth];
};

/// Element `i` of an array whose dtype is known only at run time.
template <class C>
__device__ inline C load_any(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::f64:
      return convert_to<C>(static_cast<const double*>(data)[i]);
    case DType::f32:
      return convert_to<C>(static_cast<const float*>(data)[i]);
    case DType::bf16:
      return convert_to<C>(static_cast<const bf16*>(data)[i]);
    case DType::f16:
      return convert_to<C>(static_cast<const f16*>(data)[i]);
    case DType::i64:
      return convert_to<C>(static_cast<const int64_t*>(data)[i]);
    case DType::i32:
      return convert_to<C>(static_cast<const int32_t*>(data)[i]);
    case DType::u32:
      return convert_to<C>(static_cast<const uint32_t*>(data)[i]);
    case DType::u16:
      return convert_to<C>(static_cast<const uint16_t*>(data)[i]);
    case DType::u8:
      return convert_to<C>(static_cast<const uint8_t*>(data)[i]);
    case DType::i8:
      return convert_to<C>(static_cast<const int8_t*>(data)[i]);
    case DType::boolean:
      return convert_to<C>(static_cast<const bool*>(data)[i]);
  }
  return C(0);
}
/// An element of an array of indices (i64, i32, u32, u16 or u8).
__device__ inline int64_t load_index(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::i64:
      return static_cast<const int64_t*>(data)[i];
    case DType::i32:
      return static_cast<const int32_t*>(data)[i];
    case DType::u32:
      return static_cast<const uint32_t*>(data)[i];
    case DType::u16:
      return static_cast<const uint16_t*>(data)[i];
    default:
      return static_cast<const uint8_t*>(data)[i];
  }
}
template <class C>
__device__ inline void store_any(DType dtype, void* data, int64_t i, C x) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[i] = element<double>(x);
      return;
    case DType::f32:
      static_cast<float*>(data)[i] = element<float>(x);
      return;
    case DType::bf16:
      static_cast<bf16*>(data)[i] = element<bf16>(x);
      return;
    case DType::f16:
      static_cast<f16*>(data)[i] = element<f16>(x);
      return;
    case DType::i64:
      static_cast<int64_t*>(data)[i] = element<int64_t>(x);
      return;
    case DType::i32:
      static_cast<int32_t*>(data)[i] = element<int32_t>(x);
      return;
    case DType::u32:
      static_cast<uint32_t*>(data)[i] = element<uint32_t>(x);
      return;
    case DType::u16:
      static_cast<uint16_t*>(data)[i] = element<uint16_t>(x);
      return;
    case DType::u8:
      static_cast<uint8_t*>(data)[i] = element<uint8_t>(x);
      return;
    case DType::i8:
      static_cast<int8_t*>(data)[i] = element<int8_t>(x);
      return;
    case DType::boolean:
      static_cast<bool*>(data)[i] = element<bool>(x);
      return;
  }
}

}  // namespace sheaf::kernels::cuda
