#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/softmax.h"

// A team of threads processes a row: 1 to 32 lanes of a warp, or a block. It reads the row once, 16 bytes at a time, and keeps it in
// registers; only rows longer than all registers of a block are read twice.
namespace sheaf::kernels::cuda {
namespace {

constexpr int kMaxTeam = 1024;
constexpr int kHeld = 8;       // packs of a row in a thread's registers
constexpr int kHeldOfTwo = 4;  // and of two rows

template <class C>
__device__ C infinity() {
  return std::is_same_v<C, double> ? C(__longlong_as_double(0x7ff0000000000000))
                                   : C(__uint_as_float(0x7f800000u));
}
/// e^x for an output of type T: the fast form's error is far below the rounding to a narrow one.
template <class T>
__device__ Compute<T> exp_for(Compute<T> x) {
  if constexpr (std::is_same_v<T, double>)
    return ::exp(x);
  else if constexpr (std::is_same_v<T, float>)
    return expf(x);
  else
    return __expf(x);
}
__device__ float log_of(float x) { return logf(x); }
__device__ double log_of(double x) { return ::log(x); }

struct Add {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a + b;
  }
};
/// The larger number; if one is NaN, the other.
struct Max {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return b > a || a != a ? b : a;
  }
};

/// op over the team's values, for all of its threads, in one order. `parts` (32) serves one call.
template <class C, class Op>
__device__ C reduce_team(C x, int team, C none, C* parts, Op op) {
  for (int step = (team < kWarp ? team : kWarp) / 2; step > 0; step /= 2)
    x = op(x, __shfl_xor_sync(kFullWarp, x, step));
  if (team <= kWarp) return x;
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  x = lane < team / kWarp ? parts[lane] : none;
  for (int step = kWarp / 2; step > 0; step /= 2) x = op(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

/// A thread's row, and its index in the team.
template <int N>
struct Place {
  __device__ Place(const Walk<N>& walk, int team)
      : row((static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / team),
        lane(static_cast<int>(threadIdx.x) % team),
        exists(row < walk.numel) {}
  template <class T>
  __device__ T* of(const Walk<N>& walk, int which) const {
    return static_cast<T*>(walk.data[which]) + (exists ? walk.offset(which, row) : 0);
  }
  int64_t row;
  int lane;
  bool exists;
};

/// Rows as long as `cols`; `packs`: all begin at 16-byte addresses.
struct RowForm {
  int64_t cols;
  int team;
  bool packs;
};

template <class T>
__device__ int count_at(int64_t at, int64_t cols) {
  return at >= cols ? 0 : cols - at < Pack<T>::kSize ? static_cast<int>(cols - at) : Pack<T>::kSize;
}
/// Elements past the end read as `none`.
template <class T>
__device__ Pack<T> load_part(const T* from, int count, bool packs, T none) {
  if (packs && count == Pack<T>::kSize) return load_pack(from);
  Pack<T> out;
#pragma unroll
  for (int k = 0; k < Pack<T>::kSize; ++k) out.v[k] = k < count ? from[k] : none;
  return out;
}
template <class T>
__device__ uint4 load_pressed(const T* from, int count, bool packs, T none) {
  if (packs && count == Pack<T>::kSize) return *reinterpret_cast<const uint4*>(from);
  return pressed(load_part(from, count, false, none));
}
template <class T>
__device__ void store_part(T* to, const Pack<T>& pack, int count, bool packs) {
  if (packs && count == Pack<T>::kSize) return store_global_pack(to, pack);
#pragma unroll
  for (int k = 0; k < Pack<T>::kSize; ++k)
    if (k < count) to[k] = pack.v[k];
}

/// y of x, given the row's maximum and sum of exponentials.
template <class T>
__device__ Pack<T> outputs(const Pack<T>& in, Compute<T> most, Compute<T> sum, bool log) {
  using C = Compute<T>;
  const C scale = log ? log_of(sum) : C(1) / sum;
  Pack<T> out;
#pragma unroll
  for (int k = 0; k < Pack<T>::kSize; ++k) {
    const C x = convert_to<C>(in.v[k]) - most;
    out.v[k] = element<T>(log ? x - scale : exp_for<T>(x) * scale);
  }
  return out;
}

template <class T>
__global__ void __launch_bounds__(kMaxTeam) forward(Walk<2> walk, RowForm row, bool log) {
  using C = Compute<T>;
  __shared__ C parts[2][kWarp];
  const Place<2> place(walk, row.team);
  const T* in = place.of<T>(walk, 1);
  const int64_t step = int64_t{row.team} * Pack<T>::kSize, first = place.lane * Pack<T>::kSize;
  const C lowest = -infinity<C>();

  uint4 held[kHeld];
  C most = lowest;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (j * step >= row.cols) break;
    const int count = place.exists ? count_at<T>(j * step + first, row.cols) : 0;
    held[j] = load_pressed(in + j * step + first, count, row.packs, element<T>(lowest));
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (j * step >= row.cols) break;
    const Pack<T> pack = unpressed<T>(held[j]);
#pragma unroll
    for (int k = 0; k < Pack<T>::kSize; ++k) most = Max()(most, convert_to<C>(pack.v[k]));
  }
  most = reduce_team(most, row.team, lowest, parts[0], Max());

  C sum = 0;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (j * step >= row.cols) break;
    const Pack<T> pack = unpressed<T>(held[j]);
#pragma unroll
    for (int k = 0; k < Pack<T>::kSize; ++k) sum += exp_for<T>(convert_to<C>(pack.v[k]) - most);
  }
  sum = reduce_team(sum, row.team, C(0), parts[1], Add());

  if (!place.exists) return;
  T* out = place.of<T>(walk, 0);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (j * step >= row.cols) break;
    store_part(out + j * step + first, outputs(unpressed<T>(held[j]), most, sum, log),
               count_at<T>(j * step + first, row.cols), row.packs);
  }
}

/// use(at, load(at)) for a thread's packs of a long row; kAtOnce are loaded at once.
template <int kAtOnce, class Load, class Use>
__device__ void for_packs(int64_t first, int64_t step, int64_t cols, Load load, Use use) {
  for (int64_t at = first; at < cols; at += kAtOnce * step) {
    decltype(load(at)) raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) raw[u] = load(at + u * step);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (at + u * step < cols) use(at + u * step, raw[u]);
  }
}

/// A block per row, which is read twice: the first time for both its maximum and the sum of its exponentials.
template <class T>
__global__ void __launch_bounds__(kMaxTeam) forward_long(Walk<2> walk, RowForm row, bool log) {
  using C = Compute<T>;
  __shared__ C parts[2][kWarp];
  const Place<2> place(walk, row.team);
  const T* in = place.of<T>(walk, 1);
  T* out = place.of<T>(walk, 0);
  const int64_t step = int64_t{row.team} * Pack<T>::kSize, first = place.lane * Pack<T>::kSize;
  const C lowest = -infinity<C>();

  C most = lowest, sum = 0;  // of what this thread has read
  for_packs<4>(first, step, row.cols, [&](int64_t at) { return load_pressed(in + at, count_at<T>(at, row.cols), row.packs, element<T>(lowest)); },
            [&](int64_t, const uint4& raw) {
    const Pack<T> pack = unpressed<T>(raw);
    C top = most;
#pragma unroll
    for (int k = 0; k < Pack<T>::kSize; ++k) top = Max()(top, convert_to<C>(pack.v[k]));
    if (top > most) sum *= exp_for<T>(most - top), most = top;
#pragma unroll
    for (int k = 0; k < Pack<T>::kSize; ++k) {
      const C x = convert_to<C>(pack.v[k]);
      if (most > lowest || x != x) sum += exp_for<T>(x - most);
    }
  });
  const C mine = most;
  most = reduce_team(mine, row.team, lowest, parts[0], Max());
  if (mine < most) sum *= exp_for<T>(mine - most);
  sum = reduce_team(sum, row.team, C(0), parts[1], Add());

  for_packs<4>(first, step, row.cols, [&](int64_t at) { return load_pressed(in + at, count_at<T>(at, row.cols), row.packs, element<T>(lowest)); },
            [&](int64_t at, const uint4& raw) {
    store_part(out + at, outputs<T>(unpressed<T>(raw), most, sum, log), count_at<T>(at, row.cols), row.packs);
  });
}

/// A pack's contribution to the row's sum: y dy, or dy alone for the logarithm.
template <class T>
__device__ Compute<T> weight(const Pack<T>& y, const Pack<T>& dy, bool log) {
  using C = Compute<T>;
  C sum = 0;
#pragma unroll
  for (int k = 0; k < Pack<T>::kSize; ++k) {
    const C g = convert_to<C>(dy.v[k]);
    sum += log ? g : convert_to<C>(y.v[k]) * g;
  }
  return sum;
}
template <class T>
__device__ Pack<T> gradients(const Pack<T>& y, const Pack<T>& dy, Compute<T> sum, bool log) {
  using C = Compute<T>;
  Pack<T> out;
#pragma unroll
  for (int k = 0; k < Pack<T>::kSize; ++k) {
    const C p = convert_to<C>(y.v[k]), g = convert_to<C>(dy.v[k]);
    out.v[k] = element<T>(log ? g - exp_for<T>(p) * sum : p * (g - sum));
  }
  return out;
}

template <class T>
__global__ void __launch_bounds__(kMaxTeam) backward(Walk<3> walk, RowForm row, bool log) {
  using C = Compute<T>;
  __shared__ C parts[kWarp];
  const Place<3> place(walk, row.team);
  const T *y = place.of<T>(walk, 1), *dy = place.of<T>(walk, 2);
  const int64_t step = int64_t{row.team} * Pack<T>::kSize, first = place.lane * Pack<T>::kSize;

  uint4 held[kHeldOfTwo], held_dy[kHeldOfTwo];
#pragma unroll
  for (int j = 0; j < kHeldOfTwo; ++j) {
    if (j * step >= row.cols) break;
    const int count = place.exists ? count_at<T>(j * step + first, row.cols) : 0;
    held[j] = load_pressed(y + j * step + first, count, row.packs, element<T>(C(0)));
    held_dy[j] = load_pressed(dy + j * step + first, count, row.packs, element<T>(C(0)));
  }
  C sum = 0;
#pragma unroll
  for (int j = 0; j < kHeldOfTwo; ++j) {
    if (j * step >= row.cols) break;
    sum += weight(unpressed<T>(held[j]), unpressed<T>(held_dy[j]), log);
  }
  sum = reduce_team(sum, row.team, C(0), parts, Add());

  if (!place.exists) return;
  T* out = place.of<T>(walk, 0);
#pragma unroll
  for (int j = 0; j < kHeldOfTwo; ++j) {
    if (j * step >= row.cols) break;
    store_part(out + j * step + first,
               gradients(unpressed<T>(held[j]), unpressed<T>(held_dy[j]), sum, log),
               count_at<T>(j * step + first, row.cols), row.packs);
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxTeam) backward_long(Walk<3> walk, RowForm row, bool log) {
  using C = Compute<T>;
  __shared__ C parts[kWarp];
  const Place<3> place(walk, row.team);
  const T *y = place.of<T>(walk, 1), *dy = place.of<T>(walk, 2);
  T* out = place.of<T>(walk, 0);
  const int64_t step = int64_t{row.team} * Pack<T>::kSize, first = place.lane * Pack<T>::kSize;
  struct Two {
    uint4 y, dy;
  };
  const auto load = [&](int64_t at) {
    const int count = count_at<T>(at, row.cols);
    const T none = element<T>(C(0));
    return Two{load_pressed(y + at, count, row.packs, none), load_pressed(dy + at, count, row.packs, none)};
  };

  C sum = 0;
  for_packs<2>(first, step, row.cols, load, [&](int64_t, const Two& raw) { sum += weight(unpressed<T>(raw.y), unpressed<T>(raw.dy), log); });
  sum = reduce_team(sum, row.team, C(0), parts, Add());
  for_packs<2>(first, step, row.cols, load, [&](int64_t at, const Two& raw) {
    store_part(out + at, gradients(unpressed<T>(raw.y), unpressed<T>(raw.dy), sum, log), count_at<T>(at, row.cols), row.packs);
  });
}

/// Threads for a row of `packs`, of which a thread can hold `held`: depends on the width alone.
int team_for(int64_t packs, int held) {
  if (packs <= kWarp) {
    int lanes = 1;
    while (lanes < packs) lanes *= 2;
    return lanes;
  }
  if (packs <= int64_t{kWarp} * held) return kWarp;
  const int64_t threads = blocks_for(packs, held / 2);  // half full: more rows in flight
  return static_cast<int>(std::min<int64_t>(blocks_for(threads, kWarp) * kWarp, kMaxTeam));
}

/// `views`: output first.
template <int N, class Held, class Long>
void run(const char* who, const Stream& stream, bool log, int held, std::array<View, N> views,
         Held held_kernel, Long long_kernel) {
  for (const View& v : views) {
    check<ShapeError>(v.rank() > 0 && v.shape == views[0].shape, "[", who, "] shapes ",
                      views[0].shape, " and ", v.shape);
    check<DTypeError>(v.dtype == views[0].dtype, "[", who, "] dtypes ", views[0].dtype, " and ",
                      v.dtype);
    check<ShapeError>(v.strides.back() == 1 || v.shape.back() <= 1 || v.numel() == 0, "[", who,
                      "] the last dimension must be dense, its stride is ", v.strides.back());
  }
  if (views[0].numel() == 0) return;
  const int64_t cols = views[0].shape.back();
  const int64_t size = 16 / static_cast<int64_t>(size_of(views[0].dtype));
  for (View& v : views) v.shape.erase(v.rank() - 1), v.strides.erase(v.strides.rank() - 1);
  const Walk<N> walk = walk_of<N>(who, views, Order::row_major);
  RowForm row{cols, team_for(blocks_for(cols, size), held), true};
  for (int n = 0; n < N; ++n) {
    row.packs = row.packs && aligned16(walk.data[n]);
    for (int d = 0; d < walk.rank; ++d) row.packs = row.packs && walk.strides[n][d] % size == 0;
  }
  const int threads = row.team > kWarp ? row.team : 128;
  const LaunchShape shape{.blocks = blocks_for(walk.numel, threads / row.team), .threads = threads};
  visit_floating(who, views[0].dtype, [&]<class T>() {
    const bool fits = cols <= int64_t{row.team} * held * Pack<T>::kSize;
    launch(who, stream, shape,
           fits ? held_kernel.template operator()<T>() : long_kernel.template operator()<T>(), walk,
           row, log);
  });
}

void run_forward(const char* who, const Stream& stream, bool log, const View& x, const View& y) {
  run<2>(
      who, stream, log, kHeld, {y, x}, [&]<class T>() { return &forward<T>; },
      [&]<class T>() { return &forward_long<T>; });
}
void run_backward(const char* who, const Stream& stream, bool log, const View& y, const View& dy,
                  const View& dx) {
  run<3>(
      who, stream, log, kHeldOfTwo, {dx, y, dy}, [&]<class T>() { return &backward<T>; },
      [&]<class T>() { return &backward_long<T>; });
}

}  // namespace

void softmax(const Stream& stream, const View& x, const View& y) {
  run_forward("softmax", stream, false, x, y);
}
void softmax_backward(const Stream& stream, const View& y, const View& dy, const View& dx) {
  run_backward("softmax_backward", stream, false, y, dy, dx);
}
void log_softmax(const Stream& stream, const View& x, const View& y) {
  run_forward("log_softmax", stream, true, x, y);
}
void log_softmax_backward(const Stream& stream, const View& y, const View& dy, const View& dx) {
  run_backward("log_softmax_backward", stream, true, y, dy, dx);
}

}  // namespace sheaf::kernels::cuda
