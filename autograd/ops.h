// The public operations on tensors. Each is one struct in autograd/ops/. Shapes are global; dtypes of tensor operands
// must agree (cast() converts); Python-like scalars are weak. Dimensions may be negative, counted from the end.
#pragma once

#include "sheaf/autograd/op.h"

namespace sheaf {

/// Where ops without tensor inputs (zeros, arange, ...) place their result: cpu, or meta in a dry run.
Device default_device();
class DeviceScope {
 public:
  explicit DeviceScope(Device device);
  ~DeviceScope();

 private:
  Device previous_;
};

// ---- placement ------------------------------------------------------------------------------------------------------
/// The same value in another layout; see the table in core/placement.h. Backward: dual(to) → dual(from).
/// Communicates where the table says so, on the gather lane, and waits for the result.
Tensor redistribute(const Tensor& x, const Layout& to);
/// The same with the placement of one mesh axis changed.
Tensor redistribute(const Tensor& x, const std::string& axis, const Placement& to);

// ---- memory ---------------------------------------------------------------------------------------------------------
/// `x`'s type with every element `value`.
Tensor full_like(const Tensor& x, double value);
/// A value of the given type (layout included) with every element `value`; for Partial, rank 0 holds it.
Tensor full_of(const Type& type, double value);
/// Dense copy.
Tensor contiguous(const Tensor& x);
/// Stores x into `to`'s memory, or adds it to what is there. For gradients' slots.
void store_into(const Tensor& to, const Tensor& x);
void add_into(const Tensor& to, const Tensor& x);

// ---- group A: elementwise, reductions, shape, indexing, random --------------------------------------------------------
/// a + b with broadcasting.
Tensor add(const Tensor& a, const Tensor& b);

// ---- group B: products, normalisation, attention, losses, optimizers --------------------------------------------------

// ---- end ------------------------------------------------------------------------------------------------------------
}  // namespace sheaf
