// Element types. bf16 and f16 are storage types: arithmetic happens in f32.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "sheaf/core/error.h"

namespace sheaf {

enum class DType : uint8_t { f64, f32, bf16, f16, i64, i32, u32, u16, u8, i8, boolean };
inline constexpr int kNumDTypes = 11;

inline constexpr DType kF64 = DType::f64, kF32 = DType::f32, kBF16 = DType::bf16, kF16 = DType::f16,
                       kI64 = DType::i64, kI32 = DType::i32, kU32 = DType::u32, kU16 = DType::u16,
                       kU8 = DType::u8, kI8 = DType::i8, kBool = DType::boolean;

/// Bytes of one element.
constexpr size_t size_of(DType d) {
  constexpr size_t kSizes[kNumDTypes] = {8, 4, 2, 2, 8, 4, 4, 2, 1, 1, 1};
  return kSizes[static_cast<int>(d)];
}
constexpr std::string_view name(DType d) {
  constexpr std::string_view kNames[kNumDTypes] = {"f64", "f32", "bf16", "f16", "i64", "i32",
                                                   "u32", "u16", "u8",   "i8",  "bool"};
  return kNames[static_cast<int>(d)];
}
constexpr bool is_floating(DType d) { return d <= DType::f16; }
/// True for f32 with bf16 or f16: the type in which sums of the narrow one are computed.
constexpr bool is_wide_of(DType wide, DType narrow) {
  return wide == DType::f32 && (narrow == DType::bf16 || narrow == DType::f16);
}
constexpr bool is_integral(DType d) { return d > DType::f16; }

/// bfloat16: the upper half of an f32; rounds to nearest even, NaN stays NaN.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit constexpr bf16(float f) {
    uint32_t u = std::bit_cast<uint32_t>(f);
    bits = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<uint16_t>((u >> 16) | 0x40)
                                           : static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  explicit constexpr operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

/// IEEE binary16; rounds to nearest even.
struct f16 {
  uint16_t bits = 0;
  f16() = default;
  explicit f16(float f) { _Float16 h = static_cast<_Float16>(f); std::memcpy(&bits, &h, 2); }
  explicit operator float() const { _Float16 h; std::memcpy(&h, &bits, 2); return static_cast<float>(h); }
};

template <class T> struct dtype_of_impl;
template <> struct dtype_of_impl<double> { static constexpr DType value = DType::f64; };
template <> struct dtype_of_impl<float> { static constexpr DType value = DType::f32; };
template <> struct dtype_of_impl<bf16> { static constexpr DType value = DType::bf16; };
template <> struct dtype_of_impl<f16> { static constexpr DType value = DType::f16; };
template <> struct dtype_of_impl<int64_t> { static constexpr DType value = DType::i64; };
template <> struct dtype_of_impl<int32_t> { static constexpr DType value = DType::i32; };
template <> struct dtype_of_impl<uint32_t> { static constexpr DType value = DType::u32; };
template <> struct dtype_of_impl<uint16_t> { static constexpr DType value = DType::u16; };
template <> struct dtype_of_impl<uint8_t> { static constexpr DType value = DType::u8; };
template <> struct dtype_of_impl<int8_t> { static constexpr DType value = DType::i8; };
template <> struct dtype_of_impl<bool> { static constexpr DType value = DType::boolean; };
/// The DType of a C++ element type.
template <class T> inline constexpr DType dtype_of = dtype_of_impl<T>::value;

namespace detail { [[noreturn]] void bad_dtype(std::string_view who, DType d); }

/// Calls f.operator()<T>() with the C++ type of `d`; `who` names the op in the error for other types.
template <class F>
decltype(auto) visit_floating(std::string_view who, DType d, F&& f) {
  switch (d) {
    case DType::f64: return f.template operator()<double>();
    case DType::f32: return f.template operator()<float>();
    case DType::bf16: return f.template operator()<bf16>();
    case DType::f16: return f.template operator()<f16>();
    default: detail::bad_dtype(who, d);
  }
}
template <class F>
decltype(auto) visit_dtype(std::string_view who, DType d, F&& f) {
  switch (d) {
    case DType::f64: return f.template operator()<double>();
    case DType::f32: return f.template operator()<float>();
    case DType::bf16: return f.template operator()<bf16>();
    case DType::f16: return f.template operator()<f16>();
    case DType::i64: return f.template operator()<int64_t>();
    case DType::i32: return f.template operator()<int32_t>();
    case DType::u32: return f.template operator()<uint32_t>();
    case DType::u16: return f.template operator()<uint16_t>();
    case DType::u8: return f.template operator()<uint8_t>();
    case DType::i8: return f.template operator()<int8_t>();
    case DType::boolean: return f.template operator()<bool>();
  }
  detail::bad_dtype(who, d);
}
/// Token and index types only.
template <class F>
decltype(auto) visit_index(std::string_view who, DType d, F&& f) {
  switch (d) {
    case DType::i64: return f.template operator()<int64_t>();
    case DType::i32: return f.template operator()<int32_t>();
    case DType::u32: return f.template operator()<uint32_t>();
    case DType::u16: return f.template operator()<uint16_t>();
    case DType::u8: return f.template operator()<uint8_t>();
    default: detail::bad_dtype(who, d);
  }
}

}  // namespace sheaf
