// Stages of a pipeline in a model of one's own, micro-batches of which several are under way, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/distributed/pipeline.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/stages.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 2, kLength = 3, kVocab = 11;
constexpr int kMicroBatches = 4;

std::string order_of(int stage, int stages, int64_t micro_batches, int64_t runs = 1) {
  std::string out;
  for (const auto& [backward, micro, run] : one_forward_one_backward(stage, stages, micro_batches, runs))
    out += str(out.empty() ? "" : " ", backward ? "B" : "F", micro, runs > 1 ? std::string(1, static_cast<char>('a' + run)) : "");
  return out;
}

TEST(OneForwardOneBackward, EachBackwardMakesRoomForAForward) {
  EXPECT_EQ(order_of(0, 1, 3), "F0 B0 F1 B1 F2 B2");
  EXPECT_EQ(order_of(0, 3, 5), "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4");
  EXPECT_EQ(order_of(1, 3, 5), "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4");
  EXPECT_EQ(order_of(2, 3, 5), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4");
  EXPECT_EQ(order_of(0, 4, 2), "F0 F1 B0 B1");
  EXPECT_THROW(one_forward_one_backward(3, 3, 2), ConfigError);
  EXPECT_THROW(one_forward_one_backward(0, 1, 0), ConfigError);
}

// As many micro-batches as stages go through a run before the next.
TEST(OneForwardOneBackward, GoesRoundTheStages) {
  EXPECT_EQ(order_of(1, 2, 4, 2), "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a");
  EXPECT_EQ(order_of(0, 2, 4, 2), "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a");
  EXPECT_EQ(order_of(2, 3, 3, 2), "F0a F1a F2a F0b B0b F1b B1b F2b B2b B0a B1a B2a");
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [] { one_forward_one_backward(0, 3, 4, 2); }),
              HasSubstr("4 micro-batches are not a multiple of the 3 stages that they go round 2 times"));
}

// A stage computes nothing whose inputs it has not sent for, and nobody waits for a message that comes behind one that nobody
// takes: neighbours send and receive in the same order, and no send has to wait for one before it for ever.
TEST(OneForwardOneBackward, NoStageWaitsForEver) {
  for (int stages = 2; stages <= 6; ++stages)
    for (int64_t runs = 1; runs <= 4; ++runs)
      for (int64_t micro_batches = stages; micro_batches <= 4 * stages; micro_batches += runs > 1 ? stages : 1) {
        // Where a value is, by micro-batch: parts of forward and backward together, in order.
        const int64_t parts = 2 * stages * runs;
        std::vector<int64_t> at(static_cast<size_t>(micro_batches));
        std::vector<std::vector<Turn>> turns;
        for (int s = 0; s < stages; ++s) turns.push_back(one_forward_one_backward(s, stages, micro_batches, runs));
        std::vector<size_t> next(static_cast<size_t>(stages));
        for (bool moved = true; moved;) {
          moved = false;
          for (int s = 0; s < stages; ++s) {
            auto& n = next[static_cast<size_t>(s)];
            for (; n < turns[static_cast<size_t>(s)].size(); ++n, moved = true) {
              const auto& [backward, micro, run] = turns[static_cast<size_t>(s)][n];
              const int64_t part = run * stages + s;
              if (at[static_cast<size_t>(micro)] != (backward ? parts - 1 - part : part)) break;
              ++at[static_cast<size_t>(micro)];
            }
          }
        }
        EXPECT_THAT(at, ::testing::Each(parts)) << stages << ' ' << runs << ' ' << micro_batches;
      }
}

TEST(Blocks, AreInRunsOfStages) {
  std::string all;
  for (int64_t i = 0; i < 9; ++i) all += std::to_string(stage_of_block(i, 9, 2, 2));
  EXPECT_EQ(all, "000110011");
  EXPECT_EQ(end_of_run(0, 0, 9, 2, 2), 5);  // where its second run begins
  EXPECT_EQ(end_of_run(0, 1, 9, 2, 2), 7);
  EXPECT_EQ(end_of_run(1, 0, 9, 2, 2), 9);
  for (int stages = 1; stages <= 5; ++stages)
    for (int64_t runs = 1; runs <= 3; ++runs)
      for (int64_t blocks = stages * runs; blocks <= 3 * stages * runs; ++blocks)
        for (int s = 0; s < stages; ++s) {
          int64_t begin = 0, own = 0;
          for (int64_t run = 0; run < runs; ++run) {
            const int64_t end = end_of_run(run, s, blocks, stages, runs);
            int entered = 0;  // runs of its own blocks: one
            for (int64_t b = begin; b < end; ++b) {
              const bool here = stage_of_block(b, blocks, stages, runs) == s;
              own += here;
              entered += here && (b == begin || stage_of_block(b - 1, blocks, stages, runs) != s);
            }
            EXPECT_EQ(entered, 1) << stages << ' ' << runs << ' ' << blocks;
            begin = end;
          }
          EXPECT_EQ(begin, blocks);
          EXPECT_GE(own, runs);
        }
}

using Gradients = std::vector<std::vector<double>>;

Gradients gradients_of(nn::Module& module) {
  Gradients out;
  for (const auto& unit : units(module)) {
    unit->reduce_waiting(), unit->complete_reduction();
    for (const FlatBuffer& b : unit->buffers()) out.push_back(b.grad.to_vector<double>());
  }
  return out;
}

// Positive: the forward of micro-batch n − 1; negative: the backward of micro-batch −n − 1.
using Order = std::vector<int>;

Gradients gradients_in_order(const Order& order, int world, const std::string& strategy) {
  Gradients out;
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    TinyModel model;
    shard(model, mesh, {.units = nn::units_of<TinyBlock>(), .strategy = strategy});
    materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
    std::vector<Tensor> losses(kMicroBatches);
    Recording recording;
    int left = kMicroBatches;
    for (const int turn : order) {
      const int m = std::abs(turn) - 1;
      if (turn < 0) {
        recording.backward(losses[static_cast<size_t>(m)], {.last_micro_batch = --left == 0});
        continue;
      }
      recording.next_micro_batch(kRows * m);
      losses[static_cast<size_t>(m)] = model.loss(token_rows(mesh, kRows, kLength, kVocab, m), token_rows(mesh, kRows, kLength, kVocab, m + 1));
    }
    const Gradients mine = gradients_of(model);
    if (w.rank() == 0) out = mine;
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  return out;
}

// The order of backwards is that in which gradients are added: where it is the same, so are the bits.
TEST(MicroBatches, SeveralMayBeUnderWay) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const int world : {1, 2}) {
      SCOPED_TRACE(str(strategy, " ", world));
      const Gradients expected = gradients_in_order({1, -1, 2, -2, 3, -3, 4, -4}, world, strategy);
      EXPECT_EQ(gradients_in_order({1, 2, -1, 3, -2, 4, -3, -4}, world, strategy), expected);
      EXPECT_EQ(gradients_in_order({1, 2, 3, 4, -1, -2, -3, -4}, world, strategy), expected);
      const Gradients other = gradients_in_order({1, 2, 3, -2, 4, -4, -1, -3}, world, strategy);
      ASSERT_EQ(other.size(), expected.size());
      for (size_t u = 0; u < other.size(); ++u)
        for (size_t i = 0; i < other[u].size(); ++i) EXPECT_NEAR(other[u][i], expected[u][i], 1e-12);
    }
}

// One backward of several micro-batches' losses differentiates these, in one pass, and leaves others alone.
TEST(MicroBatches, LossesOfSeveralCanBeAdded) {
  const auto run = [](bool added) {
    TinyModel model;
    materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
    Recording recording;
    std::vector<Tensor> losses;
    for (int m = 0; m < 3; ++m) {
      recording.next_micro_batch(kRows * m);
      losses.push_back(model.loss(token_rows({}, kRows, kLength, kVocab, m), token_rows({}, kRows, kLength, kVocab, m + 1)));
    }
    if (added) {
      recording.backward(losses[0] + losses[2]);
      recording.backward(losses[1]);
    } else {
      for (const Tensor& loss : losses) recording.backward(loss);
    }
    return gradients_of(model);
  };
  const Gradients expected = run(false), actual = run(true);
  for (size_t u = 0; u < expected.size(); ++u)
    for (size_t i = 0; i < expected[u].size(); ++i) EXPECT_NEAR(actual[u][i], expected[u][i], 1e-12);
}

TEST(MicroBatches, EachIsDifferentiatedOnceAndThenFreed) {
  // What is live in the end, and where both were under way, beyond what there was before.
  const auto live = [](bool both) {
    Allocator& memory = *RankContext::current().memory(Device::cpu());
    TinyModel model;
    materialize(model, Device::cpu());
    const int64_t before = memory.stats().live;
    Recording recording;
    const auto loss = [&](int m) {
      recording.next_micro_batch(kRows * m);
      return model.loss(token_rows({}, kRows, kLength, kVocab, m), token_rows({}, kRows, kLength, kVocab, m + 1));
    };
    const auto differentiated = [&](const Tensor& l) {
      return message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.backward(l); });
    };
    const Tensor first = loss(0);
    if (!both) recording.backward(first);
    const Tensor second = loss(1);
    const int64_t under_way = memory.stats().live - before;
    if (both) recording.backward(first);
    EXPECT_THAT(differentiated(first), HasSubstr("add the losses"));
    recording.backward(second);
    EXPECT_THAT(differentiated(second), HasSubstr("add the losses"));
    return std::pair(memory.stats().live - before, under_way);
  };
  EXPECT_EQ(live(true).first, live(false).first);
  EXPECT_GT(live(true).second, live(true).first);
}

// What refuses a loss leaves the recording as it was.
TEST(MicroBatches, ALossThatIsNoneChangesNothing) {
  const auto gradients = [](bool mistaken) {
    TinyModel model;
    materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
    Recording recording;
    std::vector<Tensor> logits;
    for (int m = 0; m < 2; ++m) {
      recording.next_micro_batch(kRows * m);
      logits.push_back(model(token_rows({}, kRows, kLength, kVocab, m)));
      if (mistaken) {
        EXPECT_THROW(recording.backward(logits.back()), ShapeError);
      }
    }
    for (const Tensor& y : logits) recording.backward(sum(y));
    return gradients_of(model);
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

Mesh stage_mesh(World& w) { return w.mesh({{"stage", w.size(), true}, {"data", 1}}); }

ShardOptions in_stages() { return {.stage_axis = "stage", .units = nn::units_of<TinyBlock>()}; }

// Blocks lie one after another; the tied table and the last norm are on all stages.
TEST(Stages, AModelOfOnesOwnTrainsInThem) {
  const auto train = [](int world) {
    std::vector<double> losses;
    run_local(world, [&](World& w) {
      const Mesh mesh = stage_mesh(w);
      TinyModel model(4);
      shard(model, mesh, in_stages());
      materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
      for (int step = 0; step < 3; ++step) {
        Recording recording({.step = step});
        Tensor all;
        std::vector<Tensor> parts(kMicroBatches);
        for (const auto [backward, micro, run] : one_forward_one_backward(mesh.coordinate("stage"), world, kMicroBatches)) {
          Tensor& part = parts[static_cast<size_t>(micro)];
          if (backward) {
            recording.backward(part, {.last_micro_batch = micro + 1 == kMicroBatches});
            all = all ? all + part : part;
            continue;
          }
          recording.next_micro_batch(kRows * micro);
          const int shift = static_cast<int>(micro);
          Tensor tokens = token_rows({}, kRows, kLength, kVocab, shift), targets = token_rows({}, kRows, kLength, kVocab, shift + 1);
          part = nn::sum_over_stages(model.loss(redistribute(tokens, Layout(mesh.spec).with(0, Placement::on(0)).with(1, Placement::shard(0))),
                                                redistribute(targets, Layout(mesh.spec).with(1, Placement::shard(0)))));
        }
        for (const auto& unit : units(model)) {
          unit->reduce_waiting(), unit->complete_reduction();
          for (FlatBuffer& b : unit->buffers()) {
            auto* values = b.shard.view().as<double>();
            const std::vector<double> grad = b.grad.to_vector<double>();
            for (size_t i = 0; i < grad.size(); ++i) values[i] -= 0.1 * grad[i];
          }
          unit->close_for_change();
          unit->zero_grad();
        }
        const double loss = redistribute(all, Layout(mesh.spec, Placement::invariant())).item<double>();
        if (w.rank() == 0) losses.push_back(loss);
      }
    }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
    return losses;
  };
  const std::vector<double> expected = train(1);
  EXPECT_LT(expected.back(), expected.front());
  for (const int world : {2, 3, 4}) {
    const std::vector<double> actual = train(world);
    for (size_t s = 0; s < expected.size(); ++s) EXPECT_NEAR(actual[s], expected[s], 1e-12) << world;
  }
}

// The same in parts, which go round the stages.
struct InParts : TinyModel {
  using TinyModel::TinyModel;
  /// Blocks [begin, end) of x, which is tokens at first, and logits at last.
  Tensor part(Tensor x, int64_t begin, int64_t end) {
    const auto scope = enter();
    if (begin == 0) x = table(x);
    for (int64_t i = begin; i < end; ++i) x = blocks[static_cast<size_t>(i)](x);
    return end == std::ssize(blocks) ? linear(norm(x), table.weight) : x;
  }
};

constexpr int64_t kBlocks = 7;

Gradients gradients_of_runs(int stages, int64_t runs, int data, const std::string& strategy) {
  Gradients out;
  run_local(stages * data, [&](World& w) {
    const Mesh mesh = w.mesh({{"stage", stages, true, /*ring=*/true}, {"data", data}});
    InParts model(kBlocks);
    shard(model, mesh, {.stage_axis = "stage", .stage_runs = runs, .units = nn::units_of<TinyBlock>(), .strategy = strategy});
    materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
    const int stage = mesh.coordinate("stage");
    constexpr int64_t kParts = 6;
    std::vector<Tensor> x(kParts), losses(kParts);
    Recording recording;
    for (const auto [backward, micro, run] : one_forward_one_backward(stage, stages, kParts, runs)) {
      const auto m = static_cast<size_t>(micro);
      if (backward) {
        recording.backward(losses[m], {.last_micro_batch = micro + 1 == kParts, .one_part = true});
        continue;
      }
      run == 0 ? recording.next_micro_batch(kRows * micro) : recording.resume_micro_batch(kRows * micro);
      const Layout on_first = Layout(mesh.spec).with(0, Placement::on(0)).with(1, Placement::shard(0));
      const Layout cut = Layout(mesh.spec).with(1, Placement::shard(0));
      if (run == 0) x[m] = redistribute(token_rows({}, kRows, kLength, kVocab, micro), on_first);
      const int64_t begin = run == 0 ? 0 : end_of_run(run - 1, stage, kBlocks, stages, runs);
      x[m] = model.part(std::exchange(x[m], {}), begin, end_of_run(run, stage, kBlocks, stages, runs));
      if (run + 1 < runs) continue;
      const Tensor targets = redistribute(token_rows({}, kRows, kLength, kVocab, micro + 1), cut);
      losses[m] = nn::sum_over_stages(cross_entropy(std::exchange(x[m], {}), targets));
    }
    recording.take();
    for (const nn::Parameter& p : model.parameters()) {
      const Tensor g = full_gradient(p);
      if (w.rank() == 0) out.push_back(g.to_vector<double>());
    }
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  return out;
}

TEST(Stages, MicroBatchesGoRoundThem) {
  const Gradients expected = gradients_of_runs(1, 1, 1, "replicate");
  for (const auto& [stages, runs, data] : {std::tuple{2, 2, 1}, {2, 3, 1}, {3, 2, 1}, {1, 3, 1}, {1, 2, 2}, {2, 2, 2}})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
      const Gradients actual = gradients_of_runs(stages, runs, data, strategy);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t p = 0; p < expected.size(); ++p)
        for (size_t i = 0; i < expected[p].size(); ++i)
          ASSERT_NEAR(actual[p][i], expected[p][i], 1e-12) << stages << ' ' << runs << ' ' << data << ' ' << strategy;
    }
}

// The caller's tensor stays where it is.
TEST(Stages, AModuleMovesWhatItIsCalledWith) {
  run_local(2, [](World& w) {
    const Mesh mesh = stage_mesh(w);
    TinyModel model;
    shard(model, mesh, in_stages());
    materialize(model);
    const Layout first = Layout(mesh.spec).with(0, Placement::on(0)), second = Layout(mesh.spec).with(0, Placement::on(1));
    const Tensor x = full_of({kF32, {2, 7}, first}, 0.5);
    Tensor y = x;
    EXPECT_EQ(model.blocks[0](y).layout(), first);
    EXPECT_EQ(model.blocks[1](y).layout(), second);
    EXPECT_EQ(y.layout(), first);
    EXPECT_EQ(model.blocks[1](std::move(y)).layout(), second);
    EXPECT_EQ(model.blocks[0](model.blocks[1](x)).layout(), first);
    EXPECT_EQ(x.local_shape(), w.rank() == 0 ? (Shape{2, 7}) : (Shape{0}));
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

TEST(Stages, WhatIsNotComputedTogetherSaysHow) {
  run_local(2, [](World& w) {
    const Mesh mesh = stage_mesh(w);
    const Tensor x = full_of({kF32, {2}, Layout(mesh.spec).with(0, Placement::on(0))}, 1.0);
    const Tensor y = full_of({kF32, {2}, Layout(mesh.spec).with(0, Placement::on(1))}, 1.0);
    EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [&] { x + y; }),
                AllOf(HasSubstr("[add] on mesh axis stage"), HasSubstr("Shard(on 0) Shard(on 1)"),
                      HasSubstr("write redistribute(x, \"stage\", Placement::on(1)) for x = input 0")));
    const Tensor all = full_of({kF32, {2}, Layout(mesh.spec)}, 1.0);
    EXPECT_EQ((x + all).layout(), x.layout());
    EXPECT_EQ((all + x).layout(), x.layout());
    Recording recording;
    const RecomputeScope scope;
    EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [&] { redistribute(x, "stage", Placement::on(1)); }),
                HasSubstr("inside of a RecomputeScope"));
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

TEST(Stages, WhatCannotBeIsRefused) {
  run_local(2, [](World& w) {
    const auto refusal = [&](const Mesh& mesh, const ShardOptions& options) {
      TinyModel model(3);
      return message_of<ConfigError>(ExitCode::kConfig, [&] { shard(model, mesh, options); });
    };
    const Mesh mesh = stage_mesh(w);
    ShardOptions options = in_stages();
    EXPECT_THAT(refusal(w.mesh({{"stage", 2}, {"data", 1}}), options), HasSubstr("axis 'stage' of mesh (stage=2, data=1) is no chain"));
    options.axis = "stage";
    EXPECT_THAT(refusal(mesh, options), HasSubstr("axis 'stage' cannot be the stage axis as well"));
    options = in_stages();
    options.units = {};
    EXPECT_THAT(refusal(mesh, options), HasSubstr("0 units cannot be the 2 stages of axis 'stage'"));
    options = in_stages();
    options.stage_of = [](const nn::Module&, const std::string&) { return 2; };
    EXPECT_THAT(refusal(mesh, options), HasSubstr("'blocks.0' is in stage 2 of 2"));
    options.stage_of = [](const nn::Module&, const std::string&) { return 1; };
    EXPECT_THAT(refusal(mesh, options), HasSubstr("no unit is in stage 0 of axis 'stage'"));
    options = {.units = nn::units_of<TinyBlock>()};
    EXPECT_THAT(refusal(mesh, options), HasSubstr("as ShardOptions::stage_axis"));
    options = in_stages();
    options.stage_runs = 2;
    EXPECT_THAT(refusal(mesh, options), HasSubstr("stage_runs 2: runs of units are those of a stage axis that is a ring"));
    EXPECT_THAT(refusal(w.mesh({{"stage", 2, true, true}, {"data", 1}}), options),
                HasSubstr("3 units cannot be the 2 runs of the 2 stages of axis 'stage'"));
    EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [] { Placement::on(-1); }), HasSubstr("ranks count from 0"));
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
