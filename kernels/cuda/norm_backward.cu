#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/norm.h"
#include "sheaf/kernels/norm_operands.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kRowThreads = 256;  // of a block at most, for registers

// y = xhat * weight (+ bias), xhat = (x - mean) * rstd, mean = 0 for rms_norm: dx = rstd * (g -
// mean(g) - xhat * mean(g * xhat)) with g = dy * weight; rms_norm has no mean(g). If dsum is given, it is added to
// dx before that is rounded to T, but after the product is: so wide elements have the bits of adding it afterwards.
template <class T>
struct Backward {
  Rows<const T> dy, x, dsum;
  const T* weight;
  Rows<const Compute<T>> mean, rstd;
  Rows<T> dx;
  bool has_mean, has_dx;
  Compute<T>* partials;  ///< a set of dweight's and dbias's sums for each of `sets` row groups
  int64_t sets;
  int row_threads;  ///< that process rows set, set + sets, ...: a warp, or the block
};

/// A pair of sums over the threads of a row. `turn` alternates, so that one barrier is enough.
template <class C>
__device__ void row_sums(C& a, C& b, int row_threads, C (*scratch)[kRowThreads / kWarp]) {
  a = warp_sum(a), b = warp_sum(b);
  if (row_threads == kWarp) return;
  const int warps = row_threads / kWarp;
  if (threadIdx.x % kWarp == 0)
    scratch[0][threadIdx.x / kWarp] = a, scratch[1][threadIdx.x / kWarp] = b;
  __syncthreads();
  a = scratch[0][0], b = scratch[1][0];
  for (int w = 1; w < warps; ++w) a += scratch[0][w], b += scratch[1][w];
}

/// Blocks whose registers a multiprocessor must hold: with more, variables would be spilled to memory.
constexpr int blocks_at_once(int packs) { return packs == 1 ? 3 : packs == 2 ? 2 : 1; }

// A thread owns the same columns in all of its rows: kPacks pieces of 16 bytes, their sums in registers. If there are enough
// registers, the next row is loaded while one is summed.
template <class T, int kPacks, bool kAdds>
__global__ void __launch_bounds__(kRowThreads, blocks_at_once(kPacks))
    norm_backward(Backward<T> b) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize;
  constexpr bool kAhead = kPacks == 1;
  __shared__ C scratch[2][2][kRowThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x) % b.row_threads;
  const int64_t set = static_cast<int64_t>(blockIdx.x) * (blockDim.x / b.row_threads) +
                      static_cast<int>(threadIdx.x) / b.row_threads;
  if (set >= b.sets) return;  // whole warps, of blocks that have no barrier
  const int width = static_cast<int>(b.x.cols);
  // As raw words: elements of 2 bytes would take a register each.
  uint4 weight[kPacks], dy[kPacks], x[kPacks], dsum[kPacks];  // dsum only with kAdds
  uint4 next_dy[kPacks], next_x[kPacks], next_dsum[kPacks];
  C next_scale = C(0), next_centre = C(0);
  C dweight[kPacks][kSize] = {}, dbias[kPacks][kSize] = {};
  const auto column = [&](int p) { return (p * b.row_threads + thread) * kSize; };
  const auto load_next = [&](int64_t row) {
    const T *from_dy = b.dy[row], *from_x = b.x[row], *from_dsum = kAdds ? b.dsum[row] : nullptr;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      next_dy[p] = load_raw(from_dy, column(p), width);
      next_x[p] = load_raw(from_x, column(p), width);
      if (kAdds) next_dsum[p] = load_raw(from_dsum, column(p), width);
    }
    next_scale = *b.rstd[row];  // in time, too: else the row would wait for it, and for all loads before it
    if (b.has_mean) next_centre = *b.mean[row];
  };
  if (b.weight)
#pragma unroll
    for (int p = 0; p < kPacks; ++p) weight[p] = load_raw(b.weight, column(p), width);
  if (kAhead && set < b.x.count) load_next(set);
  int turn = 0;
  for (int64_t row = set; row < b.x.count; row += b.sets, turn ^= 1) {
    if (!kAhead) load_next(row);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      dy[p] = next_dy[p], x[p] = next_x[p];
      if (kAdds) dsum[p] = next_dsum[p];
    }
    const C scale = next_scale, centre = next_centre;
    if (kAhead && row + b.sets < b.x.count) load_next(row + b.sets);
    const auto xhat_of = [&](int p, int k) {
      return (convert_to<C>(element_of<T>(x[p], k)) - centre) * scale;
    };
    const auto g_of = [&](int p, int k) {
      const C d = convert_to<C>(element_of<T>(dy[p], k));  // 0 past the end
      return b.weight ? d * convert_to<C>(element_of<T>(weight[p], k)) : d;
    };
    C sum_g = C(0), sum_gx = C(0);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const C d = convert_to<C>(element_of<T>(dy[p], k)), g = g_of(p, k), xhat = xhat_of(p, k);
        dweight[p][k] += d * xhat, dbias[p][k] += d;
        sum_g += g, sum_gx += g * xhat;
      }
    if (!b.has_dx) continue;
    row_sums(sum_g, sum_gx, b.row_threads, scratch[turn]);
    const C mean_g = b.has_mean ? sum_g / static_cast<C>(width) : C(0),
            mean_gx = sum_gx / static_cast<C>(width);
    T* out = b.dx[row];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Pack<T> pack;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const C d = rounded_product(scale, g_of(p, k) - mean_g - xhat_of(p, k) * mean_gx);
        pack.v[k] = element<T>(kAdds ? convert_to<C>(element_of<T>(dsum[p], k)) + d : d);
      }
      store_chunk(out, column(p), width, pack);
    }
  }
  if (!b.partials) return;
  C* to = b.partials + set * 2 * width;
#pragma unroll
  for (int p = 0; p < kPacks; ++p)
#pragma unroll
    for (int k = 0; k < kSize; ++k)
      if (column(p) + k < width)
        to[column(p) + k] = dweight[p][k], to[width + column(p) + k] = dbias[p][k];
}

// Rows too wide for registers: they are read twice, and the sums stay in the workspace.
template <class T, bool kAdds>
__global__ void __launch_bounds__(kRowThreads) norm_backward_wide(Backward<T> b) {
  using C = Compute<T>;
  __shared__ C scratch[2][2][kRowThreads / kWarp];
  const int64_t width = b.x.cols, set = blockIdx.x;
  C* dweight = b.partials ? b.partials + set * 2 * width : nullptr;
  C* dbias = b.partials ? dweight + width : nullptr;
  if (dweight)
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) dweight[i] = dbias[i] = C(0);
  int turn = 0;
  for (int64_t row = set; row < b.x.count; row += b.sets, turn ^= 1) {
    const T *dy = b.dy[row], *x = b.x[row], *dsum = b.dsum[row];
    const C scale = *b.rstd[row], centre = b.has_mean ? *b.mean[row] : C(0);
    C sum_g = C(0), sum_gx = C(0);
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const C d = convert_to<C>(dy[i]), xhat = (convert_to<C>(x[i]) - centre) * scale,
              g = b.weight ? d * convert_to<C>(b.weight[i]) : d;
      if (dweight) dweight[i] += d * xhat;
      if (dweight && b.has_mean) dbias[i] += d;
      sum_g += g, sum_gx += g * xhat;
    }
    if (!b.has_dx) continue;
    row_sums(sum_g, sum_gx, b.row_threads, scratch[turn]);
    const C mean_g = b.has_mean ? sum_g / static_cast<C>(width) : C(0),
            mean_gx = sum_gx / static_cast<C>(width);
    T* out = b.dx[row];
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
      const C d = convert_to<C>(dy[i]), xhat = (convert_to<C>(x[i]) - centre) * scale,
              g = b.weight ? d * convert_to<C>(b.weight[i]) : d;
      const C dx = rounded_product(scale, g - mean_g - xhat * mean_gx);
      out[i] = element<T>(kAdds ? convert_to<C>(dsum[i]) + dx : dx);
    }
  }
}

constexpr int kSumRows = 32;  // threads that share a column

/// Where the sums of one of the vectors are stored, if anywhere.
struct Sums {
  void* data;
  DType dtype;
};
/// The partial sums of each column of dweight (blockIdx.y = 0) and dbias: thread s of a column adds
/// sets s, s + 32, ..., then these are added in order.
template <class C>
__global__ void __launch_bounds__(kSumRows* kWarp)
    add_partials(const C* partials, int64_t sets, int64_t width, Sums dweight, Sums dbias) {
  __shared__ C sums[kSumRows][kWarp];
  const Sums out = blockIdx.y == 0 ? dweight : dbias;
  if (!out.data) return;
  if (blockIdx.y == 1) partials += width;
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  C sum = C(0);
  if (column < width)
    for (int64_t s = first; s < sets; s += kSumRows) sum += partials[s * 2 * width + column];
  sums[first][lane] = sum;
  __syncthreads();
  if (first != 0 || column >= width) return;
  for (int s = 1; s < kSumRows; ++s) sum += sums[s][lane];
  store_any<C>(out.dtype, out.data, column, sum);
}

/// How a backward is distributed over threads; depends only on shape and dtype.
struct Plan {
  int packs, row_threads, takers;  // row groups in a block
  int64_t sets;
  explicit Plan(const View& x) {
    const int64_t chunks = blocks_for(x.shape.back() * static_cast<int64_t>(size_of(x.dtype)), 16);
    packs = chunks <= kRowThreads       ? 1
            : chunks <= 2 * kRowThreads ? 2
            : chunks <= 4 * kRowThreads ? 4
                                        : 0;
    row_threads = threads_for(packs ? blocks_for(chunks, packs) : chunks, kRowThreads);
    takers = row_threads == kWarp ? 4 : 1;
    // As many blocks as the 132 multiprocessors of an H100 or H200 hold at once: with more, the last would leave
    // most of them idle, and the partial sums would be large compared to the rows.
    const int64_t rows = x.shape.back() == 0 ? 0 : x.numel() / x.shape.back();
    const int held = packs ? blocks_at_once(packs) * kRowThreads : 512;
    const int64_t most = int64_t{132} * (held / (row_threads * takers) * takers);
    sets = std::min(rows, std::clamp<int64_t>(rows / 8, 132, most));
  }
};

template <class T, bool kAdds>
auto kernel_for(int packs) {
  return packs == 1   ? norm_backward<T, 1, kAdds>
         : packs == 2 ? norm_backward<T, 2, kAdds>
         : packs == 4 ? norm_backward<T, 4, kAdds>
                      : norm_backward_wide<T, kAdds>;
}

bool given_any(const View& dweight, const View& dbias) { return given(dweight) || given(dbias); }

size_t partials_bytes(const View& x) {
  return static_cast<size_t>(Plan(x).sets * 2 * x.shape.back()) * (x.dtype == kF64 ? 8 : 4);
}

void backward(const char* who, const Stream& stream, bool has_mean, const View& dy, const View& x,
              const View& weight, const View& mean, const View& rstd, const View& dx,
              const View& dweight, const View& dbias, const View& dsum, Workspace workspace) {
  const int64_t width = x.shape.back();
  if (width == 0) return;
  const bool sums = given_any(dweight, dbias);
  check<ShapeError>(!sums || workspace.bytes >= partials_bytes(x), '[', who,
                    "] workspace too small: ", workspace.bytes, " bytes");
  visit_floating(who, x.dtype, [&]<class T>() {
    using C = Compute<T>;
    const Plan plan(x);
    C* partials = sums ? static_cast<C*>(workspace.data) : nullptr;
    const Backward<T> b{rows_of<const T>(who, dy),
                        rows_of<const T>(who, x),
                        rows_of<const T>(who, given(dsum) ? dsum : dy),
                        weight.as<const T>(),
                        elements_of<const C>(who, has_mean ? mean : rstd),
                        elements_of<const C>(who, rstd),
                        rows_of<T>(who, given(dx) ? dx : dy),
                        has_mean,
                        given(dx),
                        partials,
                        plan.sets,
                        plan.row_threads};
    launch(
        who, stream,
        {.blocks = blocks_for(plan.sets, plan.takers), .threads = plan.row_threads * plan.takers},
        given(dsum) ? kernel_for<T, true>(plan.packs) : kernel_for<T, false>(plan.packs), b);
    if (sums)
      launch(who, stream,
             {.blocks = blocks_for(width, kWarp),
              .threads = kSumRows * kWarp,
              .blocks_y = given(dbias) ? 2 : 1},
             add_partials<C>, static_cast<const C*>(partials), plan.sets, width,
             Sums{dweight.data, dweight.dtype}, Sums{dbias.data, dbias.dtype});
  });
}

}  // namespace

size_t layer_norm_backward_workspace(const View& x, const View&, const View& dweight,
                                     const View& dbias) {
  return given_any(dweight, dbias) ? partials_bytes(x) : 0;
}

void layer_norm_backward(const Stream& stream, const View& dy, const View& x, const View& weight,
                         const View& mean, const View& rstd, const View& dx, const View& dweight,
                         const View& dbias, Workspace workspace, const View& dsum) {
  const char* who = "layer_norm_backward";
  check_backward(who, dy, x, weight, &mean, rstd, dx, dweight, dbias, dsum);
  backward(who, stream, true, dy, x, weight, mean, rstd, dx, dweight, dbias, dsum, workspace);
}

size_t rms_norm_backward_workspace(const View& x, const View&, const View& dweight) {
  return given(dweight) ? partials_bytes(x) : 0;
}

void rms_norm_backward(const Stream& stream, const View& dy, const View& x, const View& weight,
                       const View& rstd, const View& dx, const View& dweight, Workspace workspace,
                       const View& dsum) {
  const char* who = "rms_norm_backward";
  check_backward(who, dy, x, weight, nullptr, rstd, dx, dweight, View{}, dsum);
  backward(who, stream, false, dy, x, weight, View{}, rstd, dx, dweight, View{}, dsum, workspace);
}

}  // namespace sheaf::kernels::cuda
