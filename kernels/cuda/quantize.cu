#include "sheaf/kernels/quantize.h"

#include "sheaf/kernels/cuda/rows.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// A thread makes 16 bytes of `out` of the codes of one block. Blocks are aligned to 2 bytes only.
template <class T, BlockFormat kFormat>
__global__ void __launch_bounds__(kThreads) unpack(const uint16_t* blocks, T* out, int64_t packs) {
  constexpr int kSize = Pack<T>::kSize, kPacks = kBlockSize / kSize, kHalf = kBlockSize / 2;
  constexpr bool kWide = kFormat == BlockFormat::int8;
  __shared__ float levels[16];
  if (!kWide) {
    if (threadIdx.x < 16) levels[threadIdx.x] = kNf4Levels[threadIdx.x];
    __syncthreads();
  }
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= packs) return;
  const int at = static_cast<int>(i % kPacks) * kSize;
  const uint16_t* block = blocks + i / kPacks * (block_bytes(kFormat) / 2);
  const float scale = __uint_as_float(static_cast<unsigned>(block[0]) << 16);
  const uint16_t* codes = block + 1 + (kWide ? at : at % kHalf) / 2;
  const int shift = at < kHalf ? 0 : 4;
  Pack<T> pack;
#pragma unroll
  for (int k = 0; k < kSize; k += 2) {
    const unsigned both = codes[k / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned byte = both >> (8 * half) & 255;
      const float code = kWide ? static_cast<float>(static_cast<int8_t>(byte))
                               : levels[byte >> shift & 15];
      pack.v[k + half] = element<T>(static_cast<Compute<T>>(code * scale));
    }
  }
  store_chunk(out, i * kSize, packs * kSize, pack);
}

}  // namespace

void dequantize(const Stream& stream, const View& blocks, BlockFormat format, const View& out) {
  const char* who = "dequantize";
  check<DTypeError>(blocks.dtype == kU8, "[dequantize] blocks are u8, not ", blocks.dtype);
  check<ShapeError>(blocks.contiguous() && out.contiguous() &&
                        blocks.numel() / block_bytes(format) * kBlockSize == out.numel(),
                    "[dequantize] ", blocks.shape, " into ", out.shape);
  check<ShapeError>(reinterpret_cast<uintptr_t>(blocks.data) % 2 == 0,
                    "[dequantize] blocks begin at an odd address");
  if (out.numel() == 0) return;
  visit_floating(who, out.dtype, [&]<class T>() {
    const int64_t packs = out.numel() / Pack<T>::kSize;
    launch(who, stream, {.blocks = blocks_for(packs, kThreads), .threads = kThreads},
           format == BlockFormat::int8 ? unpack<T, BlockFormat::int8> : unpack<T, BlockFormat::nf4>,
           blocks.as<const uint16_t>(), out.as<T>(), packs);
  });
}

}  // namespace sheaf::kernels::cuda
