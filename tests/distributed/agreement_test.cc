#include "sheaf/distributed/agreement.h"

#include <gtest/gtest.h>

#include "sheaf/distributed/run_local.h"

namespace sheaf {
namespace {

/// The error that each of `ranks` ranks throws, "" for none, if its facts are `facts(rank)`.
std::vector<std::string> outcomes(int ranks, const std::function<std::vector<Fact>(int)>& facts) {
  std::vector<std::string> thrown(static_cast<size_t>(ranks));
  run_local(ranks, [&](World& world) {
    try {
      require_agreement(world, "config", facts(world.rank()));
      // Ranks that agree go on together.
      world.mesh({{"data", world.size()}}).runtime->gather_lane(0).barrier("after").sync();
    } catch (const ConfigError& e) {
      EXPECT_EQ(e.exit_code(), 64);
      thrown[static_cast<size_t>(world.rank())] = e.what();
    }
  });
  return thrown;
}

TEST(Agreement, OfAll) {
  for (int ranks : {1, 2, 5})
    for (const std::string& what : outcomes(ranks, [](int rank) {
           return std::vector<Fact>{{"a", "1"}, {"b", ""}, {"data", "same", str("from place ", rank)}};
         }))
      EXPECT_EQ(what, "");
  for (const std::string& what : outcomes(3, [](int) { return std::vector<Fact>{}; })) EXPECT_EQ(what, "");
}

TEST(Agreement, EveryRankNamesTheFirstDifference) {
  for (int odd = 1; odd < 4; ++odd)
    for (const std::string& what : outcomes(4, [&](int rank) {
           const bool other = rank >= odd;
           return std::vector<Fact>{{"a", "1"}, {"train.batch", other ? "16" : "12"}, {"train.lr", other ? "1" : "2"}};
         }))
      EXPECT_EQ(what, str("[config] ranks disagree: train.batch is 12 on rank 0 and 16 on rank ", odd));
  for (const std::string& what : outcomes(2, [](int rank) {
         return std::vector<Fact>{{"the data", rank ? "x" : "", rank ? "of rank one" : "of rank zero"}};
       }))
    EXPECT_EQ(what, "[config] ranks disagree: the data is of rank zero on rank 0 and of rank one on rank 1");
}

TEST(Agreement, OtherProgramsDisagree) {
  for (int many : {0, 1})
    for (const std::string& what : outcomes(2, [&](int rank) {
           return rank == many ? std::vector<Fact>{{"a", "1"}, {"b", "2"}} : std::vector<Fact>{};
         }))
      EXPECT_EQ(what, "[config] ranks 0 and 1 run different versions of the program");
}

TEST(Agreement, ARankThatFailsBeforeEndsTheWait) {
  std::vector<int> codes(3);
  EXPECT_THROW(run_local(3,
                         [&](World& world) {
                           try {
                             world.guard([&] {
                               if (world.rank() == 1) fail<DataError>("[corpus] missing");
                               require_agreement(world, "config", {{"a", "1"}});
                             });
                           } catch (const Error& e) {
                             codes[static_cast<size_t>(world.rank())] = e.exit_code();
                             throw;
                           }
                         }),
               DataError);
  EXPECT_EQ(codes, (std::vector<int>{72, 65, 72}));
}

}  // namespace
}  // namespace sheaf
