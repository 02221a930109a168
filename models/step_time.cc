#include "sheaf/models/step_time.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "sheaf/models/plan.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/models/stage_cut.h"

namespace sheaf::models {
namespace {

// A turn's nodes depend on its neighbours: the next may still have what one has gathered, and prefetching looks ahead.
struct Kind {
  int kind;
  int earlier;       // turns of its kind, up to two: the third one gets back what these have sent
  bool first, last;  // of its kind and run
  int64_t run;
  int before, behind;  // kinds of its neighbours, and whether they belong to another run; -1: none
  int before_of_run;   // kind of the last one of its run
  auto operator<=>(const Kind&) const = default;
};

std::vector<Kind> kinds_of(const std::vector<Turn>& turns) {
  int64_t micro_batches = 0;
  for (const Turn& turn : turns) micro_batches = std::max(micro_batches, turn.micro_batch + 1);
  std::vector<Kind> out;
  std::map<int64_t, int> last_of_run;
  std::map<int, int> of_kind;
  for (size_t i = 0; i < turns.size(); ++i) {
    const Turn& turn = turns[i];
    const int before_of_run = std::exchange(last_of_run.try_emplace(turn.run, -1).first->second, turn.kind);
    const auto beside = [&](size_t other) {
      return other < turns.size() ? 2 * turns[other].kind + (turns[other].run != turn.run) : -1;
    };
    out.push_back({turn.kind, std::min(2, of_kind[turn.kind]++), turn.micro_batch == 0, turn.micro_batch + 1 == micro_batches, turn.run,
                   beside(i - 1), beside(i + 1), before_of_run});
  }
  return out;
}

// Whether two stretches of a tape take the same time, with the same waits.
bool alike(const RankTimes& times, const LaneWaits& waits, Stretch a, Stretch b) {
  const auto skip = [&](Stretch& s) {
    while (s.begin < s.end && !waits.takes_time(s.begin)) ++s.begin;
    return s.begin < s.end;
  };
  for (;; ++a.begin, ++b.begin) {
    const bool more = skip(a);
    if (skip(b) != more) return false;
    if (!more) return true;
    const auto i = static_cast<size_t>(a.begin), j = static_cast<size_t>(b.begin);
    if (!(times.nodes[i] == times.nodes[j]) || !std::ranges::equal(waits.of(a.begin), waits.of(b.begin))) return false;
  }
}

// The turns of a planned rank, to be rearranged.
class Turns {
 public:
  Turns(const Plan& plan, const RankTimes& times, const std::vector<Turn>& turns)
      : turns_(turns), nodes_(plan.tape.num_nodes()) {
    repeat_ = !plan.turns.empty();
    if (!repeat_) return;  // a program
    begin_ = plan.turns.front(), end_ = plan.turns.back();
    const LaneWaits waits(times);
    const std::vector<Kind> kinds = kinds_of(turns);
    for (size_t i = 0; i < kinds.size(); ++i) {
      const Stretch here{plan.turns[i], plan.turns[i + 1]};
      const auto [found, fresh] = known_.try_emplace(kinds[i], here);
      repeat_ = repeat_ && (fresh || alike(times, waits, found->second, here));
    }
    other_block_ = {end_, end_};
    std::string_view last;
    for (NodeId id = end_; id < nodes_; ++id) {  // the last one: sums begin with the first
      const Node& n = plan.tape.node(id);
      const auto inputs = plan.tape.inputs(n);
      const std::string_view block = block_in(plan.tape.path(n));
      if (block.empty() || inputs.empty() || !plan.tape.type(inputs[0]).layout.is_elsewhere() || !waits.takes_time(id)) continue;
      other_block_ = {block == last ? other_block_.begin : id, id + 1};
      last = block;
    }
  }

  // The stretches of the tape that form one with the requested turns, and with `more_blocks` more blocks in other stages. Empty if
  // one is missing, or if turns that should be alike are not.
  std::vector<Stretch> as(const std::vector<Turn>& wanted, int64_t more_blocks) const {
    if (wanted == turns_ && more_blocks == 0) return {{0, nodes_}};
    std::vector<Stretch> order = {{0, begin_}};
    if (wanted == turns_) {
      order.push_back({begin_, end_});
    } else if (!repeat_) {
      return {};
    } else {
      for (const Kind& kind : kinds_of(wanted)) {
        const auto found = known_.find(kind);
        if (found == known_.end()) return {};
        order.push_back(found->second);
      }
    }
    order.push_back({end_, other_block_.begin});
    for (int64_t i = 0; i < more_blocks; ++i) order.push_back(other_block_);
    order.push_back({other_block_.begin, nodes_});
    return order;
  }

 private:
  // "blocks.3" of "blocks.3.moe.experts"; "" for a path in no block.
  static std::string_view block_in(std::string_view path) {
    const size_t number = path.find_first_of("0123456789");
    return number == path.npos ? "" : path.substr(0, path.find('.', number));
  }

  std::vector<Turn> turns_;
  NodeId begin_ = 0, end_ = 0, nodes_;
  std::map<Kind, Stretch> known_;
  bool repeat_;
  Stretch other_block_{0, 0};  // where the update handles other stages' blocks: norms are of all gradients
};

// The shortened step planned instead of a whole stage's: as many turns as needed to have all kinds of them, with as many
// micro-batches at once as the stage holds, and only as much of the other stages as it interacts with. Its tape has what it receives
// and sends and, before and after it, one block whose turns are next to its own and one that causes its own to be gathered.
struct Shorter {
  TrainConfig config;
  int world, stage;  // of the shortened plan
  StandIn stand_in;
  int64_t blocks_left_out = 0;
};

class Stages {
 public:
  Stages(const TrainConfig& config, int world, const StageCut& cut, Planning planning)
      : config_(config), world_(world), stages_(static_cast<int>(config.sharding.pipeline)), ranks_(world / stages_),
        runs_(config.sharding.pipeline_runs), cut_(cut),
        // A program takes its memory from one arena, in which blocks are placed where there is room. Invalid configurations are
        // refused unshortened.
        shorter_(planning == Planning::shorter && !config.train.compile && world % stages_ == 0 &&
                 (runs_ == 1 || config.train.micro_batches % stages_ == 0)) {}

  int count() const { return stages_; }
  // Of each stage, neighbours.
  int ranks() const { return ranks_; }
  std::vector<Turn> turns(int stage) const { return turns(stage, config_.train.micro_batches); }
  // Whether two stages have the same tape, except for their turns. With deferred weight gradients, it is not known which one holds
  // the most.
  bool same(int a, int b) const {
    return a == b || (leaves_blocks_out() && role(a) == role(b) && config_.sharding.pipeline_schedule == "1f1b");
  }

  // With all turns, or with fewer.
  Shorter in_place_of(int stage, bool all_turns) const {
    Shorter s{.config = config_, .world = world_, .stage = stage, .stand_in = {}};
    auto& train = s.config.train;
    if (!all_turns && has_fewer_turns()) {
      const int64_t rows = train.batch / train.micro_batches;
      train.micro_batches = std::min(train.micro_batches, enough_micro_batches(stage));
      train.batch = rows * train.micro_batches;
    }
    s.stand_in.turns = turns(stage, train.micro_batches);
    if (!leaves_blocks_out()) return s;
    const Role r = role(stage);
    s.stage = r.stage;
    s.stand_in.blocks = r.blocks;
    const auto count = static_cast<int>(std::ssize(r.blocks) / runs_);
    s.world = ranks_ * count;
    s.config.sharding.pipeline = count;
    s.config.model.layers = std::accumulate(r.blocks.begin(), r.blocks.end(), int64_t{0});
    s.blocks_left_out = config_.model.layers - s.config.model.layers;
    return s;
  }
  // Micro-batches of the same size, as far as their number divides the batch.
  bool has_fewer_turns() const {
    return shorter_ && config_.train.micro_batches > 0 && config_.train.batch % config_.train.micro_batches == 0;
  }

 private:
  // A mixture's load-balancing loss is passed from each block to the last stage. Blocks that see all keys differ from those with a
  // window or a state, those without positions from those with them, and blocks with an MLP from those with a mixture. With int8
  // reduction each of the stages sums a part of the parameters that all of them have.
  bool leaves_blocks_out() const {
    if (config_.sharding.reduce_dtype == "int8") return false;
    if ((config_.model.window || config_.model.linear_key_heads) && config_.model.full_attention_every) return false;
    if (config_.model.nope_every > 0) return false;
    if (config_.model.experts > 0 && config_.model.dense_layers > 0) return false;
    if (!shorter_ || stages_ == 1 || (config_.model.experts > 0 && (config_.model.aux_loss != 0 || config_.model.router_z_loss != 0))) return false;
    int64_t longest = 0;
    for (int64_t i = 0; i < cut_.num_runs(); ++i) longest = std::max(longest, cut_.begin(i + 1) - cut_.begin(i));
    return runs_ == 1 || runs_ * (longest + 2 * kSeen) < config_.model.layers;
  }
  // In a shorter pipeline: which stage it is, and the blocks in each run of each stage.
  struct Role {
    int stage;
    std::vector<int64_t> blocks;
    bool operator==(const Role&) const = default;
  };
  static constexpr int64_t kSeen = 2;    // blocks on either side
  static constexpr int kNeighbours = 3;  // of a ring: the stage before, its own, and the next
  Role role(int stage) const {
    const int64_t layers = config_.model.layers;
    if (runs_ == 1) {
      const int64_t begin = cut_.begin(stage), end = cut_.begin(stage + 1);
      Role r{.stage = begin > 0, .blocks = {}};
      for (const int64_t blocks : {std::min(kSeen, begin), end - begin, std::min(kSeen, layers - end)})
        if (blocks > 0) r.blocks.push_back(blocks);
      return r;
    }
    const int ring = std::min(stages_, kNeighbours);
    Role r{.stage = stage == 0 ? 0 : stage + 1 == stages_ ? ring - 1 : 1, .blocks = {}};
    for (int64_t run = 0; run < runs_; ++run)
      for (int s = 0; s < ring; ++s)
        r.blocks.push_back(s == r.stage ? cut_.begin(run * stages_ + stage + 1) - cut_.begin(run * stages_ + stage) : kSeen);
    return r;
  }
  // Enough to have turns of every kind. With one run, each turn is between the same two except at the beginning and the end; with
  // several, as many micro-batches as there are stages pass through together, and the surroundings of a turn repeat with the next
  // group of them.
  int64_t enough_micro_batches(int stage) const {
    const int64_t ahead = config_.sharding.pipeline_schedule == "1f1b" ? stages_ - stage : stages_ + 2;
    return runs_ == 1 ? std::min<int64_t>(ahead, config_.train.micro_batches) + 3 : 3 * stages_;
  }
  std::vector<Turn> turns(int stage, int64_t micro_batches) const {
    return turns_of(config_, stage, stages_, micro_batches);
  }

  const TrainConfig& config_;
  const int world_, stages_, ranks_;
  const int64_t runs_;
  const StageCut cut_;
  const bool shorter_;
};

struct Planned {
  std::deque<Plan> plans;        // times refer to their tapes
  std::vector<int> ranks;        // one of each stage
  std::vector<RankTimes> times;  // of these
  int64_t peak_bytes = 0, host_bytes = 0;
  // An outer step's share of each step: the slowest rank's.
  double outer_seconds = 0, outer_received = 0;
};

/// The first rank of the island on the most hosts: the slowest, if hosts do not hold whole islands.
int first_rank_of_slowest(int islands, int world, int ranks_per_host) {
  int slowest = 0, most = 0;
  for (int i = 0; i < islands; ++i)
    if (const int first = i * world, hosts = (first + world - 1) / ranks_per_host - first / ranks_per_host; hosts >= most) slowest = first, most = hosts;
  return slowest;
}

// The ranks at this place of each stage; with islands, which compute alike, those of the last, as if they were the slowest's.
Planned plan_ranks(const TrainConfig& given, int64_t vocab, int all_ranks, const Machine& machine, Planning planning, bool first) {
  const TrainConfig config = island_of(given);
  const int islands = static_cast<int>(given.train.islands), world = ranks_of_island("plan", given, all_ranks);
  const Stages stages(config, world, stage_cut(config, vocab), planning);
  const auto n = static_cast<size_t>(stages.count());
  const int place = first ? 0 : stages.ranks() - 1, island = first_rank_of_slowest(islands, world, machine.ranks_per_host);
  Planned all;
  for (int s = 0; s < stages.count(); ++s) all.ranks.push_back(stages.ranks() * s + place);
  all.times.resize(n);
  std::vector<bool> done(n);
  for (int s = 0; s < stages.count(); ++s) {
    for (const bool all_turns : {false, true}) {
      if (done[static_cast<size_t>(s)]) break;
      const Shorter in_place = stages.in_place_of(s, all_turns);
      std::vector<size_t> fresh;
      const auto look = [&](const Plan& plan) {
        if (islands > 1) {
          const auto every = static_cast<double>(given.train.inner_steps);
          const RankTimes outer = times_on(machine, plan.outer,
                                           {.rank = island + all.ranks[static_cast<size_t>(s)],
                                            .offloads_state = config.train.offload_optimizer,
                                            .stages = stages.count()});
          const Timeline line = clock(std::span(&outer, 1))[0];
          all.outer_seconds = std::max(all.outer_seconds, line.seconds / every);
          all.outer_received = std::max(all.outer_received, static_cast<double>(line.received) / every);
        }
        const auto times_of = [&](int stage, const RankTimes* like) {
          return times_on(machine, plan.tape, {.rank = island + all.ranks[static_cast<size_t>(stage)],
                                               .offloads_state = config.train.offload_optimizer, .stages = stages.count(),
                                               .stages_before = stage - in_place.stage, .like = like});
        };
        const RankTimes times = times_of(s, nullptr);
        const Turns turns(plan, times, in_place.stand_in.turns);
        for (int stage = s; stage < stages.count(); ++stage) {
          const auto i = static_cast<size_t>(stage);
          if (done[i] || !stages.same(s, stage)) continue;
          const std::vector<Turn> wanted = stages.turns(stage);
          if (wanted != in_place.stand_in.turns && !stages.has_fewer_turns()) continue;
          std::vector<Stretch> order = turns.as(wanted, in_place.blocks_left_out);
          if (order.empty()) continue;
          all.times[i] = stage == s ? times : times_of(stage, &times);
          all.times[i].order = std::move(order);
          done[i] = true, fresh.push_back(i);
        }
      };
      const int rank = in_place.world * (islands - 1) + stages.ranks() * in_place.stage + place;
      const Plan& plan = all.plans.emplace_back(plan_stand_in(islands_of(in_place.config, islands), vocab, rank, in_place.world * islands,
                                                              in_place.stand_in, look));
      for (const size_t i : fresh) {
        all.times[i].tape = &plan.tape;
        if (config.train.cuda_graph) all.times[i].issue_seconds = 0;  // a captured step is one launch
      }
      // Later stages hold fewer micro-batches.
      all.peak_bytes = std::max(all.peak_bytes, plan.peak.bytes + plan.micro_batch_bytes * (config.train.micro_batches -
                                                                                            in_place.config.train.micro_batches));
      all.host_bytes = std::max(all.host_bytes, plan.host_peak.bytes);
    }
  }
  return all;
}

}  // namespace

StepTime time_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine, Planning planning) {
  const Planned all = plan_ranks(config, vocab, world, machine, planning, false);
  const std::vector<Timeline> lines = clock(all.times);
  StepTime out;
  out.peak_bytes = all.peak_bytes, out.host_bytes = all.host_bytes;
  size_t slowest = 0;
  for (size_t r = 0; r < lines.size(); ++r) {
    out.received = std::max(out.received, lines[r].received);
    if (lines[r].seconds > lines[slowest].seconds * (1 + 1e-12)) slowest = r;  // the first of those that end together
  }
  out.seconds = lines[slowest].seconds + all.outer_seconds;
  out.received += std::llround(all.outer_received);
  out.computing = lines[slowest].computing;
  std::map<std::string, double> waits;
  const Tape& tape = *all.times[slowest].tape;
  for (const Timeline::Wait& wait : lines[slowest].waits) waits[tape.op_name(tape.node(wait.of))] += wait.seconds;
  if (all.outer_seconds > 0) waits["outer step"] = all.outer_seconds;
  out.waits.assign(waits.begin(), waits.end());
  std::ranges::stable_sort(out.waits, std::greater<>(), [](const auto& w) { return w.second; });
  return out;
}

int64_t peak_of_first_ranks(const TrainConfig& config, int64_t vocab, int world, const Machine& machine, Planning planning) {
  return plan_ranks(config, vocab, world, machine, planning, true).peak_bytes;
}

std::string trace_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine) {
  const Planned all = plan_ranks(config, vocab, world, machine, Planning::whole, false);
  std::vector<std::string> names;
  for (const int rank : all.ranks) names.push_back(str("rank ", rank));
  return to_trace(all.times, clock(all.times), names);
}

}  // namespace sheaf::models
