// [Note: overlap] Where a tensor axis shards a layer, its input is gathered, again in the backward, and the gradient of the input is
// scattered: collectives around two products that do not depend on each other. The layer's derivative orders them as Megatron-LM does
// (Korthikanti et al., https://arxiv.org/abs/2205.05198):
//
//   all_gather of the input         starts (Vjp::will_read)
//   the gradient of the input       is computed meanwhile; the gathered input has arrived
//   reduce_scatter of it            starts; the gradient of the weight was deferred (Vjp::weight_gradients)
//   the gradient of the weight      is computed meanwhile (adjoint_of_redistribution)
//
// Where several layers read that input, as with a gate, the last weight's gradient is left for the next collective, that of the gradient
// on its way into the layer before. The same holds for any redistribution in front of layers, such as the all_to_all of a context axis
// or of experts; during that one all deferred gradients are computed. A deferred derivative holds the tensors that it reads, and is
// computed at the latest before its unit's gradients are reduced.
#include <utility>

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

// The node of a region that keeps no results and is one collective; else -1.
NodeId ReversePass::single_collective_of(const Region& region) const {
  if (!region.results || region.pending) return -1;
  const std::vector<NodeId> nodes = recording_.nodes_to_recompute(region);
  if (nodes.size() != 1) return -1;
  const Node& n = tape_.node(nodes[0]);
  if (!is_redistribute(n.op) || !region.entering.contains(tape_.inputs(n)[0])) return -1;
  return can_start_redistribute(tape_.type(tape_.inputs(n)[0]).layout, tape_.type(tape_.output(n)).layout) ? nodes[0] : -1;
}

void ReversePass::start_regather(ValueId v) {
  const NodeId producer = tape_.value(v).producer;
  for (Region& region : recording_.regions_) {
    if (!region.contains(producer) || single_collective_of(region) != producer) continue;
    const Node n = tape_.node(producer);
    const PathScope path(tape_.path(n));
    expect_unchanged(region);
    const Tensor dense = contiguous(region.entering.at(tape_.inputs(n)[0]).value);
    recording_.flag_next(Node::kRecomputed);
    region.pending = start_redistribute(dense, tape_.type(v).layout);
    region.entering.clear();
    recording_.set_recomputed(region, false);
    return;
  }
}

// Whether the gradient of a value is communicated next.
bool ReversePass::gradient_is_communicated(ValueId v) const {
  const Node& n = tape_.node(tape_.value(v).producer);
  const ValueId from = n.op && is_redistribute(n.op) ? tape_.inputs(n)[0] : redistributed_from(tape_, v);
  return from >= 0 && wanted_[from] && can_start_redistribute(tape_.type(v).layout.dual(), tape_.type(from).layout.dual());
}

void ReversePass::compute_overlapped(size_t left) {
  while (overlapped_.size() > left) {
    recorded::DeferredGradient next = std::move(overlapped_.front());
    overlapped_.erase(overlapped_.begin());
    compute_deferred(next);
  }
}

void ReversePass::compute_deferred(recorded::DeferredGradient& deferred) {
  const PathScope path(tape_.path(tape_.node(deferred.node)));
  const PerRankScope per_rank(tape_.node(deferred.node).flags & Node::kPerRank);
  if (!deferred.derivative) return accumulate(deferred.node, deferred.leaf, std::exchange(deferred.gradient, {}));
  for (const auto& [storage, version] : deferred.reads)
    if (const auto there = storage.lock(); there && there->version() != version)
      fail<LifetimeError>("[backward_weights] ", path_label(PathScope::current()), ": what ", tape_.node(deferred.node).op->name,
                          " read was changed ", "in place since the backward, and the gradient of its weight reads it: change a copy");
  Vjp vjp(*this, deferred.node, deferred.needs, /*deferred=*/true);
  std::exchange(deferred.derivative, nullptr)(vjp);
  accumulate(deferred.node, deferred.needs, vjp);
}

void Vjp::will_read(int i) {
  if (pass_.keeps() || !pass_.to_slots() || !recording().options().overlap) return;
  pass_.start_regather(value_of_input(i));
}

// The reverse pass continues past this node: gradients of values computed from a parameter that have their own derivative cannot be
// deferred.
bool Vjp::input_gradient_is_communicated(int first) const {
  if (pass_.keeps() || !pass_.to_slots() || deferred_ || !needs(0) || !recording().options().overlap) return false;
  for (int i = first; i < num_inputs(); ++i)
    if (needs(i) && !recording().state(value_of_input(i)).group) return false;
  return pass_.gradient_is_communicated(value_of_input(0));
}

void Vjp::defer_to_overlap(int first, std::function<void(Vjp&)> f) {
  const uint64_t needs = needs_ & ~(Recording::bit(first) - 1);
  pass_.overlapped_.push_back({.node = node_, .needs = needs, .derivative = std::move(f)});
}

Tensor Vjp::arrived_gradient() {
  auto& pending = recording().pending_gradients_;
  const ValueId v = recording().value_of(grad());
  const auto gradient = pending.find(v);
  if (gradient == pending.end()) {  // it needed no communication
    if (tape().node(tape().value(v).producer).op == &start_op())
      fail<LifetimeError>("[backward] ", path_label(PathScope::current()), ": gradient %", v, " is on its way, but was not sent by this backward");
    return grad();
  }
  const PendingRedistribute here = std::move(gradient->second);
  pending.erase(gradient);
  return wait(here);
}

void Vjp::set_pending(const PendingRedistribute& gradient) {
  recording().pending_gradients_.emplace(recording().value_of(gradient.value), gradient);
  set(0, gradient.value);
}

int64_t Vjp::rows_of_pieces() const {
  return detail::least_rows_of(tape(), tape().node(tape().value(value_of_input(0)).producer), recording().options().piece_rows);
}

bool Vjp::has_overlapped() const { return !pass_.overlapped_.empty(); }
void Vjp::compute_overlapped(size_t left) { pass_.compute_overlapped(pass_.overlapped_.size() > left ? left : 0); }

}  // namespace sheaf
