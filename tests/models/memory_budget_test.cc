// The effects of a memory budget: which units a program keeps gathered, and how many blocks are recomputed.
#include <gtest/gtest.h>

#include "sheaf/models/plan.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

models::TrainConfig llama_config() {
  models::TrainConfig config = tiny_rank_config("full_shard");
  config.model = tiny_model("llama", 6, 2);
  return config;
}

TEST(MemoryBudget, KeepsWhatFits) {
  const auto plan = [&](int64_t budget) {
    models::TrainConfig config = llama_config();
    config.train.compile = true;
    config.sharding.memory_budget = budget;
    return models::plan_step(config, 13, 0, 3, 1, "local");
  };
  const models::Plan none = plan(0), all = plan(int64_t{1} << 40);
  const int64_t gathers = traffic(none.tape)["all_gather data"].count;
  EXPECT_EQ(traffic(all.tape)["all_gather data"].count, 3) << "each unit once for both micro-batches";
  EXPECT_EQ(traffic(all.tape)["reduce_scatter data"].count, traffic(none.tape)["reduce_scatter data"].count);
  int64_t last = gathers;
  bool some = false;
  for (int part = 0; part <= 8; ++part) {
    const int64_t budget = none.peak.bytes + (all.peak.bytes - none.peak.bytes) * part / 8;
    const models::Plan kept = plan(budget);
    const int64_t count = traffic(kept.tape)["all_gather data"].count;
    EXPECT_LE(kept.peak.bytes, budget + 64);  // what a step returns
    EXPECT_LE(count, last);
    some = some || (count < gathers && count > 3);
    last = count;
  }
  EXPECT_TRUE(some);
  EXPECT_EQ(last, 3);
  models::TrainConfig casting = llama_config();
  casting.train.compile = true;
  casting.train.dtype = "bf16";
  casting.sharding.memory_budget = int64_t{1} << 40;
  const Tape tape = models::plan_step(casting, 13, 0, 3, 1, "local").tape;
  int64_t casts = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) casts += tape.op_name(tape.node(id)) == "cast_shard";
  EXPECT_EQ(casts, 3) << "what was cast for a gather goes with it";
  models::TrainConfig eager = llama_config();
  eager.sharding.memory_budget = 1;
  EXPECT_EQ(refusal(3, eager), "[train] sharding.memory_budget 1 is for train.recompute fit and for train.compile");
}

// --- train.recompute fit ---

models::TrainConfig deep_config() {
  models::TrainConfig config = llama_config();
  config.model.layers = 7;
  config.train.batch = 24;
  return config;
}

models::TrainConfig fitted(models::TrainConfig config, int64_t budget) {
  config.train.recompute = "fit";
  config.sharding.memory_budget = budget;
  return models::fit_recompute(config, 13, 2, 1, "local");
}

int64_t peak_of(const models::TrainConfig& config, int rank = 0) {
  return models::plan_step(config, 13, rank, 2, 1, "local").peak.bytes;
}

/// Recomputes this number of blocks entirely, the others selectively.
int64_t peak_of_blocks(int64_t blocks) {
  models::TrainConfig config = deep_config();
  models::set_fitted(config, blocks);
  return peak_of(config);
}

int64_t peak_of_all_blocks() {
  models::TrainConfig config = deep_config();
  config.train.recompute = "block";
  return peak_of(config);
}

TEST(MemoryBudget, AsFewBlocksAsItTakesAreComputedAgain) {
  const int64_t none = peak_of_blocks(models::kNoRecompute), selective = peak_of_blocks(0), all = peak_of_all_blocks();
  EXPECT_EQ(none, peak_of(deep_config()));
  EXPECT_EQ(all, peak_of_blocks(7));
  EXPECT_LT(selective, none);
  EXPECT_EQ(fitted(deep_config(), none).train.recompute, "none");
  EXPECT_EQ(fitted(deep_config(), none - 1).train.recompute, "selective");
  EXPECT_EQ(fitted(deep_config(), none - 1).train.recompute_blocks, 0);
  EXPECT_EQ(fitted(deep_config(), all).train.recompute_blocks, 6) << "when the last one's turn comes, all is still kept";
  for (int part = 1; part < 8; ++part) {
    const int64_t budget = all + (selective - all) * part / 8;
    const int64_t blocks = fitted(deep_config(), budget).train.recompute_blocks;
    EXPECT_LE(peak_of_blocks(blocks), budget);
    EXPECT_GT(peak_of_blocks(blocks - 1), budget);
    models::TrainConfig asked = deep_config();
    asked.train.recompute = "fit";
    asked.sharding.memory_budget = budget;
    EXPECT_EQ(peak_of(asked), peak_of_blocks(blocks));
  }
  EXPECT_THROW(
      try { fitted(deep_config(), all - 1); } catch (const OutOfMemory& e) {
        EXPECT_NE(std::string(e.what()).find("with all 7 blocks computed again a step takes"), std::string::npos) << e.what();
        throw;
      },
      OutOfMemory);
  models::TrainConfig config = deep_config();
  config.train.recompute = "fit";
  EXPECT_EQ(refusal(2, config), "[train] train.recompute fit: what to fit into is said by sharding.memory_budget");
}

TEST(MemoryBudget, PlansOfAllRanksMayTakeTooLong) {
  models::TrainConfig config = deep_config();
  config.train.batch = 10;
  const auto planned = [&](int seconds) { return models::plan_peaks_within(std::chrono::seconds(seconds), config, 13, 3, 1, "local"); };
  const std::vector<int64_t> all = models::plan_peaks(config, 13, 3, 1, "local");
  EXPECT_TRUE(std::ranges::equal(planned(3600), all, {}, &MemoryLedger::Peak::bytes));
  const std::vector<MemoryLedger::Peak> first = planned(0);
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first[0].bytes, all[0]);
}

// Unequal numbers of rows per rank: the budget applies to the ranks with more.
TEST(MemoryBudget, FitsTheRankWithTheMost) {
  models::TrainConfig config = deep_config();
  config.train.batch = 10;
  const auto peaks = [&](const models::TrainConfig& c) { return models::plan_peaks(c, 13, 3, 1, "local"); };
  const std::vector<int64_t> none = peaks(config);
  const int64_t most = *std::ranges::max_element(none), budget = most * 9 / 10;
  EXPECT_LT(*std::ranges::min_element(none), budget);
  config.train.recompute = "fit";
  config.sharding.memory_budget = budget;
  const models::TrainConfig fits = models::fit_recompute(config, 13, 3, 1, "local");
  EXPECT_EQ(fits.train.recompute, "selective");
  for (const int64_t peak : peaks(fits)) EXPECT_LE(peak, budget);
}

TEST(MemoryBudget, BlocksThatAreComputedAgainChangeNoBit) {
  models::TrainConfig config = deep_config();
  const TrainedRun expected = train_tiny(config, 2, 5);
  const models::TrainConfig some = fitted(config, (peak_of_blocks(0) + peak_of_all_blocks()) / 2);
  EXPECT_GT(some.train.recompute_blocks, 0);
  EXPECT_LT(some.train.recompute_blocks, 7);
  expect_same_bits(train_tiny(some, 2, 5), expected);
  expect_planned_tapes(some, 2);
}

// The rest of the budget keeps units gathered.
TEST(MemoryBudget, ServesBoth) {
  models::TrainConfig config = deep_config();
  config.train.compile = true;
  const int64_t none = peak_of(config);
  const int64_t budget = none * 9 / 10;
  const models::TrainConfig both = fitted(config, budget);
  EXPECT_EQ(both.train.recompute, "selective");
  models::TrainConfig plain = both;
  plain.sharding.memory_budget = 0;
  const models::Plan kept = models::plan_step(both, 13, 0, 2, 1, "local"), gathered = models::plan_step(plain, 13, 0, 2, 1, "local");
  EXPECT_LE(kept.peak.bytes, budget);
  EXPECT_LT(traffic(kept.tape)["all_gather data"].count, traffic(gathered.tape)["all_gather data"].count);
  expect_same_bits(train_tiny(both, 2, 5), train_tiny(deep_config(), 2, 5));
}

}  // namespace
}  // namespace sheaf::testing
