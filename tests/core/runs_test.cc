// Runs of flat indices that a cut of a dimension leaves a rank, against a count element by element.
#include "sheaf/core/runs.h"

#include <gtest/gtest.h>

#include <numeric>

#include "sheaf/core/error.h"

namespace sheaf {
namespace {

// Flat indices of a rank's elements, in the order of its block.
std::vector<int64_t> block_of(const OwnershipMap& map, int rank, int ranks, const Shape& global) {
  int64_t outer = 1, inner = 1;
  for (int d = 0; d < map.dim(); ++d) outer *= global[d];
  for (int d = map.dim() + 1; d < global.rank(); ++d) inner *= global[d];
  std::vector<int64_t> out;
  for (int64_t o = 0; o < outer; ++o)
    for (const Interval& own : map.owned_intervals(rank, ranks, global))
      for (int64_t row = own.begin; row < own.end; ++row)
        for (int64_t i = 0; i < inner; ++i) out.push_back((o * global[map.dim()] + row) * inner + i);
  return out;
}

struct Case {
  OwnershipMap map;
  Shape global;
};

const std::vector<Case>& cases() {
  static const auto* list = new std::vector<Case>{
      {OwnershipMap::even(0), {7, 3}},
      {OwnershipMap::even(1), {4, 7}},
      {OwnershipMap::even(1, 2), {3, 10, 2}},
      {OwnershipMap::parts(0, {8, 4, 4}, 4), {16, 3}},
      {OwnershipMap::parts(0, {6, 2}, 2), {8}},
      {OwnershipMap::parts(1, {4, 8}, 4), {3, 12, 2}},
      {OwnershipMap::even(0), {0, 3}},
  };
  return *list;
}

TEST(Runs, AreTheElementsOfEveryIntervalOfABlock) {
  for (const Case& c : cases())
    for (int ranks = 1; ranks <= 5; ++ranks)
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<int64_t> block = block_of(c.map, rank, ranks, c.global);
        EXPECT_EQ(static_cast<int64_t>(block.size()), [&] {
          Shape local = c.global;
          local[c.map.dim()] = c.map.owned_size(rank, ranks, c.global);
          return local.numel();
        }());
        const auto n = static_cast<int64_t>(block.size());
        for (int64_t begin = 0; begin <= n; ++begin)
          for (int64_t end = begin; end <= n; ++end) {
            std::vector<int64_t> got;
            for (const auto& [runs, at] : runs_of(c.map, rank, ranks, c.global, {begin, end})) {
              ASSERT_EQ(at, begin + static_cast<int64_t>(got.size()));
              for (int64_t k = 0; k < runs.count; ++k)
                for (int64_t i = runs[k].begin; i < runs[k].end; ++i) got.push_back(i);
            }
            ASSERT_EQ(got, std::vector<int64_t>(block.begin() + begin, block.begin() + end))
                << c.map.to_string() << " of " << c.global.to_string() << " rank " << rank << " of " << ranks << " [" << begin << ", " << end << ")";
          }
      }
}

TEST(Runs, AreFew) {
  // A range of a column block is at most the end of a row, whole rows, and the beginning of a row.
  EXPECT_EQ(runs_of(OwnershipMap::even(1), 1, 2, {100, 8}, {3, 397}).size(), 3u);
  EXPECT_EQ(runs_of(OwnershipMap::even(1), 1, 2, {100, 8}, {0, 400}),
            (std::vector<LocalRuns>{{{4, 4, 100, 8}, 0}}));
  // Without a cut, the runs are one interval.
  EXPECT_EQ(runs_of(OwnershipMap::even(1), 0, 1, {100, 8}, {3, 797}), (std::vector<LocalRuns>{{{3, 794}, 3}}));
  EXPECT_EQ(runs_of(OwnershipMap::parts(0, {8, 4, 4}, 4), 0, 1, {16, 3}, {0, 48}), (std::vector<LocalRuns>{{{0, 48}, 0}}));
}

TEST(Parts, EveryElementOfEachPartHasOneOwner) {
  const OwnershipMap map = OwnershipMap::parts(0, {20, 5, 10}, 5);
  for (int ranks = 1; ranks <= 6; ++ranks) {
    std::vector<int> owners(35, 0);
    for (int rank = 0; rank < ranks; ++rank)
      for (const Interval& own : map.owned_intervals(rank, ranks, {35, 2}))
        for (int64_t i = own.begin; i < own.end; ++i) ++owners[static_cast<size_t>(i)];
    EXPECT_EQ(owners, std::vector<int>(35, 1)) << ranks;
  }
  EXPECT_EQ(map.owned_intervals(1, 2, {35}), (std::vector<Interval>{{8, 20}, {22, 25}, {29, 35}}));
  EXPECT_EQ(map.moved_to(2, 2), OwnershipMap::parts(2, {40, 10, 20}, 5));
  EXPECT_EQ(map.moved_to(0, 1, 1), map);
  EXPECT_EQ(map.to_string(), "0 parts");
}

TEST(Parts, AreRowsOfDimensionsOnSeveralAxes) {
  const MeshSpec* mesh = MeshSpec::intern({{"data", 2}, {"model", 2}});
  const auto rows = [&](const Placement& p, const Placement& q, int dim, int data, int model) {
    const int at[] = {data, model};
    return Layout(mesh, {p, q}).local_rows({16, 12}, dim, at);
  };
  const Placement parts = Placement::shard(OwnershipMap::parts(0, {8, 4, 4}, 4)), whole = Placement::replicate();
  using Rows = std::vector<Interval>;
  EXPECT_EQ(rows(whole, parts, 0, 1, 1), (Rows{{4, 8}, {10, 12}, {14, 16}}));
  EXPECT_EQ(rows(whole, parts, 1, 1, 1), (Rows{{0, 12}}));
  EXPECT_EQ(rows(parts, Placement::shard(0), 0, 0, 0), (Rows{{0, 4}})) << "of [0,4) [8,10) [12,14) the first half";
  EXPECT_EQ(rows(parts, Placement::shard(0), 0, 1, 1), (Rows{{10, 12}, {14, 16}}));
  EXPECT_EQ(rows(parts, Placement::shard(OwnershipMap::parts(0, {4, 2, 2}, 2)), 0, 1, 0), (Rows{{4, 6}, {10, 11}, {14, 15}}));
  EXPECT_EQ(rows(Placement::shard(0), Placement::shard(0), 0, 1, 0), (Rows{{8, 12}}));
  EXPECT_EQ(rows(Placement::shard(OwnershipMap::uneven(1, {12, 0})), whole, 1, 1, 0), Rows{});
}

TEST(Parts, MoveWhereEveryShareIsWholeRows) {
  const OwnershipMap map = OwnershipMap::parts(2, {12, 6, 6}, 2);
  EXPECT_TRUE(map.can_move(1, 3));
  EXPECT_EQ(map.moved_to(2, 1, 3), OwnershipMap::parts(2, {4, 2, 2}, 2));
  EXPECT_FALSE(map.can_move(1, 2)) << "a share of three elements is no rows of two";
  EXPECT_TRUE(map.can_move(4, 2));
  EXPECT_TRUE(OwnershipMap::even(0, 6).can_move(1, 3));
  EXPECT_FALSE(OwnershipMap::even(0, 4).can_move(1, 3));
}

TEST(Parts, RefuseWhatDoesNotFit) {
  EXPECT_THROW(OwnershipMap::parts(0, {6, 4}, 4), PlacementError);
  EXPECT_THROW(OwnershipMap::even(0, 0), PlacementError);
  const OwnershipMap map = OwnershipMap::parts(0, {8, 4}, 4);
  EXPECT_THROW(map.owned_intervals(0, 2, {13}), PlacementError);
  EXPECT_THROW(map.owned_size(0, 2, {13}), PlacementError);
  EXPECT_THROW(map.owned_size(0, 2, {}), PlacementError);
  EXPECT_THROW(map.owned(0, 2, {12}), PlacementError) << "not one interval";
  EXPECT_EQ(map.owned(0, 1, {12}), (Interval{0, 12}));
  EXPECT_THROW(map.moved_to(0, 1, 2), PlacementError) << "parts of 4 and 2 rows are not 4 units";
}

}  // namespace
}  // namespace sheaf
