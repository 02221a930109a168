// send: a value that is on one rank of a chain goes to its neighbour, and in the backward its gradient comes back. The two
// ranks alone take part, over a link of their own, so stages of a pipeline wait for nobody else.
//
// [Note: sends] Neither rank stops: what reads the value waits for it, and the sender goes on. What it sent is lent to the
// lane and comes back at a node of the tape (sent), where a later micro-batch or backward needs the same way or the last
// backward ends. Not where the same one sends a second value: the neighbour may be sending two back, and each would wait.
#include <algorithm>
#include <cstdlib>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

struct Send {
  static constexpr const char* kName = "send";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;
  using Attrs = SendAttrs;

  static void execute(const Attrs& a, Execute& c) {
    MeshRuntime* runtime = RankContext::current().runtime(a.to.mesh());
    if (!runtime) fail<PlacementError>("[send] this rank has not joined mesh ", a.to.mesh()->to_string());
    const int from = c.input_type(0).layout[a.axis].map().owner(), to = a.to[a.axis].map().owner();
    Communicator& link = runtime->link(a.axis, from, to);
    if (c.device().is_meta() && link.kind() != "simulated") return;
    c.stream();  // the lane's calls go behind it
    const bool sends = RankContext::current().coordinate(a.to.mesh(), a.axis) == from;
    const int64_t elements = (sends ? c.input(0) : c.output(0)).numel();
    int64_t send_counts[] = {0, 0}, recv_counts[] = {0, 0};
    (sends ? send_counts : recv_counts)[sends ? to > from : to < from] = elements;
    // Who gets nothing has an address, too: it tells the lane whose memory the ranks exchange.
    void* const here = sends ? c.input(0).data : c.output(0).data;
    c.completes_with(link.all_to_all(here, send_counts, here, recv_counts, c.output_type(0).dtype, PathScope::current()));
  }
  static void vjp(const Attrs&, Vjp& c) { detail::adjoint_of_redistribution(c); }
  static void describe(const Attrs& a, std::string& out) { out += a.to.to_string(); }
};

/// Inputs: what a send left of the value here, and what it was lent.
struct Sent {
  static constexpr const char* kName = "sent";
  static constexpr bool kOfUnits = true;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    c.stream();
    for (int i = 0; i < c.num_inputs(); ++i) c.input_tensor(i).storage()->settle();
  }
};

}  // namespace

const OpDef& send_op() { return op_def<Send>(); }

bool is_send(const MeshSpec& mesh, int axis, const Placement& from, const Placement& to) {
  return mesh.is_chain(axis) && from.is_single() && to.is_single() && std::abs(from.map().owner() - to.map().owner()) == 1;
}

void lend_until_sent(const Tensor& x, const Tensor& sent, int axis) {
  Recording* r = Recording::current();
  if (!r) return sent.storage()->settle();
  r->lend({sent.layout().mesh(), axis, x.layout()[axis].map().owner(), sent.layout()[axis].map().owner()}, sent, x);
}

void Recording::lend(const Way& way, const Tensor& sent, const Tensor& lent) {
  const auto is_before = [&](const Lent& l) { return l.way == way && l.turn != turn_; };
  for (const Lent& l : lent_)
    if (is_before(l)) take_back(l);
  std::erase_if(lent_, is_before);
  lent_.push_back({way, turn_, lent, sent});
}

void Recording::take_back(const Lent& l) {
  const Tensor inputs[] = {l.sent, l.lent};
  apply_typed(op_def<Sent>(), nullptr, inputs, {});
}

void Recording::take_back_all() {
  for (const Lent& l : lent_) take_back(l);
  lent_.clear();
}

}  // namespace sheaf
