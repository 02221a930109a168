// [Note: beside what travels] Where a tensor axis cuts a layer, its input is gathered, again in the backward, and the gradient of
// that is scattered: three collectives around two products that do not wait for each other. The layer's derivative goes through
// them in this order, after Megatron-LM (Korthikanti et al., https://arxiv.org/abs/2205.05198):
//
//   all_gather of the input         sets out (Vjp::will_read)
//   the gradient of the input       is computed meanwhile; the gathered input has arrived
//   reduce_scatter of it            sets out; the gradient of the weight was put aside (Vjp::weights)
//   the gradient of the weight      is computed meanwhile (adjoint_of_redistribution)
//
// Where several layers read that input, as a gate does, the last weight's gradient is left for what travels next, the gradient on its
// way into the layer before. So it is for whatever redistribution stands before layers, such as the all_to_all of a context axis or
// of experts; beside that all are computed. What is put aside holds what it reads, and is computed at the latest before its unit's
// gradients are reduced.
#include <utility>

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"

namespace sheaf {

// The node of a region that keeps no results and is one collective; else -1.
NodeId Recording::only_travels(const Region& region) const {
  if (!region.results || region.travelling) return -1;
  const std::vector<NodeId> nodes = nodes_to_repeat(region);
  if (nodes.size() != 1) return -1;
  const Node& n = tape_.node(nodes[0]);
  if (!is_redistribute(n.op) || !region.entering.contains(tape_.inputs(n)[0])) return -1;
  return can_travel(tape_.type(tape_.inputs(n)[0]).layout, tape_.type(tape_.output(n)).layout) ? nodes[0] : -1;
}

void Recording::start_again(ValueId v) {
  const NodeId producer = tape_.value(v).producer;
  for (Region& region : regions_) {
    if (producer < region.begin || producer >= region.end || only_travels(region) != producer) continue;
    const Node n = tape_.node(producer);
    const PathScope path(tape_.path(n));
    const Tensor dense = contiguous(region.entering.at(tape_.inputs(n)[0]));
    flag_next(Node::kRecomputed);
    region.travelling = start_redistribute(dense, tape_.type(v).layout);
    region.entering.clear();
    set_repeated(region, false);
    return;
  }
}

// Whether the gradient of a value goes through a collective next.
bool Recording::sends_gradient_on(ValueId v) const {
  const Node& n = tape_.node(tape_.value(v).producer);
  const ValueId from = n.op && is_redistribute(n.op) ? tape_.inputs(n)[0] : departed(tape_, v);
  return from >= 0 && wanted_[from] && can_travel(tape_.type(v).layout.dual(), tape_.type(from).layout.dual());
}

void Recording::compute_aside(size_t left) {
  while (aside_.size() > left) {
    const Aside aside = std::move(aside_.front());
    aside_.erase(aside_.begin());
    const PathScope path(tape_.path(tape_.node(aside.node)));
    Vjp vjp(*this, aside.node, aside.needs, /*late=*/true);
    aside.derivative(vjp);
    accumulate(aside.node, aside.needs, vjp);
  }
}

void Vjp::will_read(int i) {
  if (recording_.saving_ || !recording_.to_groups_ || !recording_.options_.overlap) return;
  recording_.start_again(recording_.tape_.inputs(recording_.tape_.node(node_))[i]);
}

// The reverse pass goes on behind the node: what is made of a parameter, and has a derivative of its own, cannot be put aside.
bool Vjp::input_travels_back(int first) const {
  if (recording_.saving_ || !recording_.to_groups_ || late_ || !needs(0) || !recording_.options_.overlap) return false;
  const auto inputs = recording_.tape_.inputs(recording_.tape_.node(node_));
  for (int i = first; i < num_inputs(); ++i)
    if (needs(i) && !recording_.state(inputs[i]).group) return false;
  return recording_.sends_gradient_on(inputs[0]);
}

void Vjp::put_aside(int first, std::function<void(Vjp&)> f) {
  const uint64_t needs = needs_ & ~(Recording::bit(first) - 1);
  recording_.aside_.push_back({node_, needs, std::move(f)});
}

Tensor Vjp::arrived_gradient() {
  const ValueId v = recording_.value_of(grad());
  const auto gradient = recording_.travelling_.find(v);
  if (gradient == recording_.travelling_.end()) {  // it did not have to travel
    if (recording_.tape_.node(recording_.tape_.value(v).producer).op == &start_op())
      fail<LifetimeError>("[backward] ", path_label(PathScope::current()), ": gradient %", v, " is on its way, and nobody knows from where");
    return grad();
  }
  const Travelling here = std::move(gradient->second);
  recording_.travelling_.erase(gradient);
  return arrived(here);
}

void Vjp::set_travelling(const Travelling& gradient) {
  recording_.travelling_.emplace(recording_.value_of(gradient.value), gradient);
  set(0, gradient.value);
}

int64_t Vjp::rows_of_pieces() const {
  const Tape& tape = recording_.tape_;
  return detail::least_rows_of(tape, tape.node(tape.value(tape.inputs(tape.node(node_))[0]).producer), recording_.options_.piece_rows);
}

bool Vjp::any_aside() const { return !recording_.aside_.empty(); }
void Vjp::compute_aside(size_t left) { recording_.compute_aside(recording_.aside_.size() > left ? left : 0); }

}  // namespace sheaf
