// Softmax and log-softmax.
#include "sheaf/kernels/softmax.h"

#include "sheaf/autograd/ops/second.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

/// Shared code of the four ops: the last dimension is not sharded.
template <class Op>
struct OverRows {
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) {
    const DType d = common_dtype(Op::kName, c);
    require_floating(Op::kName, d);
    if (c.shape(0).rank() < 1) fail<ShapeError>("[", Op::kName, "] needs a dimension");
    c.output(d, c.shape(0));
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, {.inputs = 0b11, .outputs = 0b1});
    rule_all(p, kR, kR);
    if (p.num_inputs() == 2) p.rule({kR, kP}, {kP});  // the backwards are linear in dy
  }
};

struct SoftmaxBackward : OverRows<SoftmaxBackward> {  // y, dy -> y (dy - sum(dy y))
  static constexpr const char* kName = "softmax_backward";
  static constexpr uint64_t kSavedInputs = 0b11;
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), softmax_backward, c.input(0), c.input(1), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {
    const Tensor y = c.input(0), u = dense_rows(c.grad());
    if (c.needs(1)) c.set(1, apply<SoftmaxBackward>({}, {y, u}));
    if (!c.needs(0)) return;
    const Tensor dy = c.input(1);
    c.set(0, sub(mul(u, sub(dy, sum(mul(dy, y), -1, true))), mul(sum(mul(u, y), -1, true), dy)));
  }
};
struct Softmax : OverRows<Softmax> {
  static constexpr const char* kName = "softmax";
  static constexpr uint64_t kSavedOutputs = 0b1;
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), softmax, c.input(0), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, apply<SoftmaxBackward>({}, {c.output(0), dense_rows(c.grad())}));
  }
};

struct LogSoftmaxBackward : OverRows<LogSoftmaxBackward> {  // y, dy -> dy - exp(y) sum(dy)
  static constexpr const char* kName = "log_softmax_backward";
  static constexpr uint64_t kSavedInputs = 0b11;
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), log_softmax_backward, c.input(0), c.input(1), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {
    const Tensor weighted = mul(c.grad(), exp(c.input(0)));  // u p
    if (c.needs(1)) c.set(1, sub(c.grad(), sum(weighted, -1, true)));
    if (c.needs(0)) c.set(0, neg(mul(weighted, sum(c.input(1), -1, true))));
  }
};
struct LogSoftmax : OverRows<LogSoftmax> {
  static constexpr const char* kName = "log_softmax";
  static constexpr uint64_t kSavedOutputs = 0b1;
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), log_softmax, c.input(0), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, apply<LogSoftmaxBackward>({}, {c.output(0), dense_rows(c.grad())}));
  }
};

/// Ops run over the last dimension; views move another one there and back.
template <class Op>
Tensor along(const Tensor& x, int dim) {
  const int d = wrap_dim(Op::kName, dim, x);
  if (d == x.rank() - 1) return apply<Op>({}, dense_rows(x));
  return transpose(apply<Op>({}, dense_rows(transpose(x, d, -1))), d, -1);
}

}  // namespace

Tensor ops::through_softmax(const Tensor& y, const Tensor& dy) { return apply<SoftmaxBackward>({}, {dense_rows(y), dense_rows(dy)}); }

Tensor softmax(const Tensor& x, int dim) { return along<Softmax>(x, dim); }
Tensor log_softmax(const Tensor& x, int dim) { return along<LogSoftmax>(x, dim); }

}  // namespace sheaf
