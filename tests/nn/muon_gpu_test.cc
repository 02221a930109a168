// Muon on GPUs, where the choice of a product may depend on the batch and on memory alignment: bits must not depend on the number of ranks
// nor on how they share matrices.
#include <gtest/gtest.h>

#include "sheaf/nn/optim/muon.h"
#include "sheaf/tests/needs_gpu.h"
#include "sheaf/tests/nn/nets.h"
#include "sheaf/tests/nn/zoo.h"

namespace sheaf::testing {
namespace {

const Device kGpu = Device::cuda();

template <class Model, class Make>
void expect_same_bits_however_it_is_cut(Make&& make) {
  std::map<std::string, std::vector<double>> expected;
  const auto check = [&](const Way& way) {
    on(way, [&](World& w, const Mesh& mesh, const ShardOptions& options) {
      const DeviceScope scope(w.device());
      Model model = make();
      start(model, mesh, options, kF32, w.device());
      optim::Muon muon(model);
      for (int64_t step = 0; step < 2; ++step) {
        set_gradients(model, step);
        muon.step({.lr = 0.05});
      }
      std::map<std::string, std::vector<double>> actual;
      for (const nn::Parameter& p : model.parameters())
        actual[p.name()] = full_parameter(p).to(Device::cpu()).template to_vector<double>();
      if (w.rank() != 0) return;
      if (expected.empty()) expected = actual;
      EXPECT_EQ(actual, expected);
    }, {.threads_per_rank = 1, .device = kGpu});
  };
  for (const int world : {1, 2, 3, 5}) check({{{"data", world}}, Strategy::full_shard});
  check({{{"data", 3}}, Strategy::replicate});
  check({{{"replica", 2}, {"data", 2}}, Strategy::full_shard});
  check({{{"secondary", 2}, {"data", 2}}, Strategy::full_shard});
  check({{{"data", 2}, {"model", 2}}, Strategy::full_shard});
}

TEST(MuonGpu, BitsDoNotDependOnTheWorld) {
  SHEAF_NEEDS_GPU();
  expect_same_bits_however_it_is_cut<Zoo>([] { return Zoo(); });
  for (const int64_t width : {8, 7})  // aligned matrices, computed in one batch, and others
    expect_same_bits_however_it_is_cut<TinyModel>([&] { return TinyModel(5, 11, width); });
}

TEST(MuonGpu, AMatrixHasItsBitsInEveryBatch) {
  SHEAF_NEEDS_GPU();
  run_local(1, [](World& w) {
    const DeviceScope scope(w.device());
    const Tensor x = uniform({kF32, {5, 24, 16}, {}}, key_of("x", 1), -1, 1);
    const std::vector<float> all = optim::orthogonalize(x).to(Device::cpu()).to_vector<float>();
    for (int64_t i = 0; i < 5; ++i)
      EXPECT_EQ(optim::orthogonalize(slice(x, 0, i, i + 1)).to(Device::cpu()).to_vector<float>(),
                std::vector<float>(all.begin() + i * 24 * 16, all.begin() + (i + 1) * 24 * 16));
  }, {.threads_per_rank = 1, .device = kGpu});
}

}  // namespace
}  // namespace sheaf::testing
