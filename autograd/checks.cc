#include "sheaf/autograd/checks.h"

#include <algorithm>
#include <map>
#include <optional>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/tape_dump.h"

namespace sheaf {
namespace {

template <class... Parts>
void report(std::vector<Finding>& out, NodeId node, const Parts&... parts) {
  out.push_back({node, str(parts...)});
}

// A tensor with a type and no memory; unlike Tensor::empty it does not need a rank of the mesh.
Tensor typed(const Type& type, const std::shared_ptr<Storage>& none) {
  return Tensor::over(none, 0, type, type.shape, type.shape.contiguous_strides());
}

// Whether a value of layout `a` may be placed inside one of type `base`: in the same layout or, on an axis, as a rank's block of a
// sharded parameter in its row of the buffer of all ranks' blocks.
bool lies_in(const Layout& a, const Type& base) {
  const Layout& b = base.layout;
  if (a.mesh() != b.mesh()) return false;
  for (int axis = 0; axis < a.num_axes(); ++axis) {
    const bool row = base.shape.rank() >= 2 && base.shape[0] == b.mesh()->size(axis) && b[axis] == Placement::shard(0);
    if (!(a[axis] == b[axis]) && !(row && a[axis].is_shard())) return false;
  }
  return true;
}

// A node's placements on one axis must match one of its op's rules; free slices are separate nodes.
void check_rule(const Tape& tape, NodeId id, std::span<const Tensor> inputs, const MeshSpec* mesh, int axis,
                std::vector<Finding>& out) {
  const Node& n = tape.node(id);
  const auto output = [&](int o) -> Placement {
    const Layout& l = tape.type(tape.output(n, o)).layout;
    return l.mesh() ? l[axis] : Placement::replicate();
  };
  Place p(inputs, axis);
  const auto describe = [&] {
    std::string text;
    for (int i = 0; i < p.num_inputs(); ++i) text += p.in(i).to_string() + " ";
    text += "->";
    for (int o = 0; o < n.num_outputs; ++o) text += " " + output(o).to_string();
    return text;
  };
  if (const Placement* owner = p.single()) {
    bool together = true;
    for (int i = 0; i < p.num_inputs(); ++i) together = together && p.in(i) == *owner;
    for (int o = 0; o < n.num_outputs; ++o) together = together && output(o) == *owner;
    if (!together) report(out, id, "on mesh axis ", mesh->name(axis), ": what is on one rank goes with nothing else, not ", describe());
    return;
  }
  if (const Place::Invariants are = p.invariants(); are != Place::Invariants::none) {
    bool invariant = are == Place::Invariants::all;
    for (int o = 0; o < n.num_outputs; ++o) invariant = invariant && output(o).is_invariant();
    if (!invariant) report(out, id, "on mesh axis ", mesh->name(axis), ": Invariant goes with Invariant only, not ", describe());
    return;
  }
  p.add_rules(*n.op, tape.attrs(n), n.num_outputs);
  for (const Place::Rule& r : p.rules) {
    bool same = true;
    for (int i = 0; same && i < p.num_inputs(); ++i) same = p.in(i) == r.inputs[static_cast<size_t>(i)];
    for (int o = 0; same && o < n.num_outputs; ++o) same = output(o) == r.outputs[static_cast<size_t>(o)];
    if (same) return;
  }
  report(out, id, "[", n.op->name, "] has no placement rule ", describe(), " on mesh axis ", mesh->name(axis));
}

void check_inferred(const Tape& tape, NodeId id, const std::shared_ptr<Storage>& none, std::vector<Finding>& out) {
  const Node& n = tape.node(id);
  std::vector<Tensor> inputs;
  for (ValueId v : tape.inputs(n)) inputs.push_back(typed(tape.type(v), none));
  Infer infer(inputs);
  n.op->infer(tape.attrs(n), infer);
  if (static_cast<int>(infer.outputs.size()) != n.num_outputs)
    return report(out, id, "[", n.op->name, "] has ", n.num_outputs, " outputs, infers ", infer.outputs.size());
  for (int o = 0; o < n.num_outputs; ++o) {
    const Type& have = tape.type(tape.output(n, o));
    const Type& want = infer.outputs[static_cast<size_t>(o)].type;
    const bool wide = o < 64 && (n.op->stores_wide >> o & 1) && is_wide_of(have.dtype, want.dtype);
    if ((have.dtype != want.dtype && !wide) || !(have.shape == want.shape))
      report(out, id, "[", n.op->name, "] output ", o, " is ", have, ", its inputs give ", want.dtype, want.shape);
  }
  const MeshSpec* mesh = nullptr;
  for (const Tensor& t : inputs) {
    if (!t.layout().mesh() || t.layout().mesh() == mesh) continue;
    if (mesh) return report(out, id, "[", n.op->name, "] inputs on two meshes");
    mesh = t.layout().mesh();
  }
  for (int o = 0; o < n.num_outputs; ++o)
    if (tape.type(tape.output(n, o)).layout.mesh() != mesh)
      return report(out, id, "[", n.op->name, "] output ", o, " and the inputs are on different meshes");
  for (int axis = 0; mesh && axis < mesh->num_axes(); ++axis) check_rule(tape, id, inputs, mesh, axis, out);
}

int64_t global_bytes(const Type& t) { return t.shape.numel() * static_cast<int64_t>(size_of(t.dtype)); }

}  // namespace

std::vector<Finding> check_types(const Tape& tape) {
  std::vector<Finding> out;
  const std::shared_ptr<Storage> none = Storage::allocate(Device::meta(), 0);
  std::vector<bool> made(static_cast<size_t>(tape.num_values()), false);
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    bool ready = true;
    for (ValueId v : tape.inputs(n)) {
      if (made[static_cast<size_t>(v)]) continue;
      report(out, id, "uses %", v, ", which no earlier node makes");
      ready = false;
    }
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape.output(n, o);
      if (made[static_cast<size_t>(v)]) report(out, id, "makes %", v, ", which an earlier node makes");
      made[static_cast<size_t>(v)] = true;
      const Value& value = tape.value(v);
      if (value.base < 0) continue;
      if (!made[static_cast<size_t>(value.base)])
        report(out, id, "%", v, " lies in %", value.base, ", which no earlier node makes");
      const Type& inner = tape.type(v);
      const Type& outer = tape.type(value.base);
      if (inner.layout.mesh() == outer.layout.mesh() && value.byte_offset + global_bytes(inner) > global_bytes(outer) &&
          !inner.layout.has_shard() && !outer.layout.has_shard())
        report(out, id, "%", v, " ", inner, " at byte ", value.byte_offset, " does not fit into %", value.base, " ", outer);
    }
    if (!n.op || !ready) continue;
    if (is_redistribute(n.op)) {
      const Type& from = tape.type(tape.inputs(n)[0]);
      const Type& to = tape.type(tape.output(n));
      if (from.dtype != to.dtype || !(from.shape == to.shape) ||
          (from.layout.mesh() && from.layout.mesh() != to.layout.mesh()))
        report(out, id, "a redistribution of ", from, " yields ", to);
      int changed = 0;
      for (int a = 0; a < to.layout.num_axes(); ++a)
        changed += !((from.layout.mesh() ? from.layout[a] : Placement::replicate()) == to.layout[a]);
      if (changed > 1) report(out, id, "a redistribution changes ", changed, " mesh axes at once");
    } else if (n.op->infer) {
      try {
        check_inferred(tape, id, none, out);
      } catch (const Error& e) {
        report(out, id, e.what());
      }
    }
  }
  return out;
}

std::vector<Finding> check_cotangents(const Tape& tape) {
  std::vector<Finding> out;
  for (const auto& [gradient, primal] : tape.cotangents()) {
    const Type& g = tape.type(gradient);
    const Type& p = tape.type(primal);
    const bool both = p.layout.mesh() && g.layout.mesh();  // a constant without a mesh fits every layout
    // The gradient of a bf16 or f16 leaf may be f32: then its slot is, too. A gradient on a single rank is added to the slot as it
    // is.
    const bool wide = is_wide_of(g.dtype, p.dtype);
    if ((g.dtype != p.dtype && !wide) || !(g.shape == p.shape) || (both && !adds_up_to(g.layout, p.layout.dual())))
      report(out, tape.value(gradient).producer, "%", gradient, " ", g, " is a gradient of %", primal, " ", p,
             " but not of its dual type ", p.dual());
  }
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (n.phase != Phase::backward || !n.op || n.op->kind != OpKind::op) continue;
    for (int o = 0; o < n.num_outputs; ++o) {
      const Value& value = tape.value(tape.output(n, o));
      const Type& inner = tape.type(tape.output(n, o));
      if (value.base >= 0 && !lies_in(inner.layout, tape.type(value.base)))
        report(out, id, "%", tape.output(n, o), " ", inner, " is put into %", value.base, " ", tape.type(value.base));
    }
  }
  return out;
}

std::vector<Finding> check_gathers(const Tape& tape) {
  std::vector<Finding> out;
  struct Buffer {
    NodeId gathered = -1;   // by this node, if it is a unit's leaf
    NodeId discarded = -1;  // the first node that discards it
    bool used = false;
    std::vector<ValueId> gathered_into = {};  // outputs of the unit gathers that read it
  };
  std::vector<Buffer> buffers(static_cast<size_t>(tape.num_values()));
  std::vector<ValueId> root(static_cast<size_t>(tape.num_values()));
  for (ValueId v = 0; v < tape.num_values(); ++v) root[static_cast<size_t>(v)] = v;
  const auto named = [&](ValueId v) {
    const ValueId r = root[static_cast<size_t>(v)];
    return r == v ? str("%", v) : str("%", v, " (in %", r, ")");
  };
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    const bool discards = tape.kind(n) == OpKind::discard;
    for (ValueId v : tape.inputs(n)) {
      Buffer& b = buffers[static_cast<size_t>(root[static_cast<size_t>(v)])];
      if (b.discarded >= 0)
        report(out, id, discards ? "discards " : "uses ", named(v), " of '", tape.path(n), "', which node ", b.discarded,
               " discarded");
      else if (discards) b.discarded = id;
      else b.used = true;
      for (const ValueId to : discards ? b.gathered_into : std::vector<ValueId>())
        if (const Buffer& g = buffers[static_cast<size_t>(to)]; !g.used && g.discarded < 0)
          report(out, id, "discards ", named(v), " of '", tape.path(n), "', from which node ", g.gathered, " is still gathering");
    }
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape.output(n, o);
      const ValueId lies_in = tape.value(v).lies_in();
      if (lies_in < 0) continue;
      root[static_cast<size_t>(v)] = root[static_cast<size_t>(lies_in)];
      if (const Buffer& b = buffers[static_cast<size_t>(root[static_cast<size_t>(v)])]; b.discarded >= 0)
        report(out, id, "writes into ", named(v), ", which node ", b.discarded, " discarded");
    }
    // Blocks that were gathered, in memory that is discarded, too.
    const bool unpacks = tape.kind(n) == OpKind::redistribute && tape.op_name(n) == "unpack";
    if (unpacks || is_unit_gather(tape, n))
      for (int i = 0; i < n.num_inputs; ++i) {
        const ValueId from = root[static_cast<size_t>(tape.inputs(n)[static_cast<size_t>(i)])];
        const ValueId to = root[static_cast<size_t>(tape.output(n, i))];  // buffers loaded by one rank alone
        if (from != to && !unpacks) buffers[static_cast<size_t>(from)].gathered_into.push_back(to);
        buffers[static_cast<size_t>(to)].gathered = id;
        buffers[static_cast<size_t>(to)].used = false;
      }
  }
  // A node that gathers several buffers counts as used if one of them is.
  std::vector<std::pair<NodeId, bool>> gathers;
  for (size_t v = 0; v < buffers.size(); ++v) {
    const Buffer& b = buffers[v];
    if (b.gathered < 0) continue;
    if (gathers.empty() || gathers.back().first != b.gathered) gathers.emplace_back(b.gathered, false);
    gathers.back().second = gathers.back().second || b.used;
    if (b.discarded < 0)
      report(out, b.gathered, "%", static_cast<int64_t>(v), " of '", tape.path(tape.node(b.gathered)),
             "' is gathered and never discarded");
  }
  // The forward gathers a unit because its module is entered; the backward because something will be read.
  for (const auto& [id, used] : gathers)
    if (!used && tape.node(id).phase == Phase::backward && !(tape.node(id).flags & Node::kPrefetched))
      report(out, id, "'", tape.path(tape.node(id)), "' is gathered and never used");
  return out;
}

namespace {

bool makes_slots(const Tape& tape, NodeId id) {
  const OpDef* const op = id >= 0 ? tape.node(id).op : nullptr;
  return op && std::string_view(op->name) == "grad_slots";
}

// Gradients that nodes put into slots: the first is stored, the others are added, and whoever reads the buffer around them does so
// after that.
class SlotWrites {
 public:
  explicit SlotWrites(const Tape& tape) : tape_(tape), stored_(static_cast<size_t>(tape.num_values()), -1), is_read_(stored_.size()) {}

  void note(NodeId id, std::vector<Finding>& out) {
    const Node& n = tape_.node(id);
    if (makes_slots(tape_, id)) return;
    for (const ValueId v : tape_.inputs(n))
      if (const NodeId maker = tape_.value(v).producer; makes_slots(tape_, maker) && tape_.value(v).base < 0) expect_filled(id, v, maker, out);
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId base = tape_.value(tape_.output(n, o)).base, slot = slot_around(base);
      if (slot < 0) continue;
      NodeId& before = stored_[static_cast<size_t>(slot)];
      // It reads what is there, to add to it or to scale it.
      const bool adds = (n.flags & Node::kAdds) != 0 || std::ranges::any_of(tape_.inputs(n), [&](ValueId v) { return slot_around(v) == slot; });
      if (adds && before < 0) report(out, id, "adds to slot %", slot, ", into which no node has stored a gradient");
      if (!adds && before >= 0 && !is_read_[static_cast<size_t>(slot)] && base == slot)
        report(out, id, "stores over the gradient that node ", before, " has stored into slot %", slot);
      before = id;
      is_read_[static_cast<size_t>(slot)] = false;
    }
    for (const ValueId v : tape_.inputs(n))
      if (const ValueId slot = slot_around(v); slot >= 0 && stored_[static_cast<size_t>(slot)] != id) is_read_[static_cast<size_t>(slot)] = true;
  }

 private:
  // The slot that v is or lies in; -1: none.
  ValueId slot_around(ValueId v) const {
    while (v >= 0 && !(makes_slots(tape_, tape_.value(v).producer) && tape_.value(v).base >= 0)) v = tape_.value(v).lies_in();
    return v;
  }
  void expect_filled(NodeId id, ValueId buffer, NodeId maker, std::vector<Finding>& out) const {
    const Node& slots = tape_.node(maker);
    for (int o = 0; o < slots.num_outputs; ++o)
      if (const ValueId slot = tape_.output(slots, o); tape_.value(slot).base == buffer && stored_[static_cast<size_t>(slot)] < 0)
        report(out, id, "reads %", buffer, ", of which no node has filled slot %", slot);
  }

  const Tape& tape_;
  std::vector<NodeId> stored_;  // by slot: the last node that put a gradient into it,
  std::vector<bool> is_read_;   // and whether that was read since, as early gradients are that make room
};

}  // namespace

std::vector<Finding> check_memory(const Tape& tape) {
  std::vector<Finding> out;
  SlotWrites writes(tape);
  std::vector<NodeId> made(static_cast<size_t>(tape.num_values()), -1);   // by this node
  std::vector<NodeId> sent(static_cast<size_t>(tape.num_values()), -1);   // the first reduce_scatter that reads it
  std::vector<bool> lent(static_cast<size_t>(tape.num_values()), false);  // and not released yet
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (!n.op) continue;
    writes.note(id, out);
    if (tape.op_name(n) == "complete")
      for (const ValueId v : tape.inputs(n)) lent[static_cast<size_t>(tape.whole_of(v))] = false;
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape.output(n, o), memory = tape.whole_of(v);
      made[static_cast<size_t>(v)] = id;
      const NodeId by = sent[static_cast<size_t>(memory)], maker = made[static_cast<size_t>(memory)];
      if (tape.value(v).base >= 0 && by >= 0 && maker != id && makes_slots(tape, maker))
        report(out, id, "stores into %", memory, ", which node ", by, " (reduce_scatter) has sent already");
    }
    if (n.op->kind != OpKind::redistribute || is_redistribute(n.op) || tape.op_name(n) != "reduce_scatter") continue;
    for (const ValueId v : tape.inputs(n)) {
      const ValueId memory = tape.whole_of(v);
      if (sent[static_cast<size_t>(memory)] < 0) sent[static_cast<size_t>(memory)] = id;
      if (made[static_cast<size_t>(memory)] >= 0) lent[static_cast<size_t>(memory)] = true;  // not a leaf
    }
  }
  for (ValueId v = 0; v < tape.num_values(); ++v)
    if (lent[static_cast<size_t>(v)])
      report(out, sent[static_cast<size_t>(v)], "%", v, " goes with reduce_scatter and does not come back: no complete after it");
  return out;
}

std::vector<Finding> check_tape(const Tape& tape) {
  std::vector<Finding> out;
  for (auto* check : {check_types, check_cotangents, check_gathers, check_memory})
    for (Finding& f : check(tape)) out.push_back(std::move(f));
  return out;
}

std::vector<PlannedCollective> collectives(const Tape& tape) {
  std::vector<PlannedCollective> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    for (const Transfer& m : transfers(tape, n)) {
      const Type& from = tape.type(m.from);
      const Type& to = tape.type(m.to);
      const MeshSpec* mesh = to.layout.mesh();
      const Lane lane = n.op->lane == Lane::reduce ? Lane::reduce : Lane::gather;
      std::string communicator = str(mesh->to_string(), ' ', mesh->name(m.axis), ' ', lane);
      if (m.name == "send")
        communicator = str(mesh->to_string(), ' ', mesh->name(m.axis), ' ', from.layout[m.axis].map().owner(), " to ",
                           to.layout[m.axis].map().owner(), sends_back(tape, n) ? " back" : "");
      out.push_back({id, std::move(communicator),
                     str(m.name, ' ', from.dtype, from.shape, ' ', from.layout[m.axis], "→", to.layout[m.axis], ' ',
                         cut_signature(from.layout[m.axis]), cut_signature(to.layout[m.axis]), ' ', tape.path(n))});
    }
  }
  return out;
}

namespace {
uint64_t fnv(uint64_t hash, std::string_view text) {
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return (hash ^ 0xff) * 1099511628211ull;
}
}  // namespace

uint64_t collective_hash(const Tape& tape, std::string_view communicator) {
  std::map<std::string, uint64_t> hashes;  // lanes are not ordered relative to each other
  for (const PlannedCollective& c : collectives(tape)) {
    if (!communicator.empty() && c.communicator != communicator) continue;
    uint64_t& h = hashes.try_emplace(c.communicator, 14695981039346656037ull).first->second;
    h = fnv(h, c.call);
  }
  uint64_t all = 14695981039346656037ull;
  for (const auto& [name, h] : hashes) all = fnv(fnv(all, name), std::to_string(h));
  return all;
}

std::vector<Finding> check_collectives(std::span<const Tape* const> ranks) {
  std::vector<Finding> out;
  std::vector<std::map<std::string, std::vector<PlannedCollective>>> by_lane;
  std::map<std::string, bool> names;
  for (const Tape* tape : ranks) {
    auto& lanes = by_lane.emplace_back();
    for (PlannedCollective& c : collectives(*tape)) {
      names[c.communicator] = true;
      lanes[c.communicator].push_back(std::move(c));
    }
  }
  for (const auto& [name, unused] : names) {
    const auto& first = by_lane[0][name];
    for (size_t r = 1; r < by_lane.size(); ++r) {
      const auto& other = by_lane[r][name];
      size_t k = 0;
      while (k < first.size() && k < other.size() && first[k].call == other[k].call) ++k;
      if (k == first.size() && k == other.size()) continue;
      const auto said = [&](const std::vector<PlannedCollective>& list) {
        return k < list.size() ? "'" + list[k].call + "'" : std::string("nothing");
      };
      report(out, k < other.size() ? other[k].node : -1, "collective ", k, " on ", name, ": rank 0 issues ", said(first),
             ", rank ", r, " issues ", said(other));
      break;  // one difference per communicator is enough
    }
  }
  return out;
}

}  // namespace sheaf
