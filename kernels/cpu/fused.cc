#include "sheaf/kernels/fused.h"

#include <optional>

#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/elementwise_loops.h"
#include "sheaf/kernels/cpu/lanes.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

template <class S>
void round_lanes(float* values, int64_t n) {
  for_lanes(n, [&](int64_t i, auto count) { store_lanes(values + i, rounded_lanes<S>(load_lanes(values + i, count)), count); });
}

/// As if the values had been stored and loaded.
template <class C>
void round_to(DType dtype, C* values, int64_t n) {
  if constexpr (std::is_same_v<C, float>) {
    if (dtype == kBF16) return round_lanes<bf16>(values, n);
    if (dtype == kF16) return round_lanes<f16>(values, n);
  }
  double stored[kBlock];  // room for any dtype
  store_run(dtype, stored, 1, n, values);
  load_run(dtype, stored, 1, n, values);
}

template <class C>
void run_step(const FusedStep& s, C* to, const C* x, const C* y, const C* z, int64_t n) {
  switch (s.kind) {
    case FusedStep::unary:
      return unary_loop<C, C>(static_cast<UnaryOp>(s.op))(to, x, n);
    case FusedStep::binary:
      return binary_loop<C, C>(static_cast<BinaryOp>(s.op))(to, x, y, n);
    case FusedStep::backward:
      return backward_loop<C>(static_cast<BackwardOp>(s.op))(to, x, y, n);
    case FusedStep::swiglu:
      return swiglu_loop(to, x, y, n);
    case FusedStep::shifted_swiglu:
      return shifted_swiglu_loop(to, x, y, *z, n);
    case FusedStep::where:
      return where_loop(to, x, y, z, n);
    case FusedStep::clamp:
      return clamp_loop(to, x, *y, *z, n);
    case FusedStep::cast:
      if (to != x) std::copy_n(x, n, to);
      return;
  }
}

/// A thread's buffers: a block of each value.
template <class C>
class Blocks {
 public:
  Blocks(const FusedCode& code, const FusedSlots& slots, std::span<const View> inputs, std::span<const View> outputs, int64_t begin)
      : code_(code), slots_(slots) {
    for (int i = 0; i < code.num_inputs; ++i) in_[i].emplace(inputs[i], begin);
    for (int o = 0; o < code.num_outputs; ++o) {
      out_[o].emplace(outputs[o], begin);
      output_of_[code.outputs[o]] = static_cast<int8_t>(o + 1);
    }
    for (int c = 0; c < code.num_constants; ++c) {
      std::fill_n(constants_[c], kBlock, static_cast<C>(code.constants[c]));
      at_[FusedCode::kFirstConstant + c] = constants_[c];
    }
  }

  /// The next elements, at most `n`; returns how many.
  int64_t run(int64_t n) {
    for (int i = 0; i < code_.num_inputs; ++i) n = in_[i]->limit(n);
    for (int o = 0; o < code_.num_outputs; ++o) n = out_[o]->limit(n);
    for (int i = 0; i < code_.num_inputs; ++i) at_[i] = in_[i]->next(n);
    for (int s = 0; s < code_.num_steps; ++s) {
      const FusedStep& step = code_.steps[s];
      const int value = FusedCode::kFirstStep + s, output = output_of_[value] - 1;
      C* const to = output >= 0 ? out_[output]->next(n) : slot_buffers_[slots_.of[value]];
      run_step(step, to, at_[step.operands[0]], at_[step.operands[1]], at_[step.operands[2]], n);
      if (step.dtype != dtype_of<C> && !(step.dtype == kBool && step.kind != FusedStep::cast)) round_to(step.dtype, to, n);
      at_[value] = to;
    }
    for (int o = 0; o < code_.num_outputs; ++o) out_[o]->done(n);
    return n;
  }

 private:
  const FusedCode& code_;
  const FusedSlots& slots_;
  std::optional<BlockInput<C>> in_[FusedCode::kMaxInputs];
  std::optional<BlockOutput<C>> out_[FusedCode::kMaxOutputs];
  int8_t output_of_[FusedCode::kMaxValues] = {};  // from 1
  const C* at_[FusedCode::kMaxValues] = {};
  C constants_[FusedCode::kMaxConstants][kBlock];
  C slot_buffers_[FusedCode::kMaxSlots][kBlock];
};

template <class C>
void run_all(const FusedCode& code, std::span<const View> inputs, std::span<const View> outputs) {
  const FusedSlots slots(code);
  const int64_t grain = std::max(kBlock, kGrain / std::max<int64_t>(1, code.num_steps / 2));
  parallel_for(outputs[0].numel(), grain, [&](int64_t begin, int64_t end) {
    Blocks<C> blocks(code, slots, inputs, outputs, begin);
    for (int64_t i = begin; i < end;) i += blocks.run(std::min(kBlock, end - i));
  });
}

}  // namespace

void fused(const FusedCode& code, std::span<const View> inputs, std::span<const View> outputs) {
  for (const View& v : inputs) check_shapes("fused", outputs[0], v);
  for (const View& v : outputs) check_shapes("fused", outputs[0], v);
  code.compute == kF64 ? run_all<double>(code, inputs, outputs) : run_all<float>(code, inputs, outputs);
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
