// Units that stay gathered, or cast, between passes outside recordings.
#include "sheaf/nn/unsharded.h"

#include <gtest/gtest.h>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/optim/sgd.h"

namespace sheaf {
namespace {

struct Stack : nn::Module {
  std::vector<nn::Linear> layers;
  nn::Linear head;
  explicit Stack(int64_t n) : head(6, 5) {
    for (int64_t i = 0; i < n; ++i) layers.emplace_back(6, 6);
  }
  Tensor forward(Tensor x) {
    for (nn::Linear& layer : layers) x = tanh(layer(x));
    return head(x);
  }
  SHEAF_FIELDS(layers, head);
};

constexpr int64_t kLayers = 3;

nn::UnitPolicy each_layer() {
  return nn::units_at({"layers.0", "layers.1", "layers.2"});
}

Tensor input(int64_t rows) {
  std::vector<double> x;
  for (int64_t i = 0; i < rows * 6; ++i) x.push_back(0.1 * static_cast<double>(i % 13) - 0.5);
  return cast(Tensor::from(x, {rows, 6}), kF32);
}

int64_t all_bytes(nn::Module& model) {
  int64_t bytes = 0;
  for (const auto& unit : units(model)) bytes += unit->gathered_bytes();
  return bytes;
}

TEST(Unsharded, UnitsAreGatheredOnceUntilItEnds) {
  for (const int world : {2, 3, 5})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::zero1})
      run_local(world, [&](World& w) {
        Stack model(kLayers);
        shard(model, w.mesh({{"data", w.size()}}), {.units = each_layer(), .strategy = strategy, .prefetch_bytes = 0});
        materialize(model, Device::cpu(), {.seed = 3});
        const GatherSchedule& schedule = *units(model)[0]->schedule();
        const Tensor x = input(4), once = model(x).clone();
        EXPECT_LT(schedule.gathered_bytes(), all_bytes(model));
        std::vector<const void*> places;
        {
          const nn::Unsharded whole(model);
          for (int pass = 0; pass < 3; ++pass) {
            EXPECT_TRUE(identical(model(x).clone(), once));
            EXPECT_EQ(schedule.gathered_bytes(), all_bytes(model));
            const void* place = model.layers[1].weight.value().view().data;
            EXPECT_TRUE(places.empty() || place == places.back()) << "the same memory";
            places.push_back(place);
          }
          const nn::Unsharded again(model);  // they may overlap
        }
        EXPECT_EQ(schedule.gathered_bytes(), 0);
        EXPECT_TRUE(identical(model(x).clone(), once));
      }, {.threads_per_rank = 1});
}

// A recording does its own gathers, on the tape, and sees an optimizer's step at once.
TEST(Unsharded, StepsAreSeen) {
  for (const int world : {1, 2, 3})
    for (const bool half : {false, true})
      for (const Strategy strategy : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::zero1, Strategy::replicate})
        run_local(world, [&](World& w) {
          const auto train = [&](bool whole) {
            Stack model(kLayers);
            ShardOptions options{.units = each_layer(), .strategy = strategy};
            if (half) options.compute_dtype = kBF16;
            shard(model, w.mesh({{"data", w.size()}}), options);
            materialize(model, Device::cpu(), {.seed = 3});
            optim::SGD sgd(model, {.lr = 0.1});
            const Tensor x = half ? cast(input(4), kBF16) : input(4);
            std::vector<Tensor> seen;
            std::optional<nn::Unsharded> kept;
            if (whole) kept.emplace(model);
            for (int step = 0; step < 3; ++step) {
              seen.push_back(model(x).clone());
              seen.push_back(model(x).clone());
              Recording recording({.step = step});
              const Tensor y = model(redistribute(x, Layout(w.mesh({{"data", w.size()}}).spec, Placement::shard(0))));
              recording.backward(sum(square(y)));
              const bool gathers = w.size() > 1 && strategy != Strategy::replicate;
              EXPECT_EQ(to_text(recording.tape()).find("all_gather") != std::string::npos, gathers);
              sgd.step();
              sgd.zero_grad();
            }
            seen.push_back(model(x).clone());
            return seen;
          };
          const std::vector<Tensor> got = train(true), want = train(false);
          for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(identical(got[i], want[i])) << i;
          EXPECT_FALSE(identical(want[0], want[2]));
        }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf
