// Writing the tape: values get ids, ops become nodes, and what their derivatives will read is saved.
#include "sheaf/autograd/recording.h"

#include <algorithm>
#include <atomic>

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/reverse_pass.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

thread_local Recording* current_recording = nullptr;
thread_local const std::string* current_path = nullptr;
std::atomic<uint64_t> next_serial{1};

std::unique_ptr<recorded::Lists>& spare_lists() {
  static thread_local std::unique_ptr<recorded::Lists> lists;
  return lists;
}

}  // namespace

PathScope::PathScope(const std::string& path) : previous_(current_path) { current_path = &path; }
PathScope::PathScope(std::string&& path) : own_(std::move(path)), previous_(current_path) { current_path = &own_; }
PathScope::~PathScope() { current_path = previous_; }
const std::string& PathScope::current() {
  static const std::string kRoot;
  return current_path ? *current_path : kRoot;
}

PhaseScope::PhaseScope(Phase phase) : recording_(Recording::current()) {
  if (recording_) previous_ = std::exchange(recording_->phase_, phase);
}
PhaseScope::~PhaseScope() {
  if (recording_) recording_->phase_ = previous_;
}

Recording::Recording(const RecordingOptions& options)
    : options_(options), first_sample_(options.first_sample), previous_(current_recording), serial_(next_serial++),
      lists_(spare_lists() ? std::move(spare_lists()) : std::make_unique<recorded::Lists>()), tape_(lists_->tape),
      states_(lists_->states), gradients_(lists_->gradients), node_saves_(lists_->node_saves) {
  current_recording = this;
}

Recording* Recording::living(uint64_t serial) {
  Recording* r = current_recording;
  while (r && r->serial_ != serial) r = r->previous_;
  return r;
}

Recording::~Recording() {
  end();
  lists_->clear();
  spare_lists() = std::move(lists_);
}

// Recordings may end in any order: `r = std::make_unique<Recording>()` in a loop creates the next before the last one ends.
void Recording::end() {
  for (const auto& group : all_groups_) group->recording_ended(serial_);
  all_groups_.clear();
  early_gradients_.clear();
  for (Recording** r = &current_recording; *r; r = &(*r)->previous_)
    if (*r == this) {
      *r = previous_;
      return;
    }
}

// Before anything is taken for a derivative: the caller may try again later.
void Recording::expect_can_differentiate(const char* who) const {
  if (current_recording != this)
    fail<LifetimeError>("[", who, "] this recording is over, or another one has begun in it");
  if (in_region_) fail<LifetimeError>("[", who, "] inside of a RecomputeScope: it must end first");
  if (pass_) fail<LifetimeError>("[", who, "] inside of another derivative of the same recording");
}

Tape Recording::take() {
  if (pass_) fail<LifetimeError>("[recording] take() inside of a derivative: the backward has not ended");
  if (current_recording == this) complete_sends(), complete_offloads();
  end();
  return std::exchange(tape_, Tape());
}

void recorded::Lists::clear() {
  tape.clear();
  states.clear();
  gradients.clear();
  node_saves.clear();
}

Recording* Recording::current() { return current_recording; }
uint64_t Recording::current_serial() { return current_recording ? current_recording->serial_ : 0; }

Tensor Recording::random_state(Device device) {
  if (!random_state_ && options_.random_states) random_state_ = options_.random_states(options_.first_sample - first_sample_);
  if (!random_state_ || !(random_state_.device() == device))
    random_state_ = device.is_meta()
                        ? Tensor::empty({kI64, {3}, {}}, device)
                        : Tensor::from<int64_t>({static_cast<int64_t>(options_.seed), options_.step,
                                                 options_.first_sample}, {3}).to(device);
  leaf(random_state_, "random_state");
  return random_state_;
}

ValueId Recording::value_of(const Tensor& t) const {
  if (t.impl().recording == serial_) return t.impl().value;
  const auto it = leaves_.find(t.id());
  return it == leaves_.end() ? -1 : it->second.second;
}

// [Note: early gradients] A head's gradient is large, and is known in the forward, where the logits are, up to the loss's factor in
// the differentiated scalar. It is stored in its slot, where the backward will need it, and scaled there. If slots of its group are
// needed before (another loss, whose backward comes first), it is moved, whichever leaf it belongs to, since the slots are one
// storage, whose version tells whether a saved value is still valid. A recording whose backward() is never called allocates the
// group's slots in vain.
Tensor Recording::slot_for_early_gradient(const Tensor& leaf, const Type& gradient) {
  if (in_region_ || in_backward() || value_of(leaf) < 0) return {};
  const ValueState& s = state(value_of(leaf));
  const bool fits = s.group && s.needs_grad && s.group->accepts_early_gradient(s.leaf_index, gradient);
  return fits ? s.group->slot(s.leaf_index) : Tensor();
}

void Recording::note_early_gradient(const Tensor& gradient, const Tensor& leaf) {
  const ValueId v = value_of(gradient);
  early_gradients_.push_back({state(value_of(leaf)).group, tape_.value(v).producer, v});
}

// Because `node` is about to write slots.
void Recording::evict_early_gradients(LeafGroup* group, NodeId node) {
  for (size_t i = early_gradients_.size(); i-- > 0;) {
    if (early_gradients_[i].group != group || early_gradients_[i].node == node) continue;
    const ValueId v = early_gradients_[i].gradient;
    early_gradients_.erase(early_gradients_.begin() + static_cast<std::ptrdiff_t>(i));
    if (!state(v).saved) continue;
    const Tensor moved = copy_of(state(v).saved);
    state(v).save(moved);
  }
}

bool Recording::has_gradient(const Tensor& t) const {
  const ValueId v = value_of(t);
  return v >= 0 && static_cast<size_t>(v) < states_.size() && states_[static_cast<size_t>(v)].needs_grad;
}

// Also where it is seen through stop_gradient().
void Recording::expect_no_gradient(const char* op, const Tensor& memory) const {
  if (phase_ != Phase::forward) return;
  bool differentiable = false;
  for (ValueId v = value_of(memory); v >= 0; v = tape_.value(v).lies_in()) {
    const ValueState& s = states_[static_cast<size_t>(v)];
    if (s.changed >= 0) return;  // it is what was stored there
    differentiable = differentiable || s.needs_grad;
  }
  if (!differentiable) return;
  fail<LifetimeError>("[", op, "] ", path_label(PathScope::current()), ": %", value_of(memory), ' ', memory.type(), " depends on values whose ",
                      "gradients are needed: changed memory has no derivative. Make a new value, or change a copy of stop_gradient()");
}

void Recording::expect_no_recomputation(const char* op) const {
  if (in_region_)
    fail<LifetimeError>("[", op, "] ", path_label(PathScope::current()), ": its result is stored into memory ",
                        "that is there already; what is computed again in the backward cannot be");
}

void Recording::note_change(const Tensor& memory, const Tensor& x) {
  if (phase_ != Phase::forward || !has_gradient(x)) return;
  const auto node = static_cast<NodeId>(tape_.num_nodes()) - 1;
  for (ValueId v = value_of(memory); v >= 0; v = tape_.value(v).lies_in()) {
    ValueState& s = state(v);
    s.needs_grad = true;
    if (s.changed < 0) s.changed = node;
  }
  stored_.push_back({memory, node});
}

// Views of changed memory, also those from before the change, or from outside of the recording; but not through stop_gradient().
void Recording::note_reading(const Tensor& t, ValueId v) {
  for (ValueId u = v; u >= 0; u = tape_.value(u).lies_in())
    if (const OpDef* op = tape_.node(tape_.value(u).producer).op; op && op->stops_gradient) return;
  const auto place = [](const Tensor& x) {
    const View view = x.view_unsynced();
    return std::pair(x.byte_offset(), x.byte_offset() + view.extent_bytes());
  };
  const auto [begin, end] = place(t);
  for (const recorded::Stored& s : stored_) {
    if (t.storage() != s.memory.storage()) continue;
    if (const auto [from, to] = place(s.memory); begin >= to || from >= end) continue;
    ValueState& read = state(v);
    read.needs_grad = true;
    if (read.changed < 0) read.changed = s.node;
    stored_values_.emplace_back(s.node, v);
  }
}

std::optional<std::string> Recording::group_with_gradients() const {
  for (const auto& group : all_groups_)
    if (group->holds_gradients()) return group->group_name();
  return std::nullopt;
}

std::unordered_map<ValueId, Tensor> Recording::leaves() const {
  std::unordered_map<ValueId, Tensor> out;
  for (const auto& [id, leaf] : leaves_) out.emplace(leaf.second, leaf.first);
  return out;
}

void expect_no_recording(const char* who) {
  if (Recording::current()) fail<LifetimeError>("[", who, "] not inside a recording: end it first, by recording.take() or its scope");
}

bool Recording::saves() const { return !pass_ || pass_->keeps(); }

Recording::ValueState& Recording::state(ValueId v) {
  if (static_cast<size_t>(v) >= states_.size()) states_.resize(tape_.num_values());
  return states_[v];
}

ValueId Recording::leaf(const Tensor& t, std::string_view name) {
  if (const ValueId known = value_of(t); known >= 0) return known;
  const ValueId v = tape_.add_leaf(t.type(), name, PathScope::current(), phase_);
  node_saves_.resize(tape_.num_nodes());
  leaves_.emplace(t.id(), std::pair(t, v));
  if (options_.capture_leaves) captured_.emplace(v, t.clone());
  state(v);  // makes room for it
  return v;
}

Tensor Recording::watch(const Tensor& x) {
  const ValueId v = leaf(x, "input");
  for (NodeId n = 0; state(v).is_read && !state(v).needs_grad && n < static_cast<NodeId>(tape_.num_nodes()); ++n)
    if (std::ranges::find(tape_.inputs(tape_.node(n)), v) != tape_.inputs(tape_.node(n)).end())
      fail<LifetimeError>("[watch] ", x.type(), " was read by ", tape_.node(n).op->name, " before: what is differentiated is watched ",
                          "before its first use");
  state(v).needs_grad = true;
  return x;
}

// Called by apply() after the op has run: inputs not seen before become leaves, outputs get ids, and what derivatives will need is noted.
NodeId Recording::record(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, std::span<Tensor> outputs,
                         std::span<const OutputSpec> specs, bool add) {
  ValueId ids[kMostInputs];
  if (inputs.size() > kMostInputs)
    fail<ShapeError>("[", op.name, "] ", path_label(PathScope::current()), ": ", inputs.size(), " inputs, at most ", kMostInputs, " can be recorded");
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].impl().is_parameter) expect_read_here(op, static_cast<int>(i), inputs[i]);
    ids[i] = leaf(inputs[i], "input");
  }
  for (size_t i = 0; !stored_.empty() && phase_ == Phase::forward && i < inputs.size(); ++i) note_reading(inputs[i], ids[i]);
  if (in_region_) note_entering(std::span(ids, inputs.size()), inputs), note_made(outputs);
  SmallVector<const Type*, 8> types;
  for (const Tensor& t : outputs) types.push_back(&t.type());
  const NodeId id = tape_.add_node(op, attrs, std::span(ids, inputs.size()), std::span(types.begin(), types.end()), PathScope::current(), phase_,
                                   std::exchange(next_flags_, 0) | (add ? Node::kAdds : 0) | (PerRankScope::active() ? Node::kPerRank : 0));
  const ValueId first = static_cast<ValueId>(tape_.node(id).outputs);
  node_saves_.resize(tape_.num_nodes());
  states_.resize(tape_.num_values());
  for (size_t o = 0; o < outputs.size(); ++o) {
    outputs[o].mutable_impl().recording = serial_;
    outputs[o].mutable_impl().value = first + static_cast<ValueId>(o);
  }
  note_places(op, first, specs);
  if (op.alias)
    for (size_t o = 0; o < outputs.size(); ++o)
      if (const size_t i = detail::viewed_input(inputs.size(), outputs.size(), o); outputs[o].storage() == inputs[i].storage())
        tape_.mutable_value(first + static_cast<ValueId>(o)).view_of = ids[i];
  uint64_t needs = 0;
  bool recipe = op.recipe && !inputs.empty();
  for (size_t i = 0; i < inputs.size(); ++i) {
    ValueState& s = states_[ids[i]];
    s.is_read = true;
    if (s.needs_grad) needs |= bit(static_cast<int>(i));
    recipe = recipe && s.recipe;
  }
  // Frozen parameters, too: views of gathered buffers may be discarded before a backward reads them.
  for (size_t o = 0; recipe && o < outputs.size(); ++o) states_[first + o].recipe = true;
  if (op.stops_gradient) return id;
  if (needs && op.vjp) {
    for (size_t o = 0; o < outputs.size(); ++o)
      if (is_floating(types[o]->dtype)) states_[first + o].needs_grad = true;
    if (op.rematerializable >= 0 && selective_ && !in_region_ && !pass_) states_[first + op.rematerializable].rematerialized = true;
    if (saves()) save_for_backward(id, inputs, outputs, needs);
  } else if (needs && op.kind == OpKind::op && std::any_of(types.begin(), types.end(), [](const Type* t) {
               return is_floating(t->dtype); })) {
    // Not differentiable: asking for a gradient through it is an error that names the op.
    for (size_t o = 0; o < outputs.size(); ++o) states_[first + o].needs_grad = true;
  }
  return id;
}

// A trained parameter's value that was read outside of the recording, where it would silently be a constant.
void Recording::expect_read_here(const OpDef& op, int input, const Tensor& t) const {
  if (phase_ != Phase::forward || pass_ || op.stops_gradient || op.of_units || value_of(t) >= 0) return;
  fail<LifetimeError>("[", op.name, "] ", path_label(PathScope::current()), ": input ", input, ", ", t.type(), ", is the value of a trained ",
                      "parameter, read outside of this recording: here it would be a constant, without a gradient. Read the parameter ",
                      "inside of the recording, or stop_gradient() of this value");
}

// Notes which outputs lie in existing memory, or in an earlier output of the node.
void Recording::note_places(const OpDef& op, ValueId first, std::span<const OutputSpec> specs) {
  for (size_t o = 0; o < specs.size(); ++o) {
    const ValueId v = first + static_cast<ValueId>(o);
    if (specs[o].within >= 0) {
      tape_.mutable_value(v).base = first + specs[o].within;
      tape_.mutable_value(v).byte_offset = specs[o].byte_offset;
    } else if (specs[o].into) {
      if (op.kind == OpKind::op) expect_no_recomputation(op.name);
      const ValueId base = leaf(specs[o].into, "memory");  // a new leaf reallocates the tape's values
      states_.resize(tape_.num_values());
      tape_.mutable_value(v).base = base;
    }
  }
}

// The node's inputs and outputs that its derivative reads stay alive until then.
void Recording::save_for_backward(NodeId node, std::span<const Tensor> inputs, std::span<Tensor> outputs,
                                  uint64_t needs) {
  const Node& n = tape_.node(node);
  uint64_t in = n.op->saved_inputs, out = n.op->saved_outputs;
  if (n.op->saves) n.op->saves(tape_.attrs(n), needs, in, out);
  if (n.op->rematerializable >= 0 && states_[tape_.output(n, n.op->rematerializable)].rematerialized) in |= n.op->rematerialize_reads;
  in &= first_bits(inputs.size());
  out &= first_bits(outputs.size());
  node_saves_[node] = {in, out};
  const auto save = [&](ValueId v, const Tensor& t) {
    ValueState& s = states_[v];
    ++s.saves;
    // A recipe is replayed: the gathered buffers may be discarded.
    if (s.recipe || s.recomputed || s.rematerialized || (in_region_ && made_in_region(v))) return;
    if (s.saved && s.saves > 1 && s.saved.storage() == t.storage() && s.version != t.storage()->version())
      fail<LifetimeError>("[", n.op->name, "] value %", v, " ", tape_.type(v), " was changed in place after an op had it, whose ",
                          "derivative reads it as it was: change a copy");
    s.save(t);
  };
  const auto edges = tape_.inputs(n);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (in & bit(static_cast<int>(i))) save(edges[i], inputs[i]);
  for (size_t o = 0; o < outputs.size(); ++o)
    if (out & bit(static_cast<int>(o))) save(tape_.output(n, static_cast<int>(o)), outputs[o]);
}

void Recording::bind_group(const std::shared_ptr<LeafGroup>& group, std::span<const Tensor> tensors) {
  // If the current backward has finished the group already, the gather is for later computations.
  const auto it = std::find_if(groups_.begin(), groups_.end(),
                               [&](const GroupState& g) { return g.group == group && !g.finished; });
  if (it == groups_.end()) {
    if (std::find(all_groups_.begin(), all_groups_.end(), group) == all_groups_.end()) {
      all_groups_.push_back(group);
      on_rerun([group] { group->close_for_change(); });
    }
    new_group_state(group);
  }
  for (int i = 0; i < std::ssize(tensors); ++i) {
    ValueState& s = state(value_of(tensors[i]));
    s.group = group.get();
    s.leaf_index = i;
    s.version = group->version();
    s.recipe = true;
    s.needs_grad = group->trainable(i);
  }
}

void Recording::use_group(const LeafGroup* group) {
  bool known = false;
  for (GroupState& g : groups_) {
    if (g.group.get() != group) continue;
    known = true;
    if (!in_backward() || saves()) g.for_direction = g.for_direction && in_backward() && is_for_direction(group);
    if (g.first_use < 0) g.first_use = tape_.num_nodes(), g.derivative_order = derivative_order_;
  }
  if (known || (in_backward() && !saves())) return;
  // Open since an earlier micro-batch, or since what is being differentiated again.
  for (const auto& g : all_groups_)
    if (g.get() == group) new_group_state(g).first_use = tape_.num_nodes();
}

// Whether its values are now read for a direction: one is being requested, or it was opened for one by a derivative that is being
// differentiated.
bool Recording::is_for_direction(const LeafGroup* group) const {
  if (pass_ && pass_->asks_for_direction()) return true;
  const auto is = [&](const GroupState& g) { return g.group.get() == group; };
  bool any = false;
  for (const Segment& s : pending_segments_)
    if (const auto g = std::ranges::find_if(s.groups, is); g != s.groups.end()) {
      if (!g->for_direction) return false;
      any = true;
    }
  return any;
}

Recording::GroupState& Recording::new_group_state(const std::shared_ptr<LeafGroup>& group) {
  const auto n = static_cast<size_t>(group->num_leaves());
  GroupState& state = groups_.emplace_back();
  state.group = group;
  state.derivative_order = derivative_order_;
  state.for_direction = in_backward() && is_for_direction(group.get());
  state.contributed.resize(n);
  state.slots.resize(n);
  return state;
}

}  // namespace sheaf
