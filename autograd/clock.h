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
};

/// A rank's tape and how long its nodes take.
struct RankTimes {
  const Tape* tape = nullptr;
  std::vector<NodeTime> nodes;
  /// Names of lanes. Ranks with lanes of the same name meet there: each one's first call is the others' first call, and so
  /// on. A name that no other rank has is a lane whose other ranks come at the same moment as this one.
  std::vector<std::string> lanes;
  int64_t received = 0;      ///< bytes, from other ranks
  double issue_seconds = 0;  ///< of the host for each node that does something: what computes cannot start before
};

struct Timeline {
  std::vector<double> start, end;  ///< of each node, in seconds since the step began: on its lane, where it has one
  double seconds = 0;              ///< until all lanes are done
  double computing = 0;            ///< of them the compute lane was at work
  /// The compute lane stood still so long for what a node made.
  struct Wait {
    NodeId of;
    double seconds;
  };
  std::vector<Wait> waits;
};

/// All ranks begin at 0. CommError if ranks wait for each other for ever: the message has where each of them stands.
std::vector<Timeline> clock(std::span<const RankTimes> ranks);

/// Chrome's trace format, which Perfetto (https://ui.perfetto.dev) shows: a process per rank, a row per lane. `ranks` are
/// those that clock() was given, `names` what to call them.
std::string to_trace(std::span<const RankTimes> ranks, std::span<const Timeline> lines, std::span<const std::string> names);

}  // namespace sheaf
