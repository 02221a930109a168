#include "sheaf/kernels/rotary.h"

#include <cmath>

#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {
namespace {

/// Positions whose angles are sums of one coarse and one fine angle: for T tokens, sine and cosine are computed at
/// T/64 + 64 positions and combined in f64. For fewer tokens than that they are computed one by one, as the same
/// sums.
constexpr int64_t kFine = 64;

struct Tables {
  int64_t rows, half;  ///< of all tokens, or of one sequence that represents all
  size_t bytes_per_value;
  Tables(const View& x, const RotaryPart& part, const RotaryPositions& positions)
      : rows(given(positions.begins) ? x.shape[0] * x.shape[1] : x.shape[1]),
        half(part.width / 2),
        bytes_per_value(x.dtype == kF64 ? 8 : 4) {}
  bool has_fine() const { return rows > kFine; }
  size_t fine_bytes() const {
    return has_fine() ? line_align(static_cast<size_t>(2 * kFine * half) * sizeof(double)) : 0;
  }
  size_t bytes() const {
    return fine_bytes() + 2 * line_align(static_cast<size_t>(rows * half) * bytes_per_value);
  }
};

int64_t position_of(const RotaryPositions& positions, int64_t tokens, int64_t row) {
  if (!given(positions.begins)) return positions.first + row;
  const int64_t b = row / tokens, t = row % tokens;
  return positions.first + t - positions.begins.as<int32_t>()[b * positions.begins.strides[0] + t];
}

struct Angle {
  double cosine, sine;
  explicit Angle(double a) : cosine(std::cos(a)), sine(std::sin(a)) {}
};

template <class C>
void fill_tables(const Tables& t, const RotaryFrequencies& frequency, const RotaryPositions& positions, int64_t tokens,
                 double* fine, C* cosine, C* sine) {
  if (t.has_fine())
    parallel_for(t.half, std::max<int64_t>(1, 2048 / kFine), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t r = 0; r < kFine; ++r) {
          const Angle a(static_cast<double>(r) * frequency(i));
          fine[2 * (r * t.half + i)] = a.cosine;
          fine[2 * (r * t.half + i) + 1] = a.sine;
        }
    });
  const auto fill = [&](int64_t row, int64_t r, int64_t i, double c, double s) {
    double fc, fs;
    if (t.has_fine()) {
      fc = fine[2 * (r * t.half + i)], fs = fine[2 * (r * t.half + i) + 1];
    } else {
      const Angle a(static_cast<double>(r) * frequency(i));
      fc = a.cosine, fs = a.sine;
    }
    cosine[row * t.half + i] = static_cast<C>(c * fc - s * fs);
    sine[row * t.half + i] = static_cast<C>(s * fc + c * fs);
  };
  // Without fine angles each element costs two sines and cosines, about forty times as much as a product.
  const int64_t grain = (t.has_fine() ? 8192 : 256) / std::max<int64_t>(t.half, 1);
  parallel_for(t.rows, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end;) {  // rows whose positions share a coarse angle
      const int64_t q = position_of(positions, tokens, row) / kFine;
      int64_t after = row + 1;
      while (after < end && position_of(positions, tokens, after) / kFine == q) ++after;
      for (int64_t i = 0; i < t.half; ++i) {
        const Angle a(static_cast<double>(q * kFine) * frequency(i));
        const double c = frequency.amplitude() * a.cosine, s = frequency.amplitude() * a.sine;
        for (int64_t at = row; at < after; ++at) fill(at, position_of(positions, tokens, at) - q * kFine, i, c, s);
      }
      row = after;
    }
  });
}

}  // namespace

size_t rotary_workspace(const View& x, const RotaryPart& part, const RotaryPositions& positions) {
  return x.rank() == 4 ? Tables(x, part, positions).bytes() : 0;
}

void rotary(const View& x, double theta, const RotaryScaling& scaling, const RotaryPositions& positions,
            const RotaryPart& part, bool inverse, const View& y, Workspace workspace) {
  check_rotary(x, theta, positions, part, y);
  if (x.numel() == 0) return;
  const int64_t tokens = x.shape[1];
  if (given(positions.begins))
    for (int64_t row = 0; row < x.shape[0] * tokens; ++row)
      check<DataError>(position_of(positions, tokens, row) >= 0, "[rotary] token ", row % tokens, " of row ", row / tokens,
                       " stands before the row begins");
  visit_floating("rotary", x.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    using L = Lanes<C>;
    const Tables t(x, part, positions);
    Carver carver("rotary", workspace);
    double* fine = carver.take<double>(t.has_fine() ? 2 * kFine * t.half : 0);
    C *cosine = carver.take<C>(t.rows * t.half), *sine = carver.take<C>(t.rows * t.half);
    fill_tables(t, RotaryFrequencies(theta, t.half, scaling), positions, tokens, fine, cosine, sine);
    const Rows<const T> in("rotary", x);
    const Rows<T> out("rotary", y);
    const int64_t heads = x.shape[2], width = x.shape[3], kept = width - part.width;
    const L sign(inverse ? C(-1) : C(1));
    parallel_for(
        x.shape[0] * tokens, row_grain(heads * width), [&](int64_t begin, int64_t end) {
          for (int64_t bt = begin; bt < end; ++bt) {
            const C *c = cosine + bt % t.rows * t.half, *s = sine + bt % t.rows * t.half;
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
