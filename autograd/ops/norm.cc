// Layer and root-mean-square normalisation over the last dimension, of a tensor or of the sum of two, with fused
// backwards.
#include "sheaf/kernels/norm.h"

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/autograd/ops/second.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

void check_vector(const char* op, const Infer& c, int i) {
  if (!(c.shape(i) == Shape{c.shape(0).back()}))
    fail<ShapeError>("[", op, "] ", c.input(i), " does not fit the last dimension of ", c.input(0));
}

/// Which gradients are needed, and which optional inputs there are.
struct NormBackwardAttrs {
  double eps;
  int32_t layer, has_weight, has_dsum, dx, dweight, dbias;
  int weight() const { return 3 + layer; }
  int num_outputs() const { return dx + dweight + dbias; }
};

/// dy, x, rstd [, mean] [, weight] [, dsum] -> [dx] [, dweight] [, dbias], where dsum is another gradient of x that is added to dx.
struct NormBackward {
  static constexpr const char* kName = "norm_backward";
  using Attrs = NormBackwardAttrs;
  static void infer(const Attrs& a, Infer& c) {
    const Shape vector{c.shape(1).back()};
    if (a.dx) c.output(c.dtype(1), c.shape(1));
    const DType sum = statistics_dtype(c.dtype(1));
    if (a.dweight) c.output(sum, vector);
    if (a.dbias) c.output(sum, vector);
  }
  static void place(const Attrs& a, Place& p) {
    const int n = a.num_outputs();
    const uint64_t dsum = a.has_dsum ? uint64_t{1} << (p.num_inputs() - 1) : 0;
    row_rules(p, {.like = 1, .inputs = (a.layer ? 0b1111 : 0b0111) | dsum, .outputs = a.dx ? 1u : 0u, .num_outputs = n});
    rule_all(p, kR, kR, n);
    std::vector<Placement> in(static_cast<size_t>(p.num_inputs()), kR);  // linear in dy and dsum together
    in[0] = kP;
    if (a.has_dsum) in.back() = kP;
    p.rule(in, std::vector<Placement>(static_cast<size_t>(n), kP));
  }
  struct Views {
    View dy, x, rstd, mean, weight, dsum, dx, dweight, dbias;
    Views(const Attrs& a, const Execute& c) : dy(c.input(0)), x(c.input(1)), rstd(c.input(2)) {
      if (a.layer) mean = c.input(3);
      if (a.has_weight) weight = c.input(a.weight());
      if (a.has_dsum) dsum = c.input(c.num_inputs() - 1);
      int o = 0;
      if (a.dx) dx = c.output(o++);
      if (a.dweight) dweight = c.output(o++);
      if (a.dbias) dbias = c.output(o);
    }
  };
  static int64_t workspace(const Attrs& a, const Execute& c) {
    const Views v(a, c);
    return a.layer ? SHEAF_WORKSPACE(c.device(), layer_norm_backward, v.x, v.dx, v.dweight, v.dbias)
                   : SHEAF_WORKSPACE(c.device(), rms_norm_backward, v.x, v.dx, v.dweight);
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const Views v(a, c);
    if (a.layer)
      SHEAF_ON_DEVICE(stream, layer_norm_backward, v.dy, v.x, v.weight, v.mean, v.rstd, v.dx,
                   v.dweight, v.dbias, c.workspace, v.dsum);
    else
      SHEAF_ON_DEVICE(stream, rms_norm_backward, v.dy, v.x, v.weight, v.rstd, v.dx, v.dweight,
                   c.workspace, v.dsum);
  }
  static void saves(const Attrs& a, uint64_t, uint64_t& in, uint64_t&) {
    in = 0b11 | (a.has_weight ? uint64_t{1} << a.weight() : 0);
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor dx = grad_if(a.dx, c, 0), dweight = grad_if(a.dweight, c, a.dx), dbias = grad_if(a.dbias, c, a.dx + a.dweight);
    const NormBackwardOperands d = norm_second({c.input(0), c.input(1), a.has_weight ? c.input(a.weight()) : Tensor()},
                                               {dx, dweight, dbias}, a.layer, a.eps);
    if (d.dy) c.set(0, sliced_to_dual(d.dy, c.input_type(0)));
    if (d.x) c.set(1, d.x);
    if (d.weight) c.set(a.weight(), d.weight);
    if (a.has_dsum && dx) c.set(c.num_inputs() - 1, dx);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += a.layer ? "layer_norm" : "rms_norm";
    if (a.has_dsum) out += ", dsum";
  }
};

struct NormAttrs {
  double eps;
  int32_t has_weight, has_bias;
};

/// x [, r] [, weight] [, bias] -> [sum,] y [, mean], rstd: layer normalisation or, without mean and bias, RMS normalisation; of x or,
/// if kAdds, of the sum of x and r, which is then what the backward reads.
template <bool kLayer, bool kAdds>
struct Norm {
  static constexpr const char* kName = kAdds ? (kLayer ? "add_layer_norm" : "add_rms_norm")
                                             : (kLayer ? "layer_norm" : "rms_norm");
  using Attrs = NormAttrs;
  static constexpr int kWeight = kAdds ? 2 : 1, kY = kAdds ? 1 : 0, kMean = kY + 1, kRstd = kMean + kLayer;
  static constexpr int kNumOutputs = kRstd + 1;
  static constexpr uint64_t kAll = (1 << kNumOutputs) - 1;
  static constexpr uint64_t kSavedInputs = (kAdds ? 0 : 1) | 1 << kWeight, kSavedOutputs = kAll ^ 1 << kY;

  static void infer(const Attrs&, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_floating(kName, d);
    const Shape& rows = c.shape(0);
    if (rows.rank() < 1) fail<ShapeError>("[", kName, "] needs a dimension to normalise");
    if (kAdds && !(c.shape(1) == rows))
      fail<ShapeError>("[", kName, "] cannot add ", c.input(0), " and ", c.input(1), ": they must have one shape");
    for (int i = kWeight; i < c.num_inputs(); ++i) check_vector(kName, c, i);
    for (int o = 0; o < kNumOutputs; ++o)
      o <= kY ? c.output(d, rows) : c.output(statistics_dtype(d), leading(rows));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, {.inputs = kAdds ? 0b11 : 0b1, .outputs = kAll, .num_outputs = kNumOutputs});
    rule_all(p, kR, kR, kNumOutputs);
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View x = c.input(0), y = c.output(kY), rstd = c.output(kRstd),
               weight = a.has_weight ? c.input(kWeight) : View{},
               bias = a.has_bias ? c.input(kWeight + a.has_weight) : View{};
    if constexpr (kLayer && kAdds)
      SHEAF_ON_DEVICE(stream, add_layer_norm, x, c.input(1), weight, bias, a.eps, c.output(0), y, c.output(kMean),
                      rstd);
    else if constexpr (kLayer)
      SHEAF_ON_DEVICE(stream, layer_norm, x, weight, bias, a.eps, y, c.output(kMean), rstd);
    else if constexpr (kAdds)
      SHEAF_ON_DEVICE(stream, add_rms_norm, x, c.input(1), weight, a.eps, c.output(0), y, rstd);
    else
      SHEAF_ON_DEVICE(stream, rms_norm, x, weight, a.eps, y, rstd);
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const int bias = kWeight + a.has_weight;
    const bool dx = c.needs(0) || (kAdds && c.needs(1));
    const auto set_dx = [&](const Tensor& d) {
      c.set(0, d);
      if (kAdds) c.set(1, d);
    };
    if (!c.has_grad(kY)) {
      if (kAdds && c.has_grad(0)) set_dx(c.grad(0));
      return;
    }
    // A residual stream: x has other uses besides its norm.
    Tensor dsum;
    if (!kAdds) dsum = c.take_sum(0);
    else if (dx && c.has_grad(0)) dsum = c.grad(0);
    const NormBackwardAttrs attrs{a.eps, kLayer, a.has_weight, dsum.defined(), dx, a.has_weight && c.needs(kWeight),
                                  a.has_bias && c.needs(bias)};
    std::vector<Tensor> inputs{dense_rows(c.grad(kY)), kAdds ? c.output(0) : c.input(0), c.output(kRstd)};
    if (kLayer) inputs.push_back(c.output(kMean));
    if (a.has_weight) inputs.push_back(c.input(kWeight));
    if (dsum) inputs.push_back(dense_rows(dsum));
    std::vector<Into> into(attrs.dx ? 1 : 0);
    if (attrs.dweight) into.push_back(c.into(kWeight));
    if (attrs.dbias) into.push_back(c.into(bias));
    const Tensors d = apply(op_def<NormBackward>(), &attrs, inputs, into);
    size_t o = 0;
    if (attrs.dx) set_dx(d[o++]);
    if (attrs.dweight) c.set(kWeight, d[o++]);
    if (attrs.dbias) c.set(bias, d[o]);
  }
  static constexpr int kRematerializable = kY;
  static constexpr uint64_t kRematerializeReads = 0b11 << kWeight;  // the bias
  static Tensor rematerialize(const Attrs& a, Vjp& c) {
    const Tensor weight = a.has_weight ? c.input(kWeight) : Tensor();
    const Tensor bias = a.has_bias ? c.input(kWeight + a.has_weight) : Tensor();
    return Norm<kLayer, false>::of({kAdds ? c.output(0) : c.input(0)}, weight, bias, a.eps)[0];
  }
  static void saves(const Attrs& a, uint64_t, uint64_t& in, uint64_t&) {
    if (!a.has_weight) in &= ~(uint64_t{1} << kWeight);
  }
  static void describe(const Attrs& a, std::string& out) { out += str("eps ", a.eps); }

  static Tensors of(std::initializer_list<Tensor> terms, const Tensor& weight, const Tensor& bias,
                    double eps) {
    const NormAttrs attrs{eps, weight.defined(), bias.defined()};
    std::vector<Tensor> inputs;
    for (const Tensor& t : terms) inputs.push_back(dense_rows(t));
    for (const Tensor& t : {weight, bias})
      if (t) inputs.push_back(dense_rows(t));
    return apply(op_def<Norm>(), &attrs, inputs);
  }
};

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return Norm<true, false>::of({x}, weight, bias, eps)[0];
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return Norm<false, false>::of({x}, weight, {}, eps)[0];
}

NormedSum add_layer_norm(const Tensor& x, const Tensor& r, const Tensor& weight, const Tensor& bias, double eps) {
  const Tensors out = Norm<true, true>::of({x, r}, weight, bias, eps);
  return {out[0], out[1]};
}

NormedSum add_rms_norm(const Tensor& x, const Tensor& r, const Tensor& weight, double eps) {
  const Tensors out = Norm<false, true>::of({x, r}, weight, {}, eps);
  return {out[0], out[1]};
}

}  // namespace sheaf
