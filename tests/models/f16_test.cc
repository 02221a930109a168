// Training in f16 with f32 masters and a scaled loss: how close it comes to f32, and that steps that overflow are skipped alike however a
// step is run, cut, stopped and resumed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/async_saver.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/f16_runs.h"

namespace sheaf::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using State = optim::LossScaler::State;

Values gradient(const models::TrainConfig& config, double scale, double divide_by) {
  Whole whole;
  run_local(1, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, Device::cpu());
    const TinyBatch batch = tiny_batch(step.mesh(), 0, config.train.batch);
    optim::LossScaler scaler(Device::cpu(), {.initial = scale});
    Recording recording;
    recording.backward(scaler.scale(step.model().loss(batch.tokens, batch.targets, {.divide_by = divide_by})));
    whole.collect(step.model(), true);
  }, {.threads_per_rank = 1});
  Values out = whole.values();
  for (auto& [name, values] : out)
    for (double& v : values) v *= divide_by / scale;
  return out;
}

// As with a mean over millions of tokens. The purpose of the scale: without it most of that gradient underflows.
TEST(F16, AScaledLossHasTheGradientsOfF32) {
  for (const char* type : {"gpt2", "llama"}) {
    SCOPED_TRACE(type);
    models::TrainConfig f32 = in_f16(type);
    f32.train.dtype = "f32";
    const double tokens = 63, many = 0x1p24;
    const Values exact = gradient(f32, 1, tokens);
    for (const auto& [scale, divide_by] : {std::pair{65536.0, tokens}, {1024.0, tokens}, {0x1p34, many}}) {
      const double error = relative_difference(exact, gradient(in_f16(type), scale, divide_by));
      EXPECT_LT(error, 3e-3) << scale;
      EXPECT_GT(error, 1e-5) << "was anything computed in f16?";
    }
    EXPECT_GT(relative_difference(exact, gradient(in_f16(type), 1, many)), 0.3);
  }
}

TEST(F16, LearnsAsF32Does) {
  for (const char* type : {"gpt2", "llama"})
    for (const int world : {1, 2}) {
      models::TrainConfig f16 = in_f16(type), f32 = f16;
      f32.train.dtype = "f32";
      const TrainedRun half = train_tiny(f16, world, 20), full = train_tiny(f32, world, 20);
      EXPECT_LT(half.losses.back(), half.losses.front() - 0.1f);
      for (size_t i = 0; i < half.losses.size(); ++i)
        EXPECT_NEAR(half.losses[i], full.losses[i], 0.005) << type << " " << i;
      EXPECT_NEAR(half.norms[0], full.norms[0], 0.005 * full.norms[0]);
    }
}

TEST(F16, SkipsAlikeUnderEveryStrategyAndAsAProgram) {
  for (const int world : {1, 3})
    for (const char* optimizer : {"adamw", "muon"}) {
      models::TrainConfig c = at_the_limit();
      c.train.optimizer = optimizer;
      c.train.batch = 6;
      const F16Run expected = train_f16(c, world);
      for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
        for (const bool compile : {false, true}) {
          SCOPED_TRACE(str(strategy, " ", optimizer, " at ", world, compile ? " compiled" : ""));
          c.sharding.strategy = strategy;
          c.train.compile = compile;
          expect_same(train_f16(c, world), expected);
        }
    }
}

TEST(F16, OnEveryKindOfMesh) {
  const auto at = [](const char* type, auto&& set) {
    models::TrainConfig c = at_the_limit(type);
    c.model = tiny_model(type, 6, 2);
    c.train.batch = 6;
    set(c);
    return c;
  };
  for (const models::TrainConfig& c :
       {at("gpt2", [](auto& c) { c.sharding.replicas = 2; }), at("llama", [](auto& c) { c.sharding.context = 2; }),
        at("gpt2", [](auto& c) { c.sharding.tensor = 2; }), at("llama", [](auto& c) { c.sharding.tensor = 2; }),
        at("llama", [](auto& c) { c.sharding.replicas = 2, c.sharding.secondary = true, c.train.recompute = "block"; }),
        at("llama", [](auto& c) { c.model = tiny_mixture(), c.sharding.experts = 2; }),
        at("gpt2", [](auto& c) { c.sharding.pipeline = 2, c.train.micro_batches = 3; }),
        at("llama", [](auto& c) { c.sharding.pipeline = 2, c.sharding.tensor = 2, c.train.micro_batches = 2; })}) {
    const F16Run eager = train_f16(c, 4);
    models::TrainConfig compiled = c, calm = c;
    compiled.train.compile = true;
    expect_same(train_f16(compiled, 4), eager);
    // Where nothing is skipped, results are those of one rank.
    calm.train.loss_scale = 1024, calm.train.loss_scale_interval = 2000;
    const TrainedRun several = train_tiny(calm, 4, kF16Steps);
    calm.sharding = {};
    const TrainedRun one = train_tiny(calm, 1, kF16Steps);
    for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(several.losses[i], one.losses[i], 0.005) << i;
  }
}

TEST(F16, TakesTheBytesOfItsPlan) {
  for (const bool compile : {false, true}) {
    models::TrainConfig c = in_f16();
    c.train.compile = compile;
    expect_planned_tapes(c, 2);
  }
}

// A skipped step, from its tape and its initial values.
TEST(F16, ReplaysASkippedStep) {
  for (const char* optimizer : {"adamw", "muon"})
    run_local(2, [&](World& w) {
      models::TrainConfig c = at_the_limit();
      c.train.loss_scale = 0x1p40;
      c.train.optimizer = optimizer;
      models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
      for (int64_t s = 0; s < 2; ++s) step.run(s, fill_tiny);
      const std::vector<float> before = shards(step.model());
      models::RecordedStep recorded;
      recorded.capture_leaves = true;
      step.run(2, fill_tiny, &recorded);
      EXPECT_EQ(step.scaler()->state(), (State{0x1p37, 0, 0, 3}));
      EXPECT_EQ(shards(step.model()), before);
      const ValueId wanted[] = {recorded.loss};
      replay(recorded.tape, [&](ValueId v) { return recorded.leaves.at(v); }, wanted);
      std::vector<std::string> states;
      for (const auto& [v, copy] : recorded.leaves) {
        const std::string name(recorded.tape.leaf_name(v));
        EXPECT_EQ(copy.to_vector<double>(), recorded.memory.at(v).to_vector<double>()) << name;
        if (name.starts_with("loss_scaler") || name.ends_with("applied_steps")) states.push_back(name);
      }
      EXPECT_THAT(states, ::testing::UnorderedElementsAre("loss_scaler.factor", "loss_scaler.counts", "loss_scaler.found_inf",
                                                          HasSubstr(".applied_steps")));
    }, {.threads_per_rank = 1});
}

// --- checkpoints ---

std::vector<float> bits_of(models::TrainingStep& step) {
  std::vector<float> all = shards(step.model());
  for (const optim::ShardState& shard : step.optimizer().shards())
    for (const Tensor& s : shard.state)
      for (const float x : s.to_vector()) all.push_back(x);
  return all;
}

TEST(F16Checkpoint, ARunThatWasStoppedGoesOnBitForBit) {
  for (const int world : {1, 2})
    for (const char* optimizer : {"adamw", "muon"})
      for (const bool async : {false, true}) {
        SCOPED_TRACE(str(optimizer, " at ", world, async ? " async" : ""));
        const ScratchFolder folder;
        models::TrainConfig c = at_the_limit();
        c.train.optimizer = optimizer;
        c.train.compile = async;
        run_local(world, [&](World& w) {
          models::TrainingStep whole(c, c.model.vocab, w, Device::cpu());
          models::AsyncSaver saver(w);
          for (int64_t s = 0; s < kF16Steps; ++s) {
            if (s == 5) {
              const models::SaveOptions options{.scaler = whole.scaler()};
              if (async) saver.save(folder.path(), s, whole.model(), {&whole.optimizer()}, options);
              else models::save_checkpoint(folder.path(), s, whole.model(), {&whole.optimizer()}, w, options);
              EXPECT_GE(whole.scaler()->state().skipped_steps, 1);
            }
            whole.run(s, fill_tiny);
          }
          saver.finish();
          models::TrainingStep resumed(c, c.model.vocab, w, Device::cpu());
          const auto saved = models::load_checkpoint(folder.path(), resumed.model(), {&resumed.optimizer()}, w,
                                                     {.scaler = resumed.scaler()});
          ASSERT_TRUE(saved);
          for (int64_t s = saved->step; s < kF16Steps; ++s) resumed.run(s, fill_tiny);
          EXPECT_EQ(bits_of(resumed), bits_of(whole));
          EXPECT_EQ(resumed.scaler()->state(), whole.scaler()->state());
          EXPECT_EQ(resumed.optimizer().applied_steps(), whole.optimizer().applied_steps());
          EXPECT_EQ(resumed.optimizer().steps(), kF16Steps);
          EXPECT_GE(whole.scaler()->state().skipped_steps, 3);
        }, {.threads_per_rank = 1});
      }
}

TEST(F16Checkpoint, IsWhatItWasWithoutAScaler) {
  run_local(1, [&](World& w) {
    for (const char* dtype : {"f32", "bf16"}) {
      models::TrainConfig c = tiny_config();
      c.train.dtype = dtype;
      models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
      EXPECT_EQ(step.scaler(), nullptr);
      step.run(0, fill_tiny);
      for (const auto& piece : models::checkpoint_pieces(step.model(), {&step.optimizer()}))
        EXPECT_THAT(piece.name, AllOf(Not(HasSubstr("loss_scale")), Not(HasSubstr("applied"))));
    }
  });
}

std::string load_message(const std::string& folder, models::TrainingStep& step, bool scaler, World& w) {
  try {
    EXPECT_TRUE(models::load_checkpoint(folder, step.model(), {&step.optimizer()}, w, {.scaler = scaler ? step.scaler() : nullptr}));
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "";
}

TEST(F16Checkpoint, ScalersOnOneSideOnlyAreNamed) {
  const ScratchFolder with, without;
  run_local(1, [&](World& w) {
    models::TrainConfig c = at_the_limit();
    models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
    const auto save = [&](const std::string& folder, const optim::LossScaler* scaler) {
      models::save_checkpoint(folder, 1, step.model(), {&step.optimizer()}, w, {.scaler = scaler});
    };
    save(without.path(), nullptr);
    for (int64_t s = 0; s < 4; ++s) step.run(s, fill_tiny);
    save(with.path(), step.scaler());
    EXPECT_THAT(load_message(without.path(), step, true, w), HasSubstr("was saved without a loss scaler: load it without one"));
    EXPECT_THAT(load_message(with.path(), step, false, w),
                HasSubstr("was saved with a loss scaler: load it with one (LoadOptions::scaler)"));
    // Weights alone need none.
    EXPECT_TRUE(models::load_checkpoint(with.path(), step.model(), {}, w));
    // The previous counts are discarded.
    EXPECT_EQ(load_message(without.path(), step, false, w), "");
    EXPECT_EQ(step.optimizer().applied_steps(), 0);
  });
}

}  // namespace
}  // namespace sheaf::testing
