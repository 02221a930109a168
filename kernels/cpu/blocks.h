// Blocks: how elementwise kernels handle strides and element types. Every operand is converted, kBlock elements at a time in
// row-major order, into an array of a compute type (f32 for f32, bf16 and f16; f64; i64 for integers and bool); the kernel's loop
// sees only contiguous arrays. So an element's value cannot depend on strides, range boundaries or alignment, and the number of loops
// to compile is ops x 3 instead of ops x types x layouts. Operands that are contiguous and already of the compute type are used in
// place.
// used in place.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "sheaf/core/parallel.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu {

inline constexpr int64_t kBlock = 1024;
/// Elements for which waking another thread pays off.
inline constexpr int64_t kGrain = 32768;

/// The type in which elements of `d` are computed.
constexpr DType compute_type(DType d) { return d == kF64 ? kF64 : is_floating(d) ? kF32 : kI64; }
/// The compute type of several operands together: f64 if any is f64, else f32 if any is floating,
/// else i64.
constexpr DType compute_type(DType a, DType b) {
  a = compute_type(a), b = compute_type(b);
  return a == kF64 || b == kF64 ? kF64 : a == kF32 || b == kF32 ? kF32 : kI64;
}

/// Calls f.operator()<C>() for the C++ type of a compute type.
template <class F>
decltype(auto) visit_compute(DType compute, F&& f) {
  switch (compute) {
    case kF64:
      return f.template operator()<double>();
    case kF32:
      return f.template operator()<float>();
    default:
      return f.template operator()<int64_t>();
  }
}

/// Calls f.operator()<T>() for an unsigned type of this one's size: to copy bits.
template <class F>
decltype(auto) visit_bits(DType dtype, F&& f) {
  switch (size_of(dtype)) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

/// Offset of element `index`, in row-major order, in elements.
inline int64_t offset_of(const Shape& shape, const Shape& strides, int64_t index) {
  int64_t offset = 0;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    offset += index % shape[i] * strides[i];
    index /= shape[i];
  }
  return offset;
}
inline int64_t offset_of(const View& v, int64_t index) {
  return offset_of(v.shape, v.strides, index);
}
inline char* element(const View& v, int64_t offset) {
  return v.as<char>() + offset * static_cast<int64_t>(size_of(v.dtype));
}

/// to[i] = from[i * stride], converted. C is float, double or int64_t; integers from floats
/// saturate, NaN becomes 0, bool is "not zero".
template <class C>
void load_run(DType dtype, const void* from, int64_t stride, int64_t n, C* to);
/// to[i * stride] = from[i], converted as above.
template <class C>
void store_run(DType dtype, void* to, int64_t stride, int64_t n, const C* from);

/// A view with size-1 dimensions dropped and mergeable neighbours merged; at least one dimension.
struct Runs {
  explicit Runs(const Shape& shape_in, const Shape& strides_in);
  explicit Runs(const View& v) : Runs(v.shape, v.strides) {}
  Shape shape, strides;
};

/// Walks a view in row-major order, one run of its innermost (merged) dimension after another.
class Cursor {
 public:
  Cursor(const View& view, int64_t start) : Cursor(view.data, view.dtype, Runs(view), start) {}
  Cursor(void* data, DType dtype, const Runs& runs, int64_t start);

  int64_t run_left() const { return runs_.shape.back() - at_[last_]; }
  int64_t stride() const { return runs_.strides[last_]; }
  char* pointer() const { return data_ + offset_ * size_; }
  DType dtype() const { return dtype_; }
  /// Moves on by n <= run_left() elements.
  void advance(int64_t n) {
    at_[last_] += n;
    offset_ += n * stride();
    if (at_[last_] == runs_.shape[last_]) carry();
  }
  /// The next n elements, converted into `buffer`.
  template <class C>
  void read(int64_t n, C* buffer) {
    for (int64_t done = 0; done < n;) {
      const int64_t m = std::min(n - done, run_left());
      load_run(dtype_, pointer(), stride(), m, buffer + done);
      advance(m), done += m;
    }
  }
  /// Writes the next n elements from `buffer`.
  template <class C>
  void write(int64_t n, const C* buffer) {
    for (int64_t done = 0; done < n;) {
      const int64_t m = std::min(n - done, run_left());
      store_run(dtype_, pointer(), stride(), m, buffer + done);
      advance(m), done += m;
    }
  }

 private:
  void carry();

  char* data_;
  DType dtype_;
  int64_t size_;
  Runs runs_;
  int last_;
  Shape at_;
  int64_t offset_ = 0;
};

/// An input of map_blocks: hands out pointers to the next elements as C.
template <class C>
class BlockInput {
 public:
  BlockInput(const View& view, int64_t start)
      : cursor_(view, start),
        direct_(view.dtype == dtype_of<C> && cursor_.stride() == 1),
        constant_(cursor_.stride() == 0 && Runs(view).shape.rank() == 1) {
    if (constant_) load_run(view.dtype, view.data, 0, kBlock, buffer_);
  }
  /// The block size, at most n, with which a long run can be used in place.
  int64_t limit(int64_t n) const {
    return direct_ && cursor_.run_left() >= kBlock / 8 ? std::min(n, cursor_.run_left()) : n;
  }
  const C* next(int64_t n) {
    if (constant_) return buffer_;
    if (direct_ && cursor_.run_left() >= n) {
      const C* p = reinterpret_cast<const C*>(cursor_.pointer());
      cursor_.advance(n);
      return p;
    }
    cursor_.read(n, buffer_);
    return buffer_;
  }

 private:
  Cursor cursor_;
  bool direct_, constant_;
  C buffer_[kBlock];
};

/// An output of map_blocks: `next` returns the memory for the next n elements, `done` stores them.
template <class C>
class BlockOutput {
 public:
  BlockOutput(const View& view, int64_t start)
      : cursor_(view, start), direct_(view.dtype == dtype_of<C> && cursor_.stride() == 1) {}
  int64_t limit(int64_t n) const {
    return direct_ && cursor_.run_left() >= kBlock / 8 ? std::min(n, cursor_.run_left()) : n;
  }
  C* next(int64_t n) {
    in_place_ = direct_ && cursor_.run_left() >= n;
    return in_place_ ? reinterpret_cast<C*>(cursor_.pointer()) : buffer_;
  }
  void done(int64_t n) {
    if (in_place_) {
      cursor_.advance(n);
    } else {
      cursor_.write(n, buffer_);
    }
  }

 private:
  Cursor cursor_;
  bool direct_, in_place_ = false;
  C buffer_[kBlock];
};

/// Checks that all views have the shape of the first; kernels do not broadcast.
template <class... Views>
void check_shapes(const char* who, const View& first, const Views&... rest) {
  (check<ShapeError>(rest.shape == first.shape, "[", who, "] kernel operands have shapes ",
                     first.shape, " and ", rest.shape),
   ...);
}

/// Runs f(out, in..., n) on blocks that cover `out`; f computes n elements from contiguous arrays
/// of C. An output may be the same memory as an input, element for element.
template <class C, class Out = C, class F, class... Views>
void map_blocks(const View& out, F f, const Views&... in) {
  parallel_for(out.numel(), kGrain, [&](int64_t begin, int64_t end) {
    auto run = [&](BlockOutput<Out> to, auto... from) {
      for (int64_t i = begin; i < end;) {
        int64_t n = to.limit(std::min(kBlock, end - i));
        ((n = from.limit(n)), ...);
        f(to.next(n), from.next(n)..., n);
        to.done(n), i += n;
      }
    };
    run(BlockOutput<Out>(out, begin), BlockInput<C>(in, begin)...);
  });
}

/// Same with two outputs of one shape: f(out0, out1, in..., n).
template <class C, class F, class... Views>
void map_blocks2(const View& out0, const View& out1, F f, const Views&... in) {
  parallel_for(out0.numel(), kGrain, [&](int64_t begin, int64_t end) {
    auto run = [&](BlockOutput<C> to0, BlockOutput<C> to1, auto... from) {
      for (int64_t i = begin; i < end;) {
        int64_t n = to1.limit(to0.limit(std::min(kBlock, end - i)));
        ((n = from.limit(n)), ...);
        f(to0.next(n), to1.next(n), from.next(n)..., n);
        to0.done(n), to1.done(n), i += n;
      }
    };
    run(BlockOutput<C>(out0, begin), BlockOutput<C>(out1, begin), BlockInput<C>(in, begin)...);
  });
}

}  // namespace sheaf::kernels::cpu
