// That the emulated GPU runs blocks, barriers and warps as CUDA does, and catches what CUDA leaves
// undefined. Empty in builds for a real one.
#include "sheaf/tests/kernels/cuda/on_gpu.h"

#if SHEAF_CUDA_EMULATED
#include "sheaf/kernels/cuda/launch.h"
#endif

namespace sheaf::kernels::cuda {
namespace {

#if SHEAF_CUDA_EMULATED

using testing::OnGpu;

__global__ void reverse_blocks(const int* in, int* out, int n) {
  __shared__ int tile[64];
  int* dynamic = dynamic_shared<int>();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  tile[threadIdx.x] = i < n ? in[i] : -1;
  dynamic[threadIdx.x] = 0;
  __syncthreads();
  if (i < n) out[i] = tile[blockDim.x - 1 - threadIdx.x] + dynamic[blockDim.x - 1 - threadIdx.x];
}

TEST(CudaEmulation, BarriersAndSharedMemory) {
  testing::Array in(kI32, {128}), out(kI32, {128});
  in.fill([](int64_t i) { return i; });
  const OnGpu gin(in), gout(out);
  launch("reverse", OnGpu::stream(), {.blocks = 2, .threads = 64, .shared_bytes = 64 * sizeof(int)},
         reverse_blocks, gin.view().as<int>(), gout.view().as<int>(), 128);
  const testing::Array got = gout.back();
  for (int i = 0; i < 128; ++i) EXPECT_EQ(got.at(i), i / 64 * 64 + 63 - i % 64);
}

__global__ void warp_sums(const float* in, float* sums, unsigned* votes, int* counter) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  float x = in[i];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  const unsigned odd = __ballot_sync(kFullWarp, threadIdx.x % 2);
  float carried = in[i];  // a running sum
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(kFullWarp, carried, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) carried += before;
  }
  const float last = __shfl_sync(kFullWarp, carried, 31);
  if (threadIdx.x % 32 == 0) sums[i / 32] = x + 1000 * last, votes[i / 32] = odd;
  atomicAdd(counter, 1);
}

TEST(CudaEmulation, WarpOperationsAndAtomics) {
  testing::Array in(kF32, {192}), sums(kF32, {6}), votes(kU32, {6}),
      counter = testing::Array::of(kI32, {1}, {0});
  in.fill([](int64_t i) { return i; });
  const OnGpu gin(in), gsums(sums), gvotes(votes), gcounter(counter);
  launch("warp_sums", OnGpu::stream(), {.blocks = 3, .threads = 64}, warp_sums,
         gin.view().as<float>(), gsums.view().as<float>(), gvotes.view().as<unsigned>(),
         gcounter.view().as<int>());
  for (int w = 0; w < 6; ++w) {
    const double sum = 32 * (32 * w) + 31 * 16;
    EXPECT_EQ(gsums.back().at(w), 1001 * sum);
    EXPECT_EQ(gvotes.back().at(w), 0xaaaaaaaau);
  }
  EXPECT_EQ(gcounter.back().at(0), 192);
}

__global__ void half_a_barrier() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncwarp();
  if (threadIdx.x == 40) __syncwarp();
}
__global__ void half_a_warp() {
  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1, 0);
}

template <class F>
void expect_error(F f, const char* part) {
  try {
    f();
    synchronize(OnGpu::stream());
    FAIL() << "no error";
  } catch (const CudaError& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(CudaEmulation, MisuseIsAnError) {
  const Stream& stream = OnGpu::stream();
  expect_error([&] { launch("stuck", stream, {.threads = 64}, half_a_barrier); },
               "[stuck] deadlock in a block");
  expect_error([&] { launch("part", stream, {.threads = 64}, half_a_warp); },
               "[part] a warp operation must name a full warp");
  // The next launch of this thread finds clean fibers.
  testing::Array in(kI32, {64}), out(kI32, {64});
  in.fill([](int64_t i) { return i; });
  const OnGpu gin(in), gout(out);
  launch("reverse", stream, {.blocks = 1, .threads = 64, .shared_bytes = 64 * sizeof(int)},
         reverse_blocks, gin.view().as<int>(), gout.view().as<int>(), 64);
  EXPECT_EQ(gout.back().at(0), 63);
}

__global__ void copy_16_bytes(const char* from, char* to) {
  if (threadIdx.x == 7) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

TEST(CudaEmulation, MisalignedAccessesAreErrors) {
  testing::Array array(kI32, {64});
  array.fill([](int64_t i) { return i; });
  const OnGpu memory(array);
  const auto copy = [&](int from, int to) {
    launch("copy", OnGpu::stream(), {.threads = 32}, copy_16_bytes,
           memory.view().as<const char>() + from, memory.view().as<char>() + to);
  };
  expect_error([&] { copy(8, 32); }, "[copy] misaligned address: 'const struct uint4'");
  expect_error([&] { copy(0, 36); }, "[copy] misaligned address: 'struct uint4'");
  copy(0, 32);
  EXPECT_EQ(memory.back().at(11), 3);
}

#ifdef __SANITIZE_THREAD__  // --config=races

// Each thread reads what its neighbour writes.
enum class Order : uint8_t { none, shuffle, warp, block };
__global__ void read_neighbours(int* out, int* device, Order order, int apart) {
  int* tile = device ? device : dynamic_shared<int>();
  const int i = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  tile[i] = i;
  if (order == Order::shuffle) __shfl_sync(kFullWarp, i, 0);
  if (order == Order::warp) __syncwarp();
  if (order == Order::block) __syncthreads();
  out[i] = tile[(i + apart) % n];
}
__global__ void count(int* counter, bool atomic) {
  if (atomic)
    atomicAdd(counter, 1);
  else if (threadIdx.x == 0)
    *counter += 1;
}

__global__ void read_static(int* out, int writer) {
  __shared__ int number;
  if (static_cast<int>(blockIdx.x) <= writer && threadIdx.x == 0) number = 1;
  __syncthreads();
  out[threadIdx.x + blockIdx.x * blockDim.x] = number;
}

TEST(CudaEmulation, SharedMemoryOfOtherBlocksIsAnErrorToRead) {
  const OnGpu out(testing::Array(kI32, {64}));
  const auto run = [&](int writer) {
    launch("static", OnGpu::stream(), {.blocks = 2, .threads = 32}, read_static,
           out.view().as<int>(), writer);
    synchronize(OnGpu::stream());
  };
  run(1);  // all blocks
  expect_error([&] { run(0); }, "[static] thread ");
}

TEST(CudaEmulation, RacesAreErrors) {
  const OnGpu out(testing::Array(kI32, {64})), device(testing::Array(kI32, {64}));
  int *const to = out.view().as<int>(), *const global = device.view().as<int>();
  for (int* tile : {global, static_cast<int*>(nullptr)}) {
    const auto run = [&](Order order, int threads, int apart) {
      launch("tile", OnGpu::stream(),
             {.threads = threads, .shared_bytes = static_cast<size_t>(threads) * sizeof(int)},
             read_neighbours, to, tile, order, apart);
      synchronize(OnGpu::stream());
    };
    // In shared memory, the neighbour may not have written yet.
    const char* const error = tile ? "[tile] race: " : "[tile] ";
    for (Order order : {Order::none, Order::shuffle})
      expect_error([&] { run(order, 32, 1); }, error);
    expect_error([&] { run(Order::warp, 64, 32); }, error);
    run(Order::warp, 32, 1), run(Order::block, 64, 33), run(Order::none, 64, 0);
  }
  const auto count_in = [&](int64_t blocks, bool atomic) {
    launch("count", OnGpu::stream(), {.blocks = blocks, .threads = 32}, count, global, atomic);
    synchronize(OnGpu::stream());
  };
  expect_error([&] { count_in(2, false); }, "[count] race: ");
  count_in(1, false), count_in(2, true);
}

#endif

TEST(CudaEmulation, LaunchesThatNoGpuTakesAreErrors) {
  const auto refused = [](const LaunchShape& shape) {
    try {
      launch("vast", OnGpu::stream(), shape, half_a_warp);
    } catch (const ConfigError& e) {
      EXPECT_EQ(std::string(e.what()).find("[vast] no GPU takes a launch of "), 0u);
      return true;
    }
    return false;
  };
  const int64_t grid = int64_t{1} << 31;
  EXPECT_TRUE(refused({.blocks = grid}) && refused({.blocks = -1}));
  EXPECT_TRUE(refused({.blocks_y = 65536}) && refused({.blocks_z = 65536}));
  EXPECT_TRUE(refused({.threads = 0}) && refused({.threads = 1056}));
  EXPECT_TRUE(refused({.shared_bytes = kMostSharedBytes + 1}));
  EXPECT_FALSE(refused({.blocks = 0}));  // nothing to do
  EXPECT_FALSE(refused({.blocks_y = 0}) || refused({.blocks_z = 0}));
}

TEST(CudaEmulation, StreamsRunAsLateAsTheyMay) {
  const Stream one = make_stream(0), two = make_stream(0);
  testing::Array in = testing::Array::of(kI32, {1}, {1}), out = testing::Array::of(kI32, {1}, {0});
  const OnGpu a(in), b(out), c(out);
  synchronize(OnGpu::stream());
  const EventHandle event = make_event();
  copy_bytes(one, b.view().data, a.view().data, 4, Copy::on_device);
  record(event, one);
  copy_bytes(two, c.view().data, b.view().data, 4, Copy::on_device);  // behind nothing
  EXPECT_EQ((synchronize(two), c.back().at(0)), 0);
  wait(two, event);
  copy_bytes(two, c.view().data, b.view().data, 4, Copy::on_device);
  EXPECT_EQ((synchronize(two), c.back().at(0)), 1);
  destroy_event(event);
  destroy_stream(one), destroy_stream(two);
}

/// An i32 on the device, 0 at first.
class Cell {
 public:
  Cell() : memory_(testing::Array::of(kI32, {1}, {0})) { synchronize(OnGpu::stream()); }
  int* data() const { return memory_.view().as<int>(); }
  double value() const { return memory_.back().at(0); }

 private:
  OnGpu memory_;
};

__global__ void add_to(int* to, const int* from, int constant) { *to += *from + constant; }
void add(const Stream& stream, const Cell& to, const Cell& from, int constant) {
  launch("add", stream, {.threads = 1}, add_to, to.data(), from.data(), constant);
}

struct TwoStreams {
  const Stream one = make_stream(0), two = make_stream(0);
  const EventHandle fork = make_event(), join = make_event();
  TwoStreams() = default;
  ~TwoStreams() {
    destroy_event(fork), destroy_event(join);
    destroy_stream(one), destroy_stream(two);
  }
  TwoStreams(const TwoStreams&) = delete;
  TwoStreams& operator=(const TwoStreams&) = delete;
  void begin() const { begin_capture(one), record(fork, one), wait(two, fork); }
  GraphHandle end() const { return record(join, two), wait(one, join), end_capture(one); }
};

TEST(CudaEmulation, AGraphRunsWhatItsCaptureRecorded) {
  const TwoStreams s;
  const Cell a, b, c;
  int ten = 10;
  add(s.one, a, b, 1);  // before the capture: in front of the graph
  s.begin();
  add(s.one, a, b, ten);
  add(s.two, b, c, 1);
  ten = 1000;  // arguments are those of the launch
  const GraphHandle graph = s.end();
  EXPECT_FALSE(capturing(s.one) || capturing(s.two));
  synchronize(s.one), synchronize(s.two);
  EXPECT_EQ(a.value(), 1);  // nothing of it has run
  EXPECT_EQ(b.value(), 0);
  for (int n = 0; n < 3; ++n) launch_graph(graph, s.one);
  synchronize(s.one);
  EXPECT_EQ(b.value(), 3);
  // Each time the other stream's part, which nothing puts behind this one, ran first.
  EXPECT_EQ(a.value(), 1 + 3 * 10 + (1 + 2 + 3));
  destroy_graph(graph);
}

TEST(CudaEmulation, AGraphKeepsTheOrderThatEventsGave) {
  const TwoStreams s;
  const Cell a, b, c;
  s.begin();
  add(s.one, a, c, 1);
  record(s.fork, s.one), wait(s.two, s.fork);
  add(s.two, b, a, 0);  // behind it
  const GraphHandle graph = s.end();
  for (int n = 0; n < 3; ++n) launch_graph(graph, s.one);
  synchronize(s.one);
  EXPECT_EQ(b.value(), 1 + 2 + 3);
  destroy_graph(graph);
}

TEST(CudaEmulation, MisuseOfACaptureIsAnError) {
  const Cell a, b;
  const auto capture_fails = [&](const char* part, const auto& misuse) {
    const TwoStreams s;
    begin_capture(s.one);
    expect_error([&] { misuse(s); }, part);
    expect_error([&] { end_capture(s.one); }, "[cudaStreamEndCapture] the capture failed before: ");
    EXPECT_FALSE(capturing(s.one));
    add(s.one, a, b, 1);  // the stream runs again
    synchronize(s.one);
  };
  capture_fails("[cudaStreamSynchronize] operation not permitted when stream is capturing",
                [](const TwoStreams& s) { synchronize(s.one); });
  capture_fails("[cudaEventSynchronize] operation not permitted on an event last recorded in a",
                [](const TwoStreams& s) { record(s.fork, s.one), synchronize(s.fork); });
  capture_fails("[cudaStreamBeginCapture] the stream is capturing already",
                [](const TwoStreams& s) { begin_capture(s.one); });
  capture_fails("[cudaStreamWaitEvent] dependency created on uncaptured work in another stream",
                [](const TwoStreams& s) { record(s.fork, s.two), wait(s.one, s.fork); });
  EXPECT_EQ(a.value(), 4);

  const TwoStreams s;
  for (bool works : {true, false}) {
    s.begin();
    if (works) add(s.two, a, b, 1);
    expect_error([&] { end_capture(s.one); },
                 "[cudaStreamEndCapture] capturing stream has unjoined work");
  }
  s.begin();
  const GraphHandle graph = s.end();
  s.begin();
  expect_error([&] { launch_graph(graph, s.one); }, "[cudaGraphLaunch]");
  expect_error([&] { s.end(); }, "[cudaStreamEndCapture]");
  expect_error([&] { wait(s.one, s.fork); },
               "[cudaStreamWaitEvent] operation not permitted on an event last recorded in a");
  destroy_graph(graph);
}

__global__ void write_at(int* to, int64_t i) { to[i] = 1; }

TEST(CudaEmulationDeathTest, TheHostCannotTouchDeviceMemoryNorAKernelItsOutside) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const OnGpu memory(testing::Array(kI32, {64}));
  int* data = memory.view().as<int>();
  EXPECT_DEATH(*static_cast<volatile int*>(data) = 1, "");
  const auto write_outside = [&] {
    launch("outside", OnGpu::stream(), {.threads = 32}, write_at, data, int64_t{64});
    synchronize(OnGpu::stream());
  };
  EXPECT_DEATH(write_outside(), "");
}

#else

TEST(CudaEmulation, IsNotWhatThisBuildRuns) {
  GTEST_SKIP() << "not run: built for a real GPU (see --config=emulated)";
}

#endif

}  // namespace
}  // namespace sheaf::kernels::cuda
