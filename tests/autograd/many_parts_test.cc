// Values in more parts than an op can have inputs, and memory that a recording meets when it is changed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"

namespace sheaf::testing {
namespace {

using ::testing::ElementsAre;

// A cumulative sum by a loop over time: its gradient with regard to x[b, t] is the sum of later times' weights.
TEST(ManyParts, ALoopOverTimeHasItsGradient) {
  for (int ranks : {1, 2, 3})
    run_local(ranks, [](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      constexpr int64_t kTimes = 150;
      const Type type{kF64, {5, kTimes}, Layout(mesh.spec, Placement::shard(0))};
      const int64_t rows = type.local_shape()[0], first = type.local_start()[0];
      std::vector<double> values;
      for (int64_t b = first; b < first + rows; ++b)
        for (int64_t t = 0; t < kTimes; ++t) values.push_back(static_cast<double>(b * 7 + t % 11));
      Recording recording;
      const Tensor x = recording.watch(Tensor::from_local(values, type));
      std::vector<Tensor> sums;
      for (const Tensor& part : chunk(x, kTimes, 1)) sums.push_back(sums.empty() ? part : sums.back() + part);
      const Tensor all = concat(sums, 1);
      ASSERT_EQ(all.type(), type);
      const std::vector<double> out = all.to_vector<double>();
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t t = 0; t < kTimes; ++t) {
          const auto at = static_cast<size_t>(i * kTimes + t);
          ASSERT_EQ(out[at], values[at] + (t ? out[at - 1] : 0));
        }
      const Tensor weights = Tensor::from([] {
        std::vector<double> w;
        for (int64_t t = 0; t < kTimes; ++t) w.push_back(static_cast<double>(t + 1));
        return w;
      }(), {kTimes});
      const std::vector<double> dx = recording.gradient(sum(all * weights), std::vector{x})[0].to_vector<double>();
      ASSERT_EQ(dx.size(), values.size());
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t t = 0; t < kTimes; ++t)
          ASSERT_EQ(dx[static_cast<size_t>(i * kTimes + t)], static_cast<double>(kTimes * (kTimes + 1) / 2 - t * (t + 1) / 2));
      EXPECT_TRUE(check_tape(recording.tape()).empty());
    });
}

TEST(ManyParts, MoreThan16BitsCount) {
  constexpr int64_t kParts = (int64_t{1} << 16) + 1;
  Recording recording;
  const Tensor x = recording.watch(full({kParts}, 2.0));
  const Tensor last = chunk(x, kParts)[kParts - 1];
  const std::vector<float> dx = recording.gradient(sum(square(last)), std::vector{x})[0].to_vector<float>();
  EXPECT_EQ(dx.front(), 0);
  EXPECT_EQ(dx.back(), 4);
}

TEST(ManyParts, AreStacked) {
  std::vector<Tensor> rows;
  for (int i = 0; i < 200; ++i) rows.push_back(Tensor::from<double>({1.0 * i, 2.0 * i}, {2}));
  const Tensor stacked = stack(rows, 1);
  EXPECT_EQ(stacked.shape(), (Shape{2, 200}));
  const std::vector<double> out = stacked.to_vector<double>();
  for (int i = 0; i < 200; ++i) EXPECT_EQ(out[static_cast<size_t>(200 + i)], 2.0 * i);
}

// A replay starts from what the memory held before.
TEST(ChangedMemory, IsCapturedBeforeItIsChanged) {
  for (const bool adds : {true, false}) {
    const Tensor memory = Tensor::from<double>({1, 2, 3}, {3}), x = Tensor::from<double>({10, 20, 30}, {3});
    Recording recording({.capture_leaves = true});
    const Tensor part = slice(memory, 0, 1, 3);
    adds ? add_into(part, slice(x, 0, 0, 2)) : store_into(part, slice(x, 0, 0, 2));
    const Tensor twice = memory + memory;
    EXPECT_THAT(twice.to_vector<double>(), adds ? ElementsAre(2, 24, 46) : ElementsAre(2, 20, 40));
    const ValueId id = recording.value_of(twice);
    const auto captured = recording.captured();
    const Tape tape = recording.take();
    const Tensor again = replay(tape, [&](ValueId v) { return captured.at(v).clone(); }, std::vector{id})[0];
    EXPECT_EQ(again.to_vector<double>(), twice.to_vector<double>()) << adds;
  }
}

TEST(ChangedMemory, WithoutAViewIsCapturedToo) {
  const Tensor memory = Tensor::from<double>({1, 2}, {2});
  Recording recording({.capture_leaves = true});
  add_into(memory, Tensor::from<double>({5, 5}, {2}));
  EXPECT_THAT(recording.captured().at(recording.value_of(memory)).to_vector<double>(), ElementsAre(1, 2));
  EXPECT_THAT(memory.to_vector<double>(), ElementsAre(6, 7));
}

}  // namespace
}  // namespace sheaf::testing
