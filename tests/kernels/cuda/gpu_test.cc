// A rank's GPU: its allocator, copies between host and device, and tensors in its memory.
#include "sheaf/kernels/cuda/gpu.h"

#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "sheaf/core/storage.h"
#include "sheaf/core/tensor.h"
#include "sheaf/core/transfer.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/code_loading.h"
#include "sheaf/kernels/cuda/idle.h"
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
    // All memory is one free block again: what was reserved can be allocated as one block, without
    // growing.
    const int64_t reserved = memory->stats().reserved;
    void* all = memory->allocate(static_cast<size_t>(reserved));
    EXPECT_EQ(memory->stats().reserved, reserved);
    memory->free(all, static_cast<size_t>(reserved));
    // A block 48 MiB larger needs only about that much more.
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
    memory->free(memory->allocate(1 << 20), 1 << 20);  // the allocator still works
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

TEST(Gpu, KernelsAndCopiesReachTheHostsMemory) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    constexpr int64_t kCount = 300'001;
    const int64_t bytes = 4 * kCount, live = gpu.memory()->stats().live;
    const Type type{kF32, {kCount}, {}};
    const void* first = nullptr;
    for (const float value : {2.5f, -1.0f}) {  // the second reuses the first one's memory
      const Tensor x = Tensor::empty(type, gpu.device(), MemoryKind::host);
      EXPECT_EQ(x.device(), gpu.device());
      kernels::cuda::fill(gpu.compute(), x.view(), value);
      EXPECT_EQ(x.to_vector(), std::vector<float>(kCount, value));
      EXPECT_EQ(gpu.memory()->stats().live, live);
      EXPECT_EQ(gpu.host_memory()->stats().live, bytes);
      EXPECT_FALSE(gpu.holds(x.view().data));
      EXPECT_TRUE(!first || x.view().data == first);
      first = x.view().data;
      // A kernel whose operands are host memory and device memory.
      const Tensor y = x.clone();
      EXPECT_EQ(gpu.memory()->stats().live, live + bytes);
      kernels::cuda::add_into(gpu.compute(), x.view(), y.view());
      EXPECT_EQ(x.to_vector(), std::vector<float>(kCount, 2 * value));
      // From the host, and back on the device.
      const std::vector<float> values(kCount, 7);
      transfer(gpu.device(), x.view().data, Device::cpu(), values.data(), values.size() * 4);
      gpu.copy(gpu.compute(), y.view().data, x.view().data, values.size() * 4, Gpu::Copy::on_device);
      EXPECT_EQ(y.to_vector(), values);
    }
    EXPECT_EQ(gpu.host_memory()->stats().live, 0);
    EXPECT_EQ(gpu.host_memory()->stats().peak, bytes);
    EXPECT_GE(gpu.host_memory()->stats().reserved, bytes);
    EXPECT_LT(gpu.host_memory()->stats().reserved, bytes + 256);
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

Tensor floats(int64_t n, float value) {
  return Tensor::from(std::vector<float>(static_cast<size_t>(n), value), {n});
}
Tensor blank(Gpu& gpu, int64_t n) { return Tensor::empty({kF32, {n}, {}}, gpu.device()); }
void copy(Gpu& gpu, const Tensor& to, const Tensor& from) {
  gpu.copy(gpu.compute(), to.view().data, from.view().data,
           static_cast<size_t>(from.local_bytes()), Gpu::Copy::on_device);
}

TEST(Gpu, AGraphRunsAgainOnMemoryOfItsOwn) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    constexpr int64_t kCount = 5000;
    const MemoryStats before = gpu.memory()->stats();
    {
      const Tensor in = floats(kCount, 1).to(gpu.device());
      Tensor out;
      std::unique_ptr<GpuGraph> graph;
      {
        GpuCapture capture(gpu);
        {
          const Tensor middle = blank(gpu, kCount);
          copy(gpu, middle, in);
          out = blank(gpu, kCount);
          copy(gpu, out, middle);
        }  // freed: reusable in this capture, and by nobody else
        const int64_t reserved = gpu.memory()->stats().reserved;
        EXPECT_NE(blank(gpu, kCount).view().data, out.view().data);
        EXPECT_EQ(gpu.memory()->stats().reserved, reserved);
        graph = capture.finish();
      }
      // Live: the input, and the peak of the capture.
      EXPECT_EQ(gpu.memory()->stats().live - before.live, 3 * kCount * 4);
      std::vector<Tensor> others;
      for (int i = 0; i < 20; ++i) others.push_back(floats(kCount, 7).to(gpu.device()));
      for (float value : {2.0f, 3.0f}) {
        copy(gpu, in, floats(kCount, value).to(gpu.device()));
        graph->replay();
        EXPECT_EQ(out.to_vector(), std::vector<float>(kCount, value));
      }
      for (const Tensor& t : others) ASSERT_EQ(t.to_vector(), std::vector<float>(kCount, 7));
      // Tensors in its memory outlive it.
      graph.reset();
      EXPECT_EQ(out.to_vector(), std::vector<float>(kCount, 3));
      EXPECT_EQ(gpu.memory()->stats().live - before.live, (2 + 20) * kCount * 4);
    }
    EXPECT_EQ(gpu.memory()->stats().live, before.live);
    const auto reserved = static_cast<size_t>(gpu.memory()->stats().reserved);
    gpu.memory()->free(gpu.memory()->allocate(reserved), reserved);  // one piece again
    EXPECT_EQ(gpu.memory()->stats().reserved, static_cast<int64_t>(reserved));
  });
}

TEST(Gpu, AGraphKeepsWhatItReadsAndWrites) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    Tensor in = floats(1000, 5).to(gpu.device());
    const Tensor out = blank(gpu, 1000);
    std::unique_ptr<GpuGraph> graph;
    {
      GpuCapture capture(gpu);
      const Tensor made = blank(gpu, 1000);
      copy(gpu, made, in), copy(gpu, out, made);
      in = Tensor();  // from before the capture
      graph = capture.finish();
    }  // made in it, freed after it
    std::vector<Tensor> others;
    for (int i = 0; i < 20; ++i) others.push_back(floats(1000, 7).to(gpu.device()));
    graph->replay();
    EXPECT_EQ(out.to_vector(), std::vector<float>(1000, 5));
    for (const Tensor& t : others) ASSERT_EQ(t.to_vector(), std::vector<float>(1000, 7));
  });
}

TEST(Gpu, AGraphKeepsTheHostsMemoryThatItUses) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    const auto on_host = [&] {
      return Tensor::empty({kF32, {1000}, {}}, gpu.device(), MemoryKind::host);
    };
    const Tensor in = blank(gpu, 1000), out = blank(gpu, 1000), other_out = blank(gpu, 1000);
    Tensor older = on_host();
    kernels::cuda::fill(gpu.compute(), older.view(), 5);
    const void *const from_before = older.view().data, *middle = nullptr;
    std::unique_ptr<GpuGraph> graph;
    {
      GpuCapture capture(gpu);
      copy(gpu, other_out, older);
      older = Tensor();
      {
        const Tensor there = on_host();
        middle = there.view().data;
        copy(gpu, there, in), copy(gpu, out, there);
      }
      EXPECT_EQ(on_host().view().data, middle);  // freed, and reused in the same capture
      graph = capture.finish();
    }
    EXPECT_NE(middle, from_before);  // which each replay reads
    std::vector<Tensor> others;
    for (int i = 0; i < 5; ++i) {
      others.push_back(on_host());
      EXPECT_NE(others.back().view().data, middle);
      EXPECT_NE(others.back().view().data, from_before);
      kernels::cuda::fill(gpu.compute(), others.back().view(), 7);
    }
    for (float value : {2.0f, 3.0f}) {
      kernels::cuda::fill(gpu.compute(), in.view(), value);
      graph->replay();
      EXPECT_EQ(out.to_vector(), std::vector<float>(1000, value));
      EXPECT_EQ(other_out.to_vector(), std::vector<float>(1000, 5));
    }
    for (const Tensor& t : others) ASSERT_EQ(t.to_vector(), std::vector<float>(1000, 7));
    // Both can be reused by others once the graph is destroyed.
    const int64_t reserved = gpu.host_memory()->stats().reserved;
    graph.reset();
    const Tensor first = on_host(), second = on_host();
    EXPECT_EQ(gpu.host_memory()->stats().reserved, reserved);
  });
}

TEST(Gpu, LanesOfACaptureComeBack) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    const Stream lane = gpu.make_lane();
    const Tensor in = floats(1000, 1).to(gpu.device()), middle = blank(gpu, 1000),
                 out = blank(gpu, 1000);
    int replays = 0;
    std::unique_ptr<GpuGraph> graph;
    {
      GpuCapture capture(gpu);
      gpu.at_replays(&replays, [](const Event&, const Event&) { FAIL() << "the last one counts"; });
      gpu.at_replays(&replays, [&](const Event&, const Event& done) {
        ++replays;
        EXPECT_NE(done.point(), nullptr);
      });
      gpu.record(gpu.compute()).order(lane);
      gpu.copy(lane, middle.view().data, in.view().data, 4000, Gpu::Copy::on_device);
      gpu.record(lane).order(gpu.compute());
      copy(gpu, out, middle);
      graph = capture.finish();
    }
    for (float value : {2.0f, 3.0f}) {
      copy(gpu, in, floats(1000, value).to(gpu.device()));
      graph->replay();
      EXPECT_EQ(out.to_vector(), std::vector<float>(1000, value));
    }
    EXPECT_EQ(replays, 2);
    {
      GpuCapture capture(gpu);
      gpu.record(gpu.compute()).order(lane);
      gpu.copy(lane, middle.view().data, in.view().data, 4000, Gpu::Copy::on_device);
      EXPECT_THROW(capture.finish(), CudaError);  // the lane was not joined
    }
    EXPECT_EQ(out.to_vector(), std::vector<float>(1000, 3));  // the streams run as before
    gpu.destroy_lane(lane);
  });
}

TEST(Gpu, HostAndDeviceCannotMeetInACapture) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    const Tensor there = floats(10, 4).to(gpu.device());
    const auto message = [&](const auto& f) -> std::string {
      try {
        GpuCapture capture(gpu);
        f();
      } catch (const CudaError& e) {
        return e.what();
      }
      return "";
    };
    EXPECT_EQ(message([&] { there.to_vector(); }),
              "[gpu] a copy of 40 bytes to the host cannot be captured: values are not there "
              "before a graph has run");
    EXPECT_EQ(message([&] { floats(10, 1).to(gpu.device()); }),
              "[gpu] a copy of 40 bytes from the host cannot be captured: a replay would not read "
              "the host's memory again");
    EXPECT_EQ(message([&] { gpu.sync(gpu.compute()); }),
              "[gpu] the host cannot wait for a stream that is captured");
    EXPECT_EQ(message([&] { gpu.begin_capture(); }), "[gpu] a capture goes on already");
    std::unique_ptr<GpuGraph> graph;
    {
      GpuCapture capture(gpu);
      graph = capture.finish();
    }
    EXPECT_EQ(message([&] { graph->replay(); }), "[graph] a replay cannot be captured");
    EXPECT_EQ(there.to_vector(), std::vector<float>(10, 4));
    EXPECT_FALSE(gpu.capturing());
  });
}

TEST(Gpu, TheHostRunsAheadOfItsCopies) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    std::vector<Tensor> there;
    for (int i = 0; i < 50; ++i)
      there.push_back(floats(100 + i, static_cast<float>(i)).to(gpu.device()));
    for (int i = 0; i < 50; ++i)
      EXPECT_EQ(there[static_cast<size_t>(i)].to_vector(),
                std::vector<float>(static_cast<size_t>(100 + i), static_cast<float>(i)));
  });
}

TEST(Gpu, TimedEventsTellHowLongTheDeviceTook) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    if constexpr (kernels::kHasCuda) {
      namespace cuda = kernels::cuda;
      const auto memory = Storage::allocate(gpu.device(), 64 << 20);
      // The device's time between two points: more work takes longer, whatever the host does
      // meanwhile.
      const auto seconds = [&](int fills) {
        cuda::EventHandle begin = cuda::make_timed_event(), end = cuda::make_timed_event();
        cuda::record(begin, gpu.compute());
        for (int i = 0; i < fills; ++i)
          cuda::fill_bytes(gpu.compute(), memory->data(), i, 64 << 20);
        cuda::record(end, gpu.compute());
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        cuda::synchronize(end);
        const double s = cuda::seconds_between(begin, end);
        cuda::destroy_event(begin), cuda::destroy_event(end);
        return s;
      };
      seconds(1);
      const double none = seconds(0), many = seconds(20);
      EXPECT_GE(none, 0);
      EXPECT_LT(none, 0.02) << "the host's sleep is not the device's";
      EXPECT_GT(many, none);
    }
  });
}

TEST(Gpu, ALaunchIsNotBlamedForWhatWasRefusedBefore) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    if constexpr (kernels::kHasCuda) {
      using namespace std::chrono_literals;
      kernels::cuda::idle(gpu.compute(), 20ms);
      const Event idle = gpu.record(gpu.compute());
      idle.ready();  // CUDA reports "not yet" as an error of this thread, too
      EXPECT_NO_THROW(kernels::cuda::idle(gpu.compute(), 0ms));
      EXPECT_THROW(kernels::cuda::allocate(size_t{1} << 50), OutOfMemory);
      EXPECT_NO_THROW(kernels::cuda::idle(gpu.compute(), 0ms));
      EXPECT_THROW(kernels::cuda::use_device(1000), CudaError);
      EXPECT_NO_THROW(kernels::cuda::idle(gpu.compute(), 0ms));
      gpu.sync(gpu.compute());
    }
  });
}

TEST(Gpu, CodeIsLoadedWithoutALaunch) {
  SHEAF_NEEDS_GPU();
  with_gpu([](Gpu& gpu) {
    if constexpr (kernels::kHasCuda) {
      const Tensor x = floats(1000, 4).to(gpu.device());
      {
        const kernels::cuda::CodeLoading loading;
        kernels::cuda::fill(gpu.compute(), x.view(), 9);
      }
      EXPECT_EQ(x.to_vector(), std::vector<float>(1000, 4));
      kernels::cuda::fill(gpu.compute(), x.view(), 9);
      EXPECT_EQ(x.to_vector(), std::vector<float>(1000, 9));
    }
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
