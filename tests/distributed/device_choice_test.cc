#include "sheaf/distributed/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/error.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

#define NEEDS_CUDA() \
  if constexpr (!kernels::kHasCuda) GTEST_SKIP() << "not run: built without CUDA"

Rendezvous rank_of(int local_rank, int local_world) {
  Rendezvous r;
  r.rank = r.local_rank = local_rank;
  r.world = r.local_world = local_world;
  return r;
}
DeviceChoice choose(const GpusHere& gpus, const char* wish = nullptr, int local_rank = 0, int local_world = 1) {
  return choose_device(rank_of(local_rank, local_world), DeviceWish::from([wish](const char*) { return wish; }), gpus);
}
GpusHere gpus(const std::vector<int>& capabilities) {
  GpusHere here{.driver = true};
  for (const int capability : capabilities) here.usable.push_back({capability});
  return here;
}

TEST(DeviceChoice, EachRankHasTheGpuOfItsNumber) {
  NEEDS_CUDA();
  for (int rank = 0; rank < 4; ++rank)
    for (const char* wish : {"auto", "cuda", ""}) {
      const DeviceChoice choice = choose(gpus({90, 90, 90, 90}), wish, rank, 4);
      EXPECT_EQ(choice.device, Device::cuda(rank));
      EXPECT_EQ(choice.asked, std::string(wish) == "cuda");
    }
  EXPECT_EQ(choose(gpus({90}), "cpu").device, Device::cpu());
  EXPECT_THAT([] { choose(gpus({90}), "gpu"); }, ThrowsMessage<ConfigError>(HasSubstr("'gpu' is none of auto, cpu and cuda")));
}

// As with srun --gpus-per-task 1: each rank sees only one GPU, as number 0.
TEST(DeviceChoice, ALauncherMayHaveChosen) {
  NEEDS_CUDA();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(choose(gpus({90}), "auto", rank, 4).device, Device::cuda(0));
  const DeviceChoice third = {Device::cuda(0)};
  EXPECT_EQ(agreed_device(third, {"gpu a", "gpu b", "gpu c"}).device, Device::cuda(0));
  const DeviceChoice same = agreed_device(third, {"gpu a", "gpu b", "gpu a"});
  EXPECT_EQ(same.device, Device::cpu());
  EXPECT_EQ(same.why, "ranks 0 and 2 have the same GPU, and each rank needs its own");
  // On all ranks, also those that could do without.
  for (const DeviceChoice& choice : {DeviceChoice{Device::cuda(0), true}, {Device::cuda(0)}, {Device::cpu()}})
    EXPECT_THAT([&] { agreed_device(choice, {"gpu a", "asked gpu a", "asked gpu b"}); },
                ThrowsMessage<ConfigError>(HasSubstr("SHEAF_DEVICE=cuda on rank 1, but ranks 0 and 1 have the same GPU")));
}

TEST(DeviceChoice, WhatCannotBeIsSaid) {
  NEEDS_CUDA();
  const DeviceChoice few = choose(gpus({90, 90}), "auto", 2, 3);
  EXPECT_EQ(few.device, Device::cpu());
  EXPECT_EQ(few.why, "rank 2 is number 2 of 3 on this host, which has 2 GPUs, and each rank needs its own");
  const DeviceChoice old = choose(gpus({80}));
  EXPECT_EQ(old.device, Device::cpu());
  EXPECT_EQ(old.why, "GPU 0 has the compute capability 8.0, and this build code for 9.0 and later");
  EXPECT_THAT([] { choose(gpus({90, 86}), "cuda", 1, 2); }, ThrowsMessage<ConfigError>(HasSubstr("GPU 1 has the compute capability 8.6")));
  EXPECT_EQ(choose(gpus({100})).device, Device::cuda(0));
  const DeviceChoice small = choose({.usable = {{120, 99 << 10}}});
  EXPECT_EQ(small.device, Device::cpu());
  EXPECT_EQ(small.why, "GPU 0 has the compute capability 12.0, whose blocks have at most 99 KiB of shared memory, and the kernels need 227");
  const GpusHere broken{.why_none = "CUDA driver version is insufficient for CUDA runtime version", .driver = true};
  EXPECT_EQ(choose(broken).why, "there is no GPU: CUDA driver version is insufficient for CUDA runtime version");
  EXPECT_THAT([&] { choose(broken, "cuda"); }, ThrowsMessage<ConfigError>(HasSubstr("but there is no GPU: CUDA driver version")));
  // No message where no GPU is to be expected.
  EXPECT_EQ(choose({.why_none = "no driver"}).why, "");
  EXPECT_EQ(choose({.usable = {{90}}, .emulated = true}).device, Device::cpu());
  EXPECT_EQ(choose({.usable = {{90}}, .emulated = true}, "cuda").device, Device::cuda(0));
}

TEST(DeviceChoice, AJobIsOnGpusOrOnCpus) {
  NEEDS_CUDA();
  const DeviceChoice mine = {Device::cuda(1)};
  EXPECT_EQ(agreed_device(mine, {"asked gpu a", "gpu b"}).device, Device::cuda(1));
  EXPECT_EQ(agreed_device(mine, {"gpu a", "gpu b", "cpu of old age"}).why, "rank 2 computes on its CPU: of old age");
  EXPECT_EQ(agreed_device(mine, {"cpu ", "gpu b"}).why, "rank 0 computes on its CPU");
  EXPECT_EQ(choice_for_others({Device::cpu(), false, "why not"}), "cpu why not");
  EXPECT_THAT([&] { agreed_device({Device::cpu(), false, "old"}, {"asked gpu a", "cpu old"}); },
              ThrowsMessage<ConfigError>(HasSubstr("SHEAF_DEVICE=cuda on rank 0, but rank 1 computes on its CPU: old")));
  EXPECT_EQ(agreed_device({Device::cpu(), false, "mine"}, {"cpu mine", "gpu b"}).why, "mine");
}

// If a thread cannot get its GPU, the job ends with an error, but not the process.
TEST(DeviceChoice, RanksThatAreThreadsThrow) {
  NEEDS_CUDA();
  if (!kernels::emulated_cuda() && kernels::cuda::device_count() > 7) GTEST_SKIP() << "not run: there is such a GPU";
  EXPECT_THROW(run_local(3, [](World&) { FAIL() << "there is no such GPU"; }, {.device = Device::cuda(7)}), CudaError);
}

}  // namespace
}  // namespace sheaf
