// Shared code of the ops around a linear layer y = x weightᵀ + bias. Its input is the op's input 0; the weight is any later input, the
// bias (optional) follows the weight.
#pragma once

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/autograd/work.h"

namespace sheaf::ops {

/// Attributes of a product that may round to FP8, and of a layer's.
struct Rounds {
  bool fp8;
};
struct LayerRounds {
  Fp8 fp8;
  bool forward() const { return fp8 != Fp8::none; }
};
inline void describe_rounds(const Rounds& a, std::string& out) { out += a.fp8 ? "fp8" : ""; }
inline void describe_layer_rounds(const LayerRounds& a, std::string& out) {
  out += a.fp8 == Fp8::all ? "fp8 all" : a.fp8 == Fp8::activations ? "fp8" : "";
}
/// Partial operands are not rounded: rounded addends do not sum to the rounded value.
inline bool can_round(const Tensor& x) { return !has_partial(x.layout()); }
inline Rounds rounds_of(bool fp8, const Tensor& a, const Tensor& b) { return {fp8 && can_round(a) && can_round(b)}; }
inline LayerRounds rounds_of(Fp8 fp8, const Tensor& x, const Tensor& weight) {
  return {fp8 != Fp8::none && can_round(x) && can_round(weight) ? fp8 : Fp8::none};
}
/// DTypeError unless it is f32, bf16 or f16.
void require_fp8(const char* op, bool fp8, DType dtype);
/// The product is one of FP8, before which `along_rows` elements are rounded by rows, `along_columns` by columns.
void rounds(WorkOf& w, int64_t along_rows, int64_t along_columns);

/// Declares y[.., O] of x[.., I], weight[O, I] [, bias[O]].
void infer_linear(const char* op, Infer& c, int weight, bool fp8);
/// Its work.
void work_of_linear(WorkOf& w, int weight, bool fp8);
/// The derivative will read input 0 soon, if the gradient of the weight is needed.
inline void will_read_input(Vjp& c, int weight) {
  if (c.needs(weight)) c.will_read(0);
}
/// Sets the gradients of weight and bias that are needed, from dy[.., O]: one op for both, which may be deferred. For ops with
/// kDefersWeights.
void set_parameter_gradients(Vjp& c, const Tensor& dy, int weight, Fp8 fp8);
/// x[.., O] weight[O, I]; a vector is a matrix of one row.
Tensor times(const Tensor& x, const Tensor& weight, bool fp8 = false);
/// dyᵀ x over all rows, [O, I].
Tensor weight_gradient(const Tensor& dy, const Tensor& x);

}  // namespace sheaf::ops
