// Offloaded state is stored in the host's memory, and nothing else about it differs.
#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/gpu.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/models/offloading.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 5;

models::TrainConfig with_offload(models::TrainConfig config, bool offload = true) {
  config.train.offload_optimizer = offload;
  return config;
}

TEST(OffloadedOptimizer, HasTheSameBits) {
  SHEAF_NEEDS_GPU();
  const auto expect_same = [](const char* optimizer, const char* strategy, const char* how) {
    SCOPED_TRACE(str(optimizer, ' ', strategy, ' ', how));
    models::TrainConfig c = tiny_config();
    c.train.optimizer = optimizer;
    c.sharding.strategy = strategy;
    c.train.compile = how == std::string("compiled");
    c.train.cuda_graph = how == std::string("captured");
    const int world = c.train.cuda_graph ? 1 : 2;
    expect_same_bits(train_tiny(with_offload(c), world, kSteps, {}, kGpu), train_tiny(c, world, kSteps, {}, kGpu));
  };
  for (const char* optimizer : {"adamw", "muon"}) {
    for (const char* strategy : {"full_shard", "zero1", "replicate"}) expect_same(optimizer, strategy, "eager");
    for (const char* how : {"compiled", "captured"}) expect_same(optimizer, "full_shard", how);
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

// Runs with and without it resume from each other's checkpoints.
TEST(OffloadedOptimizer, ResumesFromEither) {
  SHEAF_NEEDS_GPU();
  expect_resumes_from_either(tiny_config(), 1, with_offload);
}

TEST(OffloadedOptimizer, OfSgdToo) {
  SHEAF_NEEDS_GPU();
  const auto train = [](bool offload) {
    Whole whole;
    run_local(2, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 2}});
      const auto model = tiny_model_f64(mesh, {}, kGpu, 5, tiny_config().model);
      optim::SGD sgd(*model, {.lr = 0.1, .momentum = 0.9, .state = {.offload = offload}});
      EXPECT_EQ(RankContext::current().memory(kGpu, MemoryKind::host)->stats().live > 0, offload);
      for (int64_t s = 0; s < 3; ++s) {
        const TinyBatch batch = tiny_batch(mesh, 4 * s, 4, kGpu);
        Recording recording({.step = s});
        recording.backward(model->loss(batch.tokens, batch.targets, {}));
        sgd.step();
        sgd.zero_grad();
      }
      whole.collect(*model, false);
    }, {.threads_per_rank = 1, .device = kGpu});
    return whole.values();
  };
  EXPECT_EQ(max_difference(train(true), train(false)), 0.0);
}

TEST(OffloadedOptimizer, TheTapeSaysSo) {
  SHEAF_NEEDS_GPU();
  const models::TrainConfig c = with_offload(tiny_config());
  const std::string text = to_text(models::plan_step(c, c.model.vocab, 0, 2, 1, "nccl", kGpu).tape);
  EXPECT_NE(text.find("adamw.m of blocks.0 in the host's memory"), std::string::npos) << text;
  EXPECT_EQ(to_text(models::plan_step(c, c.model.vocab, 0, 2, 1, "shm").tape).find("host's"), std::string::npos);
}

// On a CPU all memory is the host's.
TEST(OffloadedOptimizer, IsNothingOnACpu) {
  models::TrainConfig c = tiny_config();
  expect_same_bits(train_tiny(with_offload(c), 2, kSteps), train_tiny(c, 2, kSteps));
  const auto peak = [](const models::TrainConfig& of) { return models::plan_step(of, of.model.vocab, 0, 2, 1, "shm").peak.bytes; };
  EXPECT_EQ(peak(with_offload(c)), peak(c));
}

models::TrainConfig recomputing(bool offload, int64_t layers = 6) {
  models::TrainConfig c = tiny_config();
  c.model.layers = layers;
  c.model.dropout = 0.2;
  c.train.recompute = "block";
  c.train.offload_activations = offload;
  return c;
}

TEST(OffloadedActivations, HaveTheSameBits) {
  SHEAF_NEEDS_GPU();
  for (const auto& [type, dtype] : {std::pair("gpt2", "f32"), {"llama", "f32"}, {"gpt2", "bf16"}})
    for (const int world : {1, 2}) {
      models::TrainConfig c = recomputing(false);
      if (type == std::string("llama")) c.model = tiny_model("llama", 2, 2), c.model.layers = 6;
      c.train.dtype = dtype;
      c.train.micro_batches = 2;
      const TrainedRun expected = train_tiny(c, world, kSteps, {}, kGpu);
      c.train.offload_activations = true;
      for (const char* how : {"eager", "compiled", "captured"}) {
        if ((how == std::string("captured")) != (world == 1)) continue;  // graphs need one GPU per rank
        SCOPED_TRACE(str(type, ' ', dtype, ' ', how));
        c.train.compile = how == std::string("compiled");
        c.train.cuda_graph = how == std::string("captured");
        expect_same_bits(train_tiny(c, world, kSteps, {}, kGpu), expected);
      }
      if (c.model.dropout == 0) continue;
      c.train.recompute = "none", c.train.offload_activations = c.train.compile = c.train.cuda_graph = false;
      expect_same_bits(train_tiny(c, world, kSteps, {}, kGpu), expected);
    }
}

TEST(OffloadedActivations, OfSeveralMicroBatchesUnderWay) {
  SHEAF_NEEDS_GPU();
  models::TrainConfig c = tiny_pipeline(3);
  c.train.recompute = "block";
  const TrainedRun expected = train_tiny(c, 3, kSteps, {}, kGpu);
  c.train.offload_activations = true;
  expect_same_bits(train_tiny(c, 3, kSteps, {}, kGpu), expected);
  EXPECT_EQ(measured(c, 3), planned(c, 3));
}

// The data of two blocks at a time is on the device, however many there are; that of the others is on the host.
TEST(OffloadedActivations, LeaveTheDeviceForTheHostAsPlanned) {
  SHEAF_NEEDS_GPU();
  for (const char* dtype : {"f32", "bf16"})
    for (const bool compiled : {false, true}) {
      SCOPED_TRACE(str(dtype, compiled ? " compiled" : ""));
      const auto peak = [&](bool offload, int64_t layers) {
        models::TrainConfig c = recomputing(offload, layers);
        c.train.dtype = dtype;
        c.train.compile = compiled;
        EXPECT_EQ(measured(c, 1), planned(c, 1));
        c.model.width = 64, c.model.context = 512;  // sizes at which parameters are small compared with activations
        return planned(c, 1)[0];
      };
      const Peak six = peak(true, 6), nine = peak(true, 9), kept_six = peak(false, 6), kept_nine = peak(false, 9);
      const int64_t block = 7 * 512 * 64 * (dtype == std::string("f32") ? 4 : 2);  // a residual stream
      EXPECT_EQ(nine.host - six.host, 3 * block);
      EXPECT_EQ(six.host, 5 * block);
      // Not the whole difference: without these, the peak is elsewhere.
      EXPECT_GT((kept_nine.device - kept_six.device) - (nine.device - six.device), 3 * block / 2);
    }
}

// Every block's activations are offloaded while the next block is computed, and fetched while that is recomputed. Those of the last block
// stay.
TEST(OffloadedActivations, TheTapeShowsThemComeAheadOfTheirUse) {
  SHEAF_NEEDS_GPU();
  const Tape tape = models::plan_step(recomputing(true, 3), tiny_config().model.vocab, 0, 1, 1, "nccl", kGpu).tape;
  std::string seen;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    const std::string op(tape.op_name(n)), path = tape.path(n).substr(0, 8);
    if (op == "onload" || op == "offload" || op == "offloaded") seen += str(op, ' ', path, '\n');
    else if (n.flags & Node::kRecomputed && !seen.ends_with(str("again ", path, '\n'))) seen += str("again ", path, '\n');
  }
  EXPECT_EQ(seen,
            "offload blocks.0\noffloaded blocks.1\noffload blocks.1\noffloaded \n"
            "onload blocks.1\nagain blocks.2\nonload blocks.0\nagain blocks.1\nagain blocks.0\n");
  EXPECT_TRUE(check_types(tape).empty());
  EXPECT_NE(to_text(tape).find("copy lane"), std::string::npos);
  EXPECT_NE(to_json(tape).find("\"lane\":\"copy\""), std::string::npos);
}

// y = f(x), f a recomputed region: derivatives, also second ones, equal those without it.
TEST(OffloadedActivations, AreDifferentiatedTwice) {
  SHEAF_NEEDS_GPU();
  run_local(1, [](World&) {
    const auto derivatives = [](bool region, bool offload) {
      const Tensor x = Tensor::from<double>({0.5, -1, 2}, {3}).to(kGpu);
      Recording recording;
      recording.watch(x);
      Tensor z = x * 0.5 + 1.0, y;
      {
        std::optional<RecomputeScope> scope;
        if (region) scope.emplace(RecomputeOptions{.offload = offload});
        y = tanh(z * z) * z;
      }
      if (region) RecomputeScope next;  // which contains nothing
      const Tensor loss = sum(y * y);
      z = y = Tensor();
      const Tensor dx = recording.gradient(loss, std::span(&x, 1), {.keep = true})[0];
      const Tensor ddx = recording.gradient(sum(dx * dx), std::span(&x, 1))[0];
      int moved = 0;
      for (NodeId id = 0; id < recording.tape().num_nodes(); ++id)
        moved += recording.tape().op_name(recording.tape().node(id)) == std::string_view("onload");
      EXPECT_EQ(moved, offload);
      std::vector<double> out = dx.to_vector<double>(), second = ddx.to_vector<double>();
      out.insert(out.end(), second.begin(), second.end());
      return out;
    };
    const std::vector<double> expected = derivatives(false, false);
    const std::vector<double> offloaded = derivatives(true, true);
    EXPECT_EQ(offloaded, derivatives(true, false));
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(offloaded[i], expected[i], 1e-12 * std::abs(expected[i]));
  }, {.threads_per_rank = 1, .device = kGpu});
}

TEST(OffloadedActivations, OfAForwardThatNobodyDifferentiatesGoNowhere) {
  SHEAF_NEEDS_GPU();
  run_local(1, [](World& w) {
    models::TrainingStep step(recomputing(true), tiny_config().model.vocab, w, kGpu);
    const TinyBatch batch = tiny_batch(step.mesh(), 0, 7, kGpu);
    const int64_t before = RankContext::current().memory(kGpu)->stats().live;
    {
      Recording recording;
      step.model().loss(batch.tokens, batch.targets, {.divide_by = 1});
    }
    EXPECT_EQ(RankContext::current().memory(kGpu, MemoryKind::host)->stats().live, 0);
    EXPECT_EQ(RankContext::current().memory(kGpu)->stats().live, before);
    EXPECT_TRUE(std::isfinite(step.run(0, fill_tiny).loss.item()));
  }, {.threads_per_rank = 1, .device = kGpu});
}

TEST(OffloadedActivations, GoWithRecomputing) {
  models::TrainConfig c = tiny_config();
  c.train.offload_activations = true;
  EXPECT_THROW(models::plan_step(c, c.model.vocab, 0, 1, 1, "shm"), ConfigError);
  // On a CPU all memory is the host's.
  const std::string text = to_text(models::plan_step(recomputing(true), c.model.vocab, 0, 1, 1, "shm").tape);
  EXPECT_EQ(text, to_text(models::plan_step(recomputing(false), c.model.vocab, 0, 1, 1, "shm").tape));
}

}  // namespace
}  // namespace sheaf::testing
