#include "sheaf/tests/placement_runs.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "sheaf/autograd/checks.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/sample_run.h"

namespace sheaf::testing {
namespace {

constexpr size_t kMaxAssignments = 1500;

// `left` is what the earlier axes leave to each rank, with -1 for dimensions where that differs between ranks.
Placement placement_of(const std::string& token, const Shape& left, int ranks, Cuts cuts) {
  const bool uneven = cuts == Cuts::uneven;
  switch (token[0]) {
    case 'R': return Placement::replicate();
    case 'P': return Placement::partial();
    case 'I': return Placement::invariant();
    case 'O': return Placement::on(token == "O0" ? 0 : ranks - 1);
    case 'F': {
      const int64_t offset = uneven ? 2 : 0;
      return Placement::shard(OwnershipMap::flat((left.numel() + offset + ranks - 1) / ranks + (uneven ? 1 : 0), offset));
    }
    default: break;
  }
  if (is_parts(token)) return Placement::shard(parts_of(token));
  const int dim = token[1] - '0';
  if (left[dim] < 0 || cuts == Cuts::even) return Placement::shard(dim);
  if (cuts == Cuts::parts) return Placement::shard(parts_of(dim, left[dim]));
  if (cuts == Cuts::owned) return Placement::shard(owned_of(dim, left[dim], ranks));
  constexpr int64_t kWeights[] = {3, 0, 2, 1, 4};
  int64_t total = 0, seen = 0;
  for (int r = 0; r < ranks; ++r) total += kWeights[r % 5];
  std::vector<int64_t> sizes;
  for (int r = 0; r < ranks; ++r) {
    const int64_t before = left[dim] * seen / total;
    seen += kWeights[r % 5];
    sizes.push_back(left[dim] * seen / total - before);
  }
  return Placement::shard(OwnershipMap::uneven(dim, sizes));
}

Layout layout_of(const MeshSpec* mesh, const PlacementRun& run, const Tokens& tokens, const Shape& shape) {
  if (tokens[0] == "-") return {};
  Layout layout(mesh);
  Shape left = shape;
  for (int a = 0; a < mesh->num_axes(); ++a) {
    const auto at = static_cast<size_t>(a);
    layout[a] = placement_of(tokens[at], left, mesh->size(a), run.cuts[at]);
    if (tokens[at][0] != 'S') continue;
    const int dim = layout[a].map().dim();
    const bool alike = left[dim] >= 0 && (mesh->size(a) == 1 || (layout[a] == Placement::shard(dim) && left[dim] % mesh->size(a) == 0));
    left[dim] = alike ? left[dim] / mesh->size(a) : -1;
  }
  return layout;
}

std::string describe(const PlacementRun& run, const std::vector<Tokens>& assignment) {
  std::string out;
  for (const Tokens& tokens : assignment) {
    out += out.empty() ? "(" : ", ";
    for (size_t a = 0; a < tokens.size(); ++a) out += (a ? " " : "") + tokens[a];
  }
  out += ") at ";
  for (size_t a = 0; a < run.axes.size(); ++a) out += str(a ? " x " : "", run.axes[a].size);
  out += " ranks";
  for (size_t a = 0; a < run.axes.size(); ++a)
    if (run.cuts[a] != Cuts::even)
      out += str(run.cuts[a] == Cuts::uneven ? ", uneven cuts" : ", cuts of parts", run.axes.size() == 1 ? "" : " of " + run.axes[a].name);
  return out;
}

std::set<std::string> op_names(const Tape& tape) {
  std::set<std::string> names;
  for (NodeId i = 0; i < tape.num_nodes(); ++i) names.insert(tape.op_name(tape.node(i)));
  return names;
}

// The results on one rank under one assignment.
struct Seen {
  bool accepted = false;
  std::string refusal, failure;
  std::set<std::string> ops;
  std::vector<LocalPart> outputs, gradients, seconds;
};

// The gradient of a tensor without a mesh is Partial on every axis, like that of a Replicate one.
bool is_dual(const Type& gradient, const Type& value) {
  if (!gradient.layout.mesh() || value.layout.mesh()) return gradient == value.dual() || !gradient.layout.mesh();
  return gradient.layout == Layout(gradient.layout.mesh(), Placement::partial());
}

std::string check_tape_of(const Tape& tape, bool may_communicate) {
  std::string out;
  for (const Finding& f : check_types(tape)) out += str("T: ", f, "; ");
  for (const Finding& f : check_cotangents(tape)) out += str("D: ", f, "; ");
  if (may_communicate) return out;
  for (const PlannedCollective& c : collectives(tape)) out += "it communicates: " + c.call + "; ";
  return out;
}

Seen try_assignment(const OpSample& sample, const std::vector<Values>& values, const std::vector<Layout>& layouts) {
  Seen seen;
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < values.size(); ++i) {
    const In& in = sample.inputs[i];
    inputs.push_back(make_local(values[i], {in.dtype, in.shape, layouts[i]}, str("addends/", static_cast<int64_t>(i))));
  }
  Recording recording;
  OpSample forward = sample;
  try {
    // A refusal is accepted only while f runs: a backward that cannot be placed is an error.
    forward.f = [&](Args x) {
      Outputs y = sample.f(x);
      seen.accepted = true;
      return y;
    };
    const Run run = run_sample(forward, recording, inputs, {}, /*second=*/true);
    for (const Tensor& t : run.outputs) seen.outputs.push_back(local_part(t));
    const auto keep = [&](const std::vector<Tensor>& gradients, std::vector<LocalPart>& parts, const char* which) {
      for (const Tensor& t : gradients) {
        const size_t i = run.differentiated[parts.size()];
        parts.push_back(local_part(t));
        if (!is_dual(t.type(), inputs[i].type()))
          seen.failure += str("the ", which, " of input ", static_cast<int64_t>(i), ", ", inputs[i].type(), ", is ", t.type(), "; ");
      }
    };
    keep(run.gradients, seen.gradients, "gradient");
    keep(run.seconds, seen.seconds, "second gradient");
    seen.ops = op_names(recording.tape());
    bool may_communicate = false;
    if (const Layout* table = sample.redistributes ? &layouts[static_cast<size_t>(sample.tables[0])] : nullptr)
      for (int a = 0; a < table->num_axes(); ++a) may_communicate = may_communicate || (*table)[a].is_shard(0);
    seen.failure += check_tape_of(recording.tape(), may_communicate);
  } catch (const PlacementError& e) {
    (seen.accepted ? seen.failure : seen.refusal) = e.what();
  }
  return seen;
}

std::set<std::string> op_names(const OpSample& sample, const std::vector<Values>& values) {
  Recording recording;
  run_sample(sample, recording, make_inputs(sample, values, kF64), {}, /*second=*/true);
  return op_names(recording.tape());
}

// A refusal must say which op, on which mesh axis, and what would be accepted.
bool says_enough(const std::string& refusal, const std::set<std::string>& ops, const std::vector<MeshSpec::Axis>& axes) {
  const std::string name = refusal.substr(0, refusal.find(']')).substr(std::min<size_t>(1, refusal.size()));
  const bool names_axis = std::any_of(axes.begin(), axes.end(), [&](const MeshSpec::Axis& axis) {
    return refusal.find("mesh axis " + axis.name) != std::string::npos;
  });
  return ops.contains(name) && names_axis && refusal.find("accepted:") != std::string::npos;
}

Tokens inputs_of(const std::string& rule) {
  std::istringstream words(rule);
  Tokens t;
  for (std::string w; words >> w && w != "->";) t.push_back(w);
  return t;
}

}  // namespace

OwnershipMap parts_of(const std::string& token) {
  std::istringstream text(token.substr(token.find('|')));
  std::vector<int64_t> numbers;
  for (char separator; text >> separator;) text >> numbers.emplace_back();
  const int64_t units = numbers.back();
  numbers.pop_back();
  if (numbers.size() == 1) return OwnershipMap::even(token[1] - '0', numbers[0] / units);
  return OwnershipMap::parts(token[1] - '0', numbers, units);
}

std::vector<Tokens> enumerate(const OpSample& sample) {
  std::vector<Tokens> options;
  size_t count = 1;
  for (const In& in : sample.inputs) {
    Tokens t = {"R"};
    if (in.dtype == kF64) t.push_back("P");
    for (int d = 0; d < in.shape.rank(); ++d) t.push_back("S" + std::to_string(d));
    if (in.shape.rank() > 0) t.push_back("F");
    for (const std::string& rule : sample.rules)
      if (const std::string token = inputs_of(rule)[options.size()]; is_parts(token) && !std::ranges::count(t, token))
        t.push_back(token);
    count *= t.size();
    options.push_back(std::move(t));
  }
  std::vector<Tokens> out;
  const auto nth = [&](size_t k) {
    Tokens t;
    for (const Tokens& o : options) t.push_back(o[k % o.size()]), k /= o.size();
    return t;
  };
  if (count <= kMaxAssignments) {
    for (size_t k = 0; k < count; ++k) out.push_back(nth(k));
  } else {
    std::set<size_t> chosen;
    Generator draw("assignments of " + name_of(sample));
    for (size_t k = 0; k < kMaxAssignments; ++k) chosen.insert(static_cast<size_t>(draw.below(static_cast<int64_t>(count))));
    for (size_t k : chosen) out.push_back(nth(k));
  }
  for (const std::string& rule : sample.rules) {  // these are tried whatever was drawn
    const Tokens t = inputs_of(rule);
    if (std::find(out.begin(), out.end(), t) == out.end()) out.push_back(t);
  }
  const size_t n = sample.inputs.size();
  if (n == 0) return out;
  out.push_back(Tokens(n, "I"));
  out.push_back(Tokens(n, "O"));
  if (n > 1) {
    Tokens mixed(n, "R");
    mixed[0] = "I";
    out.push_back(mixed);
    mixed[0] = "O";  // and a value on one rank is compatible with a replicated one, in either order, but not with a value on another rank
    out.push_back(mixed);
    std::swap(mixed[0], mixed.back());
    out.push_back(mixed);
    mixed[0] = "O0";
    out.push_back(mixed);
  }
  return out;
}

PlacementResult run_assignments(const OpSample& sample, const PlacementRun& run) {
  const auto& [axes, cuts, assignments] = run;
  const std::vector<Values> values = draw_inputs(sample, "placements");
  PlacementResult result;
  result.outcomes.resize(assignments.size());
  Result reference;
  std::set<std::string> ops;
  try {
    reference = evaluate(sample, make_inputs(sample, values, kF64), {}, /*second=*/true);
    ops = op_names(sample, values);
  } catch (const std::exception& e) {
    result.finding = str("unsharded: threw ", e.what());
    return result;
  }
  int ranks = 1;
  for (const auto& axis : axes) ranks *= axis.size;
  std::vector<std::vector<Seen>> seen(assignments.size(), std::vector<Seen>(static_cast<size_t>(ranks)));
  std::vector<size_t> reached(static_cast<size_t>(ranks), 0);
  try {
    run_local(ranks, [&](World& world) {
      const MeshSpec* mesh = world.mesh(axes).spec;
      const auto rank = static_cast<size_t>(world.rank());
      for (size_t k = 0; k < assignments.size(); ++k) {
        reached[rank] = k;
        std::vector<Layout> layouts;
        for (size_t i = 0; i < sample.inputs.size(); ++i)
          layouts.push_back(layout_of(mesh, run, assignments[k][i], sample.inputs[i].shape));
        seen[k][rank] = try_assignment(sample, values, layouts);
      }
    }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  } catch (const std::exception& e) {
    result.finding = str(describe(run, assignments[*std::min_element(reached.begin(), reached.end())]),
                         " or soon after: threw ", e.what());
    return result;
  }

  for (const std::vector<Seen>& ranks_seen : seen) ops.insert(ranks_seen[0].ops.begin(), ranks_seen[0].ops.end());
  const double bound = sample.exact ? 0 : 1e-12;
  for (size_t k = 0; k < assignments.size(); ++k) {
    const Seen& first = seen[k][0];
    std::string bad;
    for (const Seen& s : seen[k]) {
      if (s.accepted != first.accepted) bad += "only some ranks accept; ";
      bad += s.failure;
    }
    PlacementResult::Outcome& outcome = result.outcomes[k];
    outcome.accepted = first.accepted && bad.empty();
    outcome.refusal = first.refusal;
    for (const LocalPart& part : first.outputs) outcome.outputs.push_back(part.type);
    if (!first.accepted) {
      if (!says_enough(first.refusal, ops, axes))
        bad += str("the refusal should name op, mesh axis and accepted rules: ", first.refusal, "; ");
    } else if (bad.empty()) {
      Result got;
      const auto whole = [&](auto member, size_t i) {
        std::vector<LocalPart> parts;
        for (const Seen& s : seen[k]) parts.push_back((s.*member)[i]);
        return assemble(parts, bad);
      };
      for (size_t i = 0; i < first.outputs.size(); ++i) got.outputs.push_back(whole(&Seen::outputs, i));
      for (size_t i = 0; i < first.gradients.size(); ++i) got.gradients.push_back(whole(&Seen::gradients, i));
      for (size_t i = 0; i < first.seconds.size(); ++i) got.seconds.push_back(whole(&Seen::seconds, i));
      if (bad.empty()) bad = compare(got, reference, bound);
      if (!bad.empty() && !first.outputs.empty()) bad += str("(output 0 is ", first.outputs[0].type, ") ");
    }
    if (!bad.empty() && result.finding.size() < 3000)
      result.finding += str("\n  ", describe(run, assignments[k]), ": ", bad);
  }
  return result;
}

std::string placement_finding(const OpSample& sample, const char* check, const std::string& text) {
  return text.empty() ? "" : str('[', name_of(sample), "] ", check, ": ", text, '\n');
}

}  // namespace sheaf::testing
