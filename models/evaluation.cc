#include "sheaf/models/evaluation.h"

#include <algorithm>
#include <map>
#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/in_turn.h"

namespace sheaf::models {
namespace {

constexpr int64_t kShortestWindow = 64;

// What windows of rows that fit into half of it waste is computed at most once.
int64_t window_of(const ChoiceRow& row, int64_t context) {
  while (context % 2 == 0 && context / 2 >= kShortestWindow && std::ssize(row.tokens) - 1 <= context / 2) context /= 2;
  return context;
}

// Inputs and targets, each [context], of a row; of no row nothing counts.
void fill_window(const ChoiceRow* row, int64_t context, int32_t* inputs, int32_t* targets) {
  std::fill_n(inputs, context, 0);
  std::fill_n(targets, context, kIgnoreIndex);
  if (!row) return;
  std::copy(row->tokens.begin(), row->tokens.end() - 1, inputs);
  std::copy(row->tokens.begin() + row->begin, row->tokens.end(), targets + row->begin - 1);
}

}  // namespace

double mean_loss(const ShardedModel& sharded, StepInputs& inputs, int64_t rows, const SequentialWindows& windows) {
  const auto fill = [&](int64_t first, int64_t count, int32_t* tokens, int32_t* targets) { windows.fill(first, count, tokens, targets); };
  double sum = 0;
  for (int64_t first = 0; first < windows.num_windows(); first += rows) {
    inputs.set_samples(first, fill);
    // In the micro-batches of training, added in their order, so that a world of k ranks gives the bits of one rank with k
    // micro-batches.
    Tensor total;
    for (const Tensor& part : sharded.losses(inputs, {.divide_by = 1})) total = total ? add(total, part) : part;
    sum += redistribute(total, Layout(sharded.mesh.spec, Placement::invariant())).item<double>();
  }
  return sum / static_cast<double>(windows.num_targets());
}

std::vector<double> log_likelihoods(const ShardedModel& sharded, const TrainConfig& config, Device device, const ChoiceQuestions& questions) {
  const std::vector<ChoiceRow>& rows = questions.rows();
  std::map<int64_t, std::vector<size_t>> by_window;
  for (size_t i = 0; i < rows.size(); ++i) by_window[window_of(rows[i], config.model.context)].push_back(i);
  const Layout whole(sharded.mesh.spec, Placement::replicate());
  std::vector<double> out(rows.size());
  for (const auto& [context, members] : by_window) {
    TrainConfig shape = config;
    shape.model.context = context;
    shape.train.batch = config.train.batch * (config.model.context / context);
    StepInputs inputs(shape, sharded.mesh, device, 0);
    const auto fill = [&](int64_t first, int64_t count, int32_t* tokens, int32_t* targets) {
      for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(first + i);
        fill_window(at < members.size() ? &rows[members[at]] : nullptr, context, tokens + i * context, targets + i * context);
      }
    };
    for (size_t first = 0; first < members.size(); first += static_cast<size_t>(shape.train.batch)) {
      std::optional<CollectivesInTurn> in_turn;  // kernels of this shape are new
      if (first == 0) in_turn.emplace();
      inputs.set_samples(static_cast<int64_t>(first), fill);
      size_t at = first;
      for (const Tensor& losses : sharded.losses(inputs, {.per_target = true}))
        for (const double loss : redistribute(sum(losses, {1}), whole).to_vector<double>())
          if (at++ < members.size()) out[members[at - 1]] = -loss;
    }
  }
  return out;
}

}  // namespace sheaf::models
