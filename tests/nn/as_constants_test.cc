// A part of a model that a step reads as constants: the gradients of the rest are those of a frozen part, it has none, and in the same
// recording it may be trained by what is read outside of the scope.
#include "sheaf/nn/as_constants.h"

#include <gtest/gtest.h>

#include "sheaf/autograd/compile.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/nn/values_on_meshes.h"

namespace sheaf {
namespace {

struct Tower : nn::Module {
  nn::Linear first, second;
  explicit Tower(int64_t out) : first(4, 6), second(6, out) {}
  Tensor forward(const Tensor& x) { return second(tanh(first(x))); }
  SHEAF_FIELDS(first, second);
};

struct Pair : nn::Module {
  Tower generator{4}, critic{1};
  Tensor of_critic(const Tensor& noise, const Tensor& real) {
    return mean(softplus(critic(stop_gradient(generator(noise))))) + mean(softplus(-critic(real)));
  }
  Tensor of_generator(const Tensor& noise) {
    const Tensor fake = generator(noise);
    const nn::AsConstants judge(critic);
    return mean(softplus(-critic(fake)));
  }
  SHEAF_FIELDS(generator, critic);
};

using testing::Values;
enum class Losses { of_generator, of_critic, both };

Values gradients(World& w, Strategy strategy, Losses losses, bool frozen = false) {
  const Mesh mesh = w.mesh({{"data", w.size()}});
  Pair model;
  if (frozen) nn::freeze(model.critic);
  shard(model, mesh, {.units = nn::units_of<Tower>(), .strategy = strategy});
  materialize(model, w.device(), {.seed = 3, .dtype = kF64});
  const auto rows = [&](uint64_t key) { return redistribute(randn({kF64, {7, 4}, {}}, Key{key}), Layout(mesh.spec, Placement::shard(0))); };
  const Tensor noise = rows(1), real = rows(2);
  {
    Recording recording;
    Tensor loss;
    if (losses != Losses::of_generator) loss = model.of_critic(noise, real);
    if (losses != Losses::of_critic) loss = loss ? loss + model.of_generator(noise) : model.of_generator(noise);
    recording.backward(loss);
  }
  Values out;
  for (const nn::Parameter& p : model.parameters())
    if (const Tensor g = full_gradient(p)) out[p.name()] = g.to_vector<double>();
  return out;
}

TEST(AsConstants, GiveTheGradientsOfAFrozenPart) {
  for (const int ranks : {1, 2, 3})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::zero1, Strategy::replicate})
      run_local(ranks, [&](World& w) {
        const std::string where = str(" at ", ranks, " ranks, ", static_cast<int>(strategy));
        const Values got = gradients(w, strategy, Losses::of_generator);
        testing::expect_near(got, gradients(w, strategy, Losses::of_generator, /*frozen=*/true), 1e-13, where);
        EXPECT_EQ(got.size(), 4u) << "none of the critic" << where;
        Values each = gradients(w, strategy, Losses::of_critic);
        EXPECT_EQ(each.size(), 4u) << "none of the generator" << where;
        each.insert(got.begin(), got.end());
        testing::expect_near(gradients(w, strategy, Losses::both), each, 1e-13, where);
      });
}

TEST(AsConstants, ComputeNoGradientOfAWeight) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    Pair model;
    shard(model, mesh, {.units = nn::units_of<Tower>()});
    materialize(model, w.device());
    const Tensor noise = redistribute(randn({kF32, {6, 4}, {}}, Key{1}), Layout(mesh.spec, Placement::shard(0)));
    Recording recording;
    recording.backward(model.of_generator(noise));
    int weights = 0, reductions = 0, gathers = 0;
    const Tape tape = recording.take();
    for (NodeId n = 0; n < tape.num_nodes(); ++n) {
      const std::string op = tape.op_name(tape.node(n));
      weights += op == "linear_weight_gradient" || op == "linear_gradients";
      reductions += op == "reduce_scatter", gathers += op == "all_gather";
    }
    EXPECT_EQ(weights, 2) << "the generator's";
    EXPECT_EQ(reductions, 1);
    EXPECT_EQ(gathers, 3) << "both towers, and the generator again in the backward, where it was discarded in between";
  });
}

// The critic steps first, and judges the same samples with its new parameters: as two recordings do.
TEST(AsConstants, OfParametersThatHaveStepped) {
  for (const int ranks : {1, 2, 3})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::zero1, Strategy::replicate})
      run_local(ranks, [&](World& w) {
        const auto train = [&](bool in_one) {
          const Mesh mesh = w.mesh({{"data", w.size()}});
          Pair model;
          shard(model, mesh, {.units = nn::units_of<Tower>(), .strategy = strategy});
          materialize(model, w.device(), {.seed = 3, .dtype = kF64});
          optim::SGD of_generator(model.generator, {.lr = 0.5}), of_critic(model.critic, {.lr = 0.5});
          const auto rows = [&](uint64_t key) { return redistribute(randn({kF64, {7, 4}, {}}, Key{key}), Layout(mesh.spec, Placement::shard(0))); };
          for (uint64_t step = 0; step < 3; ++step) {
            const Tensor noise = rows(2 * step), real = rows(2 * step + 1);
            if (in_one) {
              Recording recording;
              const Tensor fake = model.generator(noise);
              recording.next_micro_batch(0);
              recording.backward(mean(softplus(model.critic(stop_gradient(fake)))) + mean(softplus(-model.critic(real))), {.last_micro_batch = true});
              of_critic.step(), of_critic.zero_grad();
              recording.next_micro_batch(0);
              const nn::AsConstants judge(model.critic);
              recording.backward(mean(softplus(-model.critic(fake))), {.last_micro_batch = true});
              of_generator.step(), of_generator.zero_grad();
            } else {
              { Recording recording; recording.backward(model.of_critic(noise, real)); }
              of_critic.step(), of_critic.zero_grad();
              { Recording recording; recording.backward(model.of_generator(noise)); }
              of_generator.step(), of_generator.zero_grad();
            }
          }
          Values out;
          for (const nn::Parameter& p : model.parameters()) out[p.name()] = full_parameter(p).to_vector<double>();
          return out;
        };
        testing::expect_near(train(true), train(false), 1e-13, str(" at ", ranks, " ranks, ", static_cast<int>(strategy)));
      });
}

TEST(AsConstants, EndWithTheirScope) {
  Pair model;
  materialize(model);
  const Tensor x = full({2, 4}, 0.5);
  Recording recording;
  {
    const nn::AsConstants outer(model);
    { const nn::AsConstants inner(model.critic); }
    EXPECT_FALSE(recording.has_gradient(model.critic(x))) << "the outer scope lives";
  }
  EXPECT_TRUE(recording.has_gradient(model.critic(x)));
}

TEST(AsConstants, AreNoDirection) {
  Pair model, along;
  for (nn::Parameter p : along.parameters()) p.set_init(nn::Init::ones());
  materialize(model, Device::cpu(), {.dtype = kF64}), materialize(along, Device::cpu(), {.dtype = kF64});
  const Tensor noise = randn({kF64, {3, 4}, {}}, Key{1});
  double got = 0, want = 0;
  {
    Recording recording({.higher_order = true});
    got = derivative_along(model.of_generator(noise), model, along).item<double>();
  }
  {
    Recording recording;
    recording.backward(model.of_generator(noise));
  }
  for (const nn::Parameter& p : model.generator.parameters())
    for (const double g : full_gradient(p).to_vector<double>()) want += g;
  EXPECT_NEAR(got, want, 1e-12);
}

TEST(AsConstants, AreInPrograms) {
  const auto trained = [](bool compiled) {
    Pair model;
    materialize(model, Device::cpu(), {.seed = 3});
    optim::SGD optimizer(model, {.lr = 0.1});
    const auto step = [&](const Tensor& noise, const Tensor& scalars) {
      const Tensor loss = model.of_generator(noise);
      Recording::current()->backward(loss);
      optimizer.step({.scalars = scalars});
      optimizer.zero_grad();
      return loss;
    };
    const auto scalars = [&] { return Tensor::from(optimizer.next_scalars(), {std::ssize(optimizer.next_scalars())}); };
    std::vector<float> out;
    const auto run = [&](auto&& once) {
      for (int64_t i = 0; i < 6; ++i) once(i, randn({kF32, {5, 4}, {}}, Key{static_cast<uint64_t>(i)}));
    };
    if (compiled) {
      auto program = compile(step);
      run([&](int64_t i, const Tensor& noise) { program({.step = i}, noise, scalars()); });
      EXPECT_TRUE(program.program());
    } else {
      run([&](int64_t i, const Tensor& noise) {
        Recording recording({.step = i});
        step(noise, scalars());
      });
    }
    for (const nn::Parameter& p : model.parameters())
      for (const float x : full_parameter(p).to_vector<float>()) out.push_back(x);
    return out;
  };
  EXPECT_EQ(trained(true), trained(false));
}

}  // namespace
}  // namespace sheaf
