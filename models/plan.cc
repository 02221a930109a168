#include "sheaf/models/plan.h"

#include <optional>

#include "sheaf/autograd/recording.h"
#include "sheaf/core/host_memory.h"
#include "sheaf/core/parallel.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/simulated.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/models/training_step.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {

// With even shards the last rank has the largest parts, on every axis; the first may have values that are on one rank alone. Pipeline
// stages hold different parameters, and are the first axis. On a context axis that gathers keys the last rank's tokens are
// contiguous, and those of the one before it are in two places, which takes more in attention's backward. Of islands the last has the
// largest parts.
std::vector<int> ranks_that_hold_most(const TrainConfig& config, int world) {
  std::vector<int> ranks;
  if (config.train.islands > 1) {
    const int each = ranks_of_island("train", config, world);
    for (const int rank : ranks_that_hold_most(island_of(config), each)) ranks.push_back(world - each + rank);
    return ranks;
  }
  const int stages = static_cast<int>(config.sharding.pipeline);
  for (int s = 0; s < stages; ++s) {
    ranks.push_back(world / stages * s);
    if (world > stages) ranks.push_back(world / stages * (s + 1) - 1);
    if (config.sharding.context > 1 && config.sharding.context_comm == "all_gather")
      ranks.push_back(world / stages * (s + 1) - 1 - static_cast<int>(config.sharding.tensor));
  }
  return ranks;
}

void set_fitted(TrainConfig& config, int64_t blocks) {
  config.train.recompute = blocks == kNoRecompute ? "none" : "selective";
  config.train.recompute_blocks = blocks;
  if (blocks == kNoRecompute) config.train.offload_activations = false;
}

TrainConfig fit_recompute(const TrainConfig& config, int64_t vocab, int world, int threads, const std::string& comm,
                          Device device) {
  if (config.train.recompute != "fit") return config;
  const int64_t budget = config.sharding.memory_budget;
  check<ConfigError>(budget > 0, "[train] train.recompute fit: what to fit into is said by sharding.memory_budget");
  TrainConfig fitted = config;
  fitted.sharding.memory_budget = 0;
  const auto peak = [&](int64_t blocks) {
    std::vector<TrainConfig> steps{fitted};
    set_fitted(steps[0], blocks);
    if (config.train.compile) steps.push_back(steps[0]), steps[0].train.compile = false;  // a program's steps follow eager ones
    int64_t most = 0;
    for (const TrainConfig& c : steps)
      for (const int rank : ranks_that_hold_most(c, world))
        most = std::max(most, plan_step(c, vocab, rank, world, threads, comm, device).peak.bytes);
    return most;
  };
  int64_t fits = num_blocks(config.model), too_few = kNoRecompute - 1;
  if (const int64_t least = peak(fits); least > budget)
    fail<OutOfMemory>("[train] train.recompute fit: with all ", fits, " blocks computed again a step takes ", least, " bytes a rank, ",
                      "and sharding.memory_budget is ", budget);
  while (fits - too_few > 1) {
    const int64_t middle = too_few + (fits - too_few) / 2;
    (peak(middle) <= budget ? fits : too_few) = middle;
  }
  set_fitted(fitted, fits);
  if (config.train.compile) fitted.sharding.memory_budget = budget;
  return fitted;
}

namespace {

struct Who {
  int rank, world, threads;
  const std::string& comm;
  Device device;
};

// With a ledger, or with the peaks' bytes alone, which takes less time.
Plan plan_as(const TrainConfig& config, int64_t vocab, const Who& who, const StandIn& stand_in, bool keeps_ledger,
             const std::function<void(Plan&)>& look) {
  World simulated = distributed::simulated_world(who.rank, who.world, {.threads = who.threads, .comm = who.comm,
                                                                       .hosts = RankContext::current().hosts, .device = who.device});
  Allocator &memory = *RankContext::current().meta, &host = *RankContext::current().meta_host;
  std::optional<MemoryLedger> ledger;
  if (keeps_ledger) ledger.emplace([] { return Recording::current() ? Recording::current()->tape().num_nodes() : -1; });
  TrainingStep step(config, vocab, simulated, Device::meta(), {.stand_in = stand_in});
  const FillBatch nothing = [](int64_t, int64_t, int32_t*, int32_t*) {};
  Plan plan;
  // The first step has no order of gathers yet and prefetches nothing; the optimizer's state may be created in it.
  const int64_t settled = config.train.compile ? 3 : 1;
  for (int64_t s = 0; s < settled; ++s) step.run(s, nothing);
  memory.reset_peak(), host.reset_peak();
  if (ledger) ledger->reset_peak();
  RecordedStep recorded;
  step.run(settled, nothing, &recorded);
  if (ledger) plan.memory = ledger->history(memory);
  if (step.outer()) step.outer_step();  // its peak counts, too, in whichever step it comes
  plan.tape = std::move(recorded.tape);
  plan.turns = std::move(recorded.turns);
  if (ledger) plan.peak = ledger->peak(memory), plan.host_peak = ledger->peak(host);
  else plan.peak.bytes = memory.stats().peak, plan.host_peak.bytes = host.stats().peak;
  plan.parameters = step.num_parameters();
  plan.trained = step.num_trained();
  plan.micro_batch_bytes = step.inputs().bytes_of_micro_batch(0);
  for (const auto& unit : units(step.model()))
    for (const FlatBuffer& b : unit->buffers()) plan.state_bytes += b.shard.local_bytes();
  for (const optim::ShardState& shard : step.optimizer().shards())
    for (const Tensor& state : shard.state) plan.state_bytes += state.local_bytes();
  if (step.outer()) {
    plan.outer_state_bytes = step.outer()->state_bytes();
    plan.state_bytes += plan.outer_state_bytes;
    Recording recording;
    step.outer()->step();
    plan.outer = recording.take();
  }
  look(plan);
  return plan;
}

}  // namespace

Plan plan_step(const TrainConfig& config, int64_t vocab, int rank, int world, int threads, const std::string& comm,
               Device device, const Machine* machine) {
  const TrainConfig fitted = fit_recompute(config, vocab, world, threads, comm, device);
  return plan_as(fitted, vocab, {rank, world, threads, comm, device}, {}, /*keeps_ledger=*/true, [&](Plan& plan) {
    if (machine) plan.times = times_on(*machine, plan.tape, {.rank = rank, .offloads_state = config.train.offload_optimizer});
  });
}

Plan plan_stand_in(const TrainConfig& config, int64_t vocab, int rank, int world, const StandIn& stand_in,
                   const std::function<void(const Plan&)>& look) {
  return plan_as(config, vocab, {rank, world, 1, "nccl", Device::cuda()}, stand_in, /*keeps_ledger=*/false, look);
}

std::vector<int64_t> plan_peaks(const TrainConfig& config, int64_t vocab, int world, int threads,
                                const std::string& comm, Device device) {
  const TrainConfig fitted = fit_recompute(config, vocab, world, threads, comm, device);
  std::vector<int64_t> peaks;
  for (int rank = 0; rank < world; ++rank)
    peaks.push_back(plan_step(fitted, vocab, rank, world, threads, comm, device).peak.bytes);
  return peaks;
}

std::vector<MemoryLedger::Peak> plan_peaks_within(std::chrono::seconds time, const TrainConfig& config, int64_t vocab, int world, int threads,
                                                  const std::string& comm, Device device) {
  const auto until = std::chrono::steady_clock::now() + time;
  std::vector<MemoryLedger::Peak> peaks;
  for (int rank = 0; rank == 0 || (rank < world && std::chrono::steady_clock::now() < until); ++rank)
    peaks.push_back(plan_step(config, vocab, rank, world, threads, comm, device).peak);
  return peaks;
}

void check_memory(const TrainConfig& config, int64_t vocab, const World& world) {
  const int64_t limit = host_memory_limit();
  const bool on_gpu = !world.device().is_cpu();  // whose allocator knows the available memory
  const OptimizationConfig& t = config.train;
  if (on_gpu && !t.offload_optimizer && !t.offload_activations && !t.offload_parameters) return;
  int64_t peak = 0;  // of all ranks: the message is the same on all of them
  std::string held_for;
  const bool copies = t.save_async;  // of rank 0's pieces: it saves all of them
  for (const int rank : ranks_that_hold_most(config, world.size())) {
    const Plan plan = plan_step(config, vocab, rank, world.size(), num_threads(), on_gpu ? "nccl" : std::string(world.kind()), world.device());
    const MemoryLedger::Peak& of_plan = on_gpu ? plan.host_peak : plan.peak;
    const int64_t bytes = of_plan.bytes + (copies ? plan.state_bytes : 0);
    if (bytes > peak) peak = bytes, held_for = to_words(of_plan);
  }
  if (peak <= limit / world.local_size()) return;
  if (on_gpu)
    fail<OutOfMemory>("[train] what is offloaded", copies ? ", with the copy that is saved," : "", " is ", peak, " bytes a rank (",
                      held_for, "), and ", world.local_size(), " run on this host, which may use ", limit, " bytes: take more hosts, or less of ",
                      "train.offload_optimizer, train.offload_activations and train.offload_parameters");
  fail<OutOfMemory>("[train] a step's peak is ", peak, " bytes a rank", copies ? ", the copy that is saved included" : "", " (", held_for,
                    "), and ", world.local_size(), " run on this host, which may use ", limit,
                    " bytes, swap included: take a smaller train.batch, more train.micro_batches, train.recompute block, more hosts or a ",
                    "smaller model (`sheaf tape` prints the peak)");
}

}  // namespace sheaf::models
