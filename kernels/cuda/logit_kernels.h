// Kernels over a chunk of a linear head's logits: losses, their gradients in place of the logits, sums.
#pragma once

#include <limits>

#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/log_sum_exp.h"
#include "sheaf/kernels/table_part.h"

namespace sheaf::kernels::cuda::head {

inline constexpr int64_t kMostColumns = 1 << 30;  // of losses_and_gradients
inline constexpr int kGradientThreads = 256, kLossThreads = 1024;
inline constexpr int64_t kPadding = 8;  // elements: rows of logits begin at 16 bytes in any type

// Shared memory for a row while its log-sum-exp is computed: two blocks share a multiprocessor if half of it holds most of a row,
// else one block has it alone.
inline constexpr int64_t kShare = 108 << 10, kAlone = 2 * kShare;

/// For losses_and_gradients.
template <class G>
inline constexpr bool takes_dloss = std::is_same_v<G, f16>;

template <class C>
__device__ C probability(C logit, C lse) {
  const C x = logit - lse;
  return std::is_same_v<C, float> ? C(expf(static_cast<float>(x))) : C(::exp(x));
}

/// Caps the logits of a chunk: one block per row.
template <class C>
__global__ void __launch_bounds__(kGradientThreads) cap_logits(C* logits, int64_t pitch, int64_t n, C cap) {
  C* const row = logits + static_cast<int64_t>(blockIdx.x) * pitch;
  for (int64_t at = threadIdx.x; at < n; at += blockDim.x)
    row[at] = cap * (std::is_same_v<C, float> ? C(tanhf(static_cast<float>(row[at] / cap))) : C(::tanh(row[at] / cap)));
}

/// The gradient of a logit before the cap, from that after it; inverse_cap 0: no cap.
template <class C>
__device__ C before_cap(C gradient, C logit, C inverse_cap) {
  const C t = logit * inverse_cap;
  return inverse_cap == 0 ? gradient : gradient * (C(1) - t * t);
}

/// A row's loss and z_loss lse²; and the derivative of the latter by lse: a z_loss of 0 changes no bit.
template <class C>
__device__ C with_z_loss(C loss, C z_loss, C lse) {
  return z_loss == 0 ? loss : rounded_sum(loss, rounded_product(rounded_product(z_loss, lse), lse));
}
template <class C>
__device__ C z_slope(C z_loss, C lse) {
  return z_loss == 0 ? C(1) : rounded_sum(C(1), rounded_product(C(2) * z_loss, lse));
}

/// cross_entropy and logit_gradients in one, bit for bit: one block per row, from the last row, which is still in the cache, to the
/// first. The first `held_batches` rounds of the block are read once; the rest, which did not fit, is reread, from the cache if it is
/// there. Rows are padded as in the latter. Gradients are those of `dloss` times the loss; except for f16 that is 1.
template <class C, class G>
__global__ void __launch_bounds__(kLogSumExpThreads, 2)
    losses_and_gradients(const C* logits, int64_t pitch, int n, int held_batches,
                         const int64_t* targets, int64_t ignore_index, C dloss, C inverse_cap, C z_loss, C* losses, G* out) {
  constexpr int kSize = Pack<C>::kSize, kBatch = kLogSumExpBatch;
  __shared__ C scratch[2][kWarp];
  const int64_t row = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x, target = targets[row];
  const C* const x = logits + row * pitch;
  G* const to = out + row * pitch;
  const int threads = static_cast<int>(blockDim.x), begin = static_cast<int>(threadIdx.x) * kSize,
            step = threads * kSize;
  if (target == ignore_index) {
    for (int at = begin; at < n; at += step) *reinterpret_cast<Group<G, kSize>*>(to + at) = {};
    if (threadIdx.x == 0) losses[row] = C(0);
    return;
  }
  const bool inside = target >= 0 && target < n;
  const int hit = inside ? static_cast<int>(target) : -kSize;
  const auto load = [&](int first, Pack<C>(&packs)[kBatch]) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (first + u * step < n) packs[u] = load_pack(x + first + u * step);
  };
  const auto gradient_of = [&](C g, C logit) {  // in the order of logit_gradients
    if constexpr (takes_dloss<G>) g = g * dloss;
    return element<G>(before_cap(g, logit, inverse_cap));
  };
  LogSumExp<C> seen;
  Pack<C>* held = dynamic_shared<Pack<C>>() + threadIdx.x;
  for (int first = begin, batch = 0; first < n; first += kBatch * step, ++batch) {
    Pack<C> packs[kBatch];
    load(first, packs);
    if (batch < held_batches) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) held[u * threads] = packs[u];
      held += kBatch * threads;
    }
    seen.add(packs, step, n - first);
  }
  C lse = seen.over_block(scratch);
  if (!inside) {
    lse = std::numeric_limits<C>::quiet_NaN();
    if (threadIdx.x == 0) losses[row] = lse;
  }
  const C of_lse = z_slope(z_loss, lse);
  // A thread uses only what it has read itself: out may be the memory of logits.
  held = dynamic_shared<Pack<C>>() + threadIdx.x;
  for (int first = begin, batch = 0; first < n; first += kBatch * step, ++batch) {
    Pack<C> packs[kBatch];
    if (batch < held_batches) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) packs[u] = held[u * threads];
      held += kBatch * threads;
    } else {
      load(first, packs);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int at = first + u * step;
      if (at >= n) break;
      Group<G, kSize> gradient;
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        gradient.v[k] = gradient_of(rounded_product(probability(packs[u].v[k], lse), of_lse), packs[u].v[k]);
      if (const int place = hit - at; place >= 0 && place < kSize) {
#pragma unroll
        for (int k = 0; k < kSize; ++k)
          if (k == place) {
            losses[row] = with_z_loss(lse - packs[u].v[k], z_loss, lse);
            const C p = rounded_product(probability(packs[u].v[k], lse), of_lse);
            gradient.v[k] = gradient_of(rounded_sum(p, C(-1)), packs[u].v[k]);
          }
      }
      *reinterpret_cast<Group<G, kSize>*>(to + at) = gradient;
    }
  }
}

/// lse and the target's logit of a row of part of the vocabulary: one block per row. Rows are padded as below.
template <class C>
__global__ void __launch_bounds__(kLogSumExpThreads, 2)
    part_values(const C* logits, int64_t pitch, int64_t n, TablePart part, const int64_t* targets,
                int64_t ignore_index, C* lse, C* target_logits) {
  __shared__ C scratch[2][kWarp];
  const int64_t row = blockIdx.x, token = targets[row], target = token - part.first;
  if (token == ignore_index) {
    if (threadIdx.x != 0) return;
    lse[row] = part.first == 0 && n > 0 ? C(0) : -std::numeric_limits<C>::infinity();
    target_logits[row] = C(0);
    return;
  }
  const C* const x = logits + row * pitch;
  LogSumExp<C> seen;
  seen.add_row(n, [&](int64_t at) { return *reinterpret_cast<const uint4*>(x + at); });
  const C total = seen.over_block(scratch);
  if (threadIdx.x != 0) return;
  lse[row] = total;
  target_logits[row] = target >= 0 && target < n        ? x[target]
                       : token >= 0 && token < part.all ? C(0)
                                                        : std::numeric_limits<C>::quiet_NaN();
}

/// A logit's gradient: for a loss, (p - onehot(target)) * dloss for a probability p, times (1 + 2 z_loss lse).
template <class C>
struct OfLoss {
  const C* dloss;  ///< null: `constant`
  C constant, z_loss;
  struct Row {
    C scale, of_lse;
    __device__ C operator()(C p, bool is_target) const {
      return rounded_sum(rounded_product(p, of_lse), -C(is_target)) * scale;
    }
  };
  __device__ Row row(int64_t, bool bad, C lse) const {
    return {bad ? std::numeric_limits<C>::quiet_NaN() : dloss ? *dloss : constant, z_slope(z_loss, lse)};
  }
};
/// For values of part of the vocabulary: p * dlse + onehot(target) * dtarget.
template <class C>
struct OfPart {
  Rows<const C> dlse, dtarget;
  int64_t first_row;
  struct Row {
    C dlse, dtarget;
    __device__ C operator()(C p, bool is_target) const {
      return rounded_sum(rounded_product(p, dlse), is_target ? dtarget : C(0));
    }
  };
  __device__ Row row(int64_t r, bool bad, C) const {
    const C dlse_of_row = *dlse[first_row + r];
    return {bad ? std::numeric_limits<C>::quiet_NaN() : dlse_of_row, *dtarget[first_row + r]};
  }
};

/// Gradients of logits, as defined by `From`, in the products' type G: one block per row, from the last row, which is still in the
/// cache, to the first. out may be the memory of logits. Rows are padded to whole packs, which may be read and written beyond n.
template <class C, class G, class From>
__global__ void __launch_bounds__(kGradientThreads)
    logit_gradients(const C* logits, int64_t pitch, int64_t n, TablePart part,
                    const int64_t* targets, int64_t ignore_index, C inverse_cap, const C* lse, From from, G* out) {
  constexpr int kSize = Pack<G>::kSize, kParts = kSize / Pack<C>::kSize;
  const int64_t row = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x, token = targets[row],
                target = token - part.first;
  const bool ignored = token == ignore_index;
  const C log_sum = lse[row];
  const auto gradient = from.row(row, token < 0 || token >= part.all, log_sum);
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kSize; at < n;
       at += static_cast<int64_t>(blockDim.x) * kSize) {
    Pack<C> in[kParts];
    Pack<G> pack{};
    if (!ignored) {
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        in[p] = load_pack(logits + row * pitch + at + p * Pack<C>::kSize);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const C logit = in[k / Pack<C>::kSize].v[k % Pack<C>::kSize];
        pack.v[k] = element<G>(before_cap(gradient(probability(logit, log_sum), at + k == target), logit, inverse_cap));
      }
    }
    store_pack(out + row * pitch + at, pack);
  }
}

/// For losses computed by cross_entropy, with lse 0 where they do not count.
template <class C>
__global__ void __launch_bounds__(kLossThreads) add_z_losses(C* losses, const C* lse, int64_t rows, C z_loss) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kLossThreads + threadIdx.x;
  if (row < rows) losses[row] = with_z_loss(losses[row], z_loss, lse[row]);
}

/// The sum in f64: each thread's terms in order, then the threads' sums in pairs. One block.
template <class C>
__global__ void __launch_bounds__(kLossThreads) sum_losses(const C* losses, int64_t rows, C* loss) {
  __shared__ double sums[kLossThreads];
  double sum = 0;
  for (int64_t r = threadIdx.x; r < rows; r += kLossThreads) sum += static_cast<double>(losses[r]);
  sums[threadIdx.x] = sum;
  for (int half = kLossThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *loss = static_cast<C>(sums[0]);
}

}  // namespace sheaf::kernels::cuda::head
