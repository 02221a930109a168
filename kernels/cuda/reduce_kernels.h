// The kernels of a reduction.
//
// The elements of an output are divided into chunks of 1024, and a chunk into runs of as many elements as 16 bytes hold: run r goes
// to lane r mod 32. A lane adds its elements in order, lanes are added as a tree, chunks are joined in f64: in order within each of
// up to 2048 groups of consecutive chunks, and groups by a warp, group g in lane g mod 32. (Outputs of fewer than 17 runs leave lanes
// unused, which adds nothing.) Two kernels follow this order: one whose lanes are those of a warp, for an output's elements that are
// adjacent in memory, and one for adjacent outputs, whose lanes are rows of a block's threads.
#pragma once

#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/reduce_state.h"

namespace sheaf::kernels::cuda::reduction {

inline constexpr int kThreads = 256;
inline constexpr int kChunk = 1024;
inline constexpr int kPerLane = kChunk / kWarp;
inline constexpr int64_t kMaxGroups = 2048;

struct Plan {
  Walk<2> kept;     ///< outputs, and where their elements begin in x
  Walk<1> reduced;  ///< offsets from there
  Kind kind;
  double number;  ///< scale or correction
  int64_t groups;
  Divider by_groups;
  int run;    ///< elements
  int lanes;  ///< lanes that take part: a power of two
  bool packs;

  __host__ __device__ int64_t count() const { return reduced.numel; }
  __host__ __device__ int64_t chunks() const { return blocks_for(count(), kChunk); }
  /// First chunk of a group; for group + 1, its end.
  __device__ int64_t first_chunk(int64_t group) const { return by_groups.quotient(chunks() * group); }
  __device__ int length(int64_t chunk) const {
    return static_cast<int>(std::min<int64_t>(kChunk, count() - chunk * kChunk));
  }
  /// Offset of element k of an output.
  __device__ int64_t offset(int64_t k) const {
    return reduced.rank <= 1 ? k * reduced.strides[0][0] : reduced.offset(0, k);
  }
};

template <class W>
__device__ void write(const Plan& plan, int64_t output, const State<W>& state) {
  store_any<W>(plan.kept.dtype[0], plan.kept.data[0], plan.kept.offset(0, output),
               result(plan.kind, state, plan.number));
}
/// Finishes a group: stores the output itself if there is only one group.
template <class W>
__device__ void put(const Plan& plan, Part<W>* parts, int64_t output, int64_t group,
                    const State<W>& state) {
  if (plan.groups > 1)
    parts[output * plan.groups + group] = {state.a, state.b};
  else
    write(plan, output, state);
}

template <class W>
__device__ State<W> from_lane(const State<W>& state, int by) {
  return {__shfl_xor_sync(kFullWarp, state.a, by), __shfl_xor_sync(kFullWarp, state.b, by),
          __shfl_xor_sync(kFullWarp, state.n, by)};
}

/// One group of one output: all lanes of a warp, or some if outputs have few elements. `Source` reads chunks: see below.
template <class T, class Source>
__global__ void __launch_bounds__(kThreads) reduce_rows(Plan plan, Part<Total<Compute<T>>>* parts) {
  using C = Compute<T>;
  using W = Total<C>;
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / plan.lanes;
  const int lane = static_cast<int>(threadIdx.x) % plan.lanes;
  const bool exists = unit < plan.kept.numel * plan.groups;
  const int64_t output = exists ? unit / plan.groups : 0,
                group = exists ? unit - output * plan.groups : 0;
  const int64_t base = exists ? plan.kept.offset(1, output) : 0;

  State<W> state = nothing<W>(plan.kind);
  const Passes<C> passes{plan.kind};
  const int64_t end = plan.first_chunk(group + 1);
  for (int64_t chunk = plan.first_chunk(group); chunk < end; ++chunk) {
    const int n = plan.length(chunk);
    Source source;
    source.open(plan, base, chunk * kChunk, lane, exists ? n : 0);
    if (plan.kind == Kind::argmax) {
      C best = 0;
      int at = -1;
      source.each([&](C x, int k) {
        if (at < 0 || x > best || (x != x && best == best)) best = x, at = k;
      });
      State<W> found{W(best), W(chunk * kChunk + at), at >= 0};
      for (int by = plan.lanes / 2; by > 0; by /= 2)
        found = join<W>(Kind::argmax, found, from_lane(found, by));
      state = join<W>(Kind::argmax, state, found);
      continue;
    }
    C found[3] = {}, centre = 0;
#pragma unroll 1
    for (int pass = 0; pass < passes.count(); ++pass) {
      const Step step = passes.step(pass);
      C value = start<C>(step);
      if (step == Step::add)
        source.each([&](C x, int) { value += x; });
      else
        source.each([&](C x, int) { value = with<T>(step, value, x, centre); });
      for (int by = plan.lanes / 2; by > 0; by /= 2)
        value = both(step, value, __shfl_xor_sync(kFullWarp, value, by));
      if (pass == 0) centre = passes.centre(value, n);
      (pass == 0 ? found[0] : pass == 1 ? found[1] : found[2]) = value;
    }
    state = join<W>(plan.kind, state, passes.state(found, centre, n));
  }
  if (lane == 0 && exists) put(plan, parts, output, group, state);
}

/// A lane's elements of a chunk in registers, read once for all passes; evenly spaced in memory.
template <class T>
struct HeldSource {
  using C = Compute<T>;
  static constexpr int kRun = Pack<T>::kSize, kRuns = kPerLane / kRun;
  uint4 held[kRuns];  // as narrow elements, each would be waited for before the next is loaded
  int first, stride, count;

  __device__ void open(const Plan& plan, int64_t base, int64_t begin, int lane, int n) {
    first = lane * kRun, stride = plan.lanes * kRun, count = n;
    const int64_t apart = plan.reduced.strides[0][0];
    const T* from = static_cast<const T*>(plan.reduced.data[0]) + base + begin * apart;
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      const int at = j * stride + first;
      if (j * stride >= count) break;
      if (plan.packs && at + kRun <= count) {
        held[j] = *reinterpret_cast<const uint4*>(from + at);
      } else {
        Pack<T> pack;
#pragma unroll
        for (int k = 0; k < kRun; ++k) pack.v[k] = at + k < count ? from[(at + k) * apart] : T{};
        held[j] = pressed(pack);
      }
    }
  }
  /// f(element, its place in the chunk), in order.
  template <class F>
  __device__ void each(F f) const {
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      if (j * stride >= count) break;
      const Pack<T> pack = unpressed<T>(held[j]);
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (j * stride + first + k < count) f(convert_to<C>(pack.v[k]), j * stride + first + k);
    }
  }
};

/// Elements of any type and layout, reread by each pass.
template <class C>
struct AnySource {
  const Plan* plan;
  int64_t base, begin;
  int first, count;

  __device__ void open(const Plan& of, int64_t from, int64_t chunk_begin, int lane, int n) {
    plan = &of, base = from, begin = chunk_begin, first = lane * of.run, count = n;
  }
  template <class F>
  __device__ void each(F f) const {
#pragma unroll 1
    for (int run = first; run < count; run += plan->lanes * plan->run)
#pragma unroll 1
      for (int k = run; k < std::min(run + plan->run, count); ++k)
        f(load_any<C>(plan->reduced.dtype[0], plan->reduced.data[0],
                      base + plan->offset(begin + k)),
          k);
  }
};

/// Adjacent outputs, as many as 16 bytes hold for each thread of a row; the rows of threads are the lanes. `inner`:
/// how many are adjacent.
template <class T>
__global__ void __launch_bounds__(kThreads)
    reduce_columns(Plan plan, int64_t inner, int64_t tiles, Part<Total<Compute<T>>>* parts) {
  using C = Compute<T>;
  using W = Total<C>;
  constexpr int kRun = Pack<T>::kSize, kColumns = Pack<T>::kSize;
  __shared__ C shared[kColumns][kThreads];
  __shared__ C shared_found[3][kColumns * kThreads];  // by all passes, for each output of the tile
  C(*const sums)[kThreads] = shared;
  C(*const found)[kColumns * kThreads] = shared_found;
  const int width = kThreads / plan.lanes;  // of a row of threads
  const int lane = static_cast<int>(threadIdx.x) / width,
            column = static_cast<int>(threadIdx.x) % width;
  const int64_t group = blockIdx.x / tiles, tile = blockIdx.x - group * tiles;
  const int64_t packs_of_inner = blocks_for(inner, kColumns),
                packs = plan.kept.numel / inner * packs_of_inner;
  // The first output of pack `p` of this tile, and how many it has.
  const auto output_of = [&](int p) {
    const int64_t pack = tile * width + p, outer = pack / packs_of_inner;
    return outer * inner + (pack - outer * packs_of_inner) * kColumns;
  };
  const auto columns_of = [&](int p) {
    const int64_t pack = tile * width + p;
    if (pack >= packs) return 0;
    return static_cast<int>(std::min<int64_t>(kColumns, inner - pack % packs_of_inner * kColumns));
  };
  const int columns = columns_of(column);
  const T* from = static_cast<const T*>(plan.reduced.data[0]) +
                  (columns > 0 ? plan.kept.offset(1, output_of(column)) : 0);
  const bool whole = plan.packs && columns == kColumns;

  // After the passes a thread finishes one output: output v of pack p of the tile. If a tile has more outputs than threads, an output
  // has one chunk.
  const Passes<C> passes{plan.kind};
  State<W> state = nothing<W>(plan.kind);
  const auto finish = [&](int item, const State<W>& of) {
    const int p = item % width, v = item / width;
    if (v < columns_of(p)) put(plan, parts, output_of(p) + v, group, of);
  };
  const int64_t end = plan.first_chunk(group + 1);
  for (int64_t chunk = plan.first_chunk(group); chunk < end; ++chunk) {
    const int64_t begin = chunk * kChunk;
    const int n = plan.length(chunk), last_pass = passes.count() - 1;
    C centre[kColumns] = {};
#pragma unroll 1
    for (int pass = 0; pass <= last_pass; ++pass) {
      const Step step = passes.step(pass);
      C value[kColumns];
#pragma unroll
      for (int v = 0; v < kColumns; ++v) value[v] = start<C>(step);
#pragma unroll 1
      for (int run = lane * kRun; run < n && columns > 0; run += plan.lanes * kRun) {
        uint4 row[kRun];  // as elements, narrow ones would take a register each
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
          if (run + k >= n) break;
          const T* at = from + plan.offset(begin + run + k);
          if (whole) {
            row[k] = *reinterpret_cast<const uint4*>(at);
          } else {
            Pack<T> pack;
#pragma unroll
            for (int v = 0; v < kColumns; ++v) pack.v[v] = v < columns ? at[v] : T{};
            memcpy(&row[k], &pack, sizeof pack);
          }
        }
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
          if (run + k >= n) break;
          Pack<T> pack;
          memcpy(static_cast<void*>(&pack), &row[k], sizeof pack);
#pragma unroll
          for (int v = 0; v < kColumns; ++v) {
            const C x = convert_to<C>(pack.v[v]);
            value[v] = step == Step::add ? value[v] + x : with<T>(step, value[v], x, centre[v]);
          }
        }
      }
      for (int by = plan.lanes / 2; by > 0; by /= 2) {
        if (lane >= by && lane < 2 * by)
#pragma unroll
          for (int v = 0; v < kColumns; ++v) sums[v][threadIdx.x] = value[v];
        __syncthreads();
        if (lane < by)
#pragma unroll
          for (int v = 0; v < kColumns; ++v)
            value[v] = both(step, value[v], sums[v][threadIdx.x + by * width]);
        __syncthreads();
      }
      if (lane == 0)
#pragma unroll
        for (int v = 0; v < kColumns; ++v) found[pass][v * width + column] = value[v];
      __syncthreads();
#pragma unroll
      for (int v = 0; v < kColumns; ++v)
        if (pass == 0) centre[v] = passes.centre(found[0][v * width + column], n);
    }
    for (int item = static_cast<int>(threadIdx.x); item < width * kColumns; item += kThreads) {
      const C of_item[3] = {found[0][item], last_pass > 0 ? found[1][item] : C(0),
                            last_pass > 1 ? found[2][item] : C(0)};
      const State<W> one = passes.state(of_item, passes.centre(of_item[0], n), n);
      if (item < kThreads)
        state = join<W>(plan.kind, state, one);
      else
        finish(item, one);
    }
  }
  if (static_cast<int>(threadIdx.x) < width * kColumns)
    finish(static_cast<int>(threadIdx.x), state);
}

/// Joins the groups of an output, one warp per output.
template <class W>
__global__ void __launch_bounds__(kThreads) join_groups(Plan plan, const Part<W>* parts) {
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (output >= plan.kept.numel) return;
  State<W> state = nothing<W>(plan.kind);
  for (int64_t group = lane; group < plan.groups; group += kWarp) {
    const Part<W> part = parts[output * plan.groups + group];
    const int64_t begin = plan.first_chunk(group) * kChunk,
                  end = plan.first_chunk(group + 1) * kChunk;
    state = join<W>(plan.kind, state,
                    {part.a, part.b, (end < plan.count() ? end : plan.count()) - begin});
  }
  for (int by = kWarp / 2; by > 0; by /= 2) state = join<W>(plan.kind, state, from_lane(state, by));
  if (lane == 0) write(plan, output, state);
}

}  // namespace sheaf::kernels::cuda::reduction
