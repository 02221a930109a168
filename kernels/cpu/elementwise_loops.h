// The loops of elementwise functions, over contiguous arrays of a compute type: shared by kernels of one op
// (elementwise.cc) and of several (fused.cc), so that both give the same bits.
#pragma once

#include <cstdint>

#include "sheaf/kernels/elementwise.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {

// An output must be disjoint from each input, or the same memory, element for element.
template <class C, class Out = C>
using Loop1 = void (*)(Out* to, const C* x, int64_t n);
template <class C, class Out = C>
using Loop2 = void (*)(Out* to, const C* x, const C* y, int64_t n);

/// Null for ops that are not defined for C. Out is C, or bool for predicates.
template <class C, class Out>
Loop1<C, Out> unary_loop(UnaryOp op);
template <class C, class Out>
Loop2<C, Out> binary_loop(BinaryOp op);
/// From the kept value and the gradient of the output. C is float or double.
template <class C>
Loop2<C> backward_loop(BackwardOp op);
/// From gate and up. C is float or double.
template <class C>
void swiglu_loop(C* to, const C* gate, const C* up, int64_t n);
/// gate sigmoid(alpha gate) (up + 1). C is float or double.
template <class C>
void shifted_swiglu_loop(C* to, const C* gate, const C* up, C alpha, int64_t n);
template <class C>
void where_loop(C* to, const C* cond, const C* x, const C* y, int64_t n);
template <class C>
void clamp_loop(C* to, const C* x, C low, C high, int64_t n);

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
