// Shared code of losses with integer targets: of logits, and of a linear head whose logits are never materialised as a whole.
#pragma once

#include <algorithm>

#include "sheaf/autograd/ops/second.h"
#include "sheaf/autograd/work.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf::ops {

struct IgnoreAttrs {
  int64_t ignore_index;
};

template <class Attrs>
void describe_ignored(const Attrs& a, std::string& out) {
  out += str("ignore ", a.ignore_index);
}

inline void check_targets(const char* op, const Infer& c, int i, int64_t vocabulary) {
  if (!is_integral(c.dtype(i)))
    fail<DTypeError>("[", op, "] targets ", c.input(i), " are no integers: a target is the number of a class, one for each row of ", c.input(0),
                     c.shape(i) == c.shape(0) ? "; of probabilities p the loss is -sum(p * log_softmax(logits), -1)" : "");
  if (c.shape(0).rank() < 1) fail<ShapeError>("[", op, "] ", c.input(0), " has no dimension of classes");
  if (!(c.shape(i) == leading(c.shape(0))))
    fail<ShapeError>("[", op, "] targets ", c.input(i), " do not fit ", c.input(0), ": one for each row, ", leading(c.shape(0)));
  if (vocabulary == 0 && c.shape(i).numel() != 0)
    fail<ShapeError>("[", op, "] targets ", c.input(i), " of no classes");
}

/// z_loss lse² of each row's log-sum-exp, and lse plus that.
inline Tensor z_losses(const Tensor& lse, double z_loss) { return mul(square(lse), z_loss); }
inline Tensor with_z_loss(const Tensor& lse, double z_loss) { return z_loss == 0 ? lse : add(lse, z_losses(lse, z_loss)); }

inline void check_loss_options(const char* op, const CrossEntropyOptions& o) {
  check_softcap(op, o.softcap);
  check_z_loss(op, o.z_loss);
  if (!(o.label_smoothing >= 0 && o.label_smoothing <= 1))
    fail<ConfigError>("[", op, "] label_smoothing ", o.label_smoothing, "; wants a number from 0 to 1");
  if (o.mean_of_counted && (o.divisor || o.divide_by > 0 || o.per_target))
    fail<ConfigError>("[", op, "] mean_of_counted with ", o.divisor ? "a divisor" : o.per_target ? "per_target" : "divide_by",
                      ": wants one of them");
}

/// 1 for each target that counts, 0 for those to ignore.
inline Tensor counted(const Tensor& targets, const CrossEntropyOptions& o, DType dtype) {
  return cast(ne(targets, static_cast<double>(o.ignore_index)), dtype);
}

/// x of each row whose target counts, 0 of the others, where it may be infinite.
inline Tensor unless_ignored(const Tensor& x, const Tensor& targets, const CrossEntropyOptions& o) {
  return where(eq(targets, static_cast<double>(o.ignore_index)), 0.0, x);
}

/// The number of targets that count, of all ranks that cut them; where they are on one stage of a pipeline, it is, too.
inline Tensor number_of_counted(const Tensor& targets, const CrossEntropyOptions& o, DType dtype) {
  const Tensor here = sum(counted(targets, o, dtype));
  Layout all = here.layout();
  for (int a = 0; a < all.num_axes(); ++a)
    if (all[a].is_partial()) all[a] = kR;
  return redistribute(here, all);
}

/// The sum of the losses divided by the number of targets, or as the options say.
inline Tensor averaged(const Tensor& loss_sum, const Tensor& targets, const CrossEntropyOptions& o) {
  if (o.mean_of_counted) return div(loss_sum, maximum(number_of_counted(targets, o, loss_sum.dtype()), 1.0));
  if (o.divisor) return div(loss_sum, cast(o.divisor, loss_sum.dtype()));
  const double count =
      o.divide_by > 0 ? o.divide_by : static_cast<double>(std::max<int64_t>(1, targets.numel()));
  return count == 1 ? loss_sum : div(loss_sum, count);
}

/// Checks the operands of a head: x[.., C], weight[V, C], targets[..].
inline void check_head(const char* op, const Infer& c) {
  require_floating(op, c.dtype(0));
  if (c.dtype(1) != c.dtype(0))
    fail<DTypeError>("[", op, "] operands are ", c.input(0), " and ", c.input(1),
                     ": cast one of them");
  if (c.shape(0).rank() < 1 || c.shape(1).rank() != 2 || c.shape(1)[1] != c.shape(0).back())
    fail<ShapeError>("[", op, "] input ", c.input(0), " does not fit weight ", c.input(1));
  check_targets(op, c, 2, c.shape(1)[0]);
}
/// The work of a head of x[.., C] and weight[V, C]: `products` products over all rows, and between them a pass over the logits, which
/// reads the dtype of statistics and, in a backward, writes gradients.
inline void head(WorkOf& w, int products) {
  for (int i = 0; i < products; ++i) w.multiplies(w.input(0), w.input(1)[0]);
  const double logits = static_cast<double>(leading(w.input(0)).numel()) * static_cast<double>(w.input(1)[0]);
  const DType d = w.work.dtype;
  w.work.passes = logits * static_cast<double>(size_of(statistics_dtype(d)) + (products > 1 ? size_of(d) : 0));
}

struct HeadAttrs {
  int64_t ignore_index;
  double softcap;  ///< of logits; 0: none
};
template <class Attrs>
kernels::HeadRules head_rules(const Attrs& a) {
  return {a.ignore_index, a.softcap};
}
template <class Attrs>
void describe_head(const Attrs& a, std::string& out) {
  describe_ignored(a, out);
  if (a.softcap != 0) out += str(" softcap ", a.softcap);
}

struct HeadGradientsAttrs {
  int64_t ignore_index;
  double softcap;
  int32_t dweight, dx;  ///< whether they are needed
};

/// Shared code of the backwards of linear heads: x, weight, targets, .. -> [dweight] [, dx]
struct HeadGradients {
  static constexpr uint64_t kStoresWide = 0b1;  // output 0 is dweight, unless only dx is needed
  using Attrs = HeadGradientsAttrs;
  static void infer(const Attrs& a, Infer& c) {
    if (a.dweight) c.output(c.dtype(1), c.shape(1));
    if (a.dx) c.output(c.dtype(0), c.shape(0));
  }
  static View dweight(const Attrs& a, const Execute& c) { return a.dweight ? c.output(0) : View{}; }
  static View dx(const Attrs& a, const Execute& c) { return a.dx ? c.output(a.dweight) : View{}; }
  /// The gradients of the results.
  static HeadBackwardOperands of_results(const Attrs& a, const Vjp& c) {
    return {grad_if(a.dx, c, a.dweight), grad_if(a.dweight, c, 0), {}, {}};
  }
  /// Sets the gradients computed by Op from `inputs`, in the vjp of an op whose first inputs are x and weight.
  template <class Op>
  static void set(const HeadAttrs& a, std::initializer_list<Tensor> inputs, Vjp& c) {
    const Attrs attrs{a.ignore_index, a.softcap, c.needs(1), c.needs(0)};
    const auto d = apply_all<Op>(attrs, inputs, {c.into(1)});
    if (attrs.dweight) c.set(1, d[0]);
    if (attrs.dx) c.set(0, d[static_cast<size_t>(attrs.dweight)]);
  }
};

}  // namespace sheaf::ops
