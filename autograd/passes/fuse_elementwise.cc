#include "sheaf/autograd/passes/fuse_elementwise.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "sheaf/autograd/arrangement.h"
#include "sheaf/autograd/fuse.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/config.h"

namespace sheaf {
namespace {

// [Note: who may be fused] Nodes of a group run where its last one stood. For the others that is later than they were: nothing
// else may need what they give before, and what they read must still be there, as it was.
class Fuser {
 public:
  Fuser(Tape& tape, std::span<const ValueId> keep, FusedMemory memory)
      : tape_(tape), memory_(memory), kept_(tape.num_values()), users_(tape.num_values()), ends_(tape.num_values()), last_use_(tape.num_values(), -1),
        group_of_(tape.num_nodes(), kNone) {
    for (ValueId v : keep) kept_[v] = true;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) {
      const Node& n = tape.node(id);
      for (ValueId v : tape.inputs(n)) {
        users_[v].push_back(id);
        last_use_[root(v)] = id;
        if (tape.kind(n) == OpKind::discard) ends_[root(v)].push_back(id);
      }
      for (int o = 0; o < n.num_outputs; ++o) {
        const ValueId v = tape.output(n, o), base = tape.value(v).base;
        last_use_[root(v)] = id;
        if (base < 0) continue;
        users_[base].push_back(id);
        ends_[root(v)].push_back(id);  // it is written
      }
    }
  }

  int run() {
    for (NodeId id = 0; id < tape_.num_nodes(); ++id)
      if (can_fuse(tape_, tape_.node(id)) && !kept_[tape_.output(tape_.node(id))]) place(id);
    return rewrite();
  }

 private:
  static constexpr int kNone = -1;
  using Members = std::vector<NodeId>;  // in order

  ValueId root(ValueId v) const {
    while (tape_.value(v).lies_in() >= 0) v = tape_.value(v).lies_in();
    return v;
  }
  ValueId output(NodeId id) const { return tape_.output(tape_.node(id)); }
  int64_t bytes(ValueId v) const {  // of an arena
    const int64_t own = tape_.type(v).local_shape().numel() * static_cast<int64_t>(size_of(tape_.type(v).dtype));
    return (own + Arrangement::kAlign - 1) / Arrangement::kAlign * Arrangement::kAlign;
  }
  bool alike(NodeId a, NodeId b) const {
    const Node &m = tape_.node(a), &n = tape_.node(b);
    const Type &s = tape_.type(output(a)), &t = tape_.type(output(b));
    return m.phase == n.phase && m.flags == n.flags && s.shape == t.shape && s.layout == t.layout;
  }

  // To as many of the groups that it could belong to as will have it, together.
  void place(NodeId id) {
    std::set<int, std::greater<>> candidates;
    for (ValueId v : tape_.inputs(tape_.node(id))) {
      consider(tape_.value(v).producer, id, candidates);
      if (!(tape_.type(v).shape == tape_.type(output(id)).shape)) continue;
      for (NodeId sibling : users_[v])
        if (sibling < id) consider(sibling, id, candidates);
    }
    Members members{id};
    std::vector<int> joined;
    for (int g : candidates) {
      Members both;
      std::ranges::merge(members, groups_[g], std::back_inserter(both));
      if (!may_join(both)) continue;
      members = std::move(both);
      joined.push_back(g);
    }
    for (int g : joined) groups_[g].clear();
    const int own = static_cast<int>(groups_.size());
    for (NodeId m : members) group_of_[m] = own;
    groups_.push_back(std::move(members));
  }
  void consider(NodeId producer, NodeId id, std::set<int, std::greater<>>& candidates) const {
    if (group_of_[producer] != kNone && alike(producer, id)) candidates.insert(group_of_[producer]);
  }

  bool may_join(const Members& members) const {
    const NodeId last = members.back();
    const auto member = [&](NodeId id) { return std::ranges::binary_search(members, id); };
    int64_t longer = 0, saved = 0;
    std::set<ValueId> counted;
    for (NodeId m : members) {
      if (m == last) break;
      bool inside = true;
      for (NodeId user : users_[output(m)]) {
        if (member(user)) continue;
        if (moment_of(user) < last) return false;
        inside = false;
      }
      if (inside) saved += bytes(output(m));
      for (ValueId v : tape_.inputs(tape_.node(m))) {
        if (member(tape_.value(v).producer)) continue;
        const ValueId r = root(v);
        const auto next = std::ranges::upper_bound(ends_[r], m);
        if (next != ends_[r].end() && *next < last) return false;
        if (last_use_[r] < last && tape_.node(tape_.value(r).producer).op && counted.insert(r).second) longer += bytes(r);
      }
    }
    return (longer <= saved || last_other(members) < members.front()) && (memory_ == FusedMemory::more || takes_no_more(members)) &&
           fits(members);
  }

  // All operands and results at once, beside the most that were there at one of the nodes behind the last other one.
  bool takes_no_more(const Members& members) const {
    std::set<ValueId> own;  // operands and results
    for (NodeId m : members) {
      own.insert(output(m));
      for (ValueId v : tape_.inputs(tape_.node(m)))
        if (tape_.node(tape_.value(root(v)).producer).op) own.insert(root(v));
    }
    int64_t most = 0, fused = 0;
    const NodeId other = last_other(members);
    for (NodeId m : members) {
      if (m < other) continue;
      int64_t here = 0;
      for (ValueId v : own)
        if (tape_.value(v).producer <= m && last_use_[v] >= m) here += bytes(v);
      most = std::max(most, here);
    }
    const std::vector<ValueId> results = outputs_of(members);
    for (ValueId v : own) {
      const bool made_here = std::ranges::binary_search(members, tape_.value(v).producer);
      if (!made_here || std::ranges::find(results, v) != results.end()) fused += bytes(v);
    }
    return fused <= most;
  }
  // A user's place: that of its group.
  NodeId moment_of(NodeId id) const { return group_of_[id] == kNone ? id : groups_[group_of_[id]].back(); }

  // The last node between them that is none of them, and more than a view; -1: none.
  NodeId last_other(const Members& members) const {
    for (NodeId id = members.back(); id > members.front(); --id) {
      const Node& n = tape_.node(id);
      if (std::ranges::binary_search(members, id) || !n.op) continue;
      if (n.num_outputs == 0 || tape_.value(tape_.output(n)).view_of < 0) return id;
    }
    return -1;
  }

  std::vector<ValueId> outputs_of(const Members& members) const {
    std::vector<ValueId> out;
    for (NodeId m : members)
      if (std::ranges::any_of(users_[output(m)], [&](NodeId user) { return !std::ranges::binary_search(members, user); }))
        out.push_back(output(m));
    return out;
  }
  bool code_of(const Members& members, Fuse& fuse) const {
    for (NodeId m : members)
      if (!fuse.add(tape_, tape_.node(m))) return false;
    const std::vector<ValueId> outputs = outputs_of(members);
    return !outputs.empty() && std::ranges::all_of(outputs, [&](ValueId v) { return fuse.add_output(v); });
  }
  bool fits(const Members& members) const {
    Fuse fuse;
    return code_of(members, fuse) && kernels::FusedSlots(fuse.code()).count <= kernels::FusedCode::kMaxSlots;
  }

  // The modules that all of them are in.
  std::string path_of(const Members& members) const {
    std::string common = tape_.path(tape_.node(members[0]));
    for (NodeId m : members) {
      const std::string& path = tape_.path(tape_.node(m));
      while (!common.empty() && !(path == common || path.starts_with(common + '.')))
        common.resize(common.find_last_of('.') == std::string::npos ? 0 : common.find_last_of('.'));
    }
    return common;
  }

  int rewrite() {
    const NodeId nodes = tape_.num_nodes();
    std::vector<ValueId> now(tape_.num_values());
    std::iota(now.begin(), now.end(), 0);
    std::map<NodeId, NodeId> fused_at;
    std::vector<bool> gone(nodes);
    int together = 0;
    for (const Members& members : groups_) {
      if (members.size() < 2) continue;
      Fuse fuse;
      code_of(members, fuse);
      const std::vector<ValueId> outputs = outputs_of(members);
      std::vector<const Type*> types;
      for (ValueId v : outputs) types.push_back(&tape_.type(v));
      const Node last = tape_.node(members.back());
      const NodeId id = tape_.add_node(fused_op(), &fuse.code(), fuse.inputs(), types, path_of(members), last.phase, last.flags);
      for (int o = 0; o < std::ssize(outputs); ++o) {
        now[outputs[o]] = tape_.output(tape_.node(id), o);
        now.push_back(tape_.output(tape_.node(id), o));
      }
      for (NodeId m : members) gone[m] = true;
      fused_at[members.back()] = id;
      together += static_cast<int>(members.size());
    }
    if (together == 0) return 0;
    std::vector<NodeId> order;
    for (NodeId id = 0; id < nodes; ++id) {
      if (!gone[id]) order.push_back(id);
      else if (const auto it = fused_at.find(id); it != fused_at.end()) order.push_back(it->second);
    }
    tape_.replace_uses(now);
    tape_.arrange_nodes(order);
    return together;
  }

  Tape& tape_;
  const FusedMemory memory_;
  std::vector<bool> kept_;
  std::vector<std::vector<NodeId>> users_;  // by value: who reads it, or writes into it
  std::vector<std::vector<NodeId>> ends_;   // by value with memory of its own: who writes or discards it
  std::vector<NodeId> last_use_;            // the same
  std::vector<int> group_of_;               // by node
  std::vector<Members> groups_;
};

}  // namespace

int fuse_elementwise(Tape& tape, std::span<const ValueId> keep, FusedMemory memory) { return Fuser(tape, keep, memory).run(); }

Program fuse_elementwise(Program plain) {
  for (const FusedMemory memory : {FusedMemory::more, FusedMemory::same}) {
    Tape tape = plain.tape();
    if (fuse_elementwise(tape, plain.wanted(), memory) == 0) break;
    Program fused = plain.with_tape(std::move(tape));
    if (fused.arena_bytes() > plain.arena_bytes()) continue;
    if constexpr (kernels::kHasCuda)
      if (RankContext::current().gpu) kernels::cuda::load_fused();
    return fused;
  }
  return plain;
}

}  // namespace sheaf
