#include "sheaf/kernels/quantize.h"

#include "sheaf/kernels/cuda/rows.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <bool kEven>
__device__ inline unsigned two_bytes(const uint8_t* at) {
  return kEven ? *reinterpret_cast<const uint16_t*>(at) : at[0] | static_cast<unsigned>(at[1]) << 8;
}

// A thread makes 16 bytes of `out` of the codes of one block. Blocks are read by two bytes, to which
// all of them are aligned if the first one is.
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

}  // namespace

void dequantize(const Stream& stream, const View& blocks, BlockFormat format, const View& out) {
  const char* who = "dequantize";
  check_blocks(blocks, format, out);
  if (out.numel() == 0) return;
  const bool even = reinterpret_cast<uintptr_t>(blocks.data) % 2 == 0;
  visit_floating(who, out.dtype, [&]<class T>() {
    using enum BlockFormat;
    const int64_t packs = out.numel() / Pack<T>::kSize;
    launch(who, stream, {.blocks = blocks_for(packs, kThreads), .threads = kThreads},
           format == int8 ? (even ? unpack<T, int8, true> : unpack<T, int8, false>)
                          : (even ? unpack<T, nf4, true> : unpack<T, nf4, false>),
           blocks.as<const uint8_t>(), out.as<T>(), packs);
  });
}

}  // namespace sheaf::kernels::cuda
