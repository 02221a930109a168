// The state of a reduction over a part of an output's elements, how two parts are joined, and how a part is computed from one chunk.
#pragma once

#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda::reduction {

enum class Kind : uint8_t { sum, max, min, logsumexp, var, argmax };

/// The type in which chunks are joined: f64, i64 for integers.
template <class C>
using Total = std::conditional_t<std::is_same_v<C, int64_t>, int64_t, double>;

template <class C>
__device__ C highest() {
  if constexpr (std::is_same_v<C, int64_t>)
    return INT64_MAX;
  else if constexpr (std::is_same_v<C, float>)
    return __uint_as_float(0x7f800000u);
  else
    return __longlong_as_double(0x7ff0000000000000ll);
}
template <class C>
__device__ C lowest() {
  if constexpr (std::is_same_v<C, int64_t>)
    return INT64_MIN;
  else
    return -highest<C>();
}

/// Both: NaN if either operand is.
template <class C>
__device__ C larger(C a, C b) {
  return a > b || a != a ? a : b;
}
template <class C>
__device__ C smaller(C a, C b) {
  return a < b || a != a ? a : b;
}

/// True if element i of value v comes before element j of value w: larger or, of equals, earlier; a
/// NaN is larger than any number.
template <class C>
__device__ bool comes_before(C v, int64_t i, C w, int64_t j) {
  const bool v_nan = v != v, w_nan = w != w;
  if (v_nan || w_nan) return v_nan && (!w_nan || i < j);
  return v > w || (v == w && i < j);
}

/// n elements: their sum or extreme; their maximum and the sum of exponentials below it; their mean
/// and the sum of squared distances to it; or their largest and its position.
template <class W>
struct State {
  W a, b;
  int64_t n;
};
/// As stored in the workspace.
template <class W>
struct alignas(16) Part {
  W a, b;
};

template <class W>
__device__ State<W> nothing(Kind kind) {
  const W a = kind == Kind::sum || kind == Kind::var ? W(0)
              : kind == Kind::min                    ? highest<W>()
                                                     : lowest<W>();
  return {a, W(0), 0};
}

/// x then y.
template <class W>
__device__ State<W> join(Kind kind, const State<W>& x, const State<W>& y) {
  if (y.n == 0) return x;
  if (x.n == 0) return y;
  const int64_t n = x.n + y.n;
  switch (kind) {
    case Kind::sum:
      return {x.a + y.a, W(0), n};
    case Kind::max:
      return {larger(x.a, y.a), W(0), n};
    case Kind::min:
      return {smaller(x.a, y.a), W(0), n};
    case Kind::argmax: {
      const bool first =
          comes_before(x.a, static_cast<int64_t>(x.b), y.a, static_cast<int64_t>(y.b));
      return {first ? x.a : y.a, first ? x.b : y.b, n};
    }
    default:
      break;
  }
  if constexpr (std::is_same_v<W, double>) {
    if (kind == Kind::logsumexp) {
      const W top = larger(x.a, y.a);
      if (!(top - top == W(0))) return {top, W(0), n};  // not finite
      return {top, x.b * ::exp(x.a - top) + y.b * ::exp(y.a - top), n};
    }
    // Chan, Golub, LeVeque 1983.
    const W share = static_cast<W>(y.n) / static_cast<W>(n), apart = y.a - x.a;
    return {x.a + apart * share, x.b + y.b + apart * apart * share * static_cast<W>(x.n), n};
  }
  return x;
}

/// `number`: the scale of a sum, the correction of a variance.
template <class W>
__device__ W result(Kind kind, const State<W>& s, double number) {
  if (kind == Kind::argmax) return s.b;
  if constexpr (std::is_same_v<W, double>) {
    if (kind == Kind::sum) return s.a * number;
    if (kind == Kind::logsumexp) return s.a - s.a == 0 ? s.a + ::log(s.b) : s.a;
    if (kind == Kind::var)
      return s.n == 0 ? highest<W>() - highest<W>() : s.b / (static_cast<W>(s.n) - number);
  }
  return s.a;
}

/// e^x for elements of type T: the fast form's error is far below the rounding of a narrow one.
template <class T>
__device__ Compute<T> exp_beside(Compute<T> x) {
  if constexpr (std::is_same_v<T, double>)
    return ::exp(x);
  else if constexpr (std::is_same_v<T, float>)
    return expf(x);
  else
    return __expf(x);
}

/// What one pass over a chunk's elements x computes; c is the result of the earlier passes.
enum class Step : uint8_t { add, max, min, add_exp, add_off, add_squares };

template <class C>
__device__ C start(Step step) {
  return step == Step::max ? lowest<C>() : step == Step::min ? highest<C>() : C(0);
}
/// Combines two lanes' values.
template <class C>
__device__ C both(Step step, C a, C b) {
  return step == Step::max ? larger(a, b) : step == Step::min ? smaller(a, b) : a + b;
}
/// Adds one element to a lane's value.
template <class T>
__device__ Compute<T> with(Step step, Compute<T> value, Compute<T> x, Compute<T> c) {
  switch (step) {
    case Step::add:
      return value + x;
    case Step::max:
      return larger(value, x);
    case Step::min:
      return smaller(value, x);
    case Step::add_exp:
      if constexpr (std::is_floating_point_v<Compute<T>>) return value + exp_beside<T>(x - c);
      return value;
    case Step::add_off:
      return value + (x - c);
    case Step::add_squares:
      return value + (x - c) * (x - c);
  }
  return value;
}

/// The passes over a chunk, in one place, so that the loops of a kernel are compiled once.
template <class C>
struct Passes {
  Kind kind;
  __device__ int count() const { return kind == Kind::var ? 3 : kind == Kind::logsumexp ? 2 : 1; }
  __device__ Step step(int pass) const {
    if (pass == 2) return Step::add_squares;
    if (pass == 1) return kind == Kind::var ? Step::add_off : Step::add_exp;
    return kind == Kind::max || kind == Kind::logsumexp ? Step::max
           : kind == Kind::min                          ? Step::min
                                                        : Step::add;
  }
  /// c of the later passes, from the result of the first.
  __device__ C centre(C first, int64_t n) const {
    return kind == Kind::var ? first / static_cast<C>(n) : first;
  }
  /// The chunk's state from c and the results of all passes. Variance: the corrected two-pass
  /// algorithm; the centre is the mean up to rounding, and the sum of the distances to it tells how far it is off.
  __device__ State<Total<C>> state(const C* found, C c, int64_t n) const {
    using W = Total<C>;
    if (kind == Kind::var) {
      const W off = static_cast<W>(found[1]), shift = off / static_cast<W>(n);
      return {static_cast<W>(c) + shift, static_cast<W>(found[2]) - off * shift, n};
    }
    // A chunk of -inf alone adds nothing to the others: its exp(-inf - -inf) is not a number.
    const W first = static_cast<W>(found[0]);
    return {first, kind == Kind::logsumexp && first - first == W(0) ? static_cast<W>(found[1]) : W(0), n};
  }
};

}  // namespace sheaf::kernels::cuda::reduction
