#include "sheaf/kernels/fused.h"

namespace sheaf::kernels {

FusedSlots::FusedSlots(const FusedCode& code) {
  int last_use[FusedCode::kMaxValues] = {};  // the last step that reads a value; kMaxSteps: it is an output
  for (int s = 0; s < code.num_steps; ++s)
    for (int i = 0; i < code.steps[s].num_operands; ++i) last_use[code.steps[s].operands[i]] = s;
  for (int o = 0; o < code.num_outputs; ++o) last_use[code.outputs[o]] = FusedCode::kMaxSteps;
  uint64_t taken = 0;
  const auto take = [&](int value) {
    int slot = 0;
    while (taken >> slot & 1) ++slot;
    taken |= uint64_t{1} << slot;
    of[value] = static_cast<uint8_t>(slot);
    count = slot + 1 > count ? slot + 1 : count;
  };
  for (int i = 0; i < code.num_inputs; ++i) take(i);
  for (int s = 0; s < code.num_steps; ++s) {
    // A value may reuse the slot of an operand that is not read again: elements are read before they are written.
    for (int i = 0; i < code.steps[s].num_operands; ++i) {
      const int v = code.steps[s].operands[i];
      const bool constant = v >= FusedCode::kFirstConstant && v < FusedCode::kFirstStep;
      if (!constant && last_use[v] == s) taken &= ~(uint64_t{1} << of[v]);
    }
    take(FusedCode::kFirstStep + s);
  }
}

}  // namespace sheaf::kernels
