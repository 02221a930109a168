// The uses of a step's memory: after its forward, after its backward, after its update, and at the peak.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/compile.h"
#include "sheaf/core/memory_ledger.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

/// The memory held at this moment; resets the previous peak.
MemoryLedger::Peak now(MemoryLedger& ledger) {
  ledger.reset_peak();
  return ledger.peak(*RankContext::current().cpu);
}

struct Bytes {
  int64_t masters = 0, all_units = 0;  // the units whole
};
Bytes bytes_of(nn::Module& model) {
  Bytes out;
  for (const auto& unit : units(model))
    for (const FlatBuffer& b : unit->buffers()) out.masters += b.shard.local_bytes(), out.all_units += b.layout.total * 4;
  return out;
}

constexpr int64_t kScalar = 4;

TEST(MemoryPhases, MastersStatesAndGradientsAreTheShards) {
  for (const int world : {1, 2, 3})
    for_each_sharding(world, [&](Strategy strategy, nn::UnitPolicy chosen, int64_t prefetch, const char* what) {
      SCOPED_TRACE(str(what, " on ", world));
      run_local(world, [&](World& w) {
        MemoryLedger ledger;
        const Mesh mesh = strategy == Strategy::none ? Mesh{} : w.mesh({{"data", w.size()}});
        TinyModel model;
        shard(model, mesh, {.units = chosen, .strategy = strategy, .prefetch_bytes = prefetch});
        materialize(model);
        const Bytes bytes = bytes_of(model);
        EXPECT_EQ(now(ledger).bytes, bytes.masters);
        EXPECT_EQ(now(ledger).held_for(HeldFor::masters), bytes.masters);
        const Tensor tokens = token_rows(mesh, 7, 5, 11), targets = token_rows(mesh, 7, 5, 11, 1);
        optim::AdamW optimizer(model);
        EXPECT_EQ(now(ledger).held_for(HeldFor::optimizer_state), 2 * bytes.masters);
        const bool gathers = strategy >= Strategy::zero1;
        for (int step = 0; step < 3; ++step) {
          Recording recording;
          Tensor loss = model.loss(tokens, targets);
          const MemoryLedger::Peak forward = now(ledger);
          EXPECT_GT(forward.held_for(HeldFor::activations), tokens.local_bytes());
          EXPECT_EQ(forward.held_for(HeldFor::activation_gradients), 0);
          EXPECT_EQ(forward.held_for(HeldFor::whole_gradients), 0);
          EXPECT_EQ(forward.held_for(HeldFor::temporaries), 0);
          EXPECT_EQ(forward.held_for(HeldFor::masters), bytes.masters);
          EXPECT_EQ(forward.held_for(HeldFor::gradients), 0);
          const int64_t gathered = forward.held_for(HeldFor::gathered);
          if (!gathers || world == 1) {
            EXPECT_EQ(gathered, 0);
          } else if (strategy != Strategy::full_shard) {
            EXPECT_EQ(gathered, bytes.all_units);
          }
          EXPECT_LE(gathered, bytes.all_units);
          recording.backward(loss, {.last_micro_batch = true});
          const MemoryLedger::Peak peak = ledger.peak(*RankContext::current().cpu);
          EXPECT_GT(peak.held_for(HeldFor::activation_gradients), 0);
          EXPECT_TRUE(gathers || peak.held_for(HeldFor::whole_gradients) == 0);
          for (const auto& unit : units(model)) unit->reduce_waiting(), unit->complete_reduction();
          const MemoryLedger::Peak backward = now(ledger);
          EXPECT_EQ(backward.held_for(HeldFor::gradients), bytes.masters);
          EXPECT_EQ(backward.held_for(HeldFor::whole_gradients), 0);
          EXPECT_EQ(backward.held_for(HeldFor::activations), kScalar);  // the loss
          EXPECT_EQ(backward.held_for(HeldFor::activation_gradients), 0);
          if (strategy != Strategy::zero1) {  // it keeps them for the recording's other micro-batches
            EXPECT_EQ(backward.held_for(HeldFor::gathered), 0);
          }
          optimizer.step({.lr = 0.01});
          optimizer.zero_grad();
          loss = Tensor();
          EXPECT_EQ(now(ledger).held_for(HeldFor::gradients), 0);
          EXPECT_EQ(now(ledger).held_for(HeldFor::activations), 0);
        }
      }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
    });
}

TEST(MemoryPhases, ActivationsAreWhatTheBackwardReads) {
  RankContext context;
  const RankScope scope(context);
  MemoryLedger ledger;
  nn::Linear layer(5, 3);
  materialize(layer);
  const Tensor x = full_of({kF32, {7, 5}, {}}, 0.5);
  Recording recording;
  Tensor loss = sum(tanh(layer(x)));
  const MemoryLedger::Peak held = now(ledger);
  EXPECT_EQ(held.held_for(HeldFor::activations), 7 * 3 * 4 + kScalar);  // tanh reads its output, the product its input
  for (const auto& h : held.holders) {
    if (h.op == "tanh") {
      EXPECT_EQ(h.bytes, 7 * 3 * 4);
    }
  }
}

// Values that a backward recomputes also count as activations, however it is reached.
TEST(MemoryPhases, WhatIsComputedAgainIsAnActivation) {
  for (const bool whole : {true, false}) {
    RankContext context;
    const RankScope scope(context);
    MemoryLedger ledger;
    TinyModel model(4);
    materialize(model);
    for (TinyBlock& block : model.blocks) block.recompute(whole ? RecomputeOptions{} : RecomputeOptions{.selective = true});
    Recording recording;
    const Tensor loss = model.loss(token_rows({}, 7, 5, 11), token_rows({}, 7, 5, 11, 1));
    now(ledger);
    recording.backward(loss);
    const MemoryLedger::Peak peak = ledger.peak(*context.cpu);
    const Tape tape = recording.take();
    int64_t again = 0;
    for (NodeId i = 0; i < tape.num_nodes(); ++i) {
      const Node& n = tape.node(i);
      if (!n.op || !(n.flags & Node::kRecomputed)) continue;
      ++again;
      for (const auto& h : peak.holders) {
        if (h.use == HeldFor::activation_gradients) {
          EXPECT_FALSE(h.op == n.op->name && h.module == tape.path(n)) << h.op;
        }
      }
    }
    EXPECT_GT(again, 0);
  }
}

TEST(MemoryPhases, AProgramsAreThoseOfItsTape) {
  run_local(2, [&](World& w) {
    MemoryLedger ledger;
    const Mesh mesh = w.mesh({{"data", w.size()}});
    TinyModel model;
    shard(model, mesh, {.units = nn::units_of<TinyBlock>()});
    materialize(model);
    const Bytes bytes = bytes_of(model);
    optim::AdamW optimizer(model);
    auto step = compile([&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
      const Tensor loss = model.loss(tokens, targets, {.divide_by = 70.0});
      Recording::current()->backward(loss);
      optimizer.step({.scalars = scalars});
      optimizer.zero_grad();
      return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
    });
    const Tensor tokens = token_rows(mesh, 7, 5, 11), targets = token_rows(mesh, 7, 5, 11, 1);
    for (int i = 0; i < 5; ++i) {
      RankContext::current().cpu->reset_peak();
      ledger.reset_peak();
      const std::vector<double> scalars = optimizer.next_scalars({.lr = 0.01});
      step({.step = i}, tokens, targets, Tensor::from(scalars, {std::ssize(scalars)}));
    }
    const MemoryLedger::Peak peak = ledger.peak(*RankContext::current().cpu);
    EXPECT_EQ(peak.bytes, RankContext::current().cpu->stats().peak);
    int64_t sum = 0;
    for (const auto& h : peak.holders) sum += h.bytes;
    EXPECT_EQ(sum, peak.bytes);
    EXPECT_EQ(peak.held_for(HeldFor::masters), bytes.masters);
    EXPECT_EQ(peak.held_for(HeldFor::optimizer_state), 2 * bytes.masters);
    for (const HeldFor use : {HeldFor::activations, HeldFor::gathered, HeldFor::whole_gradients}) EXPECT_GT(peak.held_for(use), 0) << name(use);
    EXPECT_LT(peak.held_for(HeldFor::idle), peak.bytes / 4);
  }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
