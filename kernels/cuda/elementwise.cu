#include "sheaf/kernels/cuda/element_functions.h"

namespace sheaf::kernels::cuda {
namespace {

// The op is selected inside the kernel, once for all elements of a thread: one kernel per type compiles faster than
// one per op.

struct Unary {
  UnaryOp op;
  template <class C, class G>
  __device__ void choose(G g) const {
    choose_unary<C>(op, [&](auto f) { g([f](const C* in, C* out) { out[0] = f(in[0]); }); });
  }
};

bool has_integer_form(UnaryOp op) {
  switch (op) {
    case UnaryOp::neg:
    case UnaryOp::abs:
    case UnaryOp::square:
    case UnaryOp::sign:
    case UnaryOp::relu:
    case UnaryOp::logical_not:
    case UnaryOp::isfinite:
      return true;
    default:
      return false;
  }
}

struct Binary {
  using Broadcasts = void;
  BinaryOp op;
  template <class C, class G>
  __device__ void choose(G g) const {
    choose_binary<C>(op,
                     [&](auto f) { g([f](const C* in, C* out) { out[0] = f(in[0], in[1]); }); });
  }
};

struct BinaryScalar {
  BinaryOp op;
  double scalar;
  bool scalar_left;
  template <class C, class G>
  __device__ void choose(G g) const {
    const C s = static_cast<C>(scalar);
    const bool left = scalar_left;
    choose_binary<C>(op, [&](auto f) {
      g([=](const C* in, C* out) { out[0] = left ? f(s, in[0]) : f(in[0], s); });
    });
  }
};

struct Where {
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    out[0] = in[0] != C(0) ? in[1] : in[2];
  }
};

struct WhereScalar {
  double scalar;
  bool scalar_first;
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    out[0] = (in[0] != C(0)) == scalar_first ? static_cast<C>(scalar) : in[1];
  }
};

// Bounds for each compute type, prepared by clamp() on the host.
struct Clamp {
  double lo, hi;
  int64_t lo_whole, hi_whole;
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    C low, high;
    if constexpr (std::is_same_v<C, int64_t>)
      low = lo_whole, high = hi_whole;
    else
      low = static_cast<C>(lo), high = static_cast<C>(hi);
    out[0] = clamp_of(in[0], low, high);
  }
};

struct ActivationBackward {
  BackwardOp op;
  template <class C, class G>
  __device__ void choose(G g) const {
    if constexpr (std::is_floating_point_v<C>)
      choose_backward<C>(
          op, [&](auto f) { g([f](const C* in, C* out) { out[0] = f(in[0], in[1]); }); });
  }
};

struct Swiglu {
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    if constexpr (std::is_floating_point_v<C>) out[0] = swiglu_of(in[0], in[1]);
  }
};

struct SwigluBackward {
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    if constexpr (std::is_floating_point_v<C>) {
      const C gate = in[0], up = in[1], dy = in[2], s = sigmoid(gate);
      out[0] = dy * up * s * (C(1) + gate * (C(1) - s));
      out[1] = dy * gate * s;
    }
  }
};

struct ClampedSwiglu {
  double alpha, limit;
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    if constexpr (std::is_floating_point_v<C>) {
      const C most = static_cast<C>(limit), gate = in[0] > most ? most : in[0];
      out[0] = shifted_swiglu_of(gate, clamp_of(in[1], -most, most), static_cast<C>(alpha));
    }
  }
};

struct ClampedSwigluBackward {
  double alpha, limit;
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    if constexpr (std::is_floating_point_v<C>) {
      const C most = static_cast<C>(limit), gate = in[0] > most ? most : in[0], up = clamp_of(in[1], -most, most);
      const C dy = in[2], x = static_cast<C>(alpha) * gate, s = sigmoid(x);
      out[0] = in[0] <= most ? dy * (up + C(1)) * s * (C(1) + x * (C(1) - s)) : C(0);
      out[1] = -most <= in[1] && in[1] <= most ? dy * gate * s : C(0);
    }
  }
};

DType floating_compute(const char* name, std::initializer_list<View> views) {
  const DType compute = compute_type_of(views);
  if (compute == kI64) fail<DTypeError>('[', name, "] is not defined for ", views.begin()->dtype);
  return compute;
}

}  // namespace

void unary(const Stream& stream, UnaryOp op, const View& x, const View& out) {
  const DType compute = is_predicate(op) ? compute_type_of({x}) : compute_type_of({x, out});
  if (compute == kI64 && !has_integer_form(op))
    fail<DTypeError>("[unary] this op is not defined for ", x.dtype);
  map_elements<1, 1>("unary", stream, compute, Unary{op}, {out}, {x});
}

void binary(const Stream& stream, BinaryOp op, const View& a, const View& b, const View& out) {
  const DType compute = is_predicate(op) ? compute_type_of({a, b}) : compute_type_of({a, b, out});
  if (compute == kI64 && (op == BinaryOp::div || op == BinaryOp::pow))
    fail<DTypeError>("[binary] this op is not defined for ", a.dtype,
                     ": cast to a floating type first");
  map_elements<1, 2>("binary", stream, compute, Binary{op}, {out}, {a, b});
}

void binary_scalar(const Stream& stream, BinaryOp op, const View& a, double scalar,
                   bool scalar_left, const View& out) {
  if (op == BinaryOp::pow && scalar == 2.0 && !scalar_left)
    return unary(stream, UnaryOp::square, a, out);
  const DType compute = is_predicate(op) ? compute_type_of({a}) : compute_type_of({a, out});
  if (compute == kI64 && (op == BinaryOp::div || op == BinaryOp::pow))
    fail<DTypeError>("[binary] this op is not defined for ", a.dtype,
                     ": cast to a floating type first");
  map_elements<1, 1>("binary_scalar", stream, compute, BinaryScalar{op, scalar, scalar_left}, {out},
                     {a});
}

void where(const Stream& stream, const View& cond, const View& a, const View& b, const View& out) {
  map_elements<1, 3>("where", stream, compute_type_of({a, b, out}), Where{}, {out}, {cond, a, b});
}

void where_scalar(const Stream& stream, const View& cond, const View& x, double scalar,
                  bool scalar_first, const View& out) {
  map_elements<1, 2>("where_scalar", stream, compute_type_of({x, out}),
                     WhereScalar{scalar, scalar_first}, {out}, {cond, x});
}

void clamp(const Stream& stream, const View& x, double lo, double hi, const View& out) {
  // Integers: a bound beyond the type's range has no effect; a fractional one is rounded inwards.
  const auto whole = [](double v) {
    return v <= -0x1p63 ? INT64_MIN : v >= 0x1p63 ? INT64_MAX : static_cast<int64_t>(v);
  };
  map_elements<1, 1>("clamp", stream, compute_type_of({x, out}),
                     Clamp{lo, hi, whole(std::ceil(lo)), whole(std::floor(hi))}, {out}, {x});
}

void activation_backward(const Stream& stream, BackwardOp op, const View& kept, const View& dy,
                         const View& dx) {
  map_elements<1, 2>("activation_backward", stream,
                     floating_compute("activation_backward", {kept, dy, dx}),
                     ActivationBackward{op}, {dx}, {kept, dy});
}
void swiglu(const Stream& stream, const View& gate, const View& up, const View& out) {
  map_elements<1, 2>("swiglu", stream, floating_compute("swiglu", {gate, up, out}), Swiglu{}, {out},
                     {gate, up});
}
void swiglu_backward(const Stream& stream, const View& gate, const View& up, const View& dy,
                     const View& dgate, const View& dup) {
  map_elements<2, 3>("swiglu_backward", stream,
                     floating_compute("swiglu_backward", {gate, up, dy, dgate, dup}),
                     SwigluBackward{}, {dgate, dup}, {gate, up, dy});
}
void clamped_swiglu(const Stream& stream, const View& gate, const View& up, double alpha, double limit, const View& out) {
  map_elements<1, 2>("clamped_swiglu", stream, floating_compute("clamped_swiglu", {gate, up, out}),
                     ClampedSwiglu{alpha, limit}, {out}, {gate, up});
}
void clamped_swiglu_backward(const Stream& stream, const View& gate, const View& up, const View& dy, double alpha, double limit,
                             const View& dgate, const View& dup) {
  map_elements<2, 3>("clamped_swiglu_backward", stream,
                     floating_compute("clamped_swiglu_backward", {gate, up, dy, dgate, dup}),
                     ClampedSwigluBackward{alpha, limit}, {dgate, dup}, {gate, up, dy});
}

}  // namespace sheaf::kernels::cuda
