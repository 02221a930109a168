#include "sheaf/kernels/rotary.h"

#include <cmath>

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

/// Positions whose angles are sums of one coarse and one fine angle: sine and cosine are computed
/// for T/64 + 64 positions instead of T, and combined in f64.
constexpr int64_t kFine = 64;

struct Tables {
  int64_t positions, half;
  size_t bytes_per_value;
  Tables(const View& x, const RotaryPart& part)
      : positions(x.shape[1]), half(part.width / 2), bytes_per_value(x.dtype == kF64 ? 8 : 4) {}
  size_t fine_bytes() const {
    return line_align(static_cast<size_t>(2 * kFine * half) * sizeof(double));
  }
  size_t bytes() const {
    return fine_bytes() + 2 * line_align(static_cast<size_t>(positions * half) * bytes_per_value);
  }
};

template <class C>
void fill_tables(const Tables& t, const RotaryFrequencies& frequency, int64_t first_position,
                 double* fine, C* cosine, C* sine) {
  parallel_for(t.half, std::max<int64_t>(1, 2048 / kFine), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double f = frequency(i);
      for (int64_t r = 0; r < kFine; ++r) {
        fine[2 * (r * t.half + i)] = std::cos(static_cast<double>(r) * f);
        fine[2 * (r * t.half + i) + 1] = std::sin(static_cast<double>(r) * f);
      }
    }
  });
  const int64_t first_coarse = first_position / kFine,
                last_coarse = (first_position + t.positions - 1) / kFine;
  parallel_for(last_coarse - first_coarse + 1, 2, [&](int64_t begin, int64_t end) {
    for (int64_t q = first_coarse + begin; q < first_coarse + end; ++q)
      for (int64_t i = 0; i < t.half; ++i) {
        const double angle = static_cast<double>(q * kFine) * frequency(i);
        const double c = frequency.amplitude() * std::cos(angle),
                     s = frequency.amplitude() * std::sin(angle);
        for (int64_t r = 0; r < kFine; ++r) {
          const int64_t row = q * kFine + r - first_position;
          if (row < 0 || row >= t.positions) continue;
          const double fc = fine[2 * (r * t.half + i)], fs = fine[2 * (r * t.half + i) + 1];
          cosine[row * t.half + i] = static_cast<C>(c * fc - s * fs);
          sine[row * t.half + i] = static_cast<C>(s * fc + c * fs);
        }
      }
  });
}

}  // namespace

size_t rotary_workspace(const View& x, const RotaryPart& part) {
  return x.rank() == 4 ? Tables(x, part).bytes() : 0;
}

void rotary(const View& x, double theta, const RotaryScaling& scaling, int64_t first_position,
            const RotaryPart& part, bool inverse, const View& y, Workspace workspace) {
  check<ShapeError>(x.rank() == 4 && y.shape == x.shape, "[rotary] wants [B, T, H, D], got ",
                    x.shape, " into ", y.shape);
  check<ShapeError>(part.width >= 0 && part.width % 2 == 0 && part.width <= x.shape[3],
                    "[rotary] cannot rotate ", part.width, " elements of each head of ", x.shape,
                    "; wants an even number, at most D");
  check<DTypeError>(y.dtype == x.dtype, "[rotary] ", x.dtype, " into ", y.dtype);
  check<ConfigError>(first_position >= 0 && theta > 0, "[rotary] first position ", first_position,
                     ", theta ", theta);
  if (x.numel() == 0) return;
  visit_floating("rotary", x.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    using L = Lanes<C>;
    const Tables t(x, part);
    Carver carver("rotary", workspace);
    double* fine = carver.take<double>(2 * kFine * t.half);
    C *cosine = carver.take<C>(t.positions * t.half), *sine = carver.take<C>(t.positions * t.half);
    fill_tables(t, RotaryFrequencies(theta, t.half, scaling), first_position, fine, cosine, sine);
    const Rows<const T> in("rotary", x);
    const Rows<T> out("rotary", y);
    const int64_t heads = x.shape[2], width = x.shape[3], kept = width - part.width;
    const L sign(inverse ? C(-1) : C(1));
    parallel_for(
        x.shape[0] * t.positions, row_grain(heads * width), [&](int64_t begin, int64_t end) {
          for (int64_t bt = begin; bt < end; ++bt) {
            const C *c = cosine + bt % t.positions * t.half, *s = sine + bt % t.positions * t.half;
            for (int64_t h = 0; h < heads; ++h) {
              const T* from = in[bt * heads + h];
              T* to = out[bt * heads + h];
              const bool rotated = h < part.heads;
              if (to != from) std::copy_n(from, rotated ? kept : width, to);
              if (!rotated) continue;
              from += kept, to += kept;
              if (part.neighbours) {
                for (int64_t i = 0; i < t.half; ++i) {
                  const C a = static_cast<C>(from[2 * i]), b = static_cast<C>(from[2 * i + 1]);
                  const C ci = c[i], si = inverse ? -s[i] : s[i];
                  to[2 * i] = static_cast<T>(a * ci - b * si);
                  to[2 * i + 1] = static_cast<T>(b * ci + a * si);
                }
                continue;
              }
              for_lanes(t.half, [&](int64_t i, auto n) {
                const L a = load_lanes(from + i, n), b = load_lanes(from + t.half + i, n);
                const L ci = load_lanes(c + i, n), si = sign * load_lanes(s + i, n);
                store_lanes(to + i, a * ci - b * si, n),
                    store_lanes(to + t.half + i, b * ci + a * si, n);
              });
            }
          }
        });
  });
}

}  // namespace sheaf::kernels::cpu
