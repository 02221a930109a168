#include "sheaf/examples/grpo.h"

#include <gtest/gtest.h>

#include "sheaf/examples/letters.h"

namespace examples {
namespace {

// By the paper's equations, one target at a time.
TEST(Grpo, TheLossIsThePapers) {
  const std::vector<double> losses = {0.3, 1.2, 0.7, 2.0, 0.4, 1.1, 0.2, 0.9}, old = {0.5, 0.8, 0.7, 2.3, 1.0, 1.0, 0.1, 0.3},
                            reference = {0.4, 1.0, 0.9, 2.2, 0.6, 1.3, 0.3, 0.5}, advantages = {1.5, -0.5};
  const std::vector<int32_t> targets = {-1, 3, 2, 5, 1, 0, -1, 4};
  GrpoOptions o;
  o.kl = 0.1;
  double want = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (targets[i] < 0) continue;
    const double ratio = std::exp(old[i] - losses[i]), a = advantages[i / 4], clipped = std::clamp(ratio, 0.8, 1.28);
    const double d = losses[i] - reference[i];
    want -= (std::min(ratio * a, clipped * a) - o.kl * (std::exp(d) - d - 1)) / 6;
  }
  const Shape s{2, 4};
  const Answers answers{.targets_BT = Tensor::from(targets, s), .advantages_B1 = Tensor::from(advantages, {2, 1}), .num_targets = 6};
  Recording recording;
  const Tensor x = recording.watch(Tensor::from(losses, s));
  const Tensor loss = grpo_loss(x, Tensor::from(old, s), Tensor::from(reference, s), answers, o);
  EXPECT_NEAR(loss.to_vector<double>()[0], want, 1e-14);
  const std::vector<double> slope = recording.gradient(loss, std::span(&x, 1), {})[0].to_vector<double>();
  const auto of_kl = [&](size_t i) { return o.kl * (std::exp(losses[i] - reference[i]) - 1); };
  EXPECT_EQ(slope[0], 0) << "no target";
  EXPECT_NEAR(slope[1], (1.5 * std::exp(0.8 - 1.2) + of_kl(1)) / 6, 1e-14) << "has fallen, and is to rise: it counts";
  EXPECT_NEAR(slope[3], of_kl(3) / 6, 1e-14) << "has risen enough";
  EXPECT_NEAR(slope[4], (-0.5 * std::exp(1.0 - 0.4) + of_kl(4)) / 6, 1e-14) << "has risen, and is to fall";
}

struct Step {
  double right, loss;
};

/// Number of correct answers in each step, from untrained weights, rewarded for every letter in its place.
std::vector<Step> train(int world, int64_t steps, Strategy strategy, double kl) {
  std::vector<Step> out;
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    const Layout rows(mesh.spec, Placement::shard(0));
    const models::GptConfig config{.layers = 2, .heads = 2, .width = 32, .context = Letters::kContext, .vocab = Letters::kVocab};
    models::Gpt model(config);
    shard(model, mesh, {.units = nn::units_of<models::Block>(), .strategy = strategy});
    materialize(model, w.device(), {.seed = 1, .dtype = kF64});
    models::Gpt reference = nn::clone(model, config);
    optim::AdamW optimizer(model, {.lr = 1e-2});
    GrpoOptions options;
    options.draw.temperature = 1;
    options.kl = kl;
    const auto in_place = [](std::span<const int32_t> prompt, std::span<const int32_t> answer) {
      double right = 0;
      for (size_t i = 0; i < std::min<size_t>(answer.size(), Letters::kLetters); ++i) right += answer[i] == prompt[i];
      return right / Letters::kLetters;
    };
    constexpr int64_t kPrompts = 8;
    const int64_t mine = kPrompts / w.size();
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t first = step * kPrompts + w.rank() * mine;
      std::vector<std::vector<int32_t>> prompts;
      for (int64_t i = first; i < first + mine; ++i) prompts.push_back(Letters::prompt(i));
      const Answers answers = answer(model, prompts, first, in_place, Letters::kEnd, Letters::kContext, Letters::kVocab, rows, options);
      const double loss = learn(model, &reference, optimizer, answers, step, options);
      if (w.rank() == 0) out.push_back({answers.mean_reward, loss});
    }
  }, {.threads_per_rank = 1});
  return out;
}

TEST(Grpo, LearnsTheSameOnAnyNumberOfRanks) {
  const std::vector<Step> want = train(1, 6, Strategy::full_shard, 0.05);
  for (const int world : {2, 4})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::zero1, Strategy::replicate}) {
      const std::vector<Step> got = train(world, 6, strategy, 0.05);
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_NEAR(got[i].right, want[i].right, 1e-12) << world << ' ' << name(strategy) << ", step " << i;
        EXPECT_NEAR(got[i].loss, want[i].loss, 1e-9) << world << ' ' << name(strategy) << ", step " << i;
      }
    }
}

TEST(Grpo, RewardsGrow) {
  const std::vector<Step> steps = train(1, 60, Strategy::full_shard, 0);
  EXPECT_LT(steps.front().right, 0.2);
  EXPECT_GT(steps.back().right, 2 * steps.front().right);
}

TEST(Letters, DemonstrationsAreRightHalfOfTheTime) {
  double right = 0;
  for (int64_t i = 0; i < 2000; ++i) right += Letters::reward(Letters::prompt(i), Letters::demonstration(i));
  EXPECT_NEAR(right / 2000, 0.5 + 0.5 / 24, 0.05);
}

}  // namespace
}  // namespace examples
