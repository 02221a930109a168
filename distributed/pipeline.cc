#include "sheaf/distributed/pipeline.h"

#include <algorithm>

#include "sheaf/core/error.h"

namespace sheaf {

std::vector<Turn> one_forward_one_backward(int stage, int stages, int64_t micro_batches) {
  if (stage < 0 || stage >= stages || micro_batches < 1)
    fail<ConfigError>("[pipeline] stage ", stage, " of ", stages, " with ", micro_batches, " micro-batches");
  const int64_t ahead = std::min<int64_t>(micro_batches, stages - stage);
  std::vector<Turn> turns;
  for (int64_t i = 0; i < ahead; ++i) turns.push_back({false, i});
  for (int64_t i = 0; i < micro_batches; ++i) {
    turns.push_back({true, i});
    if (i + ahead < micro_batches) turns.push_back({false, i + ahead});
  }
  return turns;
}

}  // namespace sheaf
