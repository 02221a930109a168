#include "sheaf/autograd/tape.h"

#include <algorithm>
#include <cstring>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

std::string_view name(Phase phase) {
  constexpr std::string_view kNames[] = {"forward", "backward", "update"};
  return kNames[static_cast<int>(phase)];
}
HeldFor held_for(const OpDef& op, Phase phase, uint8_t flags) {
  if (op.held_for != HeldFor::other) return op.held_for;
  if (phase == Phase::update) return HeldFor::temporaries;
  return phase == Phase::forward || (flags & Node::kRecomputed) ? HeldFor::activations : HeldFor::activation_gradients;
}

std::string_view name(Lane lane) {
  constexpr std::string_view kNames[] = {"compute", "gather", "reduce", "copy"};
  return kNames[static_cast<int>(lane)];
}

uint32_t Tape::intern_type(const Type& type) {
  if (last_type_ < types_.size() && types_[last_type_] == type) return last_type_;
  uint64_t hash = static_cast<uint64_t>(type.dtype) + 1;
  for (int64_t d : type.shape) hash = hash * 1099511628211ull + static_cast<uint64_t>(d);
  for (int a = 0; a < type.layout.num_axes(); ++a)
    hash = hash * 31 + static_cast<uint64_t>(type.layout[a].kind()) * 7 + static_cast<uint64_t>(type.layout[a].map().dim());
  std::vector<uint32_t>& bucket = type_ids_[hash];
  for (uint32_t id : bucket)
    if (types_[id] == type) return last_type_ = id;
  types_.push_back(type);
  note_coordinates(type.layout.mesh());
  bucket.push_back(static_cast<uint32_t>(types_.size() - 1));
  return last_type_ = bucket.back();
}

// Now, since a tape outlives what the rank has joined.
void Tape::note_coordinates(const MeshSpec* mesh) {
  const RankContext& rank = RankContext::current();
  if (!mesh || coordinates_.contains(mesh) || !rank.runtime(mesh)) return;
  std::vector<int>& at = coordinates_[mesh];
  for (int a = 0; a < mesh->num_axes(); ++a) at.push_back(rank.coordinate(mesh, a));
}

std::vector<int> Tape::coordinates(const MeshSpec* mesh) const {
  const auto known = coordinates_.find(mesh);
  return known != coordinates_.end() ? known->second : std::vector<int>(static_cast<size_t>(mesh->num_axes()), 0);
}

uint32_t Tape::intern_path(std::string_view path) {
  if (last_path_ < paths_.size() && paths_[last_path_] == path) return last_path_;
  const auto [it, fresh] = path_ids_.try_emplace(std::string(path), static_cast<uint32_t>(paths_.size()));
  if (fresh) paths_.emplace_back(path);
  return last_path_ = it->second;
}

ValueId Tape::add_leaf(const Type& type, std::string_view name, std::string_view path, Phase phase) {
  const auto v = static_cast<ValueId>(values_.size());
  Node n{};
  n.outputs = static_cast<uint32_t>(v);
  n.num_outputs = 1;
  n.path = intern_path(path);
  n.phase = phase;
  nodes_.push_back(n);
  values_.push_back({intern_type(type), static_cast<NodeId>(nodes_.size() - 1)});
  leaf_names_.emplace(v, name);
  return v;
}

NodeId Tape::add_node(const OpDef& op, const void* attrs, std::span<const ValueId> inputs,
                      std::span<const Type* const> outputs,
                      std::string_view path, Phase phase, uint8_t flags) {
  Node n{};
  n.op = &op;
  attrs_.resize((attrs_.size() + 7) / 8 * 8);
  n.attrs = static_cast<uint32_t>(attrs_.size());
  if (op.attrs_size) {
    attrs_.resize(attrs_.size() + op.attrs_size);
    std::memcpy(attrs_.data() + n.attrs, attrs, op.attrs_size);
  }
  n.inputs = static_cast<uint32_t>(edges_.size());
  n.num_inputs = static_cast<uint16_t>(inputs.size());
  edges_.insert(edges_.end(), inputs.begin(), inputs.end());
  n.outputs = static_cast<uint32_t>(values_.size());
  n.num_outputs = static_cast<int32_t>(outputs.size());
  n.path = intern_path(path);
  n.phase = phase;
  n.flags = flags;
  const auto id = static_cast<NodeId>(nodes_.size());
  nodes_.push_back(n);
  for (const Type* t : outputs) values_.push_back({intern_type(*t), id});
  return id;
}

void Tape::clear() {
  nodes_.clear();
  values_.clear();
  edges_.clear();
  types_.clear();
  paths_.clear();
  attrs_.clear();
  path_ids_.clear();
  type_ids_.clear();
  coordinates_.clear();
  leaf_names_.clear();
  cotangents_.clear();
  last_type_ = last_path_ = 0;
}

void Tape::erase_node(NodeId i) { nodes_.erase(nodes_.begin() + i); }

void Tape::arrange_nodes(std::span<const NodeId> order) {
  for (Value& v : values_) v.producer = -1;
  std::vector<Node> arranged;
  arranged.reserve(order.size());
  for (const NodeId id : order) {
    const Node& n = nodes_[id];
    for (int o = 0; o < n.num_outputs; ++o) values_[output(n, o)].producer = static_cast<NodeId>(arranged.size());
    arranged.push_back(n);
  }
  nodes_ = std::move(arranged);
}

std::vector<ValueId> Tape::leaves() const {
  std::vector<ValueId> out;
  for (const Node& n : nodes_)
    if (!n.op) out.push_back(static_cast<ValueId>(n.outputs));
  return out;
}

const std::string& Tape::leaf_name(ValueId v) const {
  static const std::string kNone;
  const auto it = leaf_names_.find(v);
  return it == leaf_names_.end() ? kNone : it->second;
}

std::string Tape::op_name(const Node& n) const {
  if (!n.op) return "leaf";
  if (is_redistribute(n.op)) return redistribution_name(type(inputs(n)[0]).layout, type(output(n)).layout);
  return n.op->name;
}

}  // namespace sheaf
