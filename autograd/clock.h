// Clock: when each node of a step starts and ends on each rank, if it is known how long each of them takes. A step is a
// max-plus system: what computes does so in the tape's order, what travels does so in the order of its lane, a lane's call
// begins behind what computed before it was issued, whoever reads waits, and a collective waits for its last rank. So the
// time of a step, and what of its communication is not hidden behind computing, follow from one pass over the tapes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// How long a node takes.
struct NodeTime {
  double computes = 0;   ///< seconds of the compute lane; of what communicates those before it: copies, packing
  double travels = 0;    ///< seconds of a lane beside it
  int32_t lane = -1;     ///< which of RankTimes::lanes; -1: it computes only
  uint32_t links = 0;    ///< bits: links of this rank that carry it, one transfer after another
  bool runs = true;      ///< false: on other ranks of an axis only
  int64_t receives = 0;  ///< bytes, from other ranks
  bool operator==(const NodeTime&) const = default;
};

/// Nodes [begin, end) of a tape.
struct Stretch {
  NodeId begin, end;
};

/// A rank's tape and how long its nodes take.
struct RankTimes {
  const Tape* tape = nullptr;
  std::vector<NodeTime> nodes;
  /// Stretches of the tape, one after another, some perhaps more than once and others never; empty: all of it once. What a node
  /// waits for is as many calls of a lane ago as it is on the tape.
  std::vector<Stretch> order;
  /// Names of lanes. Ranks with lanes of the same name meet there: each one's first call is the others' first call, and so
  /// on. A name that no other rank has is a lane whose other ranks come at the same moment as this one.
  std::vector<std::string> lanes;
  double issue_seconds = 0;  ///< of the host for each node that does something: what computes cannot start before
};

struct Timeline {
  std::vector<double> start, end;  ///< of each node, in seconds since the step began: on its lane, where it has one; the last
                                   ///< time that it runs
  double seconds = 0;              ///< until all lanes are done
  double computing = 0;            ///< of them the compute lane was at work
  int64_t received = 0;            ///< bytes
  /// The compute lane stood still so long for what a node made.
  struct Wait {
    NodeId of;
    double seconds;
  };
  std::vector<Wait> waits;
};

/// A node waits for the last call of a lane that its rank has made (back 1), or the one before it (2), and so on.
struct LaneWait {
  int32_t lane, back;
  bool of_call;  ///< the node's own call comes behind, and what computes does not wait
  int32_t pieces = 0;  ///< it computes with each as it comes, in their order ([Note: in pieces]); 0: it waits for all
  double own = 0;      ///< this part of what it computes it begins with, and need not wait for
  bool operator==(const LaneWait&) const = default;
};

/// For which calls the nodes of a tape wait. Those of one lane end in their order, so only what nothing before has waited for
/// counts: what repeats on a tape repeats here.
class LaneWaits {
 public:
  explicit LaneWaits(const RankTimes& rank);
  std::span<const LaneWait> of(NodeId node) const {
    const auto i = static_cast<size_t>(node);
    return {waits_.data() + first_[i], waits_.data() + first_[i + 1]};
  }
  /// False of leaves, views and discards, and of what is elsewhere.
  bool takes_time(NodeId node) const { return takes_time_[static_cast<size_t>(node)]; }

 private:
  std::vector<LaneWait> waits_;
  std::vector<size_t> first_;
  std::vector<bool> takes_time_;
};

/// All ranks begin at 0. CommError if ranks wait for each other for ever: the message has where each of them stands.
std::vector<Timeline> clock(std::span<const RankTimes> ranks);

/// Chrome's trace format, which Perfetto (https://ui.perfetto.dev) shows: a process per rank, a row per lane. `ranks` are
/// those that clock() was given, `names` what to call them.
std::string to_trace(std::span<const RankTimes> ranks, std::span<const Timeline> lines, std::span<const std::string> names);

}  // namespace sheaf
