#include "sheaf/models/matrix_blocks.h"

#include <gtest/gtest.h>

namespace sheaf::models {
namespace {

std::vector<int64_t> elements_of(const Runs& runs) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < runs.numel(); ++i) out.push_back(runs.at(i));
  return out;
}

TEST(MatrixBlocks, AreTheElementsOfAnyRuns) {
  for (int64_t row_size = 1; row_size <= 9; ++row_size)
    for (int64_t begin = 0; begin <= 7; ++begin)
      for (int64_t size = 0; size <= 20; ++size)
        for (int64_t count = 1; count <= 4; ++count)
          for (int64_t stride = size; stride <= size + 9; ++stride) {
            const Runs runs{begin, size, count, stride};
            std::vector<int64_t> got;
            for (const MatrixBlock& b : blocks_of(runs, row_size)) {
              ASSERT_EQ(b.at, static_cast<int64_t>(got.size()));
              ASSERT_LE(b.column + b.columns, row_size);
              ASSERT_GT(b.numel(), 0);
              for (int64_t r = b.row; r < b.row + b.rows; ++r)
                for (int64_t c = b.column; c < b.column + b.columns; ++c) {
                  ASSERT_EQ(b.at_of(r, c), static_cast<int64_t>(got.size()));
                  got.push_back(r * row_size + c);
                }
            }
            ASSERT_EQ(got, elements_of(runs)) << row_size << ": " << begin << " " << size << " " << count << " " << stride;
          }
}

TEST(MatrixBlocks, AreFew) {
  using Blocks = std::vector<MatrixBlock>;
  EXPECT_EQ(blocks_of({3, 2, 1000, 8}, 8), (Blocks{{0, 1000, 3, 2, 0}}));
  EXPECT_EQ(blocks_of(Runs::of({3, 797}), 8), (Blocks{{0, 1, 3, 5, 0}, {1, 98, 0, 8, 5}, {99, 1, 0, 5, 789}}));
  EXPECT_EQ(blocks_of(Runs::of({0, 800}), 8), (Blocks{{0, 100, 0, 8, 0}}));
  EXPECT_EQ(blocks_of({0, 8, 100, 8}, 8), (Blocks{{0, 100, 0, 8, 0}}));
  EXPECT_EQ(blocks_of({7, 2, 100, 8}, 8).size(), 200u);
}

TEST(MatrixBlocks, Overlap) {
  EXPECT_EQ(overlap({2, 5, 1, 4, 9}, {0, 4, 3, 6, 5}), (MatrixBlock{2, 2, 3, 2, 0}));
  EXPECT_EQ(overlap({0, 2, 0, 2}, {2, 2, 0, 2}).numel(), 0);
  EXPECT_EQ(overlap({0, 2, 0, 2}, {0, 2, 5, 2}).numel(), 0);
  EXPECT_EQ(overlap({0, 2, 0, 2}, {7, 2, 5, 2}).numel(), 0);
}

}  // namespace
}  // namespace sheaf::models
