// Tape: a training step as data. A straight-line program in execution order that can be printed, compared, checked and replayed; it
// holds no closures and no values, so it outlives everything it was recorded from.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sheaf/autograd/op.h"

namespace sheaf {

using ValueId = int32_t;
using NodeId = int32_t;
enum class Phase : uint8_t { forward, backward, update };
std::string_view name(Phase phase);
std::string_view name(Lane lane);

struct Node {
  const OpDef* op;   ///< null for a leaf
  uint32_t attrs;    ///< offset into the tape's attribute bytes
  uint32_t inputs;   ///< offset into the tape's edges
  uint32_t outputs;  ///< first output value; the others follow
  int32_t num_outputs;
  uint32_t path;  ///< module path
  uint16_t num_inputs;
  Phase phase;
  uint8_t flags;          ///< bits below
  static constexpr uint8_t kAdds = 1;        ///< output 0 adds to its memory
  static constexpr uint8_t kMirror = 2;      ///< a gather that mirrors a discard of the forward
  static constexpr uint8_t kPrefetched = 4;  ///< issued ahead of its use
  static constexpr uint8_t kRecomputed = 8;  ///< repeats a node of the forward whose values were not kept
  static constexpr uint8_t kPerRank = 16;    ///< within rowwise() or local_map(), where shapes are a rank's own
};
static_assert(sizeof(Node) <= 128 && std::is_trivially_destructible_v<Node>);

/// The purpose of the memory of a node's fresh outputs: as its op specifies, else by its phase and flags.
HeldFor held_for(const OpDef& op, Phase phase, uint8_t flags);

struct Value {
  uint32_t type;  ///< into the tape's types
  NodeId producer;
  ValueId base = -1;        ///< >= 0: placed inside this value's memory (a slot, or an update in place)
  ValueId view_of = -1;     ///< >= 0: an op's view of its input, which shares its memory
  int64_t byte_offset = 0;  ///< byte offset in base
  /// The value whose memory it shares, directly; -1: its own.
  ValueId lies_in() const { return base >= 0 ? base : view_of; }
};

class Tape {
 public:
  int num_nodes() const { return static_cast<int>(nodes_.size()); }
  int num_values() const { return static_cast<int>(values_.size()); }
  const Node& node(NodeId i) const { return nodes_[i]; }
  const Value& value(ValueId v) const { return values_[v]; }
  const Type& type(ValueId v) const { return types_[values_[v].type]; }
  /// The value that owns its memory, through views of views; itself, if it owns it.
  ValueId whole_of(ValueId v) const {
    while (value(v).lies_in() >= 0) v = value(v).lies_in();
    return v;
  }
  std::span<const ValueId> inputs(const Node& n) const { return {edges_.data() + n.inputs, n.num_inputs}; }
  ValueId output(const Node& n, int i = 0) const { return static_cast<ValueId>(n.outputs) + i; }
  const std::string& path(const Node& n) const { return paths_[n.path]; }
  const void* attrs(const Node& n) const { return attrs_.data() + n.attrs; }
  /// The op's name; for a leaf "leaf", for a redistribution what it does ("all_gather", "slice", ...).
  std::string op_name(const Node& n) const;
  OpKind kind(const Node& n) const { return n.op ? n.op->kind : OpKind::leaf; }
  /// Leaf values in the order of their first use, with their names.
  std::vector<ValueId> leaves() const;
  const std::string& leaf_name(ValueId v) const;
  /// Where the rank that recorded it is on this mesh; zeros, if it had not joined it.
  std::vector<int> coordinates(const MeshSpec* mesh) const;
  /// Payload bytes this rank receives in node `n` (0 for anything local).
  int64_t wire_bytes(const Node& n) const;
  /// Each gradient that a reverse pass produced, with the value that it is the gradient of, or a contribution to.
  const std::vector<std::pair<ValueId, ValueId>>& cotangents() const { return cotangents_; }

  // --- for Recording and TapeEditor ---
  ValueId add_leaf(const Type& type, std::string_view name, std::string_view path, Phase phase);
  NodeId add_node(const OpDef& op, const void* attrs, std::span<const ValueId> inputs, std::span<const Type* const> outputs,
                  std::string_view path, Phase phase, uint8_t flags = 0);
  void note_cotangent(ValueId gradient, ValueId primal) { cotangents_.emplace_back(gradient, primal); }
  Value& mutable_value(ValueId v) { return values_[v]; }
  Node& mutable_node(NodeId i) { return nodes_[i]; }
  void erase_node(NodeId i);  ///< for tests that break tapes; values keep their ids
  void swap_nodes(NodeId a, NodeId b) { std::swap(nodes_[a], nodes_[b]); }
  void clear();  ///< keeps the memory
  void retype(ValueId v, const Type& type) { values_[v].type = intern_type(type); }
  std::span<ValueId> mutable_inputs(const Node& n) { return {edges_.data() + n.inputs, n.num_inputs}; }
  template <class F>
  void map_cotangents(F&& f) {
    for (auto& [gradient, primal] : cotangents_) gradient = f(gradient), primal = f(primal);
  }
  /// Keeps these nodes, in this order; no kept node may use outputs of the others. Values keep their ids.
  void arrange_nodes(std::span<const NodeId> order);

 private:
  uint32_t intern_type(const Type& type);
  void note_coordinates(const MeshSpec* mesh);
  uint32_t intern_path(std::string_view path);

  std::vector<Node> nodes_;
  std::vector<Value> values_;
  std::vector<ValueId> edges_;
  uint32_t last_type_ = 0, last_path_ = 0;  // interned: neighbours often share them
  std::deque<Type> types_;                  // deques: a vjp holds references while it records
  std::deque<std::string> paths_;
  std::vector<char> attrs_;
  std::unordered_map<std::string, uint32_t> path_ids_;
  std::unordered_map<uint64_t, std::vector<uint32_t>> type_ids_;
  std::unordered_map<const MeshSpec*, std::vector<int>> coordinates_;
  std::unordered_map<ValueId, std::string> leaf_names_;
  std::vector<std::pair<ValueId, ValueId>> cotangents_;
};

/// Runs a tape again, backward and optimizer included. `leaf(v)` gives the value that leaf v had before the step; leaves that the
/// step updates are overwritten. Returns the values whose ids are in `wanted`. Bitwise equal to the recording, on every rank, if all
/// ranks replay.
std::vector<Tensor> replay(const Tape& tape, const std::function<Tensor(ValueId)>& leaf,
                           std::span<const ValueId> wanted);

}  // namespace sheaf
