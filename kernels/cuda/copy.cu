#include <cstring>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/few_blocks.h"
#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // loads in flight per thread

// Operand 0 is dst, operand 1 src.
constexpr unsigned kBoth = 3;

LaunchShape shape_for(int64_t units) {
  return {.blocks = blocks_for(units, kThreads * kUnroll), .threads = kThreads};
}

template <class U>
__global__ void copy_units(const U* src, U* dst, Layout<2> at) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  U unit[kUnroll] = {};
  int64_t to[kUnroll] = {};
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= at.numel) continue;
    int64_t offset[2];
    at.offsets(i, offset);
    unit[k] = src[offset[1]], to[k] = offset[0];
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k)
    if (first + k * kThreads < at.numel) dst[to[k]] = unit[k];
}

// A transpose: dst runs along `cols`, src densely along `rows`. Tiles go through shared memory, so
// that both sides are read and written along their own lines.
constexpr int kTile = 64;

struct Transpose {
  Layout<2> outer;  // the other dimensions
  int64_t rows, cols, row_tiles, tiles;
  int64_t src_col, dst_row, dst_col;  // strides
};

template <class T>
__global__ void transpose_tiles(const T* src, T* dst, Transpose t) {
  // Neighbours in a column of the tile are in neighbouring banks.
  constexpr int kPitch = kTile + (sizeof(T) < 4 ? 4 / static_cast<int>(sizeof(T)) : 1);
  __shared__ T tile[kTile * kPitch];
  const unsigned place = blockIdx.x / static_cast<unsigned>(t.tiles),
                 which = blockIdx.x % static_cast<unsigned>(t.tiles);
  const int64_t r0 = which % static_cast<unsigned>(t.row_tiles) * int64_t{kTile},
                c0 = which / static_cast<unsigned>(t.row_tiles) * int64_t{kTile};
  int64_t offset[2];
  t.outer.offsets(place, offset);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int k = 0; k < kTile / (kThreads / kWarp); ++k) {
    const int c = warp + k * (kThreads / kWarp);
#pragma unroll
    for (int r = lane; r < kTile; r += kWarp)
      if (r0 + r < t.rows && c0 + c < t.cols)
        tile[c * kPitch + r] = src[offset[1] + r0 + r + (c0 + c) * t.src_col];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTile / (kThreads / kWarp); ++k) {
    const int r = warp + k * (kThreads / kWarp);
#pragma unroll
    for (int c = lane; c < kTile; c += kWarp)
      if (r0 + r < t.rows && c0 + c < t.cols)
        dst[offset[0] + (r0 + r) * t.dst_row + (c0 + c) * t.dst_col] = tile[c * kPitch + r];
  }
}

/// If this is a transpose, does it and returns true.
bool transpose(const Stream& stream, const View& src, const View& dst, Layout<2> at) {
  constexpr int64_t kWorthIt = 16;
  const int last = at.rank - 1;
  int dense = -1;
  for (int d = 0; d < last; ++d)
    if (at.strides[1][d] == 1 && at.shape[d] >= kWorthIt) dense = d;
  if (dense < 0 || at.strides[1][last] <= 1 || at.shape[last] < kWorthIt) return false;
  Transpose t{};
  t.rows = at.shape[dense], t.cols = at.shape[last];
  t.row_tiles = blocks_for(t.rows, kTile), t.tiles = t.row_tiles * blocks_for(t.cols, kTile);
  t.src_col = at.strides[1][last], t.dst_row = at.strides[0][dense];
  t.dst_col = at.strides[0][last];
  at.remove(last), at.remove(dense);
  t.outer = at;
  const LaunchShape shape{.blocks = t.tiles * at.numel, .threads = kThreads};
  const auto run = [&]<class T>() {
    launch("copy", stream, shape, transpose_tiles<T>, src.as<const T>(), dst.as<T>(), t);
  };
  switch (size_of(dst.dtype)) {
    case 1:
      run.operator()<uint8_t>();
      break;
    case 2:
      run.operator()<uint16_t>();
      break;
    case 4:
      run.operator()<uint32_t>();
      break;
    default:
      run.operator()<uint64_t>();
  }
  return true;
}

void copy_bits(const Stream& stream, const View& src, const View& dst, Layout<2> at) {
  const auto size = static_cast<int64_t>(size_of(dst.dtype));
  if (at.is_run(0) && at.is_run(1))
    return copy_bytes(stream, dst.data, src.data, static_cast<size_t>(at.numel * size),
                      Copy::on_device);
  if (transpose(stream, src, dst, at)) return;
  const int64_t width = at.unit(16 / size, kBoth, size, {src.data, dst.data});
  at.fold(width, kBoth);
  visit_unit(width * size, [&]<class U>() {
    launch("copy", stream, shape_for(at.numel), copy_units<U>, src.as<const U>(), dst.as<U>(), at);
  });
}

/// dst = src, or dst += src, between f32 and a narrow type, kWidth elements at a time: 16 bytes of
/// the wide one. `tail` more elements follow a dense run.
template <class From, class To, bool kAdd, int kWidth>
__global__ void cast_units(const From* src, To* dst, Layout<2> at, int tail) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  const auto cast = [](From x, To before) {
    const float sum = (kAdd ? convert_to<float>(before) : 0.0f) + convert_to<float>(x);
    return element<To>(kAdd ? sum : convert_to<float>(x));
  };
  for (int64_t first = begin; first < at.numel; first += static_cast<int64_t>(gridDim.x) * (kThreads * kUnroll)) {
    Group<From, kWidth> in[kUnroll];
    Group<To, kWidth> out[kUnroll];
    int64_t to[kUnroll], from[kUnroll];
    // Past the end, the first unit is loaded once more: after a branch each load would be waited for.
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t i = first + k * kThreads;
      int64_t offset[2];
      at.offsets(i < at.numel ? i : first, offset);
      to[k] = offset[0], from[k] = offset[1];
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      in[k] = reinterpret_cast<const Group<From, kWidth>*>(src)[from[k]];
      if (kAdd) out[k] = reinterpret_cast<const Group<To, kWidth>*>(dst)[to[k]];
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads >= at.numel) continue;
      for (int j = 0; j < kWidth; ++j) out[k].v[j] = cast(in[k].v[j], out[k].v[j]);
      reinterpret_cast<Group<To, kWidth>*>(dst)[to[k]] = out[k];
    }
  }
  if (begin < tail) {
    const int64_t i = at.numel * kWidth + begin;
    dst[i] = cast(src[i], kAdd ? dst[i] : To{});
  }
}

template <class From, class To, bool kAdd>
void cast(const char* name, const Stream& stream, const View& src, const View& dst, Layout<2> at) {
  constexpr int kWidth = 4;
  const bool aligned = reinterpret_cast<uintptr_t>(src.data) % (kWidth * sizeof(From)) == 0 &&
                       reinterpret_cast<uintptr_t>(dst.data) % (kWidth * sizeof(To)) == 0;
  const auto shape_of_round = [&] {
    LaunchShape shape = shape_for(at.numel);
    shape.blocks = FewBlocks::of(shape.blocks);
    return shape;
  };
  int64_t tail = 0;
  if (aligned && at.is_run(0) && at.is_run(1) && at.numel >= kWidth) tail = at.cut_tail(kWidth);
  if (aligned && at.folds(kWidth, kBoth)) {
    at.fold(kWidth, kBoth);
    launch(name, stream, shape_of_round(), cast_units<From, To, kAdd, kWidth>,
           src.as<const From>(), dst.as<To>(), at, tail);
  } else {
    launch(name, stream, shape_of_round(), cast_units<From, To, kAdd, 1>, src.as<const From>(),
           dst.as<To>(), at, 0);
  }
}

/// False, with nothing done, unless src and dst are f32 and a narrow type, for which there are kernels.
template <bool kAdd>
bool cast(const char* name, const Stream& stream, const View& src, const View& dst,
          const Layout<2>& at) {
  if (src.dtype == kBF16 && dst.dtype == kF32)
    return cast<bf16, float, kAdd>(name, stream, src, dst, at), true;
  if (src.dtype == kF16 && dst.dtype == kF32)
    return cast<f16, float, kAdd>(name, stream, src, dst, at), true;
  if (src.dtype == kF32 && dst.dtype == kBF16)
    return cast<float, bf16, kAdd>(name, stream, src, dst, at), true;
  if (src.dtype == kF32 && dst.dtype == kF16)
    return cast<float, f16, kAdd>(name, stream, src, dst, at), true;
  return false;
}

struct Convert {
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    out[0] = in[0];
  }
};
struct Add {
  template <class C>
  __device__ void operator()(const C* in, C* out) const {
    out[0] = in[0] + in[1];
  }
};

template <class U>
__global__ void fill_units(U* dst, Layout<1> at, U pattern, int tail_bytes) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= at.numel) continue;
    int64_t offset[1];
    at.offsets(i, offset);
    dst[offset[0]] = pattern;
  }
  if (first < tail_bytes) {
    unsigned char bytes[sizeof(U)];
    memcpy(bytes, &pattern, sizeof(U));
    reinterpret_cast<unsigned char*>(dst + at.numel)[first] = bytes[first];
  }
}

template <class C>
__global__ void arange_elements(C start, C step, DType dtype, void* dst, int64_t stride,
                                int64_t numel) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= numel) return;
  if constexpr (std::is_same_v<C, double>)  // no fused multiply-add: the bits of the CPU
    store_any(dtype, dst, i * stride, __dadd_rn(start, __dmul_rn(static_cast<double>(i), step)));
  else
    store_any(dtype, dst, i * stride, start + i * step);
}

void check_shapes(const char* name, const View& src, const View& dst) {
  check<ShapeError>(src.shape == dst.shape, '[', name, "] kernel operands have shapes ", dst.shape,
                    " and ", src.shape);
}

}  // namespace

void copy(const Stream& stream, const View& src, const View& dst) {
  check_shapes("copy", src, dst);
  if (dst.numel() == 0) return;
  const Layout<2> at(dst.shape, {dst.strides, src.strides});
  if (src.dtype == dst.dtype) return copy_bits(stream, src, dst, at);
  if (cast<false>("copy", stream, src, dst, at)) return;
  map_elements<1, 1>("copy", stream, compute_type_of({src}), Convert{},
                     {at.view(0, dst.data, dst.dtype)}, {at.view(1, src.data, src.dtype)});
}

void fill(const Stream& stream, const View& dst, double value) {
  if (dst.numel() == 0) return;
  // The CPU's kernel converts one element; its bits are then copied.
  const auto size = static_cast<int64_t>(size_of(dst.dtype));
  alignas(16) unsigned char pattern[16];
  cpu::fill(View{pattern, dst.dtype, {}, {}}, value);
  for (int64_t k = size; k < 16; ++k) pattern[k] = pattern[k - size];
  Layout<1> at(dst.shape, {dst.strides});
  int64_t tail = 0;
  if (at.is_run(0) && aligned16(dst.data) && at.numel * size >= 16) tail = at.cut_tail(16 / size);
  const int64_t width = at.unit(16 / size, 1, size, {dst.data});
  at.fold(width, 1);
  visit_unit(width * size, [&]<class U>() {
    U unit;
    std::memcpy(&unit, pattern, sizeof unit);
    launch("fill", stream, shape_for(at.numel), fill_units<U>, dst.as<U>(), at, unit, tail * size);
  });
}

void add_into(const Stream& stream, const View& dst, const View& src) {
  check_shapes("add_into", src, dst);
  if (dst.numel() == 0) return;
  const Layout<2> at(dst.shape, {dst.strides, src.strides});
  if (cast<true>("add_into", stream, src, dst, at)) return;
  const View to = at.view(0, dst.data, dst.dtype), from = at.view(1, src.data, src.dtype);
  map_elements<1, 2>("add_into", stream, compute_type_of({dst, src}), Add{}, {to}, {to, from});
}

void arange(const Stream& stream, double start, double step, const View& dst) {
  check<ShapeError>(dst.rank() == 1, "[arange] the output has shape ", dst.shape,
                    ", not one dimension");
  const LaunchShape shape{.blocks = blocks_for(dst.numel(), kThreads), .threads = kThreads};
  if (is_floating(dst.dtype))
    launch("arange", stream, shape, arange_elements<double>, start, step, dst.dtype, dst.data,
           dst.strides[0], dst.numel());
  else
    launch("arange", stream, shape, arange_elements<int64_t>, start, step, dst.dtype, dst.data,
           dst.strides[0], dst.numel());
}

}  // namespace sheaf::kernels::cuda
