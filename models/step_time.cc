#include "sheaf/models/step_time.h"

#include <algorithm>
#include <map>

#include "sheaf/models/plan.h"

namespace sheaf::models {
namespace {

struct Planned {
  std::vector<int> ranks;
  std::vector<Plan> plans;
  std::vector<RankTimes> times;
  std::vector<Timeline> lines;
};

Planned plan_ranks(const TrainConfig& config, int64_t vocab, int world, const Machine& machine) {
  Planned all;
  const int stages = static_cast<int>(config.sharding.pipeline);
  for (int s = 0; s < stages; ++s) all.ranks.push_back(world / stages * (s + 1) - 1);
  for (const int rank : all.ranks)
    all.plans.push_back(plan_step(config, vocab, rank, world, 1, "nccl", Device::cuda(), &machine));
  for (Plan& plan : all.plans) {
    plan.times.tape = &plan.tape;
    // A captured step is one launch.
    if (config.train.cuda_graph) plan.times.issue_seconds = 0;
    all.times.push_back(plan.times);
  }
  all.lines = clock(all.times);
  return all;
}

}  // namespace

StepTime time_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine) {
  const Planned all = plan_ranks(config, vocab, world, machine);
  StepTime out;
  size_t slowest = 0;
  for (size_t r = 0; r < all.plans.size(); ++r) {
    const Plan& plan = all.plans[r];
    out.peak_bytes = std::max(out.peak_bytes, plan.peak_bytes);
    out.host_bytes = std::max(out.host_bytes, plan.host_bytes);
    out.received = std::max(out.received, plan.times.received);
    if (all.lines[r].seconds > all.lines[slowest].seconds) slowest = r;
  }
  out.seconds = all.lines[slowest].seconds;
  out.computing = all.lines[slowest].computing;
  std::map<std::string, double> waits;
  const Tape& tape = all.plans[slowest].tape;
  for (const Timeline::Wait& wait : all.lines[slowest].waits) waits[tape.op_name(tape.node(wait.of))] += wait.seconds;
  out.waits.assign(waits.begin(), waits.end());
  std::ranges::stable_sort(out.waits, std::greater<>(), [](const auto& w) { return w.second; });
  return out;
}

std::string trace_step(const TrainConfig& config, int64_t vocab, int world, const Machine& machine) {
  const Planned all = plan_ranks(config, vocab, world, machine);
  std::vector<std::string> names;
  for (const int rank : all.ranks) names.push_back(str("rank ", rank));
  return to_trace(all.times, all.lines, names);
}

}  // namespace sheaf::models
