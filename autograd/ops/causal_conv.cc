// Short convolutions of channels along the tokens; sizes are named in kernels/causal_conv.h.
#include "sheaf/kernels/causal_conv.h"

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/autograd/ops/activations.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct ConvAttrs {
  int32_t silu, documents;
};

/// The shard of channels, of x along dimension 2 and of the weight along 0.
struct ChannelCut {
  Placement rows, weight;
};
ChannelCut channel_cut(const OwnershipMap& map) { return {Placement::shard(map.moved_to(2)), Placement::shard(map.moved_to(0))}; }

kernels::CausalConvOperands operands(const ConvAttrs& a, const Execute& c, int x, int begins) {
  return {c.input(x), c.input(x + 1), a.documents ? c.input(begins) : View{}, a.silu != 0};
}

/// dy, x, weight [, begins] -> dx, dweight
struct CausalConvBackward {
  static constexpr const char* kName = "causal_conv_backward";
  using Attrs = ConvAttrs;
  static constexpr uint64_t kSavedInputs = 0b1111;
  static void infer(const Attrs&, Infer& c) {
    c.output(c.dtype(1), c.shape(1));
    c.output(statistics_dtype(c.dtype(1)), c.shape(2));
  }
  /// With sharded samples, the ranks' weight gradients are addends.
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < 3; ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      if (i < 2 && p.in(i).is_shard(0)) rule_of(p, {p.in(i), p.in(i), kR}, {p.in(i), kP}, p.in(i));
      if (!p.in(i).is_shard(i < 2 ? 2 : 0)) break;
      const ChannelCut cut = channel_cut(p.in(i).map());
      rule_of(p, {cut.rows, cut.rows, cut.weight}, {cut.rows, cut.weight});
      break;
    }
    rule_of(p, {kR, kR, kR}, {kR, kR});
    rule_of(p, {kP, kR, kR}, {kP, kP});
    if (!a.silu) rule_of(p, {kR, kP, kR}, {kR, kP}), rule_of(p, {kR, kR, kP}, {kP, kR});
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), causal_conv_backward, operands(a, c, 1, 3), c.input(0), c.output(0), c.output(1));
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    SHEAF_ON_DEVICE(stream, causal_conv_backward, operands(a, c, 1, 3), c.input(0), c.output(0), c.output(1), c.workspace);
  }
  static void vjp(const Attrs& a, Vjp& c);
};

/// x, weight [, begins] -> y
struct CausalConv {
  static constexpr const char* kName = "causal_conv";
  using Attrs = ConvAttrs;
  static constexpr uint64_t kSavedInputs = 0b111;
  static void infer(const Attrs&, Infer& c) {
    const DType d = common_dtype(kName, c, 0, 2);
    require_floating(kName, d);
    const Shape &x = c.shape(0), &weight = c.shape(1);
    if (x.rank() != 3 || weight.rank() != 2 || weight[0] != x[2] || weight[1] < 1)
      fail<ShapeError>("[", kName, "] wants x [B, T, C] and a weight [C, W] with W at least 1; got ", c.input(0), " and ", c.input(1));
    check_begins(kName, c, 2, {x[0], x[1]}, true, x[1]);
    c.output(d, x);
  }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < 2; ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      if (i == 0 && p.in(i).is_shard(0)) rule_of(p, {p.in(i), kR}, {p.in(i)}, p.in(i));
      if (!p.in(i).is_shard(i == 0 ? 2 : 0)) break;
      const ChannelCut cut = channel_cut(p.in(i).map());
      rule_of(p, {cut.rows, cut.weight}, {cut.rows});
      break;
    }
    if (a.documents && p.in(2).is_shard(0)) rule_of(p, {p.in(2), kR}, {p.in(2)}, p.in(2));
    rule_of(p, {kR, kR}, {kR});
    if (!a.silu) rule_of(p, {kP, kR}, {kP}), rule_of(p, {kR, kP}, {kP});
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), causal_conv, operands(a, c, 0, 2), c.output(0));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    std::vector<Tensor> in = {dense_rows(c.grad()), c.input(0), c.input(1)};
    if (a.documents) in.push_back(c.input(2));
    const Tensors d = apply(op_def<CausalConvBackward>(), &a, in);
    c.set(0, d[0]);
    c.set(1, d[1]);
  }
  static void describe(const Attrs& a, std::string& out) { out += a.silu ? "silu" : ""; }
};

// With m the convolution of x, g = dy f'(m) and * for a convolution, linear in both: the tangent is t = ux * weight + x * uw, so that
// <u, (dx, dweight)> = <g, t>. g and m are differentiated like any product; t is linear.
void CausalConvBackward::vjp(const Attrs& a, Vjp& c) {
  const auto exact = [](const Tensor& t) { return t ? in_statistics_dtype(t) : t; };
  const Tensor dy = exact(c.input(0)), x = exact(c.input(1)), weight = exact(c.input(2)), begins = a.documents ? c.input(3) : Tensor();
  const Tensor ux = exact(grad_if(true, c, 0)), uw = exact(grad_if(true, c, 1));
  const auto conv = [&](const Tensor& of, const Tensor& by) { return causal_conv(of, by, {.begins = begins}); };
  const auto through = [&](const Tensor& g, const Tensor& of, const Tensor& by) {
    std::vector<Tensor> in = {dense_rows(g), dense_rows(of), dense_rows(by)};
    if (begins) in.push_back(begins);
    const Attrs linear{0, a.documents};
    return apply(op_def<CausalConvBackward>(), &linear, in);
  };
  const Tensor tangent = sum_of_defined({ux ? conv(ux, weight) : Tensor(), uw ? conv(x, uw) : Tensor()});
  Tensor slope, g = dy, dx, dweight;
  if (a.silu) {
    const Tensor m = conv(x, weight), s = sigmoid(m);
    slope = mul(s, add(mul(m, sub(1.0, s)), 1.0)), g = mul(dy, slope);
    const Tensors of_m = through(mul(mul(dy, silu_second(m)), tangent), x, weight);
    dx = of_m[0], dweight = of_m[1];
  }
  c.set(0, slope ? mul(slope, tangent) : tangent);
  if (uw) dx = sum_of_defined({dx, through(g, x, uw)[0]});
  if (ux) dweight = sum_of_defined({dweight, through(g, ux, weight)[1]});
  if (dx) c.set(1, dx);
  if (dweight) c.set(2, dweight);
}

}  // namespace

Tensor causal_conv(const Tensor& x, const Tensor& weight, const CausalConvOptions& options) {
  const ConvAttrs attrs{options.silu, options.begins.defined()};
  std::vector<Tensor> in = {dense_rows(x), dense_rows(weight)};
  if (options.begins) in.push_back(dense_rows(options.begins));
  return std::move(apply(op_def<CausalConv>(), &attrs, in)[0]);
}

}  // namespace sheaf
