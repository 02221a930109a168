// Random kernels: an element's value is a pure function of the key and of its index in the global
// tensor, so a rank that holds a part draws what one process would have drawn there. Floating
// outputs only, any strides.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/random.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// Where a local view lies: a rectangular block of a global tensor that starts at `start`. A flat
/// shard is a 1-D view with the global number of elements and its first flat index.
struct GlobalIndex {
  Shape global_shape;
  Shape start;
  /// The whole of a tensor of this shape.
  static GlobalIndex whole(const Shape& shape) { return {shape, Shape::filled(shape.rank(), 0)}; }
};

namespace cpu {

/// lo + (hi - lo) * u for u in [0, 1) with 24 random bits, computed in f64 and rounded once (which
/// may yield hi).
void uniform(const View& out, Key key, const GlobalIndex& where, double lo, double hi);
/// mean + std * z computed in f64, rounded to f32, then to out's dtype; z from 52 random bits by
/// the normal quantile function.
void normal(const View& out, Key key, const GlobalIndex& where, double mean, double std);
/// out = x / (1 - p) where kept, 0 where dropped (probability p in [0, 1)); the same call on a
/// gradient is the adjoint.
void dropout(const View& x, double p, Key key, const GlobalIndex& where, const View& out);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`, and the same bits.
namespace cuda {

void uniform(const Stream& stream, const View& out, Key key, const GlobalIndex& where, double lo,
             double hi);
void normal(const Stream& stream, const View& out, Key key, const GlobalIndex& where, double mean,
            double std);
void dropout(const Stream& stream, const View& x, double p, Key key, const GlobalIndex& where,
             const View& out);

}  // namespace cuda
}  // namespace sheaf::kernels
