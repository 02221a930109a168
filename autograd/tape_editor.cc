#include "sheaf/autograd/tape_editor.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"

namespace sheaf {

TapeEditor::TapeEditor(Tape tape)
    : tape_(std::move(tape)), given_(tape_.num_nodes()), gone_(tape_.num_nodes()), before_(tape_.num_nodes() + 1) {}

std::vector<ValueId> TapeEditor::insert(NodeId before, const TensorFunction& code, std::span<const ValueId> inputs) {
  expect_place(before);
  std::vector<ValueId> results;
  const auto recorded = [&] {
    const DeviceScope nowhere(Device::meta());
    Recording recording;
    std::vector<Tensor> stand_ins;
    for (const ValueId v : inputs) {
      stand_ins.push_back(Tensor::empty(tape_.type(v), Device::meta()));
      recording.leaf(stand_ins.back(), "input");
    }
    for (const Tensor& t : code(stand_ins)) {
      results.push_back(recording.value_of(t));
      if (results.back() < 0) fail<ConfigError>("[insert] the code returns ", t.type(), ", which it has not computed");
    }
    return recording.take();
  }();
  const Phase phase = before < given_ ? tape_.node(before).phase : given_ > 0 ? tape_.node(given_ - 1).phase : Phase::forward;
  const std::string path = inputs.empty() ? "" : tape_.path(tape_.node(tape_.value(inputs[0]).producer));
  std::vector<ValueId> of(recorded.num_values(), -1);  // by value of the recorded tape
  std::ranges::copy(inputs, of.begin());
  for (NodeId id = 0; id < recorded.num_nodes(); ++id) {
    const Node& n = recorded.node(id);
    if (!n.op && recorded.output(n) < std::ssize(inputs)) continue;
    if (!n.op || n.op->of_units)
      fail<ConfigError>("[insert] the code uses ", n.op ? "the parameters of a unit" : str("a tensor ", recorded.type(recorded.output(n))),
                        ", which is none of its inputs: a tape has what it had, and what is made of it");
    std::vector<ValueId> operands;
    for (const ValueId v : recorded.inputs(n)) operands.push_back(of[v]);
    std::vector<const Type*> types;
    for (int o = 0; o < n.num_outputs; ++o) types.push_back(&recorded.type(recorded.output(n, o)));
    const std::string& own = recorded.path(n);
    const NodeId made = insert_node(before, *n.op, recorded.attrs(n), operands, types, own.empty() ? path : own, phase, n.flags);
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape_.output(tape_.node(made), o);
      const Value& value = recorded.value(recorded.output(n, o));
      of[recorded.output(n, o)] = v;
      if (value.base >= 0) tape_.mutable_value(v).base = of[value.base], tape_.mutable_value(v).byte_offset = value.byte_offset;
      if (value.view_of >= 0) tape_.mutable_value(v).view_of = of[value.view_of];
    }
  }
  for (ValueId& v : results) v = of[v];
  return results;
}

NodeId TapeEditor::insert_node(NodeId before, const OpDef& op, const void* attrs, std::span<const ValueId> inputs,
                               std::span<const Type* const> outputs, std::string_view path, Phase phase, uint8_t flags) {
  expect_place(before);
  // Copies: what was given may be part of this tape, which grows.
  const auto* const bytes = static_cast<const char*>(attrs);
  const std::vector<char> own_attrs(bytes, bytes + op.attrs_size);
  const std::vector<ValueId> own_inputs(inputs.begin(), inputs.end());
  std::vector<Type> types;
  for (const Type* t : outputs) types.push_back(*t);
  std::vector<const Type*> pointers;
  for (const Type& t : types) pointers.push_back(&t);
  const NodeId id = tape_.add_node(op, own_attrs.data(), own_inputs, pointers, std::string(path), phase, flags);
  before_[before].push_back(id);
  gone_.push_back(false);
  return id;
}

void TapeEditor::expect_place(NodeId before) const {
  check<ConfigError>(before >= 0 && before <= given_, "[insert] in front of node ", before, " of a tape of ", given_, " nodes");
}

void TapeEditor::replace(ValueId value, ValueId by, NodeId from) {
  if (!(tape_.type(value) == tape_.type(by)))
    fail<PlacementError>("[replace] %", by, " ", tape_.type(by), " in place of %", value, " ", tape_.type(value), ": values of different types");
  replaced_[value].push_back({from, by});
}

// The value that node `place` reads instead of v: the last replacement that applies there, and its own replacements in turn.
ValueId TapeEditor::now(ValueId v, NodeId place) const {
  for (size_t steps = 0; steps <= replaced_.size(); ++steps) {
    const auto it = replaced_.find(v);
    if (it == replaced_.end()) return v;
    const Replacement* last = nullptr;
    for (const Replacement& r : it->second)
      if (r.from <= place && (!last || r.from >= last->from)) last = &r;
    if (!last) return v;
    v = last->by;
  }
  fail<ConfigError>("[replace] %", v, " replaces what replaces it");
}

void TapeEditor::settle() {
  if (replaced_.empty()) return;
  const auto settle_node = [&](NodeId id, NodeId place) {
    if (gone_[id]) return;
    const Node& n = tape_.node(id);
    for (ValueId& v : tape_.mutable_inputs(n)) v = now(v, place);
    for (int o = 0; o < n.num_outputs; ++o) {
      Value& value = tape_.mutable_value(tape_.output(n, o));
      if (value.base >= 0) value.base = now(value.base, place);
      if (value.view_of >= 0) value.view_of = now(value.view_of, place);
    }
  };
  for (NodeId place = 0; place <= given_; ++place) {
    for (const NodeId id : before_[place]) settle_node(id, place - 1);
    if (place < given_) settle_node(place, place);
  }
  tape_.map_cotangents([&](ValueId v) { return now(v, given_); });
  replaced_.clear();
}

void TapeEditor::erase_unused(std::span<const ValueId> wanted) {
  settle();
  std::vector<int> uses(tape_.num_values());
  const auto count = [&](const Node& n, int by) {
    for (const ValueId v : tape_.inputs(n)) uses[v] += by;
    for (int o = 0; o < n.num_outputs; ++o)
      if (const ValueId base = tape_.value(tape_.output(n, o)).base; base >= 0) uses[base] += by;
  };
  for (const ValueId v : wanted) ++uses[v];
  for (NodeId id = 0; id < tape_.num_nodes(); ++id)
    if (!gone_[id]) count(tape_.node(id), 1);
  const auto try_erase = [&](NodeId id) {
    const Node& n = tape_.node(id);
    if (gone_[id] || !n.op || n.op->of_units || n.num_outputs == 0 || tape_.kind(n) != OpKind::op || n.op->lane != Lane::compute) return;
    for (int o = 0; o < n.num_outputs; ++o)
      if (const ValueId v = tape_.output(n, o); uses[v] > 0 || tape_.value(v).base >= 0) return;
    gone_[id] = true;
    count(n, -1);
  };
  for (NodeId place = given_; place >= 0; --place) {
    if (place < given_) try_erase(place);
    for (auto id = before_[place].rbegin(); id != before_[place].rend(); ++id) try_erase(*id);
  }
}

Tape TapeEditor::take() {
  settle();
  std::vector<NodeId> order;
  for (NodeId id = 0; id <= given_; ++id) {
    for (const NodeId inserted : before_[id])
      if (!gone_[inserted]) order.push_back(inserted);
    if (id < given_ && !gone_[id]) order.push_back(id);
  }
  for (const NodeId id : order)
    for (const ValueId v : tape_.inputs(tape_.node(id)))
      if (const NodeId maker = tape_.value(v).producer; maker >= 0 && gone_[maker])
        fail<LifetimeError>("[take] [", tape_.op_name(tape_.node(id)), "] ", path_label(tape_.path(tape_.node(id))), " has %", v, " ", tape_.type(v),
                            ", and the node that makes it is erased");
  tape_.arrange_nodes(order);
  given_ = 0, gone_.clear(), before_.assign(1, {});
  return std::move(tape_);
}

}  // namespace sheaf
