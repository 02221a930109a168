#include "sheaf/autograd/clock.h"

#include <algorithm>
#include <bit>
#include <map>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/core/error.h"

namespace sheaf {
namespace {

constexpr double kUnknown = -1;

// One call of a lane on all ranks that have it here. Starts when the last of them has come, and has its lane and links.
struct Call {
  struct Part {
    int rank;
    NodeId node;
    double ready;  // when it could start but for its lane and its links
  };
  std::vector<Part> parts;
  double end = kUnknown;
};

struct SharedLane {
  std::vector<int> members;  // ranks
  std::vector<Call> calls;
};

class Clock {
 public:
  explicit Clock(std::span<const RankTimes> ranks) : ranks_(ranks), at_(ranks.size()), lines_(ranks.size()) {
    std::map<std::string, int> known;
    for (size_t r = 0; r < ranks.size(); ++r) {
      const RankTimes& times = ranks[r];
      Position& p = at_[r];
      for (const std::string& name : times.lanes) {
        const auto [found, fresh] = known.try_emplace(name, static_cast<int>(lanes_.size()));
        if (fresh) lanes_.emplace_back();
        lanes_[found->second].members.push_back(static_cast<int>(r));
        p.lanes.push_back(found->second);
      }
      p.calls.resize(times.lanes.size());
      p.value_call.resize(times.tape->num_values(), {-1, 0});
      p.ready.resize(times.tape->num_values());
      p.maker.resize(times.tape->num_values(), -1);
      lines_[r].start.resize(times.nodes.size());
      lines_[r].end.resize(times.nodes.size());
    }
  }

  std::vector<Timeline> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < std::ssize(ranks_); ++r)
        while (step(r)) moved = true;
    }
    for (int r = 0; r < std::ssize(ranks_); ++r)
      if (at_[r].next < ranks_[r].tape->num_nodes()) fail_stuck();
    for (int r = 0; r < std::ssize(ranks_); ++r) {
      lines_[r].seconds = at_[r].compute;
      for (const double end : lines_[r].end) lines_[r].seconds = std::max(lines_[r].seconds, end);
    }
    return std::move(lines_);
  }

 private:
  struct Position {
    NodeId next = 0;
    int joining = -1, joining_call = 0;  // of next, issued: the call that what computes waits for
    double host = 0, compute = 0;
    std::vector<int> lanes;  // of RankTimes::lanes, among all
    std::vector<int> calls;  // made so far, by lane
    double link[32] = {};    // busy until
    std::vector<double> ready;
    std::vector<std::pair<int, int>> value_call;  // lane, call that fills a value; -1: none, or it is known when
    std::vector<NodeId> maker;                    // of what is waited for
  };

  // Whether what a call is behind of is known; then it starts.
  bool settle(int lane, size_t index) {
    Call& call = lanes_[lane].calls[index];
    if (call.end != kUnknown) return true;
    if (call.parts.size() < lanes_[lane].members.size()) return false;
    if (index > 0 && !settle(lane, index - 1)) return false;
    // One that waits for ranks does not keep others from its links until they come.
    const bool alone = call.parts.size() == 1;
    double start = index > 0 ? lanes_[lane].calls[index - 1].end : 0, seconds = 0;
    for (const Call::Part& part : call.parts) {
      const NodeTime& time = ranks_[part.rank].nodes[part.node];
      start = std::max(start, part.ready);
      seconds = std::max(seconds, time.travels);
      if (alone) for_links(time, [&](int link) { start = std::max(start, at_[part.rank].link[link]); });
    }
    call.end = start + seconds;
    for (const Call::Part& part : call.parts) {
      if (alone) for_links(ranks_[part.rank].nodes[part.node], [&](int link) { at_[part.rank].link[link] = call.end; });
      lines_[part.rank].start[part.node] = start;
      lines_[part.rank].end[part.node] = call.end;
    }
    return true;
  }
  template <class F>
  static void for_links(const NodeTime& time, F&& f) {
    for (uint32_t bits = time.links; bits; bits &= bits - 1) f(std::countr_zero(bits));
  }

  // When a value is there; kUnknown if that hangs on a rank that has not come so far.
  double ready(int rank, ValueId v) {
    Position& p = at_[rank];
    const auto [lane, call] = p.value_call[v];
    if (lane >= 0) {
      if (!settle(lane, static_cast<size_t>(call))) return kUnknown;
      p.ready[v] = lanes_[lane].calls[call].end;
      p.value_call[v].first = -1;
    }
    return p.ready[v];
  }

  void wait_until(int rank, double moment, NodeId of) {
    Position& p = at_[rank];
    const double from = std::max(p.compute, p.host);
    if (moment <= from) return;
    lines_[rank].waits.push_back({of, moment - from});
    p.compute = moment;
  }

  // One node, if what it needs is known.
  bool step(int rank) {
    Position& p = at_[rank];
    const RankTimes& times = ranks_[rank];
    const Tape& tape = *times.tape;
    if (p.next >= tape.num_nodes()) return false;
    const NodeId id = p.next;
    const Node& n = tape.node(id);
    const NodeTime& time = times.nodes[id];
    const auto inputs = tape.inputs(n);
    Timeline& line = lines_[rank];
    if (n.num_outputs && tape.value(tape.output(n)).view_of >= 0) {  // there when what it views is
      const ValueId of = tape.value(tape.output(n)).view_of, v = tape.output(n);
      p.ready[v] = p.ready[of], p.value_call[v] = p.value_call[of], p.maker[v] = p.maker[of];
      line.start[id] = line.end[id] = p.compute;
      return ++p.next, true;
    }
    if (!time.runs || !n.op || tape.kind(n) == OpKind::discard) {
      line.start[id] = line.end[id] = p.compute;
      return ++p.next, true;
    }
    const bool joins = is_redistribute(n.op) && n.op != &send_op();
    if (p.joining < 0) {
      double last = 0;
      NodeId of = -1;
      for (const ValueId v : inputs) {
        const double moment = ready(rank, v);
        if (moment == kUnknown) return false;
        if (moment > last) last = moment, of = p.maker[v];
      }
      wait_until(rank, last, of);
      if (time.computes > 0 || time.lane >= 0) p.host += times.issue_seconds;
      line.start[id] = std::max(p.compute, time.computes > 0 ? p.host : 0);
      p.compute = line.end[id] = line.start[id] + time.computes;
      line.computing += time.computes;
      int lane = -1, call = 0;
      if (time.lane >= 0) {
        lane = p.lanes[time.lane];
        call = p.calls[time.lane]++;
        auto& calls = lanes_[lane].calls;
        if (std::ssize(calls) <= call) calls.resize(static_cast<size_t>(call) + 1);
        calls[call].parts.push_back({rank, id, std::max(p.compute, p.host)});
        settle(lane, static_cast<size_t>(call));  // links serve those first that are issued first
        if (joins) p.joining = lane, p.joining_call = call;
      }
      for (int o = 0; o < n.num_outputs; ++o) {
        const ValueId v = tape.output(n, o);
        p.ready[v] = p.compute;
        p.value_call[v] = {lane, call};
        p.maker[v] = id;
      }
    }
    if (p.joining >= 0) {  // what computes waits at once
      if (!settle(p.joining, static_cast<size_t>(p.joining_call))) return false;
      wait_until(rank, lanes_[p.joining].calls[p.joining_call].end, id);
      p.joining = -1;
    }
    return ++p.next, true;
  }

  [[noreturn]] void fail_stuck() const {
    std::string message;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const Tape& tape = *ranks_[r].tape;
      if (at_[r].next >= tape.num_nodes()) continue;
      const Node& n = tape.node(at_[r].next);
      message += str(message.empty() ? "" : "; ", "rank ", r, " in ", tape.op_name(n), " (", path_label(tape.path(n)), ", node ",
                     at_[r].next, ')');
    }
    fail<CommError>("[clock] ranks wait for each other for ever: ", message);
  }

  std::span<const RankTimes> ranks_;
  std::vector<SharedLane> lanes_;
  std::vector<Position> at_;
  std::vector<Timeline> lines_;
};

}  // namespace

std::vector<Timeline> clock(std::span<const RankTimes> ranks) { return Clock(ranks).run(); }

}  // namespace sheaf
