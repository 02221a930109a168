// Placement rules: matching the inputs' placements against those an op accepts, and the ready-made rules.
#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops/common.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

using ops::kP, ops::kR, ops::rule_all;

std::string describe(std::span<const Placement> placements) {
  std::string out;
  for (const Placement& p : placements) out += (out.empty() ? "" : " ") + p.to_string();
  return out;
}

// Implicit conversions of an operand, which move no data, neither in the forward nor in the backward.
enum class Coercion : uint8_t { none, slice, slice_or_keep };  // R → S; and R → P, kept on one rank

bool becomes(const Place& p, int i, const Placement& want, int axis, Coercion allowed) {
  if (p.in(i) == want) return true;
  if (allowed == Coercion::none || !p.in(i).is_replicate()) return false;
  if (want.is_partial()) return allowed == Coercion::slice_or_keep;
  return want.is_shard() && can_slice(p.type(i).layout, axis, want);
}

bool matches(const Place& p, const Place::Rule& rule, int axis, Coercion allowed) {
  for (int i = 0; i < p.num_inputs(); ++i)
    if (!becomes(p, i, rule.inputs[i], axis, allowed)) return false;
  return true;
}

// As C++ code; empty for a shard that no short expression names.
std::string code_of(const Placement& p) {
  if (p.is_partial()) return "Placement::partial()";
  if (p.is_replicate()) return "Placement::replicate()";
  const OwnershipMap& map = p.map();
  if (!p.is_shard() || map.kind() != OwnershipMap::Kind::dim) return "";
  if (map.granule() == 1 && !map.is_inner()) return str("Placement::shard(", map.dim(), ")");
  const std::string rows = map.granule() == 1 ? "" : str(", ", map.granule());
  return str("Placement::shard(OwnershipMap::even(", map.dim(), rows, map.is_inner() ? ").inner())" : "))");
}

// Whether redistributing an operand to `to` communicates.
bool moves(const Place& p, int i, const Placement& to, int axis) {
  const Placement& have = p.in(i);
  if (have.is_partial() || (have.is_shard() && !to.is_partial())) return true;
  return !can_slice(p.type(i).layout, axis, have.is_shard() ? have : to);
}

// The code to write for an operand, with its cost.
std::string redistribution(const Place& p, int i, const Placement& to, int axis, const MeshSpec* mesh) {
  return str("redistribute(x, \"", mesh->name(axis), "\", ", code_of(to), ") for x = input ", i,
             moves(p, i, to, axis) ? "" : " (moves no byte)");
}

// Suggests a change after which `p` is accepted: among those that lead to a rule, the one that communicates least.
std::string fix_for(const Place& p, int axis, const MeshSpec* mesh) {
  std::string best, other;
  int least = 0;
  for (int i = 0; i < p.num_inputs(); ++i) {
    // Invariant is not allowed in rank-varying compute; with other operands it has to be converted first.
    if (p.in(i).is_invariant())
      best += (best.empty() ? "" : " and ") + redistribution(p, i, kR, axis, mesh);
    else if (!p.in(i).is_replicate())
      other += (other.empty() ? "" : " and ") + redistribution(p, i, kR, axis, mesh);
  }
  if (!best.empty()) return best;
  // Turning shards into addends moves no data but makes each as large as the whole: suggested only for sums with a Partial operand.
  bool sums = false;
  for (int i = 0; i < p.num_inputs(); ++i) sums = sums || p.in(i).is_partial();
  for (const Place::Rule& r : p.rules) {
    std::string lines;
    int moved = 0;
    for (int i = 0; i < p.num_inputs() && moved >= 0; ++i) {
      const Placement& want = r.inputs[i];
      if (becomes(p, i, want, axis, Coercion::slice_or_keep)) continue;
      if (code_of(want).empty() || (want.is_partial() && p.in(i).is_shard() && !sums)) moved = -1;
      else moved += moves(p, i, want, axis);
      lines += (lines.empty() ? "" : " and ") + redistribution(p, i, want, axis, mesh);
    }
    if (moved < 0 || (!best.empty() && moved >= least)) continue;
    best = lines;
    least = moved;
  }
  return best.empty() ? other : best;
}

[[noreturn]] void no_rule(const OpDef& op, const Place& p, const MeshSpec* mesh, int axis,
                          std::span<const Tensor> inputs) {
  std::string have, types, accepted;
  for (int i = 0; i < p.num_inputs(); ++i) {
    have += (i ? " " : "") + p.in(i).to_string();
    types += (i ? ", " : "") + inputs[i].type().to_string();
  }
  for (const Place::Rule& r : p.rules) {
    const std::string inputs_of_rule = describe(r.inputs);
    accepted += (accepted.empty() ? " " : ", ") + inputs_of_rule;
    if (inputs_of_rule == have)  // shards that print alike but differ
      for (int i = 0; i < p.num_inputs(); ++i)
        if (!(p.in(i) == r.inputs[i])) accepted += str(" (input ", i, ' ', cut_signature(r.inputs[i]), ", not ", cut_signature(p.in(i)), ')');
    accepted += " -> " + describe(r.outputs);
  }
  if (have.find("Invariant") != std::string::npos) accepted += (accepted.empty() ? " " : ", ") + str("all Invariant");
  fail<PlacementError>("[", op.name, "] ", PathScope::current().empty() ? "" : PathScope::current() + ": ",
                       "on mesh axis ", mesh->name(axis), " rank ", RankContext::current().rank, " has ", have, " (",
                       types, "); accepted:", accepted, "; communication is never implied: write ",
                       fix_for(p, axis, mesh));
}

// Error: operands on different ranks, or sharded or Partial operands combined with one on a single rank.
[[noreturn]] void not_on_one(const OpDef& op, const Place& p, const MeshSpec* mesh, int axis, std::span<const Tensor> inputs) {
  std::string have, types;
  const Placement* last = nullptr;
  for (int i = 0; i < p.num_inputs(); ++i) {
    have += (i ? " " : "") + p.in(i).to_string();
    types += (i ? ", " : "") + inputs[i].type().to_string();
    if (p.in(i).is_single() && (!last || p.in(i).map().owner() > last->map().owner())) last = &p.in(i);
  }
  std::string fix;
  for (int i = 0; i < p.num_inputs(); ++i)
    if (!(p.in(i) == *last) && !p.in(i).is_replicate())
      fix += str(fix.empty() ? "" : " and ", "redistribute(x, \"", mesh->name(axis), "\", Placement::on(", last->map().owner(),
                 ")) for x = input ", i);
  fail<PlacementError>("[", op.name, "] ", PathScope::current().empty() ? "" : PathScope::current() + ": ", "on mesh axis ",
                       mesh->name(axis), " rank ", RankContext::current().rank, " has ", have, " (", types,
                       "); accepted: Shard(on k) with the same, or with Replicate; communication is never implied: write ", fix);
}

void rules_of(const OpDef& op, const void* attrs, Place& p, size_t outputs) {
  if (op.place) op.place(attrs, p);
  else rules::replicate_only(p, static_cast<int>(outputs));
}

}  // namespace

Place::Place(std::span<const Tensor> inputs, int axis) : inputs_(inputs), axis_(axis) {
  for (const Tensor& t : inputs) have_.push_back(t.layout().mesh() ? t.layout()[axis] : kR);
}

const Placement* Place::single() const {
  for (const Placement& p : have_)
    if (p.is_single()) return &p;
  return nullptr;
}

const OwnershipMap* Place::sharded() const {
  for (const Placement& p : have_)
    if (p.is_shard()) return &p.map();
  return nullptr;
}

void Place::rule(std::span<const Placement> inputs, std::span<const Placement> outputs) {
  rules.push_back({{inputs.begin(), inputs.end()}, {outputs.begin(), outputs.end()}});
}

namespace detail {

void place(const OpDef& op, const void* attrs, std::span<const Tensor>& inputs, std::vector<Tensor>& coerced,
           std::span<OutputSpec> outputs) {
  const MeshSpec* mesh = nullptr;
  for (const Tensor& t : inputs) {
    if (!t.layout().mesh() || t.layout().mesh() == mesh) continue;
    if (mesh) fail<PlacementError>("[", op.name, "] inputs on two meshes: ", mesh->to_string(), " and ",
                                   t.layout().mesh()->to_string());
    mesh = t.layout().mesh();
  }
  if (!mesh) return;
  for (OutputSpec& o : outputs) o.type.layout = Layout(mesh);
  std::vector<Layout> want;
  for (const Tensor& t : inputs) want.push_back(t.layout().mesh() ? t.layout() : Layout(mesh));
  bool coerces = false;
  for (int axis = 0; axis < mesh->num_axes(); ++axis) {
    Place p(inputs, axis);
    if (const Placement* owner = p.single()) {  // if one rank has all operands, it computes alone: a rule of every op
      for (int i = 0; i < p.num_inputs(); ++i) {
        if (p.in(i) == *owner) continue;
        if (!p.in(i).is_replicate()) not_on_one(op, p, mesh, axis, inputs);
        want[i][axis] = *owner;
        coerces = true;
      }
      for (OutputSpec& o : outputs) o.type.layout[axis] = *owner;
      continue;
    }
    bool any_invariant = false, all_invariant = true;
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (p.in(i).is_invariant()) any_invariant = true;
      else if (inputs[i].layout().mesh()) all_invariant = false;
    }
    if (any_invariant) {
      if (!all_invariant) {
        rules_of(op, attrs, p, outputs.size());
        no_rule(op, p, mesh, axis, inputs);
      }
      for (size_t i = 0; i < inputs.size(); ++i)  // a constant, should another axis slice it
        if (!inputs[i].layout().mesh()) want[i][axis] = Placement::invariant();
      for (OutputSpec& o : outputs) o.type.layout[axis] = Placement::invariant();
      continue;
    }
    rules_of(op, attrs, p, outputs.size());
    const Place::Rule* taken = nullptr;
    for (const Coercion allowed : {Coercion::none, Coercion::slice, Coercion::slice_or_keep}) {
      for (const Place::Rule& r : p.rules)
        if (!taken && matches(p, r, axis, allowed)) taken = &r;
      if (taken) break;
    }
    if (!taken) no_rule(op, p, mesh, axis, inputs);
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (p.in(i) == taken->inputs[i]) continue;
      want[i][axis] = taken->inputs[i];
      coerces = true;
    }
    for (size_t o = 0; o < outputs.size(); ++o) outputs[o].type.layout[axis] = taken->outputs[o];
  }
  if (!coerces) return;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Layout& have = inputs[i].layout();
    coerced.push_back(want[i] == have || (!have.mesh() && want[i] == Layout(mesh)) ? inputs[i]
                                                                               : redistribute(inputs[i], want[i]));
  }
  inputs = coerced;
}

}  // namespace detail

namespace rules {
namespace {

// The rule that follows the first sharded operand along the output dimension in which it is sharded.
void follow_shard(Place& p) {
  int rank = 0;
  Shape out;
  for (int i = 0; i < p.num_inputs(); ++i) {
    rank = std::max(rank, p.shape(i).rank());
    out = i == 0 ? p.shape(0) : broadcast_shapes("place", out, p.shape(i));
  }
  for (int s = 0; s < p.num_inputs(); ++s) {
    if (!p.in(s).is_shard()) continue;
    const OwnershipMap& map = p.in(s).map();
    std::vector<Placement> in;
    if (map.is_flat()) {  // a flat shard cannot be broadcast, except single elements
      for (int i = 0; i < p.num_inputs(); ++i) {
        if (!(p.shape(i) == out) && p.shape(i).numel() != 1) return;
        in.push_back(p.shape(i) == out ? p.in(s) : kR);
      }
      p.rule(in, std::span(&p.in(s), 1));
      return;
    }
    const int d = map.dim() + rank - p.shape(s).rank();
    for (int i = 0; i < p.num_inputs(); ++i) {
      const int at = d - (rank - p.shape(i).rank());
      const bool broadcast = at < 0 || (p.shape(i)[at] == 1 && out[d] != 1);
      in.push_back(broadcast ? kR : Placement::shard(map.moved_to(at)));
    }
    const Placement result = Placement::shard(map.moved_to(d));
    p.rule(in, std::span(&result, 1));
    return;
  }
}

}  // namespace

void pointwise_nonlinear(Place& p) {
  follow_shard(p);
  rule_all(p, kR, kR);
}

void pointwise_linear(Place& p) {
  pointwise_nonlinear(p);
  rule_all(p, kP, kP);
}

void pointwise_multilinear(Place& p) {
  pointwise_nonlinear(p);
  for (int i = 0; i < p.num_inputs(); ++i) {
    std::vector<Placement> in(p.num_inputs(), kR);
    in[i] = kP;
    p.rule(in, std::span(&kP, 1));
  }
}

void replicate_only(Place& p, int outputs) { rule_all(p, kR, kR, outputs); }

void rows(Place& p, int outputs) {
  if (const OwnershipMap* map = p.sharded(); map && map->dim() == 0) rule_all(p, Placement::shard(*map), Placement::shard(*map), outputs);
  rule_all(p, kR, kR, outputs);
}

}  // namespace rules
}  // namespace sheaf
