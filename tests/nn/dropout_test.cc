// Dropout is drawn by the global index of a sample, however a step is divided.
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"

namespace sheaf {
namespace {

TEST(Dropout, OfMicroBatchesIsThatOfTheWholeBatch) {
  const RecordingOptions step{.step = 3, .first_sample = 10, .seed = 7};
  const auto drawn = [](int64_t rows) { return dropout(full({rows, 5}, 1.0), 0.5).to_vector(); };
  std::vector<float> whole, other_step;
  {
    Recording recording(step);
    whole = drawn(8);
  }
  {
    Recording recording({.step = 4, .first_sample = 10, .seed = 7});
    other_step = drawn(8);
  }
  EXPECT_NE(whole, other_step);
  for (const bool given : {false, true}) {
    Recording recording(step);
    std::vector<float> parts;
    for (const auto& [first, rows] : {std::pair(10, 3), {13, 4}, {17, 1}}) {
      recording.next_micro_batch(first, given ? Tensor::from<int64_t>({7, 3, first}, {3}) : Tensor());
      const std::vector<float> part = drawn(rows);
      parts.insert(parts.end(), part.begin(), part.end());
    }
    EXPECT_EQ(parts, whole) << given;
  }
}

// Rows of one sample stay together where they are cut, so it is known how many it has.
TEST(Dropout, OfTokensAsRowsIsThatOfTheWholeBatch) {
  for (const int world : {1, 2})
    run_local(world, [](World& w) {
      const Mesh mesh = w.mesh({{"data", w.size()}});
      const auto drawn = [&](int64_t samples) {
        const Tensor x = redistribute(full({samples, 3, 5}, 1.0), Layout(mesh.spec, Placement::shard(0)));
        return full_tensor(dropout(reshape(x, {-1, 5}), 0.5)).to_vector();
      };
      std::vector<float> whole, parts;
      {
        Recording recording({.step = 1});
        whole = drawn(6);
      }
      Recording recording({.step = 1});
      for (const auto& [first, samples] : {std::pair(0, 2), {2, 4}}) {
        recording.next_micro_batch(first);
        const std::vector<float> part = drawn(samples);
        parts.insert(parts.end(), part.begin(), part.end());
      }
      EXPECT_EQ(parts, whole);
    });
}

}  // namespace
}  // namespace sheaf
