// Where the reverse pass puts a gradient: it is added to the value's other contributions, or into a parameter's slot.
#include <algorithm>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

// The gradients that a derivative has set, for the inputs that need one.
void ReversePass::accumulate(NodeId node, uint64_t needs, Vjp& vjp) {
  for (auto& [i, g] : vjp.gradients)
    if (needs & Recording::bit(i)) accumulate(node, tape_.inputs(tape_.node(node))[i], std::move(g));
}

void ReversePass::accumulate(NodeId node, ValueId v, Tensor g) {
  const bool to_direction = recording_.state(v).group && direction_, to_slot = recording_.state(v).group && to_slots();
  g = as_dual(node, v, std::move(g), to_direction || to_slot);
  const ValueId was = value_with_gradient_of(v);
  if (const ValueId id = recording_.value_of(g); id >= 0) tape_.note_cotangent(id, was);
  const ValueState& s = recording_.state(v);
  if (s.changed >= 0 && node > s.changed)
    fail<LifetimeError>("[", tape_.node(node).op->name, "] ", path_label(PathScope::current()), ": a gradient of %", v, ' ', tape_.type(was),
                        ", memory that a value with a gradient was stored into: that has no derivative. Use the value itself");
  if (!to_direction && !to_slot) return add_to_value(node, v, std::move(g));
  expect_reducible(node, v, g.layout());
  if (to_direction) direction_->gradients.push_back({s.group, s.leaf_index, std::move(g), node});
  else add_to_slot(node, v, std::move(g));
}

// g as a gradient of v: in the dual of its layout or, for a leaf, in one whose values add up to that.
Tensor ReversePass::as_dual(NodeId node, ValueId v, Tensor g, bool to_leaf) {
  const Type& primal = tape_.type(value_with_gradient_of(v));
  // A wide (f32) gradient stays wide until it is in a leaf's slot, even through slices of the leaf; elsewhere it is cast to the
  // value's dtype.
  const bool wide = is_wide_of(g.dtype(), primal.dtype);
  if (wide && !to_leaf && !(to_slots() && is_part_of_leaf(v))) g = cast(g, primal.dtype);
  // A value without a mesh is Replicate on every mesh, so its gradient is Partial, even if the other operands are Invariant and each
  // rank has the whole gradient.
  if (Layout l = g.layout(); !to_leaf && !primal.layout.mesh() && l.mesh()) {
    for (int a = 0; a < l.num_axes(); ++a)
      if (l[a].is_invariant()) l[a] = Placement::partial();
    g = redistribute(g, l);
  }
  const bool dual = (g.dtype() == primal.dtype || wide) && g.shape() == primal.shape &&
                    (!primal.layout.mesh() || !g.layout().mesh() || g.layout() == primal.layout.dual() ||
                     (to_leaf && adds_up_to(g.layout(), primal.layout.dual())));
  if (!dual)
    fail<PlacementError>("[", tape_.node(node).op->name, "] ", path_label(PathScope::current()), ": gradient ", g.type(),
                         " is not the dual of its value ", primal, ", which is ", primal.dual());
  return g;
}

// A value in flight shares the gradient of the value that was redistributed.
ValueId ReversePass::value_with_gradient_of(ValueId v) const {
  return tape_.node(tape_.value(v).producer).op == &start_op() ? redistributed_from(tape_, v) : v;
}

// Whether v is a group's leaf after redistributions.
bool ReversePass::is_part_of_leaf(ValueId v) const {
  for (;;) {
    const Node& producer = tape_.node(tape_.value(v).producer);
    if (!producer.op || !is_redistribute(producer.op)) return false;
    v = tape_.inputs(producer)[0];
    if (recording_.state(v).group) return true;
  }
}

// --- added to the value's other contributions ---

void ReversePass::add_to_value(NodeId node, ValueId v, Tensor g) {
  const NodeId producer = tape_.value(v).producer;
  const ValueId was = value_with_gradient_of(v);
  if (to_slots() && !parts_.contains(producer) && !ends_gradients(tape_.node(producer)))
    fail<LifetimeError>("[backward] ", path_label(PathScope::current()), ": ", tape_.node(node).op->name, " uses value %",
                        v, " ", tape_.type(was), " (of ", tape_.node(producer).op->name, "), which was computed before the last ",
                        "backward of this recording: its gradient would be lost. Add the losses and call backward once; or let next_micro_batch() begin what a later backward ",
                        "differentiates");
  Tensor& sum = sum_of(v);
  if (was != v && sum)
    fail<LifetimeError>("[backward] ", path_label(PathScope::current()), ": %", v, " ", tape_.type(was),
                        " was waited for twice: keep the tensor that wait() returned");
  if (sum && sum.dtype() != g.dtype()) {  // one of them is wide
    if (is_wide_of(sum.dtype(), g.dtype())) g = cast(g, sum.dtype());
    else sum = cast(sum, g.dtype());
  }
  sum = sum ? add(sum, g) : std::move(g);
}

Tensor& ReversePass::sum_of(ValueId v) {
  const auto same = same_value_.find(v);
  return gradients_[same == same_value_.end() ? v : same->second];
}

// --- into a slot ---

void ReversePass::add_to_slot(NodeId node, ValueId v, Tensor g) {
  LeafGroup* const owner = recording_.state(v).group;
  const int index = recording_.state(v).leaf_index;
  GroupState& group = group_state(owner);
  const auto leaf = static_cast<size_t>(index);
  if (group.defers_weights) {
    group.contributed[leaf] = true;
    recording_.deferred_weights_.back().parts.push_back({.node = node, .leaf = v, .gradient = std::move(g)});
    return;
  }
  const Tensor& slot = slot_of(group, index, node);
  std::erase_if(recording_.early_gradients_, [&](const auto& a) { return a.group == owner && a.node == node; });  // it is in use now
  if (g.storage() != slot.storage() || g.byte_offset() != slot.byte_offset()) {  // else it was computed in place
    if (group.contributed[leaf]) add_gradient(slot, g);
    else store_gradient(slot, g);
  }
  group.contributed[leaf] = true;
}

// The slot that `node` is about to write.
const Tensor& ReversePass::slot_of(GroupState& group, int leaf, NodeId node) {
  recording_.evict_early_gradients(group.group.get(), node);
  Tensor& slot = group.slots[static_cast<size_t>(leaf)];
  if (!slot) slot = group.group->slot(leaf);
  return slot;
}

// If a group has several states, the one that is finished next: see finish_groups().
ReversePass::GroupState& ReversePass::group_state(LeafGroup* group) {
  const auto is_it = [&](const GroupState& g) { return g.group.get() == group; };
  auto next = recording_.groups_.end();
  for (auto it = recording_.groups_.begin(); it != recording_.groups_.end(); ++it)
    if (is_it(*it) && (next == recording_.groups_.end() || std::pair(!it->finished, it->first_use) > std::pair(!next->finished, next->first_use)))
      next = it;
  if (next != recording_.groups_.end()) return *next;
  if (!to_slots()) {  // gradient() covers all micro-batches
    const auto in = [&](std::vector<recorded::Segment>& segments) -> GroupState* {
      for (recorded::Segment& s : segments)
        if (const auto it = std::ranges::find_if(s.groups, is_it); it != s.groups.end()) return &*it;
      return nullptr;
    };
    if (GroupState* found = in(recording_.pending_segments_)) return *found;
    for (auto& [loss, remaining] : recording_.remaining_)
      if (GroupState* found = in(remaining.segments)) return *found;
  }
  fail<LifetimeError>("[backward] this part of the recording was differentiated before: its parameters of unit '",
                      path_label(group->group_name()), "' are closed");
}

// A unit reduces gradients over its own mesh: a gradient without a mesh would be reduced as one rank's addend.
void ReversePass::expect_reducible(NodeId node, ValueId parameter, const Layout& gradient) const {
  const Type& type = tape_.type(parameter);
  if (type.layout.mesh() || gradient.all_invariant()) return;
  fail<PlacementError>("[", tape_.node(node).op->name, "] ", path_label(PathScope::current()), ": a parameter of '",
                       path_label(recording_.state(parameter).group->group_name()), "', ", type, ", is on no mesh and meets values on ",
                       gradient.mesh()->to_string(), ": its gradient would be a share of each rank. Give the module that ",
                       "mesh: shard(model, mesh)");
}

}  // namespace sheaf
