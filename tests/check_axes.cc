// Placement rules on meshes of two and three axes: rules are matched per axis, so every rule must hold on one axis combined with every
// other rule on the other, also where both axes cut one dimension. On some meshes all pairs, on the others a random sample.
#include <algorithm>
#include <set>

#include "sheaf/tests/check_op.h"
#include "sheaf/tests/placement_runs.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

constexpr size_t kMaxRules = 16, kDrawn = 24;

bool any_of(const Tokens& tokens, std::string_view kinds) {
  return std::any_of(tokens.begin(), tokens.end(), [&](const std::string& t) { return kinds.find(t[0]) != kinds.npos; });
}

// Whether `a` is `b` with some operands Replicate, which the op then slices, or keeps on one rank, by itself.
bool leads_to(const Tokens& a, const Tokens& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i] && a[i] != "R") return false;
  return a != b;
}

// The rules themselves among the accepted assignments: all Replicate, all Invariant, and those that are not another accepted assignment
// with some operands Replicate.
std::vector<Tokens> rules_of(const OpSample& sample, const std::vector<Tokens>& accepted) {
  std::vector<Tokens> out;
  for (const Tokens& t : accepted) {
    const bool whole = !any_of(t, "PSF") && !(any_of(t, "I") && any_of(t, "R"));
    if (whole || std::none_of(accepted.begin(), accepted.end(), [&](const Tokens& o) { return leads_to(t, o); }))
      out.push_back(t);
  }
  // If there are many, those that the sample demands come first, after all Replicate and all Invariant.
  const auto rank_of = [&](const Tokens& t) {
    std::string text;
    for (const std::string& token : t) text += token + " ";
    const bool demanded = std::any_of(sample.rules.begin(), sample.rules.end(),
                                      [&](const std::string& rule) { return rule.starts_with(text + "->"); });
    return !any_of(t, "PSF") ? 0 : demanded ? 1 : 2;
  };
  std::stable_sort(out.begin(), out.end(), [&](const Tokens& a, const Tokens& b) { return rank_of(a) < rank_of(b); });
  if (out.size() > kMaxRules) out.resize(kMaxRules);
  return out;
}

using Assignment = std::vector<Tokens>;  // a token per input and axis

// Combines one assignment per axis into one with a token per input and axis; false if a flat cut would meet another cut, or parts are no
// longer whole because an earlier axis has cut them.
bool together(const std::vector<const Tokens*>& per_axis, Assignment& out) {
  out.assign(per_axis[0]->size(), {});
  for (size_t i = 0; i < out.size(); ++i) {
    for (const Tokens* t : per_axis) out[i].push_back((*t)[i]);
    if (any_of(out[i], "F") && std::count_if(out[i].begin(), out[i].end(), [](const std::string& t) {
          return t[0] == 'F' || t[0] == 'S'; }) > 1)
      return false;
    for (size_t axis = 1; axis < out[i].size(); ++axis)
      for (size_t before = 0; before < axis && is_parts(out[i][axis]); ++before)
        if (out[i][before].starts_with(out[i][axis].substr(0, 2))) return false;
  }
  return true;
}

// One operand loses its mesh, like a constant; it must be whole on every axis, and another operand must have a mesh.
bool without_mesh(Generator& draw, Assignment& a) {
  if (a.size() < 2) return false;
  const size_t first = static_cast<size_t>(draw.below(static_cast<int64_t>(a.size())));
  for (size_t k = 0; k < a.size(); ++k) {
    Tokens& tokens = a[(first + k) % a.size()];
    if (any_of(tokens, "PSF")) continue;
    tokens.assign(tokens.size(), "-");
    return true;
  }
  return false;
}

// An op cannot slice what a later axis has cut: then an operand is Replicate on one axis and cut on a later one.
bool is_cut_behind(const Assignment& a) {
  for (const Tokens& tokens : a)
    for (size_t axis = 0; axis < tokens.size(); ++axis)
      for (size_t later = axis + 1; later < tokens.size(); ++later)
        if (tokens[axis] == "R" && (tokens[later][0] == 'S' || tokens[later] == "F")) return true;
  return false;
}

struct MeshCase {
  std::vector<int> sizes;
  std::vector<Cuts> cuts;
  bool all_pairs = false;
};

// Ranks would have several runs of a table's rows, which no op accepts.
bool has_parts_of_table(const OpSample& sample, const MeshCase& mesh, const Assignment& a) {
  for (size_t axis = 0; axis < mesh.cuts.size(); ++axis)
    for (const int table : sample.tables)
      if (mesh.cuts[axis] == Cuts::parts && a[static_cast<size_t>(table)][axis] == "S0") return true;
  return false;
}

std::string check_mesh(const OpSample& sample, const MeshCase& mesh, const std::vector<Tokens>& rules,
                       const std::vector<Tokens>& accepted) {
  constexpr const char* kNames[] = {"data", "model", "third"};
  PlacementRun run;
  for (size_t a = 0; a < mesh.sizes.size(); ++a) run.axes.push_back({kNames[a], mesh.sizes[a]});
  run.cuts = mesh.cuts;
  Generator draw(str("axes of ", sample.op, sample.variant, mesh.sizes[0], mesh.sizes[1]));
  const auto any = [&](const std::vector<Tokens>& of) { return &of[static_cast<size_t>(draw.below(static_cast<int64_t>(of.size())))]; };
  Assignment next;
  const auto add = [&](const std::vector<const Tokens*>& per_axis) {
    if (together(per_axis, next)) run.assignments.push_back(next);
  };
  const auto any_each = [&](const std::vector<Tokens>& of) {
    std::vector<const Tokens*> per_axis;
    for (size_t a = 0; a < mesh.sizes.size(); ++a) per_axis.push_back(any(of));
    return per_axis;
  };
  if (mesh.all_pairs) {
    for (const Tokens& a : rules)
      for (const Tokens& b : rules) add({&a, &b});
  } else {
    for (size_t k = 0; k < 2 * kDrawn; ++k) add(any_each(rules));
  }
  const size_t must_be_accepted = run.assignments.size();
  for (size_t k = 0; k < kDrawn; ++k) add(any_each(accepted));
  for (size_t k = 0; k < 2 * kDrawn; ++k)
    if (together(any_each(accepted), next) && without_mesh(draw, next)) run.assignments.push_back(next);
  const PlacementResult result = run_assignments(sample, run);
  std::string out = result.finding;
  for (size_t k = 0; k < run.assignments.size() && out.empty(); ++k) {
    if (result.outcomes[k].accepted || has_parts_of_table(sample, mesh, run.assignments[k])) continue;
    if (k < must_be_accepted || !is_cut_behind(run.assignments[k]))
      out += str("\n  refused, though each axis alone is accepted: ", result.outcomes[k].refusal);
  }
  return out;
}

}  // namespace

std::string check_axes(const OpSample& sample) {
  if (!sample.placements || sample.inputs.empty()) return "";
  PlacementRun one{{{"data", 2}}, {Cuts::even}, {}};
  const std::vector<Tokens> list = enumerate(sample);
  for (const Tokens& tokens : list) {
    auto& assignment = one.assignments.emplace_back();
    for (const std::string& token : tokens) assignment.push_back({token});
  }
  const PlacementResult alone = run_assignments(sample, one);
  std::string out = alone.finding;
  std::vector<Tokens> accepted;
  for (size_t k = 0; k < list.size(); ++k)
    if (alone.outcomes[k].accepted) accepted.push_back(list[k]);
  const std::vector<Tokens> rules = rules_of(sample, accepted);
  using enum Cuts;
  const MeshCase meshes[] = {{{2, 2}, {even, even}, true}, {{2, 3}, {uneven, uneven}, true}, {{2, 3}, {even, uneven}},
                             {{3, 2}, {uneven, even}},     {{1, 3}, {even, uneven}},         {{3, 1}, {even, even}},
                             {{2, 1, 2}, {uneven, even, even}}, {{2, 2, 2}, {even, even, uneven}}, {{2, 2}, {parts, even}, true}};
  for (const MeshCase& mesh : meshes)
    if (out.empty()) out += check_mesh(sample, mesh, rules, accepted);
  return placement_finding(sample, "axes", out);
}

}  // namespace sheaf::testing
