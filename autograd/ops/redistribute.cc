#include "sheaf/autograd/ops/redistribute.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/pieces.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/ops/pending_redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/work.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

using Kind = Placement::Kind;
using Move = Redistribution::Move;

struct RedistributeOp {
  static constexpr const char* kName = "redistribute";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;
  struct Attrs {
    Layout to;
    int32_t axis;         // the one that changes; -1: only a mesh is added
    bool packs = false, unpacks = false;  // of an all_to_all
    bool operator==(const Attrs&) const = default;
  };
  static void work(const Attrs& a, WorkOf& w) {
    if (!a.packs && !a.unpacks) return;
    w.work.bytes = (a.packs ? bytes_to_copy(w.input(0), w.work.dtype) : 0) + (a.unpacks ? bytes_to_copy(w.output(0), w.work.dtype) : 0);
  }

  // For ops with other Attrs, too.
  static int64_t workspace(const auto&, const Execute& c) {
    return Redistribution::workspace(c.input_type(0), c.output_type(0), c.input(0), c.output(0));
  }
  static void execute(const auto&, Execute& c) {
    Redistribution(c, c.input_type(0), c.output_type(0)).run(c.input(0), c.output(0), c.workspace.data);
  }
  static void vjp(const auto&, Vjp& c) { detail::adjoint_of_redistribution(c); }
  static void describe(const Attrs& a, std::string& out) { out += a.to.to_string(); }
};

// Its readers wait for the pieces that they read. Outputs: the received value and, if needed, buffers for receiving and sending.
struct InPieces {
  static constexpr const char* kName = "redistribute";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;
  struct Attrs {
    Layout to;
    int32_t parts;
    int32_t own = 1;        // the part of what is sent that stays on this rank, 1 / own
    bool by_heads = false;  // of keys and values, not by rows
    bool operator==(const Attrs&) const = default;
  };

  static void execute(const Attrs& a, Execute& c) {
    c.stream();
    const RedistributionInPieces r(c, c.input_type(0), c.output_type(0));
    const auto beside = [&](int o) { return c.num_outputs() > o ? c.output(o).data : nullptr; };
    SmallVector<Tensor, 3> outputs;
    for (int o = 0; o < c.num_outputs(); ++o) outputs.push_back(c.output_tensor(o));
    expect(c.input_tensor(0), std::span(outputs.begin(), outputs.size()),
              a.by_heads ? r.start_by_heads(c.input(0), c.output(0), beside(1), beside(2), a.parts)
                         : r.start(c.input(0), c.output(0), beside(1), beside(2), a.parts));
  }
  static void expect(const Tensor& x, std::span<const Tensor> outputs, std::vector<IncomingRows> pieces) {
    std::vector<std::shared_ptr<Storage>> lent;
    if (outputs.size() < 3) lent.push_back(x.storage());
    for (const Tensor& t : outputs.subspan(1)) lent.push_back(t.storage());
    outputs[0].storage()->filled_in_pieces(std::move(pieces), std::move(lent));
  }
  // Copies of the rank's own rows, or everything that is unpacked; and what is packed.
  static void work(const Attrs& a, WorkOf& w) {
    w.work.bytes = w.num_outputs() > 1 ? bytes_to_copy(w.output(0), w.work.dtype) : bytes_to_copy(w.input(0), w.work.dtype) / a.own;
    if (w.num_outputs() > 2) w.work.bytes += bytes_to_copy(w.input(0), w.work.dtype);
  }
  static void vjp(const Attrs&, Vjp& c) { detail::adjoint_of_redistribution(c); }
  static constexpr bool kMarked = true;
  static void describe(const Attrs& a, std::string& out) { out += a.by_heads ? "by heads" : "in pieces"; }
};

// By itself it is any redistribution. Values to be reduced are not packed: products compute them in the order in which they are sent.
struct SentInPieces : RedistributeOp {
  using Attrs = OutputInPieces;
  static void work(const Attrs& a, WorkOf& w) {
    w.work.bytes = a.packs ? bytes_to_copy(w.input(0), w.work.dtype) + bytes_to_copy(w.output(0), w.work.dtype) : 0;
  }
  static constexpr bool kMarked = true;
  static void describe(const Attrs&, std::string& out) { out += "in pieces"; }
};

// The slice R → S as a view; a separate op only because it can alias (the table's communicating moves cannot).
struct Slice : RedistributeOp {
  static constexpr bool kRecipe = true;
  static constexpr Lane kLane = Lane::compute;
  static bool alias(const Attrs& a, const View& in, View& out) {
    out.strides = in.strides;
    out.data = in.data;
    if (in.shape == out.shape && in.rank() == out.rank()) return true;
    const Placement& p = a.to[a.axis];
    const int me = RankContext::current().coordinate(a.to.mesh(), a.axis), n = a.to.mesh()->size(a.axis);
    if (n == 1) {  // one rank: only a flat shard changes the local shape
      out.strides = out.shape.contiguous_strides();
      return in.contiguous();
    }
    if (p.map().is_scattered()) return false;
    const Interval own = p.map().owned(me, n, in.shape);
    if (p.map().is_flat()) {
      if (!in.contiguous()) return false;
      out.strides = Shape{1};
    }
    const int64_t row = p.map().is_flat() ? 1 : in.strides[p.map().dim()];
    out.data = in.as<char>() + own.begin * row * static_cast<int64_t>(size_of(in.dtype));
    return true;
  }
};

}  // namespace

const OpDef& in_pieces_op() { return op_def<InPieces>(); }
const OpDef& output_in_pieces_op() { return op_def<SentInPieces>(); }

void expect_pieces(const void* attrs, const Tensor& input, std::span<const Tensor> outputs) {
  const auto& a = *static_cast<const InPieces::Attrs*>(attrs);
  InPieces::expect(input, outputs,
                      a.by_heads ? RedistributionInPieces::incoming_heads(outputs[0].type(), a.parts)
                                 : RedistributionInPieces::incoming_rows(input.type(), outputs[0].type(), a.parts, input.device()));
}

IncomingPieces incoming_pieces(const Tape& tape, const Node& n, bool by_heads) {
  if (n.op != &in_pieces_op()) return {};
  const auto [to, parts, own, are_heads] = *static_cast<const InPieces::Attrs*>(tape.attrs(n));
  if (are_heads != by_heads) return {};
  if (n.num_outputs > 1) return {parts, 0};
  const int ranks = Redistribution::move(tape.type(tape.inputs(n)[0]).layout, tape.type(tape.output(n)).layout).size;
  return {parts * (ranks - 1), 1.0 / ranks};
}

int32_t rounds_of(const Tape& tape, NodeId id) {
  const Node& n = tape.node(id);
  if (n.op == &in_pieces_op()) return static_cast<const InPieces::Attrs*>(tape.attrs(n))->parts;
  const int32_t parts = output_pieces(tape, id - 1);
  if (parts == 0) return 1;
  const bool by_ranks = !static_cast<const OutputInPieces*>(tape.attrs(n))->packs &&
                        Redistribution::move(tape.type(tape.inputs(n)[0]).layout, tape.type(tape.output(n)).layout).exchanges();
  return by_ranks ? 1 : parts;  // then each call is between two ranks
}

int32_t output_pieces(const Tape& tape, NodeId id) {
  if (id < 0 || id + 1 >= tape.num_nodes()) return 0;
  const Node &n = tape.node(id), &next = tape.node(id + 1);
  const bool goes = next.op == &output_in_pieces_op() && n.num_outputs == 1 && tape.inputs(next)[0] == tape.output(n) &&
                    detail::row_inputs_of(tape, n);
  return goes ? static_cast<const OutputInPieces*>(tape.attrs(next))->parts : 0;
}

bool is_redistribute(const OpDef* op) {
  return op == &op_def<RedistributeOp>() || op == &op_def<Slice>() || op == &in_pieces_op() || op == &output_in_pieces_op() ||
         op == &send_op() || op == &start_op();
}

void detail::adjoint_of_redistribution(Vjp& c) {
  const Type& from = c.input_type(0);
  if (!from.layout.mesh()) {  // a constant without a mesh is Replicate: its gradient is Partial
    return c.set(0, redistribute(c.grad(), Layout(c.output_type(0).layout.mesh(), Placement::partial())));
  }
  // A single rank's contribution to a parameter's gradient is stored into its slot directly (store_into).
  const bool to_slot = adds_up_to(c.grad().layout(), from.layout.dual()) && c.has_place(0);
  if (to_slot) return c.set(0, c.grad());
  if (!c.has_overlapped() || !can_start_redistribute(c.grad().layout(), from.layout.dual())) {
    return c.set(0, come_in_pieces(c.grad(), from.layout.dual(), c.rows_of_pieces()));  // what a product made goes back into products
  }
  const PendingRedistribute gradient = start_redistribute(c.grad(), from.layout.dual());
  c.compute_overlapped(Redistribution::move(c.grad().layout(), from.layout.dual()).from == Kind::partial ? 1 : 0);
  c.set(0, wait(gradient));
}

bool adds_up_to(const Layout& g, const Layout& want) {
  for (int a = 0; a < g.num_axes(); ++a)
    if (!(g[a] == want[a]) && !(want[a].is_partial() && g[a].is_single())) return false;
  return g.mesh() == want.mesh();
}

std::string redistribution_name(const Layout& from, const Layout& to) {
  const Move m = Redistribution::move(from, to);
  if (m.relabels()) return "nothing";
  if (Move::is_whole(m.from)) return m.to == Kind::shard ? "slice" : "keep_on_one";
  if (m.from == Kind::partial) return m.to == Kind::shard ? "reduce_scatter" : "all_reduce";
  if (is_send(*to.mesh(), m.axis, from[m.axis], to[m.axis])) return "send";
  return m.to == Kind::partial ? "zero_embed" : m.to == Kind::shard ? "all_to_all" : "all_gather";
}

namespace {

// One step of a route.
Tensor step_to(const Tensor& x, const Layout& to) {
  const Layout have = x.layout().mesh() ? x.layout() : Layout(to.mesh());
  const Move m = Redistribution::move(have, to);
  const OutputSpec spec{.type = {x.dtype(), x.shape(), to}};
  const bool views = m.relabels() || (Move::is_whole(m.from) && m.to == Kind::shard);
  if (views || !is_send(*to.mesh(), m.axis, have[m.axis], to[m.axis])) {
    const Type now{x.dtype(), x.shape(), have};
    const RedistributeOp::Attrs attrs{to, m.axis, m.exchanges() && Redistribution::packs(now, spec.type),
                                      m.exchanges() && Redistribution::unpacks(now, spec.type)};
    return apply_typed(views ? op_def<Slice>() : op_def<RedistributeOp>(), &attrs, std::span(&x, 1), std::span(&spec, 1))[0];
  }
  return send(x, to, m.axis);
}

}  // namespace

Tensor redistribute(const Tensor& x, const Layout& to) {
  expect_defined("redistribute", x);
  if (x.layout() == to) return x;
  if (!to.mesh()) fail<PlacementError>("[redistribute] ", x.type(), " to a layout without a mesh: full_tensor(x) makes it whole on every rank");
  if (x.layout().mesh() && x.layout().mesh() != to.mesh())
    fail<PlacementError>("[redistribute] ", x.type(), " is on mesh ", x.layout().mesh()->to_string(), ", not ",
                         to.mesh()->to_string());
  for (int axis = 0; axis < to.num_axes(); ++axis) {  // also axes of size 1, where nothing is cut
    const int dim = to[axis].map().dim();
    if (!to[axis].is_shard() || to[axis].map().is_flat() || to[axis].is_single() || (dim >= 0 && dim < x.rank())) continue;
    fail<PlacementError>("[redistribute] ", x.type(), " has no dimension ", dim, " to cut over mesh axis ", to.mesh()->name(axis),
                         ", rank ", RankContext::current().rank);
  }
  to.local_shape(x.shape());  // throws, before anything is sent, if a shard does not fit
  Tensor y = x;
  for (const Layout& next : route(x.layout(), to)) y = step_to(y, next);
  return y;
}

Tensor redistribute_in_pieces(const Tensor& x, const Layout& to, double products) {
  const Recording* const r = Recording::current();
  return come_in_pieces(x, to, r ? detail::least_rows(r->options().piece_rows, products) : 0);
}

Tensor come_in_pieces(const Tensor& x, const Layout& to, int64_t least_rows) {
  const Recording* const r = Recording::current();
  if (!r || !r->options().overlap || !x) return redistribute(x, to);
  const auto [parts, unpacks, packs, own] = RedistributionInPieces::coming(x.type(), to, least_rows);
  if (parts == 0) return redistribute(x, to);
  const Tensor dense = contiguous(x);
  const InPieces::Attrs attrs{.to = to, .parts = static_cast<int32_t>(parts), .own = own};
  std::vector<OutputSpec> specs{{.type = {x.dtype(), x.shape(), to}}};
  if (unpacks) specs.push_back(specs[0]);
  if (packs) specs.push_back({.type = x.type()});
  return apply_typed(in_pieces_op(), &attrs, std::span(&dense, 1), specs)[0];
}

Tensor redistribute_in_heads(const Tensor& x, const Layout& to, int64_t readers) {
  const Recording* const r = Recording::current();
  const int64_t parts =
      r && r->options().overlap && x ? RedistributionInPieces::coming_by_heads(x.type(), to, x.device(), readers, r->options().piece_rows) : 0;
  if (parts == 0) return redistribute(x, to);
  const InPieces::Attrs attrs{.to = to, .parts = static_cast<int32_t>(parts), .by_heads = true};
  const OutputSpec come{.type = {x.dtype(), x.shape(), to}};
  const OutputSpec specs[] = {come, come, {.type = x.type()}};
  return apply_typed(in_pieces_op(), &attrs, std::span(&x, 1), specs)[0];
}

Tensor redistribute(const Tensor& x, const std::string& axis, const Placement& to) {
  expect_defined("redistribute", x);
  if (!x.layout().mesh() && to.is_replicate()) return x;
  if (!x.layout().mesh()) fail<PlacementError>("[redistribute] ", x.type(), " has no mesh; give a whole layout");
  return redistribute(x, x.layout().with(axis, to));
}

Tensor full_tensor(const Tensor& x) {
  expect_defined("full_tensor", x);
  return x.layout().mesh() ? redistribute(x, Layout(x.layout().mesh())) : x;
}

}  // namespace sheaf
