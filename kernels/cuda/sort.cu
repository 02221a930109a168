#include <bit>

#include "sheaf/kernels/cuda/gather.h"
#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/cuda/numbers.h"
#include "sheaf/kernels/cuda/sort.h"
#include "sheaf/kernels/cuda/workspace.h"

// A radix sort from the lowest digit up: tiles count their digits, one block turns the counts into offsets, tiles store their keys
// there without changing their order. Counting is integer work, so atomics are harmless.
namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kRounds = 8;  // keys of a lane in a tile
constexpr int kTile = kThreads * kRounds;
constexpr int kMaxBits = 9, kMaxRadix = 1 << kMaxBits;  // of a digit
constexpr int kScanThreads = 1024;

struct Digit {
  int shift, bits;
  __device__ int of(uint32_t key) const {
    return static_cast<int>(key >> shift) & ((1 << bits) - 1);
  }
  __host__ __device__ int radix() const { return 1 << bits; }
};

/// How the sort is divided into passes.
struct Passes {
  int count, bits;
  explicit Passes(int64_t size) {
    const int all = static_cast<int>(std::bit_width(static_cast<uint64_t>(size)));
    count = static_cast<int>(blocks_for(std::max(all, 1), kMaxBits));
    bits = static_cast<int>(blocks_for(std::max(all, 1), count));
  }
};

/// The keys of a pass: in the first one, the indices themselves.
struct Input {
  const uint32_t *keys, *positions;
  Layout<1> at;
  const void* index;
  DType index_type;
  int64_t count, first, size;

  template <bool kFirst>
  __device__ uint32_t key(int64_t i) const {
    if (!kFirst) return keys[i];
    int64_t offset[1];
    at.offsets(i, offset);
    const int64_t value = load_index(index_type, index, offset[0]) - first;
    return static_cast<uint32_t>(value >= 0 && value < size ? value : size);
  }
};

/// counts[digit][tile]
template <bool kFirst>
__global__ void count_digits(Input in, Digit digit, uint32_t* counts) {
  __shared__ uint32_t found[kMaxRadix];
  for (int d = threadIdx.x; d < digit.radix(); d += kThreads) found[d] = 0;
  __syncthreads();
  for (int k = 0; k < kRounds; ++k) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kTile + k * kThreads + threadIdx.x;
    if (i < in.count) atomicAdd(&found[digit.of(in.template key<kFirst>(i))], 1u);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < digit.radix(); d += kThreads)
    counts[static_cast<int64_t>(d) * gridDim.x + blockIdx.x] = found[d];
}

/// Exclusive prefix sums, in place. One block is enough: a round of its loop processes the counts of 32,768 keys (of 8 bits), whose
/// rows are tens of megabytes for the caller of the sort.
__global__ void __launch_bounds__(kScanThreads) scan_counts(uint32_t* counts, int64_t n) {
  __shared__ uint32_t totals[kScanThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t before = 0;
  // Neighbouring threads on neighbouring counts, 4 each.
  for (int64_t start = 0; start < n; start += 4 * kScanThreads) {
    const int64_t at = start + 4 * static_cast<int64_t>(threadIdx.x);
    uint32_t x[4], sum = 0;
    for (int k = 0; k < 4; ++k) {
      x[k] = sum;
      if (at + k < n) sum += counts[at + k];
    }
    const uint32_t upto = scan_warp(sum, lane);
    if (lane == kWarp - 1) totals[warp] = upto;
    __syncthreads();
    if (warp == 0) totals[lane] = scan_warp(totals[lane], lane);
    __syncthreads();
    const uint32_t base = before + upto - sum + (warp > 0 ? totals[warp - 1] : 0);
    for (int k = 0; k < 4; ++k)
      if (at + k < n) counts[at + k] = base + x[k];
    before += totals[kScanThreads / kWarp - 1];
    __syncthreads();  // before the totals of the next round
  }
}

template <bool kFirst>
__global__ void place_keys(Input in, Digit digit, const uint32_t* places, uint32_t* keys,
                           uint32_t* positions) {
  __shared__ uint32_t next[kWarps * kMaxRadix];  // [warp][digit]: counts, then places
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int d = threadIdx.x; d < kWarps * kMaxRadix; d += kThreads) next[d] = 0;
  __syncthreads();
  // A warp's keys are neighbours, so its order is the input's.
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kTile + static_cast<int64_t>(warp) * (kRounds * kWarp);
  uint32_t* mine = next + warp * kMaxRadix;
  uint32_t key[kRounds];
  unsigned peers[kRounds];  // lanes with this lane's digit
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int64_t i = first + k * kWarp + lane;
    key[k] = i < in.count ? in.template key<kFirst>(i) : 0;
    const int d = digit.of(key[k]);
    peers[k] = __ballot_sync(kFullWarp, i < in.count);
    for (int b = 0; b < digit.bits; ++b) {
      const bool one = (d >> b & 1) != 0;
      const unsigned ones = __ballot_sync(kFullWarp, one);
      peers[k] &= one ? ones : ~ones;
    }
    if (i < in.count && __ffs(static_cast<int>(peers[k])) - 1 == lane) mine[d] += __popc(peers[k]);
    __syncwarp();
  }
  __syncthreads();
  for (int d = threadIdx.x; d < digit.radix(); d += kThreads) {
    uint32_t place = places[static_cast<int64_t>(d) * gridDim.x + blockIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t n = next[w * kMaxRadix + d];
      next[w * kMaxRadix + d] = place;
      place += n;
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int64_t i = first + k * kWarp + lane;
    const int d = digit.of(key[k]);
    const uint32_t to = mine[d] + __popc(peers[k] & ((1u << lane) - 1));
    __syncwarp();
    if (i < in.count) {
      if (__ffs(static_cast<int>(peers[k])) - 1 == lane) mine[d] += __popc(peers[k]);
      keys[to] = key[k];
      positions[to] = kFirst ? static_cast<uint32_t>(i) : in.positions[i];
    }
    __syncwarp();
  }
}

}  // namespace

size_t sort_workspace(int64_t count, int64_t size) {
  const Passes passes(size);
  return 4 * line_align(static_cast<size_t>(count) * 4) +
         line_align(static_cast<size_t>(blocks_for(count, kTile) << passes.bits) * 4);
}

Sorted sort_positions(const char* name, const Stream& stream, const View& index, int64_t first,
                      int64_t size, Workspace workspace) {
  const int64_t count = index.numel();
  check<ShapeError>(count <= INT32_MAX && size < INT32_MAX, '[', name, "] ", count,
                    " indices into ", size, " are more than 2^31");
  check_index_type(name, index);
  const Passes passes(size);
  const int64_t tiles = blocks_for(count, kTile);
  Carver carver(name, workspace);
  uint32_t* keys[2] = {carver.take<uint32_t>(count), carver.take<uint32_t>(count)};
  uint32_t* positions[2] = {carver.take<uint32_t>(count), carver.take<uint32_t>(count)};
  uint32_t* counts = carver.take<uint32_t>(tiles << passes.bits);
  Input in{nullptr,    nullptr,     Layout<1>(index.shape, {index.strides}, Order::row_major),
           index.data, index.dtype, count,
           first,      size};
  const LaunchShape shape{.blocks = tiles, .threads = kThreads};
  for (int p = 0; p < passes.count && count > 0; ++p) {
    const Digit digit{p * passes.bits, passes.bits};
    launch(name, stream, shape, p == 0 ? count_digits<true> : count_digits<false>, in, digit,
           counts);
    launch(name, stream, {.blocks = 1, .threads = kScanThreads}, scan_counts, counts,
           tiles << passes.bits);
    launch(name, stream, shape, p == 0 ? place_keys<true> : place_keys<false>, in, digit, counts,
           keys[p % 2], positions[p % 2]);
    in.keys = keys[p % 2], in.positions = positions[p % 2];
  }
  return {in.keys, in.positions};
}

}  // namespace sheaf::kernels::cuda
