// Passes over the tape of a sharded training step.
#include "sheaf/examples/half_activations.h"

#include <cmath>

#include <gtest/gtest.h>

namespace examples {
namespace {

using namespace sheaf;

struct Outcome {
  std::vector<float> losses;
  std::vector<double> norms;  ///< of each unit's gradient, in the last step
  int64_t arena_bytes = 0;
  bool operator==(const Outcome&) const = default;
};

// Twelve steps on data in which tokens follow a rule; the last nine steps are run by a program.
Outcome train(int ranks, const char* strategy, const CompileOptions& options) {
  Outcome out;
  run_local(ranks, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", ranks}});
    models::Gpt model({.layers = 2, .heads = 2, .width = 32, .context = 48, .vocab = 13});
    shard(model, mesh, {.units = nn::units_of<models::Block>(), .strategy = strategy});
    materialize(model, world.device(), {.seed = 3});
    optim::AdamW optimizer(model, {.weight_decay = 0.1});
    auto step = compile([&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
      const Tensor loss = model.loss(tokens, targets);
      Recording::current()->backward(loss);
      optimizer.step({.scalars = scalars});
      optimizer.zero_grad();
      return std::vector<Tensor>{redistribute(loss, Layout(mesh.spec, Placement::invariant()))};
    }, options);
    std::vector<float> losses;
    std::vector<double> norms;
    for (int s = 0; s < 12; ++s) {
      std::vector<int32_t> tokens, targets;
      for (int row = 0; row < 12; ++row)
        for (int t = 0; t < 48; ++t) tokens.push_back((s + 3 * row + t) % 13), targets.push_back((s + 3 * row + t + 1) % 13);
      const Layout rows(mesh.spec, Placement::shard(0));
      const std::vector<double> numbers = optimizer.next_scalars({.lr = 1e-2});
      const std::vector<Tensor> results = step({.step = s}, redistribute(Tensor::from(tokens, {12, 48}), rows),
                                               redistribute(Tensor::from(targets, {12, 48}), rows), Tensor::from(numbers, {std::ssize(numbers)}));
      losses.push_back(results[0].item());
      norms.clear();
      for (size_t i = 1; i < results.size(); ++i) norms.push_back(std::sqrt(results[i].item<float>()));
    }
    if (world.rank() == 0) out = {losses, norms, step.program()->arena_bytes()};
  }, {.threads_per_rank = 1});
  return out;
}

Program half(const Program& plain) { return with_half_activations(plain, 256); }

TEST(HalfActivations, TakeLessMemoryAndTrainAsWell) {
  for (const int ranks : {1, 2, 3}) {
    const Outcome plain = train(ranks, "full_shard", {}), rounded = train(ranks, "full_shard", {.rewrite = half});
    EXPECT_LT(static_cast<double>(rounded.arena_bytes), 0.8 * static_cast<double>(plain.arena_bytes)) << ranks;
    for (size_t s = 0; s < plain.losses.size(); ++s) {
      EXPECT_NEAR(rounded.losses[s], plain.losses[s], 0.01) << s;
      EXPECT_TRUE(s > 3 || rounded.losses[s] == plain.losses[s]) << "no step before it was a program's";
    }
    EXPECT_NE(rounded.losses, plain.losses);
    EXPECT_LT(rounded.losses.back(), rounded.losses.front() - 0.2f);
    EXPECT_EQ(train(ranks, "replicate", {.rewrite = half}).losses, rounded.losses) << "strategies have the same bits";
  }
}

// A unit's gradient is Shard after its reduce_scatter; so the sum of its squares needs an all_reduce.
Program with_norms(const Program& plain) {
  TapeEditor edit(plain.tape());
  std::vector<ValueId> norms;
  const NodeId nodes = edit.tape().num_nodes();
  for (NodeId id = 0; id < nodes; ++id) {
    const Node& n = edit.tape().node(id);
    if (edit.tape().op_name(n) != "adamw") continue;
    const ValueId gradient = edit.tape().inputs(n)[1];
    norms.push_back(edit.insert(id, [](const Tensor& x) {
      const Tensor squares = sum(square(x));
      return squares.layout().mesh() ? redistribute(squares, Layout(squares.layout().mesh(), Placement::invariant())) : squares;
    }, gradient));
  }
  return plain.with_tape(edit.take(), norms);
}

TEST(GradientNorms, AreThoseOfOneRank) {
  const Outcome one = train(1, "full_shard", {.rewrite = with_norms});
  ASSERT_EQ(one.norms.size(), 3u);  // of the root and two blocks
  EXPECT_EQ(one.losses, train(1, "full_shard", {}).losses);
  for (const double norm : one.norms) EXPECT_GT(norm, 1e-4);
  for (const int ranks : {2, 3})
    for (const char* strategy : {"full_shard", "shard_grad_op"}) {
      const Outcome many = train(ranks, strategy, {.rewrite = with_norms});
      ASSERT_EQ(many.norms.size(), 3u);
      for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(many.norms[i], one.norms[i], 1e-2 * one.norms[i]) << ranks << strategy;
    }
}

}  // namespace
}  // namespace examples
