// Rotary position embedding.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/given.h"
#include "sheaf/kernels/rotary_scaling.h"

namespace sheaf::kernels {

/// The part of x[B, T, H, D] that is rotated: the last `width` elements of the first `heads` heads. The rest is
/// copied.
struct RotaryPart {
  int64_t heads, width;     ///< width is even, and at most D
  bool neighbours = false;  ///< pairs are elements 2i and 2i + 1 of these, not i and i + width / 2
};

/// The tokens' positions: `first` + t for token t or, if rows do not all begin at 0, `first` + t - begins[b, t], which must not be
/// negative.
struct RotaryPositions {
  int64_t first;
  View begins;  ///< i32[B, T], the last dimension dense; without a shape: all rows begin at 0
  RotaryPositions(int64_t first_position, const View& of_rows = {}) : first(first_position), begins(of_rows) {}  // NOLINT: implicit by design
};

inline void check_rotary(const View& x, double theta, const RotaryPositions& positions, const RotaryPart& part, const View& y) {
  check<ShapeError>(x.rank() == 4 && y.shape == x.shape, "[rotary] wants [B, T, H, D], got ", x.shape, " into ", y.shape);
  check<ShapeError>(part.width >= 0 && part.width % 2 == 0 && part.width <= x.shape[3], "[rotary] cannot rotate ", part.width,
                    " elements of each head of ", x.shape, "; wants an even number, at most D");
  check<DTypeError>(y.dtype == x.dtype, "[rotary] ", x.dtype, " into ", y.dtype);
  check<ConfigError>(positions.first >= 0 && theta > 0, "[rotary] first position ", positions.first, ", theta ", theta);
  if (!given(positions.begins)) return;
  check<DTypeError>(positions.begins.dtype == kI32, "[rotary] begins of rows must be i32, not ", positions.begins.dtype);
  check<ShapeError>(positions.begins.shape == Shape{x.shape[0], x.shape[1]} && (positions.begins.strides[1] == 1 || x.shape[1] <= 1),
                    "[rotary] begins of rows ", positions.begins.shape, " for ", x.shape, "; wants [B,T], dense in the last dimension");
}

namespace cpu {

/// Rotary embedding (Su et al., https://arxiv.org/abs/2104.09864) of `part` of x[B, T, H, D]: the elements of its pair i are rotated
/// by the angle position * RotaryFrequencies(theta, part.width / 2, scaling)(i) and multiplied by the scaling's amplitude. Halves are
/// the pairs of Llama's Hugging Face checkpoints, neighbours those of the paper and of DeepSeek's. `inverse` rotates back,
/// multiplying by the amplitude once more, which is the gradient. y has x's shape and dtype, and may be the same memory; their last
/// dimensions are dense. The bits depend on the position, not on the token's index. Throws DataError for a negative position.
size_t rotary_workspace(const View& x, const RotaryPart& part, const RotaryPositions& positions = 0);
void rotary(const View& x, double theta, const RotaryScaling& scaling, const RotaryPositions& positions,
            const RotaryPart& part, bool inverse, const View& y, Workspace workspace);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. Angles are computed on the fly, in f64; no workspace is needed. Begins are not checked.
namespace cuda {

size_t rotary_workspace(const View& x, const RotaryPart& part, const RotaryPositions& positions = 0);
void rotary(const Stream& stream, const View& x, double theta, const RotaryScaling& scaling,
            const RotaryPositions& positions, const RotaryPart& part, bool inverse, const View& y,
            Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
