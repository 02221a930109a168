#include "sheaf/kernels/cuda/gather.h"
#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/cuda/numbers.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // elements in flight per thread

struct Source {
  int64_t begin, end, all, step;  // of the indexed dimension: indices [begin, end) of `all`
  const void* index;
  DType index_type;
  int missing;  // every byte of the result for an index outside
};

// Operands: out, x, index.
template <class U>
__global__ void pick_units(const U* x, U* out, Layout<3> at, Source source) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  U unit[kUnroll] = {};
  int64_t to[kUnroll] = {}, from[kUnroll] = {}, which[kUnroll] = {};
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= at.numel) continue;
    int64_t offset[3];
    at.offsets(i, offset);
    to[k] = offset[0], from[k] = offset[1];
    which[k] = load_index(source.index_type, source.index, offset[2]);
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    if (first + k * kThreads >= at.numel) continue;
    if (which[k] >= source.begin && which[k] < source.end)
      unit[k] = x[from[k] + (which[k] - source.begin) * source.step];
    else
      memset(&unit[k], which[k] >= 0 && which[k] < source.all ? 0 : source.missing, sizeof(U));
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k)
    if (first + k * kThreads < at.numel) out[to[k]] = unit[k];
}

}  // namespace

void check_index_type(const char* name, const View& index) {
  if (is_floating(index.dtype) || index.dtype == kBool || index.dtype == kI8)
    fail<DTypeError>('[', name, "] an index cannot be ", index.dtype);
}

void pick(const char* name, const Stream& stream, const View& x, const Picked& dim,
          const View& index, const View& out) {
  check_index_type(name, index);
  if (out.numel() == 0) return;
  constexpr unsigned kDense = 3;  // out and x
  const auto bytes = static_cast<int64_t>(size_of(out.dtype));
  Layout<3> at(out.shape, {out.strides, x.strides, index.strides});
  int64_t width = at.unit(16 / bytes, kDense, bytes, {x.data, out.data});
  while (dim.step % width != 0) width /= 2;
  at.fold(width, kDense);
  const Source source{dim.first,
                      dim.first + dim.size,
                      dim.all,
                      dim.step / width,
                      index.data,
                      index.dtype,
                      is_floating(out.dtype) ? 0xff : 0};
  visit_unit(width * bytes, [&]<class U>() {
    launch(name, stream, {.blocks = blocks_for(at.numel, kThreads * kUnroll), .threads = kThreads},
           pick_units<U>, x.as<const U>(), out.as<U>(), at, source);
  });
}

}  // namespace sheaf::kernels::cuda
