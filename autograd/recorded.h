// What a recording keeps beside its tape: of each value, of the groups whose leaves are used, of regions that will be computed again,
// and of what a backward has left to do.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sheaf/autograd/leaf_group.h"
#include "sheaf/autograd/ops/travel.h"
#include "sheaf/autograd/tape.h"

namespace sheaf {

class Vjp;

namespace recorded {

struct ValueState {
  Tensor saved;                // what the backward reads, while saves > 0
  uint64_t version = 0;        // of its storage, when it was saved; of a group's leaf that of the group, when it was made
  int32_t saves = 0;           // nodes that still want it
  bool needs_grad = false;
  bool recipe = false;         // comes from a group's leaf through views and casts only
  bool repeated = false;       // a result of a region that keeps none
  bool made_again = false;     // cheap to compute again from what its op saves: see OpDef::again
  bool on_host = false;        // of what entered a region: see [Note: offload]
  NodeId changed = -1;         // memory into which this node was the first to put a value with a gradient
  LeafGroup* group = nullptr;  // it is this leaf of a group
  int32_t leaf_index = -1;
  ValueId copy_of = -1;        // computed again in the backward: this value of the forward
  void save(const Tensor& t) { saved = t, version = t.storage()->version(); }
};

/// What has an entry per node or value. A step's lists are as long as those of the step before, so a thread's next
/// recording begins with their memory: a new one grows them by pages that the system has to clear first.
struct Lists {
  Tape tape;
  std::vector<ValueState> states;
  std::vector<Tensor> gradients;
  std::vector<std::pair<uint64_t, uint64_t>> node_saves;  // per node: saved inputs, saved outputs
  void clear();
};

struct GroupState {
  std::shared_ptr<LeafGroup> group;
  NodeId first_use = -1;  // the first node after it was opened; -1: gathered ahead, not used yet
  bool finished = false;
  bool later = false;     // its gradients come later
  bool last = false;      // see is_last_micro_batch_of(): kept for then
  int order = 0;          // what is used in derivatives, or behind them, has a state of its own: see [Note: directions]
  bool constant = false;  // opened for a direction alone
  std::vector<bool> contributed;  // to the slots or, if later, to what waits
  std::vector<Tensor> slots;
};

/// What a RecomputeScope recorded: nodes [begin, end), of whose values the backward gets copies.
struct Region {
  NodeId begin, end;
  std::unordered_map<ValueId, Tensor> entering;   // what the nodes that will be repeated read from outside
  bool results = false;                           // see RecomputeOptions
  Travelling travelling = {};                     // its one result, on the way: see [Note: beside what travels]
  std::vector<std::weak_ptr<Storage>> made = {};  // by such a region
  bool offloads = false, offloaded = false;       // see [Note: offload]
  std::vector<ValueId> on_host = {};              // of what entered: what lies there
  std::vector<Tensor> from_host = {};             // what is being copied back
};

/// Nodes [begin, end) that no backward has come to, and the groups they use: see [Note: micro-batches].
struct Segment {
  NodeId begin, end;
  std::vector<GroupState> groups;
  int64_t micro_batch = 0;     // by number
  bool is_derivative = false;  // it begins with one of the segment before
  bool contains(NodeId node) const { return begin <= node && node < end; }
};
inline bool any_contains(const std::vector<Segment>& segments, NodeId node) {
  return std::ranges::any_of(segments, [node](const Segment& s) { return s.contains(node); });
}
/// Of a loss whose last parts are differentiated: those before, in order, and the gradients that they begin with.
struct RemainingParts {
  std::vector<Segment> segments;
  std::vector<std::pair<ValueId, Tensor>> gradients;
  bool begun = false;
};
/// What a backward differentiates, and what it leaves.
struct Parts {
  std::vector<Segment> segments;
  RemainingParts* remaining = nullptr;
  bool leaves_some() const { return remaining && !remaining->segments.empty(); }
  bool contains(NodeId node) const { return any_contains(segments, node) || (remaining && any_contains(remaining->segments, node)); }
};

/// A derivative that was put off, or a gradient of a parameter that was computed together with others.
struct DeferredGradient {
  NodeId node;
  uint64_t needs = 0;
  std::function<void(Vjp&)> derivative = {};  // or
  ValueId leaf = -1;
  Tensor gradient = {};
};
/// What a backward has left for backward_weights(), in its order: see [Note: weights later].
struct LateWeights {
  std::vector<DeferredGradient> parts;
  std::vector<GroupState> groups;
  bool last = false;  // of the step's micro-batches, with no part before it
};
/// A gradient that the forward has put into a slot: see [Note: gradients ahead].
struct GradientAhead {
  LeafGroup* group;
  NodeId node;
  ValueId gradient;
};

/// From one rank of a chain to the next, or back to the one before.
struct Way {
  const MeshSpec* mesh;
  int axis, from;
  bool back;
  bool operator==(const Way&) const = default;
};
/// What is being sent, from a micro-batch or backward: see [Note: sends].
struct Lent {
  Way way;
  uint64_t turn;
  Tensor lent, sent;  // `sent` goes first and waits for its lane
};

}  // namespace recorded
}  // namespace sheaf
