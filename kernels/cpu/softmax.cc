#include "sheaf/kernels/softmax.h"

#include "sheaf/kernels/cpu/row_math.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

/// Calls f(row of v..., length) for all rows, T being the views' common storage type.
template <class F, class... Views>
void for_rows(const char* who, F f, const View& first, const Views&... others) {
  (check<ShapeError>(first.rank() > 0 && others.shape == first.shape, "[", who, "] shapes ",
                     first.shape, " and ", others.shape),
   ...);
  (check<DTypeError>(others.dtype == first.dtype, "[", who, "] dtypes ", first.dtype, " and ",
                     others.dtype),
   ...);
  if (first.numel() == 0) return;
  visit_floating(who, first.dtype, [&]<class T>() {
    auto run = [&](const Rows<T>& lead, const auto&... rest) {
      parallel_for(lead.count(), row_grain(4 * lead.cols()), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) f(lead[r], rest[r]..., lead.cols());
      });
    };
    run(Rows<T>(who, first), Rows<T>(who, others)...);
  });
}

}  // namespace

void softmax(const View& x, const View& y) {
  for_rows(
      "softmax",
      []<class T>(const T* in, T* out, int64_t n) {
        using C = ComputeType<T>;
        using L = Lanes<C>;
        const L most(row_max(in, n));
        // f32 keeps the exponentials in the output; narrow types compute them twice instead of rounding them twice.
        if constexpr (std::is_same_v<T, C>) {
          for_lanes(n, [&](int64_t i, auto m) {
            store_lanes(out + i, exp(load_lanes(in + i, m) - most), m);
          });
          const L scale(C(1) /
                        row_sum<C>(n, [&](int64_t i, auto m) { return load_lanes(out + i, m); }));
          for_lanes(n, [&](int64_t i, auto m) {
            store_lanes(out + i, load_lanes(out + i, m) * scale, m);
          });
        } else {
          const L scale(C(1) / sum_of_exp(in, n, row_max(in, n)));
          for_lanes(n, [&](int64_t i, auto m) {
            store_lanes(out + i, exp(load_lanes(in + i, m) - most) * scale, m);
          });
        }
      },
      x, y);
}

void softmax_backward(const View& y, const View& dy, const View& dx) {
  for_rows(
      "softmax_backward",
      []<class T>(const T* p, const T* g, T* out, int64_t n) {
        using C = ComputeType<T>;
        using L = Lanes<C>;
        const L dot(row_sum<C>(
            n, [&](int64_t i, auto m) { return load_lanes(p + i, m) * load_lanes(g + i, m); }));
        for_lanes(n, [&](int64_t i, auto m) {
          store_lanes(out + i, load_lanes(p + i, m) * (load_lanes(g + i, m) - dot), m);
        });
      },
      y, dy, dx);
}

void log_softmax(const View& x, const View& y) {
  for_rows(
      "log_softmax",
      []<class T>(const T* in, T* out, int64_t n) {
        using C = ComputeType<T>;
        using L = Lanes<C>;
        const C most = row_max(in, n);
        const L top(most), log_sum(std::log(sum_of_exp(in, n, most)));
        for_lanes(n, [&](int64_t i, auto m) {
          store_lanes(out + i, (load_lanes(in + i, m) - top) - log_sum, m);
        });
      },
      x, y);
}

void log_softmax_backward(const View& y, const View& dy, const View& dx) {
  for_rows(
      "log_softmax_backward",
      []<class T>(const T* logp, const T* g, T* out, int64_t n) {
        using C = ComputeType<T>;
        using L = Lanes<C>;
        const L total(row_sum<C>(n, [&](int64_t i, auto m) { return load_lanes(g + i, m); }));
        for_lanes(n, [&](int64_t i, auto m) {
          store_lanes(out + i, load_lanes(g + i, m) - exp(load_lanes(logp + i, m)) * total, m);
        });
      },
      y, dy, dx);
}

}  // namespace sheaf::kernels::cpu
