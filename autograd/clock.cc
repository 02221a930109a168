#include "sheaf/autograd/clock.h"

#include <algorithm>
#include <bit>
#include <map>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/ops/pending_redistribute.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/error.h"

namespace sheaf {
namespace {

constexpr double kUnknown = -1;

// One call of a lane on all of its ranks. It starts when the last of them has arrived and the lane and its links are free.
struct Call {
  struct Part {
    int rank;
    NodeId node;
    double ready;     // when it could start if its lane and links were free
    double last = 0;  // the same for the last of its pieces
  };
  std::vector<Part> parts;
  double start = kUnknown, end = kUnknown;
  int32_t pieces = 1;
};

struct SharedLane {
  std::vector<int> members;  // ranks
  std::vector<Call> calls;
};

// Whether compute waits until the node's own call has finished.
bool joins_its_call(const Node& n) { return is_redistribute(n.op) && n.op != &send_op() && n.op != &start_op() && n.op != &in_pieces_op(); }

// For nodes that move nothing: the value whose memory an output shares; else -1.
ValueId lies_in(const Tape& tape, const Node& n, int output) {
  const Value& v = tape.value(tape.output(n, output));
  if (v.view_of >= 0) return v.view_of;
  return n.op && !n.op->execute && tape.kind(n) == OpKind::redistribute ? v.base : -1;
}

class Clock {
 public:
  explicit Clock(std::span<const RankTimes> ranks) : ranks_(ranks), at_(ranks.size()), lines_(ranks.size()) {
    waits_.reserve(ranks.size());
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
      p.order = times.order;
      if (p.order.empty()) p.order.push_back({0, times.tape->num_nodes()});
      p.next = p.order[0].begin;
      p.leave_empty();
      waits_.emplace_back(times);
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
      if (!at_[r].done()) fail_stuck();
    for (int r = 0; r < std::ssize(ranks_); ++r) {
      lines_[r].seconds = std::max(lines_[r].seconds, at_[r].compute);
    }
    return std::move(lines_);
  }

 private:
  struct Position {
    std::vector<Stretch> order;
    size_t stretch = 0;
    NodeId next = 0;
    bool done() const { return stretch == order.size(); }
    void leave_empty() {
      while (stretch < order.size() && next >= order[stretch].end)
        if (++stretch < order.size()) next = order[stretch].begin;
    }
    bool move_on() { return ++next, leave_empty(), true; }

    int joining = -1, joining_call = 0;  // of next, issued: the call that compute waits for
    double host = 0, compute = 0;
    std::vector<int> lanes;  // maps RankTimes::lanes to lanes_
    std::vector<int> calls;  // issued so far, by lane
    double link[32] = {};    // busy until
  };

  // Computes the start and end of a call, if everything before it is known; returns whether they are known.
  bool settle(int lane, size_t index) {
    Call& call = lanes_[lane].calls[index];
    if (call.end != kUnknown) return true;
    if (call.parts.size() < lanes_[lane].members.size()) return false;
    if (index > 0 && !settle(lane, index - 1)) return false;
    // A call that waits for other ranks does not block its links for other transfers meanwhile.
    const bool alone = call.parts.size() == 1;
    double start = index > 0 ? lanes_[lane].calls[index - 1].end : 0, seconds = 0;
    for (const Call::Part& part : call.parts) {
      const NodeTime& time = ranks_[part.rank].nodes[part.node];
      start = std::max(start, part.ready);
      seconds = std::max(seconds, time.travels);
      if (alone) for_links(time, [&](int link) { start = std::max(start, at_[part.rank].link[link]); });
    }
    call.start = start, call.end = start + seconds;
    for (const Call::Part& part : call.parts) call.end = std::max(call.end, part.last + seconds / call.pieces);
    for (const Call::Part& part : call.parts) {
      if (alone) for_links(ranks_[part.rank].nodes[part.node], [&](int link) { at_[part.rank].link[link] = call.end; });
      lines_[part.rank].start[part.node] = start;
      lines_[part.rank].end[part.node] = call.end;
      lines_[part.rank].seconds = std::max(lines_[part.rank].seconds, call.end);
    }
    return true;
  }
  template <class F>
  static void for_links(const NodeTime& time, F&& f) {
    for (uint32_t bits = time.links; bits; bits &= bits - 1) f(std::countr_zero(bits));
  }

  void wait_until(int rank, double moment, NodeId of) {
    Position& p = at_[rank];
    const double from = std::max(p.compute, p.host);
    if (moment <= from) return;
    lines_[rank].waits.push_back({of, moment - from});
    p.compute = moment;
  }

  // When a node that computes for this long, piece by piece, has finished.
  static double end_of_pieces(const Call& call, const LaneWait& pieces, double start, double computes) {
    double end = start + computes * pieces.own;
    for (int32_t i = 0; i < pieces.pieces; ++i) {
      const double come = call.start + (call.end - call.start) * (i + 1) / pieces.pieces;
      end = std::max(end, come) + computes * (1 - pieces.own) / pieces.pieces;
    }
    return end;
  }

  // Advances by one node, if everything that it needs is known.
  bool step(int rank) {
    Position& p = at_[rank];
    if (p.done()) return false;
    const RankTimes& times = ranks_[rank];
    const NodeId id = p.next;
    const NodeTime& time = times.nodes[id];
    Timeline& line = lines_[rank];
    if (!waits_[rank].takes_time(id)) {
      line.start[id] = line.end[id] = p.compute;
      return p.move_on();
    }
    if (p.joining < 0) {
      double last = 0, behind = 0;
      NodeId of = -1, comes = -1;
      const Call* coming = nullptr;
      LaneWait pieces{};
      for (const LaneWait& wait : waits_[rank].of(id)) {
        const auto [lane, back, of_call, count, own] = wait;
        const int among_all = p.lanes[lane], call = p.calls[lane] - back;
        if (call < 0) continue;  // made in a stretch that is not simulated
        if (!settle(among_all, static_cast<size_t>(call))) return false;
        const Call& waited = lanes_[among_all].calls[call];
        const auto made_by = [&] { return std::ranges::find(waited.parts, rank, &Call::Part::rank)->node; };
        if (of_call) behind = std::max(behind, waited.end);
        else if (count > 0) coming = &waited, pieces = wait, comes = made_by();
        else if (waited.end > last) last = waited.end, of = made_by();
      }
      wait_until(rank, last, of);
      if (time.computes > 0 || time.lane >= 0) p.host += times.issue_seconds;
      line.start[id] = std::max(p.compute, time.computes > 0 ? p.host : 0);
      p.compute = line.end[id] = line.start[id] + time.computes;
      if (coming) {
        const double end = end_of_pieces(*coming, pieces, line.start[id], time.computes);
        if (end > p.compute) line.waits.push_back({comes, end - p.compute});
        p.compute = line.end[id] = std::max(end, p.compute);
      }
      line.computing += time.computes;
      line.received += time.receives;
      if (time.lane >= 0) {
        const int lane = p.lanes[time.lane], call = p.calls[time.lane]++;
        auto& calls = lanes_[lane].calls;
        if (std::ssize(calls) <= call) calls.resize(static_cast<size_t>(call) + 1);
        Call::Part part{rank, id, std::max({p.compute, p.host, behind})};
        if (const int32_t parts = output_pieces(*times.tape, id - 1); parts > 0) {  // the first pieces were sent earlier, as soon as they
                                                                                    // were packed
          const double made = line.end[id] - line.start[id - 1];
          part.last = part.ready;
          part.ready -= made * (parts - 1) / parts;
          calls[call].pieces = parts;
        }
        calls[call].parts.push_back(part);
        settle(lane, static_cast<size_t>(call));  // links serve calls in the order of issue
        if (joins_its_call(times.tape->node(id))) p.joining = lane, p.joining_call = call;
      }
    }
    if (p.joining >= 0) {  // compute waits at once
      if (!settle(p.joining, static_cast<size_t>(p.joining_call))) return false;
      wait_until(rank, lanes_[p.joining].calls[p.joining_call].end, id);
      p.joining = -1;
    }
    return p.move_on();
  }

  [[noreturn]] void fail_stuck() const {
    std::string message;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const Tape& tape = *ranks_[r].tape;
      if (at_[r].done()) continue;
      const Node& n = tape.node(at_[r].next);
      message += str(message.empty() ? "" : "; ", "rank ", r, " in ", tape.op_name(n), " (", path_label(tape.path(n)), ", node ",
                     at_[r].next, ')');
    }
    fail<CommError>("[clock] ranks wait for each other for ever: ", message);
  }

  std::span<const RankTimes> ranks_;
  std::vector<SharedLane> lanes_;
  std::vector<Position> at_;
  std::vector<LaneWaits> waits_;
  std::vector<Timeline> lines_;
};

}  // namespace

LaneWaits::LaneWaits(const RankTimes& rank) {
  const Tape& tape = *rank.tape;
  std::vector<std::pair<int32_t, int32_t>> filled(static_cast<size_t>(tape.num_values()), {-1, 0});  // (lane, call) that fills the value
  std::vector<int32_t> calls(rank.lanes.size()), waited(rank.lanes.size(), -1);                      // calls made so far; the last one
                                                                                                     // waited for
  first_.reserve(static_cast<size_t>(tape.num_nodes()) + 1);
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    first_.push_back(waits_.size());
    const Node& n = tape.node(id);
    const NodeTime& time = rank.nodes[static_cast<size_t>(id)];
    bool views = false;
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId of = lies_in(tape, n, o);
      views = views || of >= 0;
      if (of >= 0) filled[static_cast<size_t>(tape.output(n, o))] = filled[static_cast<size_t>(of)];  // available when that is
    }
    takes_time_.push_back(!views && time.runs && n.op && tape.kind(n) != OpKind::discard);
    if (!takes_time_.back()) continue;
    const bool of_call = time.lane >= 0 && is_unit_gather(tape, n);
    for (const ValueId v : tape.inputs(n)) {
      const auto [lane, call] = filled[static_cast<size_t>(v)];
      if (lane < 0 || call <= waited[static_cast<size_t>(lane)]) continue;
      if (!of_call) waited[static_cast<size_t>(lane)] = call;
      LaneWait& wait = waits_.emplace_back(LaneWait{lane, calls[static_cast<size_t>(lane)] - call, of_call});
      const bool by_rows = v == tape.inputs(n)[0] && detail::row_inputs_of(tape, n), by_heads = n.op->heads && v == tape.inputs(n)[1];
      if (of_call || !(by_rows || by_heads)) continue;
      const IncomingPieces pieces = incoming_pieces(tape, tape.node(tape.value(by_heads ? tape.whole_of(v) : v).producer), by_heads);
      wait.pieces = pieces.calls, wait.own = pieces.own;
    }
    if (time.lane < 0) continue;
    const int32_t call = calls[static_cast<size_t>(time.lane)]++;
    if (joins_its_call(n)) waited[static_cast<size_t>(time.lane)] = call;
    for (int o = 0; o < n.num_outputs; ++o) filled[static_cast<size_t>(tape.output(n, o))] = {time.lane, call};
  }
  first_.push_back(waits_.size());
}

std::vector<Timeline> clock(std::span<const RankTimes> ranks) { return Clock(ranks).run(); }

}  // namespace sheaf
