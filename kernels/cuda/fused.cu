#include "sheaf/kernels/fused.h"

#include "sheaf/kernels/cuda/element_functions.h"

namespace sheaf::kernels::cuda {
namespace {

// A thread has K neighbouring elements of each value, in its own part of shared memory: which value is read where is known only at
// run time, and registers cannot be indexed. The code is the same for all threads, so that no warp diverges.

// Parameters that are indexed at run time are read in place, not from a copy in each thread.
#if SHEAF_CUDA_EMULATED
#define SHEAF_GRID_CONSTANT const
#else
#define SHEAF_GRID_CONSTANT const __grid_constant__
#endif

constexpr int kThreads = 128;
constexpr int kOperands = FusedCode::kMaxInputs + FusedCode::kMaxOutputs;

struct Operands : Layout<kOperands> {
  void* data[kOperands];
  DType dtype[kOperands];
  unsigned wide;  // operands of which a thread has K elements; the others have one for all K
};

/// K elements of one thread, at most 16 bytes apart from those of its neighbours: no bank conflicts.
template <class C, int K>
struct Slots {
  static constexpr int kUnit = 16 / sizeof(C) < K ? 16 / sizeof(C) : K;
  C* memory;
  __device__ C* unit(int slot, int u) const {
    return memory + ((slot * (K / kUnit) + u) * kThreads + static_cast<int>(threadIdx.x)) * kUnit;
  }
  using Unit = Group<C, kUnit>;
  __device__ void get(int slot, C (&x)[K]) const {
#pragma unroll
    for (int u = 0; u < K / kUnit; ++u) {
      const Unit group = *reinterpret_cast<const Unit*>(unit(slot, u));
#pragma unroll
      for (int k = 0; k < kUnit; ++k) x[u * kUnit + k] = group.v[k];
    }
  }
  __device__ void put(int slot, const C (&x)[K]) const {
#pragma unroll
    for (int u = 0; u < K / kUnit; ++u) {
      Unit group;
#pragma unroll
      for (int k = 0; k < kUnit; ++k) group.v[k] = x[u * kUnit + k];
      *reinterpret_cast<Unit*>(unit(slot, u)) = group;
    }
  }
};

/// K elements of an operand on their way, as words: converted where it is loaded, each operand would be waited for before the next.
template <class C, int K>
struct Loaded {
  static constexpr int kWords = K * static_cast<int>(sizeof(C)) / 4;
  Group<unsigned, kWords> words;

  template <class T>
  __device__ void load_group(const void* from, int64_t at) {
    using Words = Group<unsigned, K * static_cast<int>(sizeof(T)) / 4>;
    const Words group = *reinterpret_cast<const Words*>(static_cast<const T*>(from) + at);
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(Words)) / 4; ++k) words.v[k] = group.v[k];
  }
  __device__ void load(DType dtype, const void* from, int64_t at, bool wide) {
    if constexpr (K > 1) {
      if (wide && dtype == kF32) return load_group<float>(from, at);
      if (wide && (dtype == kBF16 || dtype == kF16)) return load_group<bf16>(from, at);
    }
    C x[K];
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = k == 0 || wide ? load_any<C>(dtype, from, at + k) : x[0];
    memcpy(&words, x, sizeof x);
  }
  template <class T>
  __device__ void narrow_values(C (&x)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      T half;
      half.bits = static_cast<uint16_t>(words.v[k / 2] >> (k % 2 * 16));
      x[k] = convert_to<C>(half);
    }
  }
  __device__ void values(DType dtype, bool wide, C (&x)[K]) const {
    if constexpr (K > 1) {
      if (wide && dtype == kBF16) return narrow_values<bf16>(x);
      if (wide && dtype == kF16) return narrow_values<f16>(x);
    }
    memcpy(x, &words, sizeof x);
  }
};

template <class T, class C, int K>
__device__ void store_group(void* to, int64_t at, const C (&x)[K]) {
  Group<T, K> group;
#pragma unroll
  for (int k = 0; k < K; ++k) group.v[k] = element<T>(x[k]);
  *reinterpret_cast<Group<T, K>*>(static_cast<T*>(to) + at) = group;
}
template <class C, int K>
__device__ void store(DType dtype, void* to, int64_t at, const C (&x)[K]) {
  if constexpr (K > 1) {
    if (dtype == kF32) return store_group<float>(to, at, x);
    if (dtype == kBF16) return store_group<bf16>(to, at, x);
    if (dtype == kF16) return store_group<f16>(to, at, x);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) store_any<C>(dtype, to, at + k, x[k]);
}

/// As if x had been stored and loaded.
template <class C>
__device__ C rounded(DType dtype, C x) {
  if (dtype == kBF16) return convert_to<C>(element<bf16>(x));
  if (dtype == kF16) return convert_to<C>(element<f16>(x));
  if (dtype == kBool) return C(x != C(0));
  return x;
}

template <class C, int K>
__device__ void compute(const FusedStep& s, const C (&x)[K], const C (&y)[K], const C (&z)[K], C (&to)[K]) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < K; ++k) to[k] = f(k);
  };
  switch (s.kind) {
    case FusedStep::unary:
      choose_unary<C>(static_cast<UnaryOp>(s.op), [&](auto f) { each([&](int k) { return f(x[k]); }); });
      break;
    case FusedStep::binary:
      choose_binary<C>(static_cast<BinaryOp>(s.op), [&](auto f) { each([&](int k) { return f(x[k], y[k]); }); });
      break;
    case FusedStep::backward:
      choose_backward<C>(static_cast<BackwardOp>(s.op), [&](auto f) { each([&](int k) { return f(x[k], y[k]); }); });
      break;
    case FusedStep::swiglu:
      each([&](int k) { return swiglu_of(x[k], y[k]); });
      break;
    case FusedStep::shifted_swiglu:
      each([&](int k) { return shifted_swiglu_of(x[k], y[k], z[k]); });
      break;
    case FusedStep::where:
      each([&](int k) { return x[k] != C(0) ? y[k] : z[k]; });
      break;
    case FusedStep::clamp:
      each([&](int k) { return clamp_of(x[k], y[k], z[k]); });
      break;
    case FusedStep::cast:
      each([&](int k) { return x[k]; });
      break;
  }
  each([&](int k) { return rounded(s.dtype, to[k]); });
}

template <class C, int K>
__global__ void run_code(SHEAF_GRID_CONSTANT FusedCode code, SHEAF_GRID_CONSTANT FusedSlots slots,
                         SHEAF_GRID_CONSTANT Operands at) {
  const Slots<C, K> kept{dynamic_shared<C>()};
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= at.numel) return;
  const auto offset = [&](int operand) {
    const int64_t of = at.offset(operand, i);
    return at.wide >> operand & 1 ? of * K : of;
  };
  constexpr int kAtOnce = 4;  // loads in flight together
  for (int first = 0; first < code.num_inputs; first += kAtOnce) {
    Loaded<C, K> loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int operand = FusedCode::kMaxOutputs + first + j;
      if (first + j < code.num_inputs) loaded[j].load(at.dtype[operand], at.data[operand], offset(operand), (at.wide >> operand & 1) != 0);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int operand = FusedCode::kMaxOutputs + first + j;
      if (first + j >= code.num_inputs) continue;
      C x[K];
      loaded[j].values(at.dtype[operand], (at.wide >> operand & 1) != 0, x);
      kept.put(slots.of[first + j], x);
    }
  }
  const auto value = [&](int number, C (&x)[K]) {
    if (number < FusedCode::kFirstConstant || number >= FusedCode::kFirstStep) return kept.get(slots.of[number], x);
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = static_cast<C>(code.constants[number - FusedCode::kFirstConstant]);
  };
  for (int s = 0; s < code.num_steps; ++s) {
    const FusedStep& step = code.steps[s];
    C x[K], y[K] = {}, z[K] = {}, to[K];
    const int operands = step.num_operands;
    value(step.operands[0], x);
    if (operands > 1) value(step.operands[1], y);
    if (operands > 2) value(step.operands[2], z);
    compute(step, x, y, z, to);
    kept.put(slots.of[FusedCode::kFirstStep + s], to);
  }
  for (int o = 0; o < code.num_outputs; ++o) {
    C x[K];
    kept.get(slots.of[code.outputs[o]], x);
    store(at.dtype[o], at.data[o], offset(o), x);
  }
}

template <class C, int K>
void start(const Stream& stream, const FusedCode& code, const FusedSlots& slots, Operands at) {
  at.fold(K, at.wide);
  launch("fused", stream,
         {.blocks = blocks_for(at.numel, kThreads),
          .threads = kThreads,
          .shared_bytes = static_cast<size_t>(slots.count) * K * kThreads * sizeof(C)},
         run_code<C, K>, code, slots, at);
}

}  // namespace

void load_fused() {
  const CodeLoading loading;
  const auto load = [](auto kernel) { launch("fused", Stream{}, {.threads = kThreads}, kernel, FusedCode(), FusedSlots(FusedCode()), Operands()); };
  load(run_code<double, 1>), load(run_code<float, 1>), load(run_code<float, 4>), load(run_code<float, 8>);
}

void fused(const Stream& stream, const FusedCode& code, std::span<const View> inputs, std::span<const View> outputs) {
  const Shape& shape = outputs[0].shape;
  std::array<Shape, kOperands> strides;
  strides.fill(Shape::filled(shape.rank(), 0));
  std::array<const View*, kOperands> views = {};
  for (int o = 0; o < code.num_outputs; ++o) views[o] = &outputs[o];
  for (int i = 0; i < code.num_inputs; ++i) views[FusedCode::kMaxOutputs + i] = &inputs[i];
  for (int n = 0; n < kOperands; ++n) {
    if (!views[n]) continue;
    check<ShapeError>(views[n]->shape == shape, "[fused] kernel operands have shapes ", shape, " and ", views[n]->shape);
    strides[n] = views[n]->strides;
  }
  Operands at{Layout<kOperands>(shape, strides), {}, {}, 0};
  if (at.numel == 0) return;
  bool aligned = true, halves = false;
  for (int n = 0; n < kOperands; ++n) {
    if (!views[n]) continue;
    at.data[n] = views[n]->data, at.dtype[n] = views[n]->dtype;
    if (at.strides[n][at.rank - 1] == 0) continue;
    at.wide |= 1u << n;
    aligned = aligned && aligned16(views[n]->data);
    halves = halves || size_of(at.dtype[n]) == 2;
  }
  const unsigned outputs_wide = (1u << code.num_outputs) - 1;
  const auto folds = [&](int width) { return aligned && (at.wide & outputs_wide) == outputs_wide && at.folds(width, at.wide); };
  const FusedSlots slots(code);
  if (code.compute == kF64) start<double, 1>(stream, code, slots, at);
  else if (halves && slots.count <= FusedCode::kMaxSlots / 2 && folds(8)) start<float, 8>(stream, code, slots, at);
  else if (folds(4)) start<float, 4>(stream, code, slots, at);
  else start<float, 1>(stream, code, slots, at);
}

}  // namespace sheaf::kernels::cuda
