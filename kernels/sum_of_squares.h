// A sum of squares that does not depend on how the data are divided among ranks, units or threads.
//
// The flat index is divided into blocks of 32 elements. A block's squares are summed in f64 in a fixed order; block sums are added
// without rounding into a wide fixed-point number (a superaccumulator, after Kulisch), so the order of addition does not matter.
// Rounding happens once, in sum_of_squares_finish. Shards must begin at multiples of 32 elements.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {
namespace cpu {

/// The fixed-point number: limb i < 23 weighs 2^(32 i - 384) and holds 32 bits, with room for carries above them, so that fewer than
/// 2^31 such numbers, from different ranks too, may be added as integers. The last limb is 1 if a block's sum is infinite or above 2^320,
/// 2^32 if one is NaN. Any sum of f32 squares is represented exactly; f64 block sums lose bits below 2^-384.
inline constexpr int64_t kSquareLimbs = 24;

/// limbs: i64 [24], stored. x: any floating dtype, dense, of fewer than 2^36 elements; its first element begins a block.
size_t sum_of_squares_workspace(const View& x);
void sum_of_squares(const View& x, const View& limbs, Workspace workspace);

/// out: f64 [], the limbs' value to nearest even; infinity or NaN if the last limb says so.
void sum_of_squares_finish(const View& limbs, const View& out);
/// The values for gradient clipping: norm is the value's square root, scale is min(max_norm / (norm + 1e-6), 1), or NaN if the norm
/// is; both f64 [].
///
/// If the loss was multiplied by `loss_scale`, f32 [], both are divided by it. `found_inf`, i32 [], is 1 if the
/// norm is not finite, else 0.
void clip_scale(const View& limbs, double max_norm, const View& norm, const View& scale,
                const View& loss_scale = {}, const View& found_inf = {});

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`: the same bits in every limb, and in the results. Nothing is copied to the host, and no
/// workspace is needed.
namespace cuda {

size_t sum_of_squares_workspace(const View& x);
void sum_of_squares(const Stream& stream, const View& x, const View& limbs, Workspace workspace);
void sum_of_squares_finish(const Stream& stream, const View& limbs, const View& out);
void clip_scale(const Stream& stream, const View& limbs, double max_norm, const View& norm,
                const View& scale, const View& loss_scale = {}, const View& found_inf = {});

}  // namespace cuda
}  // namespace sheaf::kernels
