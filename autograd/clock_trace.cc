#include "sheaf/autograd/clock.h"
#include "sheaf/core/trace_events.h"

namespace sheaf {

std::string to_trace(std::span<const RankTimes> ranks, std::span<const Timeline> lines, std::span<const std::string> names) {
  TraceEvents events;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const RankTimes& times = ranks[r];
    const auto process = static_cast<int>(r);
    events.name_process(process, names[r]);
    events.name_row(process, 0, "compute");
    for (size_t l = 0; l < times.lanes.size(); ++l) events.name_row(process, static_cast<int>(l) + 1, times.lanes[l]);
    for (NodeId id = 0; id < times.tape->num_nodes(); ++id) {
      const double begin = lines[r].start[static_cast<size_t>(id)], seconds = lines[r].end[static_cast<size_t>(id)] - begin;
      if (seconds <= 0) continue;
      const Node& n = times.tape->node(id);
      events.add(process, times.nodes[static_cast<size_t>(id)].lane + 1, times.tape->op_name(n), times.tape->path(n), begin, seconds);
    }
  }
  return TraceEvents::document(events.lines());
}

}  // namespace sheaf
