// Micro-batches that are recorded in parts, with others in between, and differentiated part by part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/nn/layers/dropout.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kMicroBatches = 3, kParts = 3;

// Each part is a block; the last one also reads the first one's output.
struct Skipping : nn::Module {
  TinyBlock first{7}, second{7}, third{7};
  nn::Dropout dropout{0.3};  // of every part
  bool penalizes = false;    // the gradient of the last one's input
  struct Values {
    Tensor x, skipped, loss;
  };
  void part(int p, Values& v) {
    const auto scope = enter();
    if (p == 0) v.skipped = v.x = dropout(first(v.x));
    if (p == 1) v.x = dropout(second(v.x));
    if (p != 2) return;
    const Tensor in = dropout(v.x + v.skipped);
    v.loss = sum(mul(third(in), 0.25));
    if (penalizes) v.loss = v.loss + sum(square(Recording::current()->gradient(v.loss, std::span(&in, 1), {.keep = true})[0]));
  }
  SHEAF_FIELDS(first, second, third, dropout);
};

// A letter for each turn, on one micro-batch each: a, b, c record the parts, w all of them at once; A to C differentiate the last, middle
// and first part, W all that are left.
using Turns = std::vector<std::pair<char, int>>;

struct Outcome {
  std::vector<std::vector<double>> gradients;
  std::vector<int64_t> live;  // bytes after each turn
};

Outcome outcome_of(const Turns& turns, bool first_is_frozen = false, bool penalizes = false) {
  Outcome out;
  Skipping model;
  model.penalizes = penalizes;
  if (first_is_frozen)
    for (nn::Parameter& p : model.first.parameters()) p.freeze();
  shard(model, {}, {.units = nn::units_of<TinyBlock>()});
  materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
  Allocator& memory = *RankContext::current().memory(Device::cpu());
  const int64_t before = memory.stats().live;
  std::vector<Skipping::Values> values(kMicroBatches);
  std::vector<Tensor> random;
  for (int64_t m = 0; m < kMicroBatches; ++m) random.push_back(Tensor::from<int64_t>({9, 3, 2 * m}, {3}));
  {
    Recording recording({.step = 3, .seed = 9});
    for (const auto& [turn, m] : turns) {
      Skipping::Values& v = values[static_cast<size_t>(m)];
      if (turn == 'W') {
        recording.backward(v.loss);
      } else if (turn <= 'C') {
        recording.backward(v.loss, {.last_part_only = true});
      } else {
        const Tensor& state = random[static_cast<size_t>(m)];
        const bool whole = turn == 'w';
        if (turn == 'a' || whole) recording.next_micro_batch(2 * m, state), v.x = full_of({kF64, {2, 7}, {}}, 0.5 + m);
        else recording.resume_micro_batch(2 * m, state);
        for (int p = whole ? 0 : turn - 'a'; p <= (whole ? 2 : turn - 'a'); ++p) model.part(p, v);
        if (turn == 'c' || whole) v.x = v.skipped = {};
      }
      out.live.push_back(memory.stats().live - before);
    }
    recording.take();
  }
  for (const nn::Parameter& p : model.parameters())
    if (p.trainable()) out.gradients.push_back(full_gradient(p).to_vector<double>());
  return out;
}

const Turns kInOrder = {{'w', 0}, {'W', 0}, {'w', 1}, {'W', 1}, {'w', 2}, {'W', 2}};

// Only the order in which a unit's micro-batches are differentiated affects the bits.
TEST(Parts, HaveTheGradientsOfTheWhole) {
  const auto expected = outcome_of(kInOrder).gradients;
  for (const Turns& turns : {Turns{{'a', 0}, {'b', 0}, {'c', 0}, {'A', 0}, {'B', 0}, {'C', 0}, {'a', 1}, {'b', 1}, {'c', 1}, {'A', 1}, {'B', 1},
                                   {'C', 1}, {'a', 2}, {'b', 2}, {'c', 2}, {'A', 2}, {'B', 2}, {'C', 2}},
                             Turns{{'a', 0}, {'a', 1}, {'a', 2}, {'b', 0}, {'b', 1}, {'b', 2}, {'c', 0}, {'A', 0}, {'c', 1}, {'A', 1}, {'c', 2},
                                   {'A', 2}, {'B', 0}, {'B', 1}, {'B', 2}, {'C', 0}, {'C', 1}, {'C', 2}},
                             Turns{{'a', 0}, {'a', 1}, {'b', 0}, {'c', 0}, {'A', 0}, {'b', 1}, {'B', 0}, {'a', 2}, {'C', 0}, {'c', 1}, {'W', 1},
                                   {'b', 2}, {'c', 2}, {'A', 2}, {'W', 2}}})
    EXPECT_EQ(outcome_of(turns).gradients, expected);
}

// A kept gradient, and its use in the loss, is not a separate part.
TEST(Parts, MayHaveGradientsInTheirLoss) {
  const auto expected = outcome_of(kInOrder, false, true).gradients;
  EXPECT_NE(expected, outcome_of(kInOrder).gradients);
  EXPECT_EQ(outcome_of({{'a', 0}, {'a', 1}, {'b', 0}, {'b', 1}, {'c', 0}, {'A', 0}, {'c', 1}, {'A', 1}, {'B', 0}, {'B', 1}, {'a', 2}, {'C', 0},
                        {'C', 1}, {'b', 2}, {'c', 2}, {'A', 2}, {'B', 2}, {'C', 2}}, false, true).gradients, expected);
}

// A part that is entirely frozen gets no gradient, but has its turn.
TEST(Parts, MayBeFrozen) {
  const auto expected = outcome_of(kInOrder, true).gradients;
  EXPECT_EQ(expected.size(), outcome_of(kInOrder).gradients.size() * 2 / 3);
  EXPECT_EQ(outcome_of({{'a', 0}, {'a', 1}, {'b', 0}, {'b', 1}, {'c', 0}, {'A', 0}, {'c', 1}, {'A', 1}, {'B', 0}, {'B', 1}, {'a', 2}, {'C', 0},
                        {'C', 1}, {'b', 2}, {'c', 2}, {'A', 2}, {'B', 2}, {'C', 2}}, true).gradients, expected);
}

// If a part fails, the rest fails: gradients that had reached the earlier parts are lost.
TEST(Parts, AreOverWhereOneFails) {
  Skipping model;
  shard(model, {}, {.units = nn::units_of<TinyBlock>()});
  materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
  bool fails = true;
  Recording recording;
  recording.next_micro_batch(0);
  const Tensor x = model.first(full_of({kF64, {2, 7}, {}}, 0.5));
  recording.resume_micro_batch(0);
  const Tensor y = custom_vjp([](const Tensor& t) { return t * 2.0; },
                              [&](Vjp& c) {
                                if (fails) fail<DataError>("[test] fails");
                                c.set(0, c.grad() * 2.0);
                              }, model.second(x));
  recording.resume_micro_batch(0);
  const Tensor loss = sum(model.third(y));
  recording.backward(loss, {.last_part_only = true});
  const Tensor xs[] = {x};
  fails = false;
  EXPECT_EQ(recording.gradient(sum(y), xs)[0].shape(), x.shape()) << "of a part that waits";
  fails = true;
  EXPECT_THROW(recording.backward(loss, {.last_part_only = true}), DataError);
  EXPECT_THROW(recording.backward(loss, {.last_part_only = true}), LifetimeError);
}

// Each part's backward frees what that part kept.
TEST(Parts, AreFreedByTheirBackward) {
  Turns turns = {{'a', 0}, {'b', 0}, {'c', 0}, {'W', 0}};  // after which there are gradients
  for (const auto& turn : Turns{{'a', 1}, {'b', 1}, {'a', 2}, {'c', 1}, {'A', 1}, {'B', 1}, {'C', 1}}) turns.push_back(turn);
  const std::vector<int64_t> live = outcome_of(turns).live;
  const int64_t of_another = live[6] - live[5], of_its_loss = 8;
  EXPECT_GT(of_another, 0);
  EXPECT_LT(live[8], live[7]);
  EXPECT_LT(live[9], live[8]);
  EXPECT_EQ(live[10], live[3] + of_another + of_its_loss);
}

TEST(Parts, AreDifferentiatedOnce) {
  Skipping model;
  shard(model, {}, {.units = nn::units_of<TinyBlock>()});
  materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
  Recording recording;
  Skipping::Values v{.x = full_of({kF64, {2, 7}, {}}, 0.5), .skipped = {}, .loss = {}};
  recording.next_micro_batch(0);
  model.part(0, v);
  recording.resume_micro_batch(0);
  model.part(1, v);
  recording.resume_micro_batch(0);
  model.part(2, v);
  for (int p = 0; p < kParts; ++p) recording.backward(v.loss, {.last_part_only = true});
  for (const bool last_part_only : {true, false})
    EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.backward(v.loss, {.last_part_only = last_part_only}); }),
                HasSubstr("add the losses and call backward once"));
}

}  // namespace
}  // namespace sheaf::testing
