// Several elementwise operations in one pass over memory: intermediate values stay in the cache or in a GPU's registers. Each value
// is rounded to its dtype as if it were stored, and each operation is that of elementwise.h: results have the bits of separate
// kernels.
#pragma once

#include <cstdint>
#include <span>

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

struct FusedStep {
  enum Kind : uint8_t { unary, binary, backward, swiglu, shifted_swiglu, where, clamp, cast };
  Kind kind = cast;
  uint8_t op = 0;  ///< UnaryOp, BinaryOp or BackwardOp, by kind
  uint8_t num_operands = 0;
  uint8_t operands[3] = {0, 0, 0};  ///< values; clamp: x, lo, hi; shifted_swiglu: gate, up, alpha; bounds and alpha are constants
  DType dtype = kF32;               ///< of the value
};

/// The computation for each element, one value per step. Values are numbered: inputs from 0, constants from kFirstConstant,
/// steps from kFirstStep. Plain bytes without padding.
struct FusedCode {
  static constexpr int kMaxInputs = 12, kMaxConstants = 12, kMaxSteps = 32, kMaxOutputs = 6;
  static constexpr int kFirstConstant = kMaxInputs, kFirstStep = kMaxInputs + kMaxConstants;
  static constexpr int kMaxValues = kFirstStep + kMaxSteps;
  /// The most inputs and steps whose values are live at the same time.
  static constexpr int kMaxSlots = 24;

  double constants[kMaxConstants] = {};
  FusedStep steps[kMaxSteps];
  uint8_t outputs[kMaxOutputs] = {};  ///< numbers of steps, each once
  uint8_t num_inputs = 0, num_constants = 0, num_steps = 0, num_outputs = 0;
  DType compute = kF32;  ///< f32 if values are f32, bf16 and f16, else f64; bools are 0 and 1 in it
  uint8_t unused[5] = {};
};
static_assert(sizeof(FusedCode) == 336, "no padding");

/// `of[value]` is a slot for each input (its number) and step; values that are not live at the same time share one. And the number of
/// slots.
struct FusedSlots {
  explicit FusedSlots(const FusedCode& code);
  uint8_t of[FusedCode::kMaxValues] = {};
  int count = 0;
};

namespace cpu {
/// All views have one shape and any strides; outputs have the dtypes of their steps, and share no memory with other operands.
void fused(const FusedCode& code, std::span<const View> inputs, std::span<const View> outputs);
}  // namespace cpu
namespace cuda {
/// Loads the kernels' code while the device does not have to wait for other ranks (cuda/code_loading.h).
void load_fused();
void fused(const Stream& stream, const FusedCode& code, std::span<const View> inputs, std::span<const View> outputs);
}  // namespace cuda

}  // namespace sheaf::kernels
