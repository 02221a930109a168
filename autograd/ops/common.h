// Shared code of the elementwise, reduction and shape ops: type checks, local broadcasting, gradients
// of broadcast operands, placement rules.
#pragma once

#include <cmath>

#include "sheaf/autograd/ops.h"

namespace sheaf::ops {

inline const Placement kR = Placement::replicate(), kP = Placement::partial();

/// Whether values are addends along any axis.
inline bool has_partial(const Layout& layout) {
  for (int a = 0; a < layout.num_axes(); ++a)
    if (layout[a].is_partial()) return true;
  return false;
}

/// For an op: saves each of two inputs if the other one's gradient is needed.
struct SavesTheOther {
  static constexpr uint64_t kSavedInputs = 0b11;
  static void saves(const auto&, uint64_t needs, uint64_t& in, uint64_t&) {
    in = ((needs & 1) ? 0b10 : 0) | ((needs & 2) ? 0b01 : 0);
  }
};

/// Of kernels::BinaryOp.
inline constexpr const char* kBinaryNames[] = {"add",     "sub",     "mul", "div",         "pow",
                                        "minimum", "maximum", "eq",  "ne",          "lt",
                                        "le",      "gt",      "ge",  "logical_and", "logical_or"};

inline void require_floating(const char* op, DType d) {
  if (!is_floating(d))
    fail<DTypeError>("[", op, "] needs a floating type, not ", d, ": cast first");
}

/// expect_defined() for the first inputs of an op.
inline void expect_all_defined(const char* op, std::initializer_list<const Tensor*> inputs) {
  int i = 0;
  for (const Tensor* x : inputs) expect_defined(op, *x, i++);
}

/// A dimension of x, which must be defined.
inline int wrap_dim(const char* op, int dim, const Tensor& x) {
  expect_defined(op, x);
  return sheaf::wrap_dim(op, dim, x.rank());
}

/// All inputs from `first` on, or those before `end`, have one dtype, which it returns.
inline DType common_dtype(const char* op, const Infer& c, int first = 0, int end = -1) {
  for (int i = first + 1; i < (end < 0 ? c.num_inputs() : end); ++i)
    if (c.dtype(i) != c.dtype(first))
      fail<DTypeError>("[", op, "] operands are ", c.input(first), " and ", c.input(i),
                       ": cast one of them");
  return c.dtype(first);
}

inline Shape broadcast_inputs(const char* op, const Infer& c) {
  Shape out = c.shape(0);
  try {
    for (int i = 1; i < c.num_inputs(); ++i) out = broadcast_shapes(op, out, c.shape(i));
  } catch (const ShapeError&) {  // which knows shapes, not types
    std::string types;
    for (int i = 0; i < c.num_inputs(); ++i) types += str(i ? " with " : "", c.input(i));
    fail<ShapeError>("[", op, "] cannot broadcast ", types);
  }
  return out;
}

/// The view in a larger shape, dimensions aligned from the right, with stride 0 where it is repeated.
inline View expand_view(const View& v, const Shape& shape) {
  View out{v.data, v.dtype, shape, Shape::filled(shape.rank(), 0)};
  for (int i = 1; i <= v.rank() && i <= shape.rank(); ++i) {
    const int64_t have = v.shape[v.rank() - i], want = shape[shape.rank() - i];
    if (have == want)
      out.strides[shape.rank() - i] = v.strides[v.rank() - i];
    else if (have != 1)
      fail<ShapeError>("[broadcast] local part ", v.shape, " does not fit ", shape);
  }
  return out;
}

/// Input i's local part in the local shape of output 0.
inline View broadcast_input(const Execute& c, int i) {
  return expand_view(c.input(i), c.output(0).shape);
}

/// The gradient of a broadcast operand of this type: summed over the dimensions along which it was repeated.
Tensor sum_to(const Tensor& gradient, const Type& operand);

/// A gradient in the dual of its value's layout where only slices are missing (Replicate to Shard moves no data).
Tensor sliced_to_dual(const Tensor& gradient, const Type& value);

/// How many of `rows` rows of a dimension, or of heads or the like, belong to a rank that has `local` of the `whole` dimension. For
/// shards that give a rank the same fraction of each part.
inline int64_t local_share(int64_t rows, int64_t local, int64_t whole) {
  return local == whole ? rows : rows * local / whole;
}

/// For scores or logits.
inline void check_softcap(const char* op, double softcap) {
  if (!(softcap >= 0)) fail<ShapeError>("[", op, "] a softcap of ", softcap, "; wants 0 for none, or a positive number");
}

inline void check_z_loss(const char* op, double z_loss) {
  if (!(z_loss >= 0 && std::isfinite(z_loss))) fail<ShapeError>("[", op, "] a z_loss of ", z_loss, "; wants 0 for none, or a positive number");
}

/// Scalars are weak, but integer tensors accept neither fractional nor infinite ones.
inline void check_scalar(const char* op, DType d, double scalar) {
  if (is_integral(d) && !(scalar == std::trunc(scalar) && std::abs(scalar) < 0x1p63))
    fail<DTypeError>("[", op, "] a ", d, " tensor cannot take the scalar ", scalar,
                     ": cast it first");
}

/// Elementwise rule of an op that is linear in input `i` alone (the others fixed).
inline void pointwise_linear_in(Place& p, int i) {
  rules::pointwise_nonlinear(p);
  std::vector<Placement> in(static_cast<size_t>(p.num_inputs()), kR);
  in[static_cast<size_t>(i)] = kP;
  p.rule(in, std::span(&kP, 1));
}

/// Every operand in placement `in`, every output in `out`.
inline void rule_all(Place& p, const Placement& in, const Placement& out, int outputs = 1) {
  const std::vector<Placement> ins(static_cast<size_t>(p.num_inputs()), in),
      outs(static_cast<size_t>(outputs), out);
  p.rule(ins, outs);
}

}  // namespace sheaf::ops
