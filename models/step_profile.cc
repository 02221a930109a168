#include "sheaf/models/step_profile.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/core/trace_events.h"
#include "sheaf/distributed/gather_texts.h"

namespace sheaf::models {
namespace {

// By name, the own time of the rank's thread, or its GPU's stream: an op without what it waited for. Spans are in the order in which
// they ended, so those inside another precede it.
std::map<std::string, double> own_seconds(const std::vector<Profile::Span>& spans) {
  std::map<std::string, double> own;
  std::vector<const Profile::Span*> inner;
  for (const Profile::Span& span : spans) {
    if (span.row != Profile::kCompute) continue;
    double seconds = span.end - span.begin;
    for (; !inner.empty() && inner.back()->begin >= span.begin; inner.pop_back()) seconds -= inner.back()->end - inner.back()->begin;
    inner.push_back(&span);
    own[span.name] += seconds;
  }
  return own;
}

std::string shares(const std::vector<Profile::Span>& spans, double seconds) {
  constexpr size_t kShown = 6;
  double noted = 0;
  std::vector<std::pair<double, std::string>> parts;
  for (const auto& [name, own] : own_seconds(spans)) parts.emplace_back(own, name), noted += own;
  parts.emplace_back(seconds - noted, "between ops");
  std::ranges::sort(parts, std::greater<>());
  parts.resize(std::min(parts.size(), kShown));
  std::string out;
  for (const auto& [own, name] : parts) {
    char percent[32];
    std::snprintf(percent, sizeof percent, " %.1f%%", 100 * own / seconds);
    out += (out.empty() ? "" : ", ") + name + percent;
  }
  return out;
}

}  // namespace

std::string StepProfile::write(const std::string& path) {
  const double end = profile_.settle();
  const std::vector<Profile::Span> spans = profile_.spans();
  // All begin where the first one did.
  double first = begin_;
  const bool alone = world_.size() == 1;
  if (!alone)
    for (const std::string& began : gather_texts(world_.communicator(), json_number(begin_), "profile"))
      first = std::min(first, Json::parse(began, "profile").as_double());
  TraceEvents events;
  events.name_process(world_.rank(), str("rank ", world_.rank()));
  std::vector<std::string> rows = {std::string(Profile::kCompute)};
  for (const Profile::Span& span : spans) {
    auto row = std::ranges::find(rows, span.row);
    if (row == rows.end()) row = rows.insert(rows.end(), span.row);
    events.add(world_.rank(), static_cast<int>(row - rows.begin()), span.name, span.module, span.begin - first, span.end - span.begin);
    if (span.row == Profile::kCompute) events.add_number(world_.rank(), "bytes alive", span.begin - first, span.live);
  }
  for (size_t r = 0; r < rows.size(); ++r) events.name_row(world_.rank(), static_cast<int>(r), rows[r]);
  // Of many ranks it is large: only rank 0 has all of it, once.
  std::string part = world_.rank() == 0 ? events.lines() : str(TraceEvents::kSeparator, events.lines());
  if (!alone) part = join_texts_on_first(world_.communicator(), part, "profile");
  if (world_.rank() == 0) {
    FileWriter file(path);
    for (const std::string_view text : {TraceEvents::kBegin, std::string_view(part), TraceEvents::kEnd}) file.write(text);
    file.finish();
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.4f s: ", end - begin_);
  return seconds + shares(spans, end - begin_);
}

}  // namespace sheaf::models
