// Learning from rewards (GRPO: Shao et al., https://arxiv.org/abs/2402.03300, section 4.1): of several answers that a model samples for the
// same prompt, the better ones are made more likely. The model both generates and trains while it is sharded.
//
//   G answers to a prompt   B of all prompts, Shard(0)   T tokens of the context
#pragma once

#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "sheaf/sheaf.h"

namespace examples {

using namespace sheaf;

struct GrpoOptions {
  int64_t answers = 16;         ///< G
  int64_t updates = 2;          ///< steps of the optimizer for one set of answers
  double clip_low = 0.2;        ///< a token's probability counts until it has fallen by this share,
  double clip_high = 0.28;      ///< or risen by this (DAPO's: Yu et al., https://arxiv.org/abs/2503.14476, section 3.1)
  double kl = 0.0;              ///< weight of the divergence from the reference model
  models::GenerateConfig draw;  ///< temperature 1: else the model that answers is not the one that learns
};

/// The reward for an answer's tokens, including its end token if it has one.
using Reward = std::function<double(std::span<const int32_t> prompt, std::span<const int32_t> answer)>;

/// Answers as a training batch: the tokens after the prompt are targets, all others are -1.
struct Answers {
  Tensor tokens_BT = {}, targets_BT = {};
  Tensor advantages_B1 = {};  ///< reward less its prompt's mean, over its prompt's standard deviation
  double mean_reward = 0;     ///< on all ranks
  double num_targets = 0;     ///< on all ranks
};

/// Sum of a value over the ranks that have rows of their own.
inline double sum_of_ranks(double mine, const Layout& rows) {
  Layout addends(rows.mesh(), Placement::invariant());
  for (int a = 0; a < rows.num_axes(); ++a)
    if (rows[a].is_shard()) addends[a] = Placement::partial();
  return redistribute(Tensor::from_local<double>({mine}, {kF64, {1}, addends}), Layout(rows.mesh(), Placement::invariant())).to_vector<double>()[0];
}

/// `prompts` are this rank's, the same number on each rank; the first one has index `first` among all.
inline Answers answer(models::Decoder& model, std::span<const std::vector<int32_t>> prompts, int64_t first, const Reward& reward,
                      int32_t end, int64_t context, int64_t vocab, const Layout& rows, const GrpoOptions& o) {
  std::vector<std::vector<int32_t>> each;
  for (const auto& prompt : prompts) each.insert(each.end(), static_cast<size_t>(o.answers), prompt);
  std::vector<models::Continuation> answers;
  {
    const nn::Unsharded whole(model);  // its parameters are gathered once for all tokens
    answers = models::generate_many(model, each, o.draw, {.context = context, .vocab = vocab, .ends = {&end, 1},
                                                          .at_once = std::ssize(each), .rows = rows, .first = first * o.answers});
  }
  const auto count = std::ssize(each);
  std::vector<int32_t> tokens(static_cast<size_t>(count * context), 0), targets(tokens.size(), -1);
  std::vector<double> rewards;
  double learned = 0;
  for (int64_t i = 0; i < count; ++i) {
    const std::vector<int32_t>& prompt = each[static_cast<size_t>(i)];
    std::vector<int32_t> all = prompt;
    const models::Continuation& c = answers[static_cast<size_t>(i)];
    all.insert(all.end(), c.tokens.begin(), c.tokens.end());
    if (c.ended) all.push_back(end);
    rewards.push_back(reward(prompt, std::span(all).subspan(prompt.size())));
    for (size_t t = 0; t + 1 < all.size(); ++t) {
      tokens[static_cast<size_t>(i * context) + t] = all[t];
      if (t + 1 >= prompt.size()) targets[static_cast<size_t>(i * context) + t] = all[t + 1], ++learned;
    }
  }
  std::vector<double> advantages;
  double total = 0;
  for (int64_t group = 0; group < count; group += o.answers) {
    const auto of_group = std::span(rewards).subspan(static_cast<size_t>(group), static_cast<size_t>(o.answers));
    double mean = 0, square = 0;
    for (const double r : of_group) mean += r / static_cast<double>(o.answers), total += r;
    for (const double r : of_group) square += (r - mean) * (r - mean) / static_cast<double>(o.answers);
    for (const double r : of_group) advantages.push_back((r - mean) / (std::sqrt(square) + 1e-4));
  }
  const int64_t all = count * static_cast<int64_t>(sum_of_ranks(1, rows));
  return {.tokens_BT = Tensor::from_local(tokens, {kI32, {all, context}, rows}).to(device_of(model)),
          .targets_BT = Tensor::from_local(targets, {kI32, {all, context}, rows}).to(device_of(model)),
          .advantages_B1 = Tensor::from_local(advantages, {kF64, {all, 1}, rows}).to(device_of(model)),
          .mean_reward = sum_of_ranks(total, rows) / static_cast<double>(all),
          .num_targets = sum_of_ranks(learned, rows)};
}

/// From each target's losses, -log p, those of the model that generated, and those of the reference (undefined without one): the mean over
/// all targets of -min(r A, clip(r) A) + kl (exp(d) - d - 1), r = p / p_old, d = log(p_ref / p) (the paper's equations 3 and 4, with one
/// mean over all answers' tokens as in DAPO). Partial.
inline Tensor grpo_loss(const Tensor& losses_BT, const Tensor& old_BT, const Tensor& reference_BT, const Answers& answers, const GrpoOptions& o) {
  const Tensor ratio_BT = exp(old_BT - losses_BT), advantages_B1 = cast(answers.advantages_B1, losses_BT.dtype());
  Tensor each_BT = -1.0 * minimum(ratio_BT * advantages_B1, clamp(ratio_BT, 1 - o.clip_low, 1 + o.clip_high) * advantages_B1);
  if (reference_BT) {
    const Tensor d_BT = losses_BT - reference_BT;
    each_BT = each_BT + o.kl * (exp(d_BT) - d_BT - 1.0);
  }
  return sum(where(ge(answers.targets_BT, 0.0), each_BT, 0.0)) / answers.num_targets;
}

/// Trains on one set of answers; with kl, stays near `reference`, which may be null. Returns the loss before the last update.
inline double learn(models::Decoder& model, models::Decoder* reference, optim::Optimizer& optimizer, const Answers& answers, int64_t step,
                    const GrpoOptions& o) {
  const auto losses_of = [&](models::Decoder& m) { return m.loss(answers.tokens_BT, answers.targets_BT, {.per_target = true}); };
  model.eval();  // the model generates and trains alike: no dropout, no auxiliary losses
  if (reference) reference->eval();
  const Tensor old_BT = losses_of(model);  // outside a recording: nothing is kept for a backward
  const Tensor reference_BT = reference && o.kl > 0 ? losses_of(*reference) : Tensor();
  double last = 0;
  for (int64_t update = 0; update < o.updates; ++update) {
    Recording recording({.step = step});
    const Tensor loss = grpo_loss(losses_of(model), old_BT, reference_BT, answers, o);
    recording.backward(loss);
    clip_grad_norm(model, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    last = redistribute(loss, Layout(loss.layout().mesh(), Placement::invariant())).item<double>();
  }
  return last;
}

}  // namespace examples
