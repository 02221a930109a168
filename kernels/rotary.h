// Rotary position embedding.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/rotary_scaling.h"

namespace sheaf::kernels {

/// What of x[B, T, H, D] is rotated: of the first `heads` heads the last `width` elements. The rest
/// is copied.
struct RotaryPart {
  int64_t heads, width;     ///< width is even, and at most D
  bool neighbours = false;  ///< pairs are elements 2i and 2i + 1 of these, not i and i + width / 2
};

namespace cpu {

/// Rotary embedding (Su et al., https://arxiv.org/abs/2104.09864) of `part` of x[B, T, H, D]: the
/// elements of its pair i are rotated by the angle position * RotaryFrequencies(theta, part.width / 2,
/// scaling)(i), position = first_position + t, and multiplied by the scaling's amplitude. Halves are
/// the pairs of Llama's Hugging Face checkpoints, neighbours those of the paper and of DeepSeek's.
/// `inverse` rotates back, multiplying once more, which is the gradient. y has x's shape and dtype,
/// and may be the same memory; their last dimensions are dense.
size_t rotary_workspace(const View& x, const RotaryPart& part);
void rotary(const View& x, double theta, const RotaryScaling& scaling, int64_t first_position,
            const RotaryPart& part, bool inverse, const View& y, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Angles are computed where they are used, in f64; no
/// workspace is needed.
namespace cuda {

size_t rotary_workspace(const View& x, const RotaryPart& part);
void rotary(const Stream& stream, const View& x, double theta, const RotaryScaling& scaling,
            int64_t first_position, const RotaryPart& part, bool inverse, const View& y,
            Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
