#include "sheaf/kernels/cross_entropy.h"

#include "sheaf/kernels/cpu/cross_entropy_row.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/cross_entropy_operands.h"
#include "sheaf/kernels/embedding.h"

namespace sheaf::kernels::cpu {
void cross_entropy(const View& logits, const View& targets, int64_t ignore_index,
                   const View& losses, const View& lse) {
  check_cross_entropy("cross_entropy", logits, targets, losses, lse);
  if (targets.numel() == 0) return;
  check_targets("cross_entropy", targets, logits.shape.back(), ignore_index);
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
  check_cross_entropy_backward(who, logits, targets, lse, scale, dlogits);
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
