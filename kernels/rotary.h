// Rotary position embedding.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/rotary_scaling.h"

namespace sheaf::kernels {
namespace cpu {

/// Rotary embedding (Su et al., https://arxiv.org/abs/2104.09864) of x[B, T, H, D], D even, in the
/// half-split form of Llama's Hugging Face checkpoints: elements i and i + D/2 are rotated by the
/// angle position * RotaryFrequencies(theta, D / 2, scaling)(i), position = first_position + t, and
/// multiplied by the scaling's amplitude. Heads from `heads` on are copied. `inverse` rotates back,
/// multiplying once more, which is the gradient. y has x's shape and dtype,
/// and may be the same memory; their last dimensions are dense.
size_t rotary_workspace(const View& x);
void rotary(const View& x, double theta, const RotaryScaling& scaling, int64_t first_position,
            int64_t heads, bool inverse, const View& y, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Angles are computed where they are used, in f64; no
/// workspace is needed.
namespace cuda {

size_t rotary_workspace(const View& x);
void rotary(const Stream& stream, const View& x, double theta, const RotaryScaling& scaling,
            int64_t first_position, int64_t heads, bool inverse, const View& y,
            Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
