// Applies a node of a tape once more.
#pragma once

#include <cstring>
#include <span>

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/tape.h"

namespace sheaf {

/// A copy of a node's attributes, whose address is stable while the tape grows.
class AttrsCopy {
 public:
  AttrsCopy(const Tape& tape, const Node& n) : words_((n.op->attrs_size + 7) / 8) {
    if (n.op->attrs_size) std::memcpy(words_.data(), tape.attrs(n), n.op->attrs_size);
  }
  const void* data() const { return words_.data(); }

 private:
  SmallVector<uint64_t, 16> words_;  // attributes need no stricter alignment
};

/// The op of `n`, which must not be stored in the tape (it may grow), on these inputs, with outputs of the node's types, in fresh
/// memory.
inline Tensors replay_node(const Tape& tape, const Node& n, std::span<const Tensor> inputs) {
  std::vector<OutputSpec> specs(n.num_outputs);
  for (int o = 0; o < n.num_outputs; ++o) specs[o].type = tape.type(tape.output(n, o));
  const AttrsCopy attrs(tape, n);
  return apply_typed(*n.op, attrs.data(), inputs, specs);
}

/// The same for a node and the next one, executed as one (detail::apply_typed_and_redistribute).
inline std::pair<Tensor, Tensor> replay_and_redistribute(const Tape& tape, const Node& n, const Node& scatter, std::span<const Tensor> inputs,
                                                    uint8_t flags) {
  const AttrsCopy attrs(tape, n), of_scatter(tape, scatter);
  return detail::apply_typed_and_redistribute(*n.op, attrs.data(), inputs, {.type = tape.type(tape.output(n))}, of_scatter.data(),
                                    Type(tape.type(tape.output(scatter))), flags);
}

}  // namespace sheaf
