// The reverse pass of a recording: what it does with each node.
#include <algorithm>
#include <functional>

#include "sheaf/autograd/apply_again.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"

namespace sheaf {
Tensor Recording::resolve(ValueId v) {
  const ValueState& s = state(v);
  if (s.group) {
    group_state(s.group);  // or it is closed
    if (s.group->version() != s.version)
      fail<LifetimeError>("[backward] the parameters of unit '", s.group->group_name(), "' were changed in place (by a ",
                          "step or an assignment) between forward and backward");
    return s.group->value(s.leaf_index);
  }
  if (s.recipe) {
    const Node n = tape_.node(tape_.value(v).producer);
    std::vector<Tensor> inputs;
    for (int i = 0; i < n.num_inputs; ++i) inputs.push_back(resolve(tape_.inputs(n)[i]));
    return apply_again(tape_, n, inputs)[v - static_cast<ValueId>(n.outputs)];
  }
  const NodeId producer = tape_.value(v).producer;
  if (s.on_host)
    for (Region& region : regions_)
      if (std::ranges::find(region.on_host, v) != region.on_host.end()) onload(region);
  if (const ValueState& now = state(v); now.made_again && !now.saved && now.saves > 0) make_again(v);
  if (!state(v).saved && tape_.node(producer).op)
    for (Region& region : regions_)
      if (region.begin <= producer && producer < region.end) {
        recompute(region);
        break;
      }
  if (const ValueState& now = state(v); now.saved) {  // the states may have moved
    if (now.saved.storage()->version() != now.version)
      fail<LifetimeError>("[backward] value %", v, " ", tape_.type(v), " was changed in place between forward and backward, which ",
                          "reads it: change a copy");
    return now.saved;
  }
  fail<LifetimeError>("[backward] value %", v, " ", tape_.type(v), " was freed: this part of the recording was ",
                      "differentiated before (ask for it with {.keep = true}), or its derivative reads what it does not save");
}

void Recording::expect_scalar(const Tensor& y) {
  if (y.numel() != 1) fail<ShapeError>("[backward] needs a scalar, not ", y.type());
  const Layout& l = y.layout();
  // An axis of one rank is like any other: what one rank accepted, several would refuse.
  for (int a = 0; a < l.num_axes(); ++a) {
    if (!l[a].is_replicate() && !l[a].is_shard()) continue;
    const std::string& axis = l.mesh()->name(a);
    const std::string once = str("recording.backward(redistribute(loss, \"", axis, "\", Placement::partial()))");
    if (l[a].is_shard())
      fail<PlacementError>("[backward] the loss ", y.type(), " is of one rank on mesh axis ", axis, ": write ", once);
    fail<PlacementError>("[backward] the loss ", y.type(), " is whole on every rank of mesh axis ", axis, ", as its ",
                         "inputs are: every rank would contribute all of it. Cut the batch, redistribute(x, \"", axis,
                         "\", Placement::shard(0)), and it is Partial; or, to count once what all ranks compute ",
                         "alike, write ", once);
  }
}

void Recording::backward(const Tensor& loss, const BackwardOptions& options) {
  expect_current("backward");
  const ValueId v = value_of(loss);
  if (v < 0) fail<LifetimeError>("[backward] the loss is not a value of this recording");
  const NodeId made = tape_.value(v).producer;
  if (made < floor_ && !is_in(waiting_, made) && !rests_.contains(v))
    fail<LifetimeError>("[backward] the loss ", loss.type(), " was computed before the last backward of this recording, ",
                        "which freed what its gradient needs: add the losses and call backward once");
  if (!state(v).needs_grad) fail<LifetimeError>("[backward] no trainable parameter leads to the loss ", loss.type());
  expect_scalar(loss);  // while nothing is taken yet: another loss may be given
  same_value_.clear();
  wanted_.assign(tape_.num_values(), false);
  for (int i = 0; i < tape_.num_values(); ++i) wanted_[i] = state(i).needs_grad;
  last_micro_batch_ = options.last_micro_batch;
  ++turn_;
  choose_ranges(v, options.one_part);
  for (GroupState& g : groups_) g.later = false;  // of one that failed
  for (const auto& group : all_groups_) group->backward_begins();
  if (options.weights_later) choose_later();
  weights_later_ = options.weights_later;
  try {
    reverse(loss, /*to_groups=*/true, /*keep=*/false);
  } catch (...) {
    rests_.erase(v);  // its gradients are lost
    if (std::exchange(weights_later_, false)) later_.pop_back();
    throw;
  }
  weights_later_ = false;
  ranges_.clear();
  if (rest_ && rest_->parts.empty()) rests_.erase(v);
  rest_ = nullptr;
}

std::vector<Tensor> Recording::gradient(const Tensor& y, std::span<const Tensor> xs, const GradientOptions& options) {
  expect_current("gradient");
  if (value_of(y) < 0) fail<LifetimeError>("[gradient] y is not a value of this recording");
  wanted_.assign(tape_.num_values(), false);
  same_value_.clear();
  std::vector<ValueId> ids;  // of each x
  for (const Tensor& x : xs) {
    const ValueId v = value_of(x);
    if (v < 0) fail<LifetimeError>("[gradient] ", x.type(), " is not a value of this recording");
    if (!state(v).needs_grad)
      fail<LifetimeError>("[gradient] ", x.type(), " is a constant here: call recording.watch(x) before its first use");
    ids.push_back(v);
    wanted_[v] = true;
    // A parameter is a value for every gather of it. Their gradients add up in the first, in the order of the uses,
    // however often it was gathered.
    if (const auto [group, leaf] = std::pair(state(v).group, state(v).leaf_index); group) {
      ids.back() = -1;
      for (ValueId other = 0; other < tape_.num_values(); ++other) {
        if (state(other).group != group || state(other).leaf_index != leaf) continue;
        if (ids.back() < 0) ids.back() = other;
        same_value_[other] = ids.back();
        wanted_[other] = true;
      }
    }
    // So do those of a value that was computed again and of its copies.
    for (ValueId other = v + 1; other < tape_.num_values(); ++other)
      if (state(other).copy_of == v) same_value_[other] = v, wanted_[other] = true;
  }
  for (NodeId id = 0; id < tape_.num_nodes(); ++id) {
    const Node& n = tape_.node(id);
    const auto in = tape_.inputs(n);
    if (std::any_of(in.begin(), in.end(), [&](ValueId v) { return wanted_[v]; }))
      for (int o = 0; o < n.num_outputs; ++o) {
        if (state(tape_.output(n, o)).needs_grad) wanted_[tape_.output(n, o)] = true;
        for (ValueId v = tape_.value(tape_.output(n, o)).lies_in(); v >= 0; v = tape_.value(v).lies_in())
          if (state(v).changed >= 0) wanted_[v] = true;
      }
  }
  asked_.assign(tape_.num_values(), false);
  for (ValueId v : ids) asked_[v] = true;
  if (options.keep) begin_order();
  reverse(y, /*to_groups=*/false, options.keep);
  std::vector<Tensor> out;
  for (size_t i = 0; i < ids.size(); ++i) {
    const Tensor& g = gradients_[ids[i]];
    out.push_back(g ? g : full_of(xs[i].type().dual(), 0.0));
  }
  gradients_.clear();
  return out;
}

// The reverse pass is about to differentiate `node`: groups whose uses all lie behind it are finished, the last opened
// first. A unit is opened when it is used, not when its gather was issued ahead: its reduction must not wait for that.
void Recording::finish_groups(NodeId node) {
  for (;;) {
    size_t next = groups_.size();
    for (size_t i = 0; i < groups_.size(); ++i)
      if (!groups_[i].finished && groups_[i].first_use > node &&
          (next == groups_.size() || groups_[i].first_use >= groups_[next].first_use))
        next = i;
    if (next == groups_.size()) return;
    compute_aside();
    groups_[next].finished = true;
    if (groups_[next].constant && std::ranges::none_of(groups_[next].contributed, std::identity())) {
      groups_[next].group->pass_constant();
      continue;
    }
    if (!in_weights_) groups_[next].group->pass();
    if (groups_[next].later) {
      finish_later(groups_[next]);
    } else {
      clear_slots(groups_[next].group.get(), -1);
      groups_[next].group->finish(groups_[next].contributed);
    }
    std::fill(groups_[next].slots.begin(), groups_[next].slots.end(), Tensor());
  }
}

// The same for gradient(): its groups may be used again, in this recording's backward.
void Recording::pass_groups(NodeId node) {
  const auto pass = [node](const std::vector<GroupState>& groups) {
    for (const GroupState& g : groups)
      if (g.first_use > node) g.group->gradient_passed();
  };
  if (along_) add_along(node);
  if (!saving_) pass(groups_);  // else those of this derivative
  for (const Segment& s : waiting_) pass(s.groups);
  for (const auto& [loss, rest] : rests_)
    for (const Segment& s : rest.parts) pass(s.groups);
}

void Recording::reverse(const Tensor& y, bool to_groups, bool keep) {
  if (in_region_) fail<LifetimeError>("[backward] inside of a RecomputeScope: it must end first");
  // Restored if a vjp throws, too.
  struct Before {
    Recording& r;
    const Phase phase;
    const bool saving, selective;
    ~Before() { r.phase_ = phase, r.saving_ = saving, r.selective_ = selective, r.aside_.clear(); }
  } const before{*this, std::exchange(phase_, Phase::backward), std::exchange(saving_, keep), std::exchange(selective_, false)};
  to_groups_ = to_groups;
  take_back_offloaded();
  const NodeId last = tape_.num_nodes() - 1;
  gradients_.assign(tape_.num_values(), Tensor());
  if (to_groups && rest_ && rest_->begun) {
    for (auto& [v, gradient] : rest_->gradients) gradients_[v] = std::move(gradient);
  } else if (wanted_[value_of(y)]) {
    expect_scalar(y);
    const Tensor seed = gradients_[value_of(y)] = full_of(y.type().dual(), 1.0);
    tape_.note_cotangent(value_of(seed), value_of(y));
  }
  if (to_groups)
    for (size_t r = ranges_.size(); r-- > 0;) reverse_through(ranges_[r].begin, ranges_[r].end, to_groups, keep);
  else
    reverse_through(0, last + 1, to_groups, keep);
  compute_aside();
  if (to_groups) {
    if (!ranges_.empty()) finish_groups(ranges_.front().begin - 1);
    if (rest_) keep_gradients_of_rest();
    gradients_.clear();
    for (size_t i = 0; i < groups_.size(); ++i) groups_[i].group->backward_ended();
    if (last_micro_batch_ && !weights_later_ && !(rest_ && !rest_->parts.empty())) take_back_all();
    std::erase_if(groups_, [](const GroupState& g) { return g.first_use >= 0; });  // others are gathered ahead
    floor_ = tape_.num_nodes();
    order_ = 0, is_derivative_ = false;
  } else {
    pass_groups(-1);
  }
}

void Recording::reverse_through(NodeId begin, NodeId end, bool to_groups, bool keep) {
  for (NodeId id = end - 1; id >= begin; --id) {
    const Node n = tape_.node(id);  // a copy: the tape grows below
    const PathScope path(tape_.path(n));
    if (to_groups) finish_groups(id);
    else pass_groups(id);
    if (!n.op) {
      if (!keep) pass_regions(id, end);
      continue;
    }
    bool has = false;
    for (int o = 0; o < n.num_outputs; ++o) has = has || gradients_[tape_.output(n, o)].defined();
    if (has) {
      uint64_t needs = 0;
      for (int i = 0; i < n.num_inputs; ++i)
        if (wanted_[tape_.inputs(n)[i]]) needs |= bit(i);
      if (needs) {
        if (!n.op->vjp) fail<LifetimeError>("[", n.op->name, "] ", path_label(PathScope::current()), ": it has no derivative");
        const AttrsCopy attrs(tape_, n);
        Vjp vjp(*this, id, needs);
        n.op->vjp(attrs.data(), vjp);
        accumulate(id, needs, vjp);
      }
      for (int o = 0; o < n.num_outputs; ++o)  // freed while unwinding, but for what was asked for
        if (const ValueId v = tape_.output(n, o); to_groups || !asked_[v]) gradients_[v] = Tensor();
    }
    if (!keep) {
      release_saves(id);
      pass_regions(id, end);
    }
  }
}

void Recording::release_saves(NodeId node) {
  const Node n = tape_.node(node);
  auto& [in, out] = node_saves_[node];
  const auto drop = [&](ValueId v) {
    ValueState& s = states_[v];
    if (--s.saves <= 0) s.saved = Tensor();
  };
  for (int i = 0; i < n.num_inputs && in; ++i)
    if (in & bit(i)) drop(tape_.inputs(n)[i]);
  for (int o = 0; o < n.num_outputs && out; ++o)
    if (out & bit(o)) drop(tape_.output(n, o));
  in = out = 0;
  for (const Ahead& a : ahead_)
    if (a.node == node) a.group->drop_slots();
  std::erase_if(ahead_, [node](const Ahead& a) { return a.node == node; });
  // What it would be computed from again is gone: who saves it from here on keeps it.
  if (n.op->cheap >= 0) states_[tape_.output(n, n.op->cheap)].made_again = false;
}

// A unit reduces gradients over its own mesh: one of no mesh would take a rank's addend for the whole.
void Recording::expect_reducible(NodeId node, ValueId parameter, const Layout& gradient) {
  const Type& type = tape_.type(parameter);
  if (type.layout.mesh() || gradient.all_invariant()) return;
  fail<PlacementError>("[", tape_.node(node).op->name, "] ", path_label(PathScope::current()), ": a parameter of '",
                       state(parameter).group->group_name(), "', ", type, ", is on no mesh and meets values on ",
                       gradient.mesh()->to_string(), ": its gradient would be a share of each rank. Give the module that ",
                       "mesh: shard(model, mesh)");
}

// What redistributions have made of a leaf of a group.
bool Recording::is_part_of_leaf(ValueId v) {
  for (;;) {
    const Node& producer = tape_.node(tape_.value(v).producer);
    if (!producer.op || !is_redistribute(producer.op)) return false;
    v = tape_.inputs(producer)[0];
    if (state(v).group) return true;
  }
}

// What travels has the gradient of what it was.
ValueId Recording::value_with_gradient_of(ValueId v) const {
  return tape_.node(tape_.value(v).producer).op == &start_op() ? departed(tape_, v) : v;
}

// g, as a gradient of v: its dual or, on its way to a leaf, what adds up to that.
Tensor Recording::as_dual(NodeId node, ValueId v, Tensor g, bool to_leaf) {
  const Type& primal = tape_.type(value_with_gradient_of(v));
  // A wide gradient stays so on its way into a leaf's slot, also where this rank's part of the leaf was read; elsewhere values have one
  // dtype.
  const bool wide = is_wide_of(g.dtype(), primal.dtype);
  if (wide && !to_leaf && !(to_groups_ && !along_ && is_part_of_leaf(v))) g = cast(g, primal.dtype);
  // A value without a mesh is Replicate on every mesh, so its gradient is Partial: beside Invariant operands, too, where
  // each rank has all of it.
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

void Recording::accumulate(NodeId node, ValueId v, Tensor g) {
  const bool to_direction = state(v).group && along_, to_slot = state(v).group && to_groups_ && !to_direction;
  g = as_dual(node, v, std::move(g), to_direction || to_slot);
  const ValueId was = value_with_gradient_of(v);
  if (const ValueId id = value_of(g); id >= 0) tape_.note_cotangent(id, was);
  const ValueState& s = state(v);
  if (s.changed >= 0 && node > s.changed)
    fail<LifetimeError>("[", tape_.node(node).op->name, "] ", path_label(PathScope::current()), ": a gradient of %", v, ' ', tape_.type(was),
                        ", memory that a value with a gradient was stored into: that has no derivative. Use the value itself");
  if (!to_direction && !to_slot) return add_to_value(node, v, std::move(g));
  expect_reducible(node, v, g.layout());
  if (to_direction) along_->gradients.push_back({s.group, s.leaf_index, std::move(g), node});
  else add_to_slot(node, v, std::move(g));
}

void Recording::add_to_value(NodeId node, ValueId v, Tensor g) {
  const NodeId producer = tape_.value(v).producer;
  const ValueId was = value_with_gradient_of(v);
  if (to_groups_ && !is_in(ranges_, producer) && !(rest_ && is_in(rest_->parts, producer)) && tape_.node(producer).op)
    fail<LifetimeError>("[backward] ", path_label(PathScope::current()), ": ", tape_.node(node).op->name, " uses value %",
                        v, " ", tape_.type(was), " (of ", tape_.node(producer).op->name, "), which was computed before the last ",
                        "backward of this recording: its gradient would be lost. Add the losses and call backward once");
  const auto same = same_value_.find(v);
  Tensor& sum = gradients_[same == same_value_.end() ? v : same->second];
  if (was != v && sum)
    fail<LifetimeError>("[backward] ", path_label(PathScope::current()), ": %", v, " ", tape_.type(was), " arrived twice: keep what arrived() gave");
  if (sum && sum.dtype() != g.dtype()) {  // one of them is wide
    Tensor& narrow = is_wide_of(sum.dtype(), g.dtype()) ? g : sum;
    narrow = cast(narrow, (&narrow == &g ? sum : g).dtype());
  }
  sum = sum ? add(sum, g) : std::move(g);
}

void Recording::add_to_slot(NodeId node, ValueId v, Tensor g) {
  const ValueState& s = state(v);
  GroupState& group = group_state(s.group);
  const int leaf = s.leaf_index;
  if (group.later) {
    group.contributed[leaf] = true;
    later_.back().parts.push_back({.node = node, .leaf = v, .gradient = std::move(g)});
    return;
  }
  clear_slots(s.group, node);
  std::erase_if(ahead_, [&](const Ahead& a) { return a.group == s.group && a.node == node; });
  Tensor& slot = group.slots[leaf];
  const bool in_place = slot && g.storage() == slot.storage() && g.byte_offset() == slot.byte_offset();
  if (!slot) slot = s.group->slot(leaf);
  if (!in_place) {
    if (group.contributed[leaf]) add_gradient(slot, g);
    else store_gradient(slot, g);
  }
  group.contributed[leaf] = true;
}

// What a derivative has set, of the inputs that it was asked for.
void Recording::accumulate(NodeId node, uint64_t needs, Vjp& vjp) {
  for (auto& [i, g] : vjp.gradients)
    if (needs & bit(i)) accumulate(node, tape_.inputs(tape_.node(node))[i], std::move(g));
}

}  // namespace sheaf
