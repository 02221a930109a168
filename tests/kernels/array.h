// Arrays for the kernel tests: memory of any dtype with any strides, random values, and comparison
// with f64 references.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/core/device.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/view.h"

namespace sheaf::testing {

/// Owns its memory; converts to the View that kernels take.
class Array {
 public:
  Array() = default;
  /// Strides in elements; by default dense. Memory outside the elements is filled with NaN
  /// patterns.
  Array(DType dtype, const Shape& shape, Shape strides = {})
      : view_(View::dense(nullptr, dtype, shape)) {
    if (strides.rank() == shape.rank()) view_.strides = strides;
    int64_t last = 0;
    for (int i = 0; i < shape.rank(); ++i)
      last += std::max<int64_t>(shape[i] - 1, 0) * view_.strides[i];
    bytes_ = static_cast<size_t>(last + 1) * size_of(dtype);
    memory_.reset(static_cast<char*>(std::aligned_alloc(128, (bytes_ + 127) / 128 * 128)),
                  std::free);
    std::memset(memory_.get(), 0xff, bytes_);
    view_.data = memory_.get();
  }
  /// Normal values (times `scale`), rounded to the dtype.
  static Array random(DType dtype, const Shape& shape, int seed, double scale = 1,
                      Shape strides = {}) {
    Array a(dtype, shape, strides);
    std::mt19937 engine(static_cast<unsigned>(seed));
    std::normal_distribution<double> normal(0, scale);
    a.fill([&](int64_t) { return normal(engine); });
    return a;
  }
  static Array of(DType dtype, const Shape& shape, const std::vector<double>& values) {
    Array a(dtype, shape);
    a.fill([&](int64_t i) { return values[static_cast<size_t>(i)]; });
    return a;
  }

  const View& view() const { return view_; }
  operator const View&() const { return view_; }
  size_t bytes() const { return bytes_; }  ///< gaps included
  /// The same contents, gaps included, in separate memory.
  Array clone() const {
    Array out = *this;
    if (!memory_) return out;
    out.memory_.reset(static_cast<char*>(std::aligned_alloc(128, (bytes_ + 127) / 128 * 128)), std::free);
    std::memcpy(out.memory_.get(), memory_.get(), bytes_);
    out.view_.data = out.memory_.get();
    return out;
  }

  void fill(const std::function<double(int64_t)>& f) {
    for (int64_t i = 0; i < view_.numel(); ++i) set(i, f(i));
  }
  void set(int64_t index, double x) {
    visit_dtype("array", view_.dtype, [&]<class T>() {
      T& to = view_.as<T>()[offset(view_, index)];
      if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
        to = T(static_cast<float>(x));
      } else {
        to = static_cast<T>(x);
      }
    });
  }
  double at(int64_t index) const { return read(view_, index); }

  static int64_t offset(const View& v, int64_t index) {
    int64_t out = 0;
    for (int i = v.rank() - 1; i >= 0; --i)
      out += index % v.shape[i] * v.strides[i], index /= v.shape[i];
    return out;
  }
  static double read(const View& v, int64_t index) {
    return visit_dtype("array", v.dtype, [&]<class T>() {
      const T x = v.as<T>()[offset(v, index)];
      if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
        return static_cast<double>(static_cast<float>(x));
      } else {
        return static_cast<double>(x);
      }
    });
  }

 private:
  View view_;
  size_t bytes_ = 0;
  std::shared_ptr<char> memory_;
};

/// An array of the same dtype, shape and strides, filled with NaN patterns.
inline Array like(const Array& x) { return Array(x.view().dtype, x.view().shape, x.view().strides); }

/// All elements in row-major order.
inline std::vector<double> values(const View& v) {
  std::vector<double> out(static_cast<size_t>(v.numel()));
  for (int64_t i = 0; i < v.numel(); ++i) out[static_cast<size_t>(i)] = Array::read(v, i);
  return out;
}

/// The relative error of one rounding to `d`.
inline double epsilon(DType d) {
  return d == kF64 ? 1e-15 : d == kF32 ? 1.2e-7 : d == kF16 ? 1e-3 : 8e-3;
}

/// max |got - want| over max(largest |want|, 1e-30); infinite if anything is not finite.
inline double scaled_error(const View& got, const std::vector<double>& want) {
  double largest = 1e-30, worst = 0;
  if (static_cast<int64_t>(want.size()) != got.numel()) return INFINITY;
  for (double w : want) largest = std::max(largest, std::fabs(w));
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double difference = std::fabs(Array::read(got, i) - want[static_cast<size_t>(i)]);
    if (!std::isfinite(difference)) return INFINITY;
    worst = std::max(worst, difference);
  }
  return worst / largest;
}

/// Bitwise equality, element by element.
inline bool same_bits(const View& a, const View& b) {
  if (!(a.shape == b.shape) || a.dtype != b.dtype) return false;
  const size_t size = size_of(a.dtype);
  for (int64_t i = 0; i < a.numel(); ++i)
    if (std::memcmp(a.as<char>() + static_cast<size_t>(Array::offset(a, i)) * size,
                    b.as<char>() + static_cast<size_t>(Array::offset(b, i)) * size, size) != 0)
      return false;
  return true;
}

/// The same values in another dtype, dense.
inline Array converted(DType dtype, const Array& x) {
  Array out(dtype, x.view().shape);
  out.fill([&](int64_t i) { return x.at(i); });
  return out;
}
inline Array in_f64(const Array& x) { return converted(kF64, x); }

/// a + b, dense: rounded once, like an addition in f32 (f64 for f64) whose result is stored.
inline Array added(const Array& a, const Array& b, DType dtype) {
  Array out(dtype, a.view().shape);
  out.fill([&](int64_t i) { return a.at(i) + b.at(i); });
  return out;
}

/// The type of a row's mean, logsumexp and the like.
inline DType statistics_of(DType d) { return d == kF64 ? kF64 : kF32; }

/// A view without memory, as in a meta run.
inline View without_data(View v) {
  v.data = nullptr;
  return v;
}

/// Runs f as a rank of `threads` threads.
template <class F>
void with_threads(int threads, F&& f) {
  RankContext context;
  context.threads = threads;
  RankScope scope(context);
  f();
}

/// Workspace of exactly the requested bytes, filled with NaN patterns.
class Scratch {
 public:
  explicit Scratch(size_t bytes)
      : bytes_(bytes),
        memory_(static_cast<char*>(std::aligned_alloc(128, (bytes + 255) / 128 * 128)), std::free) {
    std::memset(memory_.get(), 0xff, (bytes + 255) / 128 * 128);
  }
  operator Workspace() const { return {memory_.get(), bytes_}; }

 private:
  size_t bytes_;
  std::shared_ptr<char> memory_;
};

/// True if elements outside the view of `after` kept the bytes they had in `before`: kernels must not touch them.
inline bool gaps_kept(const Array& before, const Array& after) {
  std::vector<char> inside(before.bytes(), 0);
  const size_t size = size_of(before.view().dtype);
  for (int64_t i = 0; i < before.view().numel(); ++i)
    std::fill_n(inside.begin() + static_cast<int64_t>(Array::offset(before.view(), i) * size), size,
                1);
  for (size_t b = 0; b < inside.size(); ++b)
    if (!inside[b] && before.view().as<char>()[b] != after.view().as<char>()[b]) return false;
  return true;
}

}  // namespace sheaf::testing
