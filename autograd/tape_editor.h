// TapeEditor: how passes change a tape. New nodes are recorded from code in the ops that models are written in, so that what they compute,
// its type and its placement follow from the same rules; a pass that asks for a sum over a Shard gets the all_reduce with it.
//
//   std::vector<ValueId> sums;
//   TapeEditor edit(plain.tape());                             // plain: a Program (compile.h)
//   const auto squares = [](const Tensor& x) { return sum(square(x)); };
//   for (NodeId id = 0; id < edit.tape().num_nodes(); ++id)    // nodes are meant by their ids in the tape that was given
//     if (...) sums.push_back(edit.insert(id + 1, squares, some value));
//   return plain.with_tape(edit.take(), sums);                 // which checks it
#pragma once

#include <concepts>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sheaf/autograd/tape.h"
#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

/// Values keep their ids throughout, nodes until take(). On all ranks collectives must stay alike.
class TapeEditor {
 public:
  explicit TapeEditor(Tape tape);

  /// The tape that was given, and behind its nodes those that were inserted since.
  const Tape& tape() const { return tape_; }

  /// Records what `code` makes of stand-ins for `inputs`, and puts that in front of node `before` (behind all for the number of nodes),
  /// behind what was put there earlier; returns what stands for its results. It is of that node's phase, and has the path of PathScopes in
  /// the code, else that of what makes the first input. Nothing is computed: stand-ins have types and no bytes, and are dense (for
  /// an op that wants that of a value which is a strided view, copy_of() it). The code may use nothing else that has memory (ConfigError):
  /// of constants, numbers in ops. What is read need not be there at that place, and need not be the same value any more: check_tape() and
  /// Program::with_tape() find out the former alone. ConfigError for a place that the tape does not have.
  std::vector<ValueId> insert(NodeId before, const TensorFunction& code, std::span<const ValueId> inputs);
  /// The same, of code that takes so many tensors and returns one: what stands for that.
  template <class F, std::convertible_to<ValueId>... Inputs>
    requires(sizeof...(Inputs) > 0)
  ValueId insert(NodeId before, F&& code, Inputs... inputs) {
    const ValueId ids[] = {inputs...};
    const auto call = [&]<size_t... I>(std::span<const Tensor> x, std::index_sequence<I...>) { return std::vector<Tensor>{code(x[I]...)}; };
    return insert(before, [&](std::span<const Tensor> x) { return call(x, std::index_sequence_for<Inputs...>()); }, ids)[0];
  }
  /// A node of these attributes; its results have these types, in memory of their own.
  NodeId insert_node(NodeId before, const OpDef& op, const void* attrs, std::span<const ValueId> inputs, std::span<const Type* const> outputs,
                     std::string_view path, Phase phase, uint8_t flags = 0);

  /// From node `from` on `by` is in place of `value`: that node and those behind it, what is inserted between them included, read it or store into
  /// it instead. The last replacement before a node holds. PlacementError for values of different types.
  void replace(ValueId value, ValueId by, NodeId from);
  /// Of a node from the beginning.
  void erase(NodeId node) { gone_[node] = true; }
  bool is_erased(NodeId node) const { return gone_[node]; }

  /// Erases each node whose results nobody has, those `wanted` aside, and that does nothing else: ops that are computed here.
  void erase_unused(std::span<const ValueId> wanted);

  /// The outcome. LifetimeError if a node that stays has what one makes that does not. The editor is empty then.
  Tape take();

 private:
  struct Replacement {
    NodeId from;
    ValueId by;
  };
  void expect_place(NodeId before) const;
  ValueId now(ValueId v, NodeId place) const;
  void settle();

  Tape tape_;
  NodeId given_;                                // nodes that it began with
  std::vector<bool> gone_;
  std::vector<std::vector<NodeId>> before_;     // inserted, by where
  std::unordered_map<ValueId, std::vector<Replacement>> replaced_;
};

}  // namespace sheaf
