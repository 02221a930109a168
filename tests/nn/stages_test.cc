// Pipeline stages in a user-defined model, with several micro-batches in flight, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/pipeline.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/stages.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kRows = 2, kLength = 3, kVocab = 11;
constexpr int kMicroBatches = 4;

std::string order_of(int stage, int stages, int64_t micro_batches) {
  std::string out;
  for (const auto& [kind, micro, run] : one_forward_one_backward(stage, stages, micro_batches))
    out += str(out.empty() ? "" : " ", kind == Turn::backward ? "B" : "F", micro);
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

// Gradients are added in the order of backwards: with the same order, the bits are the same.
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
  // The live bytes at the end, and with both micro-batches in flight, beyond those at the start.
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

// A refused loss leaves the recording unchanged.
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

// Blocks are on successive stages; the tied table and the last norm are on all stages.
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
        for (const auto [kind, micro, run] : one_forward_one_backward(mesh.coordinate("stage"), world, kMicroBatches)) {
          Tensor& part = parts[static_cast<size_t>(micro)];
          if (kind == Turn::backward) {
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

// Targets on the last stage are counted there: the others, in other turns, have no part in it.
TEST(Stages, ALossCountsTheTargetsOfItsStage) {
  run_local(2, [](World& w) {
    const Mesh mesh = stage_mesh(w);
    const Layout last = Layout(mesh.spec).with(0, Placement::on(1)).with(1, Placement::shard(0));
    const Tensor targets = redistribute(Tensor::from<int64_t>({1, -1, 0}, {3}), last);
    Recording recording;
    const Tensor loss = nn::sum_over_stages(cross_entropy(full_of({kF64, {3, 2}, last}, 0.5), targets, {.mean_of_counted = true}));
    EXPECT_THAT(to_text(recording.tape()), Not(HasSubstr("all_gather")));
    EXPECT_NEAR(redistribute(loss, Layout(mesh.spec, Placement::invariant())).item<double>(), std::log(2.0), 1e-15);
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

// The caller's tensor is not changed.
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
    EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [] { Placement::on(-1); }), HasSubstr("ranks count from 0"));
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

// No unit is on all ranks, and the others' exchange is done before the last rank computes anything.
struct Halved : nn::Module {
  nn::Linear layer{6, 6, {.bias = false}};
  Tensor forward(const Tensor& x) { return tanh(layer(x * 0.5)); }
  SHEAF_FIELDS(layer);
};

TEST(Stages, ProgramsOfStagesAlone) {
  for (const char* strategy : {"replicate", "full_shard"})
    run_local(3, [&](World& w) {
      const Mesh mesh = w.mesh({{"stage", 3, true}, {"data", 1}});
      Chain<Halved, 3> net;
      shard(net, mesh, {.stage_axis = "stage", .units = nn::units_of<Halved>(), .strategy = strategy});
      materialize(net, Device::cpu(), {.seed = 3});
      auto step = compile([&](const Tensor& x) {
        const Tensor loss = nn::sum_over_stages(sum(net(x)));
        Recording::current()->backward(loss, {.last_micro_batch = true});
        for (const auto& unit : units(net)) unit->reduce_waiting(), unit->complete_reduction(), unit->zero_grad();
        return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
      });
      double first = 0;
      for (int s = 0; s < 5; ++s) {
        const Tensor x = full_of({kF32, {4, 6}, Layout(mesh.spec).with(0, Placement::on(0)).with(1, Placement::shard(0))}, 0.5);
        const double loss = step({.step = s}, x).item();
        if (s == 0) first = loss;
        EXPECT_EQ(loss, first);
      }
    }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
