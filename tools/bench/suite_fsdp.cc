// fsdp: a step at 1, 2 and 4 ranks under every strategy, ranks as processes, against one rank with all threads; the same model and
// the same number of tokens per step over all ranks. On a GPU ranks are threads that share it and receive no faster than over a link
// of a given bandwidth, against the same ranks without a limit: the exposed cost of communication.
//
// memory: the peak of a rank in such a step against a formula for the memory it must hold, and against the plan made before anything
// is allocated. The communicators' staging buffers, whose size does not depend on the model, are in the peak but not in the formula.
// On a GPU ranks are threads that share it, and the peak is compared with the plan's.
#include <algorithm>

#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/init.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/models/plan.h"
#include "sheaf/tools/bench/memory_theory.h"
#include "sheaf/tools/bench/rank_job.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/timed_steps.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

constexpr std::string_view kStrategies[] = {"full_shard", "shard_grad_op", "replicate"};

std::string sharding(std::string_view strategy) {
  return "--sharding.strategy=" + std::string(strategy);
}

int threads_per_rank(const Session& session, int ranks) {
  return std::max(1, session.machine().threads / ranks);
}

// The cases trained in a run, with batches divisible by four ranks.
std::vector<std::string> cases(const Session& session) {
  if (session.options().quick) return {"nanogpt-f32-12x64"};
  return {"nanogpt-f32-12x64", "char-f32-16x256"};
}

Json train_ranks(const Session& session, const std::string& name, std::string_view strategy,
                 int ranks, int steps) {
  return run_ranks(session, {.words = {"train", name, std::string(strategy), std::to_string(steps)},
                             .ranks = ranks,
                             .threads = threads_per_rank(session, ranks),
                             .communicator = ""});
}

void measure_fsdp(Session& session, const std::string& name, std::string_view strategy, int ranks,
                  Line& line) {
  const models::TrainConfig config = training_config(name, {sharding("replicate")});
  World world = solo_world();
  models::TrainingStep alone(config, config.model.vocab, world, Device::cpu());
  const models::FillBatch fill = random_tokens(config);
  int64_t done = 0;
  const auto one = [&] {
    const double begin = now();
    alone.run(done++, fill).loss.item();
    return now() - begin;
  };
  for (int warm = 0; warm < 3; ++warm) one();
  // Starting ranks takes longer than a step of a small model: alternate groups of several steps.
  const Rounds rounds(session.samples(30));
  std::vector<double> peers;
  for (int round = 0; round < rounds.count; ++round) {
    const Json answer = train_ranks(session, name, strategy, ranks, rounds.samples_each);
    line.note = answer.at("kind").as_string();
    for (double s : numbers(answer.at("steps"))) line.samples_s.push_back(s);
    for (int i = 0; i < rounds.samples_each; ++i) peers.push_back(one());
  }
  line.peer = "1 rank, unsharded";
  line.peer_value = quantile(peers, 0.5);
  line.more = {
      {"tokens/s", static_cast<double>(alone.tokens_per_step()) / quantile(line.samples_s, 0.5)}};
}

// GPT-2 124M, 8 sequences per rank, tensor parallelism over `tensor` ranks.
void measure_links(Session& session, int ranks, int tensor, double bytes_per_second, Line& line) {
  std::vector<std::string> more = tiny_model();
  if (!session.options().quick) more = {str("--train.batch=", 8 * ranks)};
  more.push_back(str("--sharding.tensor=", tensor));
  const auto steps = [&](double rate, const char* prefetch_bytes) {
    std::vector<std::string> all = more;
    all.push_back(std::string("--sharding.prefetch_bytes=") + prefetch_bytes);
    return StepsToTime{.config = training_config("gpt2-124m-bf16-512x1024", all),
                       .ranks = ranks,
                       .links = {.bytes_per_second = rate, .threads_per_rank = threads_per_rank(session, ranks), .device = session.device()}};
  };
  const auto timed = time_steps({steps(bytes_per_second, "-1"), steps(0, "-1"), steps(bytes_per_second, "0")}, session.samples(12));
  line.samples_s = timed[0].seconds;
  const double seconds = quantile(line.samples_s, 0.5);
  line.peer = "links without a limit";
  line.peer_value = quantile(timed[1].seconds, 0.5);
  line.more = {{"% of the step exposed", 100 * (1 - line.peer_value / seconds)},
               {"without prefetch", 100 * (1 - line.peer_value / quantile(timed[2].seconds, 0.5))}};
}

void measure_memory(Session& session, const std::string& name, std::string_view strategy, int ranks,
                    Line& line) {
  const models::TrainConfig config = training_config(name, {sharding(strategy)});
  const Json answer = train_ranks(session, name, strategy, ranks, 1);
  const std::vector<double> peaks = numbers(answer.at("peaks"));
  line.note = answer.at("kind").as_string();
  const std::vector<int64_t> planned = models::plan_peaks(
      config, config.model.vocab, ranks, threads_per_rank(session, ranks), line.note);
  line.value = line.p10 = line.p90 = *std::max_element(peaks.begin(), peaks.end());
  line.peer = "theory";
  line.peer_value = theoretical_peak(config, ranks);
  const auto plan = static_cast<double>(*std::max_element(planned.begin(), planned.end()));
  line.more = {{"of theory", line.value / line.peer_value},
               {"of plan", line.value / plan},
               {"staging MiB", answer.at("staging").as_double() / (1 << 20)}};
}

void measure_gpu_memory(Session& session, const std::string& model, std::string_view strategy,
                        int ranks, Line& line) {
  std::vector<std::string> more{sharding(strategy), "--train.batch=16"};
  if (session.options().quick) more = tiny_model(), more.push_back(sharding(strategy));
  more.emplace_back("--train.micro_batches=2");
  const models::TrainConfig config = training_config(model + "-bf16-512x1024", more);
  const auto n = static_cast<size_t>(ranks);
  std::vector<double> peaks(n), reserved(n);
  const LocalOptions options{.threads_per_rank = threads_per_rank(session, ranks),
                             .device = session.device()};
  const auto train = [&](World& world) {
    models::TrainingStep step(config, config.model.vocab, world, world.device());
    const models::FillBatch fill = random_tokens(config);
    Allocator& memory = *RankContext::current().memory(world.device());
    for (int s = 0; s < 3; ++s) {
      memory.reset_peak();
      step.run(s, fill).loss.item();
    }
    const MemoryStats stats = memory.stats();
    const auto rank = static_cast<size_t>(world.rank());
    peaks[rank] = static_cast<double>(stats.peak);
    reserved[rank] = static_cast<double>(stats.reserved);
  };
  run_local(ranks, train, options);
  const std::vector<int64_t> planned = models::plan_peaks(
      config, config.model.vocab, ranks, options.threads_per_rank, "local", Device::cuda());
  line.value = line.p10 = line.p90 = *std::max_element(peaks.begin(), peaks.end());
  line.peer = "plan";
  line.peer_value = static_cast<double>(*std::max_element(planned.begin(), planned.end()));
  const double most = *std::max_element(reserved.begin(), reserved.end());
  line.more = {{"of plan", line.value / line.peer_value},
               {"reserved GiB", most / (1 << 30)},
               {"reserved/live", most / line.value}};
}

}  // namespace

// words: case, strategy, steps. Returns the steps' seconds by rank 0's clock, and every rank's peak in the last step.
Json train_rank(const std::vector<std::string>& words) {
  const models::TrainConfig config = training_config(words.at(0), {sharding(words.at(1))});
  const int steps = std::stoi(words.at(2));
  World world = distributed::init_from_env();
  Json answer;
  world.guard([&] {
    models::TrainingStep step(config, config.model.vocab, world, Device::cpu());
    const models::FillBatch fill = random_tokens(config);
    int64_t done = 0;
    for (int warm = 0; warm < 3; ++warm) step.run(done++, fill).loss.item();
    Communicator& lane = step.mesh().runtime->gather_lane(0);
    std::vector<double> seconds;
    Allocator& memory = *RankContext::current().cpu;
    for (int i = 0; i < steps; ++i) {
      lane.barrier("bench").sync();
      memory.reset_peak();
      const double begin = now();
      step.run(done++, fill).loss.item();
      seconds.push_back(now() - begin);
    }
    std::vector<int64_t> peaks(static_cast<size_t>(world.size()), 0);
    peaks[static_cast<size_t>(world.rank())] = memory.stats().peak;
    lane.all_reduce(peaks.data(), world.size(), kI64, Reduction::sum, "peaks").sync();
    if (world.rank() != 0) return;
    answer.set("kind", world.kind());
    answer.set("staging",
               lane.staging_bytes() + step.mesh().runtime->reduce_lane(0).staging_bytes());
    answer.set("steps", to_json_array(seconds));
    answer.set("peaks", to_json_array(std::vector<double>(peaks.begin(), peaks.end())));
  });
  return answer;
}

void fsdp_suite(Session& session) {
  if (session.on_gpu()) {
    for (int ranks : {2, 4})
      for (int gigabytes : {360, 50})  // NVLink and a fast network
        for (int tensor : {1, 2})
          session.line("fsdp",
                       str("gpt2-124m-bf16-", 8 * ranks, "x1024-", ranks, "-", gigabytes, "GB/s",
                           tensor > 1 ? "-tensor" : ""),
                       Unit::seconds, [&](Line& line) {
                         measure_links(session, ranks, tensor, 1e9 * gigabytes, line);
                       });
    return;
  }
  for (const std::string& name : cases(session))
    for (std::string_view strategy : kStrategies)
      for (int ranks : {1, 2, 4})
        session.line("fsdp", str(name, "-", strategy, "-", ranks), Unit::seconds,
                     [&](Line& line) { measure_fsdp(session, name, strategy, ranks, line); });
}

void memory_suite(Session& session) {
  if (session.on_gpu()) {
    for (const char* model : {"gpt2-124m", "gpt2-1558m"})
      for (std::string_view strategy : kStrategies)
        for (int ranks : {1, 2})
          session.line(
              "memory", str(model, "-bf16-16x1024-", strategy, "-", ranks), Unit::bytes,
              [&](Line& line) { measure_gpu_memory(session, model, strategy, ranks, line); });
    return;
  }
  std::vector<std::string> names = cases(session);
  if (!session.options().quick) names.emplace_back("gpt2-124m-f32-4x64");
  for (const std::string& name : names)
    for (std::string_view strategy : kStrategies)
      for (int ranks : {1, 2, 4}) {
        // A batch of 4 x 64 tokens of the 124M model at 1 and 2 ranks; 4 would need 8 GB.
        if (name.starts_with("gpt2") && ranks > 2) continue;
        session.line("memory", str(name, "-", strategy, "-", ranks), Unit::bytes,
                     [&](Line& line) { measure_memory(session, name, strategy, ranks, line); });
      }
}

}  // namespace sheaf::bench
