// Reductions over any set of dimensions. Sums and means of a dimension that is sharded are Partial;
// means divide by the global count. Maxima and the like need their dimensions whole on every rank.
#include "sheaf/kernels/reduce.h"

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct ReduceAttrs {
  uint32_t mask;  ///< bit d: dimension d is reduced
  bool keepdim;
  char unused[3] = {};
  double parameter = 0;  ///< var: the correction
  bool reduces(int d) const { return mask >> d & 1; }
};

Shape reduced_shape(const ReduceAttrs& a, const Shape& x) {
  Shape out;
  for (int d = 0; d < x.rank(); ++d) {
    if (!a.reduces(d))
      out.push_back(x[d]);
    else if (a.keepdim)
      out.push_back(1);
  }
  return out;
}

/// Dimension d of the input in the output; dimension d is kept.
int kept_dim(const ReduceAttrs& a, int d) {
  int at = d;
  for (int i = 0; i < d && !a.keepdim; ++i) at -= a.reduces(i);
  return at;
}

int64_t count(const ReduceAttrs& a, const Shape& x) {
  int64_t n = 1;
  for (int d = 0; d < x.rank(); ++d) n *= a.reduces(d) ? x[d] : 1;
  return n;
}

/// The local output with size 1 where the local input is reduced.
View keepdim_view(const ReduceAttrs& a, const View& x, const View& out, bool flat) {
  if (flat) return View::dense(out.data, out.dtype, {1});
  if (a.keepdim) return out;
  View v{out.data, out.dtype, {}, {}};
  for (int d = 0, at = 0; d < x.rank(); ++d) {
    v.shape.push_back(a.reduces(d) ? 1 : out.shape[at]);
    v.strides.push_back(a.reduces(d) ? 0 : out.strides[at++]);
  }
  return v;
}
View output_view(const ReduceAttrs& a, const Execute& c) {
  return keepdim_view(a, c.input(0), c.output(0),
                      c.input(0).rank() != c.input_type(0).shape.rank());
}

/// The rule of an op whose result over a sharded reduced dimension is (`sums`) or is not a sum of parts.
void place_reduction(const ReduceAttrs& a, Place& p, bool sums) {
  if (const OwnershipMap* map = p.sharded()) {
    const Placement in = Placement::shard(*map);
    if (map->is_flat()) {
      if (sums && count(a, p.shape(0)) == p.shape(0).numel()) p.rule({in}, {kP});
    } else if (!a.reduces(map->dim())) {
      p.rule({in}, {Placement::shard(map->moved_to(kept_dim(a, map->dim())))});
    } else if (sums) {
      p.rule({in}, {kP});
    }
  }
  p.rule({kR}, {kR});
  if (sums) p.rule({kP}, {kP});
}

/// y, of the output's shape, with size 1 inserted where the input of `rank` dimensions is reduced.
Tensor kept(const ReduceAttrs& a, const Tensor& y, int rank) {
  Dims reduced;
  for (int d = 0; d < rank; ++d)
    if (a.reduces(d)) reduced.push_back(d);
  return a.keepdim ? y : unsqueeze(y, reduced);
}

/// The same repeated along the reduced dimensions, as a gradient of the input.
Tensor spread(const ReduceAttrs& a, const Tensor& g, const Type& x) {
  return sliced_to_dual(expand(kept(a, g, x.shape.rank()), x.shape), x);
}

template <class Op>
struct Reduction {
  using Attrs = ReduceAttrs;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(Op::kName, c.dtype(0));
    c.output(c.dtype(0), reduced_shape(a, c.shape(0)));
  }
  static void place(const Attrs& a, Place& p) { place_reduction(a, p, false); }
  static void describe(const Attrs& a, std::string& out) {
    out += "dims ";
    for (int d = 0; d < kMaxDims; ++d)
      if (a.reduces(d)) out += std::to_string(d) + " ";
  }
};

struct Sum : Reduction<Sum> {
  static constexpr const char* kName = "sum";
  static void infer(const Attrs& a, Infer& c) {
    c.output(is_floating(c.dtype(0)) ? c.dtype(0) : kI64, reduced_shape(a, c.shape(0)));
  }
  static void place(const Attrs& a, Place& p) { place_reduction(a, p, true); }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), sum, c.input(0), output_view(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, sum, c.input(0), output_view(a, c), 1.0);
  }
  static void vjp(const Attrs& a, Vjp& c) { c.set(0, spread(a, c.grad(), c.input_type(0))); }
};

struct Mean : Reduction<Mean> {
  static constexpr const char* kName = "mean";
  static double scale(const Attrs& a, const Type& x) {
    return 1.0 / static_cast<double>(count(a, x.shape));
  }
  static void place(const Attrs& a, Place& p) { place_reduction(a, p, true); }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), sum, c.input(0), output_view(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, sum, c.input(0), output_view(a, c), scale(a, c.input_type(0)));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (count(a, c.input_type(0).shape) == 0) return c.set(0, spread(a, c.grad(), c.input_type(0)));
    c.set(0, spread(a, mul(c.grad(), scale(a, c.input_type(0))), c.input_type(0)));
  }
};

struct Var : Reduction<Var> {
  static constexpr const char* kName = "var";
  static constexpr uint64_t kSavedInputs = 0b1;
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), var, c.input(0), a.parameter, output_view(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, var, c.input(0), a.parameter, output_view(a, c));
  }
  static void vjp(const Attrs& a, Vjp& c) {  // 2 (x - mean) / (n - correction)
    const Tensor x = c.input(0);
    ReduceAttrs keep = a;
    keep.keepdim = true;
    const Tensor centred = sub(x, apply<Mean>(keep, x));
    const double n = static_cast<double>(count(a, x.shape()));
    c.set(0, mul(centred, spread(a, mul(c.grad(), 2.0 / (n - a.parameter)), c.input_type(0))));
  }
};

/// max and min: equal extremes share the gradient.
template <class Op>
struct Extreme : Reduction<Op> {
  static constexpr uint64_t kSavedInputs = 0b1, kSavedOutputs = 0b1;
  static void infer(const ReduceAttrs& a, Infer& c) {
    if (count(a, c.shape(0)) == 0 && reduced_shape(a, c.shape(0)).numel() > 0)
      fail<ShapeError>("[", Op::kName, "] of no elements: ", c.input(0));
    c.output(c.dtype(0), reduced_shape(a, c.shape(0)));
  }
  static void vjp(const ReduceAttrs& a, Vjp& c) {
    const Tensor x = c.input(0);
    ReduceAttrs keep = a;
    keep.keepdim = true;
    const DType exact = statistics_dtype(x.dtype());  // in which they can be counted
    const Tensor hit = eq(x, kept(a, c.output(0), x.rank()));
    const Tensor share = div(cast(kept(a, c.grad(), x.rank()), exact), apply<Sum>(keep, cast(hit, exact)));
    c.set(0, where(hit, expand(cast(share, x.dtype()), x.shape()), 0.0));
  }
};
struct Max : Extreme<Max> {
  static constexpr const char* kName = "max";
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), max, c.input(0), output_view(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, max, c.input(0), output_view(a, c));
  }
};
struct Min : Extreme<Min> {
  static constexpr const char* kName = "min";
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), min, c.input(0), output_view(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, min, c.input(0), output_view(a, c));
  }
};

struct LogSumExp : Reduction<LogSumExp> {
  static constexpr const char* kName = "logsumexp";
  static constexpr uint64_t kSavedInputs = 0b1, kSavedOutputs = 0b1;
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), logsumexp, c.input(0), output_view(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, logsumexp, c.input(0), output_view(a, c));
  }
  static void vjp(const Attrs& a, Vjp& c) {  // softmax
    const Tensor x = c.input(0);
    const Tensor p = exp(sub(x, kept(a, c.output(0), x.rank())));
    c.set(0, mul(p, expand(kept(a, c.grad(), x.rank()), x.shape())));
  }
};

struct Argmax : Reduction<Argmax> {  // exactly one reduced dimension
  static constexpr const char* kName = "argmax";
  static int dim(const Attrs& a) { return std::countr_zero(a.mask); }
  static void infer(const Attrs& a, Infer& c) {
    if (c.shape(0)[dim(a)] == 0)
      fail<ShapeError>("[argmax] dimension ", dim(a), " of ", c.input(0), " is empty");
    c.output(kI64, reduced_shape(a, c.shape(0)));
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), argmax, c.input(0), dim(a), output_view(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, argmax, c.input(0), dim(a), output_view(a, c));
  }
};

ReduceAttrs attrs_of(const char* op, const Tensor& x, const Dims& dims, bool keepdim,
                     double parameter = 0) {
  expect_defined(op, x);
  ReduceAttrs a{0, keepdim, {}, parameter};
  for (const int d : dims) {
    const int at = wrap_dim(op, d, x.rank());
    check<ShapeError>(!a.reduces(at), "[", op, "] dimension ", d, " is given twice");
    a.mask |= 1u << at;
  }
  if (dims.empty()) a.mask = (1u << x.rank()) - 1;
  return a;
}

}  // namespace

Tensor sum(const Tensor& x, const Dims& dims, bool keepdim) {
  return apply<Sum>(attrs_of("sum", x, dims, keepdim), x);
}
Tensor mean(const Tensor& x, const Dims& dims, bool keepdim) {
  return apply<Mean>(attrs_of("mean", x, dims, keepdim), x);
}
Tensor var(const Tensor& x, const Dims& dims, const VarOptions& options) {
  return apply<Var>(attrs_of("var", x, dims, options.keepdim, options.correction), x);
}
Tensor max(const Tensor& x, const Dims& dims, bool keepdim) {
  return apply<Max>(attrs_of("max", x, dims, keepdim), x);
}
Tensor min(const Tensor& x, const Dims& dims, bool keepdim) {
  return apply<Min>(attrs_of("min", x, dims, keepdim), x);
}
Tensor logsumexp(const Tensor& x, const Dims& dims, bool keepdim) {
  return apply<LogSumExp>(attrs_of("logsumexp", x, dims, keepdim), x);
}
Tensor argmax(const Tensor& x, int dim, bool keepdim) {
  return apply<Argmax>(attrs_of("argmax", x, {dim}, keepdim), x);
}

}  // namespace sheaf
