// Compiled without fused multiply-add: the bits are those of the CPU's kernels.
#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/cuda/numbers.h"
#include "sheaf/kernels/random.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256;

enum class Kind : uint8_t { uniform, normal, dropout };

struct Draw {
  DrawKey from;
  uint64_t base;       // global index of the local element 0
  double a, b;         // lo and range, or mean and standard deviation; dropout: b is the scale
  uint64_t threshold;  // dropout: words below it drop
};

/// The words of elements in any order; neighbours share a Philox block.
class Words {
 public:
  /// `from` may depend on memory that work before this kernel has filled.
  explicit __device__ Words(const DrawKey& from)
      : key_(from.derived()), first_(from.first_index()) {}
  __device__ uint32_t u32(uint64_t index) {
    index += first_;
    load(index >> 2);
    const uint32_t low = index & 1 ? block_.word[1] : block_.word[0],
                   high = index & 1 ? block_.word[3] : block_.word[2];
    return index & 2 ? high : low;
  }
  __device__ uint64_t u64(uint64_t index) {
    index += first_;
    load(index >> 1);
    const uint32_t low = index & 1 ? block_.word[2] : block_.word[0],
                   high = index & 1 ? block_.word[3] : block_.word[1];
    return uint64_t{high} << 32 | low;
  }

 private:
  __device__ void load(uint64_t number) {
    if (number == loaded_) return;
    block_ = philox::block(key_, number), loaded_ = number;
  }
  Key key_;
  uint64_t first_;
  uint64_t loaded_ = ~uint64_t{0};  // no block has this number
  philox::Block block_{};
};

/// The type in which kernels compute: f64, but dropout in its operands' compute type.
template <Kind kKind, class C>
using Value = std::conditional_t<kKind == Kind::dropout, C, double>;

template <Kind kKind, class C>
__device__ C draw_value(const Draw& draw, Words& words, int64_t offset, C x) {
  const uint64_t index = draw.base + static_cast<uint64_t>(offset);
  if constexpr (kKind == Kind::uniform)
    return draw.a + draw.b * static_cast<double>(uniform_from(words.u32(index)));
  else if constexpr (kKind == Kind::normal)
    return draw.a + draw.b * normal_from(words.u64(index));
  else
    return words.u32(index) < draw.threshold ? C(0) : x * static_cast<C>(draw.b);
}

// Operands: out, the global tensor, x.

/// Dense operands of one type, 16 bytes at a time. `step` is the distance between the global indices of successive elements.
template <Kind kKind, class T>
__global__ void draw_packs(Draw draw, T* out, const T* x, int64_t step, int64_t numel) {
  using C = Value<kKind, Compute<T>>;
  constexpr int kSize = Pack<T>::kSize;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kSize;
  if (first >= numel) return;
  const int count = numel - first < kSize ? static_cast<int>(numel - first) : kSize;
  // Loops over packs are unrolled, tails too: arrays indexed at run time would be in local memory.
  Pack<T> in = {}, result = {};
  if (kKind == Kind::dropout) {
    if (count == kSize)
      in = load_pack(x + first);
    else
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        if (k < count) in.v[k] = x[first + k];
  }
  Words words(draw.from);
#pragma unroll
  for (int k = 0; k < kSize; ++k)
    result.v[k] =
        element<T>(draw_value<kKind, C>(draw, words, (first + k) * step, convert_to<C>(in.v[k])));
  if (count == kSize)
    store_pack(out + first, result);
  else
#pragma unroll
    for (int k = 0; k < kSize; ++k)
      if (k < count) out[first + k] = result.v[k];
}

/// Anything else: 4 elements per thread, which may share a block.
template <Kind kKind, class C>
__global__ void draw_elements(Draw draw, DType out_type, void* out, DType x_type, const void* x,
                              Layout<3> at) {
  constexpr int kCount = 4;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  Words words(draw.from);
  for (int64_t i = first; i < first + kCount && i < at.numel; ++i) {
    int64_t offset[3];
    at.offsets(i, offset);
    C value = 0;
    if (kKind == Kind::dropout) value = load_any<C>(x_type, x, offset[2]);
    store_any(out_type, out, offset[0], draw_value<kKind, C>(draw, words, offset[1], value));
  }
}

void check_where(const char* name, const View& v, const GlobalIndex& where) {
  if (!is_floating(v.dtype)) fail<DTypeError>('[', name, "] is not defined for ", v.dtype);
  bool fits = where.global_shape.rank() == v.rank() && where.start.rank() == v.rank();
  // Dimension 0 may extend beyond the global size: the number of samples is unbounded.
  for (int i = 0; fits && i < v.rank(); ++i)
    fits = where.start[i] >= 0 && (i == 0 || where.start[i] + v.shape[i] <= where.global_shape[i]);
  check<ShapeError>(fits, '[', name, "] a block of ", v.shape, " at ", where.start,
                    " does not lie in ", where.global_shape);
}

template <Kind kKind>
void run(const char* name, const Stream& stream, Draw draw, const GlobalIndex& where,
         const View& out, const View& x) {
  if (out.numel() == 0) return;
  const Shape global = where.global_shape.contiguous_strides();
  draw.base = 0;
  for (int d = 0; d < out.rank(); ++d)
    draw.base += static_cast<uint64_t>(where.start[d] * global[d]);
  const Layout<3> at(out.shape, {out.strides, global, x.strides});
  if (at.is_run(0) && at.is_run(2) && x.dtype == out.dtype && aligned16(out.data) &&
      aligned16(x.data)) {
    visit_floating(name, out.dtype, [&]<class T>() {
      launch(name, stream,
             {.blocks = blocks_for(at.numel, kThreads * Pack<T>::kSize), .threads = kThreads},
             draw_packs<kKind, T>, draw, out.as<T>(), x.as<const T>(), at.strides[1][0], at.numel);
    });
    return;
  }
  const LaunchShape shape{.blocks = blocks_for(at.numel, kThreads * 4), .threads = kThreads};
  if (x.dtype == kF64 || out.dtype == kF64 || kKind != Kind::dropout)
    launch(name, stream, shape, draw_elements<kKind, double>, draw, out.dtype, out.data, x.dtype,
           x.data, at);
  else
    launch(name, stream, shape, draw_elements<kKind, Value<kKind, float>>, draw, out.dtype,
           out.data, x.dtype, x.data, at);
}

}  // namespace

void uniform(const Stream& stream, const View& out, DrawKey key, const GlobalIndex& where,
             double lo, double hi) {
  check_where("uniform", out, where);
  run<Kind::uniform>("uniform", stream, {key, 0, lo, hi - lo, 0}, where, out, out);
}

void normal(const Stream& stream, const View& out, DrawKey key, const GlobalIndex& where,
            double mean, double std) {
  check_where("normal", out, where);
  run<Kind::normal>("normal", stream, {key, 0, mean, std, 0}, where, out, out);
}

void dropout(const Stream& stream, const View& x, double p, DrawKey key, const GlobalIndex& where,
             const View& out) {
  check_where("dropout", x, where);
  check<ShapeError>(x.shape == out.shape, "[dropout] kernel operands have shapes ", out.shape,
                    " and ", x.shape);
  check<ConfigError>(p >= 0.0 && p < 1.0, "[dropout] probability ", p, " is not in [0, 1)");
  run<Kind::dropout>("dropout", stream,
                     {key, 0, 0, 1.0 / (1.0 - p), static_cast<uint64_t>(p * 0x1p32)}, where, out,
                     x);
}

}  // namespace sheaf::kernels::cuda
