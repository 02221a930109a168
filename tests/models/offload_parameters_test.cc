// Masters and gradients that are stored in the host's memory: the numbers are those of masters on the GPU, bitwise, on every mesh; a GPU
// holds none of them between steps, and in a step as much as plans say.
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/language_model.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/models/offloading.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/models/random_training.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 4;

models::TrainConfig with_offload(models::TrainConfig config, bool offload = true) {
  config.train.offload_parameters = offload;
  return config;
}

void expect_same(const models::TrainConfig& config, int world) {
  expect_same_bits(train_tiny(with_offload(config), world, kSteps, {}, kGpu), train_tiny(config, world, kSteps, {}, kGpu));
}

TEST(OffloadedParameters, GiveTheSameBits) {
  SHEAF_NEEDS_GPU();
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1"})
    for (const auto& [world, dtype] : {std::pair(1, "bf16"), {2, "f32"}, {3, "bf16"}}) {
      SCOPED_TRACE(str(strategy, ' ', world, ' ', dtype));
      models::TrainConfig c = tiny_rank_config(strategy);  // in two micro-batches
      c.train.dtype = dtype;
      expect_same(c, world);
    }
}

TEST(OffloadedParameters, GiveThemInOtherWaysToRunAStep) {
  SHEAF_NEEDS_GPU();
  const auto changed = [](const char* what, auto&& change, int world = 2) {
    SCOPED_TRACE(what);
    models::TrainConfig c = tiny_rank_config("full_shard");
    change(c);
    expect_same(c, world);
  };
  changed("compiled", [](auto& c) { c.train.compile = true; });
  changed("compiled alone", [](auto& c) { c.train.compile = true; }, 1);
  changed("captured", [](auto& c) { c.train.cuda_graph = true; }, 1);
  changed("recomputed", [](auto& c) { c.train.recompute = "block"; });
  changed("all that can be", [](auto& c) {
    c.train.recompute = "block";
    c.train.offload_activations = c.train.offload_optimizer = true;
  }, 1);
  changed("all that can be, compiled", [](auto& c) {
    c.model.layers = 6;
    c.train.compile = true;
    c.train.recompute = "block";
    c.train.offload_activations = c.train.offload_optimizer = true;
  }, 1);
  changed("f16", [](auto& c) { c.train.dtype = "f16"; });
  changed("sums in bf16", [](auto& c) { c.sharding.reduce_dtype = "bf16"; });
  changed("sent in int8", [](auto& c) { c.sharding.reduce_dtype = "int8", c.sharding.gather_int8 = true; });
  changed("muon", [](auto& c) { c.train.optimizer = "muon"; });
  changed("muon alone", [](auto& c) { c.train.optimizer = "muon"; }, 1);
  changed("adapters", [](auto& c) { c.model.lora_rank = 2, c.train.dtype = "bf16"; });
  changed("adapters alone", [](auto& c) { c.model.lora_rank = 2, c.train.dtype = "bf16"; }, 1);
  changed("nothing ahead", [](auto& c) { c.sharding.prefetch_bytes = 0; }, 1);
}

/// The numbers of a training configuration on GPUs, and its memory.
struct Trained {
  std::vector<float> numbers;
  Values parameters;
  std::vector<Peak> peaks;
  std::string refusal;
};

Trained train(const Way& way) {
  const models::TrainConfig& c = way.config;
  Trained out;
  out.peaks.resize(static_cast<size_t>(way.world));
  std::vector<int32_t> ids(31);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % static_cast<size_t>(c.model.vocab));
  const models::SequentialWindows windows(models::Tokens::from_ids(ids, c.model.vocab, "squares"), c.model.context);
  Whole whole;
  try {
    run_local(way.world, [&](World& w) {
      GpuMemory memory;
      const Peak before = memory.live();
      {
        models::TrainingStep step(c, c.model.vocab, w, kGpu, options_for(c, kF32));
        for (int s = 0; s < kRandomSteps; ++s) {
          memory.reset();
          const auto result = step.run(s, [&](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
            fill_random(c, first, count, inputs, targets);
          });
          const float loss = result.loss.item(), norm = result.grad_norm.item();
          out.peaks[static_cast<size_t>(w.rank())] = memory.peak();
          if (w.rank() == 0) out.numbers.push_back(loss), out.numbers.push_back(norm);
          if (s % 2 == 0) {
            const double evaluated = step.evaluate(windows);
            if (w.rank() == 0) out.numbers.push_back(static_cast<float>(evaluated));
          }
        }
        whole.collect(step.model(), false);
      }
      EXPECT_EQ(memory.live(), before) << "bytes that stay";
    }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1, .device = kGpu});
  } catch (const ConfigError& e) {
    out.refusal = e.what();
  }
  out.parameters = whole.values();
  return out;
}

class RandomOffload : public ::testing::TestWithParam<int> {};

TEST_P(RandomOffload, ChangesNoBit) {
  SHEAF_NEEDS_GPU();
  Draw draw(static_cast<uint64_t>(GetParam()) + 77'000);
  Way way;
  Trained expected;
  do {
    const models::TrainConfig task = drawn_task(draw);
    way = drawn_way(task, draw);
    if (way.config.sharding.strategy == "replicate") way.config.sharding.strategy = "full_shard", way.config.sharding.replicas = 1;
    if (draw.one_in(3)) way.config.train.dtype = "bf16";
    way.config.train.offload_parameters = false;
    if (way.world <= 4) expected = train(way);
  } while (way.world > 4 || !expected.refusal.empty());
  Way offloading = way;
  offloading.config.train.offload_parameters = true;
  const std::string text = to_string(offloading);
  SCOPED_TRACE(text);
  const Trained got = train(offloading);
  EXPECT_EQ(got.refusal, "");
  EXPECT_EQ(got.numbers, expected.numbers);
  EXPECT_EQ(max_difference(got.parameters, expected.parameters), 0.0);
  if (way.config.sharding.memory_budget == 0) {
    EXPECT_EQ(got.peaks, planned(offloading.config, way.world));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomOffload, ::testing::ValuesIn(random_seeds(8)));

TEST(OffloadedParameters, TakeWhatIsPlanned) {
  SHEAF_NEEDS_GPU();
  for (const int world : {1, 3})
    for (const char* dtype : {"f32", "bf16"})
      for (const bool compiled : {false, true}) {
        SCOPED_TRACE(str(world, ' ', dtype, compiled ? " compiled" : ""));
        models::TrainConfig c = tiny_rank_config("full_shard");
        c.train.dtype = dtype;
        c.train.compile = compiled;
        EXPECT_EQ(measured(with_offload(c), world), planned(with_offload(c), world));
      }
}

// The memory needed on a GPU does not depend on the number of blocks.
TEST(OffloadedParameters, LeaveTheDeviceForTheHost) {
  SHEAF_NEEDS_GPU();
  for (const int world : {1, 2})
    for (const char* dtype : {"f32", "bf16"}) {
      const auto peak = [&](int64_t layers) {
        models::TrainConfig c = with_offload(tiny_config());
        c.model.layers = layers;
        c.train.dtype = dtype;
        c.train.recompute = "block";
        c.train.offload_activations = c.train.offload_optimizer = true;
        return planned(c, world)[0];
      };
      const Peak six = peak(6), eight = peak(8);
      EXPECT_LT(eight.device - six.device, 1000) << world << ' ' << dtype;  // tables and scalars
      EXPECT_GT(eight.host - six.host, 50'000) << world << ' ' << dtype;
    }
}

TEST(OffloadedParameters, RestThere) {
  SHEAF_NEEDS_GPU();
  run_local(2, [](World& w) {
    models::TrainingStep step(with_offload(tiny_config()), tiny_config().model.vocab, w, kGpu);
    step.run(0, fill_tiny).loss.item();
    int64_t masters = 0;
    for (const auto& unit : units(step.model()))
      for (const FlatBuffer& b : unit->buffers()) {
        EXPECT_EQ(b.shard.storage()->where(), MemoryKind::host);
        masters += b.shard.local_bytes();
      }
    EXPECT_EQ(GpuMemory().live().host, masters);
  }, {.threads_per_rank = 1, .device = kGpu});
}

// A block's weights are fetched while the previous block is computed, and its gradient is offloaded while the backward computes the next.
// The weights of the last two blocks stay for the backward.
TEST(OffloadedParameters, TheTapeShowsThemComeAheadOfTheirUse) {
  SHEAF_NEEDS_GPU();
  models::TrainConfig c = with_offload(tiny_config());
  c.model.layers = 3;
  for (const int world : {1, 2}) {
    const Tape tape = models::plan_step(c, c.model.vocab, 0, world, 1, "nccl", kGpu).tape;
    std::string seen;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) {
      const Node& n = tape.node(id);
      const std::string op(tape.op_name(n)), path(tape.path(n).substr(0, 8));
      if (!path.starts_with("blocks.") || n.phase == Phase::update) continue;
      if (op == "onload_shard" || op == "offload_gradient") seen += str(op, ' ', path, '\n');
      else if (n.op && tape.kind(n) == OpKind::op && !n.op->of_units && !seen.ends_with(str("computes ", path, '\n')))
        seen += str("computes ", path, '\n');
    }
    const std::string forward = "onload_shard blocks.0\nonload_shard blocks.1\ncomputes blocks.0\nonload_shard blocks.2\ncomputes blocks.1\n";
    if (world == 1) {
      EXPECT_EQ(seen, forward + "computes blocks.2\noffload_gradient blocks.2\nonload_shard blocks.0\n"
                                "computes blocks.1\noffload_gradient blocks.1\ncomputes blocks.0\noffload_gradient blocks.0\n");
    } else {  // a gradient is reduced while one more block is computed, before it is offloaded
      EXPECT_EQ(seen, forward + "computes blocks.2\nonload_shard blocks.0\ncomputes blocks.1\n"
                                "offload_gradient blocks.2\ncomputes blocks.0\noffload_gradient blocks.1\noffload_gradient blocks.0\n");
    }
    for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
    EXPECT_NE(to_json(tape).find("\"lane\":\"copy\""), std::string::npos);
  }
}

// Runs with and without it resume from each other's checkpoints.
TEST(OffloadedParameters, ResumeFromEither) {
  SHEAF_NEEDS_GPU();
  expect_resumes_from_either(tiny_config(), 2, with_offload);
}

// A user-defined loop, in which gradients of two recordings are added up in the host's memory.
TEST(OffloadedParameters, OfALoopOfOnesOwn) {
  SHEAF_NEEDS_GPU();
  for (const int world : {1, 3}) {
    const auto trained = [&](bool offload) {
      Whole whole;
      run_local(world, [&](World& w) {
        const Mesh mesh = w.mesh({{"data", world}});
        const auto model = tiny_model_f64(mesh, {.offload = offload}, kGpu);
        optim::AdamW adamw(*model, {.lr = 0.01});
        for (int64_t s = 0; s < 4; ++s) {
          {
            const TinyBatch batch = tiny_batch(mesh, 4 * s, 4, kGpu);
            Recording recording({.step = s});
            recording.backward(model->loss(batch.tokens, batch.targets, {}));
          }
          for (const auto& unit : units(*model))
            for (const FlatBuffer& b : unit->buffers())
              for (const Tensor& t : {b.shard, b.grad}) EXPECT_EQ(t.storage()->where() == MemoryKind::host, offload);
          if (s % 2 == 0) continue;
          adamw.step();
          if (s == 1) adamw.zero_grad();  // at the end they are compared
        }
        whole.collect(*model, true);
      }, {.threads_per_rank = 1, .device = kGpu});
      return whole.values();
    };
    const Values offloaded = trained(true), expected = trained(false);
    EXPECT_GT(expected.size(), 10u);
    EXPECT_EQ(max_difference(offloaded, expected), 0.0) << world;
  }
}

// With a budget a program fetches less often, also with one rank.
TEST(OffloadedParameters, StayInAProgramThatHasRoomForThem) {
  SHEAF_NEEDS_GPU();
  for (const int world : {1, 2}) {
    models::TrainConfig c = with_offload(tiny_config());
    c.train.compile = true;
    const auto brought = [&] {
      const Tape tape = models::plan_step(c, c.model.vocab, 0, world, 1, "nccl", kGpu).tape;
      EXPECT_TRUE(check_gathers(tape).empty());
      int count = 0;
      for (NodeId id = 0; id < tape.num_nodes(); ++id) count += tape.op_name(tape.node(id)) == "onload_shard";
      return count;
    };
    const int64_t units = c.model.layers + 1;
    EXPECT_EQ(brought(), 2 * units - 3) << world;  // the root's and the last two blocks' only once
    c.sharding.memory_budget = int64_t{1} << 40;
    EXPECT_EQ(brought(), units) << world;
    expect_same(c, world);
  }
}

TEST(OffloadedParameters, GoWithStrategiesThatShard) {
  run_local(1, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}});
    for (const auto& [over, strategy, name] : {std::tuple{mesh, Strategy::replicate, "replicate"}, {Mesh{}, Strategy::full_shard, "none"}})
      try {
        const auto model = models::make_language_model(tiny_config().model, tiny_config().model.vocab);
        shard(*model, over, {.strategy = strategy, .offload = true});
        ADD_FAILURE() << name;
      } catch (const ConfigError& e) {
        EXPECT_EQ(e.what(), str("[shard] offload is for strategies that shard over a mesh, which may be of one rank, not for '", name, "'"));
      }
  });
  models::TrainConfig c = with_offload(tiny_config());
  c.sharding.strategy = "replicate";
  EXPECT_EQ(refusal(1, c), "[train] train.offload_parameters goes with a sharding.strategy that shards, with one rank too, not with replicate");
}

// On a CPU all memory is the host's.
TEST(OffloadedParameters, AreAsOthersOnACpu) {
  const models::TrainConfig c = tiny_config();
  for (const int world : {1, 2}) {
    expect_same_bits(train_tiny(with_offload(c), world, kSteps), train_tiny(c, world, kSteps));
    const auto text = [&](const models::TrainConfig& of) { return to_text(models::plan_step(of, of.model.vocab, 0, world, 1, "shm").tape); };
    EXPECT_EQ(text(with_offload(c)), text(c));
  }
}

}  // namespace
}  // namespace sheaf::testing
