// Training on preferences (DPO: Rafailov et al., https://arxiv.org/abs/2305.18290): of two continuations of a prompt, the model learns to
// find the better one more likely than a reference does; the reference is the model itself before the first step. A custom loss, computed
// from the losses of each target; where ranks have pairs, or share the layers, its types say so, and the tape issues the necessary
// communication.
//
//   P pairs   2 the better and the other one   T tokens
#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/sheaf.h"

namespace examples {
namespace {

using namespace sheaf;

/// For each row, the log-likelihood of the targets that count: [P, 2].
Tensor log_likelihoods(models::Decoder& model, const Tensor& tokens_P2T, const Tensor& targets_P2T) {
  const int64_t pairs = tokens_P2T.size(0), length = tokens_P2T.size(2);
  const Shape rows{2 * pairs, length};
  const Tensor losses = model.loss(reshape(tokens_P2T, rows), reshape(targets_P2T, rows), {.per_target = true});
  Tensor likely = -1.0 * sum(losses, {1});
  // Partial over the tensor-parallel ranks, each of which sees only a part of the vocabulary.
  likely = redistribute(likely, "model", Placement::invariant());
  return reshape(likely, {pairs, 2});
}

/// -log sigmoid(beta (the better one's gain over the reference, minus the other one's gain)), averaged over all pairs.
Tensor preference_loss(const Tensor& likely_P2, const Tensor& reference_P2, double beta) {
  const Tensor gained_P2 = likely_P2 - reference_P2;
  const Tensor margin_P1 = beta * (slice(gained_P2, 1, 0, 1) - slice(gained_P2, 1, 1, 2));
  return mean(logsumexp(concat({0.0 * margin_P1, -1.0 * margin_P1}, 1), {1}));  // log(1 + exp(-margin))
}

constexpr int64_t kPairs = 6, kLength = 7, kVocab = 13, kPrompt = 3;

/// Pairs that share a prompt, whose tokens are not targets.
struct Pairs {
  Tensor tokens, targets;
};
Pairs pairs() {
  std::vector<int32_t> tokens, targets;
  for (int64_t row = 0; row < 2 * kPairs; ++row) {
    const auto token = [&](int64_t t) { return static_cast<int32_t>((row / 2 * 5 + t * t + (t > kPrompt ? row % 2 * 3 : 0)) % kVocab); };
    for (int64_t t = 0; t < kLength; ++t) tokens.push_back(token(t)), targets.push_back(t < kPrompt ? -1 : token(t + 1));
  }
  const Shape shape{kPairs, 2, kLength};
  return {Tensor::from(tokens, shape), Tensor::from(targets, shape)};
}

/// The loss of each step.
std::vector<double> train(int data, int model_ranks) {
  std::vector<double> losses;
  run_local(data * model_ranks, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", data}, {"model", model_ranks}});
    models::Gpt model({.layers = 2, .heads = 2, .width = 16, .context = kLength, .vocab = kVocab});
    shard(model, mesh, {.tensor_axis = "model", .units = nn::units_of<models::Block>()});
    materialize(model, world.device(), {.seed = 3, .dtype = kF64});
    optim::AdamW optimizer(model, {.lr = 3e-3});
    // A rank has whole pairs; tensor-parallel ranks share the rows' tokens.
    const Layout cut = Layout(mesh.spec, Placement::shard(0)).with(mesh.spec->axis("model"), Placement::shard(2));
    const auto all = pairs();
    const Tensor tokens = redistribute(all.tokens, cut), targets = redistribute(all.targets, cut);
    const Tensor reference = log_likelihoods(model, tokens, targets);
    for (int step = 0; step < 12; ++step) {
      Recording recording({.step = step});
      const Tensor loss = preference_loss(log_likelihoods(model, tokens, targets), reference, /*beta=*/0.5);
      recording.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      const double mean = redistribute(loss, "data", Placement::invariant()).item<double>();
      if (world.rank() == 0) losses.push_back(mean);
    }
  });
  return losses;
}

TEST(Preferences, AreLearnedTheSameOnAnyMesh) {
  const std::vector<double> expected = train(1, 1);
  EXPECT_NEAR(expected.front(), std::log(2), 1e-12) << "the model is its own reference";
  EXPECT_LT(expected.back(), 0.4);
  for (const auto& [data, model_ranks] : {std::pair{2, 1}, {4, 1}, {1, 2}, {3, 2}}) {
    const std::vector<double> actual = train(data, model_ranks);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t s = 0; s < actual.size(); ++s) EXPECT_NEAR(actual[s], expected[s], 1e-9) << data << " x " << model_ranks << ", step " << s;
  }
}

}  // namespace
}  // namespace examples
