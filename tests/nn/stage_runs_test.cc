// Stages of several runs of units (interleaved): the order of turns, where blocks are, and a user-defined model.
#include <cmath>
#include <functional>

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

std::string order_of(int stage, int stages, int64_t micro_batches, int64_t runs) {
  std::string out;
  for (const auto& [kind, micro, run] : one_forward_one_backward(stage, stages, micro_batches, runs))
    out += str(out.empty() ? "" : " ", kind == Turn::backward ? "B" : "F", micro, static_cast<char>('a' + run));
  return out;
}

// As many micro-batches as stages go through a run before the next run.
TEST(TurnsOfRuns, GoesRoundTheStages) {
  EXPECT_EQ(order_of(1, 2, 4, 2), "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a");
  EXPECT_EQ(order_of(0, 2, 4, 2), "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a");
  EXPECT_EQ(order_of(2, 3, 3, 2), "F0a F1a F2a F0b B0b F1b B1b F2b B2b B0a B1a B2a");
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [] { one_forward_one_backward(0, 3, 4, 2); }),
              HasSubstr("4 micro-batches are not a multiple of the 3 stages that they go round 2 times"));
}

// A stage computes nothing whose inputs it has not asked for, and no rank waits for a message behind one that is never received: neighbours
// send and receive in the same order, and no send waits forever for an earlier one.
TEST(TurnsOfRuns, NoStageWaitsForEver) {
  for (int stages = 2; stages <= 6; ++stages)
    for (int64_t runs = 1; runs <= 4; ++runs)
      for (int64_t micro_batches = stages; micro_batches <= 4 * stages; micro_batches += runs > 1 ? stages : 1) {
        // The rank of a value, by micro-batch: parts of forward and backward together, in order.
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
              const auto& [kind, micro, run] = turns[static_cast<size_t>(s)][n];
              const int64_t part = run * stages + s;
              if (at[static_cast<size_t>(micro)] != (kind == Turn::backward ? parts - 1 - part : part)) break;
              ++at[static_cast<size_t>(micro)];
            }
          }
        }
        EXPECT_THAT(at, ::testing::Each(parts)) << stages << ' ' << runs << ' ' << micro_batches;
      }
}

std::string stages_of(const StageCut& cut) {
  std::string all;
  for (int64_t i = 0; i < cut.num_blocks(); ++i) all += std::to_string(cut.stage_of(i));
  return all;
}

TEST(StageCut, HasRunsOfConsecutiveBlocks) {
  const StageCut cut(9, 2, 2);
  EXPECT_EQ(stages_of(cut), "001100111");
  EXPECT_EQ(cut.end_of_run(0, 0), 4);  // where its second run begins
  EXPECT_EQ(cut.end_of_run(0, 1), 6);
  EXPECT_EQ(cut.end_of_run(1, 0), 9);
  EXPECT_EQ(stages_of(StageCut({1, 2, 3, 1}, 2)), "0110001");
  for (int stages = 1; stages <= 5; ++stages)
    for (int64_t runs = 1; runs <= 3; ++runs)
      for (int64_t blocks = stages * runs; blocks <= 3 * stages * runs; ++blocks)
        for (const double head : {0.0, 1.3}) {
          const StageCut some(blocks, stages, runs, head);
          for (int s = 0; s < stages; ++s) {
            int64_t begin = 0, own = 0;
            for (int64_t run = 0; run < runs; ++run) {
              const int64_t end = some.end_of_run(run, s);
              int entered = 0;  // runs of its own blocks: one
              for (int64_t b = begin; b < end; ++b) {
                const bool here = some.stage_of(b) == s;
                own += here;
                entered += here && (b == begin || some.stage_of(b - 1) != s);
              }
              EXPECT_EQ(entered, 1) << stages << ' ' << runs << ' ' << blocks;
              begin = end;
            }
            EXPECT_EQ(begin, blocks);
            EXPECT_GE(own, runs);
          }
        }
}

// Of all ways to cut them, the longest run is as short as possible, with a head of any length.
TEST(StageCut, WaitsForTheLastRunNoMoreThanItMust) {
  const std::function<double(int64_t, int64_t, double)> shortest = [&](int64_t blocks, int64_t runs, double head) {
    if (runs == 1) return static_cast<double>(blocks) + head;
    double best = 1e9;
    for (int64_t n = 1; n <= blocks - (runs - 1); ++n) best = std::min(best, std::max(static_cast<double>(n), shortest(blocks - n, runs - 1, head)));
    return best;
  };
  for (int runs = 1; runs <= 5; ++runs)
    for (int64_t blocks = runs; blocks <= 11; ++blocks)
      for (const double head : {0.0, 0.3, 0.5, 1.0, 2.4, 7.0, 100.0}) {
        const StageCut cut(blocks, runs, 1, head);
        const double mean = (static_cast<double>(blocks) + head) / runs;
        EXPECT_NEAR(cut.imbalance(head), shortest(blocks, runs, head) / mean, 1e-12) << blocks << ' ' << runs << ' ' << head;
        EXPECT_EQ(stages_of(StageCut(blocks, 1, runs, head)), std::string(static_cast<size_t>(blocks), '0'));
        for (int64_t i = 0; i + 2 < runs; ++i)  // all but the last are alike
          for (int64_t j = 0; j + 2 < runs; ++j) EXPECT_LE(cut.begin(i + 1) - cut.begin(i), cut.begin(j + 1) - cut.begin(j) + 1);
      }
  EXPECT_EQ(stages_of(StageCut(8, 2, 1, 2)), "00000111");
  EXPECT_EQ(stages_of(StageCut(8, 2, 2, 2)), "00110001");
  EXPECT_EQ(stages_of(StageCut(7, 3, 1, 50)), "0001112");
}

TEST(StageCut, RefusesWhatHasNoBlock) {
  EXPECT_THROW(StageCut(3, 2, 2), ConfigError);
  EXPECT_THROW(StageCut(3, 0), ConfigError);
  EXPECT_THROW(StageCut(3, 2, 1, -1), ConfigError);
  EXPECT_THROW(StageCut(3, 2, 1, NAN), ConfigError);
}

using Gradients = std::vector<std::vector<double>>;

// A model with a forward in parts.
struct InParts : TinyModel {
  using TinyModel::TinyModel;
  /// Blocks [begin, end) on x, which is tokens at first, and logits at last.
  Tensor part(Tensor x, int64_t begin, int64_t end) {
    const auto scope = enter();
    if (begin == 0) x = table(x);
    for (int64_t i = begin; i < end; ++i) x = blocks[static_cast<size_t>(i)](x);
    return end == std::ssize(blocks) ? linear(norm(x), table.weight) : x;
  }
};

constexpr int64_t kBlocks = 8;

Gradients gradients_of_runs(int stages, int64_t runs, int data, const std::string& strategy, bool norm_is_a_unit = false) {
  Gradients out;
  run_local(stages * data, [&](World& w) {
    const Mesh mesh = w.mesh({{"stage", stages, true, /*ring=*/true}, {"data", data}});
    InParts model(kBlocks);
    ShardOptions options{.stage_axis = "stage", .stage_runs = runs, .units = nn::units_of<TinyBlock>(), .strategy = strategy};
    if (norm_is_a_unit) {
      options.stage_runs = 1;
      options.units = nn::units_where([](nn::Module& m, const std::string& path) { return path == "norm" || dynamic_cast<TinyBlock*>(&m); });
      options.stage_of = [stages, runs](const nn::Module&, const std::string& path) {
        return path == "norm" ? -1 : StageCut(kBlocks, stages, runs).stage_of(std::stoll(path.substr(path.find('.') + 1)));
      };
    }
    shard(model, mesh, options);
    materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
    const int stage = mesh.coordinate("stage");
    const StageCut blocks(kBlocks, stages, runs);
    constexpr int64_t kParts = 12;
    std::vector<Tensor> x(kParts), losses(kParts);
    Recording recording;
    for (const auto [kind, micro, run] : one_forward_one_backward(stage, stages, kParts, runs)) {
      const auto m = static_cast<size_t>(micro);
      if (kind == Turn::backward) {
        recording.backward(losses[m], {.last_micro_batch = micro + 1 == kParts, .last_part_only = true});
        continue;
      }
      run == 0 ? recording.next_micro_batch(kRows * micro) : recording.resume_micro_batch(kRows * micro);
      const Layout on_first = Layout(mesh.spec).with(0, Placement::on(0)).with(1, Placement::shard(0));
      const Layout cut = Layout(mesh.spec).with(1, Placement::shard(0));
      if (run == 0) x[m] = redistribute(token_rows({}, kRows, kLength, kVocab, micro), on_first);
      const int64_t begin = run == 0 ? 0 : blocks.end_of_run(run - 1, stage);
      x[m] = model.part(std::exchange(x[m], {}), begin, blocks.end_of_run(run, stage));
      if (run + 1 < runs) continue;
      const Layout of_targets = micro % 2 ? cut : cut.with(0, Placement::on(stages - 1));  // on all stages, or where they are needed
      const Tensor targets = redistribute(token_rows({}, kRows, kLength, kVocab, micro + 1), of_targets);
      losses[m] = nn::sum_over_stages(cross_entropy(std::exchange(x[m], {}), targets, {.mean_of_counted = true}));
    }
    recording.take();
    for (const nn::Parameter& p : model.parameters()) {
      const Tensor g = full_gradient(p);
      if (w.rank() == 0) out.push_back(g.to_vector<double>());
    }
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  return out;
}

TEST(StageRuns, HaveTheGradientsOfOneRank) {
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

// A unit that all stages have, but only the last run uses: no stage waits for its sum while others still have turns.
TEST(StageRuns, MayHaveAUnitOfAllStagesAtTheirEnd) {
  const Gradients expected = gradients_of_runs(1, 1, 1, "replicate");
  for (const auto& [stages, runs] : {std::pair{2, 2}, {3, 2}, {4, 2}})
    for (const char* strategy : {"full_shard", "zero1"}) {
      const Gradients actual = gradients_of_runs(stages, runs, 1, strategy, /*norm_is_a_unit=*/true);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t p = 0; p < expected.size(); ++p)
        for (size_t i = 0; i < expected[p].size(); ++i) ASSERT_NEAR(actual[p][i], expected[p][i], 1e-12) << stages << ' ' << strategy;
    }
}

TEST(StageRuns, WhatCannotBeIsRefused) {
  run_local(2, [](World& w) {
    const auto refusal = [&](bool ring) {
      TinyModel model(3);
      const Mesh mesh = w.mesh({{"stage", 2, true, ring}, {"data", 1}});
      const ShardOptions options{.stage_axis = "stage", .stage_runs = 2, .units = nn::units_of<TinyBlock>()};
      return message_of<ConfigError>(ExitCode::kConfig, [&] { shard(model, mesh, options); });
    };
    EXPECT_THAT(refusal(false), HasSubstr("stage_runs 2: runs of units are those of a stage axis that is a ring"));
    EXPECT_THAT(refusal(true), HasSubstr("3 units cannot be the 2 runs of the 2 stages of axis 'stage'"));
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
