// The gated delta rule of a packed projection of queries, keys and values; sizes are named in kernels/delta_rule.h.
#include "sheaf/kernels/delta_rule.h"

#include <optional>

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct DeltaAttrs {
  double scale, norm_eps;
  int32_t heads, key_heads, width, value_width;
  int32_t initial, documents;  ///< whether there are such inputs
  int32_t state, has_dstate;   ///< whether the last state is a result, and has a gradient
  int num_inputs() const { return 3 + initial + documents; }
};

struct Heads {
  View q, k, v;
};
Heads heads_of(const DeltaAttrs& a, const View& qkv) {
  View values = qkv;
  if (values.data) values.data = values.as<char>() + 2 * int64_t{a.key_heads} * a.width * static_cast<int64_t>(size_of(values.dtype));
  return {kernels::heads_of(qkv, 0, a.key_heads, a.width), kernels::heads_of(qkv, a.key_heads, a.key_heads, a.width),
          kernels::heads_of(values, 0, a.heads, a.value_width)};
}
View value_heads(const DeltaAttrs& a, const View& x) { return kernels::heads_of(x, 0, a.heads, a.value_width); }

kernels::DeltaRuleOperands operands(const DeltaAttrs& a, const Execute& c) {
  const Heads in = heads_of(a, c.input(0));
  return {in.q, in.k, in.v, c.input(1), c.input(2), a.initial ? c.input(3) : View{}, a.documents ? c.input(3 + a.initial) : View{}};
}

/// A shard of the heads in `units` of whole key heads, each with the value heads that read it.
struct DeltaCut {
  Placement qkv, rates, states, out;
};
std::optional<DeltaCut> delta_cut(const DeltaAttrs& a, int64_t units, const Placement& like) {
  if (units <= 0 || a.key_heads % units != 0) return {};
  const auto cut = [&](const OwnershipMap& map) { return shard_like(like, map); };
  const int64_t keys = int64_t{a.key_heads} * a.width, values = int64_t{a.heads} * a.value_width, heads = a.heads / units;
  return DeltaCut{cut(OwnershipMap::parts(2, {keys, keys, values}, units)), cut(OwnershipMap::even(2, heads)),
                  cut(OwnershipMap::even(1, heads)), cut(OwnershipMap::even(2, values / units))};
}

/// The shard of heads that one operand has: qkv, rates, a state [B, H, D, E] or results [B, T, H E].
std::optional<DeltaCut> cut_of(const DeltaAttrs& a, Place& p, int i, bool is_result) {
  const Placement& x = p.in(i);
  if (i == 0) return delta_cut(a, packed_units(x), x);
  if (i == 3 && a.initial) return delta_cut(a, even_units(x, 1, a.heads), x);
  return delta_cut(a, even_units(x, 2, is_result ? int64_t{a.heads} * a.value_width : a.heads), x);
}

/// qkv, decay, beta [, initial] [, begins], dout [, dstate] -> dqkv, ddecay, dbeta [, dinitial]
struct DeltaRuleBackward {
  static constexpr const char* kName = "gated_delta_rule_backward";
  using Attrs = DeltaAttrs;
  static void infer(const Attrs& a, Infer& c) {
    for (int i = 0; i < 3 + a.initial; ++i) c.output(c.dtype(i), c.shape(i));
  }
  static void rule(const Attrs& a, Place& p, const DeltaCut& cut, const Placement& begins) {
    std::vector<Placement> in = {cut.qkv, cut.rates, cut.rates}, out = in;
    if (a.initial) in.push_back(cut.states), out.push_back(cut.states);
    if (a.documents) in.push_back(begins);
    in.push_back(cut.out);
    if (a.has_dstate) in.push_back(cut.states);
    p.rule(in, out);
  }
  static void place(const Attrs& a, Place& p) {
    const int dout = a.num_inputs();
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard() || (a.documents && i == 3 + a.initial)) continue;
      const Placement& x = p.in(i);
      if (x.is_shard(0)) rule(a, p, {x, x, x, x}, x);
      if (i <= dout)
        if (const auto cut = cut_of(a, p, i, i == dout)) rule(a, p, *cut, kR);
      break;
    }
    rule(a, p, {kR, kR, kR, kR}, kR);
    std::vector<Placement> in(static_cast<size_t>(p.num_inputs()), kR);  // linear in the gradients
    for (int i = dout; i < p.num_inputs(); ++i) in[static_cast<size_t>(i)] = kP;
    p.rule(in, std::vector<Placement>(static_cast<size_t>(3 + a.initial), kP));
  }
  struct Gradients {
    View dout, dstate;
    kernels::DeltaRuleGradients d;
  };
  static Gradients gradients(const Attrs& a, const Execute& c) {
    const Heads d = heads_of(a, c.output(0));
    return {value_heads(a, c.input(a.num_inputs())), a.has_dstate ? c.input(a.num_inputs() + 1) : View{},
            {d.q, d.k, d.v, c.output(1), c.output(2), a.initial ? c.output(3) : View{}}};
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    const Gradients g = gradients(a, c);
    return SHEAF_WORKSPACE(c.device(), delta_rule_backward, operands(a, c), g.dout, g.dstate, g.d);
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    const Gradients g = gradients(a, c);
    SHEAF_ON_DEVICE(stream, delta_rule_backward, operands(a, c), {a.scale, a.norm_eps}, g.dout, g.dstate, g.d, c.workspace);
  }
  static constexpr uint64_t kSavedInputs = 0b1111111;
  static void vjp(const Attrs& a, Vjp& c) {
    const auto by_heads = [](const Tensor& x, int64_t heads) { return reshape(x, {x.size(0), x.size(1), heads, x.size(2) / heads}); };
    const auto unpacked = [&](const Tensor& qkv, const Tensor& decay, const Tensor& beta, const Tensor& initial) {
      DeltaRuleTensors x{.q = {}, .k = {}, .v = {}, .decay = decay, .beta = beta, .initial = initial};
      if (!qkv) return x;
      const int64_t keys = int64_t{a.key_heads} * a.width;
      const auto parts = split(qkv, {keys, keys, int64_t{a.heads} * a.value_width}, 2);
      x.q = by_heads(parts[0], a.key_heads), x.k = by_heads(parts[1], a.key_heads), x.v = by_heads(parts[2], a.heads);
      return x;
    };
    const int dout = a.num_inputs();
    const DeltaRuleSecond d = delta_rule_second(
        unpacked(c.input(0), c.input(1), c.input(2), a.initial ? c.input(3) : Tensor()),
        unpacked(grad_if(true, c, 0), grad_if(true, c, 1), grad_if(true, c, 2), grad_if(a.initial, c, 3)), by_heads(c.input(dout), a.heads),
        a.has_dstate ? c.input(dout + 1) : Tensor(), a.documents ? c.input(3 + a.initial) : Tensor(), a.scale, a.norm_eps);
    const auto packed = [](const Tensor& x) { return reshape(x, {x.size(0), x.size(1), x.size(2) * x.size(3)}); };
    c.set(0, concat_as({packed(d.x.q), packed(d.x.k), packed(d.x.v)}, 2, c.input_type(0)));
    if (d.x.decay) c.set(1, d.x.decay);
    if (d.x.beta) c.set(2, d.x.beta);
    if (a.initial && d.x.initial) c.set(3, d.x.initial);
    if (d.dout) c.set(dout, packed(d.dout));
    if (a.has_dstate && d.dstate) c.set(dout + 1, d.dstate);
  }
  static void work(const Attrs& a, WorkOf& w) { multiplies(a, w, /*forwards=*/3); }
  /// Per chunk of 64 tokens: products with the state (two, and one that updates it), of keys and queries with keys, and of both
  /// triangles with the tokens' updates.
  static void multiplies(const Attrs& a, WorkOf& w, int forwards) {
    const Shape& qkv = w.input(0);
    const double tokens = static_cast<double>(qkv[0] * qkv[1]), chunk = static_cast<double>(kernels::kDeltaChunk);
    const double share = a.heads ? static_cast<double>(w.input(1)[2]) / a.heads : 0;
    const double of_keys = a.key_heads * share * 2 * chunk * a.width, of_values = a.heads * share * (3.0 * a.width + 1.5 * chunk) * a.value_width;
    w.work.products += forwards * 2 * tokens * (of_keys + of_values);
    w.work.smallest = static_cast<double>(std::min({chunk, double(a.width), double(a.value_width)}));
  }
};

/// qkv[B, T, 2 G D + H E], decay, beta[B, T, H] [, initial[B, H, D, E]] [, begins[B, T]] -> out[B, T, H E] [, state[B, H, D, E]]
struct DeltaRule {
  static constexpr const char* kName = "gated_delta_rule";
  using Attrs = DeltaAttrs;
  static constexpr uint64_t kSavedInputs = 0b11111;
  static void infer(const Attrs& a, Infer& c) {
    const DType d = c.dtype(0), exact = statistics_dtype(d);
    require_floating(kName, d);
    const Shape& x = c.shape(0);
    const Shape rates{x[0], x[1], a.heads}, states{x[0], a.heads, a.width, a.value_width};
    const auto expect = [&](int i, const char* what, const Shape& shape) {
      if (!(c.shape(i) == shape) || c.dtype(i) != exact)
        fail<ShapeError>("[", kName, "] ", what, " is ", c.input(i), ", not ", exact, shape, " as ", a.heads, " heads of ", c.input(0), " want");
    };
    expect(1, "decay", rates);
    expect(2, "beta", rates);
    if (a.initial) expect(3, "the initial state", states);
    check_begins(kName, c, 3 + static_cast<int>(a.initial), {x[0], x[1]}, true, x[1]);
    c.output(d, {x[0], x[1], int64_t{a.heads} * a.value_width});
    if (a.state) c.output(exact, states);
  }
  static void rule(const Attrs& a, Place& p, const DeltaCut& cut, const Placement& begins) {
    std::vector<Placement> in = {cut.qkv, cut.rates, cut.rates}, out = {cut.out};
    if (a.initial) in.push_back(cut.states);
    if (a.documents) in.push_back(begins);
    if (a.state) out.push_back(cut.states);
    p.rule(in, out);
  }
  static void place(const Attrs& a, Place& p) {
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard()) continue;
      const Placement& x = p.in(i);
      if (x.is_shard(0)) rule(a, p, {x, x, x, x}, x);
      if (i < 3 + a.initial)
        if (const auto cut = cut_of(a, p, i, false)) rule(a, p, *cut, kR);
      break;
    }
    rule(a, p, {kR, kR, kR, kR}, kR);
  }
  static int64_t workspace(const Attrs& all, const Execute& c) {
    const Attrs a = local_heads(all, c);
    return SHEAF_WORKSPACE(c.device(), delta_rule, operands(a, c), value_heads(a, c.output(0)), a.state ? c.output(1) : View{});
  }
  static void execute(const Attrs& all, Execute& c) {
    const Stream stream = c.stream();
    const Attrs a = local_heads(all, c);
    SHEAF_ON_DEVICE(stream, delta_rule, operands(a, c), {a.scale, a.norm_eps}, value_heads(a, c.output(0)),
                    a.state ? c.output(1) : View{}, c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) { DeltaRuleBackward::multiplies(a, w, /*forwards=*/1); }
  static void vjp(const Attrs& a, Vjp& c) {
    Attrs back = a;
    back.has_dstate = a.state && c.has_grad(1);
    std::vector<Tensor> in;
    for (int i = 0; i < a.num_inputs(); ++i) in.push_back(c.input(i));
    in.push_back(c.has_grad(0) ? dense_rows(c.grad(0)) : full_of(c.output_type(0).dual(), 0.0));
    if (back.has_dstate) in.push_back(contiguous(c.grad(1)));
    const Tensors d = apply(op_def<DeltaRuleBackward>(), &back, in);
    for (int i = 0; i < 3 + a.initial; ++i) c.set(i, d[static_cast<size_t>(i)]);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str("heads ", a.heads, "/", a.key_heads, " scale ", a.scale, a.norm_eps != 0 ? str(" norm_eps ", a.norm_eps) : "",
               a.documents ? " documents" : "");
  }
};

}  // namespace

DeltaRuleResult gated_delta_rule(const Tensor& qkv, const Tensor& decay, const Tensor& beta, const GatedDeltaRuleOptions& o) {
  expect_all_defined("gated_delta_rule", {&qkv, &decay, &beta});
  const int64_t keys = 2 * o.key_heads * o.key_width, values = qkv.rank() == 3 ? qkv.size(2) - keys : 0;
  if (qkv.rank() != 3 || o.heads <= 0 || o.key_heads <= 0 || o.key_width <= 0 || o.heads % o.key_heads != 0 || values < 0 ||
      values % o.heads != 0)
    fail<ShapeError>("[gated_delta_rule] wants [B, T, 2 G D + H E] with H a multiple of G, got ", qkv.type(), ", H ", o.heads, ", G ",
                     o.key_heads, ", D ", o.key_width);
  check_score_scale("gated_delta_rule", o.scale);
  check<ShapeError>(o.norm_eps >= 0, "[gated_delta_rule] norm_eps ", o.norm_eps, " is negative");
  const double scale = o.scale > 0 ? o.scale : 1 / std::sqrt(static_cast<double>(o.key_width));
  const auto small = [](int64_t n) { return static_cast<int32_t>(n); };
  const DeltaAttrs attrs{scale, o.norm_eps, small(o.heads), small(o.key_heads), small(o.key_width), small(values / o.heads),
                         o.initial.defined(), o.begins.defined(), o.keeps_state, 0};
  std::vector<Tensor> in = {dense_rows(qkv), dense_rows(in_statistics_dtype(decay)), dense_rows(in_statistics_dtype(beta))};
  if (o.initial) in.push_back(contiguous(o.initial));
  if (o.begins) in.push_back(dense_rows(o.begins));
  const Tensors out = apply(op_def<DeltaRule>(), &attrs, in);
  return {out[0], o.keeps_state ? out[1] : Tensor()};
}

}  // namespace sheaf
