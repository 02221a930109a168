// Cross-entropy of logits, and of a linear head whose logits never exist whole.
#include "sheaf/kernels/cross_entropy.h"

#include "sheaf/autograd/ops/relabel.h"
#include "sheaf/autograd/ops/second.h"
#include "sheaf/autograd/work.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/elementwise.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf {
namespace {

using namespace ops;

struct IgnoreAttrs {
  int64_t ignore_index;
};

template <class Attrs>
void describe_ignored(const Attrs& a, std::string& out) {
  out += str("ignore ", a.ignore_index);
}

void check_targets(const char* op, const Infer& c, int i, int64_t vocabulary) {
  if (!is_integral(c.dtype(i)) || c.shape(0).rank() < 1 || !(c.shape(i) == leading(c.shape(0))))
    fail<ShapeError>("[", op, "] targets ", c.input(i), " do not fit ", c.input(0),
                     ": one integer a row");
  if (vocabulary == 0 && c.shape(i).numel() != 0)
    fail<ShapeError>("[", op, "] targets ", c.input(i), " of no classes");
}

struct CrossEntropyBackward {  // logits, targets, lse, dlosses -> dlogits
  static constexpr const char* kName = "cross_entropy_backward";
  using Attrs = IgnoreAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) {
    row_rules(p, 0, 0b1111, 0b1, 1, 1);
    rule_all(p, kR, kR);
    p.rule({kR, kR, kR, kP}, {kP});  // linear in dlosses
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), cross_entropy_backward, c.input(0), c.input(1), a.ignore_index,
                 c.input(2), c.input(3), c.output(0));
  }
  static constexpr uint64_t kSavedInputs = 0b1011;
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor dlosses = c.input(3);
    const LogitsBackwardOperands d = logits_second({c.input(0), dlosses, neg(dlosses)}, c.grad(), c.input(1), a.ignore_index);
    c.set(0, d.logits);
    c.set(3, sub(d.dlse, d.dtarget));
  }
  static constexpr auto describe = describe_ignored<Attrs>;
};

struct CrossEntropy {  // logits[.., V], targets[..] -> losses[..], lse[..]
  static constexpr const char* kName = "cross_entropy";
  using Attrs = IgnoreAttrs;
  static constexpr uint64_t kSavedInputs = 0b11, kSavedOutputs = 0b10;
  static void infer(const Attrs&, Infer& c) {
    require_floating(kName, c.dtype(0));
    check_targets(kName, c, 1, c.shape(0).rank() ? c.shape(0).back() : 0);
    for (int i = 0; i < 2; ++i) c.output(statistics_dtype(c.dtype(0)), leading(c.shape(0)));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, 0, 0b11, 0b11, 2, 1);
    rule_all(p, kR, kR, 2);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), cross_entropy, c.input(0), c.input(1), a.ignore_index, c.output(0),
                 c.output(1));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    c.set(0, apply<CrossEntropyBackward>(a, {c.input(0), c.input(1), c.output(1), c.grad()}));
  }
  static constexpr auto describe = describe_ignored<Attrs>;
};

/// Of x[.., C] and weight[V, C], in so many products of all rows; and a pass over the logits between them, which reads
/// statistics' dtype and writes gradients, if there are any.
void head(WorkOf& w, int products) {
  for (int i = 0; i < products; ++i) w.multiplies(w.input(0), w.input(1)[0]);
  const double logits = static_cast<double>(leading(w.input(0)).numel()) * static_cast<double>(w.input(1)[0]);
  const DType d = w.work.dtype;
  w.work.passes = logits * static_cast<double>(size_of(statistics_dtype(d)) + (products > 1 ? size_of(d) : 0));
}

struct HeadGradientsAttrs {
  int64_t ignore_index;
  int32_t dweight, dx;  ///< whether wanted
};

/// What the backwards of linear heads share: x, weight, targets, .. -> [dweight] [, dx]
struct HeadGradients {
  static constexpr uint64_t kStoresWide = 0b1;  // output 0 is dweight, unless only dx is wanted
  using Attrs = HeadGradientsAttrs;
  static void infer(const Attrs& a, Infer& c) {
    if (a.dweight) c.output(c.dtype(1), c.shape(1));
    if (a.dx) c.output(c.dtype(0), c.shape(0));
  }
  static View dweight(const Attrs& a, const Execute& c) { return a.dweight ? c.output(0) : View{}; }
  static View dx(const Attrs& a, const Execute& c) { return a.dx ? c.output(a.dweight) : View{}; }
  /// The gradients of the results.
  static HeadBackwardOperands of_results(const Attrs& a, const Vjp& c) {
    return {a.dx && c.has_grad(a.dweight) ? c.grad(a.dweight) : Tensor(), a.dweight && c.has_grad(0) ? c.grad(0) : Tensor(), {}, {}};
  }
  /// Of the op on these inputs, set in the vjp of one whose first are x and weight.
  template <class Op>
  static void set(int64_t ignore_index, std::initializer_list<Tensor> inputs, Vjp& c) {
    const Attrs attrs{ignore_index, c.needs(1), c.needs(0)};
    const auto d = apply_all<Op>(attrs, inputs, {c.into(1)});
    if (attrs.dweight) c.set(1, d[0]);
    if (attrs.dx) c.set(0, d[static_cast<size_t>(attrs.dweight)]);
  }
};

struct LinearCrossEntropyBackward : HeadGradients {  // x, weight, targets, lse, dloss
  static constexpr const char* kName = "linear_cross_entropy_backward";
  static void place(const Attrs& a, Place& p) {
    const int n = a.dweight + a.dx;
    row_rules(p, 0, 0b01101, a.dx ? 1u << a.dweight : 0, n, 1);
    rule_all(p, kR, kR, n);
    const Placement in[] = {kR, kR, kR, kR, kP};  // linear in dloss
    p.rule(in, std::vector<Placement>(static_cast<size_t>(n), kP));
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy_backward, c.input(0), c.input(1), dx(a, c), dweight(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy_backward, c.input(0), c.input(1), c.input(2),
                 a.ignore_index, c.input(3), c.input(4), dx(a, c), dweight(a, c), c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) { head(w, 1 + a.dweight + a.dx); }
  static constexpr uint64_t kSavedInputs = 0b10111;
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor dloss = c.input(4);
    const HeadBackwardOperands d = head_second({c.input(0), c.input(1), dloss, neg(dloss)}, of_results(a, c), c.input(2), a.ignore_index);
    c.set(0, d.x);
    c.set(1, d.weight);
    c.set(4, sub(d.dlse, d.dtarget));
  }
};

struct LinearCrossEntropy {  // x[.., C], weight[V, C], targets[..] -> loss[], lse[..]
  static constexpr const char* kName = "linear_cross_entropy";
  using Attrs = IgnoreAttrs;
  static constexpr uint64_t kSavedInputs = 0b111, kSavedOutputs = 0b10;
  static void check(const char* op, const Infer& c) {
    require_floating(op, c.dtype(0));
    if (c.dtype(1) != c.dtype(0))
      fail<DTypeError>("[", op, "] operands are ", c.input(0), " and ", c.input(1),
                       ": cast one of them");
    if (c.shape(0).rank() < 1 || c.shape(1).rank() != 2 || c.shape(1)[1] != c.shape(0).back())
      fail<ShapeError>("[", op, "] input ", c.input(0), " does not fit weight ", c.input(1));
    check_targets(op, c, 2, c.shape(1)[0]);
  }
  static void infer(const Attrs&, Infer& c) {
    check(kName, c);
    c.output(statistics_dtype(c.dtype(0)), {});
    c.output(statistics_dtype(c.dtype(0)), leading(c.shape(0)));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, 0, 0b101, 0b10, 2, 1);
    rule_all(p, kR, kR, 2);
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy, c.input(0), c.input(1));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy, c.input(0), c.input(1), c.input(2),
                 a.ignore_index, c.output(0), c.output(1), c.workspace);
  }
  static void work(const Attrs&, WorkOf& w) { head(w, 1); }
  static void vjp(const Attrs& a, Vjp& c) {
    HeadGradients::set<LinearCrossEntropyBackward>(
        a.ignore_index, {c.input(0), c.input(1), c.input(2), c.output(1), c.grad()}, c);
  }
  static constexpr auto describe = describe_ignored<Attrs>;
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

/// The loss and, in the same pass, its gradients: the logits are computed once instead of twice,
/// and the backward only scales: dweight where it will be wanted, see [Note: gradients ahead].
///
/// They are rounded before anybody knows what the loss is multiplied with. In f16 a scaled loss
/// would come too late for those that vanish, such as what rare tokens get from confident logits:
/// there they are made larger by a constant. Of dx, at most twice that times a weight, enough of
/// the range is left above.
/// Gradients that nobody can ask for, such as a frozen head's, are not computed.
struct LinearCrossEntropyFused {  // x[.., C], weight[V, C], targets[..] -> loss[] [, dweight] [, dx]
  static constexpr const char* kName = "linear_cross_entropy_fused";
  using Attrs = HeadGradientsAttrs;
  static constexpr uint64_t kSavedOutputs = 0b110;
  static void infer(const Attrs& a, Infer& c) {
    LinearCrossEntropy::check(kName, c);
    c.output(statistics_dtype(c.dtype(0)), {});
    if (a.dweight) c.output(statistics_dtype(c.dtype(1)), c.shape(1));  // a sum over all rows
    if (a.dx) c.output(c.dtype(0), c.shape(0));
  }
  static int outputs(const Attrs& a) { return 1 + a.dweight + a.dx; }
  static int dx_output(const Attrs& a) { return 1 + a.dweight; }
  static void place(const Attrs& a, Place& p) {
    row_rules(p, 0, 0b101, a.dx ? 1u << dx_output(a) : 0, outputs(a), 1);
    rule_all(p, kR, kR, outputs(a));
  }
  static View dweight(const Attrs& a, const Execute& c) { return a.dweight ? c.output(1) : View{}; }
  static View dx(const Attrs& a, const Execute& c) { return a.dx ? c.output(dx_output(a)) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy_fused, c.input(0), c.input(1), dx(a, c), dweight(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy_fused, c.input(0), c.input(1), c.input(2),
                 a.ignore_index, c.output(0), dx(a, c), dweight(a, c), c.workspace,
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
  static constexpr auto describe = describe_ignored<Attrs>;
};

/// Of the gradient of `weight` that rows of x give; none where it is no addend of the whole.
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

/// Whether `rows` cuts leading dimensions of x[.., C]. Targets[..] and their values then have it, too,
/// and values [M, ..] a dimension further on.
bool cuts_rows(const Place& p, const Placement& rows) {
  return rows.is_shard() && !rows.map().is_flat() && rows.map().dim() < p.shape(0).rank() - 1;
}
Placement behind_parts(const Placement& rows) {
  return Placement::shard(rows.map().moved_to(rows.map().dim() + 1));
}

/// Axes on which ranks have parts of a table's rows. Where a part is as good as a whole table, the rank's own is taken for that: what
/// such an axis cuts is Replicate there, of the size that is here, as in a local_map; on other axes all stays as it is.
class TableParts {
 public:
  explicit TableParts(const Type& table) : table_(table.layout) {
    Layout cut = table_;
    for (int a = 0; a < cut.num_axes(); ++a)
      if (!is_cut(a)) cut[a] = kR;
    const auto all = cut.local_rows(table.shape, 0);
    if (!all.empty()) here_ = all[0];
  }
  Interval here() const { return here_; }
  /// Of x that is cut on these axes along dimension 0: the `rows` that are here.
  Tensor enter(const Tensor& x, int64_t rows) const {
    Type here = x.type();
    here.shape[0] = rows;
    return relabelled(x, here, /*enters=*/true, [](int) { return kR; });
  }
  /// Back to what is cut as `whole` is.
  Tensor leave(const Tensor& x, const Type& whole) const {
    Type all = x.type();
    all.shape[0] = whole.shape[0];
    return relabelled(x, all, /*enters=*/false, [&](int axis) { return whole.layout[axis]; });
  }
  /// What each part adds to the whole.
  Tensor leave_addend(const Tensor& x) const {
    return relabelled(x, x.type(), /*enters=*/false, [](int) { return kP; });
  }

 private:
  bool is_cut(int axis) const { return cuts_table(table_[axis]); }
  template <class F>
  Tensor relabelled(const Tensor& x, Type type, bool enters, F&& placement_on) const {
    bool any = false;
    for (int a = 0; a < table_.num_axes(); ++a)
      if (is_cut(a)) type.layout[a] = placement_on(a), any = true;
    return any ? relabel(x, type, enters) : x;
  }
  Layout table_;
  Interval here_;
};

struct LinearLseBackward : HeadGradients {  // x, weight, targets, lse, dlse, dtarget_logits
  static constexpr const char* kName = "linear_lse_backward";
  static void place(const Attrs& a, Place& p) {
    const auto rule = [&](std::initializer_list<Placement> in, const Placement& dweight, const Placement& dx) {
      std::vector<Placement> out;
      if (a.dweight) out.push_back(dweight);
      if (a.dx) out.push_back(dx);
      p.rule(std::span(in.begin(), in.size()), out);
    };
    const Placement part = Placement::shard(0);
    if (cuts_table(p.in(1))) rule({kR, p.in(1), kR, part, part, kR}, p.in(1), kP);
    for (const int i : {0, 2, 5}) {
      const Placement& rows = p.in(i);
      if (!cuts_rows(p, rows)) continue;
      rule({rows, kR, rows, behind_parts(rows), behind_parts(rows), rows}, kP, rows);
      break;
    }
    rule({kR, kR, kR, kR, kR, kR}, kR, kR);
    rule({kR, kR, kR, kR, kP, kP}, kP, kP);  // linear in both gradients
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_lse_backward, c.input(0), c.input(1), dx(a, c), dweight(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_lse_backward, c.input(0), c.input(1), part_of(c.input_type(1)), c.input(2),
                 a.ignore_index, c.input(3), c.input(4), c.input(5), dx(a, c), dweight(a, c), c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) { head(w, 1 + a.dweight + a.dx); }
  static constexpr uint64_t kSavedInputs = 0b110111;
  static void vjp(const Attrs& a, Vjp& c) {
    const TableParts parts(c.input_type(1));
    const int64_t here = parts.here().size();
    HeadBackwardOperands u = of_results(a, c);
    if (u.weight) u.weight = parts.enter(u.weight, here);
    const HeadBackwardOperands d =
        head_second({c.input(0), parts.enter(c.input(1), here), squeeze(parts.enter(c.input(4), 1), {0}), c.input(5)}, u, c.input(2),
                    a.ignore_index, parts.here().begin);
    c.set(0, parts.leave_addend(d.x));
    c.set(1, parts.leave(d.weight, c.input_type(1)));
    c.set(4, parts.leave(unsqueeze(d.dlse, {0}), c.input_type(4)));
    c.set(5, parts.leave_addend(d.dtarget));
  }
};

struct LinearLseOp {  // x[.., C], weight[V, C], targets[..] -> lse[M, ..], target_logits[..]
  static constexpr const char* kName = "linear_lse";
  struct Attrs {
    int64_t ignore_index, parts;
  };
  static constexpr uint64_t kSavedInputs = 0b111, kSavedOutputs = 0b01;
  static void infer(const Attrs& a, Infer& c) {
    LinearCrossEntropy::check(kName, c);
    if (a.parts != table_parts(c.input(1).layout))
      fail<ShapeError>("[", kName, "] weight ", c.input(1), " is not cut in ", a.parts, " parts");
    Shape per_part = leading(c.shape(0));
    per_part.insert(0, a.parts);
    c.output(statistics_dtype(c.dtype(0)), per_part);
    c.output(statistics_dtype(c.dtype(0)), leading(c.shape(0)));
  }
  static void place(const Attrs&, Place& p) {
    if (cuts_table(p.in(1))) p.rule({kR, p.in(1), kR}, {Placement::shard(0), kP});
    for (const int i : {0, 2}) {
      const Placement& rows = p.in(i);
      if (!cuts_rows(p, rows)) continue;
      p.rule({rows, kR, rows}, {behind_parts(rows), rows});
      break;
    }
    rule_all(p, kR, kR, 2);
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_lse, c.input(0), c.input(1));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_lse, c.input(0), c.input(1), part_of(c.input_type(1)), c.input(2),
                 a.ignore_index, c.output(0), c.output(1), c.workspace);
  }
  static void work(const Attrs&, WorkOf& w) { head(w, 1); }
  static void vjp(const Attrs& a, Vjp& c) {
    const auto grad = [&](int o) {
      return c.has_grad(o) ? c.grad(o) : zeros(c.output_type(o).shape, c.output_type(o).dtype);
    };
    HeadGradients::set<LinearLseBackward>(
        a.ignore_index, {c.input(0), c.input(1), c.input(2), c.output(0), grad(0), grad(1)}, c);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str("ignore ", a.ignore_index, " parts ", a.parts);
  }
};

/// Whether ranks have parts of a weight's rows.
bool is_cut(const Layout& weight) {
  for (int a = 0; a < weight.num_axes(); ++a)
    if (cuts_table(weight[a])) return true;
  return false;
}

/// Of values [M, ..], all M on every rank.
Layout of_all_parts(Layout parts) {
  for (int a = 0; a < parts.num_axes(); ++a)
    if (parts[a].is_shard(0)) parts[a] = kR;
  return parts;
}

/// The sum of the losses over the number of targets, or what the options say.
Tensor averaged(const Tensor& loss_sum, const Tensor& targets, const CrossEntropyOptions& o) {
  if (o.divisor) return div(loss_sum, cast(o.divisor, loss_sum.dtype()));
  const double count =
      o.divide_by > 0 ? o.divide_by : static_cast<double>(std::max<int64_t>(1, targets.numel()));
  return count == 1 ? loss_sum : div(loss_sum, count);
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const CrossEntropyOptions& options) {
  const Tensor losses =
      apply_all<CrossEntropy>({options.ignore_index}, {dense_rows(logits), targets})[0];
  return options.per_target ? losses : averaged(sum(losses), targets, options);
}

LinearLse linear_lse(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t ignore_index) {
  auto y = apply_all<LinearLseOp>({ignore_index, table_parts(weight.layout())}, {dense_rows(x), weight, targets});
  return {std::move(y[0]), std::move(y[1])};
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options) {
  if (options.per_target || is_cut(weight.layout())) {
    const LinearLse parts = linear_lse(x, weight, targets, options.ignore_index);
    // All ranks then have the log-sum-exps: the difference keeps their sum on one of them.
    const Tensor lse = logsumexp(redistribute(parts.lse, of_all_parts(parts.lse.layout())), {0}, /*keepdim=*/!options.per_target);
    if (options.per_target) return sub(lse, parts.target_logits);
    return averaged(sub(sum(lse), sum(parts.target_logits)), targets, options);
  }
  const Tensor rows = dense_rows(x);
  const std::vector<Tensor> inputs = {rows, weight, targets};
  Recording* recording = options.recompute ? nullptr : Recording::current();
  if (recording && recording->options().higher_order) recording = nullptr;  // no gradients ahead
  const HeadGradientsAttrs wanted{options.ignore_index, recording && recording->has_gradient(weight),
                                  recording && recording->has_gradient(rows)};
  if (wanted.dweight || wanted.dx) {
    const std::optional<Type> type = wanted.dweight ? dweight_type(rows, weight) : std::nullopt;
    const Into into[] = {{}, {type ? recording->slot_ahead(weight, *type) : Tensor()}};
    const Tensors y = apply(op_def<LinearCrossEntropyFused>(), &wanted, inputs, std::span(into, wanted.dweight ? 2 : 1));
    if (into[1].to) recording->lies_ahead(y[1], weight);
    return averaged(y[0], targets, options);
  }
  const IgnoreAttrs attrs{options.ignore_index};
  return averaged(apply(op_def<LinearCrossEntropy>(), &attrs, inputs)[0], targets, options);
}

}  // namespace sheaf
