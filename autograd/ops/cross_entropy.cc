// Cross-entropy of logits.
#include "sheaf/kernels/cross_entropy.h"

#include "sheaf/autograd/ops/cross_entropy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct CrossEntropyBackward {  // logits, targets, lse, dlosses -> dlogits
  static constexpr const char* kName = "cross_entropy_backward";
  using Attrs = IgnoreAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) {
    row_rules(p, {.inputs = 0b1111, .outputs = 0b1});
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
    row_rules(p, {.inputs = 0b11, .outputs = 0b11, .num_outputs = 2});
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

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const CrossEntropyOptions& options) {
  check_loss_options("cross_entropy", options);
  const Tensor rows = dense_rows(options.softcap != 0 ? softcap(logits, options.softcap) : logits);
  Tensor losses = apply_all<CrossEntropy>({options.ignore_index}, {rows, targets})[0];
  if (const double e = options.label_smoothing; e != 0) {
    const Tensor of_all = mean(log_softmax(in_statistics_dtype(rows)), {-1});
    losses = sub(mul(losses, 1 - e), mul(unless_ignored(of_all, targets, options), e));
  }
  if (options.z_loss != 0) {
    const Tensor z = z_losses(logsumexp(in_statistics_dtype(rows), {-1}), options.z_loss);
    losses = add(losses, unless_ignored(z, targets, options));
  }
  return options.per_target ? losses : averaged(sum(losses), targets, options);
}

}  // namespace sheaf
