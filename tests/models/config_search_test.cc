// The search for the best training configuration finds what exhaustive search finds.
#include "sheaf/models/config_search.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/kernels/cuda/config.h"
#include "sheaf/models/flops.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

class ConfigSearch : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::kHasCuda) GTEST_SKIP() << "estimates are of GPUs, for which this build has no kernels";
  }
};

constexpr int64_t kVocab = 48;

models::TrainConfig small() {
  models::TrainConfig c = tiny_config();
  c.model = tiny_model("llama", 4, 4);
  c.model.layers = 4;
  c.model.dropout = 0;
  c.train.batch = 8;
  return c;
}

// Slow enough that the choice matters.
Machine machine_with(int64_t memory, int ranks_per_host = 2) {
  Machine m = machine_named("h200");
  m.products = {2e9, 8};
  m.attention_forward = m.attention_backward = {1e9, 8};
  m.f32 = 1;
  m.bytes_per_second = 2e9;
  m.within.bytes_per_second = 3e8, m.between.bytes_per_second = 2e7;
  m.issue_seconds = m.least_seconds = 1e-7;
  m.ranks_per_host = ranks_per_host;
  m.memory = memory;
  return m;
}

// The estimate for every possible configuration, regardless of memory.
std::vector<models::StepTime> times_of_all(const models::TrainConfig& config, int world, const Machine& machine) {
  std::vector<models::StepTime> times;
  for (const int64_t pipeline : {1, 2, 4})
    for (const int64_t tensor : {1, 2, 4})
      for (const int64_t context : {1, 2, 4})
        for (const int64_t replicas : {1, 2})
          for (const bool secondary : {false, true})
            for (const char* strategy : {"full_shard", "shard_grad_op", "zero1"})
              for (const char* recompute : {"none", "selective", "block"})
                for (const auto& [micro_batches, runs] : {std::pair{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {8, 1}, {8, 2}}) {
                  if (pipeline * tensor * context * replicas > world || (runs > 1 && pipeline != 2)) continue;
                  models::TrainConfig c = config;
                  auto& s = c.sharding;
                  s.pipeline = pipeline, s.pipeline_runs = runs, s.tensor = tensor, s.context = context, s.replicas = replicas;
                  s.secondary = secondary, s.strategy = strategy;
                  c.train.recompute = recompute, c.train.micro_batches = micro_batches;
                  for (const char* schedule : {"1f1b", "zero_bubble"})
                    for (const char* comm : {"all_to_all", "all_gather"}) {
                      if (context == 1 && comm == std::string("all_gather")) continue;
                      s.pipeline_schedule = schedule, s.context_comm = comm;
                      try {
                        times.push_back(models::time_step(c, kVocab, world, machine));
                      } catch (const ConfigError&) {
                      }
                    }
                }
  return times;
}

// Where hosts are far apart, and micro-batches few.
TEST_F(ConfigSearch, StagesOfSeveralRunsAreTried) {
  models::TrainConfig c = small();
  c.model.layers = 8;
  c.train.batch = c.train.micro_batches = 8;
  models::ConfigSearchOptions options;
  options.keep = {"sharding.pipeline", "sharding.pipeline_schedule", "train.micro_batches"};
  c.sharding.pipeline = 4;
  const auto fastest_with = [&](bool runs) {
    options.keep.erase("sharding.pipeline_runs");
    if (!runs) options.keep.insert("sharding.pipeline_runs");
    return models::search_configs(c, kVocab, 4, machine_with(int64_t{1} << 40), options).front.front();
  };
  const models::PlannedConfig round = fastest_with(true), once = fastest_with(false);
  EXPECT_EQ(round.config.sharding.pipeline_runs, 2);
  EXPECT_THAT(round.options, HasSubstr("--sharding.pipeline_runs 2"));
  EXPECT_LT(round.time.seconds, 0.95 * once.time.seconds);
}

TEST_F(ConfigSearch, GradientsOfWeightsThatComeLaterAreTried) {
  models::TrainConfig c = small();
  c.model.layers = 8;
  c.train.batch = c.train.micro_batches = 8;
  c.sharding.pipeline = 4;
  models::ConfigSearchOptions options;
  options.keep = {"sharding.pipeline", "sharding.pipeline_runs", "train.micro_batches"};
  const auto fastest = [&] { return models::search_configs(c, kVocab, 4, machine_with(int64_t{1} << 40), options).front.front(); };
  const models::PlannedConfig later = fastest();
  EXPECT_THAT(later.options, HasSubstr("--sharding.pipeline_schedule zero_bubble"));
  options.keep.insert("sharding.pipeline_schedule");
  EXPECT_LT(later.time.seconds, 0.93 * fastest().time.seconds);
  c.sharding.pipeline_schedule = "zero_bubble";
  EXPECT_EQ(later.time.seconds, fastest().time.seconds);
}

// With a head as long as two blocks, stages differ that would be alike by their blocks alone: all of them are tried.
TEST_F(ConfigSearch, StagesBesideALongHeadAreTried) {
  models::TrainConfig c = small();
  c.model.layers = 32, c.model.tie_embeddings = false;
  c.train.batch = c.train.micro_batches = 16;
  const models::FlopsOfParts parts = models::flops_of_parts(c);
  c.model.vocab = std::llround(2.1 * static_cast<double>(c.model.vocab) * parts.block / parts.head);
  models::ConfigSearchOptions options;
  options.keep = {"sharding.tensor", "sharding.context", "sharding.replicas", "sharding.strategy", "train.micro_batches", "train.recompute"};
  const auto tried = [&](int64_t stages, int64_t runs) {
    return std::ranges::any_of(
        models::search_configs(c, c.model.vocab, 8, machine_with(int64_t{1} << 40), options).fitting,
        [&](const models::PlannedConfig& w) { return w.config.sharding.pipeline == stages && w.config.sharding.pipeline_runs == runs; });
  };
  EXPECT_TRUE(tried(8, 1));
  c.sharding.pipeline = 4;
  options.keep.insert("sharding.pipeline");
  EXPECT_TRUE(tried(4, 2));
}

// One long sequence for more ranks than key heads: some are replicated, all equally often. Or ranks gather keys and values.
TEST_F(ConfigSearch, SequencesAreSharedByMoreRanksThanKeyHeads) {
  models::TrainConfig c = small();
  c.model = tiny_model("llama", 12, 2);
  c.train.batch = 1;
  const auto tried = [&](int64_t context, int64_t tensor, int world, const char* comm = "all_to_all") {
    return std::ranges::any_of(models::search_configs(c, kVocab, world, machine_with(int64_t{1} << 40)).fitting, [&](const models::PlannedConfig& w) {
      return w.config.sharding.context == context && w.config.sharding.tensor == tensor && w.config.sharding.context_comm == comm;
    });
  };
  EXPECT_TRUE(tried(6, 1, 6));    // three copies of each
  EXPECT_TRUE(tried(12, 1, 12));  // a copy for each head
  EXPECT_TRUE(tried(6, 2, 12));   // of the one that a rank of the tensor axis has
  EXPECT_FALSE(tried(8, 1, 8)) << "twelve heads are not even shares of eight ranks";
  EXPECT_TRUE(tried(8, 1, 8, "all_gather"));
  EXPECT_TRUE(tried(4, 1, 4));
}

// Nor does the number of key heads limit the tensor-parallel ranks: some are replicated, as parts of heads that are put together.
TEST_F(ConfigSearch, LayersAreSharedByMoreRanksThanKeyHeads) {
  models::TrainConfig c = small();
  c.model = tiny_model("llama", 12, 2);
  c.model.head_dim = 8;
  c.train.batch = 1;
  const auto tried = [&](int64_t context, int64_t tensor, int world) {
    return std::ranges::any_of(
        models::search_configs(c, kVocab, world, machine_with(int64_t{1} << 40, world)).fitting,
        [&](const models::PlannedConfig& w) { return w.config.sharding.context == context && w.config.sharding.tensor == tensor; });
  };
  EXPECT_TRUE(tried(1, 4, 4));
  EXPECT_TRUE(tried(3, 4, 12)) << "the three heads that read a copy";
  EXPECT_FALSE(tried(1, 6, 6)) << "three does not divide a head";
  EXPECT_FALSE(tried(1, 8, 8)) << "twelve heads are not even shares of eight ranks";
}

TEST_F(ConfigSearch, TheFastestIsNearlyThatOfAll) {
  const models::TrainConfig config = small();
  const auto front = models::search_configs(config, kVocab, 4, machine_with(int64_t{1} << 40)).front;
  ASSERT_GT(front.size(), 2u);
  const std::vector<models::StepTime> all = times_of_all(config, 4, machine_with(int64_t{1} << 40));
  for (const models::PlannedConfig* planned : {&front.front(), &front[front.size() / 2], &front.back()}) {
    const int64_t memory = planned->time.peak_bytes;
    const Machine machine = machine_with(memory);
    const models::ConfigSearchResult found = models::search_configs(config, kVocab, 4, machine);
    double best = 1e300;
    for (const models::StepTime& time : all)
      if (time.peak_bytes <= memory) best = std::min(best, time.seconds);
    ASSERT_FALSE(found.front.empty()) << memory;
    EXPECT_GE(found.front[0].time.seconds, best) << memory;
    EXPECT_LE(found.front[0].time.seconds, 1.05 * best) << memory << ' ' << found.front[0].options;
  }
}

void expect_configs_are_what_their_options_say(const models::TrainConfig& config) {
  const Machine machine = machine_with(models::time_step(config, kVocab, 8, machine_with(1)).peak_bytes, 4);
  models::ConfigSearchOptions options;
  options.threads = 2;
  const models::ConfigSearchResult found = models::search_configs(config, kVocab, 8, machine, options);
  ASSERT_GT(found.fitting.size(), 10u);
  ASSERT_GT(found.front.size(), 1u);
  EXPECT_LT(found.fitting.size(), static_cast<size_t>(found.planned));
  for (size_t i = 1; i < found.fitting.size(); ++i) EXPECT_GE(found.fitting[i].time.seconds, found.fitting[i - 1].time.seconds);
  for (const models::PlannedConfig& planned : found.fitting) EXPECT_LE(planned.time.peak_bytes, machine.memory);
  for (size_t i = 0; i < found.front.size(); ++i) {
    const models::PlannedConfig& planned = found.front[i];
    if (i > 0) {
      EXPECT_LT(planned.time.peak_bytes, found.front[i - 1].time.peak_bytes);
    }
    EXPECT_EQ(models::time_step(planned.config, kVocab, 8, machine).seconds, planned.time.seconds) << planned.options;
    int64_t peak = 0;
    for (const int rank : models::ranks_that_hold_most(planned.config, 8))
      peak = std::max(peak, models::plan_step(planned.config, kVocab, rank, 8, 1, "nccl", Device::cuda()).peak.bytes);
    EXPECT_EQ(planned.time.peak_bytes, peak) << planned.options;
  }
  // The search gives the same on one thread.
  const models::ConfigSearchResult again = models::search_configs(config, kVocab, 8, machine);
  ASSERT_EQ(again.fitting.size(), found.fitting.size());
  for (size_t i = 0; i < found.front.size(); ++i) EXPECT_EQ(again.front[i].options, found.front[i].options);
}

TEST_F(ConfigSearch, FindsSortedConfigsThatFit) { expect_configs_are_what_their_options_say(small()); }

TEST_F(ConfigSearch, OfAnIsland) {
  const models::TrainConfig config = models::islands_of(small(), 2);
  expect_configs_are_what_their_options_say(config);
  for (const models::PlannedConfig& planned : models::search_configs(config, kVocab, 8, machine_with(1 << 30)).fitting) {
    EXPECT_EQ(planned.config.train.islands, 2);
    EXPECT_EQ(planned.config.train.batch, 16);
  }
  EXPECT_THAT([&] { models::search_configs(config, kVocab, 5, machine_with(1 << 30)); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("train.islands 2: 5 ranks cannot be divided")));
}

// One rank, with memory for only single sequences, or only if everything is recomputed.
TEST_F(ConfigSearch, TakesAsManyMicroBatchesAsNeeded) {
  models::TrainConfig config = small();
  config.train.batch = 64;
  for (const char* fits : {"none", "selective", "block"})
    for (const int64_t batch : {64, 48}) {
      models::TrainConfig c = config;
      c.train.batch = batch, c.train.micro_batches = batch, c.train.recompute = fits;
      const Machine machine = machine_with(models::time_step(c, kVocab, 1, machine_with(1)).peak_bytes);
      double best = 1e300;
      for (const char* recompute : {"none", "selective", "block"})
        for (const int64_t micro_batches : {8, 16, 32, 48, 64}) {
          if (micro_batches > batch) continue;
          c.train.micro_batches = micro_batches, c.train.recompute = recompute;
          const models::StepTime time = models::time_step(c, kVocab, 1, machine);
          if (time.peak_bytes <= machine.memory) best = std::min(best, time.seconds);
        }
      config.train.batch = batch;
      const models::ConfigSearchResult found = models::search_configs(config, kVocab, 1, machine);
      ASSERT_FALSE(found.fitting.empty()) << fits << ' ' << batch;
      EXPECT_LE(found.fitting[0].time.seconds, best) << fits << ' ' << batch;
    }
}

TEST_F(ConfigSearch, KeepsWhatIsKept) {
  models::TrainConfig config = small();
  config.sharding.tensor = 2;
  config.train.recompute = "block";
  models::ConfigSearchOptions options;
  options.keep = {"sharding.tensor", "train.recompute", "sharding.strategy"};
  for (const models::PlannedConfig& planned : models::search_configs(config, kVocab, 4, machine_with(int64_t{1} << 40), options).fitting) {
    EXPECT_EQ(planned.config.sharding.tensor, 2);
    EXPECT_EQ(planned.config.train.recompute, "block");
    EXPECT_EQ(planned.config.sharding.strategy, config.sharding.strategy);
    EXPECT_THAT(planned.options, HasSubstr("--sharding.tensor 2"));
  }
}

// With 9 blocks the largest of four stages has 3, a third more than its share; with 15 they have 4, 4, 4 and 3.
TEST_F(ConfigSearch, TakesStagesThatAreNearlyEven) {
  models::TrainConfig config = small();
  const auto most_stages = [&](int64_t layers, models::ConfigSearchOptions options) {
    config.model.layers = layers;
    int64_t most = 0;
    for (const models::PlannedConfig& planned : models::search_configs(config, kVocab, 4, machine_with(int64_t{1} << 40), options).fitting)
      most = std::max(most, planned.config.sharding.pipeline);
    return most;
  };
  EXPECT_EQ(most_stages(15, {}), 4);
  EXPECT_EQ(most_stages(9, {}), 2);
  config.sharding.pipeline = 4;
  EXPECT_EQ(most_stages(9, {.keep = {"sharding.pipeline"}}), 4) << "who asks for it gets it";
}

TEST_F(ConfigSearch, CutsThatAreNotEven) {
  models::TrainConfig config = small();
  config.sharding.tensor = 3;
  const models::ConfigSearchOptions options{.keep = {"sharding.tensor"}};
  EXPECT_FALSE(models::search_configs(config, kVocab, 3, machine_with(int64_t{1} << 40), options).fitting.empty());
}

TEST_F(ConfigSearch, SaysWhyThereIsNone) {
  models::TrainConfig config = small();
  config.sharding.pipeline = 2;
  config.sharding.units = "none";
  models::ConfigSearchOptions options;
  options.keep = {"sharding.pipeline"};
  const auto reason = [&](int world) -> std::string {
    try {
      models::search_configs(config, kVocab, world, machine_with(int64_t{1} << 40), options);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(reason(4), HasSubstr("sharding.units none"));
  EXPECT_THAT(reason(3), HasSubstr("3 ranks"));
  const models::ConfigSearchResult none = models::search_configs(small(), kVocab, 4, machine_with(1000));
  EXPECT_TRUE(none.fitting.empty());
  EXPECT_GT(none.least_bytes, 1000);
  // It is enough; less is not.
  EXPECT_FALSE(models::search_configs(small(), kVocab, 4, machine_with(none.least_bytes)).fitting.empty());
  EXPECT_TRUE(models::search_configs(small(), kVocab, 4, machine_with(none.least_bytes - 1)).fitting.empty());
}

TEST_F(ConfigSearch, ShardsExperts) {
  models::TrainConfig config = small();
  config.model = tiny_mixture(1.1);
  config.model.dropout = 0;
  config.train.batch = 10;
  bool shared = false;
  for (const models::PlannedConfig& planned : models::search_configs(config, kVocab, 10, machine_with(int64_t{1} << 40, 10)).fitting)
    shared = shared || planned.config.sharding.experts > 1;
  EXPECT_TRUE(shared);
}

}  // namespace
}  // namespace sheaf::testing
