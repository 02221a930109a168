#include "sheaf/kernels/quantize.h"

#include "sheaf/kernels/cuda/few_blocks.h"
#include "sheaf/kernels/cuda/rows.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <bool kEven>
__device__ inline unsigned two_bytes(const uint8_t* at) {
  return kEven ? *reinterpret_cast<const uint16_t*>(at) : at[0] | static_cast<unsigned>(at[1]) << 8;
}

template <bool kEven>
__device__ inline void store_two_bytes(uint8_t* at, unsigned both) {
  if (kEven) {
    *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(both);
  } else {
    at[0] = static_cast<uint8_t>(both), at[1] = static_cast<uint8_t>(both >> 8);
  }
}

// A thread computes 16 bytes of `out` from codes of one block. Blocks are read two bytes at a time, to which all of
// them are aligned if the first one is.
template <class T, BlockFormat kFormat, bool kEven>
__global__ void __launch_bounds__(kThreads) unpack(const uint8_t* blocks, T* out, int64_t packs) {
  constexpr int kSize = Pack<T>::kSize, kPacks = kBlockSize / kSize, kHalf = kBlockSize / 2;
  constexpr bool kInt8 = kFormat == BlockFormat::int8;
  __shared__ float levels[16];
  if (!kInt8) {
    constexpr auto kLevels = kNf4Levels;  // the host's constant has no address on a GPU
    if (threadIdx.x < 16) levels[threadIdx.x] = kLevels[threadIdx.x];
    __syncthreads();
  }
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= packs) return;
  const int at = static_cast<int>(i % kPacks) * kSize;
  const uint8_t* block = blocks + i / kPacks * block_bytes(kFormat);
  const float scale = __uint_as_float(two_bytes<kEven>(block) << 16);
  const uint8_t* codes = block + 2 + (kInt8 ? at : at % kHalf);
  const int shift = at < kHalf ? 0 : 4;
  Pack<T> pack;
#pragma unroll
  for (int k = 0; k < kSize; k += 2) {
    const unsigned both = two_bytes<kEven>(codes + k);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned byte = both >> (8 * half) & 255;
      const float code = kInt8 ? static_cast<float>(static_cast<int8_t>(byte))
                               : levels[byte >> shift & 15];
      pack.v[k + half] = element<T>(static_cast<Compute<T>>(code * scale));
    }
  }
  store_chunk(out, i * kSize, packs * kSize, pack);
}

// Four neighbouring elements, read in one access if aligned to their size.
template <class T>
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Four {
  T v[4];
};
template <class T>
__device__ inline Four<T> load_four(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % alignof(Four<T>) == 0)
    return *reinterpret_cast<const Four<T>*>(from);
  return {{from[0], from[1], from[2], from[3]}};
}
template <class T>
__device__ inline void store_four(T* to, const Four<T>& x) {
  if (reinterpret_cast<uintptr_t>(to) % alignof(Four<T>) == 0) {
    *reinterpret_cast<Four<T>*>(to) = x;
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) to[k] = x.v[k];
}

constexpr int kOfBlock = kBlockSize / 4;  // threads that share one

// Four elements of each lane: a warp packs two blocks. All its lanes take part in the shuffles, also those past the last block.
template <class T, bool kEven, bool kByChance>
__device__ inline void pack_four(const T* values, uint32_t key, uint8_t* blocks, int64_t fours, int64_t i) {
  const bool here = i < fours;
  Four<T> x{};
  if (here) x = load_four(values + i * 4);
  float v[4];
  unsigned largest = 0, all = 0;  // magnitudes are ordered as their bits, NaN last
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    v[k] = convert_to<float>(x.v[k]);
    const unsigned bits = __float_as_uint(v[k]), size = bits & 0x7fffffffu;
    largest = size > largest ? size : largest;
    all += bits_for_noise(bits);
  }
#pragma unroll
  for (int step = kOfBlock / 2; step > 0; step /= 2) {
    const unsigned other = __shfl_xor_sync(kFullWarp, largest, step);
    largest = other > largest ? other : largest;
    if (kByChance) all += __shfl_xor_sync(kFullWarp, all, step);
  }
  if (!here) return;
  const uint16_t bits =
      scale_for_sending(largest, __float_as_uint(__uint_as_float(largest) * (1 / 127.0f)));
  const float scale = __uint_as_float(static_cast<unsigned>(bits) << 16);
  const float inverse = 1 / scale;
  const int at = static_cast<int>(i % kOfBlock) * 4;
  unsigned codes[4] = {0, 0, 0, 0};
  if (scale > 0) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t noise =
          kByChance ? noise_by_chance(bits_for_noise(__float_as_uint(v[k])),
                                      static_cast<uint32_t>(at + k), all, key)
                    : 0x8000;
      const float code = fmaf(v[k], inverse, 128 + static_cast<float>(noise) * 0x1p-16f);
      codes[k] = static_cast<unsigned>(static_cast<int>(fminf(fmaxf(code, 1.0f), 255.0f)) - 128);
    }
  }
  uint8_t* block = blocks + i / kOfBlock * block_bytes(BlockFormat::int8);
  if (at == 0) store_two_bytes<kEven>(block, bits);
#pragma unroll
  for (int k = 0; k < 4; k += 2)
    store_two_bytes<kEven>(block + 2 + at + k, (codes[k] & 255) | (codes[k + 1] & 255) << 8);
}

template <class T, bool kEven, bool kByChance>
__global__ void __launch_bounds__(kThreads)
    pack(const T* values, uint32_t key, uint8_t* blocks, int64_t fours) {
  const int64_t round = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads; first < fours; first += round)
    pack_four<T, kEven, kByChance>(values, key, blocks, fours, first + threadIdx.x);
}

template <class T, bool kEven>
__global__ void __launch_bounds__(kThreads)
    add_blocks(const uint8_t* blocks, int64_t parts, T* out, int64_t fours) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= fours) return;
  const int at = static_cast<int>(i % kOfBlock) * 4;
  const int64_t bytes = block_bytes(BlockFormat::int8), part = fours / kOfBlock * bytes;
  const uint8_t* block = blocks + i / kOfBlock * bytes;
  float sum[4] = {};
  for (int64_t p = 0; p < parts; ++p, block += part) {
    const float scale = __uint_as_float(two_bytes<kEven>(block) << 16);
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const unsigned both = two_bytes<kEven>(block + 2 + at + k);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto code = static_cast<float>(static_cast<int8_t>(both >> (8 * half) & 255));
        float& s = sum[k + half];
        s = p == 0 ? code * scale : fmaf(code, scale, s);
      }
    }
  }
  Four<T> y;
#pragma unroll
  for (int k = 0; k < 4; ++k) y.v[k] = element<T>(static_cast<Compute<T>>(sum[k]));
  store_four(out + i * 4, y);
}

bool is_even(const View& blocks) { return reinterpret_cast<uintptr_t>(blocks.data) % 2 == 0; }

}  // namespace

void dequantize(const Stream& stream, const View& blocks, BlockFormat format, const View& out) {
  const char* who = "dequantize";
  check_blocks(blocks, format, out);
  if (out.numel() == 0) return;
  const bool even = is_even(blocks);
  visit_floating(who, out.dtype, [&]<class T>() {
    using enum BlockFormat;
    const int64_t packs = out.numel() / Pack<T>::kSize;
    launch(who, stream, {.blocks = blocks_for(packs, kThreads), .threads = kThreads},
           format == int8 ? (even ? unpack<T, int8, true> : unpack<T, int8, false>)
                          : (even ? unpack<T, nf4, true> : unpack<T, nf4, false>),
           blocks.as<const uint8_t>(), out.as<T>(), packs);
  });
}

void to_int8_blocks(const Stream& stream, const View& values, std::optional<uint32_t> key,
                    const View& blocks) {
  const char* who = "to_int8_blocks";
  check_int8_blocks(who, blocks, values, 1);
  if (values.numel() == 0) return;
  visit_floating(who, values.dtype, [&]<class T>() {
    const int64_t fours = values.numel() / 4;
    launch(who, stream, {.blocks = FewBlocks::of(blocks_for(fours, kThreads)), .threads = kThreads},
           is_even(blocks) ? (key ? pack<T, true, true> : pack<T, true, false>)
                           : (key ? pack<T, false, true> : pack<T, false, false>),
           values.as<const T>(), key.value_or(0), blocks.as<uint8_t>(), fours);
  });
}

void sum_of_blocks(const Stream& stream, const View& blocks, int64_t parts, const View& out) {
  const char* who = "sum_of_blocks";
  check_int8_blocks(who, blocks, out, parts);
  if (out.numel() == 0) return;
  visit_floating(who, out.dtype, [&]<class T>() {
    const int64_t fours = out.numel() / 4;
    launch(who, stream, {.blocks = blocks_for(fours, kThreads), .threads = kThreads},
           is_even(blocks) ? add_blocks<T, true> : add_blocks<T, false>,
           blocks.as<const uint8_t>(), parts, out.as<T>(), fours);
  });
}

}  // namespace sheaf::kernels::cuda
