// Cross-entropy of logits, and of a linear head whose logits never exist whole.
#include "sheaf/kernels/cross_entropy.h"

#include "sheaf/autograd/ops/rows.h"
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

void describe_ignored(const IgnoreAttrs& a, std::string& out) {
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
  static constexpr auto describe = describe_ignored;
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
  static constexpr auto describe = describe_ignored;
};

struct LinearCrossEntropyAttrs {
  int64_t ignore_index;
  int32_t dweight, dx;  ///< wanted gradients, in the backward
};

struct LinearCrossEntropyBackward {  // x, weight, targets, lse, dloss -> [dweight] [, dx]
  static constexpr const char* kName = "linear_cross_entropy_backward";
  static constexpr uint64_t kStoresWide = 0b1;  // output 0 is dweight, unless only dx is wanted
  using Attrs = LinearCrossEntropyAttrs;
  static void infer(const Attrs& a, Infer& c) {
    if (a.dweight) c.output(c.dtype(1), c.shape(1));
    if (a.dx) c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs& a, Place& p) {
    const int n = a.dweight + a.dx;
    row_rules(p, 0, 0b01101, a.dx ? 1u << a.dweight : 0, n, 1);
    rule_all(p, kR, kR, n);
    const Placement in[] = {kR, kR, kR, kR, kP};  // linear in dloss
    p.rule(in, std::vector<Placement>(static_cast<size_t>(n), kP));
  }
  static View dweight(const Attrs& a, const Execute& c) { return a.dweight ? c.output(0) : View{}; }
  static View dx(const Attrs& a, const Execute& c) { return a.dx ? c.output(a.dweight) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy_backward, c.input(0), c.input(1), dx(a, c), dweight(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy_backward, c.input(0), c.input(1), c.input(2),
                 a.ignore_index, c.input(3), c.input(4), dx(a, c), dweight(a, c), c.workspace);
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
  static void vjp(const Attrs& a, Vjp& c) {
    const LinearCrossEntropyAttrs attrs{a.ignore_index, c.needs(1), c.needs(0)};
    const auto d = apply_all<LinearCrossEntropyBackward>(
        attrs, {c.input(0), c.input(1), c.input(2), c.output(1), c.grad()}, {c.into(1)});
    if (attrs.dweight) c.set(1, d[0]);
    if (attrs.dx) c.set(0, d[static_cast<size_t>(attrs.dweight)]);
  }
  static constexpr auto describe = describe_ignored;
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
/// and the backward only scales. Costs the memory of dweight between forward and backward.
struct LinearCrossEntropyFused {  // x[.., C], weight[V, C], targets[..] -> loss[], dweight, dx
  static constexpr const char* kName = "linear_cross_entropy_fused";
  using Attrs = IgnoreAttrs;
  static constexpr uint64_t kSavedOutputs = 0b110;
  static void infer(const Attrs&, Infer& c) {
    LinearCrossEntropy::check(kName, c);
    c.output(statistics_dtype(c.dtype(0)), {});
    c.output(statistics_dtype(c.dtype(1)), c.shape(1));  // a sum over all rows
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, 0, 0b101, 0b100, 3, 1);
    rule_all(p, kR, kR, 3);
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_cross_entropy_fused, c.input(0), c.input(1), c.output(2), c.output(1));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_cross_entropy_fused, c.input(0), c.input(1), c.input(2),
                 a.ignore_index, c.output(0), c.output(2), c.output(1), c.workspace);
  }
  static void vjp(const Attrs&, Vjp& c) {
    if (c.has_grad(1) || c.has_grad(2))
      fail<LifetimeError>("[", kName, "] ", path_label(PathScope::current()),
                          ": it has no derivative of its gradients");
    if (c.needs(1)) c.set(1, apply<ScaleBy>({}, {c.output(1), c.grad()}, c.into(1)));
    if (c.needs(0)) c.set(0, apply<ScaleBy>({}, {c.output(2), c.grad()}));
  }
  static void saves(const Attrs&, uint64_t needs, uint64_t&, uint64_t& out) {
    out = ((needs & 2) ? 0b010 : 0) | ((needs & 1) ? 0b100 : 0);
  }
  static constexpr auto describe = describe_ignored;
};

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
  return averaged(sum(losses), targets, options);
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options) {
  const IgnoreAttrs attrs{options.ignore_index};
  const Tensor rows = dense_rows(x);
  const bool fused = Recording::current() && !options.recompute;
  const OpDef& op = fused ? op_def<LinearCrossEntropyFused>() : op_def<LinearCrossEntropy>();
  return averaged(apply(op, &attrs, std::vector<Tensor>{rows, weight, targets})[0], targets, options);
}

}  // namespace sheaf
