#include "sheaf/autograd/clock.h"
#include "sheaf/core/json.h"

namespace sheaf {

std::string to_trace(std::span<const RankTimes> ranks, std::span<const Timeline> lines, std::span<const std::string> names) {
  std::string out = "{\"traceEvents\":[";
  const char* separator = "\n";
  const auto event = [&](const std::string& text) { out += separator + text, separator = ",\n"; };
  const auto called = [&](const char* what, size_t rank, size_t row, const std::string& name) {
    event(str("{\"ph\":\"M\",\"name\":\"", what, "\",\"pid\":", rank, ",\"tid\":", row, ",\"args\":{\"name\":", json_string(name), "}}"));
  };
  for (size_t r = 0; r < ranks.size(); ++r) {
    const RankTimes& times = ranks[r];
    called("process_name", r, 0, names[r]);
    called("thread_name", r, 0, "compute");
    for (size_t l = 0; l < times.lanes.size(); ++l) called("thread_name", r, l + 1, times.lanes[l]);
    for (NodeId id = 0; id < times.tape->num_nodes(); ++id) {
      const double seconds = lines[r].end[static_cast<size_t>(id)] - lines[r].start[static_cast<size_t>(id)];
      if (seconds <= 0) continue;
      const Node& n = times.tape->node(id);
      const int32_t lane = times.nodes[static_cast<size_t>(id)].lane;
      event(str("{\"ph\":\"X\",\"name\":", json_string(times.tape->op_name(n)), ",\"cat\":\"", name(n.phase), "\",\"pid\":", r,
                ",\"tid\":", lane + 1, ",\"ts\":", lines[r].start[static_cast<size_t>(id)] * 1e6, ",\"dur\":", seconds * 1e6,
                ",\"args\":{\"module\":", json_string(path_label(times.tape->path(n))), ",\"node\":", id, "}}"));
    }
  }
  return out + "\n],\"displayTimeUnit\":\"ms\"}";
}

}  // namespace sheaf
