// The state of a recording in addition to its tape: per value, for the groups whose leaves are used, for regions that will be
// recomputed, and for work that a backward has deferred.
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
  Tensor saved;          // what the backward reads, while saves > 0
  uint64_t version = 0;  // of its storage, when it was saved; for a group's leaf that of the group, when the value was created
  int32_t saves = 0;     // nodes that still need it
  bool needs_grad = false;
  bool is_read = false;         // by a node
  bool recipe = false;          // derived from a group's leaf through views and casts only
  bool recomputed = false;      // a result of a region that keeps none of them
  bool rematerialized = false;  // recomputed from what its op saves: see OpDef::rematerialize
  bool on_host = false;         // for values that entered a region: see [Note: offload]
  NodeId changed = -1;          // the first node that stored a value with a gradient into this memory
  LeafGroup* group = nullptr;   // the group that it is a leaf of
  int32_t leaf_index = -1;
  ValueId original = -1;  // recomputed in the backward: the forward's value
  void save(const Tensor& t) { saved = t, version = t.storage()->version(); }
};

/// Lists with an entry per node or value. A step's lists are as long as those of the step before, so a thread's next recording reuses
/// their memory: new lists would grow by pages that the system has to zero first.
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
  bool defers_weights = false;    // see [Note: deferred weights]
  bool last = false;              // is_last_micro_batch_of(), kept for backward_weights()
  int derivative_order = 0;       // uses in derivatives have separate state for each order: see [Note: directions]
  bool for_direction = false;     // opened for a direction alone
  std::vector<bool> contributed;  // by leaf: to the slots or, if weight gradients are deferred, to those deferred
  std::vector<Tensor> slots;
};

/// A value that is read later, and the version of its memory when it was kept.
struct Kept {
  Tensor value;
  uint64_t version;
  Kept(const Tensor& t) : value(t), version(t.storage()->version()) {}  // NOLINT: implicit by design
  bool is_changed() const { return value.storage()->version() != version; }
};

/// The nodes [begin, end) recorded by a RecomputeScope, whose values are recomputed for the backward.
struct Region {
  NodeId begin, end;
  std::unordered_map<ValueId, Kept> entering = {};  // values from outside that the recomputed nodes will read
  bool results = false;                             // see RecomputeOptions
  PendingRedistribute pending = {};                 // its one result, on the way: see [Note: overlap]
  std::vector<std::weak_ptr<Storage>> made = {};    // by a region that keeps no results: where these are
  bool offloads = false, offloaded = false;         // see [Note: offload]
  std::vector<ValueId> on_host = {};                // entering values that are in host memory
  std::vector<Tensor> from_host = {};               // those being copied back
  bool contains(NodeId node) const { return begin <= node && node < end; }
};

/// Nodes [begin, end) that no backward has differentiated yet, and the groups they use: see [Note: micro-batches].
struct Segment {
  NodeId begin, end;
  std::vector<GroupState> groups;
  int64_t micro_batch = 0;     // its number
  bool is_derivative = false;  // it begins with a derivative of the segment before
  bool contains(NodeId node) const { return begin <= node && node < end; }
};
inline bool any_contains(const std::vector<Segment>& segments, NodeId node) {
  return std::ranges::any_of(segments, [node](const Segment& s) { return s.contains(node); });
}
/// For a loss of which only the last parts have been differentiated: the parts before, in order, and the gradients that they start
/// from.
struct RemainingParts {
  std::vector<Segment> segments;
  std::vector<std::pair<ValueId, Tensor>> gradients;
  bool begun = false;
};
/// The segments that a backward differentiates, and those that it leaves for later.
struct Parts {
  std::vector<Segment> segments;
  RemainingParts* remaining = nullptr;
  bool leaves_some() const { return remaining && !remaining->segments.empty(); }
  bool contains(NodeId node) const { return any_contains(segments, node) || (remaining && any_contains(remaining->segments, node)); }
};

/// A deferred derivative, or a parameter's gradient that was computed together with others.
struct DeferredGradient {
  NodeId node;
  uint64_t needs = 0;
  std::function<void(Vjp&)> derivative = {};  // or
  ValueId leaf = -1;
  Tensor gradient = {};
  /// The storages that the derivative reads, with their versions.
  std::vector<std::pair<std::weak_ptr<Storage>, uint64_t>> reads = {};
};
/// The work that a backward has deferred to backward_weights(), in order: see [Note: deferred weights].
struct DeferredWeights {
  std::vector<DeferredGradient> parts;
  std::vector<GroupState> groups;
  bool last = false;  // of the step's last micro-batch, with no part left before it
};
/// Memory that a value with a gradient was stored into, by a node of the forward.
struct Stored {
  Tensor memory;
  NodeId node;
};
/// A gradient that the forward has stored into a slot: see [Note: early gradients].
struct EarlyGradient {
  LeafGroup* group;
  NodeId node;
  ValueId gradient;
};

/// From one rank of a pipeline to the next, or back to the previous one.
struct SendRoute {
  const MeshSpec* mesh;
  int axis, from;
  bool back;
  bool operator==(const SendRoute&) const = default;
};
/// A value being sent, and the micro-batch or backward it is of: see [Note: sends].
struct PendingSend {
  SendRoute route;
  uint64_t epoch;
  Tensor source, sent;  // `sent` is declared last, so destroyed first: its destructor waits for the lane
};

}  // namespace recorded
}  // namespace sheaf
