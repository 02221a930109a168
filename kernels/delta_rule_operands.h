// Requirements of the delta-rule kernels of all devices on their operands.
#pragma once

#include "sheaf/core/error.h"
#include "sheaf/kernels/delta_rule.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels {

/// begins: i32[B, T], for operands [B, T, ..].
inline void check_begins(const char* who, const View& begins, const View& x) {
  if (!given(begins)) return;
  check<ShapeError>(begins.shape == Shape{x.shape[0], x.shape[1]}, "[", who, "] begins of documents ", begins.shape, " for ", x.shape);
  check<DTypeError>(begins.dtype == kI32, "[", who, "] begins of documents must be i32, not ", begins.dtype);
  check<ShapeError>(begins.strides.back() == 1 || begins.shape.back() <= 1, "[", who,
                    "] begins of documents must be dense in the last dimension");
}

/// `v` is out or its gradient; `state` is a state or its gradient, and may be absent.
inline void check_delta_rule(const char* who, const DeltaRuleOperands& x, const View& v, const View& state) {
  const View &q = x.q, &k = x.k;
  const bool shapes = q.rank() == 4 && k.shape == q.shape && x.v.rank() == 4 && x.v.shape[0] == q.shape[0] &&
                      x.v.shape[1] == q.shape[1] && v.shape == x.v.shape &&
                      (q.shape[2] > 0 ? x.v.shape[2] % q.shape[2] == 0 : x.v.shape[2] == 0);
  check<ShapeError>(shapes, "[", who, "] queries [B,T,G,D] ", q.shape, ", keys ", k.shape, ", values [B,T,H,E] ", x.v.shape,
                    ", output ", v.shape, "; H must be a multiple of G");
  const Shape of_gates{q.shape[0], q.shape[1], x.v.shape[2]}, of_states{q.shape[0], x.v.shape[2], q.shape[3], x.v.shape[3]};
  check<ShapeError>(x.decay.shape == of_gates && x.beta.shape == of_gates, "[", who, "] decay ", x.decay.shape, " and beta ",
                    x.beta.shape, ", want [B,T,H] ", of_gates);
  const DType exact = q.dtype == kF64 ? kF64 : kF32;
  check<DTypeError>(is_floating(q.dtype) && k.dtype == q.dtype && x.v.dtype == q.dtype && v.dtype == q.dtype &&
                        x.decay.dtype == exact && x.beta.dtype == exact,
                    "[", who, "] dtypes ", q.dtype, ", ", k.dtype, ", ", x.v.dtype, ", output ", v.dtype, ", decay ", x.decay.dtype,
                    ", beta ", x.beta.dtype);
  for (const View* s : {&x.initial, &state}) {
    if (!given(*s)) continue;
    const bool dense = s->numel() == 0 || ((s->strides[3] == 1 || of_states[3] == 1) && (s->strides[2] == of_states[3] || of_states[2] == 1));
    check<ShapeError>(s->shape == of_states && dense, "[", who, "] a state of ", s->shape, ", strides ", s->strides, ", want [B,H,D,E] ",
                      of_states, ", dense in the last two dimensions");
    check<DTypeError>(s->dtype == exact, "[", who, "] a state of ", s->dtype, " for ", q.dtype);
  }
  for (const View* s : {&q, &k, &x.v, &v})
    check<ShapeError>(s->strides.back() == 1 || s->shape.back() <= 1 || s->numel() == 0, "[", who,
                      "] the last dimension must be dense, strides are ", s->strides);
  check_begins(who, x.begins, q);
}

inline void check_delta_rule_backward(const char* who, const DeltaRuleOperands& x, const View& dout, const View& dstate,
                                      const DeltaRuleGradients& d) {
  check_delta_rule(who, x, dout, dstate);
  check<ShapeError>(d.q.shape == x.q.shape && d.k.shape == x.k.shape && d.v.shape == x.v.shape, "[", who, "] gradients ", d.q.shape,
                    ", ", d.k.shape, " and ", d.v.shape, " of ", x.q.shape, ", ", x.k.shape, " and ", x.v.shape);
  check_delta_rule(who, {d.q, d.k, d.v, d.decay, d.beta, d.initial, {}}, dout, dstate);
  check<DTypeError>(d.q.dtype == x.q.dtype, "[", who, "] gradients in ", d.q.dtype, " of ", x.q.dtype);
}

}  // namespace sheaf::kernels
