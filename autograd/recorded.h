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
#include "sheaf/autograd/ops/pending_redistribute.h"
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
  bool recomputed = false;     // a result of a region that keeps none
  bool rematerialized = false; // from what its op saves: see OpDef::rematerialize
  bool on_host = false;        // of what entered a region: see [Note: offload]
  NodeId changed = -1;         // memory into which this node was the first to put a value with a gradient
  LeafGroup* group = nullptr;  // it is this leaf of a group
  int32_t leaf_index = -1;
  ValueId original = -1;       // recomputed in the backward: the value of the forward
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
  NodeId first_use = -1;          // the first node after it was opened; -1: gathered ahead, not used yet
  bool finished = false;
  bool defers_weights = false;    // see [Note: deferred weights]
  bool last = false;              // is_last_micro_batch_of(), kept for backward_weights()
  int derivative_order = 0;       // uses in derivatives have a state of their own for each order: see [Note: directions]
  bool constant = false;          // opened for a direction alone
  std::vector<bool> contributed;  // by leaf: to the slots or, where weights are deferred, to what waits
  std::vector<Tensor> slots;
};

/// A value that is read later, and the version of its memory when it was kept.
struct Kept {
  Tensor value;
  uint64_t version;
  Kept(const Tensor& t) : value(t), version(t.storage()->version()) {}  // NOLINT: implicit by design
  bool is_changed() const { return value.storage()->version() != version; }
};

/// What a RecomputeScope recorded: nodes [begin, end), of whose values the backward gets copies.
struct Region {
  NodeId begin, end;
  std::unordered_map<ValueId, Kept> entering = {};      // what the nodes that will be recomputed read from outside
  bool results = false;                                 // see RecomputeOptions
  PendingRedistribute pending = {};                           // its one result, on the way: see [Note: overlap]
  std::vector<std::weak_ptr<Storage>> made = {};        // by a region that keeps no results: where these are
  bool offloads = false, offloaded = false;             // see [Note: offload]
  std::vector<ValueId> on_host = {};                    // entering values that are in the host's memory
  std::vector<Tensor> from_host = {};                   // and those that are being copied back
  bool contains(NodeId node) const { return begin <= node && node < end; }
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
  /// Of what the derivative reads: where it lies, and in which version.
  std::vector<std::pair<std::weak_ptr<Storage>, uint64_t>> reads = {};
};
/// What a backward has left for backward_weights(), in its order: see [Note: deferred weights].
struct DeferredWeights {
  std::vector<DeferredGradient> parts;
  std::vector<GroupState> groups;
  bool last = false;  // of the step's micro-batches, with no part before it
};
/// A gradient that the forward has put into a slot: see [Note: early gradients].
struct EarlyGradient {
  LeafGroup* group;
  NodeId node;
  ValueId gradient;
};

/// From one rank of a chain to the next, or back to the one before.
struct SendRoute {
  const MeshSpec* mesh;
  int axis, from;
  bool back;
  bool operator==(const SendRoute&) const = default;
};
/// What is being sent, from a micro-batch or backward: see [Note: sends].
struct PendingSend {
  SendRoute route;
  uint64_t epoch;
  Tensor source, sent;  // `sent` is declared last, so destroyed first: its destructor waits for the lane
};

}  // namespace recorded
}  // namespace sheaf
