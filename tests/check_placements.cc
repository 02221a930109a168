// Every placement rule against the unsharded run. Inputs are cut and results put together by hand, not by redistribute.
#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>

#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/check_op.h"
#include "sheaf/tests/sample_run.h"

namespace sheaf::testing {
namespace {

using Assignment = std::vector<Layout>;  // per input

constexpr size_t kMaxAssignments = 1500;

// One token of a rule: R, P, I, S<dim>, F. Uneven cuts leave some ranks with much and some with nothing.
Placement placement_of(const std::string& token, const Shape& shape, int ranks, bool uneven) {
  switch (token[0]) {
    case 'R': return Placement::replicate();
    case 'P': return Placement::partial();
    case 'I': return Placement::invariant();
    case 'F': {
      const int64_t offset = uneven ? 2 : 0;
      return Placement::shard(OwnershipMap::flat((shape.numel() + offset + ranks - 1) / ranks + (uneven ? 1 : 0), offset));
    }
    default: break;
  }
  const int dim = token[1] - '0';
  if (!uneven) return Placement::shard(dim);
  constexpr int64_t kWeights[] = {3, 0, 2, 1, 4};
  int64_t total = 0, seen = 0;
  for (int r = 0; r < ranks; ++r) total += kWeights[r % 5];
  std::vector<int64_t> sizes;
  for (int r = 0; r < ranks; ++r) {
    const int64_t before = shape[dim] * seen / total;
    seen += kWeights[r % 5];
    sizes.push_back(shape[dim] * seen / total - before);
  }
  return Placement::shard(OwnershipMap::uneven(dim, sizes));
}

std::string token_of(const Placement& p) {
  if (p.is_shard()) return p.map().is_flat() ? "F" : "S" + std::to_string(p.map().dim());
  return p.is_replicate() ? "R" : p.is_partial() ? "P" : "I";
}

using Tokens = std::vector<std::string>;

std::string joined(const Tokens& tokens) {
  std::string out;
  for (const std::string& t : tokens) out += (out.empty() ? "" : " ") + t;
  return out;
}

// All combinations of R, P, S(d) and flat; all Invariant; and one mixture with Invariant, which must be refused.
std::vector<Tokens> enumerate(const OpSample& sample) {
  std::vector<Tokens> options;
  size_t count = 1;
  for (const In& in : sample.inputs) {
    Tokens t = {"R"};
    if (in.dtype == kF64) t.push_back("P");
    for (int d = 0; d < in.shape.rank(); ++d) t.push_back("S" + std::to_string(d));
    if (in.shape.rank() > 0) t.push_back("F");
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
    std::istringstream words(rule);
    Tokens t;
    for (std::string w; words >> w && w != "->";) t.push_back(w);
    if (std::find(out.begin(), out.end(), t) == out.end()) out.push_back(t);
  }
  const size_t n = sample.inputs.size();
  if (n == 0) return out;
  out.push_back(Tokens(n, "I"));
  if (n > 1) {
    Tokens mixed(n, "R");
    mixed[0] = "I";
    out.push_back(mixed);
  }
  return out;
}

// What one rank saw under one assignment.
struct Seen {
  bool accepted = false;
  std::string refusal, failure;
  std::vector<LocalPart> outputs, gradients;
};


Seen try_assignment(const OpSample& sample, const std::vector<Values>& values, const Assignment& layouts) {
  Seen seen;
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < values.size(); ++i) {
    const In& in = sample.inputs[i];
    inputs.push_back(make_local(values[i], {in.dtype, in.shape, layouts[i]}, str("addends/", static_cast<int64_t>(i))));
  }
  Recording recording;
  OpSample forward = sample;
  try {
    // Refusals count only while f runs: a backward that cannot be placed is an error.
    forward.f = [&](Args x) {
      Outputs y = sample.f(x);
      seen.accepted = true;
      return y;
    };
    const Run run = run_sample(forward, recording, inputs);
    for (const Tensor& t : run.outputs) seen.outputs.push_back(local_part(t));
    for (const Tensor& t : run.gradients) {
      const size_t i = run.differentiated[seen.gradients.size()];
      seen.gradients.push_back(local_part(t));
      if (!(t.type() == inputs[i].type().dual()) && t.layout().mesh())
        seen.failure += str("the gradient of input ", static_cast<int64_t>(i), ", ", inputs[i].type(), ", is ", t.type(), "; ");
    }
  } catch (const PlacementError& e) {
    (seen.accepted ? seen.failure : seen.refusal) = e.what();
  }
  return seen;
}

// Runs assignments on a mesh; assignments[k] has, per input, one token per axis.
std::string run_assignments(const OpSample& sample, std::vector<MeshSpec::Axis> axes,
                            const std::vector<std::vector<Tokens>>& assignments, bool uneven,
                            std::vector<size_t>* accepted) {
  const std::vector<Values> values = draw_inputs(sample, "placements");
  const Result reference = evaluate(sample, make_inputs(sample, values, kF64));
  std::set<std::string> op_names;
  {
    Recording recording;
    run_sample(sample, recording, make_inputs(sample, values, kF64));
    for (NodeId i = 0; i < recording.tape().num_nodes(); ++i)
      op_names.insert(recording.tape().op_name(recording.tape().node(i)));
  }
  int ranks = 1;
  for (const auto& axis : axes) ranks *= axis.size;
  const auto describe = [&](const std::vector<Tokens>& a) {
    std::string out;
    for (const Tokens& t : a) out += (out.empty() ? "(" : ", ") + joined(t);
    return str(out, ") at ", ranks, uneven ? " ranks, uneven cuts" : " ranks");
  };
  std::vector<std::vector<Seen>> seen(assignments.size(), std::vector<Seen>(static_cast<size_t>(ranks)));
  std::vector<size_t> reached(static_cast<size_t>(ranks), 0);
  try {
    run_local(ranks, [&](World& world) {
      const MeshSpec* mesh = world.mesh(axes).spec;
      for (size_t k = 0; k < assignments.size(); ++k) {
        reached[static_cast<size_t>(world.rank())] = k;
        Assignment layouts;
        for (size_t i = 0; i < sample.inputs.size(); ++i) {
          std::vector<Placement> p;
          for (size_t a = 0; a < axes.size(); ++a)
            p.push_back(placement_of(assignments[k][i][a], sample.inputs[i].shape, axes[a].size, uneven));
          layouts.push_back(Layout(mesh, p));
        }
        seen[k][static_cast<size_t>(world.rank())] = try_assignment(sample, values, layouts);
      }
    }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  } catch (const std::exception& e) {
    return str(describe(assignments[*std::min_element(reached.begin(), reached.end())]), " or soon after: threw ", e.what());
  }

  std::string out;
  const double bound = sample.exact ? 0 : 1e-12;
  for (size_t k = 0; k < assignments.size(); ++k) {
    const Seen& first = seen[k][0];
    std::string bad;
    for (const Seen& s : seen[k]) {
      if (s.accepted != first.accepted) bad += "only some ranks accept; ";
      bad += s.failure;
    }
    if (!first.accepted) {
      const std::string& e = first.refusal;
      const std::string name = e.substr(0, e.find(']')).substr(std::min<size_t>(1, e.size()));
      bool names_axis = false;
      for (const auto& axis : axes) names_axis = names_axis || e.find("mesh axis " + axis.name) != std::string::npos;
      if (!op_names.contains(name) || !names_axis || e.find("accepted:") == std::string::npos)
        bad += str("the refusal should name op, mesh axis and accepted rules: ", e, "; ");
    } else if (bad.empty()) {
      if (accepted) accepted->push_back(k);
      Result got;
      const auto whole = [&](auto member, size_t i) {
        std::vector<LocalPart> parts;
        for (const Seen& s : seen[k]) parts.push_back((s.*member)[i]);
        return assemble(parts, bad);
      };
      for (size_t i = 0; i < first.outputs.size(); ++i) got.outputs.push_back(whole(&Seen::outputs, i));
      for (size_t i = 0; i < first.gradients.size(); ++i) got.gradients.push_back(whole(&Seen::gradients, i));
      if (bad.empty()) bad = compare(got, reference, bound);
      if (!bad.empty() && !first.outputs.empty()) bad += str("(output 0 is ", first.outputs[0].type, ") ");
    }
    if (!bad.empty()) out += str("\n  ", describe(assignments[k]), ": ", bad);
    if (out.size() > 3000) return out + "\n  ...";
  }
  // The rules that the sample demands.
  for (const std::string& rule : sample.rules) {
    if (axes.size() != 1 || ranks == 1) break;
    std::istringstream words(rule);
    std::vector<Tokens> in;
    Tokens outputs;
    bool arrow = false;
    for (std::string w; words >> w;) {
      if (w == "->") arrow = true;
      else if (arrow) outputs.push_back(w);
      else in.push_back({w});
    }
    const auto at = std::find(assignments.begin(), assignments.end(), in);
    if (at == assignments.end()) continue;
    const Seen& s = seen[static_cast<size_t>(at - assignments.begin())][0];
    if (!s.accepted) {
      out += str("\n  the rule ", rule, " is missing: ", s.refusal);
      continue;
    }
    for (size_t o = 0; o < outputs.size() && o < s.outputs.size(); ++o)
      if (s.outputs[o].type.layout.mesh() && token_of(s.outputs[o].type.layout[0]) != outputs[o])
        out += str("\n  ", rule, ": output ", static_cast<int64_t>(o), " is ", s.outputs[o].type);
  }
  return out;
}

std::vector<std::vector<Tokens>> on_one_axis(const std::vector<Tokens>& list) {
  std::vector<std::vector<Tokens>> out;
  for (const Tokens& t : list) {
    std::vector<Tokens> per_input;
    for (const std::string& token : t) per_input.push_back({token});
    out.push_back(std::move(per_input));
  }
  return out;
}

std::string finding(const OpSample& sample, const char* check, const std::string& text) {
  return text.empty() ? "" : str('[', name_of(sample), "] ", check, ": ", text, '\n');
}

}  // namespace

std::string check_placements(const OpSample& sample, int ranks) {
  if (!sample.placements) return "";
  const std::vector<Tokens> list = enumerate(sample);
  std::vector<size_t> accepted;
  std::string out = run_assignments(sample, {{"data", ranks}}, on_one_axis(list), false, &accepted);
  const bool some = std::any_of(accepted.begin(), accepted.end(), [&](size_t k) {
    return std::any_of(list[k].begin(), list[k].end(), [](const std::string& t) { return t != "R" && t != "I"; });
  });
  if (out.empty() && !sample.inputs.empty() && some == sample.replicate_only)
    out += some ? "accepts more than the sample says" : "accepts nothing but Replicate; say .replicate_only if that is meant";
  // Which assignments are accepted does not depend on how a dimension is cut: only those are run again.
  std::vector<Tokens> cut;
  for (size_t k : accepted)
    if (std::any_of(list[k].begin(), list[k].end(), [](const std::string& t) { return t[0] == 'S' || t[0] == 'F'; }))
      cut.push_back(list[k]);
  if (ranks > 1 && !cut.empty()) out += run_assignments(sample, {{"data", ranks}}, on_one_axis(cut), true, nullptr);
  return finding(sample, "placements", out);
}

std::string check_two_axes(const OpSample& sample) {
  if (!sample.placements || sample.inputs.empty() || sample.replicate_only) return "";
  const std::vector<Tokens> list = enumerate(sample);
  std::vector<size_t> accepted;
  std::string out = run_assignments(sample, {{"data", 2}}, on_one_axis(list), false, &accepted);
  std::erase_if(accepted, [&](size_t k) {  // a flat cut of what another axis has cut is no cut of the whole
    return std::any_of(list[k].begin(), list[k].end(), [](const std::string& t) { return t == "F"; });
  });
  if (!out.empty() || accepted.empty()) return finding(sample, "placements", out);
  Generator draw("two axes of " + name_of(sample));
  std::vector<std::vector<Tokens>> pairs;
  for (int k = 0; k < 40; ++k) {
    const Tokens& a = list[accepted[static_cast<size_t>(draw.below(static_cast<int64_t>(accepted.size())))]];
    const Tokens& b = list[accepted[static_cast<size_t>(draw.below(static_cast<int64_t>(accepted.size())))]];
    std::vector<Tokens> per_input;
    for (size_t i = 0; i < a.size(); ++i) per_input.push_back({a[i], b[i]});
    pairs.push_back(std::move(per_input));
  }
  return finding(sample, "two axes", run_assignments(sample, {{"data", 2}, {"model", 2}}, pairs, false, nullptr));
}

}  // namespace sheaf::testing
