#include "sheaf/kernels/norm.h"

#include "sheaf/kernels/cpu/row_math.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/norm_operands.h"

namespace sheaf::kernels::cpu {
namespace {

constexpr int64_t kBlockRows = 64;

int64_t row_count(const View& x) { return x.shape.back() == 0 ? 0 : x.numel() / x.shape.back(); }
int64_t block_count(const View& x) { return (row_count(x) + kBlockRows - 1) / kBlockRows; }

/// Partial sums of `vectors` column sums, one set per block of rows.
size_t partials_bytes(const View& x, int vectors) {
  return line_align(static_cast<size_t>(block_count(x) * vectors * x.shape.back()) *
                    (x.dtype == kF64 ? 8 : 4));
}

/// out[j] = the partials of column j over all blocks, in order.
template <class C>
void add_partials(const char* who, const C* partials, int64_t blocks, int64_t block_stride,
                  const View& out) {
  visit_floating(who, out.dtype, [&]<class Out>() {
    if constexpr (std::is_same_v<ComputeType<Out>, C>) {
      const int64_t width = out.shape[0];
      parallel_for((width + kLanes - 1) / kLanes, row_grain(blocks * kLanes),
                   [&](int64_t begin, int64_t end) {
                     for_lanes(std::min(end * kLanes, width) - begin * kLanes,
                               [&](int64_t i, auto n) {
                                 i += begin * kLanes;
                                 Lanes<C> sum(C(0));
                                 for (int64_t b = 0; b < blocks; ++b)
                                   sum = sum + load_lanes(partials + b * block_stride + i, n);
                                 store_lanes(out.as<Out>() + i, sum, n);
                               });
                   });
    }
  });
}

/// Forward of both norms, of x or, if kAdds, of the rounded sum of x and r; the mean is stored if the norm has one.
template <bool kCentred, bool kAdds>
void norm(const char* who, const View& x, const View& r, const View& weight, const View& bias,
          double eps, const View& sum, const View& y, const View& mean, const View& rstd) {
  if (x.numel() == 0) return;
  visit_floating(who, x.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    using L = Lanes<C>;
    const Rows<const T> in(who, x), addends(who, kAdds ? r : x);
    const Rows<T> out(who, y), sums(who, kAdds ? sum : y);
    const int64_t width = in.cols();
    const T *w = given(weight) ? weight.as<T>() : nullptr,
            *b = given(bias) ? bias.as<T>() : nullptr;
    parallel_for(in.count(), row_grain(2 * width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *first = in[row], *second = addends[row], *from = kAdds ? sums[row] : first;
        T *total = sums[row], *to = out[row];
        // The first pass over the row computes the sum, later ones read it from the cache.
        const auto made = [&](int64_t i, auto n) {
          if constexpr (kAdds)
            store_lanes(total + i, load_lanes(first + i, n) + load_lanes(second + i, n), n);
          return load_lanes(from + i, n);
        };
        C centre = C(0), squares = C(0);
        if constexpr (kCentred) {
          centre = row_sum<C>(width, made) / static_cast<C>(width);
          // Lanes past the end would count as (0 - centre)²: give them x = centre.
          const int64_t whole = width / kLanes * kLanes;
          squares = row_sum<C>(whole, [&](int64_t i, auto n) {
            const L d = load_lanes(from + i, n) - L(centre);
            return d * d;
          });
          for (int64_t i = whole; i < width; ++i) {
            const C d = static_cast<C>(from[i]) - centre;
            squares = squares + d * d;
          }
          mean.as<C>()[row] = centre;
        } else {
          squares = row_sum<C>(width, [&](int64_t i, auto n) {
            const L v = made(i, n);
            return v * v;
          });
        }
        const C scale_value =
            C(1) / std::sqrt(squares / static_cast<C>(width) + static_cast<C>(eps));
        rstd.as<C>()[row] = scale_value;
        const L scale(scale_value);
        for_lanes(width, [&](int64_t i, auto n) {
          L v = load_lanes(from + i, n);
          if constexpr (kCentred) v = v - L(centre);
          v = v * scale;
          if (kCentred && b)
            v = w ? fma(v, load_lanes(w + i, n), load_lanes(b + i, n)) : v + load_lanes(b + i, n);
          else if (w)
            v = v * load_lanes(w + i, n);
          store_lanes(to + i, v, n);
        });
      }
    });
  });
}

/// Backward of both norms. y = xhat * weight (+ bias), xhat = (x - mean) * rstd, mean = 0 for rms_norm: dx = rstd * (g - mean(g) -
/// xhat * mean(g * xhat)) with g = dy * weight; rms_norm has no mean(g). If dsum is given, it is added to dx.
template <bool kCentred>
void norm_backward(const char* who, const View& dy, const View& x, const View& weight,
                   const View& mean, const View& rstd, const View& dx, const View& dweight,
                   const View& dbias, const View& dsum, Workspace workspace) {
  if (dy.shape.back() == 0) return;
  visit_floating(who, x.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    using L = Lanes<C>;
    const Rows<const T> dy_rows(who, dy), x_rows(who, x);
    const Rows<T> dx_rows(who, given(dx) ? dx : dy);
    const Rows<const T> dsum_rows(who, given(dsum) ? dsum : dy);
    const Elements<C> rstd_of(who, rstd), mean_of(who, kCentred ? mean : rstd);
    const int64_t rows = x_rows.count(), width = x_rows.cols(), blocks = block_count(x);
    const T* w = given(weight) ? weight.as<T>() : nullptr;
    const bool sums = given(dweight) || given(dbias), has_dx = given(dx);
    constexpr int kSums = kCentred ? 2 : 1;  // of dweight, followed by dbias
    C* partials = sums ? Carver(who, workspace).take<C>(blocks * kSums * width) : nullptr;
    parallel_for(
        blocks, std::max<int64_t>(1, row_grain(width) / kBlockRows),
        [&](int64_t begin, int64_t end) {
          for (int64_t b = begin; b < end; ++b) {
            C* dw = partials ? partials + b * kSums * width : nullptr;
            C* db = partials && kCentred ? dw + width : nullptr;
            if (partials) std::fill_n(dw, kSums * width, C(0));
            for (int64_t r = b * kBlockRows; r < std::min((b + 1) * kBlockRows, rows); ++r) {
              const T *g = dy_rows[r], *in = x_rows[r];
              const L scale(rstd_of[r]), centre(kCentred ? mean_of[r] : C(0));
              auto normal = [&](int64_t i, auto n) {
                return (load_lanes(in + i, n) - centre) * scale;
              };
              auto weighted = [&](int64_t i, auto n) {
                const L d = load_lanes(g + i, n);
                return w ? d * load_lanes(w + i, n) : d;
              };
              if (has_dx) {
                // Masked lanes are harmless: there g is zero.
                const C inverse = C(1) / static_cast<C>(width);
                const L mean_g(kCentred ? row_sum<C>(width, weighted) * inverse : C(0));
                const L mean_gx(
                    row_sum<C>(width,
                               [&](int64_t i, auto n) { return weighted(i, n) * normal(i, n); }) *
                    inverse);
                T* out = dx_rows[r];
                const T* more = given(dsum) ? dsum_rows[r] : nullptr;
                for_lanes(width, [&](int64_t i, auto n) {
                  const L xhat = normal(i, n), d = load_lanes(g + i, n);
                  L t = w ? d * load_lanes(w + i, n) : d;
                  if (kCentred) t = t - mean_g;
                  if (partials) {
                    store_lanes(dw + i, fma(d, xhat, load_lanes(dw + i, n)), n);
                    if (kCentred) store_lanes(db + i, load_lanes(db + i, n) + d, n);
                  }
                  t = scale * (t - xhat * mean_gx);
                  store_lanes(out + i, more ? load_lanes(more + i, n) + t : t, n);
                });
              } else {
                for_lanes(width, [&](int64_t i, auto n) {
                  const L d = load_lanes(g + i, n);
                  store_lanes(dw + i, fma(d, normal(i, n), load_lanes(dw + i, n)), n);
                  if (kCentred) store_lanes(db + i, load_lanes(db + i, n) + d, n);
                });
              }
            }
          }
        });
    if (given(dweight)) add_partials(who, partials, blocks, kSums * width, dweight);
    if (given(dbias)) add_partials(who, partials + width, blocks, kSums * width, dbias);
  });
}

}  // namespace

void layer_norm(const View& x, const View& weight, const View& bias, double eps, const View& y,
                const View& mean, const View& rstd) {
  const char* who = "layer_norm";
  check_forward(who, x, weight, bias, y, &mean, rstd);
  norm<true, false>(who, x, View{}, weight, bias, eps, View{}, y, mean, rstd);
}

void add_layer_norm(const View& x, const View& r, const View& weight, const View& bias, double eps,
                    const View& sum, const View& y, const View& mean, const View& rstd) {
  const char* who = "add_layer_norm";
  check_forward(who, x, weight, bias, y, &mean, rstd, &r, &sum);
  norm<true, true>(who, x, r, weight, bias, eps, sum, y, mean, rstd);
}

size_t layer_norm_backward_workspace(const View& x, const View&, const View& dweight,
                                     const View& dbias) {
  return given(dweight) || given(dbias) ? partials_bytes(x, 2) : 0;
}

void layer_norm_backward(const View& dy, const View& x, const View& weight, const View& mean,
                         const View& rstd, const View& dx, const View& dweight, const View& dbias,
                         Workspace workspace, const View& dsum) {
  const char* who = "layer_norm_backward";
  check_backward(who, dy, x, weight, &mean, rstd, dx, dweight, dbias, dsum);
  norm_backward<true>(who, dy, x, weight, mean, rstd, dx, dweight, dbias, dsum, workspace);
}

void rms_norm(const View& x, const View& weight, double eps, const View& y, const View& rstd) {
  const char* who = "rms_norm";
  check_forward(who, x, weight, View{}, y, nullptr, rstd);
  norm<false, false>(who, x, View{}, weight, View{}, eps, View{}, y, View{}, rstd);
}

void add_rms_norm(const View& x, const View& r, const View& weight, double eps, const View& sum,
                  const View& y, const View& rstd) {
  const char* who = "add_rms_norm";
  check_forward(who, x, weight, View{}, y, nullptr, rstd, &r, &sum);
  norm<false, true>(who, x, r, weight, View{}, eps, sum, y, View{}, rstd);
}

size_t rms_norm_backward_workspace(const View& x, const View&, const View& dweight) {
  return given(dweight) ? partials_bytes(x, 1) : 0;
}

void rms_norm_backward(const View& dy, const View& x, const View& weight, const View& rstd,
                       const View& dx, const View& dweight, Workspace workspace, const View& dsum) {
  const char* who = "rms_norm_backward";
  check_backward(who, dy, x, weight, nullptr, rstd, dx, dweight, View{}, dsum);
  norm_backward<false>(who, dy, x, weight, View{}, rstd, dx, dweight, View{}, dsum, workspace);
}

}  // namespace sheaf::kernels::cpu
