// Clock: when each node of a step starts and ends on each rank, given how long each takes. A step is a max-plus system: compute runs
// in the tape's order, the calls of a lane run in that lane's order, a lane's call starts after the compute issued before it, a node
// that reads a call's result waits for it, and a collective waits for its last rank. So the step time, and the communication that
// compute does not hide, follow from one pass over the tapes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// The duration of a node.
struct NodeTime {
  double computes = 0;   ///< seconds on the compute lane; for a communicating node those before its call: copies, packing
  double travels = 0;    ///< seconds on a communication lane, concurrently with compute
  int32_t lane = -1;     ///< which of RankTimes::lanes; -1: compute only
  uint32_t links = 0;    ///< bit mask of this rank's links that carry it, one transfer at a time
  bool runs = true;      ///< false: runs only on other ranks of an axis
  int64_t receives = 0;  ///< bytes received from other ranks
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
  /// Stretches of the tape in the order in which they run; some may repeat and others be skipped; empty: the whole tape once. The
  /// lane call that a node waits for is as many calls back as it is on the tape.
  std::vector<Stretch> order;
  /// Names of lanes. Lanes of the same name on several ranks are one communicator: the n-th call of one rank is the n-th call of the
  /// others. For a name that no other rank has, the other ranks are assumed to arrive together with this one.
  std::vector<std::string> lanes;
  double issue_seconds = 0;  ///< host time to issue a node; its compute cannot start earlier
};

struct Timeline {
  std::vector<double> start, end;  ///< of each node, in seconds since the step began: on its lane, if it has one; of the last run, if it
                                   ///< repeats
  double seconds = 0;              ///< until all lanes are done
  double computing = 0;            ///< how long of that the compute lane was busy
  int64_t received = 0;            ///< bytes
  /// How long the compute lane was idle waiting for a node's result.
  struct Wait {
    NodeId of;
    double seconds;
  };
  std::vector<Wait> waits;
};

/// A node waits for its rank's last call on a lane (back 1), the one before it (2), and so on.
struct LaneWait {
  int32_t lane, back;
  bool of_call;        ///< only the node's own call has to wait, compute does not
  int32_t pieces = 0;  ///< it computes with each piece as it arrives, in order ([Note: in pieces]); 0: it waits for all
  double own = 0;      ///< the fraction of its compute that comes first and need not wait
  bool operator==(const LaneWait&) const = default;
};

/// The calls that each node of a tape waits for. Calls of one lane end in order, so only those count that nothing earlier has waited
/// for: a stretch that repeats on the tape has the same waits each time.
class LaneWaits {
 public:
  explicit LaneWaits(const RankTimes& rank);
  std::span<const LaneWait> of(NodeId node) const {
    const auto i = static_cast<size_t>(node);
    return {waits_.data() + first_[i], waits_.data() + first_[i + 1]};
  }
  /// False for leaves, views and discards, and for nodes of other ranks.
  bool takes_time(NodeId node) const { return takes_time_[static_cast<size_t>(node)]; }

 private:
  std::vector<LaneWait> waits_;
  std::vector<size_t> first_;
  std::vector<bool> takes_time_;
};

/// All ranks begin at 0. CommError for a deadlock: the message says where each rank is blocked.
std::vector<Timeline> clock(std::span<const RankTimes> ranks);

/// Chrome's trace format, which Perfetto (https://ui.perfetto.dev) shows: a process per rank, a row per lane. `ranks` are those given
/// to clock(), `names` their labels.
std::string to_trace(std::span<const RankTimes> ranks, std::span<const Timeline> lines, std::span<const std::string> names);

}  // namespace sheaf
