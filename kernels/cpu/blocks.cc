#include "sheaf/kernels/cpu/blocks.h"

#include <cstring>
#include <limits>

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/read_ahead.h"

namespace sheaf::kernels::cpu {
namespace {

template <class T, class C>
constexpr bool kIsNarrow = (std::is_same_v<T, bf16> || std::is_same_v<T, f16>)&&std::is_same_v<C, float>;

/// C++ leaves out-of-range conversions undefined; here they saturate, and NaN becomes 0.
template <class To, class From>
inline To convert(From x) {
  if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    using Limits = std::numeric_limits<To>;
    if (x != x) return To(0);
    if (x <= static_cast<From>(Limits::min())) return Limits::min();
    // For wide types the maximum rounds up to a power of two, which is out of range itself.
    if (x >= static_cast<From>(Limits::max())) return Limits::max();
    return static_cast<To>(x);
  } else {
    return static_cast<To>(x);
  }
}
template <class To>
inline To convert(bf16 x) {
  return convert<To>(static_cast<float>(x));
}
template <class To>
inline To convert(f16 x) {
  return convert<To>(static_cast<float>(x));
}
template <class T, class C>
inline T narrow(C x) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
    return T(static_cast<float>(x));
  } else {
    return convert<T>(x);
  }
}

}  // namespace

template <class C>
void load_run(DType dtype, const void* from, int64_t stride, int64_t n, C* to) {
  visit_dtype("load", dtype, [&]<class T>() {
    const T* p = static_cast<const T*>(from);
    if (stride == 1) {
      if constexpr (std::is_same_v<T, C>) {
        std::memcpy(to, p, static_cast<size_t>(n) * sizeof(T));
      } else if constexpr (kIsNarrow<T, C>) {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
          if (i % (64 / static_cast<int64_t>(sizeof(T))) == 0) read_ahead(p + i);
          store_lanes(to + i, load_lanes(p + i));
        }
        for (; i < n; ++i) to[i] = convert<C>(p[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) to[i] = convert<C>(p[i]);
      }
    } else if (stride == 0) {
      std::fill_n(to, n, n > 0 ? convert<C>(*p) : C(0));
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = convert<C>(p[i * stride]);
    }
  });
}

template <class C>
void store_run(DType dtype, void* to, int64_t stride, int64_t n, const C* from) {
  visit_dtype("store", dtype, [&]<class T>() {
    T* p = static_cast<T*>(to);
    if (stride == 1) {
      if constexpr (std::is_same_v<T, C>) {
        std::memcpy(p, from, static_cast<size_t>(n) * sizeof(T));
      } else if constexpr (kIsNarrow<T, C>) {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
          read_ahead(from + i);
          if (i % (64 / static_cast<int64_t>(sizeof(T))) == 0) __builtin_prefetch(p + i + 512);  // what is stored is read first; 1 KiB
          store_lanes(p + i, load_lanes(from + i));
        }
        for (; i < n; ++i) p[i] = narrow<T>(from[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) p[i] = narrow<T>(from[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) p[i * stride] = narrow<T>(from[i]);
    }
  });
}

template void load_run(DType, const void*, int64_t, int64_t, float*);
template void load_run(DType, const void*, int64_t, int64_t, double*);
template void load_run(DType, const void*, int64_t, int64_t, int64_t*);
template void store_run(DType, void*, int64_t, int64_t, const float*);
template void store_run(DType, void*, int64_t, int64_t, const double*);
template void store_run(DType, void*, int64_t, int64_t, const int64_t*);
// Comparisons compute bytes of 0 and 1.
template void store_run(DType, void*, int64_t, int64_t, const bool*);

Runs::Runs(const Shape& shape_in, const Shape& strides_in) {
  for (int i = 0; i < shape_in.rank(); ++i) {
    const int64_t size = shape_in[i], stride = strides_in[i];
    if (size == 1) continue;
    if (!shape.empty() && strides.back() == stride * size) {
      shape[shape.rank() - 1] *= size;
      strides[strides.rank() - 1] = stride;
    } else {
      shape.push_back(size);
      strides.push_back(stride);
    }
  }
  if (shape.empty()) shape.push_back(1), strides.push_back(1);
}

Cursor::Cursor(void* data, DType dtype, const Runs& runs, int64_t start)
    : data_(static_cast<char*>(data)),
      dtype_(dtype),
      size_(static_cast<int64_t>(size_of(dtype))),
      runs_(runs),
      last_(runs.shape.rank() - 1),
      at_(Shape::filled(runs.shape.rank(), 0)) {
  for (int i = last_; i >= 0; --i) {
    const int64_t size = std::max<int64_t>(runs_.shape[i], 1);
    at_[i] = start % size;
    start /= size;
    offset_ += at_[i] * runs_.strides[i];
  }
}

void Cursor::carry() {
  for (int i = last_; i > 0 && at_[i] == runs_.shape[i]; --i) {
    offset_ += runs_.strides[i - 1] - runs_.shape[i] * runs_.strides[i];
    at_[i] = 0;
    ++at_[i - 1];
  }
}

}  // namespace sheaf::kernels::cpu
