// send: a value on one rank of a chain goes to its neighbour, and in the backward its gradient comes back. Only the two ranks take
// part, over their own link, so pipeline stages wait for nobody else.
//
// [Note: sends] Neither rank blocks: readers of the value wait for it, and the sender continues. The sent memory is lent to the lane
// and returned at a node of the tape (sent): where the second micro-batch or backward after it needs the same route, so that the
// neighbour may be one turn late, or where the last backward ends. Not where the same micro-batch or backward sends a second value:
// the neighbour may be sending two back, and both would deadlock.
#include <algorithm>
#include <cstdlib>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

struct SendAttrs {
  Layout to;
  int32_t axis;
  int32_t back;  // to the previous rank, not to the next
  bool operator==(const SendAttrs&) const = default;
};

Tensor send_along(const Tensor& x, const Layout& to, int axis, bool back);

struct Send {
  static constexpr const char* kName = "send";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;
  using Attrs = SendAttrs;

  static void execute(const Attrs& a, Execute& c) {
    MeshRuntime* runtime = RankContext::current().runtime(a.to.mesh());
    if (!runtime) fail<PlacementError>("[send] this rank has not joined mesh ", a.to.mesh()->to_string());
    const int from = c.input_type(0).layout[a.axis].map().owner(), to = a.to[a.axis].map().owner();
    Communicator& link = runtime->link(a.axis, from, a.back ? Toward::before : Toward::next);
    if (c.device().is_meta() && link.kind() != "simulated") return;
    c.stream();  // the lane's calls are ordered after it
    const bool sends = RankContext::current().coordinate(a.to.mesh(), a.axis) == from;
    const int64_t elements = (sends ? c.input(0) : c.output(0)).numel();
    int64_t send_counts[] = {0, 0}, recv_counts[] = {0, 0};
    (sends ? send_counts : recv_counts)[sends ? to > from : to < from] = elements;
    // A rank that receives nothing passes an address, too: it tells the lane in whose memory the ranks exchange.
    void* const here = sends ? c.input(0).data : c.output(0).data;
    c.completes_with(link.all_to_all(here, send_counts, here, recv_counts, c.output_type(0).dtype, PathScope::current()));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor there = redistribute(c.grad(), c.output_type(0).layout.dual());
    c.set(0, send_along(there, c.input_type(0).layout.dual(), a.axis, !a.back));
  }
  static void describe(const Attrs& a, std::string& out) { out += a.to.to_string(); }
};

/// Inputs: the sender's placeholder for the sent value, and what was lent.
struct Sent {
  static constexpr const char* kName = "sent";
  static constexpr bool kOfUnits = true;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    c.stream();
    for (int i = 0; i < c.num_inputs(); ++i) c.input_tensor(i).storage()->settle();
  }
};

// On the sending rank: `sent` is the placeholder left of `x`, which the lane may read until it is returned. Outside of a recording
// this waits.
void lend_until_sent(const Tensor& x, const Tensor& sent, int axis, bool back) {
  Recording* r = Recording::current();
  if (!r) return sent.storage()->settle();
  r->keep_until_sent({sent.layout().mesh(), axis, x.layout()[axis].map().owner(), back}, sent, x);
}

Tensor send_along(const Tensor& x, const Layout& to, int axis, bool back) {
  if (const Recording* r = Recording::current(); r && r->in_recompute_scope())
    fail<PlacementError>("[send] ", path_label(PathScope::current()), ": ", x.type(), " goes to ", to.to_string(),
                         " inside of a RecomputeScope: the backward would send it again, when the other stage is elsewhere. ",
                         "Recompute the modules of a stage, not what holds several");
  const SendAttrs attrs{to, axis, back};
  const OutputSpec spec{.type = {x.dtype(), x.shape(), to}};
  const Tensor dense = contiguous(x);
  const Tensor sent = apply_typed(op_def<Send>(), &attrs, std::span(&dense, 1), std::span(&spec, 1))[0];
  if (to.is_elsewhere() && !x.layout().is_elsewhere()) lend_until_sent(dense, sent, axis, back);
  return sent;
}

bool are_next(const MeshSpec& mesh, int axis, int rank, int next) {
  return next == rank + 1 || (mesh.is_ring(axis) && next == 0 && rank + 1 == mesh.size(axis));
}

}  // namespace

const OpDef& send_op() { return op_def<Send>(); }

bool is_send(const MeshSpec& mesh, int axis, const Placement& from, const Placement& to) {
  if (!mesh.is_chain(axis) || !from.is_single() || !to.is_single()) return false;
  const int a = from.map().owner(), b = to.map().owner();
  return a != b && (are_next(mesh, axis, a, b) || are_next(mesh, axis, b, a));
}

Tensor send(const Tensor& x, const Layout& to, int axis) {
  const int from = x.layout()[axis].map().owner(), there = to[axis].map().owner();
  return send_along(x, to, axis, !are_next(*to.mesh(), axis, from, there));
}

bool sends_back(const Tape& tape, const Node& n) {
  return n.op == &send_op() && static_cast<const SendAttrs*>(tape.attrs(n))->back;
}

void Recording::keep_until_sent(const recorded::SendRoute& route, const Tensor& sent, const Tensor& source) {
  uint64_t last = 0;  // epoch that sent along the same route
  for (const recorded::PendingSend& s : pending_sends_)
    if (s.route == route && s.epoch != epoch_) last = std::max(last, s.epoch);
  const auto is_before = [&](const recorded::PendingSend& s) { return s.route == route && s.epoch != epoch_ && s.epoch != last; };
  for (const recorded::PendingSend& s : pending_sends_)
    if (is_before(s)) complete_send(s);
  std::erase_if(pending_sends_, is_before);
  pending_sends_.push_back({route, epoch_, source, sent});
}

void Recording::complete_send(const recorded::PendingSend& s) {
  const Tensor inputs[] = {s.sent, s.source};
  apply_typed(op_def<Sent>(), nullptr, inputs, {});
}

void Recording::complete_sends() {
  for (const recorded::PendingSend& s : pending_sends_) complete_send(s);
  pending_sends_.clear();
}

}  // namespace sheaf
