// Every placement rule of an op on one mesh axis against the unsharded run.
#include <algorithm>
#include <sstream>

#include "sheaf/tests/check_op.h"
#include "sheaf/tests/placement_runs.h"

namespace sheaf::testing {
namespace {

std::string token_of(const Placement& p) {
  if (p.is_shard() && p.map().is_parts()) {
    std::string sizes;
    for (const int64_t size : p.map().sizes()) sizes += str(sizes.empty() ? "|" : ",", size);
    return str("S", p.map().dim(), sizes, "/", p.map().granule());
  }
  if (p.is_shard()) return p.map().is_flat() ? "F" : "S" + std::to_string(p.map().dim());
  return p.is_replicate() ? "R" : p.is_partial() ? "P" : "I";
}

PlacementRun on_one_axis(int ranks, Cuts cuts, const std::vector<Tokens>& list) {
  PlacementRun run{{{"data", ranks}}, {cuts}, {}};
  for (const Tokens& tokens : list) {
    auto& assignment = run.assignments.emplace_back();
    for (const std::string& token : tokens) assignment.push_back({token});
  }
  return run;
}

// The rules that the sample demands are accepted, and yield the stated results.
std::string check_demanded(const OpSample& sample, const std::vector<Tokens>& list, const PlacementResult& result) {
  std::string out;
  for (const std::string& rule : sample.rules) {
    std::istringstream words(rule);
    Tokens in, outputs;
    bool arrow = false;
    for (std::string w; words >> w;) {
      if (w == "->") arrow = true;
      else (arrow ? outputs : in).push_back(w);
    }
    const auto at = std::find(list.begin(), list.end(), in);
    if (at == list.end()) continue;
    const auto& outcome = result.outcomes[static_cast<size_t>(at - list.begin())];
    if (!outcome.refusal.empty()) out += str("\n  the rule ", rule, " is missing: ", outcome.refusal);
    for (size_t o = 0; o < outputs.size() && o < outcome.outputs.size(); ++o)
      if (outcome.outputs[o].layout.mesh() && token_of(outcome.outputs[o].layout[0]) != outputs[o])
        out += str("\n  ", rule, ": output ", static_cast<int64_t>(o), " is ", outcome.outputs[o]);
  }
  return out;
}

bool any_of(const Tokens& tokens, std::string_view kinds) {
  return std::any_of(tokens.begin(), tokens.end(), [&](const std::string& t) { return kinds.find(t[0]) != kinds.npos; });
}

}  // namespace

std::string check_placements(const OpSample& sample, int ranks) {
  if (!sample.placements) return "";
  const std::vector<Tokens> list = enumerate(sample);
  const PlacementResult result = run_assignments(sample, on_one_axis(ranks, Cuts::even, list));
  std::string out = result.finding;
  if (ranks > 1 && !result.outcomes.empty()) out += check_demanded(sample, list, result);
  // Which assignments are accepted does not depend on whether shares are even: only accepted ones are run again.
  std::vector<Tokens> cut;
  bool some = false;
  for (size_t k = 0; k < list.size(); ++k) {
    if (!result.outcomes[k].accepted) continue;
    some = some || any_of(list[k], "PSF");
    if (any_of(list[k], "SF")) cut.push_back(list[k]);
  }
  if (out.empty() && !sample.inputs.empty() && some == sample.replicate_only)
    out += some ? "accepts more than the sample says" : "accepts nothing but Replicate; say .replicate_only if that is meant";
  for (const Cuts cuts : {Cuts::uneven, Cuts::parts, Cuts::owned}) {
    if (ranks == 1 || cut.empty()) break;
    const PlacementResult again = run_assignments(sample, on_one_axis(ranks, cuts, cut));
    out += again.finding;
    for (size_t k = 0; k < again.outcomes.size(); ++k) {
      const bool parts_of_table = (cuts == Cuts::parts || cuts == Cuts::owned) && sample.cuts_a_table(cut[k]);
      if (parts_of_table && again.outcomes[k].accepted) out += "\n  parts of a table are accepted";
      if (!parts_of_table && !again.outcomes[k].refusal.empty())
        out += str("\n  refused, though even shares are accepted: ", again.outcomes[k].refusal);
    }
  }
  return placement_finding(sample, "placements", out);
}

}  // namespace sheaf::testing
