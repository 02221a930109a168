#include "sheaf/autograd/passes/fuse_elementwise.h"

#include <algorithm>
#include <map>
#include <set>

#include "sheaf/autograd/fuse.h"
#include "sheaf/autograd/tape_editor.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/config.h"

namespace sheaf {
namespace {

// [Note: who may be fused] Nodes of a group run at the position of the last one. The others then run later than before: nothing else
// may need their results earlier, and their operands must still exist, unchanged.
class Fuser {
 public:
  /// `same`: Program::leaves_of_same_memory().
  Fuser(Tape tape, std::span<const ValueId> keep, std::vector<int64_t> alive, int64_t limit, std::map<ValueId, ValueId> same)
      : edit_(std::move(tape)), same_(std::move(same)), alive_(std::move(alive)), limit_(limit), kept_(tape_.num_values()),
        users_(tape_.num_values()), ends_(tape_.num_values()), last_use_(tape_.num_values(), -1), group_of_(tape_.num_nodes(), kNone) {
    for (ValueId v : keep) kept_[v] = true;
    for (NodeId id = 0; id < tape_.num_nodes(); ++id) {
      const Node& n = tape_.node(id);
      for (ValueId v : tape_.inputs(n)) {
        users_[v].push_back(id);
        last_use_[root(v)] = id;
        if (tape_.kind(n) == OpKind::discard) ends_[root(v)].push_back(id);
      }
      for (int o = 0; o < n.num_outputs; ++o) {
        const ValueId v = tape_.output(n, o), base = tape_.value(v).base;
        last_use_[root(v)] = id;
        if (base < 0) continue;
        users_[base].push_back(id);
        ends_[root(v)].push_back(id);  // it is written
      }
    }
  }

  /// Returns how many ops were merged into others.
  int run() {
    for (NodeId id = 0; id < tape_.num_nodes(); ++id)
      if (can_fuse(tape_, tape_.node(id)) && !kept_[tape_.output(tape_.node(id))]) place(id);
    return rewrite();
  }
  Tape take() { return edit_.take(); }

 private:
  static constexpr int kNone = -1;
  static constexpr NodeId kFarthest = 1000;  // nodes between the first and the last of a group
  using Members = std::vector<NodeId>;       // in order

  ValueId root(ValueId v) const { return memory_of(tape_, same_, v); }
  ValueId output(NodeId id) const { return tape_.output(tape_.node(id)); }
  int64_t bytes(ValueId v) const {
    return tape_.type(v).local_shape().numel() * static_cast<int64_t>(size_of(tape_.type(v).dtype));
  }
  bool alike(NodeId a, NodeId b) const {
    const Node &m = tape_.node(a), &n = tape_.node(b);
    const Type &s = tape_.type(output(a)), &t = tape_.type(output(b));
    return m.phase == n.phase && m.flags == n.flags && s.shape == t.shape && s.layout == t.layout;
  }

  // Joins it with as many of its candidate groups as accept it, merging them.
  void place(NodeId id) {
    std::set<int, std::greater<>> candidates;
    for (ValueId v : tape_.inputs(tape_.node(id))) {
      consider(tape_.value(v).producer, id, candidates);
      if (!(tape_.type(v).shape == tape_.type(output(id)).shape)) continue;
      const std::vector<NodeId>& users = users_[v];
      for (auto it = std::ranges::lower_bound(users, id - kFarthest); it != users.end() && *it < id; ++it)
        consider(*it, id, candidates);
    }
    Members members{id};
    for (int g : candidates) {
      if (id - groups_[g].front() > kFarthest || members.size() + groups_[g].size() > kernels::FusedCode::kMaxSteps) continue;
      Members both;
      std::ranges::merge(members, groups_[g], std::back_inserter(both));
      if (!may_join(both)) continue;
      count_memory(members, -1), count_memory(groups_[g], -1);
      if (!take_room(both)) {
        count_memory(members, 1), count_memory(groups_[g], 1);
        continue;
      }
      members = std::move(both);
      groups_[g].clear();
    }
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
    for (NodeId m : members) {
      if (m == last) break;
      for (NodeId user : users_[output(m)])
        if (!member(user) && moment_of(user) < last) return false;
      for (ValueId v : tape_.inputs(tape_.node(m))) {
        const std::vector<NodeId>& ends = ends_[root(v)];
        const auto next = std::ranges::upper_bound(ends, m);
        if (next != ends.end() && *next < last) return false;
      }
    }
    return fits(members);
  }
  // The position at which a node runs: that of its group.
  NodeId moment_of(NodeId id) const { return group_of_[id] == kNone ? id : groups_[group_of_[id]].back(); }

  // Updates the bytes alive per node, with the members as one node at the last one's position: operands are alive until then, results
  // from then on, and values that only members read never are.
  void count_memory(const Members& members, int sign) {
    if (alive_.empty() || members.size() < 2) return;
    const NodeId last = members.back();
    const auto count = [&](ValueId v, NodeId from, NodeId to, int by) {
      for (NodeId id = from; id <= to; ++id) alive_[id] += by * bytes(v);
    };
    std::set<ValueId> operands;
    for (NodeId m : members)
      for (ValueId v : tape_.inputs(tape_.node(m)))
        if (const NodeId made = tape_.value(root(v)).producer; tape_.node(made).op && !std::ranges::binary_search(members, made))
          operands.insert(root(v));
    for (ValueId v : operands) count(v, last_use_[v] + 1, last, sign);
    const std::vector<ValueId> results = outputs_of(members);
    for (NodeId m : members) {
      const bool result = std::ranges::find(results, output(m)) != results.end();
      count(output(m), m, result ? last - 1 : std::min(last_use_[output(m)], last), -sign);
    }
  }
  // Counts them if there is room.
  bool take_room(const Members& members) {
    if (alive_.empty()) return true;
    const std::vector<int64_t> before(alive_.begin() + members.front(), alive_.begin() + members.back() + 1);
    count_memory(members, 1);
    bool room = true;
    for (size_t i = 0; i < before.size(); ++i) {
      const int64_t now = alive_[members.front() + static_cast<NodeId>(i)];
      room = room && (now <= limit_ || now <= before[i]);
    }
    if (!room) count_memory(members, -1);
    return room;
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

  // The innermost module path common to all of them.
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
    int together = 0;
    for (const Members& members : groups_) {
      if (members.size() < 2) continue;
      Fuse fuse;
      code_of(members, fuse);
      const std::vector<ValueId> outputs = outputs_of(members);
      std::vector<const Type*> types;
      for (ValueId v : outputs) types.push_back(&tape_.type(v));
      const Node last = tape_.node(members.back());
      const NodeId id = edit_.insert_node(members.back(), fused_op(), &fuse.code(), fuse.inputs(), types, path_of(members), last.phase, last.flags);
      for (int o = 0; o < std::ssize(outputs); ++o) edit_.replace(outputs[o], tape_.output(tape_.node(id), o), members.back());
      for (NodeId m : members) edit_.erase(m);
      together += static_cast<int>(members.size());
    }
    if constexpr (kernels::kHasCuda)
      if (together > 0 && RankContext::current().gpu) kernels::cuda::load_fused();
    return together;
  }

  TapeEditor edit_;
  const Tape& tape_ = edit_.tape();
  const std::map<ValueId, ValueId> same_;
  std::vector<int64_t> alive_;  // at each node, with the current groups; empty: not needed
  const int64_t limit_;
  std::vector<bool> kept_;
  std::vector<std::vector<NodeId>> users_;  // by value: nodes that read it, or write into it
  std::vector<std::vector<NodeId>> ends_;   // by value with its own memory: nodes that write or discard it
  std::vector<NodeId> last_use_;            // by value with its own memory
  std::vector<int> group_of_;               // by node
  std::vector<Members> groups_;
};

}  // namespace

int fuse_elementwise(Tape& tape, std::span<const ValueId> keep, std::vector<int64_t> alive, int64_t limit) {
  Fuser fuser(std::move(tape), keep, std::move(alive), limit, {});
  const int together = fuser.run();
  tape = fuser.take();
  return together;
}

Program fuse_elementwise(Program plain) {
  const std::map<ValueId, ValueId> same = plain.leaves_of_same_memory();
  const std::vector<int64_t> alive = plain.alive_bytes();
  int64_t limit = alive.empty() ? 0 : std::ranges::max(alive);
  for (int tries = 0; tries < 4; ++tries) {
    // First fuse everything possible: intermediate groups may exceed the limit when the final ones do not.
    const bool any = tries == 0;
    Fuser fuser(plain.tape(), plain.wanted(), any ? std::vector<int64_t>() : alive, limit, same);
    if (fuser.run() == 0) break;
    Program fused = plain.with_tape(fuser.take());
    const int64_t over = fused.arena_bytes() - plain.arena_bytes();
    if (over <= 0) return fused;
    if (!any) limit -= over;  // an arrangement may take more than the bytes alive
  }
  return plain;
}

}  // namespace sheaf
