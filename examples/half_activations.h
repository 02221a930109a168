// A pass over a tape: what the forward keeps for the backward is stored in bf16.
#pragma once

#include <map>

#include "sheaf/sheaf.h"

namespace examples {

/// The program with each f32 activation of at least `bytes` on this rank rounded to bf16 after its last use in the forward, and widened
/// again before its first use in the backward. Gradients are those of the rounded activations (compare ActNN,
/// https://arxiv.org/abs/2104.14129, which rounds further). Statistics, which have no row of numbers per token, stay as they are.
inline sheaf::Program with_half_activations(const sheaf::Program& plain, int64_t bytes = 4096) {
  using namespace sheaf;
  TapeEditor edit(plain.tape());
  const Tape& tape = edit.tape();
  struct Uses {
    NodeId last_forward = -1, first_backward = -1;
    bool is_memory_of_others = false;
  };
  std::map<ValueId, Uses> uses;
  const NodeId nodes = tape.num_nodes();
  for (NodeId id = 0; id < nodes; ++id) {
    const Node& n = tape.node(id);
    for (const ValueId v : tape.inputs(n)) {
      Uses& of = uses[v];
      if (n.phase == Phase::forward && of.first_backward < 0) of.last_forward = id;
      if (n.phase == Phase::backward && of.first_backward < 0) of.first_backward = id;
    }
    for (int o = 0; o < n.num_outputs; ++o)
      if (const ValueId base = tape.value(tape.output(n, o)).base; base >= 0) uses[base].is_memory_of_others = true;
  }
  for (const auto& [v, of] : uses) {
    const Node& n = tape.node(tape.value(v).producer);
    if (tape.kind(n) != OpKind::op || n.op->of_units || n.phase != Phase::forward) continue;
    const Type &type = tape.type(v), &result = tape.type(tape.output(n));
    const bool has_rows = type.shape.rank() == 3 && result.shape.rank() == 3 && type.shape[1] == result.shape[1];  // [B, T, C]
    if (!has_rows || type.dtype != kF32 || type.local_shape().numel() * 4 < bytes || tape.value(v).base >= 0) continue;
    if (of.is_memory_of_others || of.last_forward < 0 || of.first_backward < 0) continue;
    const ValueId half = edit.insert(of.last_forward + 1, [](const Tensor& x) { return cast(x, kBF16); }, v);
    const ValueId back = edit.insert(of.first_backward, [](const Tensor& x) { return cast(x, kF32); }, half);
    edit.replace(v, back, of.first_backward);
  }
  return plain.with_tape(edit.take());
}

}  // namespace examples
