// Placement rules: matching the inputs' placements against those an op accepts, and the ready-made rules.
#include <algorithm>

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
  // Turning shards into addends moves no data but makes each as large as the whole: suggested only for sums with a Partial operand that
  // is as large. A smaller one, such as the mean over a batch that is subtracted from it, has been reduced, and is meant as a whole.
  int64_t addends = 0;
  for (int i = 0; i < p.num_inputs(); ++i)
    if (p.in(i).is_partial()) addends = std::max(addends, p.type(i).shape.numel());
  for (const Place::Rule& r : p.rules) {
    std::string lines;
    int moved = 0;
    for (int i = 0; i < p.num_inputs() && moved >= 0; ++i) {
      const Placement& want = r.inputs[i];
      if (becomes(p, i, want, axis, Coercion::slice_or_keep)) continue;
      if (code_of(want).empty() || (want.is_partial() && p.in(i).is_shard() && p.type(i).shape.numel() > addends)) moved = -1;
      else moved += moves(p, i, want, axis);
      lines += (lines.empty() ? "" : " and ") + redistribution(p, i, want, axis, mesh);
    }
    if (moved < 0 || (!best.empty() && moved >= least)) continue;
    best = lines;
    least = moved;
  }
  return best.empty() ? other : best;
}

std::string placements_of(const Place& p) {
  std::string out;
  for (int i = 0; i < p.num_inputs(); ++i) out += (i ? " " : "") + p.in(i).to_string();
  return out;
}

[[noreturn]] void refuse(const OpDef& op, const void* attrs, const Place& p, const MeshSpec* mesh, const std::string& accepted,
                         const std::string& fix) {
  std::string types;
  for (int i = 0; i < p.num_inputs(); ++i) types += (i ? ", " : "") + p.type(i).to_string();
  std::string attributes;  // such as "lt 0" of a comparison with a number
  if (op.describe) op.describe(attrs, attributes);
  if (!attributes.empty()) types += ", " + attributes;
  fail<PlacementError>("[", op.name, "] ", PathScope::current().empty() ? "" : PathScope::current() + ": ", "on mesh axis ",
                       mesh->name(p.axis()), " rank ", RankContext::current().rank, " has ", placements_of(p), " (", types, "); accepted:", accepted,
                       "; communication is never implied: write ", fix);
}

[[noreturn]] void no_rule(const OpDef& op, const void* attrs, const Place& p, const MeshSpec* mesh) {
  const std::string have = placements_of(p);
  std::string accepted;
  for (const Place::Rule& r : p.rules) {
    const std::string wanted = describe(r.inputs);
    accepted += (accepted.empty() ? " " : ", ") + wanted;
    if (wanted == have)  // shards that print alike but differ
      for (int i = 0; i < p.num_inputs(); ++i)
        if (!(p.in(i) == r.inputs[i])) accepted += str(" (input ", i, ' ', cut_signature(r.inputs[i]), ", not ", cut_signature(p.in(i)), ')');
    accepted += " -> " + describe(r.outputs);
  }
  if (have.find("Invariant") != std::string::npos) accepted += str(accepted.empty() ? " " : ", ", "all Invariant");
  refuse(op, attrs, p, mesh, accepted, fix_for(p, p.axis(), mesh));
}

// Operands on different ranks, or sharded or Partial operands combined with one on a single rank.
[[noreturn]] void not_on_one(const OpDef& op, const void* attrs, const Place& p, const MeshSpec* mesh) {
  const Placement* last = nullptr;
  for (int i = 0; i < p.num_inputs(); ++i)
    if (p.in(i).is_single() && (!last || p.in(i).map().owner() > last->map().owner())) last = &p.in(i);
  std::string fix;
  for (int i = 0; i < p.num_inputs(); ++i)
    if (!(p.in(i) == *last) && !p.in(i).is_replicate())
      fix += str(fix.empty() ? "" : " and ", "redistribute(x, \"", mesh->name(p.axis()), "\", Placement::on(", last->map().owner(),
                 ")) for x = input ", i);
  refuse(op, attrs, p, mesh, " Shard(on k) with the same, or with Replicate", fix);
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

Place::Invariants Place::invariants() const {
  bool any = false, others = false;
  for (size_t i = 0; i < have_.size(); ++i) {
    if (have_[i].is_invariant()) any = true;
    else if (inputs_[i].layout().mesh()) others = true;
  }
  return !any ? Invariants::none : others ? Invariants::mixed : Invariants::all;
}

void Place::add_rules(const OpDef& op, const void* attrs, int outputs) {
  if (op.place) op.place(attrs, *this);
  else rules::replicate_only(*this, outputs);
  for (const Rule& r : rules)
    if (std::ssize(r.inputs) != num_inputs() || std::ssize(r.outputs) != outputs)
      fail<PlacementError>("[", op.name, "] a placement rule for ", r.inputs.size(), " inputs and ", r.outputs.size(), " outputs: there are ",
                           num_inputs(), " and ", outputs);
}

void Place::rule(std::span<const Placement> inputs, std::span<const Placement> outputs) {
  rules.push_back({{inputs.begin(), inputs.end()}, {outputs.begin(), outputs.end()}});
}

namespace {

const MeshSpec* common_mesh(const OpDef& op, std::span<const Tensor> inputs) {
  const Tensor* first = nullptr;
  for (const Tensor& t : inputs) {
    const MeshSpec* const mesh = t.layout().mesh();
    if (!mesh || (first && mesh == first->layout().mesh())) continue;
    if (first)
      fail<PlacementError>("[", op.name, "] inputs on two meshes, ", first->layout().mesh()->to_string(), " and ", mesh->to_string(), ": ",
                           first->type(), " and ", t.type(), "; a model, its batches and what is computed from them share one");
    first = &t;
  }
  return first ? first->layout().mesh() : nullptr;
}

const Place::Rule* first_match(const Place& p) {
  for (const Coercion allowed : {Coercion::none, Coercion::slice, Coercion::slice_or_keep})
    for (const Place::Rule& r : p.rules)
      if (matches(p, r, p.axis(), allowed)) return &r;
  return nullptr;
}

/// The layouts of a call's operands and outputs, axis by axis.
struct CallPlacement {
  const OpDef& op;
  const void* attrs;
  const MeshSpec* mesh;
  std::span<const Tensor> inputs;
  std::span<OutputSpec> outputs;
  std::vector<Layout> want = {};  ///< of the inputs
  bool coerces = false;           ///< some are other than they are

  void on_axis(int axis) {
    Place p(inputs, axis);
    if (const Placement* owner = p.single()) return on_one(p, *owner);
    const Place::Invariants invariants = p.invariants();
    if (invariants == Place::Invariants::all) return as_invariant(axis);
    p.add_rules(op, attrs, static_cast<int>(outputs.size()));
    const Place::Rule* const rule = invariants == Place::Invariants::mixed ? nullptr : first_match(p);
    if (!rule) no_rule(op, attrs, p, mesh);
    for (int i = 0; i < p.num_inputs(); ++i) wants(p, i, rule->inputs[i]);
    for (size_t o = 0; o < outputs.size(); ++o) outputs[o].type.layout[axis] = rule->outputs[o];
  }

 private:
  // If one rank has all operands, it computes alone: a rule of every op.
  void on_one(const Place& p, const Placement& owner) {
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!(p.in(i) == owner) && !p.in(i).is_replicate()) not_on_one(op, attrs, p, mesh);
      wants(p, i, owner);
    }
    for (OutputSpec& o : outputs) o.type.layout[p.axis()] = owner;
  }
  void as_invariant(int axis) {
    for (size_t i = 0; i < inputs.size(); ++i)  // a constant, should another axis slice it
      if (!inputs[i].layout().mesh()) want[i][axis] = Placement::invariant();
    for (OutputSpec& o : outputs) o.type.layout[axis] = Placement::invariant();
  }
  void wants(const Place& p, int i, const Placement& placement) {
    if (p.in(i) == placement) return;
    want[i][p.axis()] = placement;
    coerces = true;
  }
};

}  // namespace

void detail::place(const OpDef& op, const void* attrs, std::span<const Tensor>& inputs, std::vector<Tensor>& coerced,
                   std::span<OutputSpec> outputs) {
  const MeshSpec* const mesh = common_mesh(op, inputs);
  if (!mesh) return;
  for (OutputSpec& o : outputs) o.type.layout = Layout(mesh);
  CallPlacement call{.op = op, .attrs = attrs, .mesh = mesh, .inputs = inputs, .outputs = outputs};
  for (const Tensor& t : inputs) call.want.push_back(t.layout().mesh() ? t.layout() : Layout(mesh));
  for (int axis = 0; axis < mesh->num_axes(); ++axis) call.on_axis(axis);
  if (!call.coerces) return;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Layout &have = inputs[i].layout(), &want = call.want[i];
    const bool stays = want == have || (!have.mesh() && want == Layout(mesh));
    coerced.push_back(stays ? inputs[i] : redistribute(inputs[i], want));
  }
  inputs = coerced;
}

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
  int s = 0;  // the first that is sharded
  while (s < p.num_inputs() && !p.in(s).is_shard()) ++s;
  if (s == p.num_inputs()) return;
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

void beside(Place& p, int dim, bool linear, int outputs) {
  if (const OwnershipMap* map = p.sharded(); map && !map->is_flat() && map->dim() != dim)
    rule_all(p, Placement::shard(*map), Placement::shard(*map), outputs);
  rule_all(p, kR, kR, outputs);
  if (linear) rule_all(p, kP, kP, outputs);
}

}  // namespace rules
}  // namespace sheaf
