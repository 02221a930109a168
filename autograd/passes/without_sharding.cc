#include "sheaf/autograd/passes/without_sharding.h"

#include <cstring>
#include <map>

#include "sheaf/autograd/ops/redistribute.h"

namespace sheaf {
namespace {

class Eraser {
 public:
  explicit Eraser(const Tape& from) : from_(from), now_(from.num_values(), kUnread), source_(from.num_values(), kNone) {}

  Tape run() {
    for (NodeId id = 0; id < from_.num_nodes(); ++id) {
      const Node& n = from_.node(id);
      if (n.phase == Phase::update) continue;
      if (!n.op) source_[from_.output(n)] = new_source();
      else if (n.op->kind == OpKind::redistribute) pass_through(n);
      else if (n.op->kind == OpKind::op && !n.op->of_units) copy(n);
    }
    return std::move(to_);
  }

 private:
  static constexpr ValueId kUnread = -1;
  static constexpr int kNone = -1;

  int new_source() {
    leaves_.push_back(kUnread);
    return static_cast<int>(leaves_.size()) - 1;
  }

  // An output with a corresponding input is the same value in another layout. The further outputs of a unit's gather are its leaves'
  // values; those of a redistribution are buffers.
  void pass_through(const Node& n) {
    for (int o = 0; o < (is_redistribute(n.op) ? 1 : n.num_outputs); ++o) {
      const ValueId v = from_.output(n, o);
      if (o < n.num_inputs) {
        const ValueId in = from_.inputs(n)[o];
        now_[v] = now_[in], source_[v] = source_[in];
        continue;
      }
      const auto [it, first] = opened_.try_emplace({from_.path(n), o - n.num_inputs});
      if (first) it->second = new_source();
      source_[v] = it->second;
    }
  }

  // Leaves are added where they are first read, so that the grouping of parameters into units does not matter.
  ValueId read(ValueId v, const Node& reader) {
    if (now_[v] != kUnread) return now_[v];
    if (source_[v] == kNone)
      fail<PlacementError>("[without_sharding] [", from_.op_name(reader), "] ", path_label(from_.path(reader)), " reads %", v,
                           ", which is a buffer of a unit");
    ValueId& leaf = leaves_[source_[v]];
    if (leaf == kUnread) leaf = to_.add_leaf(global_type(v), "leaf", from_.path(reader), reader.phase);
    return now_[v] = leaf;
  }

  void copy(const Node& n) {
    std::vector<ValueId> inputs;
    for (ValueId v : from_.inputs(n)) inputs.push_back(read(v, n));
    std::vector<Type> types;
    for (int o = 0; o < n.num_outputs; ++o) types.push_back(global_type(from_.output(n, o)));
    std::vector<const Type*> pointers;
    for (const Type& t : types) pointers.push_back(&t);
    std::vector<int64_t> attrs((n.op->attrs_size + 7) / 8);  // aligned as the tape's
    if (n.op->attrs_size > 0) std::memcpy(attrs.data(), from_.attrs(n), n.op->attrs_size);
    if (n.op->drop_layouts) n.op->drop_layouts(attrs.data());
    const NodeId id = to_.add_node(*n.op, attrs.data(), inputs, pointers, from_.path(n), n.phase,
                                   n.flags & (Node::kAdds | Node::kRecomputed));
    for (int o = 0; o < n.num_outputs; ++o) now_[from_.output(n, o)] = to_.output(to_.node(id), o);
  }

  Type global_type(ValueId v) const { return {from_.type(v).dtype, from_.type(v).shape, {}}; }

  const Tape& from_;
  Tape to_;
  std::vector<ValueId> now_;     // by value of from_, once it is read
  std::vector<int> source_;      // of values that no op makes, by value of from_
  std::vector<ValueId> leaves_;  // by source
  std::map<std::pair<std::string, int>, int> opened_;
};

}  // namespace

Tape without_sharding(const Tape& tape) { return Eraser(tape).run(); }

}  // namespace sheaf
