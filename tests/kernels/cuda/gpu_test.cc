// A rank's GPU: its allocator, copies between host and device, and tensors that live there.
#include "sheaf/kernels/cuda/gpu.h"

#include <numeric>
#include <random>

#include "sheaf/core/tensor.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf {
namespace {

template <class F>
void with_gpu(F&& f) {
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    context.gpu = kernels::cuda::make_gpu(0);
    RankScope scope(context);
    f(*context.gpu);
  }
}

TEST(Gpu, AllocatorMergesWhatIsFreeAndGrowsByWhatIsMissing) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    const auto memory = kernels::cuda::make_device_allocator(0);
    std::mt19937 random(7);
    std::vector<std::pair<char*, size_t>> blocks;
    int64_t live = 0, most = 0;
    for (int i = 0; i < 4000; ++i) {
      if (blocks.size() < 40 && (random() % 5 < 3 || blocks.empty())) {
        const size_t bytes = random() % 3 ? random() % 5000 : random() % (6 << 20);
        blocks.emplace_back(static_cast<char*>(memory->allocate(bytes)), bytes);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks.back().first) % 256, 0u);
        live += static_cast<int64_t>(bytes), most = std::max(most, live);
        for (size_t b = 0; b + 1 < blocks.size(); ++b)
          ASSERT_TRUE(blocks.back().first >= blocks[b].first + blocks[b].second ||
                      blocks[b].first >= blocks.back().first + bytes);
      } else {
        const size_t b = random() % blocks.size();
        memory->free(blocks[b].first, blocks[b].second);
        live -= static_cast<int64_t>(blocks[b].second);
        blocks.erase(blocks.begin() + static_cast<int64_t>(b));
      }
      ASSERT_EQ(memory->stats().live, live);
      ASSERT_EQ(memory->stats().peak, most);
    }
    for (const auto& [block, bytes] : blocks) memory->free(block, bytes);
    // All is one free block again: what was reserved can be had whole, without growing.
    const int64_t reserved = memory->stats().reserved;
    void* all = memory->allocate(static_cast<size_t>(reserved));
    EXPECT_EQ(memory->stats().reserved, reserved);
    memory->free(all, static_cast<size_t>(reserved));
    // Half as much again needs half as much more.
    const auto larger = static_cast<size_t>(reserved) + (static_cast<size_t>(48) << 20);
    all = memory->allocate(larger);
    EXPECT_LE(memory->stats().reserved, static_cast<int64_t>(larger) + (32 << 20));
    memory->free(all, larger);
  }
}

TEST(Gpu, OutOfMemorySaysWhatThereIs) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    const auto memory = kernels::cuda::make_device_allocator(0);
    void* some = memory->allocate(1 << 20);
    const size_t too_much = kernels::cuda::memory_info().total;
    try {
      memory->allocate(too_much);
      FAIL() << "it was given";
    } catch (const OutOfMemory& e) {
      EXPECT_NE(std::string(e.what()).find(std::to_string(too_much) + " bytes: 1048576 in use"),
                std::string::npos)
          << e.what();
    }
    memory->free(memory->allocate(1 << 20), 1 << 20);  // it goes on
    memory->free(some, 1 << 20);
  }
}

TEST(Gpu, TensorsGoThereAndComeBack) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    std::vector<float> values(3'000'001);  // several pieces of the staging memory
    std::iota(values.begin(), values.end(), 0.0f);
    const Tensor x = Tensor::from(values, {static_cast<int64_t>(values.size())});
    const Tensor there = x.to(gpu.device());
    EXPECT_EQ(there.device(), gpu.device());
    EXPECT_EQ(there.to_vector(), values);
    EXPECT_TRUE(identical(there, x));
    EXPECT_EQ(there.clone().device(), gpu.device());
    EXPECT_EQ(Tensor::scalar(2.5).to(gpu.device()).item(), 2.5f);
    // A view with strides keeps them.
    const Tensor columns = Tensor::over(there.storage(), 4, {kF32, {2, 3}, {}}, {2, 3}, {1, 5});
    EXPECT_EQ(columns.to_vector(), (std::vector<float>{1, 6, 11, 2, 7, 12}));
    EXPECT_EQ(gpu.memory()->stats().live, static_cast<int64_t>(values.size() * 4));
  });
}

TEST(Gpu, EventsOrderStreams) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    const Stream lane = gpu.make_lane();
    const std::vector<float> values(1000, 3.0f);
    const Tensor from = Tensor::from(values, {1000}).to(gpu.device());
    const Tensor middle = Tensor::empty({kF32, {1000}, {}}, gpu.device()),
                 to = Tensor::empty({kF32, {1000}, {}}, gpu.device());
    gpu.record(gpu.compute()).order(lane);
    gpu.copy(lane, middle.view().data, from.view().data, 4000, Gpu::Copy::on_device);
    const Event there = gpu.record(lane);
    there.order(gpu.compute());
    gpu.copy(gpu.compute(), to.view().data, middle.view().data, 4000, Gpu::Copy::on_device);
    EXPECT_EQ(to.to_vector(), values);
    there.sync();
    EXPECT_TRUE(there.ready());
    gpu.destroy_lane(lane);
  });
}

TEST(Gpu, WithoutOneTheErrorSaysSo) {
  RankContext context;
  RankScope scope(context);
  try {
    Tensor::empty({kF32, {4}, {}}, Device::cuda());
    FAIL() << "memory on a GPU that is not there";
  } catch (const ConfigError& e) {
    EXPECT_STREQ(e.what(), "[device] rank 0 has no GPU, so nothing can live on cuda:0");
  }
}

}  // namespace
}  // namespace sheaf
