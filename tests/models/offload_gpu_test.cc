// What is offloaded lies in the host's memory, and nothing else about it is different.
#include <gtest/gtest.h>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/gpu.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 5;
const Device kGpu = Device::cuda();

models::TrainConfig with_offload(models::TrainConfig config, bool offload = true) {
  config.train.offload_optimizer = offload;
  return config;
}

struct Peak {
  int64_t device, host;
  bool operator==(const Peak&) const = default;
};

/// Of each rank, in the third step.
std::vector<Peak> measured(const models::TrainConfig& config, int world) {
  std::vector<Peak> peaks(static_cast<size_t>(world));
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, kGpu);
    Allocator &memory = *RankContext::current().memory(kGpu), &host = *RankContext::current().memory(kGpu, MemoryKind::host);
    for (int s = 0; s < 3; ++s) {
      memory.reset_peak(), host.reset_peak();
      step.run(s, fill_tiny).loss.item();
    }
    peaks[static_cast<size_t>(w.rank())] = {memory.stats().peak, host.stats().peak};
  }, {.threads_per_rank = 1, .device = kGpu});
  return peaks;
}

std::vector<Peak> planned(const models::TrainConfig& config, int world) {
  std::vector<Peak> peaks;
  for (int rank = 0; rank < world; ++rank) {
    const models::Plan plan = models::plan_step(config, config.model.vocab, rank, world, 1, "local", kGpu);
    peaks.push_back({plan.peak_bytes, plan.host_bytes});
  }
  return peaks;
}

TEST(OffloadedOptimizer, HasTheSameBits) {
  SHEAF_NEEDS_GPU();
  for (const char* optimizer : {"adamw", "muon"})
    for (const char* strategy : {"full_shard", "zero1", "replicate"})
      for (const char* how : {"eager", "compiled", "captured"}) {
        SCOPED_TRACE(str(optimizer, ' ', strategy, ' ', how));
        models::TrainConfig c = tiny_config();
        c.train.optimizer = optimizer;
        c.sharding.strategy = strategy;
        c.train.compile = how == std::string("compiled");
        c.train.cuda_graph = how == std::string("captured");
        const int world = c.train.cuda_graph ? 1 : 2;
        expect_same_bits(train_tiny(with_offload(c), world, kSteps, {}, kGpu), train_tiny(c, world, kSteps, {}, kGpu));
      }
}

TEST(OffloadedOptimizer, LeavesTheDeviceForTheHostAsPlanned) {
  SHEAF_NEEDS_GPU();
  for (const char* optimizer : {"adamw", "muon"})
    for (const int world : {1, 3}) {
      models::TrainConfig c = tiny_config();
      c.train.optimizer = optimizer;
      const std::vector<Peak> here = measured(c, world), there = measured(with_offload(c), world);
      EXPECT_EQ(here, planned(c, world));
      EXPECT_EQ(there, planned(with_offload(c), world));
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_EQ(here[rank].host, 0);
        EXPECT_GT(there[rank].host, 0);
        EXPECT_EQ(there[rank].device + there[rank].host, here[rank].device) << optimizer << " at " << world;
      }
    }
}

// Of both ways from and to each other.
TEST(OffloadedOptimizer, ResumesFromEither) {
  SHEAF_NEEDS_GPU();
  const models::TrainConfig c = tiny_config();
  const TrainedRun expected = train_tiny(c, 1, 6, {}, kGpu);
  for (const bool first : {false, true}) {
    const ScratchFolder folder;
    std::vector<float> losses;
    const auto run = [&](bool offload, int from, int to) {
      run_local(1, [&](World& w) {
        models::TrainingStep step(with_offload(c, offload), c.model.vocab, w, kGpu);
        if (from > 0) {
          EXPECT_EQ(models::load_checkpoint(folder.path(), step.model().module(), {&step.optimizer()}, w).value().step, from);
        }
        for (int s = from; s < to; ++s) losses.push_back(step.run(s, fill_tiny).loss.item());
        models::save_checkpoint(folder.path(), to, step.model().module(), {&step.optimizer()}, w);
      }, {.threads_per_rank = 1, .device = kGpu});
    };
    run(first, 0, 3);
    run(!first, 3, 6);
    EXPECT_EQ(losses, expected.losses);
  }
}

TEST(OffloadedOptimizer, OfSgdToo) {
  SHEAF_NEEDS_GPU();
  const auto train = [](bool offload) {
    Whole whole;
    run_local(2, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 2}});
      const auto model = tiny_model_f64(mesh, {}, kGpu, 5, tiny_config().model);
      optim::SGD sgd(model->module(), {.lr = 0.1, .momentum = 0.9, .offload = offload});
      EXPECT_EQ(RankContext::current().memory(kGpu, MemoryKind::host)->stats().live > 0, offload);
      for (int64_t s = 0; s < 3; ++s) {
        const TinyBatch batch = tiny_batch(mesh, 4 * s, 4, kGpu);
        Recording recording({.step = s});
        recording.backward(model->loss(batch.tokens, batch.targets, {}));
        sgd.step();
        sgd.zero_grad();
      }
      whole.collect(model->module(), false);
    }, {.threads_per_rank = 1, .device = kGpu});
    return whole.values();
  };
  EXPECT_EQ(max_difference(train(true), train(false)), 0.0);
}

TEST(OffloadedOptimizer, TheTapeSaysSo) {
  SHEAF_NEEDS_GPU();
  const std::string text = to_text(models::plan_step(with_offload(tiny_config()), tiny_config().model.vocab, 0, 2, 1, "nccl", kGpu).tape);
  EXPECT_NE(text.find("adamw.m of blocks.0 in the host's memory"), std::string::npos) << text;
  EXPECT_EQ(to_text(models::plan_step(with_offload(tiny_config()), tiny_config().model.vocab, 0, 2, 1, "shm").tape).find("host's"), std::string::npos);
}

// On a CPU all memory is the host's.
TEST(OffloadedOptimizer, IsNothingOnACpu) {
  models::TrainConfig c = tiny_config();
  expect_same_bits(train_tiny(with_offload(c), 2, kSteps), train_tiny(c, 2, kSteps));
  EXPECT_EQ(models::plan_step(with_offload(c), tiny_config().model.vocab, 0, 2, 1, "shm").peak_bytes, models::plan_step(c, tiny_config().model.vocab, 0, 2, 1, "shm").peak_bytes);
}

}  // namespace
}  // namespace sheaf::testing
