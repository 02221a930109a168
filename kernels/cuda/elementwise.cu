#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels::cuda {
namespace {

// Which op it is, is decided inside the kernel, once for all elements of a thread: one kernel a
// type compiles faster than one an op.

template <class C>
__device__ C sigmoid(C x) {
  if constexpr (std::is_same_v<C, float>)
    return 1.0f / (1.0f + expf(-x));
  else
    return 1.0 / (1.0 + exp(-x));
}
template <class C>
__device__ C normal_cdf(C x) {
  if constexpr (std::is_same_v<C, float>)
    return 0.5f * erfcf(-0.70710678f * x);
  else
    return 0.5 * erfc(-0.70710678118654752 * x);
}
template <class C>
__device__ C normal_pdf(C x) {
  if constexpr (std::is_same_v<C, float>)
    return 0.39894228f * expf(-0.5f * x * x);
  else
    return 0.39894228040143268 * exp(-0.5 * x * x);
}

// sqrt(8 / pi): (1 + tanh u) / 2 = sigmoid(2u), without the cancellation.
constexpr double kGelu = 1.5957691216057308, kGeluCubic = 0.044715;

struct Unary {
  UnaryOp op;
  template <class C, class G>
  __device__ void choose(G g) const {
    const auto use = [&](auto f) { g([f](const C* in, C* out) { out[0] = f(in[0]); }); };
    switch (op) {
      case UnaryOp::neg:
        return use([](C v) { return -v; });
      case UnaryOp::abs:
        return use([](C v) { return v < C(0) ? -v : v == C(0) ? C(0) : v; });
      case UnaryOp::square:
        return use([](C v) { return v * v; });
      case UnaryOp::sign:
        return use([](C v) { return v > C(0) ? C(1) : v < C(0) ? C(-1) : v; });
      case UnaryOp::relu:
        return use([](C v) { return v < C(0) ? C(0) : v; });
      case UnaryOp::logical_not:
        return use([](C v) { return C(v == C(0)); });
      case UnaryOp::isfinite:
        return use([](C v) { return C(v - v == C(0)); });  // 0 exactly where v is finite
      default:
        break;
    }
    if constexpr (std::is_floating_point_v<C>) {
      constexpr bool kSingle = std::is_same_v<C, float>;
      switch (op) {
        case UnaryOp::exp:
          return use([](C v) { return kSingle ? C(expf(v)) : C(::exp(v)); });
        case UnaryOp::log:
          return use([](C v) { return kSingle ? C(logf(v)) : C(::log(v)); });
        case UnaryOp::sqrt:
          return use([](C v) { return kSingle ? C(sqrtf(v)) : C(::sqrt(v)); });
        case UnaryOp::rsqrt:
          return use([](C v) { return C(1) / (kSingle ? C(sqrtf(v)) : C(::sqrt(v))); });
        case UnaryOp::reciprocal:
          return use([](C v) { return C(1) / v; });
        case UnaryOp::tanh:
          return use([](C v) { return kSingle ? C(tanhf(v)) : C(::tanh(v)); });
        case UnaryOp::sigmoid:
          return use([](C v) { return sigmoid(v); });
        case UnaryOp::silu:
          return use([](C v) { return v * sigmoid(v); });
        case UnaryOp::gelu_exact:
          return use([](C v) { return v * normal_cdf(v); });
        case UnaryOp::gelu_tanh:
          return use([](C v) { return v * sigmoid(C(kGelu) * (v + C(kGeluCubic) * v * v * v)); });
        case UnaryOp::sin:
          return use([](C v) { return kSingle ? C(sinf(v)) : C(::sin(v)); });
        case UnaryOp::cos:
          return use([](C v) { return kSingle ? C(cosf(v)) : C(::cos(v)); });
        default:
          break;
      }
    }
    use([](C v) { return v; });
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

/// use(f) with the function of two operands that `op` names.
template <class C, class Use>
__device__ void choose_binary(BinaryOp op, Use use) {
  switch (op) {
    case BinaryOp::add:
      return use([](C x, C y) { return x + y; });
    case BinaryOp::sub:
      return use([](C x, C y) { return x - y; });
    case BinaryOp::mul:
      return use([](C x, C y) { return x * y; });
    case BinaryOp::minimum:
      return use([](C x, C y) { return x < y || x != x ? x : y; });
    case BinaryOp::maximum:
      return use([](C x, C y) { return x > y || x != x ? x : y; });
    case BinaryOp::eq:
      return use([](C x, C y) { return C(x == y); });
    case BinaryOp::ne:
      return use([](C x, C y) { return C(x != y); });
    case BinaryOp::lt:
      return use([](C x, C y) { return C(x < y); });
    case BinaryOp::le:
      return use([](C x, C y) { return C(x <= y); });
    case BinaryOp::gt:
      return use([](C x, C y) { return C(x > y); });
    case BinaryOp::ge:
      return use([](C x, C y) { return C(x >= y); });
    case BinaryOp::logical_and:
      return use([](C x, C y) { return C(x != C(0) && y != C(0)); });
    case BinaryOp::logical_or:
      return use([](C x, C y) { return C(x != C(0) || y != C(0)); });
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<C>) {
    if (op == BinaryOp::div) return use([](C x, C y) { return x / y; });
    use([](C x, C y) {
      return static_cast<C>(::pow(static_cast<double>(x), static_cast<double>(y)));
    });
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

// Bounds by compute type: what clamp() makes of them on the host.
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
    const C v = in[0] < low ? low : in[0];
    out[0] = v > high ? high : v;
  }
};

enum class Backward : uint8_t { gelu_tanh, gelu_exact, silu, relu, tanh, sigmoid };

struct UnaryBackward {
  Backward kind;
  template <class C, class G>
  __device__ void choose(G g) const {
    if constexpr (std::is_floating_point_v<C>) {
      const auto use = [&](auto slope) {
        g([slope](const C* in, C* out) { out[0] = in[1] * slope(in[0]); });
      };
      switch (kind) {
        case Backward::gelu_exact:
          return use([](C v) { return normal_cdf(v) + v * normal_pdf(v); });
        case Backward::gelu_tanh:  // with s = sigmoid(2u): y = x s, and ds/dx = s (1 - s) 2u'
          return use([](C v) {
            const C s = sigmoid(C(kGelu) * (v + C(kGeluCubic) * v * v * v));
            return s + v * s * (C(1) - s) * C(kGelu) * (C(1) + C(3) * C(kGeluCubic) * v * v);
          });
        case Backward::silu:
          return use([](C v) {
            const C s = sigmoid(v);
            return s * (C(1) + v * (C(1) - s));
          });
        case Backward::relu:  // 0 for an infinite gradient, too
          return g([](const C* in, C* out) { out[0] = in[0] > C(0) ? in[1] : C(0); });
        case Backward::tanh:
          return use([](C v) { return C(1) - v * v; });
        case Backward::sigmoid:
          return use([](C v) { return v * (C(1) - v); });
      }
    }
  }
};

struct Swiglu {
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    if constexpr (std::is_floating_point_v<C>) out[0] = in[0] * sigmoid(in[0]) * in[1];
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

DType floating_compute(const char* name, std::initializer_list<View> views) {
  const DType compute = compute_type_of(views);
  if (compute == kI64) fail<DTypeError>('[', name, "] is not defined for ", views.begin()->dtype);
  return compute;
}

void backward(const char* name, const Stream& stream, Backward kind, const View& kept,
              const View& dy, const View& dx) {
  map_elements<1, 2>(name, stream, floating_compute(name, {kept, dy, dx}), UnaryBackward{kind},
                     {dx}, {kept, dy});
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
  // Integers: a bound beyond the type's range does not bind; a fractional one moves inwards.
  const auto whole = [](double v) {
    return v <= -0x1p63 ? INT64_MIN : v >= 0x1p63 ? INT64_MAX : static_cast<int64_t>(v);
  };
  map_elements<1, 1>("clamp", stream, compute_type_of({x, out}),
                     Clamp{lo, hi, whole(std::ceil(lo)), whole(std::floor(hi))}, {out}, {x});
}

void gelu_backward(const Stream& stream, UnaryOp kind, const View& x, const View& dy,
                   const View& dx) {
  backward("gelu_backward", stream,
           kind == UnaryOp::gelu_exact ? Backward::gelu_exact : Backward::gelu_tanh, x, dy, dx);
}
void silu_backward(const Stream& stream, const View& x, const View& dy, const View& dx) {
  backward("silu_backward", stream, Backward::silu, x, dy, dx);
}
void relu_backward(const Stream& stream, const View& x, const View& dy, const View& dx) {
  backward("relu_backward", stream, Backward::relu, x, dy, dx);
}
void tanh_backward(const Stream& stream, const View& y, const View& dy, const View& dx) {
  backward("tanh_backward", stream, Backward::tanh, y, dy, dx);
}
void sigmoid_backward(const Stream& stream, const View& y, const View& dy, const View& dx) {
  backward("sigmoid_backward", stream, Backward::sigmoid, y, dy, dx);
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

}  // namespace sheaf::kernels::cuda
