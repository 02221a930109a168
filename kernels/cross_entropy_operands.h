// Requirements of the cross-entropy kernels of all devices on their operands.
#pragma once

#include "sheaf/core/view.h"

namespace sheaf::kernels {

inline void check_row_values(const char* who, const View& logits, const View& targets,
                             const View& row_values) {
  check<ShapeError>(logits.rank() >= 1 && targets.numel() * logits.shape.back() == logits.numel(),
                    "[", who, "] targets ", targets.shape, " for logits ", logits.shape);
  check<ShapeError>(row_values.numel() == targets.numel(), "[", who, "] row values ",
                    row_values.shape, " for targets ", targets.shape);
  check<DTypeError>(row_values.dtype == (logits.dtype == kF64 ? kF64 : kF32), "[", who,
                    "] row values in ", row_values.dtype);
}

inline void check_cross_entropy(const char* who, const View& logits, const View& targets,
                                const View& losses, const View& lse) {
  check_row_values(who, logits, targets, losses), check_row_values(who, logits, targets, lse);
  check<ShapeError>(losses.contiguous() && lse.contiguous(), "[", who,
                    "] row values must be dense");
}

inline void check_cross_entropy_backward(const char* who, const View& logits, const View& targets,
                                         const View& lse, const View& scale, const View& dlogits) {
  check_row_values(who, logits, targets, lse);
  check<ShapeError>(dlogits.shape == logits.shape && dlogits.dtype == logits.dtype &&
                        scale.dtype == lse.dtype &&
                        (scale.numel() == 1 || scale.numel() == lse.numel()),
                    "[", who, "] scale ", scale.shape, " and dlogits ", dlogits.shape,
                    " for logits ", logits.shape);
}

}  // namespace sheaf::kernels
