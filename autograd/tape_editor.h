// TapeEditor: how passes change a tape. New nodes are recorded from code in the same ops that models are written in, so that their
// computation, types and placements follow from the same rules; a pass that asks for a sum over a Shard gets the all_reduce with it.
//
//   std::vector<ValueId> sums;
//   TapeEditor edit(plain.tape());                             // plain: a Program (compile.h)
//   const auto squares = [](const Tensor& x) { return sum(square(x)); };
//   for (NodeId id = 0; id < edit.tape().num_nodes(); ++id)    // ids refer to the original tape
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

  /// The given tape, with the nodes inserted since appended.
  const Tape& tape() const { return tape_; }

  /// Records what `code` computes from stand-ins for `inputs`, and inserts it before node `before` (at the end for the number of
  /// nodes), after earlier insertions there; returns the ids of its results. It has that node's phase, and the path of PathScopes in
  /// the code, else that of the first input's producer. Nothing is computed: stand-ins have types but no data, and are dense (for an
  /// op that needs that of a value which is a strided view, copy_of() it). The code must use nothing else that has memory
  /// (ConfigError): constants only as numbers in ops. Inputs might not exist yet at that place, or no longer hold the same value:
  /// check_tape() and Program::with_tape() detect only the former. ConfigError for a place that the tape does not have.
  std::vector<ValueId> insert(NodeId before, const TensorFunction& code, std::span<const ValueId> inputs);
  /// The same for code that takes this many tensors and returns one; returns its id.
  template <class F, std::convertible_to<ValueId>... Inputs>
    requires(sizeof...(Inputs) > 0)
  ValueId insert(NodeId before, F&& code, Inputs... inputs) {
    const ValueId ids[] = {inputs...};
    const auto call = [&]<size_t... I>(std::span<const Tensor> x, std::index_sequence<I...>) { return std::vector<Tensor>{code(x[I]...)}; };
    return insert(before, [&](std::span<const Tensor> x) { return call(x, std::index_sequence_for<Inputs...>()); }, ids)[0];
  }
  /// A node with these attributes, whose results have these types and memory of their own. All of it may be that of another node of
  /// this tape.
  NodeId insert_node(NodeId before, const OpDef& op, const void* attrs, std::span<const ValueId> inputs, std::span<const Type* const> outputs,
                     std::string_view path, Phase phase, uint8_t flags = 0);

  /// From node `from` on, `by` replaces `value`: that node and all later ones, inserted ones included, read it or store into it
  /// instead. The last replacement before a node applies. PlacementError for values of different types.
  void replace(ValueId value, ValueId by, NodeId from);
  /// Only nodes of the original tape.
  void erase(NodeId node) { gone_[node] = true; }
  bool is_erased(NodeId node) const { return gone_[node]; }

  /// Erases each node whose results nothing uses, those in `wanted` aside, and which has no side effects: ops that are computed on
  /// this rank.
  void erase_unused(std::span<const ValueId> wanted);

  /// The edited tape. LifetimeError if a node that is kept reads the output of an erased one. The editor is empty afterwards.
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
  NodeId given_;  // number of original nodes
  std::vector<bool> gone_;
  std::vector<std::vector<NodeId>> before_;  // inserted nodes, by position
  std::unordered_map<ValueId, std::vector<Replacement>> replaced_;
};

}  // namespace sheaf
