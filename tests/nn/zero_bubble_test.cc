// Zero-bubble schedules: the order of turns, how long stages wait and what they hold.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/distributed/pipeline.h"

namespace sheaf::testing {
namespace {

std::string order_of(int stage, int stages, int64_t micro_batches, int64_t runs = 1) {
  std::string out;
  for (const auto& [kind, micro, run] : zero_bubble(stage, stages, micro_batches, runs)) {
    constexpr const char* kNames[] = {"F", "B", "I", "W"};
    out += str(out.empty() ? "" : " ", kNames[kind], micro);
    if (runs > 1) out += static_cast<char>('a' + run);
  }
  return out;
}

TEST(ZeroBubble, WeightsComeSoManyTurnsLateAsThereAreStagesBefore) {
  EXPECT_EQ(order_of(0, 1, 3), "F0 B0 F1 B1 F2 B2");
  EXPECT_EQ(order_of(0, 3, 4), "F0 F1 F2 B0 F3 B1 B2 B3");
  EXPECT_EQ(order_of(1, 3, 4), "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3");
  EXPECT_EQ(order_of(2, 3, 4), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
  EXPECT_EQ(order_of(3, 4, 1), "F0 I0 W0");
  EXPECT_EQ(order_of(0, 2, 2, 2), "F0a F1a F0b F1b I0b W0b I1b W1b B0a B1a") << "what the first run of the first stage has sends nothing";
  EXPECT_EQ(order_of(1, 2, 2, 2), "F0a F1a F0b I0b F1b I1b W0b I0a W1b I1a W0a W1a");
  EXPECT_THROW(zero_bubble(3, 3, 2), ConfigError);
  EXPECT_THROW(zero_bubble(0, 3, 4, 2), ConfigError);
}

struct Seconds {
  int64_t forward, input, weight;
};

// The time when all stages are done, if each takes its turns in order, as soon as their inputs are there. -1: never.
int64_t seconds_of(int stages, int64_t micro_batches, int64_t runs, const Seconds& turn, bool later) {
  std::vector<std::vector<Turn>> turns;
  for (int s = 0; s < stages; ++s)
    turns.push_back((later ? zero_bubble : one_forward_one_backward)(s, stages, micro_batches, runs));
  const int64_t parts = 2 * stages * runs;  // of a micro-batch, forward and backward
  std::vector<int64_t> at(static_cast<size_t>(micro_batches)), done = at, clock(static_cast<size_t>(stages));
  std::vector<size_t> next(clock.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t s = 0; s < clock.size(); ++s)
      for (; next[s] < turns[s].size(); ++next[s], moved = true) {
        const auto& [kind, micro, run] = turns[s][next[s]];
        const auto m = static_cast<size_t>(micro);
        if (kind == Turn::backward_weight) {
          clock[s] += turn.weight;
          continue;
        }
        const int64_t part = run * stages + static_cast<int64_t>(s);
        if (at[m] != (kind == Turn::forward ? part : parts - 1 - part)) break;
        ++at[m];
        clock[s] = std::max(clock[s], done[m]) + (kind == Turn::forward ? turn.forward : turn.input);
        done[m] = clock[s];
        if (kind == Turn::backward) done[m] = clock[s] += turn.weight;
      }
  }
  for (size_t s = 0; s < clock.size(); ++s)
    if (next[s] < turns[s].size()) return -1;
  return std::ranges::max(clock);
}

// As long as its formula says, whatever turns take, if gradients of weights take no longer than forwards.
TEST(ZeroBubble, StagesWaitLess) {
  for (int stages = 1; stages <= 6; ++stages)
    for (int64_t runs = 1; runs <= 4; ++runs)
      for (int64_t rounds = runs > 1 ? 1 : 2; rounds <= 4; ++rounds)
        for (const Seconds& t : {Seconds{10, 10, 10}, {10, 12, 8}, {10, 10, 7}, {12, 18, 11}}) {
          const int64_t n = rounds * stages, busy = n * runs * (t.forward + t.input + t.weight);
          EXPECT_EQ(seconds_of(stages, n, runs, t, false), busy + (stages - 1) * (t.forward + t.input + t.weight));
          const int64_t waits = (stages - 1) * (t.forward + t.input - t.weight);
          EXPECT_EQ(seconds_of(stages, n, runs, t, true), busy + waits) << stages << ' ' << runs << ' ' << n << ' ' << t.weight;
        }
}

// Micro-batches between their forward and their last gradient: on any stage no more than on the first under 1F1B; for any number of
// micro-batches, and with the same order of forwards and of backwards.
TEST(ZeroBubble, NoStageHoldsMoreThanTheFirst) {
  for (int stages = 1; stages <= 6; ++stages)
    for (int64_t runs = 1; runs <= 4; ++runs)
      for (int64_t n = runs > 1 ? stages : 1; n <= 4 * stages; n += runs > 1 ? stages : 1) {
        EXPECT_GE(seconds_of(stages, n, runs, {1, 1, 1}, true), 0);
        int64_t allowed = 0;
        for (int s = 0; s < stages; ++s) {
          const auto plain = one_forward_one_backward(s, stages, n, runs), turns = zero_bubble(s, stages, n, runs);
          int64_t held = 0, most = 0, before = 0;
          for (const Turn& t : plain) before = std::max(before, held += t.kind == Turn::forward ? 1 : -1);
          if (s == 0) allowed = before;
          held = 0;
          std::vector<Turn> same, weights, inputs;
          for (Turn t : turns) {
            most = std::max(most, held += t.kind == Turn::forward ? 1 : t.kind == Turn::backward_input ? 0 : -1);
            if (t.kind == Turn::backward_weight) weights.push_back(t);
            else if (t.kind == Turn::backward_input) inputs.push_back(t), same.push_back({Turn::backward, t.micro_batch, t.run});
            else same.push_back(t);
          }
          EXPECT_LE(most, allowed);
          EXPECT_EQ(same, plain);
          ASSERT_EQ(weights.size(), inputs.size());
          for (size_t i = 0; i < weights.size(); ++i)
            EXPECT_TRUE(weights[i].micro_batch == inputs[i].micro_batch && weights[i].run == inputs[i].run);
        }
      }
}

}  // namespace
}  // namespace sheaf::testing
