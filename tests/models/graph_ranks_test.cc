// Captured steps of a rank that communicates over NCCL, here EchoNccl: gathers and reductions on their own lanes, prefetched and joined in
// the graph, have the bits of eager steps.
#include <gtest/gtest.h>

#include "sheaf/tests/distributed/echo_nccl.h"
#include "sheaf/tests/distributed/nccl_job.h"
#include "sheaf/tests/distributed/thread_nccl.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

struct OneRank {
  std::vector<float> losses, norms, weights;
  std::vector<double> evaluations;
};

struct Ranks {
  int number;
  const char* strategy;
  int replicas = 1, tensor = 1, context = 1;
  bool secondary = false, offload = false, int8 = false;
};

// An echo needs equal shares on all ranks: two ranks share these sequences equally.
constexpr int64_t kContext = 8;
void fill_even(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
  for (int64_t i = 0; i < count * kContext; ++i) {
    inputs[i] = static_cast<int32_t>((first * 5 + i * i) % 13);
    targets[i] = static_cast<int32_t>((first * 5 + (i + 1) * (i + 1)) % 13);
  }
}

TEST(GraphTraining, LanesOfSeveralRanks) {
  SHEAF_NEEDS_GPU();
  std::vector<int32_t> ids(100);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % 13);
  const models::SequentialWindows windows(models::Tokens::from_ids(ids, 13, "squares"), kContext);
  for (const Ranks& ranks : {Ranks{2, "full_shard"}, Ranks{2, "shard_grad_op"}, Ranks{2, "zero1"}, Ranks{2, "replicate"},
                             Ranks{4, "full_shard", 2}, Ranks{4, "full_shard", 1, 2}, Ranks{4, "full_shard", 1, 1, 2},
                             Ranks{4, "full_shard", 2, 1, 1, true},
                             Ranks{2, "full_shard", 1, 1, 1, false, true}, Ranks{2, "full_shard", 1, 1, 1, false, false, true}}) {
    SCOPED_TRACE(str(ranks.strategy, " at ", ranks.number));
    std::vector<OneRank> runs[3];
    for (const int way : {0, 1, 2}) {
      const bool graph = way > 0, compile = way == 2;
      runs[way].resize(static_cast<size_t>(ranks.number));
      models::TrainConfig c = tiny_rank_config(ranks.strategy);
      c.sharding.replicas = ranks.replicas;
      c.sharding.tensor = ranks.tensor;
      c.sharding.secondary = ranks.secondary;
      c.sharding.context = ranks.context;
      c.train.offload_parameters = ranks.offload;
      if (ranks.int8) c.sharding.gather_int8 = true, c.sharding.reduce_dtype = "int8";
      c.model.context = kContext;
      c.train.cuda_graph = graph, c.train.compile = compile;
      EchoNccl nccl;
      nccl::expect_well(nccl::run_job(nccl, [&](World& w) {
        models::TrainingStep step(c, c.model.vocab, w, w.device());
        OneRank& run = runs[way][w.rank()];
        Allocator& memory = *RankContext::current().memory(w.device());
        for (int s = 0; s < 5; ++s) {
          const int64_t allocations = memory.stats().allocations;
          const auto result = step.run(s, fill_even);
          if (graph && s > (compile ? 3 : 2)) {
            EXPECT_EQ(memory.stats().allocations, allocations);
          }
          run.losses.push_back(result.loss.item());
          run.norms.push_back(result.grad_norm.item());
          if (s % 2 == 0) run.evaluations.push_back(step.evaluate(windows));
        }
        run.weights = shards(step.model());
      }, {.ranks = ranks.number}));
    }
    for (int r = 0; r < ranks.number; ++r)
      for (const int way : {1, 2}) {
        SCOPED_TRACE(way == 1 ? "graph" : "graph of a program");
        EXPECT_EQ(runs[way][r].losses, runs[0][r].losses);
        EXPECT_EQ(runs[way][r].norms, runs[0][r].norms);
        EXPECT_EQ(runs[way][r].evaluations, runs[0][r].evaluations);
        EXPECT_EQ(runs[way][r].weights, runs[0][r].weights);
      }
  }
}

// An echo does not know what links should receive: this only tests that they are captured, and joined at the end.
TEST(GraphTraining, LinksBetweenStages) {
  SHEAF_NEEDS_GPU();
  for (const auto& [stages, runs, schedule] :
       {std::tuple{2, 1, "1f1b"}, {3, 1, "1f1b"}, {2, 2, "1f1b"}, {3, 1, "zero_bubble"}, {2, 2, "zero_bubble"}})
    for (const bool compile : {false, true}) {
      SCOPED_TRACE(str(schedule, " of ", stages, " stages of ", runs, compile ? " of a program" : ""));
      models::TrainConfig c = tiny_pipeline(stages);
      c.sharding.pipeline_runs = runs, c.sharding.pipeline_schedule = schedule;
      c.train.cuda_graph = true, c.train.compile = compile;
      EchoNccl nccl;
      nccl::expect_well(nccl::run_job(nccl, [&](World& w) {
        models::TrainingStep step(c, c.model.vocab, w, w.device());
        for (int s = 0; s < 6; ++s) step.run(s, fill_tiny).loss.item();
      }, {.ranks = stages}));
    }
}

TEST(TrainingOnGpus, CollectivesOfTheFirstStepRunInTurn) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  nccl.delays->enqueue_ms = 5;
  nccl::expect_well(nccl::run_job(nccl, [&](World& w) {
    const models::TrainConfig c = tiny_rank_config("full_shard");
    models::TrainingStep step(c, c.model.vocab, w, w.device());
    step.run(0, fill_tiny);
    EXPECT_GT(nccl.delays->enqueued[w.rank()], 10);
    EXPECT_EQ(nccl.delays->most[w.rank()], 1);
    nccl.delays->enqueue_ms = 20;
    step.run(1, fill_tiny);
    EXPECT_GT(nccl.delays->most[w.rank()], 1) << "gathers and reductions beside each other";
  }, {.ranks = 2}));
}

// It launches kernels that no step has.
TEST(TrainingOnGpus, CollectivesOfTheFirstEvaluationRunInTurn) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  nccl::expect_well(nccl::run_job(nccl, [&](World& w) {
    models::TrainConfig c = tiny_rank_config("full_shard");
    c.sharding.tensor = 2;
    c.model.context = kContext;
    models::TrainingStep step(c, c.model.vocab, w, w.device());
    for (int s = 0; s < 2; ++s) step.run(s, fill_even);
    const models::SequentialWindows windows(models::Tokens::from_ids(std::vector<int32_t>(c.train.batch * kContext + 1, 3), 13, "threes"),
                                            kContext);
    w.communicator().barrier("evaluation").sync();
    nccl.delays->enqueue_ms = 20;
    for (const bool first : {true, false}) {
      nccl.delays->most[w.rank()] = 0;
      step.evaluate(windows);
      EXPECT_EQ(nccl.delays->most[w.rank()] > 1, !first) << "a layer's parts are put together beside the next unit's gather";
    }
  }, {.ranks = 4}));
}

// Only neighbours communicate, over links in addition to the axis' lanes.
TEST(TrainingOnGpus, StagesPassMicroBatchesOnOverNccl) {
  SHEAF_NEEDS_GPU();
  const TrainedRun expected = train_tiny(tiny_pipeline(1), 1, 4, {}, Device::cuda());
  for (const auto& [stages, runs, schedule] :
       {std::tuple{3, 1, "1f1b"}, {2, 1, "1f1b"}, {2, 2, "1f1b"}, {3, 1, "zero_bubble"}, {2, 2, "zero_bubble"}}) {
    models::TrainConfig c = tiny_pipeline(stages);
    c.sharding.pipeline_runs = runs, c.sharding.pipeline_schedule = schedule;
    ThreadNccl nccl;
    std::mutex mutex;
    nccl::expect_well(nccl::run_job(nccl, [&](World& w) {
      models::TrainingStep step(c, c.model.vocab, w, w.device());
      std::vector<float> losses, norms;
      for (int s = 0; s < 4; ++s) {
        const auto result = step.run(s, fill_tiny);
        losses.push_back(result.loss.item());
        norms.push_back(result.grad_norm.item());
      }
      std::lock_guard lock(mutex);
      EXPECT_EQ(losses, expected.losses) << w.rank();
      EXPECT_EQ(norms, expected.norms) << w.rank();
    }, {.ranks = stages}));
  }
}

}  // namespace
}  // namespace sheaf::testing
