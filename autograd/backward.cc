// The reverse pass of a recording: which gradients are needed, and how each node is differentiated.
#include <algorithm>
#include <functional>
#include <map>
#include <ranges>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/replay_node.h"
#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

void Recording::backward(const Tensor& loss, const BackwardOptions& options) {
  expect_can_differentiate("backward");
  const ValueId v = expect_value("backward", "the loss", loss);
  const bool is_differentiable_still =
      tape_.value(v).producer >= segment_begin_ || any_contains(pending_segments_, tape_.value(v).producer) || remaining_.contains(v);
  if (!is_differentiable_still)
    fail<LifetimeError>("[backward] the loss ", loss.type(), " was computed before the last backward of this recording, ",
                        "which freed what its gradient needs: add the losses and call backward once");
  expect_parameters("backward", "the loss", v);
  expect_scalar("backward", loss);  // before anything is consumed: the caller may retry with another loss
  ReversePass pass(*this, ReversePass::Leaves::slots, /*keep=*/false);
  pass.want_parameters();
  pass.last_micro_batch_ = options.last_micro_batch;
  ++epoch_;
  pass.parts_ = take_parts(v, options.last_part_only);
  for (GroupState& g : groups_) g.defers_weights = false;  // left by one that failed
  for (const auto& group : all_groups_) group->backward_begins();
  if (options.defer_weights) pass.mark_deferring_groups();
  try {
    pass.run(loss);
  } catch (...) {
    remaining_.erase(v);  // its gradients are lost
    if (options.defer_weights) deferred_weights_.pop_back();
    give_up_used_groups();
    throw;
  }
  if (pass.parts_.remaining && !pass.parts_.leaves_some()) remaining_.erase(v);
}

// After a derivative has thrown: later computations start afresh, with values and slots that nothing has used.
void Recording::give_up_used_groups() {
  for (const GroupState& g : groups_) {
    if (g.first_use < 0) continue;
    g.group->close_for_change(), g.group->drop_slots();
    if (g.finished) g.group->backward_failed();
  }
  gradients_.clear();
  forget_used_groups();
}

// At the end of a backward; groups not used yet are prefetched ones.
void Recording::forget_used_groups() {
  std::erase_if(groups_, [](const GroupState& g) { return g.first_use >= 0; });
  segment_begin_ = tape_.num_nodes();
  derivative_order_ = 0, is_derivative_ = false;
}

std::vector<Tensor> Recording::gradient(const Tensor& y, std::span<const Tensor> xs, const GradientOptions& options) {
  expect_can_differentiate("gradient");
  expect_value("gradient", "y", y);
  expect_scalar("gradient", y);
  std::vector<ValueId> ids;
  for (const Tensor& x : xs) {
    ids.push_back(expect_value("gradient", "x", x));
    if (!state(ids.back()).needs_grad)
      fail<LifetimeError>("[gradient] ", x.type(), " is a constant here: call recording.watch(x) before its first use");
  }
  ReversePass pass(*this, ReversePass::Leaves::values, options.keep);
  pass.want(ids);
  if (options.keep) begin_derivative();
  pass.run(y);
  std::vector<Tensor> out;
  for (size_t i = 0; i < ids.size(); ++i) {
    const Tensor& g = pass.sum_of(ids[i]);
    const DeviceScope device(xs[i].device());
    out.push_back(g ? g : full_of(xs[i].type().dual(), 0.0));
  }
  gradients_.clear();
  return out;
}

ValueId Recording::expect_value(const char* who, const char* what, const Tensor& t) const {
  if (!t) fail<LifetimeError>("[", who, "] ", what, " is undefined");
  const ValueId v = value_of(t);
  if (v < 0)
    fail<LifetimeError>("[", who, "] ", what, ", ", t.type(), ", is not a value of this recording: it was computed ",
                        t.impl().recording ? "in another one" : "outside of any; create the Recording before the forward");
  return v;
}

// Says what was most likely done: the nearest op that passes no gradient on, else frozen parameters, else values from elsewhere.
void Recording::expect_parameters(const char* who, const char* what, ValueId loss) const {
  if (states_[static_cast<size_t>(loss)].needs_grad) return;
  const auto refuse = [&](const auto&... why) {
    fail<LifetimeError>("[", who, "] no trainable parameter leads to ", what, ", ", tape_.type(loss), ": ", why...);
  };
  const LeafGroup* frozen = nullptr;
  std::vector<ValueId> open{loss}, constants;
  std::unordered_set<ValueId> seen{loss};
  while (!open.empty()) {
    const ValueId v = open.back();
    open.pop_back();
    if (const LeafGroup* group = states_[static_cast<size_t>(v)].group) {
      frozen = group;
      continue;
    }
    const Node& n = tape_.node(tape_.value(v).producer);
    if (tape_.inputs(n).empty()) constants.push_back(v);
    for (const ValueId input : tape_.inputs(n)) {
      if (states_[static_cast<size_t>(input)].needs_grad)
        refuse(tape_.op_name(n), tape_.path(n).empty() ? "" : str(" in '", tape_.path(n), "'"), " passes no gradient on");
      if (seen.insert(input).second) open.push_back(input);
    }
  }
  if (frozen) refuse("parameters of unit '", path_label(frozen->group_name()), "' do, but are frozen");
  for (const auto& [id, leaf] : leaves_)
    if (leaf.first.impl().recording && std::ranges::count(constants, leaf.second))
      refuse(leaf.first.type(), ", which was computed in another recording, is a constant in this one");
  refuse("only constants do", constants.empty() ? "" : str(", such as ", tape_.type(constants.front())),
         "; parameters are to be read in this recording, and a gradient of an input x is recording.gradient(..), after recording.watch(x)");
}

void Recording::expect_scalar(const char* who, const Tensor& y) {
  if (y.numel() != 1) fail<ShapeError>("[", who, "] needs a scalar, not ", y.type(), ": take the mean() or sum()");
  const Layout& l = y.layout();
  const bool is_loss = who == std::string_view("backward");
  const char* const subject = is_loss ? "the loss " : "y, ";
  // An axis of size 1 is treated like any other: what is valid on one rank must be valid on several.
  for (int a = 0; a < l.num_axes(); ++a) {
    if (!l[a].is_replicate() && !l[a].is_shard()) continue;
    const std::string& axis = l.mesh()->name(a);
    const std::string once =
        str("recording.", who, "(redistribute(", is_loss ? "loss" : "y", ", \"", axis, "\", Placement::partial())", is_loss ? ")" : ", ..)");
    if (l[a].is_shard())
      fail<PlacementError>("[", who, "] ", subject, y.type(), " is of one rank on mesh axis ", axis, ": write ", once);
    fail<PlacementError>("[", who, "] ", subject, y.type(), " is whole on every rank of mesh axis ", axis, ", as its ",
                         "inputs are: every rank would contribute all of it. Cut the batch, redistribute(x, \"", axis,
                         "\", Placement::shard(0)), and it is Partial; or, to count once what all ranks compute ",
                         "alike, write ", once);
  }
}

// --- which gradients are needed ---

ReversePass::ReversePass(Recording& recording, Leaves leaves, bool keep)
    : recording_(recording), tape_(recording.tape_), gradients_(recording.gradients_), leaves_(leaves), keep_(keep) {}

void ReversePass::want_parameters() {
  wanted_.resize(tape_.num_values());
  asked_.resize(tape_.num_values());
  for (ValueId v = 0; v < static_cast<ValueId>(tape_.num_values()); ++v) wanted_[v] = recording_.state(v).needs_grad;
}

void ReversePass::want(std::span<const ValueId> xs) {
  wanted_.resize(tape_.num_values());
  asked_.resize(tape_.num_values());
  want_values(xs);
  std::vector<std::pair<NodeId, ValueId>> stored = recording_.stored_values_;
  std::ranges::sort(stored);
  auto next_stored = stored.begin();
  std::vector<ValueId> changed_around(tape_.num_values(), -1);  // by value: the innermost around it that was stored into
  for (ValueId v = 0; v < static_cast<ValueId>(tape_.num_values()); ++v)
    if (const ValueId around = tape_.value(v).lies_in(); around >= 0)
      changed_around[v] = recording_.state(around).changed >= 0 ? around : changed_around[around];
  for (NodeId id = 0; id < static_cast<NodeId>(tape_.num_nodes()); ++id) {
    const Node& n = tape_.node(id);
    if (ends_gradients(n) || std::ranges::none_of(tape_.inputs(n), [&](ValueId v) { return wanted_[v]; })) continue;
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId out = tape_.output(n, o);
      if (recording_.state(out).needs_grad) wanted_[out] = true;
      for (ValueId v = changed_around[out]; v >= 0; v = changed_around[v]) wanted_[v] = true;
    }
    while (next_stored != stored.end() && next_stored->first < id) ++next_stored;
    for (; next_stored != stored.end() && next_stored->first == id; ++next_stored) wanted_[next_stored->second] = true;
  }
}

// A parameter is one value per gather. Their gradients are summed in the first one, in the order of the uses, however often it was
// gathered. The same holds for a value that was recomputed and its copies.
void ReversePass::want_values(std::span<const ValueId> xs) {
  constexpr size_t kNone = static_cast<size_t>(-1);
  std::map<std::pair<const LeafGroup*, int32_t>, size_t> leaves;  // those among xs, by their place in it
  std::vector<size_t> places(tape_.num_values(), kNone);          // of all of them
  for (size_t i = 0; i < xs.size(); ++i) {
    const ValueState& x = recording_.state(xs[i]);
    places[xs[i]] = x.group ? leaves.try_emplace({x.group, x.leaf_index}, i).first->second : i;
  }
  std::vector<ValueId> sums(xs.size(), -1);
  for (ValueId v = 0; v < static_cast<ValueId>(tape_.num_values()); ++v) {
    const ValueState& s = recording_.state(v);
    size_t place = places[v];
    if (place == kNone && s.original >= 0) place = places[s.original];
    if (const auto leaf = s.group ? leaves.find({s.group, s.leaf_index}) : leaves.end(); leaf != leaves.end()) place = leaf->second;
    if (place == kNone) continue;
    if (sums[place] < 0) sums[place] = v;
    same_value_[v] = sums[place];
    wanted_[v] = true;
  }
  for (const ValueId sum : sums)
    if (sum >= 0) asked_[sum] = true;
}

// --- the pass ---

ReversePass::Running::Running(ReversePass& pass) : recording(pass.recording_), phase(Phase::backward) { recording.pass_ = &pass; }
ReversePass::Running::~Running() { recording.pass_ = nullptr; }

void ReversePass::run(const Tensor& y) {
  const DeviceScope device(y.device());  // of seeds, and of the zeros that derivatives add to
  const Running running(*this);
  recording_.complete_offloads();
  const NodeId end = tape_.num_nodes();
  gradients_.assign(tape_.num_values(), Tensor());
  if (to_slots() && parts_.remaining && parts_.remaining->begun) {
    for (auto& [v, gradient] : parts_.remaining->gradients) gradients_[v] = std::move(gradient);
  } else if (const ValueId v = recording_.value_of(y); wanted_[v]) {
    const Tensor seed = gradients_[v] = full_of(y.type().dual(), 1.0);
    tape_.note_cotangent(recording_.value_of(seed), v);
  }
  if (!to_slots()) {
    reverse_through(0, end);
    compute_overlapped();
    return release_groups(-1);
  }
  const auto& segments = parts_.segments;
  for (size_t s = segments.size(); s-- > 0;) reverse_through(segments[s].begin, segments[s].end);
  compute_overlapped();
  if (!segments.empty()) finish_groups(segments.front().begin - 1);
  if (parts_.remaining) recording_.keep_gradients_for(*parts_.remaining);
  gradients_.clear();
  for (size_t i = 0; i < recording_.groups_.size(); ++i) recording_.groups_[i].group->backward_ended();
  if (last_micro_batch_ && !defers_weights_ && !parts_.leaves_some()) recording_.complete_sends();
  recording_.forget_used_groups();
}

// Nodes last to first. Before each, the groups whose first use is after it are finished: their reductions start.
void ReversePass::reverse_through(NodeId begin, NodeId end) {
  for (NodeId id = end - 1; id >= begin; --id) {
    const Node n = tape_.node(id);  // a copy: the tape grows below
    const PathScope path(tape_.path(n));
    if (to_slots()) finish_groups(id);
    else release_groups(id);
    const PerRankScope per_rank(n.flags & Node::kPerRank);
    if (n.op) differentiate(id, n);
    if (keep_) continue;
    if (n.op) release_saves(id);
    release_regions(id, end);
  }
}

// Calls the op's vjp if a gradient of its outputs has arrived, and adds what it yields to the gradients of the inputs.
void ReversePass::differentiate(NodeId id, const Node& n) {
  const auto outputs = std::views::iota(0, n.num_outputs);
  if (std::ranges::none_of(outputs, [&](int o) { return gradients_[tape_.output(n, o)].defined(); })) return;
  uint64_t needs = 0;
  for (int i = 0; i < n.num_inputs && !ends_gradients(n); ++i)
    if (wanted_[tape_.inputs(n)[i]]) needs |= Recording::bit(i);
  if (needs) {
    if (!n.op->vjp) fail<LifetimeError>("[", n.op->name, "] ", path_label(PathScope::current()), ": it has no derivative");
    const AttrsCopy attrs(tape_, n);
    Vjp vjp(*this, id, needs);
    n.op->vjp(attrs.data(), vjp);
    accumulate(id, needs, vjp);
  }
  for (const int o : outputs)  // freed during stack unwinding, too, except those asked for
    if (const ValueId v = tape_.output(n, o); to_slots() || !asked_[v]) gradients_[v] = Tensor();
}

// Finishes groups whose uses are all after `node`, which is about to be differentiated, the last opened first. A unit counts as
// opened when it is used, not when its prefetch was issued, so that its reduction does not wait for that point.
void ReversePass::finish_groups(NodeId node) {
  for (int next; (next = next_to_finish(node)) >= 0;) finish_group(static_cast<size_t>(next));
}

int ReversePass::next_to_finish(NodeId node) const {
  const auto& groups = recording_.groups_;
  int next = -1;
  for (int i = 0; i < static_cast<int>(groups.size()); ++i)
    if (!groups[i].finished && groups[i].first_use > node && (next < 0 || groups[i].first_use >= groups[next].first_use)) next = i;
  return next;
}

// By index: releasing and reducing record ops, which may append groups.
void ReversePass::finish_group(size_t i) {
  auto& groups = recording_.groups_;
  const std::shared_ptr<LeafGroup> group = groups[i].group;
  compute_overlapped();
  groups[i].finished = true;
  if (groups[i].for_direction && std::ranges::none_of(groups[i].contributed, std::identity())) return group->release_values();
  if (!in_backward_weights_) group->release();
  if (groups[i].defers_weights) {
    finish_deferring(groups[i]);
  } else {
    recording_.evict_early_gradients(group.get(), -1);
    group->finish(std::vector<bool>(groups[i].contributed));
  }
  std::fill(groups[i].slots.begin(), groups[i].slots.end(), Tensor());
}

// The same for gradient(): its groups may be used again, in this recording's backward.
void ReversePass::release_groups(NodeId node) {
  const auto release = [node](const std::vector<GroupState>& groups) {
    for (const GroupState& g : groups)
      if (g.first_use > node) g.group->release_after_gradient();
  };
  if (direction_) add_directional(node);
  if (!keep_) release(recording_.groups_);  // else those of this derivative
  for (const recorded::Segment& s : recording_.pending_segments_) release(s.groups);
  for (const auto& [loss, remaining] : recording_.remaining_)
    for (const recorded::Segment& s : remaining.segments) release(s.groups);
}

void ReversePass::release_saves(NodeId node) {
  const Node n = tape_.node(node);
  auto& [in, out] = recording_.node_saves_[node];
  const auto drop = [&](ValueId v) {
    ValueState& s = recording_.states_[v];
    if (--s.saves <= 0) s.saved = Tensor();
  };
  for (int i = 0; i < n.num_inputs && in; ++i)
    if (in & Recording::bit(i)) drop(tape_.inputs(n)[i]);
  for (int o = 0; o < n.num_outputs && out; ++o)
    if (out & Recording::bit(o)) drop(tape_.output(n, o));
  in = out = 0;
  for (const auto& a : recording_.early_gradients_)
    if (a.node == node) a.group->drop_slots();
  std::erase_if(recording_.early_gradients_, [node](const auto& a) { return a.node == node; });
  // Its inputs are freed, so it can no longer be rematerialized: later saves keep the tensor.
  if (n.op->rematerializable >= 0) recording_.states_[tape_.output(n, n.op->rematerializable)].rematerialized = false;
}

}  // namespace sheaf
