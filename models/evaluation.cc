#include "sheaf/models/evaluation.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/in_turn.h"

namespace sheaf::models {
namespace {

constexpr int64_t kShortestWindow = 64;

// The length of the shortest window that holds `row`.
int64_t window_of(const ChoiceRow& row, const ModelConfig& model) {
  int64_t window = model.context;
  const int64_t tokens = std::ssize(row.tokens) - 1;
  check<ShapeError>(tokens <= window, "[evaluation] a row of ", tokens, " tokens is longer than the context of ", window);
  if (model.capacity_factor > 0) return window;
  while (window % 2 == 0 && window / 2 >= kShortestWindow && tokens <= window / 2) window /= 2;
  return window;
}

// Inputs and targets, each [context], of a row; without a row no target counts.
void fill_window(const ChoiceRow* row, int64_t context, int32_t* inputs, int32_t* targets) {
  std::fill_n(inputs, context, 0);
  std::fill_n(targets, context, kIgnoreIndex);
  if (!row) return;
  std::copy(row->tokens.begin(), row->tokens.end() - 1, inputs);
  std::copy(row->tokens.begin() + row->begin, row->tokens.end(), targets + row->begin - 1);
}

}  // namespace

double loss_over(const SequentialWindows& windows, const ShardedModel& sharded, StepInputs& inputs, bool& first) {
  const auto fill = [&](int64_t begin, int64_t count, int32_t* tokens, int32_t* targets) { windows.fill(begin, count, tokens, targets); };
  double sum = 0;
  const int64_t rows = inputs.num_rows(), mine = sharded.island() * rows;  // islands alternate
  for (int64_t begin = mine; begin < windows.num_windows(); begin += rows * sharded.num_islands()) {
    std::optional<CollectivesInTurn> in_turn;
    if (std::exchange(first, false)) in_turn.emplace();
    inputs.set_samples(begin, fill);
    // In the micro-batches of training, added in order, so that k ranks give the bits of one rank with k micro-batches.
    Tensor total;
    for (const Tensor& part : sharded.losses(inputs, {.divide_by = 1})) total = total ? add(total, part) : part;
    sum += redistribute(total, Layout(sharded.mesh.spec, Placement::invariant())).item<double>();
  }
  sharded.sum_over_islands({&sum, 1});
  return sum / static_cast<double>(windows.num_targets());
}

std::vector<double> log_likelihoods(const ChoiceQuestions& questions, const ShardedModel& sharded, const TrainConfig& config,
                                    Device device, bool& first) {
  const std::vector<ChoiceRow>& rows = questions.rows();
  std::map<int64_t, std::vector<size_t>> by_window;
  for (size_t i = 0; i < rows.size(); ++i) by_window[window_of(rows[i], config.model)].push_back(i);
  const Layout whole(sharded.mesh.spec, Placement::replicate());
  std::vector<double> out(rows.size());
  const bool all_are_first = first;
  for (const auto& [window, members] : by_window) {
    TrainConfig shape = config;
    shape.model.context = window;
    shape.train.batch = config.train.batch * (config.model.context / window);
    StepInputs inputs(shape, sharded.mesh, device, 0);
    const auto fill = [&](int64_t begin, int64_t count, int32_t* tokens, int32_t* targets) {
      for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(begin + i);
        fill_window(at < members.size() ? &rows[members[at]] : nullptr, window, tokens + i * window, targets + i * window);
      }
    };
    const auto at_once = static_cast<size_t>(inputs.num_rows()), mine = static_cast<size_t>(sharded.island()) * at_once;
    for (size_t begin = mine; begin < members.size(); begin += at_once * static_cast<size_t>(sharded.num_islands())) {
      std::optional<CollectivesInTurn> in_turn;
      if (all_are_first && begin == mine) in_turn.emplace();
      first = false;
      inputs.set_samples(static_cast<int64_t>(begin), fill);
      size_t at = begin;
      for (const Tensor& losses : sharded.losses(inputs, {.per_target = true}))
        for (const double loss : redistribute(sum(losses, {1}), whole).to_vector<double>()) {
          if (at < members.size()) out[members[at]] = -loss;
          ++at;
        }
    }
  }
  sharded.sum_over_islands(out);
  return out;
}

}  // namespace sheaf::models
