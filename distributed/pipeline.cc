#include "sheaf/distributed/pipeline.h"

#include <algorithm>
#include <deque>

#include "sheaf/core/error.h"

namespace sheaf {

std::vector<Turn> one_forward_one_backward(int stage, int stages, int64_t micro_batches, int64_t runs) {
  if (stage < 0 || stage >= stages || micro_batches < 1 || runs < 1)
    fail<ConfigError>("[pipeline] stage ", stage, " of ", stages, " with ", micro_batches, " micro-batches in ", runs, " runs");
  if (runs > 1 && micro_batches % stages != 0)
    fail<ConfigError>("[pipeline] ", micro_batches, " micro-batches are not a multiple of the ", stages, " stages that they go round ",
                      runs, " times");
  // As many micro-batches as there are stages go through a run before the next run: the first returns when the last has left.
  const int64_t together = runs > 1 ? stages : 1, all = micro_batches * runs;
  const auto turn = [&](Turn::Kind kind, int64_t i) {
    const int64_t run = i / together % runs;
    return Turn{kind, i / (together * runs) * together + i % together, kind == Turn::backward ? runs - 1 - run : run};
  };
  const int64_t ahead = std::min(all, runs > 1 ? 2 * (stages - stage - 1) + (runs - 1) * stages + 1 : stages - stage);
  std::vector<Turn> turns;
  for (int64_t i = 0; i < ahead; ++i) turns.push_back(turn(Turn::forward, i));
  for (int64_t i = 0; i < all; ++i) {
    turns.push_back(turn(Turn::backward, i));
    if (i + ahead < all) turns.push_back(turn(Turn::forward, i + ahead));
  }
  return turns;
}

std::vector<Turn> zero_bubble(int stage, int stages, int64_t micro_batches, int64_t runs) {
  std::vector<Turn> turns;
  std::deque<Turn> later;
  const auto compute_weights = [&](size_t but) {
    for (; later.size() > but; later.pop_front()) turns.push_back({Turn::backward_weight, later.front().micro_batch, later.front().run});
  };
  for (Turn turn : one_forward_one_backward(stage, stages, micro_batches, runs)) {
    const bool sends = stage > 0 || turn.run > 0;
    if (turn.kind == Turn::backward && sends) {
      turn.kind = Turn::backward_input;
      later.push_back(turn);
    }
    turns.push_back(turn);
    if (turn.kind == Turn::backward_input) compute_weights(static_cast<size_t>(stage));
  }
  compute_weights(0);
  return turns;
}

StageCut::StageCut(int64_t blocks, int stages, int64_t runs, double head) : stages_(stages) {
  const int64_t count = stages * runs;
  if (stages < 1 || runs < 1 || blocks < count || !(head >= 0))
    fail<ConfigError>("[pipeline] ", blocks, " blocks, and ", head, " for the head, in ", stages, " stages of ", runs, " runs");
  const int64_t others = count - 1;
  const auto longest = [&](int64_t last) {  // with `last` blocks before the head
    const int64_t most = others == 0 ? 0 : (blocks - last + others - 1) / others;
    return std::max(static_cast<double>(most), static_cast<double>(last) + head);
  };
  int64_t last = 1;
  for (int64_t n = 2; n <= blocks - others; ++n)
    if (longest(n) <= longest(last)) last = n;
  if (others == 0) last = blocks;
  for (int64_t i = 0; i < count; ++i) begins_.push_back(others == 0 ? 0 : i * (blocks - last) / others);
  begins_.push_back(blocks);
}

StageCut::StageCut(const std::vector<int64_t>& blocks, int stages) : stages_(stages), begins_{0} {
  for (const int64_t n : blocks) begins_.push_back(begins_.back() + n);
}

int StageCut::stage_of(int64_t block) const {
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), block);
  return static_cast<int>((next - begins_.begin() - 1) % stages_);
}

int64_t StageCut::end_of_run(int64_t run, int stage) const {
  return begin(std::min((run + 1) * stages_ + stage, num_runs()));
}

std::string StageCut::to_string() const {
  std::string out;
  for (int64_t i = 0; i < num_runs(); ++i) out += str(i == 0 ? "" : i + 1 == num_runs() ? " and " : ", ", begin(i + 1) - begin(i));
  return out;
}

double StageCut::imbalance(double head) const {
  double longest = 0;
  for (int64_t i = 0; i < num_runs(); ++i)
    longest = std::max(longest, static_cast<double>(begin(i + 1) - begin(i)) + (i + 1 == num_runs() ? head : 0));
  return longest * static_cast<double>(num_runs()) / (static_cast<double>(num_blocks()) + head);
}

}  // namespace sheaf
