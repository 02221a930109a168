// Moving a model along a direction: each parameter by its own, wherever it is, and the two steps of sharpness-aware minimisation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/shard.h"
#include "sheaf/nn/unsharded.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/values_on_meshes.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

struct Net : nn::Module {
  nn::Linear first{4, 7}, middle{7, 7}, last{7, 3};
  Net() { nn::freeze(middle); }
  Tensor forward(const Tensor& x) { return last(tanh(middle(tanh(first(x))))); }
  SHEAF_FIELDS(first, middle, last);
};

struct Layers : nn::Module {
  nn::Linear first{4, 4}, middle{4, 4}, last{4, 4};
  SHEAF_FIELDS(first, middle, last);
};

struct Other : nn::Module {
  nn::Linear first{4, 6};
  SHEAF_FIELDS(first);
};

using testing::Values;

Values values(nn::Module& model) {
  Values out;
  for (const nn::Parameter& p : model.parameters()) out[p.name()] = full_parameter(p).to_vector<double>();
  return out;
}

void make(World& w, const Mesh& mesh, Net& net, Strategy strategy, uint64_t seed) {
  shard(net, mesh, {.units = nn::units_of<nn::Linear>(), .strategy = strategy});
  materialize(net, w.device(), {.seed = seed, .dtype = kF64});
}

void for_each_way(const std::function<void(World&, const Mesh&, Strategy)>& f) {
  for (const int ranks : {1, 2, 3, 5})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::zero1, Strategy::replicate})
      run_local(ranks, [&](World& w) { f(w, w.mesh({{"data", w.size()}}), strategy); });
}

TEST(MoveAlong, AddsToWhatIsTrained) {
  for_each_way([](World& w, const Mesh& mesh, Strategy strategy) {
    Net net, direction;
    make(w, mesh, net, strategy, 1), make(w, mesh, direction, strategy, 2);
    const Values before = values(net), along = values(direction);
    {
      const nn::Unsharded whole(net);  // what is gathered is not what it was
      net(full({2, 4}, 1, kF64));
      move_along(net, direction, -0.25);
      const Tensor y = net(full({2, 4}, 1, kF64));
      Net other;
      make(w, mesh, other, strategy, 3);
      for (size_t i = 0; i < 6; ++i) assign(other.parameters()[i], full_parameter(net.parameters()[i]));
      EXPECT_TRUE(identical(y, other(full({2, 4}, 1, kF64))));
    }
    const Values after = values(net);
    for (const auto& [name, was] : before)
      for (size_t i = 0; i < was.size(); ++i)
        EXPECT_EQ(after.at(name)[i], was[i] + (name.starts_with("middle") ? 0 : -0.25 * along.at(name)[i])) << name;
  });
}

// Two steps of SAM on any ranks are those of one: the gradient is that at w + rho g / |g|.
TEST(MoveAlong, MakesSharpnessAwareSteps) {
  Values expected;
  for_each_way([&](World& w, const Mesh& mesh, Strategy strategy) {
    Net net, step;
    make(w, mesh, net, strategy, 1), make(w, mesh, step, strategy, 2);
    optim::SGD optimizer(net, {.lr = 0.5});
    const Tensor x = redistribute(randn({kF64, {8, 4}, {}}, Key{7}), Layout(mesh.spec, Placement::shard(0)));
    const auto backward = [&] {
      Recording recording;
      recording.backward(mean(square(net(x) - 1.0)));
    };
    constexpr double kRho = 0.3;
    for (int i = 0; i < 2; ++i) {
      backward();
      set_to_gradient(step, net, kRho / grad_norm(net).item<double>());
      zero_grad(net);
      move_along(net, step);
      const Values shifted = values(net);
      backward();
      move_along(net, step, -1);
      EXPECT_NE(shifted, values(net));
      optimizer.step();
      optimizer.zero_grad();
    }
    const Values got = values(net);
    if (w.rank() != 0) return;
    if (expected.empty()) expected = got;
    testing::expect_near(got, expected, 1e-13, "");
  });
}

// Of equal sizes, but not of the same parameters.
TEST(MoveAlong, RefusesADirectionInWhichOthersAreFrozen) {
  Layers net, direction;
  nn::freeze(net.middle), nn::freeze(direction.last);
  materialize(net), materialize(direction);
  for (const auto& f : std::vector<std::function<void()>>{[&] { move_along(net, direction); }, [&] { set_to_gradient(direction, net); },
                                                          [&] { gradient_along(net, direction); }})
    EXPECT_THAT(f, ::testing::ThrowsMessage<PlacementError>(HasSubstr("unit 'root' has other parameters, or others are frozen; shard() both")));
}

// Parameters of others in the same unit would change, too.
TEST(MoveAlong, RefusesPartsOfUnits) {
  Layers net, direction;
  materialize(net), materialize(direction);
  const Values before = values(net);
  for (const auto& f : std::vector<std::function<void()>>{
           [&] { move_along(net.first, direction.first, 0.5); }, [&] { set_to_gradient(direction.first, net.first); },
           [&] { gradient_along(net.first, direction.first); }, [&] { zero_grad(net.first); }})
    EXPECT_THAT(f, ::testing::ThrowsMessage<ConfigError>(HasSubstr("'middle.weight' is in one unit with parameters that are given")));
  EXPECT_EQ(values(net), before);
}

TEST(MoveAlong, RefusesOtherModelsAndRecordings) {
  Net net, direction;
  materialize(net), materialize(direction);
  Other other;
  materialize(other);
  EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { move_along(net, other); }), HasSubstr("[move_along] the model"));
  const Recording recording;
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { move_along(net, direction); }), HasSubstr("[move_along] not inside"));
}

}  // namespace
}  // namespace sheaf
