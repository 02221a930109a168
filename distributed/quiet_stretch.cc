#include "sheaf/distributed/quiet_stretch.h"

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/ops/redistribution.h"
#include "sheaf/autograd/work.h"

namespace sheaf {
namespace {

// For processors that perform some tens of operations in the time that one byte takes.
constexpr double kOperationsPerByte = 64;

double operations_of(const Tape& tape, const Node& n) {
  const Work w = whole_work_of(tape, n);
  return w.products + w.attention_forward + w.attention_backward + kOperationsPerByte * (w.bytes + w.passes);
}

}  // namespace

void QuietStretch::begin(const Tape& tape, const MeshSpec* mesh, int axis, bool weighs) {
  *this = QuietStretch();
  mesh_ = mesh, axis_ = axis, weighs_ = weighs, seen_ = tape.num_nodes();
}

void QuietStretch::look(const Tape& tape) {
  for (; seen_ < tape.num_nodes(); ++seen_) {
    const Node& n = tape.node(seen_);
    if (is_exchange(tape, n)) {
      if (stretch_ > most_) most_ = stretch_, longest_ = exchanges_;
      stretch_ = 0, counts_ = false;
      ++exchanges_;
    } else if (weighs_ && counts_ && tape.kind(n) == OpKind::op && !(n.flags & Node::kPerRank)) {
      stretch_ += operations_of(tape, n);
    }
  }
  counts_ = true;
}

bool QuietStretch::is_exchange(const Tape& tape, const Node& n) const {
  if (!n.op || !is_redistribute(n.op) || n.op == &send_op()) return false;
  const Layout &from = tape.type(tape.inputs(n)[0]).layout, &to = tape.type(tape.output(n)).layout;
  if (to.mesh() != mesh_) return false;
  const Redistribution::Move m = Redistribution::move(from, to);
  return m.communicates() && m.axis == axis_;
}

}  // namespace sheaf
