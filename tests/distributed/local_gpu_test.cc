// Ranks of one process that share a GPU: collectives on its memory, in the order of its streams.
#include <chrono>

#include "sheaf/core/gpu.h"
#include "sheaf/core/tensor.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/distributed/collective_battery.h"
#include "sheaf/tests/distributed/through_gpu.h"

namespace sheaf {
namespace {

Communicator& lane(World& world) { return world.mesh({{"data", world.size()}}).runtime->gather_lane(0); }

TEST(LocalGpu, EveryCollectiveAtWorlds1To5) {
  SHEAF_NEEDS_GPU();
  for (int n = 1; n <= 5; ++n) {
    std::vector<uint64_t> on_gpu(n), on_cpu(n);
    run_local(n, [&](World& world) {
      testing::ThroughGpu comm(lane(world));
      testing::Battery battery(comm);
      battery.run(20'000);
      on_gpu[world.rank()] = battery.digest();
    }, {.device = Device::cuda()});
    run_local(n, [&](World& world) {
      testing::Battery battery(lane(world));
      battery.run(20'000);
      on_cpu[world.rank()] = battery.digest();
    });
    EXPECT_EQ(on_gpu, on_cpu) << n << " ranks";
  }
}

TEST(LocalGpu, HostAndGpuBuffersDoNotMix) {
  SHEAF_NEEDS_GPU();
  try {
    run_local(2, [](World& world) {
      Communicator& comm = lane(world);
      float here = 1;
      const Tensor there = Tensor::scalar(1).to(world.device());
      void* data = world.rank() == 0 ? static_cast<void*>(&here) : there.view().data;
      comm.all_reduce(data, 1, kF32, Reduction::sum, "mixed").sync();
    }, {.device = Device::cuda()});
    FAIL() << "it went through";
  } catch (const CommError& e) {
    EXPECT_EQ(e.exit_code(), 70);
    EXPECT_NE(std::string(e.what()).find("rank 1 calls all_reduce f32 [1] sum on GPUs (mixed)"), std::string::npos) << e.what();
  }
}

TEST(LocalGpu, ReductionBesideOtherWorkOfTheStream) {
  SHEAF_NEEDS_GPU();
  // Writes to the buffer before the call count; writes after its event do not.
  run_local(3, [](World& world) {
    Gpu& gpu = *RankContext::current().gpu;
    const std::vector<float> mine(1000, static_cast<float>(world.rank() + 1)), other(1000, 77.0f);
    const Tensor x = Tensor::from(mine, {1000}).to(world.device());
    const Event reduced = lane(world).all_reduce(x.view().data, 1000, kF32, Reduction::sum, "x");
    reduced.order(gpu.compute());
    const Tensor kept = x.clone();
    gpu.copy(gpu.compute(), x.view().data, other.data(), 4000, Gpu::Copy::to_device);
    EXPECT_EQ(kept.to_vector(), std::vector<float>(1000, 6.0f));
    EXPECT_EQ(x.to_vector(), other);
  }, {.device = Device::cuda()});
}

TEST(LocalGpu, ASlowLinkTakesItsTimeAndGivesTheSameBits) {
  SHEAF_NEEDS_GPU();
  constexpr int64_t kEach = 10'000;
  run_local(3, [&](World& world) {
    const std::vector<float> mine(kEach, static_cast<float>(world.rank()));
    const Tensor x = Tensor::from(mine, {kEach}).to(world.device());
    const Tensor all = Tensor::empty(Type{kF32, {3 * kEach}, {}}, world.device());
    lane(world).barrier("begin").sync();
    const auto begin = std::chrono::steady_clock::now();
    lane(world).all_gather(x.view().data, all.view().data, std::vector<int64_t>(3, kEach), kF32, "slow").sync();
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(80));
    const std::vector<float> values = all.to_vector();
    for (int r = 0; r < 3; ++r) EXPECT_EQ(values[(r + 1) * kEach - 1], static_cast<float>(r));
  }, {.bytes_per_second = 1e6, .device = Device::cuda()});
}

}  // namespace
}  // namespace sheaf
