#include "sheaf/kernels/cross_entropy.h"
#include "sheaf/kernels/cross_entropy_operands.h"
#include "sheaf/kernels/cuda/log_sum_exp.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kMostThreads = 512;  // of a block

// A block processes a row and reads it once.
template <class T>
__global__ void __launch_bounds__(kLogSumExpThreads, 2)
    cross_entropy_forward(Rows<const T> logits, Indices targets, int64_t ignore_index,
                          Compute<T>* losses, Compute<T>* lse) {
  using C = Compute<T>;
  __shared__ C scratch[2][kWarp];
  const int64_t row = blockIdx.x, target = targets[row], n = logits.cols;
  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[row] = lse[row] = C(0);
    return;
  }
  const T* x = logits[row];
  LogSumExp<T> seen;
  seen.add_row(n, [&](int64_t at) { return load_raw_shifted(x, at, n); });
  const C total = seen.over_block(scratch);
  if (threadIdx.x != 0) return;
  lse[row] = total;
  losses[row] = target >= 0 && target < n ? total - convert_to<C>(x[target])
                                          : std::numeric_limits<C>::quiet_NaN();
}

// Blocks process rows from the last to the first: the forward has left the last ones in the cache. Pieces are aligned to 16 bytes of
// dlogits; if dlogits is logits, a thread writes only what it has read.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy_backward_row(Rows<const T> logits, Indices targets, int64_t ignore_index,
                               Rows<const Compute<T>> lse, Rows<const Compute<T>> scales,
                               Rows<T> dlogits) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  const int64_t row = logits.count - 1 - blockIdx.x, target = targets[row], n = logits.cols;
  const bool ignored = target == ignore_index;
  const C log_sum = *lse[row];
  C scale = *scales[scales.count == 1 ? 0 : row];
  if (target < 0 || target >= n) scale = std::numeric_limits<C>::quiet_NaN();
  const T* x = logits[row];
  T* out = dlogits[row];
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(out) % 16 / sizeof(T));
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kSize - past; at < n;
       at += static_cast<int64_t>(blockDim.x) * kSize) {
    if (at < 0) {  // the piece in which the row begins
      for (int64_t i = 0; i < at + kSize && i < n; ++i) {
        const C p = exponential<T>(convert_to<C>(x[i]) - log_sum);
        out[i] = ignored ? T{} : element<T>((p - C(i == target)) * scale);
      }
      continue;
    }
    Pack<T> pack{};
    if (!ignored) {
      pack = load_shifted_chunk(x, at, n);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const C p = exponential<T>(convert_to<C>(pack.v[k]) - log_sum);
        pack.v[k] = element<T>((p - C(at + k == target)) * scale);
      }
    }
    store_chunk(out, at, n, pack);
  }
}

}  // namespace

void cross_entropy(const Stream& stream, const View& logits, const View& targets,
                   int64_t ignore_index, const View& losses, const View& lse) {
  const char* who = "cross_entropy";
  check_cross_entropy(who, logits, targets, losses, lse);
  if (targets.numel() == 0) return;
  visit_floating(who, logits.dtype, [&]<class T>() {
    using C = Compute<T>;
    const Rows<const T> rows = rows_of<const T>(who, logits);
    launch(who, stream, {.blocks = targets.numel(), .threads = log_sum_exp_threads<T>(rows.cols)},
           cross_entropy_forward<T>, rows, indices_of(who, targets), ignore_index, losses.as<C>(),
           lse.as<C>());
  });
}

void cross_entropy_backward(const Stream& stream, const View& logits, const View& targets,
                            int64_t ignore_index, const View& lse, const View& scale,
                            const View& dlogits) {
  const char* who = "cross_entropy_backward";
  check_cross_entropy_backward(who, logits, targets, lse, scale, dlogits);
  if (logits.numel() == 0) return;
  visit_floating(who, logits.dtype, [&]<class T>() {
    using C = Compute<T>;
    const Rows<const T> rows = rows_of<const T>(who, logits);
    launch(who, stream,
           {.blocks = rows.count,
            .threads = threads_for(blocks_for(rows.cols, Pack<T>::kSize * 2), kMostThreads)},
           cross_entropy_backward_row<T>, rows, indices_of(who, targets), ignore_index,
           elements_of<const C>(who, lse), elements_of<const C>(who, scale),
           rows_of<T>(who, dlogits));
  });
}

}  // namespace sheaf::kernels::cuda
