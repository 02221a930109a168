// Training in bf16 with f32 masters: what is in bf16 and what is not, how close the gradients are to those of f32, and which guarantees
// stay exact.
#include <cmath>

#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 20;

models::TrainConfig in_bf16() {
  models::TrainConfig c = tiny_config();
  c.train.dtype = "bf16";
  return c;
}

Values first_gradient(const models::TrainConfig& config, int world) {
  Whole whole;
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, Device::cpu());
    const Type type{kI32, {config.train.batch, config.model.context}, Layout(step.mesh().spec, Placement::shard(0))};
    const Tensor tokens = Tensor::empty(type), targets = Tensor::empty(type);
    fill_tiny(type.local_start()[0], tokens.local_shape()[0], tokens.view().as<int32_t>(),
              targets.view().as<int32_t>());
    Recording recording;
    recording.backward(step.model().loss(tokens, targets, {.divide_by = static_cast<double>(tokens.numel())}));
    whole.collect(step.model(), true);
  }, {.threads_per_rank = 1});
  return whole.values();
}

TEST(Bf16, GradientsAreNearThoseOfF32) {
  for (const char* type : {"gpt2", "llama"}) {
    SCOPED_TRACE(type);
    models::TrainConfig f32 = tiny_config(), bf16 = in_bf16();
    f32.model.type = bf16.model.type = type;
    const Values exact = first_gradient(f32, 1), near = first_gradient(bf16, 1);
    const double error = relative_difference(exact, near);
    EXPECT_LT(error, 0.02);
    EXPECT_GT(error, 1e-4) << "was anything computed in bf16?";
  }
}

// Where nothing is gathered, masters are cast once per step; not again after they have changed within a recording.
TEST(Bf16, OneRankCastsItsMastersOnceAStep) {
  models::TrainConfig c = in_bf16();
  c.train.batch = 6, c.train.micro_batches = 2;
  run_local(1, [&](World& w) {
    models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
    const auto casts = [](const Tape& tape) {
      int count = 0;
      for (NodeId id = 0; id < tape.num_nodes(); ++id) count += tape.op_name(tape.node(id)) == "cast_shard";
      return count;
    };
    for (int64_t i = 0; i < 2; ++i) {
      models::RecordedStep recorded;
      step.run(i, fill_tiny, &recorded);
      EXPECT_EQ(casts(recorded.tape), c.model.layers + 1);  // one per unit
    }
    // And cast again once the masters have changed, though it is the same recording.
    const Type type{kI32, {c.train.batch, c.model.context}, Layout(step.mesh().spec, Placement::shard(0))};
    const Tensor tokens = Tensor::empty(type), targets = Tensor::empty(type);
    fill_tiny(0, c.train.batch, tokens.view().as<int32_t>(), targets.view().as<int32_t>());
    const auto loss = [&] { return step.model().loss(tokens, targets, {.divide_by = 1}); };
    const auto value = [](const Tensor& x) { return *x.view().as<float>(); };  // the only rank's share
    Recording recording;
    const Tensor first = loss();
    const float before = value(first);
    recording.backward(first);
    EXPECT_EQ(value(loss()), before);
    optim::SGD(step.model().parameters(), {}).step({.lr = 1e-3});
    EXPECT_NE(value(loss()), before);
    EXPECT_EQ(casts(recording.tape()), 2 * (c.model.layers + 1));
  }, {.threads_per_rank = 1});
}

// Also f16, which reduces in bf16 if told to.
TEST(Bf16, GathersBf16AndReducesF32) {
  for (const auto& [world, dtype, reduced] : {std::tuple{1, kBF16, kF32}, {3, kBF16, kF32}, {1, kF16, kF32}, {3, kF16, kF32},
                                              {1, kBF16, kBF16}, {3, kBF16, kBF16}, {3, kF32, kBF16}})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
      SCOPED_TRACE(str(strategy, " ", dtype, ", reduced in ", reduced, " at ", world));
      models::TrainConfig c = in_bf16();
      c.train.dtype = name(dtype);
      c.sharding.reduce_dtype = name(reduced);
      c.sharding.strategy = strategy;
      run_local(world, [&](World& w) {
        models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
        step.run(0, fill_tiny);
        models::RecordedStep recorded;
        step.run(1, fill_tiny, &recorded);
        const Tape& tape = recorded.tape;
        int gathers = 0, reductions = 0;
        for (NodeId id = 0; id < tape.num_nodes(); ++id) {
          const Node& n = tape.node(id);
          const std::string name = tape.op_name(n);
          if (name == "all_gather") {
            ++gathers;
            EXPECT_EQ(tape.type(tape.inputs(n)[0]).dtype, dtype);
          }
          if (name == "reduce_scatter" || (name == "all_reduce" && n.phase == Phase::backward)) {
            ++reductions;
            EXPECT_EQ(tape.type(tape.inputs(n)[0]).dtype, reduced);
          }
        }
        if (world > 1) {
          EXPECT_GE(reductions, c.model.layers);
          EXPECT_GE(gathers, c.sharding.strategy == "replicate" ? 0 : c.model.layers);
        }
        for (const auto& unit : units(step.model()))
          for (const FlatBuffer& b : unit->buffers()) EXPECT_EQ(b.shard.dtype(), kF32);
        for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.message;
      }, {.threads_per_rank = 1});
    }
}

// A config made by a program, which no command-line parser has checked.
TEST(Bf16, OtherDTypesAreRefused) {
  for (const char* dtype : {"fp16", "f64", "half"}) {
    models::TrainConfig c = tiny_config();
    c.train.dtype = dtype;
    EXPECT_THROW(train_tiny(c, 1, 1), ConfigError) << dtype;
  }
}

// Results that do not depend on the cut of the batch stay bitwise equal: over strategies, prefetch, and ranks against micro-batches.
TEST(Bf16, StrategiesAndMicroBatchesAgreeBitwise) {
  models::TrainConfig c = in_bf16();
  c.train.batch = 6;
  const TrainedRun expected = train_tiny(c, 2, kSteps);
  EXPECT_LT(expected.losses.back(), expected.losses.front() - 0.1f);
  const auto expect_same = [&](const models::TrainConfig& config, int world) {
    const TrainedRun run = train_tiny(config, world, kSteps);
    EXPECT_EQ(run.losses, expected.losses);
    EXPECT_EQ(run.norms, expected.norms);
    EXPECT_EQ(max_difference(run.parameters, expected.parameters), 0.0);
  };
  for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
    SCOPED_TRACE(strategy);
    models::TrainConfig other = c;
    other.sharding.strategy = strategy;
    expect_same(other, 2);
  }
  models::TrainConfig eager = c;
  eager.sharding.prefetch_bytes = 0;
  expect_same(eager, 2);
  models::TrainConfig micro = c;
  micro.train.micro_batches = 2;
  expect_same(micro, 1);
}

}  // namespace
}  // namespace sheaf::testing
