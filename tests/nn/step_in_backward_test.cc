// Steps whose updates happen during the backward: the same bits, and gradients that are freed unit by unit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "sheaf/core/memory_ledger.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/muon.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/parameter_norms.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::for_each_sharding;
using testing::TinyBlock;
using testing::TinyModel;
using testing::token_rows;

std::unique_ptr<optim::Optimizer> make(const std::string& name, nn::Module& model) {
  if (name == "adamw") return std::make_unique<optim::AdamW>(model, optim::AdamWOptions{.weight_decay = 0.1});
  if (name == "sgd") return std::make_unique<optim::SGD>(model, optim::SgdOptions{.momentum = 0.9});
  return std::make_unique<optim::Muon>(model, optim::MuonOptions{.lr = 0.02});
}

struct Way {
  bool in_backward, says_last;
};

/// Everything that three steps compute, as this rank has it.
struct Trained {
  std::vector<double> numbers;
  int64_t steps = 0;
  bool operator==(const Trained&) const = default;
};

Trained train(TinyModel& model, const Mesh& mesh, const std::string& optimizer_name, int micro_batches, Way way) {
  const auto optimizer = make(optimizer_name, model);
  Trained run;
  for (int step = 0; step < 3; ++step) {
    const optim::StepOptions options{.lr = 0.01 * (step + 1)};
    Recording recording({.step = step});
    if (way.in_backward) optimizer->step_in_backward(options);
    for (int micro = 0; micro < micro_batches; ++micro) {
      recording.next_micro_batch(10 * micro);
      const Tensor loss = model.loss(token_rows(mesh, 7, 5, 11, micro), token_rows(mesh, 7, 5, 11, micro + 1), {.divide_by = 35.0 * micro_batches});
      recording.backward(loss, {.last_micro_batch = way.says_last && micro + 1 == micro_batches});
    }
    run.numbers.push_back(grad_norm(model).item<double>());
    optimizer->step(way.in_backward ? optim::StepOptions{} : options);
    optimizer->zero_grad();
  }
  for (const nn::Parameter& p : model.parameters())
    for (const float value : full_parameter(p).to_vector<float>()) run.numbers.push_back(value);
  for (const optim::ShardState& shard : optimizer->shards())
    for (const Tensor& state : shard.state)
      for (const float value : state.to_vector<float>()) run.numbers.push_back(value);
  run.steps = optimizer->steps();
  return run;
}

TEST(StepInBackward, HasTheBitsOfAStepAfterIt) {
  for (const int world : {1, 2, 3})
    for_each_sharding(world, [&](Strategy strategy, nn::UnitPolicy units, int64_t prefetch, const char* what) {
      for (const char* optimizer : {"adamw", "sgd", "muon"})
        for (const int micro_batches : {1, 2}) {
          SCOPED_TRACE(str(what, " on ", world, ", ", optimizer, ", micro-batches ", micro_batches));
          run_local(world, [&](World& w) {
            const auto run = [&](Way way) {
              const Mesh mesh = strategy == Strategy::none ? Mesh{} : w.mesh({{"data", w.size()}});
              TinyModel model;
              model.blocks[0].up.bias.freeze();
              shard(model, mesh, {.units = units, .strategy = strategy, .prefetch_bytes = prefetch});
              materialize(model, Device::cpu(), {.seed = 3});
              return train(model, mesh, optimizer, micro_batches, way);
            };
            const Trained after = run({.in_backward = false, .says_last = true});
            EXPECT_EQ(after.steps, 3);
            EXPECT_TRUE(run({.in_backward = true, .says_last = true}) == after);
            EXPECT_TRUE(run({.in_backward = true, .says_last = false}) == after) << "then step() updates everything";
          });
        }
    });
}

TEST(StepInBackward, SumsOverReplicasFirst) {
  for (const bool secondary : {false, true})
    run_local(4, [&](World& w) {
      const auto run = [&](bool in_backward) {
        const Mesh mesh = w.mesh({{"replica", 2}, {"data", 2}});
        TinyModel model;
        shard(model, mesh, {.axis = "data", .replica_axis = "replica", .secondary = secondary, .units = nn::units_of<TinyBlock>()});
        materialize(model, Device::cpu(), {.seed = 3});
        return train(model, mesh, "adamw", 2, {.in_backward = in_backward, .says_last = true});
      };
      EXPECT_TRUE(run(true) == run(false));
    });
}

// Of one rank, whose gradients are whole: without it all of them are there at the end of the backward.
TEST(StepInBackward, FreesGradientsUnitByUnit) {
  const auto peak = [](bool in_backward, HeldFor held_for) {
    MemoryLedger ledger;
    TinyModel model(/*layers=*/8, 11, 16);
    shard(model, Mesh{}, {.units = nn::units_of<TinyBlock>()});
    materialize(model);
    optim::SGD optimizer(model, {.momentum = 0.9});
    const Tensor tokens = token_rows({}, 1, 2, 11);
    ledger.reset_peak();
    {
      Recording recording;
      const Tensor loss = model.loss(tokens, tokens);
      if (in_backward) optimizer.step_in_backward({.lr = 0.1});
      recording.backward(loss, {.last_micro_batch = true});
      for (const nn::Parameter& p : model.parameters()) {
        const FlatBuffer& buffer = p.unit()->buffers()[0];
        EXPECT_EQ(buffer.grad.defined(), !in_backward);
        EXPECT_EQ(buffer.squares.defined(), in_backward);
      }
      optimizer.step(in_backward ? optim::StepOptions{} : optim::StepOptions{.lr = 0.1});
    }
    const MemoryLedger::Peak at = ledger.peak(*RankContext::current().cpu);
    return held_for == HeldFor::gradients ? at.held_for(HeldFor::gradients) + at.held_for(HeldFor::whole_gradients) : at.bytes;
  };
  TinyModel model(8, 11, 16);
  shard(model, Mesh{}, {.units = nn::units_of<TinyBlock>()});
  materialize(model);
  int64_t all = 0, block = 0;
  for (const auto& unit : nn::distinct_units(model.parameters()))
    for (const FlatBuffer& b : unit->buffers()) all += b.shard.local_bytes(), block = std::max(block, b.shard.local_bytes());
  const int64_t after = peak(false, HeldFor::gradients), during = peak(true, HeldFor::gradients);
  EXPECT_EQ(after, all);
  EXPECT_LE(during, 3 * block) << "the root's, from the head, and a block's";
  EXPECT_LE(peak(true, {}), peak(false, {}) - (all - 3 * block));
}

// What was cast or gathered from the masters before is closed.
TEST(StepInBackward, LaterForwardsReadUpdatedParameters) {
  for (const int world : {1, 2})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::zero1, Strategy::replicate})
      run_local(world, [&](World& w) {
        const auto losses = [&](bool in_backward) {
          const Mesh mesh = w.mesh({{"data", w.size()}});
          TinyModel model;
          shard(model, mesh, {.units = nn::units_of<TinyBlock>(), .strategy = strategy, .compute_dtype = kBF16});
          materialize(model, Device::cpu(), {.seed = 3});
          optim::SGD optimizer(model, {.lr = 1});
          const Tensor tokens = token_rows(mesh, 7, 5, 11), targets = token_rows(mesh, 7, 5, 11, 1);
          Recording recording;
          const Tensor before = model.loss(tokens, targets);
          if (in_backward) optimizer.step_in_backward();
          recording.backward(before, {.last_micro_batch = true});
          if (!in_backward) optimizer.step();
          const Tensor after = model.loss(tokens, targets);
          const Layout everywhere(mesh.spec, Placement::invariant());
          return std::pair(redistribute(before, everywhere).item(), redistribute(after, everywhere).item());
        };
        const auto expected = losses(false);
        EXPECT_NE(expected.first, expected.second);
        EXPECT_EQ(losses(true), expected) << world << " " << static_cast<int>(strategy);
      });
}

template <class E>
void expect_refused(const std::function<void()>& f, const std::string& words) {
  try {
    f();
    ADD_FAILURE() << "not refused: " << words;
  } catch (const E& error) {
    EXPECT_THAT(error.what(), HasSubstr(words));
  }
}

struct One {
  TinyModel model;
  std::optional<optim::AdamW> optimizer;
  One() {
    shard(model, Mesh{}, {.units = nn::units_of<TinyBlock>()});
    materialize(model);
    optimizer.emplace(model);
  }
  Tensor loss() { return model.loss(token_rows({}, 2, 3, 11), token_rows({}, 2, 3, 11, 1)); }
  void backward() {
    Recording recording;
    recording.backward(loss(), {.last_micro_batch = true});
  }
};

TEST(StepInBackward, WhatNeedsAllGradientsIsRefused) {
  One one, direction;
  one.optimizer->step_in_backward();
  one.backward();
  EXPECT_GT(grad_norm(one.model).item<double>(), 0);
  const std::string consumed = "was updated during the backward (Optimizer::step_in_backward)";
  expect_refused<LifetimeError>([&] { clip_grad_norm(one.model, 1.0); }, "[clip_grad_norm] unit 'root' " + consumed);
  const std::vector<nn::Parameter> parameters = one.model.parameters();
  expect_refused<LifetimeError>([&] { grad_norms(parameters); }, "[grad_norms] unit 'root' " + consumed);
  expect_refused<LifetimeError>([&] { full_gradient(one.model.blocks[1].up.weight); }, "[full_gradient] unit 'blocks.1' " + consumed);
  expect_refused<LifetimeError>([&] { gradient_along(one.model, direction.model); }, "[gradient_along] unit 'root' " + consumed);
  expect_refused<LifetimeError>([&] { one.backward(); }, "[backward] unit 'blocks.1' " + consumed);
}

TEST(StepInBackward, EndsWithAStepThatHasNoOptions) {
  One one, other;
  one.optimizer->step_in_backward({.lr = 0.5}), one.backward();
  expect_refused<ConfigError>([&] { one.optimizer->step({.lr = 0.5}); }, "[adamw] this step began with step_in_backward()");
  one.optimizer->step();
  EXPECT_EQ(one.optimizer->steps(), 1);
  one.optimizer->zero_grad();
  // The next one is as usual.
  one.backward(), one.optimizer->step({.lr = 0.25});
  other.backward(), other.optimizer->step({.lr = 0.5}), other.optimizer->zero_grad();
  other.backward(), other.optimizer->step({.lr = 0.25});
  EXPECT_EQ(full_parameter(one.model.table.weight).to_vector(), full_parameter(other.model.table.weight).to_vector());
}

TEST(StepInBackward, OutlivesAMoveAndIsCancelledByZeroGrad) {
  One one, other;
  one.optimizer->step_in_backward({.lr = 0.5});
  optim::AdamW moved = std::move(*one.optimizer);
  one.optimizer.reset();
  one.backward(), moved.step(), moved.zero_grad();
  other.backward(), other.optimizer->step({.lr = 0.5}), other.optimizer->zero_grad();
  const auto table = [](One& of) { return full_parameter(of.model.table.weight).to_vector(); };
  EXPECT_EQ(table(one), table(other));
  const auto before = table(one);
  moved.step_in_backward({.lr = 0.25});
  zero_grad(one.model);
  one.backward();
  EXPECT_EQ(table(one), before);
  EXPECT_TRUE(full_gradient(one.model.table.weight));
  moved.step();
  other.backward(), other.optimizer->step({.lr = 0.25});
  EXPECT_EQ(table(one), table(other)) << "with the options it began with";
}

TEST(StepInBackward, NeedsItsOptimizer) {
  One one;
  one.optimizer->step_in_backward();
  one.optimizer.reset();
  expect_refused<LifetimeError>([&] { one.backward(); }, "[step_in_backward] the optimizer of unit 'blocks.1' is gone");
}

}  // namespace
}  // namespace sheaf
