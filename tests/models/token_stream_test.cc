#include "sheaf/models/token_stream.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "sheaf/core/communicator.h"
#include "sheaf/core/error.h"
#include "sheaf/distributed/run_local.h"

namespace sheaf::models {
namespace {

Tokens numbers(int64_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  return Tokens::from_ids(ids, n, "numbers");
}

TEST(TokenStream, ManyRanksSeeTheBatchOfOne) {
  const auto batches = [](int ranks, int replicas = 1) {  // tokens of steps 0 to 2, rank after rank
    std::vector<std::vector<int32_t>> seen(static_cast<size_t>(3 * ranks));
    run_local(ranks, [&](World& world) {
      const TokenStream data(numbers(50), {.batch_per_rank = 6 / ranks, .context = 5, .seed = 3, .replica_axis = "replica"},
                             world.mesh({{"replica", replicas}, {"data", ranks / replicas}}));
      for (int64_t step : {2, 0, 1}) {  // in any order: there is no position
        const TokenBatch batch = data.batch(step);
        EXPECT_EQ(batch.tokens.shape(), (Shape{6, 5}));
        EXPECT_EQ(batch.tokens.local_shape(), (Shape{6 / ranks, 5}));
        EXPECT_TRUE(batch.targets.layout()[0].is_shard(0));
        EXPECT_EQ(batch.first_sample, 6 * step);
        std::vector<int32_t> tokens = batch.tokens.to_vector<int32_t>();
        seen[static_cast<size_t>(step * ranks + world.rank())] = tokens;
        for (int32_t& t : tokens) ++t;
        EXPECT_EQ(batch.targets.to_vector<int32_t>(), tokens) << "the next number is the target";
      }
    });
    std::vector<int32_t> all;
    for (const auto& part : seen) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const std::vector<int32_t> one = batches(1);
  EXPECT_EQ(one.size(), 90u);
  EXPECT_EQ(batches(2), one);
  EXPECT_EQ(batches(3), one);
  for (int replicas : {2, 3, 6}) EXPECT_EQ(batches(6, replicas), one) << replicas << " replicas";
}

TEST(TokenStream, RanksShareSequences) {
  std::vector<int32_t> expected;
  for (const bool both_ends : {false, true})
    for (const auto& [data, context, model] : {std::tuple{1, 1, 1}, {2, 1, 1}, {1, 1, 2}, {2, 1, 3}, {1, 1, 5}, {1, 3, 1}, {1, 2, 3},
                                               {2, 3, 2}}) {
      std::vector<int32_t> tokens(4 * 7, -1), targets(4 * 7, -1);
      run_local(data * context * model, [&, data = data, context = context, model = model](World& world) {
        const Mesh mesh = world.mesh({{"data", data}, {"context", context}, {"model", model}});
        const TokenStream stream(numbers(90), {.batch_per_rank = 4 / data, .context = 7, .context_axis = "context",
                                               .from_both_ends = both_ends, .sequence_axis = "model"}, mesh);
        const TokenBatch batch = stream.batch(3);
        EXPECT_EQ(batch.tokens.shape(), (Shape{4, 7}));
        const Layout& layout = batch.tokens.layout();
        EXPECT_EQ(layout[1], Placement::shard(both_ends ? OwnershipMap::from_both_ends(1, 7, context) : OwnershipMap::even(1)));
        EXPECT_EQ(layout[2], Placement::shard(1));
        const std::vector<int32_t> x = batch.tokens.to_vector<int32_t>(), y = batch.targets.to_vector<int32_t>();
        size_t next = 0;
        for (const Interval& rows : layout.local_rows({4, 7}, 0))
          for (int64_t r = rows.begin; r < rows.end; ++r)
            for (const Interval& columns : layout.local_rows({4, 7}, 1))
              for (int64_t t = columns.begin; t < columns.end; ++t, ++next) {  // each rank its own elements
                tokens[static_cast<size_t>(r * 7 + t)] = x[next];
                targets[static_cast<size_t>(r * 7 + t)] = y[next];
              }
        EXPECT_EQ(next, x.size());
      });
      if (expected.empty()) expected = tokens;
      EXPECT_EQ(tokens, expected) << data << " x " << context << " x " << model;
      for (int32_t& t : tokens) ++t;
      EXPECT_EQ(targets, tokens);
    }
}

// If parameters are sharded over the axis that cuts sequences, no other axis is needed.
TEST(TokenStream, NoAxisNeedCutTheBatch) {
  run_local(3, [](World& world) {
    const TokenStream stream(numbers(90), {.batch_per_rank = 4, .context = 7, .axis = "", .context_axis = "context"},
                             world.mesh({{"context", 3}}));
    EXPECT_EQ(stream.batch(0).tokens.shape(), (Shape{4, 7}));
    EXPECT_EQ(stream.batch(0).tokens.local_shape(), (Shape{4, world.rank() == 2 ? 3 : 2}));
  });
}

// The divisor of a step's loss: that of the same samples that batch() returns.
TEST(TokenStream, CountsTheTargetsOfItsStep) {
  std::vector<MarkedToken> tokens;
  for (int i = 0; i < 40; ++i) {
    tokens.push_back(5 | kReadOnly);
    tokens.insert(tokens.end(), static_cast<size_t>(1 + i % 4), 6);
    tokens.push_back(2);
  }
  for (int ranks : {1, 2})
    run_local(ranks, [&](World& world) {
      const TokenStream data(Tokens::from_examples(tokens, 2, 9, "examples"), {.batch_per_rank = 2 / ranks, .context = 7},
                             world.mesh({{"data", ranks}}));
      std::set<int64_t> counts;
      for (int64_t step = 0; step < 8; ++step) {
        double mine = 0;
        for (const int32_t t : data.batch(step).targets.to_vector<int32_t>()) mine += t != kIgnoreIndex;
        world.communicator().all_reduce(&mine, 1, kF64, Reduction::sum, "targets").sync();
        EXPECT_EQ(data.num_targets(step), static_cast<int64_t>(mine)) << step;
        counts.insert(data.num_targets(step));
      }
      EXPECT_GT(counts.size(), 1u) << "steps differ";
    });
}

TEST(TokenStream, RefusesWhatCannotBe) {
  run_local(1, [](World& world) {
    const Mesh mesh = world.mesh({{"data", 1}});
    EXPECT_THROW(TokenStream(numbers(5), {.batch_per_rank = 1, .context = 5}, mesh), DataError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 0, .context = 5}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .axis = "no"}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .from_both_ends = true}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .replica_axis = "data"}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .sequence_axis = "data"}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .context_axis = "data"}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .stage_axis = "data"}, mesh), ConfigError);
  });
}

}  // namespace
}  // namespace sheaf::models
