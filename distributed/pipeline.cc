#include "sheaf/distributed/pipeline.h"

#include <algorithm>

#include "sheaf/core/error.h"

namespace sheaf {

std::vector<Turn> one_forward_one_backward(int stage, int stages, int64_t micro_batches, int64_t runs) {
  if (stage < 0 || stage >= stages || micro_batches < 1 || runs < 1)
    fail<ConfigError>("[pipeline] stage ", stage, " of ", stages, " with ", micro_batches, " micro-batches in ", runs, " runs");
  if (runs > 1 && micro_batches % stages != 0)
    fail<ConfigError>("[pipeline] ", micro_batches, " micro-batches are not a multiple of the ", stages, " stages that they go round ",
                      runs, " times");
  // As many micro-batches as there are stages go through a run before the next: the first comes round when the last has left.
  const int64_t together = runs > 1 ? stages : 1, all = micro_batches * runs;
  const auto turn = [&](bool backward, int64_t i) {
    const int64_t run = i / together % runs;
    return Turn{backward, i / (together * runs) * together + i % together, backward ? runs - 1 - run : run};
  };
  const int64_t ahead = std::min(all, runs > 1 ? 2 * (stages - stage - 1) + (runs - 1) * stages + 1 : stages - stage);
  std::vector<Turn> turns;
  for (int64_t i = 0; i < ahead; ++i) turns.push_back(turn(false, i));
  for (int64_t i = 0; i < all; ++i) {
    turns.push_back(turn(true, i));
    if (i + ahead < all) turns.push_back(turn(false, i + ahead));
  }
  return turns;
}

int stage_of_block(int64_t block, int64_t blocks, int stages, int64_t runs) {
  return static_cast<int>(block * stages * runs / blocks % stages);
}

int64_t end_of_run(int64_t run, int stage, int64_t blocks, int stages, int64_t runs) {
  if (run + 1 == runs) return blocks;
  const int64_t parts = stages * runs, next = (run + 1) * stages + stage;
  return (next * blocks + parts - 1) / parts;
}

}  // namespace sheaf
