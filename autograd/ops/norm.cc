// Layer and root-mean-square normalisation over the last dimension, with fused backwards.
#include "sheaf/kernels/norm.h"

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

void check_vector(const char* op, const Infer& c, int i) {
  if (!(c.shape(i) == Shape{c.shape(0).back()}))
    fail<ShapeError>("[", op, "] ", c.input(i), " does not fit the last dimension of ", c.input(0));
}

/// Which gradients are wanted, and what stands among the inputs.
struct NormBackwardAttrs {
  bool layer, has_weight, dx, dweight, dbias;
  int num_outputs() const { return dx + dweight + dbias; }
};

struct NormBackward {  // dy, x, rstd [, mean] [, weight] -> [dx] [, dweight] [, dbias]
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
    row_rules(p, 1, a.layer ? 0b1111 : 0b0111, a.dx ? 1 : 0, n, 1);
    rule_all(p, kR, kR, n);
    std::vector<Placement> in(static_cast<size_t>(p.num_inputs()), kR);  // linear in dy
    in[0] = kP;
    p.rule(in, std::vector<Placement>(static_cast<size_t>(n), kP));
  }
  struct Views {
    View dy, x, rstd, mean, weight, dx, dweight, dbias;
    Views(const Attrs& a, const Execute& c) : dy(c.input(0)), x(c.input(1)), rstd(c.input(2)) {
      if (a.layer) mean = c.input(3);
      if (a.has_weight) weight = c.input(a.layer ? 4 : 3);
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
                   v.dweight, v.dbias, c.workspace);
    else
      SHEAF_ON_DEVICE(stream, rms_norm_backward, v.dy, v.x, v.weight, v.rstd, v.dx, v.dweight,
                   c.workspace);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += a.layer ? "layer_norm" : "rms_norm";
  }
};

struct NormAttrs {
  double eps;
  int32_t has_weight, has_bias;
};

struct LayerNorm {  // x [, weight] [, bias] -> y, mean, rstd
  static constexpr const char* kName = "layer_norm";
  using Attrs = NormAttrs;
  static constexpr uint64_t kSavedInputs = 0b11, kSavedOutputs = 0b110;
  static void infer(const Attrs&, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_floating(kName, d);
    if (c.shape(0).rank() < 1) fail<ShapeError>("[", kName, "] needs a dimension to normalise");
    for (int i = 1; i < c.num_inputs(); ++i) check_vector(kName, c, i);
    c.output(d, c.shape(0));
    c.output(statistics_dtype(d), leading(c.shape(0)));
    c.output(statistics_dtype(d), leading(c.shape(0)));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, 0, 0b1, 0b111, 3, 1);
    rule_all(p, kR, kR, 3);
  }
  static View weight(const Attrs& a, const Execute& c) {
    return a.has_weight ? c.input(1) : View{};
  }
  static View bias(const Attrs& a, const Execute& c) {
    return a.has_bias ? c.input(1 + a.has_weight) : View{};
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), layer_norm, c.input(0), weight(a, c), bias(a, c), a.eps, c.output(0),
                 c.output(1), c.output(2));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const int bias = 1 + a.has_weight;
    const NormBackwardAttrs attrs{true, a.has_weight != 0, c.needs(0), a.has_weight && c.needs(1),
                                  a.has_bias && c.needs(bias)};
    std::vector<Tensor> inputs{dense_rows(c.grad())};
    for (const Tensor& t : {c.input(0), c.output(2), c.output(1)}) inputs.push_back(t);
    if (a.has_weight) inputs.push_back(c.input(1));
    const std::vector<Tensor> d = apply(op_def<NormBackward>(), &attrs, inputs);
    size_t o = 0;
    if (attrs.dx) c.set(0, d[o++]);
    if (attrs.dweight) c.set(1, d[o++]);
    if (attrs.dbias) c.set(bias, d[o]);
  }
  static void saves(const Attrs& a, uint64_t, uint64_t& in, uint64_t&) {
    in = a.has_weight ? 0b11 : 0b01;
  }
  static void describe(const Attrs& a, std::string& out) { out += str("eps ", a.eps); }
};

struct RmsNorm {  // x [, weight] -> y, rstd
  static constexpr const char* kName = "rms_norm";
  using Attrs = NormAttrs;
  static constexpr uint64_t kSavedInputs = 0b11, kSavedOutputs = 0b10;
  static void infer(const Attrs&, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_floating(kName, d);
    if (c.shape(0).rank() < 1) fail<ShapeError>("[", kName, "] needs a dimension to normalise");
    for (int i = 1; i < c.num_inputs(); ++i) check_vector(kName, c, i);
    c.output(d, c.shape(0));
    c.output(statistics_dtype(d), leading(c.shape(0)));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, 0, 0b1, 0b11, 2, 1);
    rule_all(p, kR, kR, 2);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), rms_norm, c.input(0), LayerNorm::weight(a, c), a.eps, c.output(0),
                 c.output(1));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const NormBackwardAttrs attrs{false, a.has_weight != 0, c.needs(0), a.has_weight && c.needs(1),
                                  false};
    std::vector<Tensor> inputs{dense_rows(c.grad())};
    for (const Tensor& t : {c.input(0), c.output(1)}) inputs.push_back(t);
    if (a.has_weight) inputs.push_back(c.input(1));
    const std::vector<Tensor> d = apply(op_def<NormBackward>(), &attrs, inputs);
    size_t o = 0;
    if (attrs.dx) c.set(0, d[o++]);
    if (attrs.dweight) c.set(1, d[o]);
  }
  static void describe(const Attrs& a, std::string& out) { out += str("eps ", a.eps); }
};

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const NormAttrs attrs{eps, weight.defined(), bias.defined()};
  std::vector<Tensor> inputs{dense_rows(x)};
  if (weight) inputs.push_back(dense_rows(weight));
  if (bias) inputs.push_back(dense_rows(bias));
  return apply(op_def<LayerNorm>(), &attrs, inputs)[0];
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const NormAttrs attrs{eps, weight.defined(), 0};
  std::vector<Tensor> inputs{dense_rows(x)};
  if (weight) inputs.push_back(dense_rows(weight));
  return apply(op_def<RmsNorm>(), &attrs, inputs)[0];
}

}  // namespace sheaf
