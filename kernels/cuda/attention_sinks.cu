#include "sheaf/kernels/attention_sinks.h"
#include "sheaf/kernels/cuda/rows.h"

// A team of lanes of one warp processes a row [E]: one lane for each 16 bytes of it, up to a warp. Its first lane passes the
// log-sum-exp to the others, so no barrier is needed before it is written.
namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float exp_of(float x) { return expf(x); }
__device__ double exp_of(double x) { return ::exp(x); }
__device__ float log1p_of(float x) { return log1pf(x); }
__device__ double log1p_of(double x) { return ::log1p(x); }

/// Rows of [B, T, H, E] in the order of b, t, h, and where their statistics are.
template <class T>
struct SinkRows {
  using C = Compute<std::remove_const_t<T>>;
  Rows<T> rows;
  const C* sinks;
  int64_t sink_stride;
  int64_t queries, heads;
  int team;

  /// The index of a row's statistics in [B, H, T].
  __device__ int64_t at(int64_t row, int64_t of_b, int64_t of_h, int64_t of_t) const {
    return row / (heads * queries) * of_b + row % heads * of_h + row / heads % queries * of_t;
  }
  __device__ C sink(int64_t row) const { return sinks[row % heads * sink_stride]; }
};

template <class T>
struct Statistics {
  Compute<T>* data;
  int64_t b, h, t;  ///< strides
};
template <class T>
Statistics<T> statistics_of(const View& v) {
  return {v.as<Compute<T>>(), v.strides[0], v.strides[1], v.strides[2]};
}

/// Passes the first lane's value to the whole team.
template <class C>
__device__ C from_first(C x, int team) {
  return __shfl_sync(kFullWarp, x, static_cast<int>(threadIdx.x) % kWarp / team * team);
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_sinks(SinkRows<T> r, Statistics<T> lse) {
  using C = Compute<T>;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / r.team;
  const int lane = static_cast<int>(threadIdx.x) % r.team;
  const bool exists = row < r.rows.count;
  C* const statistic = lse.data + (exists ? r.at(row, lse.b, lse.h, lse.t) : 0);
  const C a = from_first(exists && lane == 0 ? *statistic : C(0), r.team), s = exists ? r.sink(row) : C(0);
  const bool below = a < s;  // false for NaN, which is therefore kept
  const C most = below ? s : a, other = below ? a : s;
  if (!exists || most == -INFINITY) return;  // neither keys nor a sink
  const C all = most + log1p_of(exp_of(other - most)), share = exp_of(a - all);
  if (lane == 0) *statistic = all;
  T* const y = r.rows[row];
  for (int64_t i = lane * Pack<T>::kSize; i < r.rows.cols; i += r.team * Pack<T>::kSize) {
    Pack<T> pack = load_chunk(y, i, r.rows.cols);
#pragma unroll
    for (int k = 0; k < Pack<T>::kSize; ++k) pack.v[k] = element<T>(convert_to<C>(pack.v[k]) * share);
    store_chunk(y, i, r.rows.cols, pack);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) sink_gradients(SinkRows<const T> r, Rows<const T> dout, Statistics<T> lse, Statistics<T> dscores) {
  using C = Compute<T>;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / r.team;
  const int lane = static_cast<int>(threadIdx.x) % r.team;
  const bool exists = row < r.rows.count;
  C sum = 0;
  for (int64_t i = lane * Pack<T>::kSize; exists && i < r.rows.cols; i += r.team * Pack<T>::kSize) {
    const uint4 raw_y = load_raw(r.rows[row], i, r.rows.cols), raw_dy = load_raw(dout[row], i, r.rows.cols);
    const Pack<T> y = unpressed<T>(raw_y), dy = unpressed<T>(raw_dy);
#pragma unroll
    for (int k = 0; k < Pack<T>::kSize; ++k) sum += convert_to<C>(y.v[k]) * convert_to<C>(dy.v[k]);
  }
  for (int step = r.team / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  if (!exists || lane != 0) return;
  const C s = r.sink(row);
  dscores.data[r.at(row, dscores.b, dscores.h, dscores.t)] =
      s == -INFINITY ? C(0) : -exp_of(s - lse.data[r.at(row, lse.b, lse.h, lse.t)]) * sum;
}

int team_for(int64_t cols, int64_t pack) {
  int team = 1;
  while (team < kWarp && team * pack < cols) team *= 2;
  return team;
}

template <class T>
SinkRows<T> sink_rows(const char* who, const View& sinks, const View& out) {
  return {rows_of<T>(who, out), sinks.as<const typename SinkRows<T>::C>(), sinks.strides[0], out.shape[1], out.shape[2],
          team_for(out.shape[3], Pack<std::remove_const_t<T>>::kSize)};
}

template <class T>
LaunchShape shape_of(const SinkRows<T>& r) {
  return {.blocks = blocks_for(r.rows.count * r.team, kThreads), .threads = kThreads};
}

}  // namespace

void attention_sinks(const Stream& stream, const View& sinks, const View& out, const View& lse) {
  const char* who = "attention_sinks";
  check_attention_sinks(who, sinks, out, lse);
  if (lse.numel() == 0) return;
  visit_floating(who, out.dtype, [&]<class T>() {
    const auto rows = sink_rows<T>(who, sinks, out);
    launch(who, stream, shape_of(rows), add_sinks<T>, rows, statistics_of<T>(lse));
  });
}

void attention_sinks_backward(const Stream& stream, const View& sinks, const View& out, const View& lse, const View& dout,
                              const View& dscores) {
  const char* who = "attention_sinks_backward";
  check_attention_sinks_backward(who, sinks, out, lse, dout, dscores);
  if (lse.numel() == 0) return;
  visit_floating(who, out.dtype, [&]<class T>() {
    const auto rows = sink_rows<const T>(who, sinks, out);
    launch(who, stream, shape_of(rows), sink_gradients<T>, rows, rows_of<const T>(who, dout), statistics_of<T>(lse),
           statistics_of<T>(dscores));
  });
}

}  // namespace sheaf::kernels::cuda
