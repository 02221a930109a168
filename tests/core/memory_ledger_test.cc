#include "sheaf/core/memory_ledger.h"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/storage.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Block = std::shared_ptr<Storage>;

Block take(int64_t bytes, HeldFor use = HeldFor::activations, std::string_view op = "linear", std::string_view module = "mlp") {
  const MemoryUse by(use, op, module);
  return Storage::allocate(Device::cpu(), bytes);
}

/// The only holder with that use.
MemoryLedger::Holder holder(const MemoryLedger::Peak& peak, HeldFor use) {
  MemoryLedger::Holder found;
  int count = 0;
  for (const auto& h : peak.holders)
    if (h.use == use) found = h, ++count;
  EXPECT_LE(count, 1) << name(use);
  return found;
}

class Ledger : public ::testing::Test {
 protected:
  RankContext context;
  const RankScope scope{context};
  Allocator& memory = *context.cpu;
  MemoryStats stats() const { return memory.stats(); }
};

TEST_F(Ledger, KnowsWhoHeldWhatAtThePeak) {
  MemoryLedger ledger;
  Block masters = take(1000, HeldFor::masters, "resting", "");
  {
    const Block one = take(300), two = take(30), nothing = take(0), other = take(7, HeldFor::activations, "gelu");
    const Block gathered = take(4000, HeldFor::gathered, "all_gather", "blocks.1");
  }
  { const Block nothing = take(0); }
  const Block late = take(500, HeldFor::gradients, "reduce_scatter", "blocks.1");
  const MemoryLedger::Peak peak = ledger.peak(memory);
  EXPECT_EQ(peak.bytes, stats().peak);
  EXPECT_EQ(peak.bytes, 5337);
  ASSERT_EQ(peak.holders.size(), 4u);
  EXPECT_EQ(peak.holders[0].use, HeldFor::gathered);  // the largest first
  EXPECT_EQ(peak.holders[0].bytes, 4000);
  EXPECT_EQ(peak.holders[0].op, "all_gather");
  EXPECT_EQ(peak.holders[0].module, "blocks.1");
  EXPECT_EQ(peak.holders[1].use, HeldFor::masters);
  EXPECT_EQ(peak.holders[2].op, "linear");
  EXPECT_EQ(peak.holders[2].bytes, 330);
  EXPECT_EQ(peak.holders[2].blocks, 2);
  EXPECT_EQ(peak.holders[3].op, "gelu");
  EXPECT_EQ(peak.held_for(HeldFor::activations), 337);
  EXPECT_EQ(peak.held_for(HeldFor::gradients), 0);
  EXPECT_EQ(peak.last.op, "all_gather");
  EXPECT_EQ(peak.last.bytes, 4000);
}

TEST_F(Ledger, ItsHistoryIsDated) {
  int64_t now = 0;
  MemoryLedger ledger([&] { return now; });
  const Block masters = take(1000, HeldFor::masters, "resting", "");
  ledger.reset_peak();
  now = 3;
  Block first = take(300);
  now = 5;
  const Block second = take(70, HeldFor::temporaries);
  now = 6;
  first = nullptr;
  MemoryLedger::History history = ledger.history(memory);
  EXPECT_EQ(history.before[static_cast<size_t>(HeldFor::masters)], 1000);
  EXPECT_EQ(std::accumulate(history.before.begin(), history.before.end(), int64_t{0}), 1000);
  const MemoryLedger::Change expected[] = {{300, 3, HeldFor::activations}, {70, 5, HeldFor::temporaries}, {-300, 6, HeldFor::activations}};
  ASSERT_EQ(history.changes.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(history.changes[i].bytes, expected[i].bytes);
    EXPECT_EQ(history.changes[i].now, expected[i].now);
    EXPECT_EQ(history.changes[i].use, expected[i].use);
  }
}

// What was allocated before the ledger, and beside Storage.
TEST_F(Ledger, ItsHistoryAddsUpToWhatIsLive) {
  const Block before = take(50);
  MemoryLedger ledger;
  void* const beside = memory.allocate(20);
  const Block one = take(7);
  const MemoryLedger::History history = ledger.history(memory);
  int64_t live = std::accumulate(history.before.begin(), history.before.end(), int64_t{0});
  EXPECT_EQ(live, 50);
  for (const MemoryLedger::Change& change : history.changes) live += change.bytes;
  EXPECT_EQ(live, stats().live);
  memory.free(beside, 20);
}

TEST_F(Ledger, APeakLaterIsAnother) {
  MemoryLedger ledger;
  take(1000);
  memory.reset_peak();
  ledger.reset_peak();
  EXPECT_EQ(ledger.peak(memory).bytes, 0);
  EXPECT_THAT(ledger.peak(memory).holders, IsEmpty());
  const Block kept = take(10, HeldFor::optimizer_state, "", "");
  memory.reset_peak();
  ledger.reset_peak();
  // Only what is live now.
  EXPECT_EQ(ledger.peak(memory).held_for(HeldFor::optimizer_state), 10);
  EXPECT_EQ(ledger.peak(memory).last.bytes, 0);
  take(70);
  const MemoryLedger::Peak peak = ledger.peak(memory);
  EXPECT_EQ(peak.bytes, 80);
  EXPECT_EQ(peak.bytes, stats().peak);
  EXPECT_EQ(peak.held_for(HeldFor::optimizer_state), 10);
  EXPECT_EQ(peak.last.bytes, 70);
}

TEST_F(Ledger, WhatWasThereBeforeIsOther) {
  Block before = take(100), more = take(20);
  MemoryLedger ledger;
  EXPECT_EQ(ledger.peak(memory).bytes, 120);
  EXPECT_EQ(ledger.peak(memory).held_for(HeldFor::other), 120);
  before = nullptr;
  const Block now = take(300);
  EXPECT_EQ(ledger.peak(memory).bytes, 320);
  EXPECT_EQ(ledger.peak(memory).held_for(HeldFor::other), 20);
  more = nullptr;
  const Block nobody = Storage::allocate(Device::cpu(), 500);
  EXPECT_EQ(holder(ledger.peak(memory), HeldFor::other).bytes, 500);
}

TEST_F(Ledger, DiscardedBlocksAreGone) {
  MemoryLedger ledger;
  const Block gathered = take(100, HeldFor::gathered);
  gathered->discard("it was");
  const Block next = take(60);
  EXPECT_EQ(ledger.peak(memory).held_for(HeldFor::gathered), 100);
  ledger.reset_peak();
  EXPECT_EQ(ledger.peak(memory).bytes, 60);
  EXPECT_EQ(ledger.peak(memory).held_for(HeldFor::gathered), 0);
}

TEST_F(Ledger, TheInnermostUseCounts) {
  MemoryLedger ledger;
  const MemoryUse outer(HeldFor::masters, "outer", "");
  const Block inner = take(5);
  const Block again = Storage::allocate(Device::cpu(), 6);
  EXPECT_EQ(ledger.peak(memory).held_for(HeldFor::activations), 5);
  EXPECT_EQ(ledger.peak(memory).held_for(HeldFor::masters), 6);
}

TEST_F(Ledger, PartsOfOneBlockPassFromOneToAnother) {
  MemoryLedger ledger;
  const Block arena = take(1000, HeldFor::idle, "program", "");
  MemoryLog& log = *context.memory_log;
  const MemoryUse use(HeldFor::activations, "linear", "mlp");
  const auto to = log.holder(), from = arena->holder_in(log);
  log.pass_on(memory, 300, from, to);
  log.pass_on(memory, 400, from, to);
  log.pass_on(memory, 300, to, from);
  log.pass_on(memory, 200, from, to);
  log.pass_on(memory, 600, to, from);
  const Block result = take(8, HeldFor::other, "", "");  // more is live, and less of it is used
  const MemoryLedger::Peak peak = ledger.peak(memory);
  EXPECT_EQ(peak.bytes, 1008);
  EXPECT_EQ(peak.held_for(HeldFor::activations), 700);
  EXPECT_EQ(peak.held_for(HeldFor::idle), 308);
  EXPECT_EQ(peak.last.bytes, 400);
}

TEST_F(Ledger, BlocksOutliveTheLedgerThatKnowsThem) {
  Block block;
  {
    MemoryLedger ledger;
    block = take(100);
    EXPECT_THROW(MemoryLedger(), ConfigError);
  }
  MemoryLedger next;
  EXPECT_EQ(next.peak(memory).held_for(HeldFor::other), 100);
  EXPECT_EQ(block->holder_in(*context.memory_log), MemoryLog::kNobody);
  block = nullptr;
  next.reset_peak();
  EXPECT_EQ(next.peak(memory).bytes, 0);
}

TEST_F(Ledger, OtherRanksHaveTheirOwn) {
  MemoryLedger ledger;
  {
    RankContext other;
    const RankScope there(other);
    take(100);
    EXPECT_EQ(other.cpu->stats().peak, 100);
  }
  EXPECT_EQ(ledger.peak(memory).bytes, 0);
}

TEST_F(Ledger, TextHasModulesOfAllBlocksTogether) {
  MemoryLedger ledger;
  std::vector<Block> blocks;
  for (const char* module : {"blocks.0.mlp", "blocks.1.mlp", "blocks.11.mlp"})
    blocks.push_back(take(1 << 20, HeldFor::activations, "linear", module));
  blocks.push_back(take(1 << 20, HeldFor::masters, "resting", ""));
  const MemoryLedger::Peak peak = ledger.peak(memory);
  const std::string text = to_text(peak);
  EXPECT_THAT(text, HasSubstr("      3.00   75.0  activations\n"));
  EXPECT_THAT(text, HasSubstr("      1.00   25.0  masters\n"));
  EXPECT_THAT(text, HasSubstr("      3.00   75.0  activations: linear of blocks.*.mlp, 3 times"));
  EXPECT_THAT(text, HasSubstr("masters: resting of the model itself"));
  EXPECT_THAT(text, HasSubstr("it came to that when resting of the model itself took 1048576 bytes (masters)"));
  EXPECT_EQ(to_words(peak), "activations 75%, masters 25%");
}

TEST_F(Ledger, TextOfLittleSaysNothingOfNothing) {
  const MemoryLedger ledger;
  EXPECT_THAT(to_text(ledger.peak(memory)), Not(HasSubstr("it came to")));
  EXPECT_EQ(to_words(ledger.peak(memory)), "");
}

}  // namespace
}  // namespace sheaf
