// Units whose modules compute row by row, with different numbers of rows on each rank.
#include <gtest/gtest.h>

#include "sheaf/autograd/rowwise.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

constexpr int64_t kWidth = 64, kTokens = 8;

// Activations are sent over the lane of gathers, ahead of work whose size differs between ranks.
struct Block : nn::Module {
  nn::Linear layer{kWidth, kWidth, {.bias = false}};
  Tensor forward(Tensor x) {
    for (int i = 0; i < 5; ++i) x = tanh(x);
    x = redistribute(x, "data", Placement::shard(1));
    x = redistribute(x, "data", Placement::shard(0));
    return rowwise([](Tensor y) {
      for (int i = 0; i < 6; ++i) y = tanh(y);
      return y;
    }, layer(x));
  }
  SHEAF_FIELDS(layer);
};

TEST(RowwiseUnits, AreGatheredInOneOrderOnAllRanks) {
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    Chain<Block, 4> net;
    shard(net, mesh, {.units = nn::units_of<Block>()});
    materialize(net, Device::cpu(), {.seed = 3});
    for (int step = 0; step < 3; ++step) {
      Recording recording({.step = step});
      recording.backward(sum(net(full_of({kF32, {3, kTokens, kWidth}, Layout(mesh.spec, Placement::shard(0))}, 0.5))));
    }
  }, {.threads_per_rank = 1});
}

// A unit may have no rows at all.
struct Nothing : nn::Module {
  nn::Parameter none{Shape{0, 4}, nn::Init::zeros()};
  Tensor forward(const Tensor& x) { return x * (sum(none) + 1.0); }
  SHEAF_FIELDS(none);
};
struct WithNothing : nn::Module {
  nn::Linear layer{4, 4};
  Nothing nothing;
  Tensor forward(const Tensor& x) { return nothing(layer(x)); }
  SHEAF_FIELDS(layer, nothing);
};

TEST(EmptyUnits, AreSharded) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const bool secondary : {false, true}) {
      if (secondary && strategy == std::string("replicate")) continue;
      run_local(4, [&](World& w) {
        const Mesh mesh = w.mesh({{"replica", 2}, {"data", 2}});
        WithNothing net;
        shard(net, mesh, {.replica_axis = "replica", .secondary = secondary, .units = nn::units_of<Nothing>(), .strategy = strategy});
        materialize(net, Device::cpu(), {.seed = 3});
        {
          Recording recording;
          recording.backward(sum(net(full_of({kF32, {4, 4}, Layout(mesh.spec, Placement::shard(0))}, 0.5))), {.last_micro_batch = true});
        }
        EXPECT_EQ(full_gradient(net.layer.bias).to_vector<float>(), (std::vector<float>(4, 4)));
      }, {.threads_per_rank = 1});
    }
}

TEST(EmptyUnits, AreSentInBlocks) {
  for (const char* strategy : {"full_shard", "zero1", "replicate"})
    for (const bool secondary : {false, true}) {
      if (secondary && strategy == std::string("replicate")) continue;
      run_local(4, [&](World& w) {
        const Mesh mesh = w.mesh({{"replica", 2}, {"data", 2}});
        WithNothing net;
        shard(net, mesh, {.replica_axis = "replica", .secondary = secondary, .units = nn::units_of<Nothing>(), .strategy = strategy,
                          .gather_int8 = true, .reduce_int8 = true});
        materialize(net, Device::cpu(), {.seed = 3});
        {
          Recording recording;
          recording.backward(sum(net(full_of({kF32, {4, 4}, Layout(mesh.spec, Placement::shard(0))}, 0.5))), {.last_micro_batch = true});
        }
        for (const float x : full_gradient(net.layer.bias).to_vector<float>()) EXPECT_NEAR(x, 4, 0.1);
        EXPECT_EQ(full_gradient(net.nothing.none).numel(), 0);
      }, {.threads_per_rank = 1});
    }
}

}  // namespace
}  // namespace sheaf::testing
