#include "sheaf/kernels/cross_entropy.h"

#include "sheaf/kernels/cpu/cross_entropy_row.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/embedding.h"

namespace sheaf::kernels::cpu {
namespace {

void check_operands(const char* who, const View& logits, const View& targets,
                    const View& row_values) {
  check<ShapeError>(logits.rank() >= 1 && targets.numel() * logits.shape.back() == logits.numel(),
                    "[", who, "] targets ", targets.shape, " for logits ", logits.shape);
  check<ShapeError>(row_values.numel() == targets.numel(), "[", who, "] row values ",
                    row_values.shape, " for targets ", targets.shape);
  check<DTypeError>(row_values.dtype == (logits.dtype == kF64 ? kF64 : kF32), "[", who,
                    "] row values in ", row_values.dtype);
}

}  // namespace

void cross_entropy(const View& logits, const View& targets, int64_t ignore_index,
                   const View& losses, const View& lse) {
  check_operands("cross_entropy", logits, targets, losses),
      check_operands("cross_entropy", logits, targets, lse);
  check<ShapeError>(losses.contiguous() && lse.contiguous(),
                    "[cross_entropy] row values must be dense");
  if (targets.numel() == 0) return;
  check_tokens("cross_entropy", targets, logits.shape.back(), ignore_index);
  const Indices target_of("cross_entropy", targets);
  visit_floating("cross_entropy", logits.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const Rows<const T> rows("cross_entropy", logits);
    parallel_for(rows.count(), row_grain(2 * rows.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t target = target_of[r];
        const bool ignored = target == ignore_index;
        const C log_sum = ignored ? C(0) : log_sum_exp(rows[r], rows.cols());
        lse.as<C>()[r] = log_sum;
        losses.as<C>()[r] = ignored ? C(0) : log_sum - static_cast<C>(rows[r][target]);
      }
    });
  });
}

void cross_entropy_backward(const View& logits, const View& targets, int64_t ignore_index,
                            const View& lse, const View& scale, const View& dlogits) {
  const char* who = "cross_entropy_backward";
  check_operands(who, logits, targets, lse);
  check<ShapeError>(dlogits.shape == logits.shape && dlogits.dtype == logits.dtype &&
                        scale.dtype == lse.dtype &&
                        (scale.numel() == 1 || scale.numel() == lse.numel()),
                    "[", who, "] scale ", scale.shape, " and dlogits ", dlogits.shape,
                    " for logits ", logits.shape);
  if (logits.numel() == 0) return;
  const Indices target_of(who, targets);
  visit_floating(who, logits.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const Rows<const T> rows(who, logits);
    const Rows<T> out(who, dlogits);
    const Elements<C> lse_of(who, lse), scale_of(who, scale);
    const int64_t step = scale.numel() == 1 ? 0 : 1;
    parallel_for(rows.count(), row_grain(2 * rows.cols()), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t target = target_of[r];
        if (target == ignore_index)
          std::fill_n(out[r], rows.cols(), T(0.0f));
        else
          cross_entropy_row_backward(rows[r], rows.cols(), target, lse_of[r], scale_of[r * step],
                                     out[r]);
      }
    });
  });
}

}  // namespace sheaf::kernels::cpu
