// Random kernels: an element's value is a pure function of the key and of its index in the global tensor, so a rank that holds a part
// draws the values that a single process would draw there. Floating outputs only, any strides.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/random.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// The position of a local view: a rectangular block of a global tensor that starts at `start`. A flat shard is a 1-D view with the
/// global number of elements and its first flat index.
struct GlobalIndex {
  Shape global_shape;
  Shape start;
  /// All of a tensor of this shape.
  static GlobalIndex whole(const Shape& shape) { return {shape, Shape::filled(shape.rank(), 0)}; }
};

/// A kernel's source of randomness: a given key, or one derived where and when the kernel runs, from a training step's state in
/// memory of the kernel's device. Replayed work draws new values when the state has changed.
struct DrawKey {
  DrawKey(Key as_it_is) : key(as_it_is) {}  // NOLINT(google-explicit-constructor)
  DrawKey(Key path, uint64_t call_in, const int64_t* state_in, int64_t sample_numel_in)
      : key(path), call(call_in), state(state_in), sample_numel(sample_numel_in) {}

  Key key;                         ///< the key itself, or that of a module path
  uint64_t call = 0;               ///< number of the call on that path
  const int64_t* state = nullptr;  ///< i64[3]: seed, step, first sample; null: `key` is the key
  int64_t sample_numel = 0;        ///< elements of one sample

  SHEAF_HOST_DEVICE Key derived() const {
    if (!state) return key;
    return fold_in(fold_in(fold_in(key, static_cast<uint64_t>(state[0])), call),
                   static_cast<uint64_t>(state[1]));
  }
  /// Added to all indices: samples are counted from the step's first one.
  SHEAF_HOST_DEVICE uint64_t first_index() const {
    return state ? static_cast<uint64_t>(state[2] * sample_numel) : 0;
  }
};

namespace cpu {

/// lo + (hi - lo) * u for u in [0, 1) with 24 random bits, computed in f64 and rounded once (which
/// may yield hi).
void uniform(const View& out, DrawKey key, const GlobalIndex& where, double lo, double hi);
/// mean + std * z computed in f64, rounded to f32, then to out's dtype; z from 52 random bits by
/// the normal quantile function.
void normal(const View& out, DrawKey key, const GlobalIndex& where, double mean, double std);
/// out = x / (1 - p) where kept, 0 where dropped (with probability p in [0, 1)); the same call on a gradient is the
/// adjoint.
void dropout(const View& x, double p, DrawKey key, const GlobalIndex& where, const View& out);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`, and the same bits.
namespace cuda {

void uniform(const Stream& stream, const View& out, DrawKey key, const GlobalIndex& where,
             double lo, double hi);
void normal(const Stream& stream, const View& out, DrawKey key, const GlobalIndex& where,
            double mean, double std);
void dropout(const Stream& stream, const View& x, double p, DrawKey key, const GlobalIndex& where,
             const View& out);

}  // namespace cuda
}  // namespace sheaf::kernels
