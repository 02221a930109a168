// Cross-entropy of a linear head whose logits never exist whole.
#include "sheaf/kernels/linear_cross_entropy.h"

#include <optional>

#include "sheaf/autograd/ops/cross_entropy.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/elementwise.h"

namespace sheaf {
namespace {

using namespace ops;

struct LinearCrossEntropyBackward : HeadGradients {  // x, weight, targets, lse, dloss
  static constexpr const char* kName = "linear_cross_entropy_backward";
  static void place(const Attrs& a, Place& p) {
    const int n = a.dweight + a.dx;
    row_rules(p, {.inputs = 0b01101, .outputs = a.dx ? 1u << a.dweight : 0, .num_outputs = n});
    rule_all(p, kR, kR, n);
    const Placement in[] = {kR, kR, kR, kR, kP};  // linear in dloss
    p.rule(in, std::vector<Placement>(static_cast<size_t>(n), kP));
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy_backward, c.input(0), c.input(1), dx(a, c), dweight(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy_backward, c.input(0), c.input(1), c.input(2),
                 head_rules(a), c.input(3), c.input(4), dx(a, c), dweight(a, c), c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) { head(w, 1 + a.dweight + a.dx); }
  static constexpr uint64_t kSavedInputs = 0b10111;
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor dloss = c.input(4);
    const HeadBackwardOperands d = head_second({c.input(0), c.input(1), dloss, neg(dloss)}, of_results(a, c), c.input(2), head_rules(a));
    c.set(0, d.x);
    c.set(1, d.weight);
    c.set(4, sub(d.dlse, d.dtarget));
  }
};

struct LinearCrossEntropy {  // x[.., C], weight[V, C], targets[..] -> loss[], lse[..]
  static constexpr const char* kName = "linear_cross_entropy";
  using Attrs = HeadAttrs;
  static constexpr uint64_t kSavedInputs = 0b111, kSavedOutputs = 0b10;
  static void infer(const Attrs&, Infer& c) {
    check_head(kName, c);
    c.output(statistics_dtype(c.dtype(0)), {});
    c.output(statistics_dtype(c.dtype(0)), leading(c.shape(0)));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, {.inputs = 0b101, .outputs = 0b10, .num_outputs = 2});
    rule_all(p, kR, kR, 2);
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy, c.input(0), c.input(1));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy, c.input(0), c.input(1), c.input(2),
                 head_rules(a), c.output(0), c.output(1), c.workspace);
  }
  static void work(const Attrs&, WorkOf& w) { head(w, 1); }
  static void vjp(const Attrs& a, Vjp& c) {
    HeadGradients::set<LinearCrossEntropyBackward>(
        a, {c.input(0), c.input(1), c.input(2), c.output(1), c.grad()}, c);
  }
  static constexpr auto describe = describe_head<Attrs>;
};

struct ScaleBy {  // x, a scalar -> x times the scalar, in x's dtype
  static constexpr const char* kName = "scale_by";
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b11;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) {
    if (p.in(0).is_shard()) p.rule({p.in(0), kR}, {p.in(0)});
    p.rule({kR, kR}, {kR});
    p.rule({kP, kR}, {kP});
    p.rule({kR, kP}, {kP});
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), binary, kernels::BinaryOp::mul, c.input(0),
                 expand_view(c.input(1), c.output(0).shape), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {
    if (c.needs(0)) c.set(0, apply<ScaleBy>({}, {c.grad(), c.input(1)}));
    if (c.needs(1)) {
      const Tensor dot = sum(mul(c.grad(), c.input(0)));
      c.set(1, dot.dtype() == c.input_type(1).dtype ? dot : cast(dot, c.input_type(1).dtype));
    }
  }
};

struct FusedAttrs : HeadGradientsAttrs {
  double z_loss;
};

/// The loss and, in the same pass, its gradients: the logits are computed once instead of twice, and the backward only scales the
/// gradients: dweight in its slot, see [Note: early gradients].
///
/// The gradients are rounded before the loss's scale is known. In f16, loss scaling would come too late for small ones that vanish,
/// such as those of rare tokens under confident logits: so in f16 they are computed times a constant. dx is at most twice that times
/// a weight, which leaves enough of the range above.
/// Gradients that nothing can ask for, such as a frozen head's, are not computed.
struct LinearCrossEntropyFused {  // x[.., C], weight[V, C], targets[..] -> loss[] [, dweight] [, dx]
  static constexpr const char* kName = "linear_cross_entropy_fused";
  using Attrs = FusedAttrs;
  static constexpr uint64_t kSavedOutputs = 0b110;
  static void infer(const Attrs& a, Infer& c) {
    check_head(kName, c);
    c.output(statistics_dtype(c.dtype(0)), {});
    if (a.dweight) c.output(statistics_dtype(c.dtype(1)), c.shape(1));  // a sum over all rows
    if (a.dx) c.output(c.dtype(0), c.shape(0));
  }
  static int outputs(const Attrs& a) { return 1 + a.dweight + a.dx; }
  static int dx_output(const Attrs& a) { return 1 + a.dweight; }
  static void place(const Attrs& a, Place& p) {
    row_rules(p, {.inputs = 0b101, .outputs = a.dx ? 1u << dx_output(a) : 0, .num_outputs = outputs(a)});
    rule_all(p, kR, kR, outputs(a));
  }
  static View dweight(const Attrs& a, const Execute& c) { return a.dweight ? c.output(1) : View{}; }
  static View dx(const Attrs& a, const Execute& c) { return a.dx ? c.output(dx_output(a)) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy_fused, c.input(0), c.input(1), dx(a, c), dweight(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy_fused, c.input(0), c.input(1), c.input(2),
                 kernels::HeadRules(a.ignore_index, a.softcap, a.z_loss), c.output(0), dx(a, c), dweight(a, c), c.workspace,
                 enlarged(c.input_type(0).dtype));
  }
  static void work(const Attrs& a, WorkOf& w) { head(w, outputs(a)); }
  static double enlarged(DType d) { return d == kF16 ? 256 : 1; }
  static void vjp(const Attrs& a, Vjp& c) {
    for (int o = 1; o < outputs(a); ++o)
      if (c.has_grad(o))
        fail<LifetimeError>("[", kName, "] ", path_label(PathScope::current()),
                            ": it has no derivative of its gradients, which were computed in the forward; ask for ",
                            "Recording recording({.higher_order = true})");
    const double by = enlarged(c.input_type(0).dtype);
    const Tensor g = by == 1 ? c.grad() : mul(c.grad(), 1 / by);
    if (c.needs(1)) c.set(1, apply<ScaleBy>({}, {c.output(1), g}, c.into(1)));
    if (c.needs(0)) c.set(0, apply<ScaleBy>({}, {c.output(dx_output(a)), g}));
  }
  static void saves(const Attrs& a, uint64_t needs, uint64_t&, uint64_t& out) {
    out = ((needs & 2) ? 0b010 : 0) | ((needs & 1) ? uint64_t{1} << dx_output(a) : 0);
  }
  static void describe(const Attrs& a, std::string& out) {
    describe_head(a, out);
    if (a.z_loss != 0) out += str(" z_loss ", a.z_loss);
  }
};

/// The type of the gradient of `weight` from the rows of x; none if it is not an addend of the whole.
std::optional<Type> dweight_type(const Tensor& x, const Tensor& weight) {
  Layout layout = weight.layout();
  if (layout.mesh() != x.layout().mesh()) return {};
  for (int a = 0; a < layout.num_axes(); ++a) {
    const Placement& rows = x.layout()[a];
    if (layout[a].is_replicate() && rows.is_shard() && !rows.is_single()) layout[a] = kP;
    else if (!(layout[a] == rows) || layout[a].is_replicate()) return {};
  }
  return Type{statistics_dtype(weight.dtype()), weight.shape(), layout};
}

/// Of each row of x that counts, the mean of its logits: x times the mean of the weight's rows. Partial where these are sharded.
Tensor mean_logits(const Tensor& x, const Tensor& weight, const Tensor& targets, const CrossEntropyOptions& options) {
  const Tensor row = in_statistics_dtype(mean(weight, {0})), logits = sum(mul(in_statistics_dtype(x), row), {-1});
  return unless_ignored(logits, targets, options);
}

/// Whether the weight's rows are sharded.
bool is_cut(const Layout& weight) {
  for (int a = 0; a < weight.num_axes(); ++a)
    if (cuts_table(weight[a])) return true;
  return false;
}

/// The layout of values [M, ..] with all M on every rank.
Layout of_all_parts(Layout parts) {
  for (int a = 0; a < parts.num_axes(); ++a)
    if (parts[a].is_shard(0)) parts[a] = kR;
  return parts;
}

}  // namespace

Tensor softcap(const Tensor& x, double cap) {
  if (!(cap > 0)) fail<ShapeError>("[softcap] a cap of ", cap, "; wants a positive number");
  return mul(tanh(mul(x, 1 / cap)), cap);
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options) {
  expect_all_defined("linear_cross_entropy", {&x, &weight, &targets});
  check_loss_options("linear_cross_entropy", options);
  const double smoothing = options.label_smoothing;
  if (smoothing != 0 && options.softcap != 0)
    fail<ConfigError>("[linear_cross_entropy] label_smoothing ", smoothing, " of logits with a softcap of ", options.softcap,
                      ": wants one of them; cross_entropy() of linear() has both");
  Recording* const recording = Recording::current();
  const bool may_be_ahead = recording && !recording->options().higher_order && !options.recompute;
  const FusedAttrs wanted{{options.ignore_index, options.softcap, may_be_ahead && recording->has_gradient(weight),
                           may_be_ahead && recording->has_gradient(x)}, options.z_loss};
  const bool ahead = wanted.dweight || wanted.dx;
  if (options.per_target || is_cut(weight.layout()) || smoothing != 0 || (options.z_loss != 0 && !ahead)) {
    const LinearLse parts = linear_lse(x, weight, targets, options.ignore_index, options.softcap);
    const Tensor expected = smoothing == 0 ? parts.target_logits
                                           : add(mul(parts.target_logits, 1 - smoothing),
                                                 mul(mean_logits(x, weight, targets, options), smoothing));
    // All ranks then have the log-sum-exps: the subtraction keeps their sum on one of them.
    const Tensor lse = with_z_loss(logsumexp(redistribute(parts.lse, of_all_parts(parts.lse.layout())), {0}, /*keepdim=*/!options.per_target),
                                   options.z_loss);
    if (options.per_target) return sub(lse, expected);
    return averaged(sub(sum(lse), sum(expected)), targets, options);
  }
  const Tensor rows = dense_rows(x);
  const std::vector<Tensor> inputs = {rows, weight, targets};
  if (ahead) {
    const std::optional<Type> type = wanted.dweight ? dweight_type(rows, weight) : std::nullopt;
    const Into into[] = {{}, {type ? recording->slot_for_early_gradient(weight, *type) : Tensor()}};
    const Tensors y = apply(op_def<LinearCrossEntropyFused>(), &wanted, inputs, std::span(into, wanted.dweight ? 2 : 1));
    if (into[1].to) recording->note_early_gradient(y[1], weight);
    return averaged(y[0], targets, options);
  }
  const HeadAttrs attrs{options.ignore_index, options.softcap};
  return averaged(apply(op_def<LinearCrossEntropy>(), &attrs, inputs)[0], targets, options);
}

}  // namespace sheaf
