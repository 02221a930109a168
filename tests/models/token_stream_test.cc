#include "sheaf/models/token_stream.h"

#include <gtest/gtest.h>

#include <numeric>

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
      for (int64_t step : {2, 0, 1}) {  // any order: there is no position
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

TEST(TokenStream, RefusesWhatCannotBe) {
  run_local(1, [](World& world) {
    const Mesh mesh = world.mesh({{"data", 1}});
    EXPECT_THROW(TokenStream(numbers(5), {.batch_per_rank = 1, .context = 5}, mesh), DataError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 0, .context = 5}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .axis = "no"}, mesh), ConfigError);
    EXPECT_THROW(TokenStream(numbers(50), {.batch_per_rank = 1, .context = 5, .replica_axis = "data"}, mesh), ConfigError);
  });
}

}  // namespace
}  // namespace sheaf::models
