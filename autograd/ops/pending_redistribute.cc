#include "sheaf/autograd/ops/pending_redistribute.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/ops/redistribution.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/work.h"

namespace sheaf {
namespace {

/// Outputs: the receive buffer, and a packed copy of the input if that is what is sent.
struct Start {
  static constexpr const char* kName = "redistribute";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;
  struct Attrs {
    Layout to;
    bool copies;  // copies the input before it is sent
    bool operator==(const Attrs&) const = default;
  };

  static void execute(const Attrs&, Execute& c) {
    const Redistribution r(c, c.input_type(0), c.output_type(0));
    const View in = c.input(0);
    // A rank that receives nothing passes an address, too: it tells the lane in whose memory the ranks exchange.
    void* const sent = c.num_outputs() > 1 ? c.output(1).data : in.data;
    void* const received = c.output(0).data ? c.output(0).data : sent;
    c.completes_with(r.start(in, sent, received, /*waited_for=*/false));
  }
  static void work(const Attrs& a, WorkOf& w) { w.work.bytes = a.copies ? bytes_to_copy(w.input(0), w.work.dtype) : 0; }
  static void vjp(const Attrs&, Vjp& c) { c.set(0, c.arrived_gradient()); }
  static void describe(const Attrs& a, std::string& out) { out += a.to.to_string(); }
};

/// Inputs: the value in flight, and what was lent for it.
struct Arrived {
  static constexpr const char* kName = "wait";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;  // a rank that receives nothing waits, too, for what it lent
  struct Attrs {
    Layout from;
    bool unpacks;
    bool operator==(const Attrs&) const = default;
  };

  static void execute(const Attrs& a, Execute& c) {
    c.stream();
    const Type from{c.input_type(0).dtype, c.input_type(0).shape, a.from};
    const View received = c.input(0), out = c.output(0);  // waits for the lane
    if (received.data != out.data) Redistribution(c, from, c.output_type(0)).finish(received.data, out);
  }
  // If the value became Invariant, its gradient may need no communication.
  static void vjp(const Attrs& a, Vjp& c) {
    const Layout back = a.from.dual();
    if (!can_start_redistribute(c.grad().layout(), back)) return c.set(0, redistribute(c.grad(), back));
    c.set_pending(start_redistribute(c.grad(), back));
    c.compute_overlapped(0);
  }
  static void work(const Attrs& a, WorkOf& w) { w.work.bytes = a.unpacks ? bytes_to_copy(w.output(0), w.work.dtype) : 0; }
};

}  // namespace

const OpDef& start_op() { return op_def<Start>(); }

ValueId redistributed_from(const Tape& tape, ValueId v) {
  const NodeId producer = tape.value(v).producer;
  const Node* n = &tape.node(producer);
  if (n->op == &op_def<Arrived>()) n = &tape.node(tape.value(tape.inputs(*n)[0]).producer);
  return n->op == &op_def<Start>() ? tape.inputs(*n)[0] : -1;
}

bool can_start_redistribute(const Layout& from, const Layout& to) {
  if (!from.mesh() || from.mesh() != to.mesh() || route(from, to).size() != 1) return false;
  const Redistribution::Move m = Redistribution::move(from, to);
  return m.communicates() && !is_send(*to.mesh(), m.axis, from[m.axis], to[m.axis]);
}

PendingRedistribute start_redistribute(const Tensor& x, const Layout& to) {
  const Tensor dense = contiguous(x);
  const Type type{x.dtype(), x.shape(), to};
  const Redistribution::Move m = Redistribution::move(x.layout(), to);
  const bool packs = Redistribution::packs(x.type(), type), is_all_reduce = m.from == Placement::Kind::partial && m.to != Placement::Kind::shard;
  const Start::Attrs attrs{to, packs || is_all_reduce};
  std::vector<OutputSpec> specs{{.type = type}};
  if (packs) specs.push_back({.type = x.type()});
  const Tensors outputs = apply_typed(op_def<Start>(), &attrs, std::span(&dense, 1), specs);
  return {x.layout(), packs ? outputs[1] : is_all_reduce ? Tensor() : dense, outputs[0]};
}

Tensor wait(const PendingRedistribute& t) {
  const Type& type = t.value.type();
  const Arrived::Attrs attrs{t.from, Redistribution::unpacks({type.dtype, type.shape, t.from}, type)};
  const OutputSpec spec{.type = type, .into = attrs.unpacks ? Tensor() : t.value};
  const Tensor inputs[] = {t.value, t.lent};
  return apply_typed(op_def<Arrived>(), &attrs, std::span(inputs, t.lent ? 2 : 1), std::span(&spec, 1))[0];
}

}  // namespace sheaf
