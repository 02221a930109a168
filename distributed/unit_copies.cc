// Copies of the masters that are kept for all micro-batches of a recording: casts, if nothing is gathered, or what a group gathers
// along a secondary axis, from which the unit's own gathers then start.
#include "sheaf/distributed/unit.h"
#include "sheaf/distributed/unit_ops.h"

namespace sheaf {

bool Unit::has_copies() const {
  return !copies_.buffers.empty() && copies_.recording == Recording::current_serial() && copies_.version == version();
}

void Unit::issue_copies(bool prefetched) {
  const PathScope path(name_);
  drop_copies();
  Recording* r = Recording::current();
  const std::vector<Tensor> masters = masters_for_compute();
  if (secondary()) {
    std::vector<OutputSpec> specs;
    for (const FlatBuffer& b : buffers_) {
      specs.push_back({.type = sent_type(b, whole(b).with(axis_, b.shard.layout()[axis_]))});
      if (is_made_for_gather(b)) copies_.inputs.push_back(masters[specs.size() - 1]);
    }
    if (r && prefetched) r->flag_next(Node::kPrefetched);
    const UnitOps::Attrs attrs{secondary_axis_, buffers_.size()};
    const Tensors outputs = apply_typed(UnitOps::gather_copies(), &attrs, masters, specs);
    copies_.buffers.assign(outputs.begin(), outputs.end());
    copies_.under_way = true;
  } else {
    copies_.buffers = masters;
  }
  copies_.recording = Recording::current_serial();
  copies_.version = version();
}

std::vector<Tensor> Unit::take_copies() {
  if (!has_copies()) issue_copies(/*prefetched=*/false);
  if (copies_.under_way) {
    const PathScope path(name_);
    UnitOps::complete_results(secondary_axis_, copies_.buffers, copies_.inputs);
    copies_.inputs.clear();
    copies_.under_way = false;
  }
  return copies_.buffers;
}

void Unit::drop_copies() {
  if (secondary() && !copies_.buffers.empty()) {
    const PathScope path(name_);
    UnitOps::discard_buffers(secondary_axis_, copies_.buffers, copies_.recording);
  }
  copies_ = {};
}

}  // namespace sheaf
