#include "sheaf/kernels/attention_sinks.h"

#include <cmath>

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

/// f(row, b, h, t) for each row of out[B, T, H, E], in parallel.
template <class F>
void for_rows(const View& out, F&& f) {
  const int64_t T = out.shape[1], H = out.shape[2];
  parallel_for(out.shape[0] * T * H, row_grain(out.shape[3]), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row, row / (H * T), row % H, row / H % T);
  });
}

/// An element of statistics [B, H, T].
template <class C>
C& at(const View& x, int64_t b, int64_t h, int64_t t) {
  return x.as<C>()[b * x.strides[0] + h * x.strides[1] + t * x.strides[2]];
}

}  // namespace

void attention_sinks(const View& sinks, const View& out, const View& lse) {
  check_attention_sinks("attention_sinks", sinks, out, lse);
  if (lse.numel() == 0) return;
  visit_floating("attention_sinks", out.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    using L = Lanes<C>;
    const Rows<T> rows("attention_sinks", out);
    for_rows(out, [&](int64_t row, int64_t b, int64_t h, int64_t t) {
      C& a = at<C>(lse, b, h, t);
      const C sink = sinks.as<const C>()[h * sinks.strides[0]];
      const bool below = a < sink;  // false for NaN, which is therefore kept
      const C most = below ? sink : a, other = below ? a : sink;
      if (most == -INFINITY) return;  // neither keys nor a sink
      const C all = most + std::log1p(std::exp(other - most));
      const L share(std::exp(a - all));
      a = all;
      T* const y = rows[row];
      for_lanes(rows.cols(), [&](int64_t i, auto n) { store_lanes(y + i, load_lanes(y + i, n) * share, n); });
    });
  });
}

void attention_sinks_backward(const View& sinks, const View& out, const View& lse, const View& dout, const View& dscores) {
  const char* who = "attention_sinks_backward";
  check_attention_sinks_backward(who, sinks, out, lse, dout, dscores);
  if (lse.numel() == 0) return;
  visit_floating(who, out.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    using L = Lanes<C>;
    const Rows<const T> y(who, out), dy(who, dout);
    for_rows(out, [&](int64_t row, int64_t b, int64_t h, int64_t t) {
      L sums(C(0));
      for_lanes(y.cols(), [&](int64_t i, auto n) { sums = fma(load_lanes(y[row] + i, n), load_lanes(dy[row] + i, n), sums); });
      const C sink = sinks.as<const C>()[h * sinks.strides[0]];
      at<C>(dscores, b, h, t) = sink == -INFINITY ? C(0) : -std::exp(sink - at<C>(lse, b, h, t)) * sum(sums);
    });
  });
}

}  // namespace sheaf::kernels::cpu
