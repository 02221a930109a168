// Data for kernel tests: tensors of any dtype with any strides, and their values as f64 in
// row-major order.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "sheaf/core/view.h"

#include "gtest/gtest.h"

namespace sheaf::test {

/// Memory with a view of it; elements outside the view hold a pattern that `intact()` checks.
class Buffer {
 public:
  /// `order` lists the dimensions from the outermost in memory to the innermost; `gap` elements lie
  /// between innermost ones.
  Buffer(DType dtype, const Shape& shape, std::vector<int> order = {}, int64_t gap = 0) {
    if (order.empty())
      for (int i = 0; i < shape.rank(); ++i) order.push_back(i);
    Shape strides = Shape::filled(shape.rank(), 0);
    int64_t step = gap + 1;
    for (int i = shape.rank() - 1; i >= 0; --i) strides[order[i]] = step, step *= shape[order[i]];
    memory_.assign(static_cast<size_t>(std::max<int64_t>(step, 1)) * size_of(dtype) + 64, 0xA5);
    view_ = {memory_.data() + 32, dtype, shape, strides};
    if (dtype == kBool) fill([](int64_t) { return 0.0; });
  }
  const View& view() const { return view_; }
  int64_t numel() const { return view_.numel(); }
  char* at(int64_t i) const {
    int64_t offset = 0;
    for (int d = view_.rank() - 1; d >= 0; --d)
      offset += i % view_.shape[d] * view_.strides[d], i /= view_.shape[d];
    return static_cast<char*>(view_.data) + offset * static_cast<int64_t>(size_of(view_.dtype));
  }
  double get(int64_t i) const {
    return visit_dtype("test", view_.dtype, [&]<class T>() {
      T v;
      std::memcpy(&v, at(i), sizeof v);
      if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>)
        return static_cast<double>(static_cast<float>(v));
      else
        return static_cast<double>(v);
    });
  }
  Buffer& fill(const std::function<double(int64_t)>& f) {
    for (int64_t i = 0; i < numel(); ++i) {
      visit_dtype("test", view_.dtype, [&]<class T>() {
        T v;
        if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>)
          v = T(static_cast<float>(f(i)));
        else
          v = static_cast<T>(f(i));
        std::memcpy(at(i), &v, sizeof v);
      });
    }
    return *this;
  }
  /// Deterministic values in [lo, hi], different for every seed.
  Buffer& random(uint64_t seed, double lo = -2, double hi = 2) {
    uint64_t s = seed * 0x9e3779b97f4a7c15ull + 1;
    return fill([&, s](int64_t) mutable {
      s = s * 6364136223846793005ull + 1442695040888963407ull;
      const double v = lo + (hi - lo) * static_cast<double>(s >> 40) / 16777216.0;
      return is_floating(view_.dtype) ? v : std::floor(v);
    });
  }
  std::vector<double> values() const {
    std::vector<double> out(static_cast<size_t>(numel()));
    for (int64_t i = 0; i < numel(); ++i) out[static_cast<size_t>(i)] = get(i);
    return out;
  }
  /// This view broadcast to `shape`, dimensions aligned from the right.
  View expanded(const Shape& shape) const {
    View v{view_.data, view_.dtype, shape, Shape::filled(shape.rank(), 0)};
    for (int i = 1; i <= view_.rank(); ++i)
      if (view_.shape[view_.rank() - i] != 1)
        v.strides[shape.rank() - i] = view_.strides[view_.rank() - i];
    return v;
  }
  const std::vector<unsigned char>& memory() const { return memory_; }

 private:
  std::vector<unsigned char> memory_;
  View view_;
};

/// Largest |got - want| / max(|want|, scale): relative error for large values, error relative to
/// `scale` for the others.
inline double scaled_error(const std::vector<double>& got, const std::vector<double>& want,
                           double scale = 1.0) {
  EXPECT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    if (got[i] == want[i]) continue;
    const double e = std::abs(got[i] - want[i]) / std::max(std::abs(want[i]), scale);
    worst = std::max(worst, std::isnan(e) ? 1e30 : e);
  }
  return worst;
}

/// Unit roundoff of a dtype times a few operations.
inline double tolerance(DType d) {
  return d == kF64 ? 1e-14 : d == kF32 ? 1e-6 : d == kF16 ? 1.1e-3 : 8.5e-3;
}

}  // namespace sheaf::test
