#include <bit>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/gather.h"
#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/indexing.h"
#include "sheaf/kernels/indexing_operands.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// --- adding by index ---

struct Adds {
  Layout<3> lines;  // out, src, index
  void* out;
  const void *src, *index;
  DType out_type, src_type, index_type;
  int64_t size, count;  // of out and of src along the dimension
  int64_t out_step, src_step, index_step;

  /// The index at `at`, -1 if there is none or it is outside.
  __device__ int64_t target(int64_t line, int64_t at) const {
    if (at >= count) return -1;
    const int64_t j = load_index(index_type, index, line + at * index_step);
    return j < size ? j : -1;
  }
  template <class C>
  __device__ void add(int64_t line, int64_t j, C term) const {
    const int64_t to = line + j * out_step;
    store_any(out_type, out, to, load_any<C>(out_type, out, to) + term);
  }
};

constexpr int kAhead = 4;  // indices read at once

/// One thread per line, if there are many.
template <class C>
__global__ void add_lines(Adds in) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (line >= in.lines.numel) return;
  int64_t offset[3];
  in.lines.offsets(line, offset);
  for (int64_t i = 0; i < in.count; i += kAhead) {
    int64_t j[kAhead];
    C term[kAhead] = {};
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      j[k] = in.target(offset[2], i + k);
      if (j[k] >= 0) term[k] = load_any<C>(in.src_type, in.src, offset[1] + (i + k) * in.src_step);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (j[k] >= 0) in.add(offset[0], j[k], term[k]);
  }
}

/// A warp for `width` lines (1 to 32) that share their index, and for one part of out's positions: those that are `part` modulo
/// `parts`, a power of two. All warps of the lines read all indices, 32 at a time, and each adds its own in order.
template <class C>
__global__ void add_parts(Adds in, int64_t width, int64_t parts) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t part = warp & (parts - 1), first = warp / parts * width;
  if (first >= in.lines.numel) return;
  const bool works = lane < width && first + lane < in.lines.numel;
  int64_t offset[3];
  in.lines.offsets(works ? first + lane : first, offset);
  for (int64_t start = 0; start < in.count; start += kAhead * kWarp) {
    int64_t j[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) j[k] = in.target(offset[2], start + k * kWarp + lane);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      unsigned todo = __ballot_sync(kFullWarp, j[k] >= 0 && (j[k] & (parts - 1)) == part);
      while (todo != 0) {
        const int which = __ffs(static_cast<int>(todo)) - 1;
        todo &= todo - 1;
        const int64_t to = __shfl_sync(kFullWarp, j[k], which);
        const int64_t i = start + k * kWarp + which;
        if (works)
          in.add(offset[0], to, load_any<C>(in.src_type, in.src, offset[1] + i * in.src_step));
      }
    }
  }
}

void add_by_index(const char* name, const Stream& stream, const View& out, int dim,
                  const View& index, const View& src) {
  check_index_type(name, index);
  if (src.numel() == 0 || out.numel() == 0) return;
  const View to = without(out, dim), from = without(src, dim), at = without(index, dim);
  const Adds in{Layout<3>(to.shape, {to.strides, from.strides, at.strides}),
                out.data,
                src.data,
                index.data,
                out.dtype,
                src.dtype,
                index.dtype,
                out.shape[dim],
                src.shape[dim],
                out.strides[dim],
                src.strides[dim],
                index.strides[dim]};
  const int64_t lines = in.lines.numel;
  bool shared = true;  // one index for all lines
  for (int d = 0; d < in.lines.rank; ++d)
    shared = shared && (in.lines.strides[2][d] == 0 || in.lines.shape[d] == 1);
  const int64_t width = shared ? std::min<int64_t>(lines, kWarp) : 1;
  const int64_t groups = blocks_for(lines, width);
  constexpr int64_t kEnoughWarps = 4096, kMostParts = 256;
  const auto run = [&]<class C>() {
    if (groups >= kEnoughWarps || (!shared && in.count <= kWarp))
      return launch(name, stream, {.blocks = blocks_for(lines, kThreads), .threads = kThreads},
                    add_lines<C>, in);
    const auto parts = static_cast<int64_t>(std::bit_floor(
        static_cast<uint64_t>(std::min({kEnoughWarps / groups, kMostParts, in.size}))));
    launch(name, stream, {.blocks = blocks_for(groups * parts, kWarps), .threads = kThreads},
           add_parts<C>, in, width, parts);
  };
  const DType compute = compute_type_of({out, src});
  if (compute == kF64)
    run.operator()<double>();
  else if (compute == kF32)
    run.operator()<float>();
  else
    run.operator()<int64_t>();
}

// --- running sums ---

/// One warp per line, 32 elements at a time.
template <class C>
__global__ void cumsum_lines(Layout<2> lines, DType out_type, void* out, int64_t out_step,
                             DType x_type, const void* x, int64_t x_step, int64_t count) {
  constexpr int kAhead = 8;
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (line >= lines.numel) return;
  int64_t offset[2];
  lines.offsets(line, offset);
  C total = 0;
  for (int64_t start = 0; start < count; start += kAhead * kWarp) {
    C sum[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t i = start + k * kWarp + lane;
      sum[k] = i < count ? load_any<C>(x_type, x, offset[1] + i * x_step) : C(0);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t i = start + k * kWarp + lane;
      sum[k] = total + scan_warp(sum[k], lane);
      total = __shfl_sync(kFullWarp, sum[k], kWarp - 1);
      if (i < count) store_any(out_type, out, offset[0] + i * out_step, sum[k]);
    }
  }
}

// --- documents ---

/// One warp per sequence, 32 tokens at a time: the largest position so far that follows an end of text.
__global__ void find_begins(Layout<2> lines, int32_t* out, DType type, const void* tokens, int64_t step, int64_t count,
                            int64_t end_of_text) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (line >= lines.numel) return;
  int64_t offset[2];
  lines.offsets(line, offset);
  constexpr int kAtOnce = 8;  // loads in flight
  int last = 0;
  for (int64_t start = 0; start < count; start += kAtOnce * kWarp) {
    bool begins[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t t = start + k * kWarp + lane;
      begins[k] = t > 0 && t < count && load_index(type, tokens, offset[1] + (t - 1) * step) == end_of_text;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const auto first = static_cast<int>(start) + k * kWarp;
      const unsigned all = __ballot_sync(kFullWarp, begins[k]), so_far = all & (~0u >> (kWarp - 1 - lane));
      if (first + lane < count) out[offset[0] + first + lane] = so_far ? first + kWarp - 1 - __clz(so_far) : last;
      if (all) last = first + kWarp - 1 - __clz(all);
    }
  }
}

}  // namespace

void gather(const Stream& stream, const View& x, int dim, const View& index, const View& out) {
  check<ShapeError>(index.shape == out.shape, "[gather] kernel operands have shapes ", out.shape,
                    " and ", index.shape);
  check_lines("gather", x, dim, out);
  check<DTypeError>(x.dtype == out.dtype, "[gather] dtypes ", x.dtype, " and ", out.dtype,
                    " differ");
  View lines = x;  // x in out's shape, except for the indexed dimension
  lines.shape = out.shape;
  lines.strides[dim] = 0;
  pick("gather", stream, lines, {.size = x.shape[dim], .step = x.strides[dim]}, index, out);
}

void take(const Stream& stream, const View& x, int dim, const View& index, const View& out) {
  check_lines("take", x, dim, out);
  gather(stream, x, dim, broadcast_index("take", index, dim, out), out);
}

void scatter_add(const Stream& stream, const View& out, int dim, const View& index,
                 const View& src) {
  check<ShapeError>(index.shape == src.shape, "[scatter_add] kernel operands have shapes ",
                    src.shape, " and ", index.shape);
  check_lines("scatter_add", out, dim, src);
  add_by_index("scatter_add", stream, out, dim, index, src);
}

void take_add(const Stream& stream, const View& out, int dim, const View& index, const View& src) {
  check_lines("take_add", out, dim, src);
  add_by_index("take_add", stream, out, dim, broadcast_index("take_add", index, dim, src), src);
}

void cumsum(const Stream& stream, const View& x, int dim, bool reverse, const View& out) {
  check<ShapeError>(x.shape == out.shape, "[cumsum] kernel operands have shapes ", out.shape,
                    " and ", x.shape);
  if (x.numel() == 0) return;
  View from = x, to = out;
  if (reverse)
    for (View* v : {&from, &to}) {
      v->data = v->as<char>() +
                (v->shape[dim] - 1) * v->strides[dim] * static_cast<int64_t>(size_of(v->dtype));
      v->strides[dim] = -v->strides[dim];
    }
  const View from_lines = without(from, dim), to_lines = without(to, dim);
  const Layout<2> lines(to_lines.shape, {to_lines.strides, from_lines.strides});
  const LaunchShape shape{.blocks = blocks_for(lines.numel, kWarps), .threads = kThreads};
  launch("cumsum", stream, shape,
         is_floating(x.dtype) ? cumsum_lines<double> : cumsum_lines<int64_t>, lines, to.dtype,
         to.data, to.strides[dim], from.dtype, from.data, from.strides[dim], x.shape[dim]);
}

void pad(const Stream& stream, const View& x, const Shape& before, double value, const View& out) {
  // Fills before and after x in one dimension after another, each inside the earlier ones' interior: every element is written once.
  View inside = out;
  const auto part = [&](int d, int64_t start, int64_t size) {
    View v = inside;
    v.data = v.as<char>() + start * v.strides[d] * static_cast<int64_t>(size_of(v.dtype));
    v.shape[d] = size;
    return v;
  };
  for (int d = 0; d < x.rank(); ++d) {
    const int64_t end = before[d] + x.shape[d];
    check<ShapeError>(before[d] >= 0 && end <= out.shape[d], "[pad] ", x.shape, " at ", before,
                      " does not fit into ", out.shape);
  }
  for (int d = 0; d < x.rank(); ++d) {
    const int64_t end = before[d] + x.shape[d];
    fill(stream, part(d, 0, before[d]), value);
    fill(stream, part(d, end, out.shape[d] - end), value);
    inside = part(d, before[d], x.shape[d]);
  }
  copy(stream, x, inside);
}

void document_begins(const Stream& stream, const View& tokens, int64_t end_of_text, const View& out) {
  check_document_begins(tokens, out);
  if (tokens.numel() == 0) return;
  const int dim = tokens.rank() - 1;
  const View from = without(tokens, dim), to = without(out, dim);
  const Layout<2> lines(to.shape, {to.strides, from.strides});
  launch("document_begins", stream, {.blocks = blocks_for(lines.numel, kWarps), .threads = kThreads}, find_begins, lines,
         out.as<int32_t>(), tokens.dtype, tokens.data, tokens.strides[dim], tokens.shape[dim], end_of_text);
}

}  // namespace sheaf::kernels::cuda
