#include "sheaf/autograd/passes/keep_gathered.h"

#include <algorithm>
#include <map>

#include "sheaf/autograd/fuse.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/autograd/tape_editor.h"

namespace sheaf {
namespace {

// The memory that a value was derived from, through ops from one buffer to one buffer that only rename or cast.
ValueId origin(const Tape& tape, ValueId v) {
  for (;;) {
    const Node& n = tape.node(tape.value(v).producer);
    if (!n.op || n.op == &fused_op() || is_unit_gather(tape, n) || n.num_inputs == 0 || n.num_inputs != n.num_outputs) return v;
    v = tape.inputs(n)[v - tape.output(n)];
  }
}

// Whether both gather the same masters into buffers of the same types.
bool gather_alike(const Tape& tape, const Node& a, const Node& b) {
  if (a.op != b.op || a.num_inputs != b.num_inputs || a.num_outputs != b.num_outputs) return false;
  for (int i = 0; i < a.num_inputs; ++i)
    if (origin(tape, tape.inputs(a)[i]) != origin(tape, tape.inputs(b)[i])) return false;
  for (int o = 0; o < a.num_outputs; ++o)
    if (!(tape.type(tape.output(a, o)) == tape.type(tape.output(b, o)))) return false;
  return true;
}

int64_t buffer_bytes(const Tape& tape, const Node& gather) {
  int64_t bytes = 0;
  for (int o = 0; o < gather.num_inputs; ++o) {  // the values are placed in the buffers
    const Type& type = tape.type(tape.output(gather, o));
    bytes += type.local_shape().numel() * static_cast<int64_t>(size_of(type.dtype));
  }
  return bytes;
}

}  // namespace

std::vector<Regather> regathers(const Program& program) {
  const Tape& tape = program.tape();
  const std::map<ValueId, ValueId> same = program.leaves_of_same_memory();
  std::vector<Regather> out;
  struct Gathered {
    NodeId gather = -1, discard = -1;
    bool used = false;  // an unused one, a mispredicted prefetch, may lack its completion
  };
  std::map<std::string, Gathered> last;  // by the unit's path
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (tape.kind(n) == OpKind::step) last.clear();
    for (int o = 0; o < n.num_outputs; ++o) {  // masters may also be stored into
      const ValueId stored = tape.value(tape.output(n, o)).base;
      if (stored < 0) continue;
      const auto is_changed = [&, memory = memory_of(tape, same, stored)](ValueId in) { return memory_of(tape, same, origin(tape, in)) == memory; };
      std::erase_if(last, [&](const auto& entry) {
        return entry.second.gather >= 0 && std::ranges::any_of(tape.inputs(tape.node(entry.second.gather)), is_changed);
      });
    }
    for (ValueId v : tape.inputs(n)) {
      const NodeId made = tape.value(v).producer;
      if (!is_unit_gather(tape, tape.node(made))) continue;
      Gathered& gathered = last[tape.path(tape.node(made))];
      if (gathered.gather != made) continue;
      if (tape.kind(n) == OpKind::discard) gathered.discard = id;
      else gathered.used = true;
    }
    if (!is_unit_gather(tape, n)) continue;
    const auto it = last.find(tape.path(n));
    if (it != last.end() && it->second.discard >= 0 && it->second.used && gather_alike(tape, tape.node(it->second.gather), n))
      out.push_back({it->second.discard, id, buffer_bytes(tape, n)});
    last[tape.path(n)] = Gathered{id};
  }
  return out;
}

std::vector<Regather> choose_kept(std::span<const Regather> all, std::vector<int64_t> alive, int64_t limit) {
  std::vector<Regather> soonest(all.begin(), all.end()), out;
  std::ranges::stable_sort(soonest, {}, [](const Regather& r) { return r.gather - r.discard; });
  for (const Regather& r : soonest) {
    const std::span gap(alive.begin() + r.discard + 1, alive.begin() + r.gather);
    if (std::ranges::any_of(gap, [&](int64_t bytes) { return bytes + r.bytes > limit; })) continue;
    for (int64_t& bytes : gap) bytes += r.bytes;
    out.push_back(r);
  }
  std::ranges::sort(out, {}, &Regather::gather);
  return out;
}

void keep_gathered(Tape& tape, std::span<const Regather> which) {
  TapeEditor edit(std::move(tape));
  const Tape& before = edit.tape();
  std::vector<bool> regathered(before.num_values());
  for (const Regather& r : which) {  // what is kept once stays kept
    const Node& gather = before.node(r.gather);
    const ValueId kept = before.inputs(before.node(r.discard))[0];
    for (int o = 0; o < gather.num_outputs; ++o) {
      edit.replace(before.output(gather, o), kept + o, r.gather);
      regathered[before.output(gather, o)] = true;
    }
    edit.erase(r.discard), edit.erase(r.gather);
  }
  // A gather's completion is removed with it, and then what was created for it alone.
  for (NodeId id = 0; id < before.num_nodes(); ++id) {
    const Node& n = before.node(id);
    if (n.op && n.num_outputs == 0 && before.kind(n) == OpKind::op && n.num_inputs > 0 && regathered[before.inputs(n)[0]]) edit.erase(id);
  }
  std::vector<int> uses(before.num_values());
  for (NodeId id = 0; id < before.num_nodes(); ++id)
    if (!edit.is_erased(id))
      for (ValueId v : before.inputs(before.node(id))) ++uses[v];
  for (const Regather& r : which)
    for (ValueId v : before.inputs(before.node(r.gather)))
      for (NodeId id = before.value(v).producer; uses[v] == 0; id = before.value(v).producer) {
        const Node& n = before.node(id);
        if (!n.op || n.num_inputs != 1 || n.num_outputs != 1 || edit.is_erased(id)) break;
        edit.erase(id);
        --uses[v = before.inputs(n)[0]];
      }
  tape = edit.take();
}

}  // namespace sheaf
