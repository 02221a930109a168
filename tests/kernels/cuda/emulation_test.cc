// The emulated GPU runs blocks, barriers and warps as CUDA does, and detects what CUDA leaves undefined. Empty in builds for a real one.
#include "sheaf/tests/kernels/cuda/on_gpu.h"

#if SHEAF_CUDA_EMULATED
#include "sheaf/kernels/cuda/tensor_cores.h"
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

// A product of 16 x 16 matrices by a warp, whose operands may be transposed on loading.
__global__ void multiply_sixteen(const bf16* a, const bf16* b, float* c, bool a_columns, bool b_columns) {
  constexpr int kPitch = 24;
  alignas(16) __shared__ bf16 tiles[2][16 * kPitch];
  for (int n = lane_of_thread(); n < 32; n += kWarp) {
    copy_beside(&tiles[0][n / 2 * kPitch + n % 2 * 8], a + n * 8, true);
    copy_beside(&tiles[1][n / 2 * kPitch + n % 2 * 8], b + n * 8, true);
  }
  end_round();
  arrived<0>();
  __syncthreads();
  const SharedMatrix<bf16> rows{tiles[0], kPitch}, columns{tiles[1], kPitch};
  unsigned of_a[4], of_b[4];
  if (a_columns) rows.as_a<true>(of_a, 0, 0);
  else rows.as_a<false>(of_a, 0, 0);
  if (b_columns) columns.as_b<true>(of_b, 0, 0);
  else columns.as_b<false>(of_b, 0, 0);
  for (int n = 0; n < 2; ++n) {
    float sums[4] = {};
    multiply_add<bf16>(sums, of_a, of_b[n * 2], of_b[n * 2 + 1]);
    for (int i = 0; i < 4; ++i)
      c[(lane_of_thread() / 4 + i / 2 * 8) * 16 + n * 8 + lane_of_thread() % 4 * 2 + i % 2] = sums[i];
  }
}

TEST(CudaEmulation, TensorCores) {
  const auto x = [](int64_t r, int64_t k) { return r * 3 % 7 - k % 5; };
  const auto y = [](int64_t k, int64_t c) { return k * 5 % 9 - c * c % 11; };
  for (const bool a_columns : {false, true})
    for (const bool b_columns : {false, true}) {
      testing::Array a(kBF16, {16, 16}), b(kBF16, {16, 16}), c(kF32, {16, 16});
      a.fill([&](int64_t i) { return a_columns ? x(i % 16, i / 16) : x(i / 16, i % 16); });
      b.fill([&](int64_t i) { return b_columns ? y(i / 16, i % 16) : y(i % 16, i / 16); });
      const OnGpu ga(a), gb(b), gc(c);
      launch("multiply", OnGpu::stream(), {.threads = 32}, multiply_sixteen, ga.view().as<const bf16>(), gb.view().as<const bf16>(),
             gc.view().as<float>(), a_columns, b_columns);
      const testing::Array got = gc.back();
      for (int64_t r = 0; r < 16; ++r)
        for (int64_t n = 0; n < 16; ++n) {
          int64_t want = 0;
          for (int64_t k = 0; k < 16; ++k) want += x(r, k) * y(k, n);
          EXPECT_EQ(got.at(r * 16 + n), want) << r << ' ' << n << ' ' << a_columns << b_columns;
        }
    }
}

__global__ void add_to_sum(float* sum, float x, float y) {
  float sums[4] = {*sum, 0, 0, 0};
  const unsigned all = pair_of<bf16>(x, x), one = pair_of<bf16>(y, 0), of_a[4] = {all, 0, 0, 0};
  multiply_add<bf16>(sums, of_a, one, 0);  // four products of x and y
  __syncwarp();
  if (threadIdx.x == 0) *sum = sums[0];
}

TEST(CudaEmulation, TensorCoresRoundTowardsZero) {
  for (const float sign : {1.0f, -1.0f}) {
    const OnGpu sum(testing::Array::of(kF32, {1}, {sign * 0x1p24}));
    const auto add = [&](float x, float y) {
      launch("add", OnGpu::stream(), {.threads = 32}, add_to_sum, sum.view().as<float>(), x, y);
      return sum.back().at(0);
    };
    EXPECT_EQ(add(sign, 0.75f), sign * 0x1.000002p24);    // by 3, the neighbours are 2 and 4
    EXPECT_EQ(add(sign, -0.25f), sign * 0x1p24);          // by -1, from 2
    EXPECT_EQ(add(sign, -0.125f), sign * 0x1.fffffep23);  // by a half, where neighbours are 1 apart
  }
}

enum class Wait : uint8_t { not_at_all, for_older, for_all };
__global__ void copy_in_rounds(const float* from, float* to, Wait wait, bool there) {
  alignas(16) __shared__ float tile[2][4];
  if (threadIdx.x != 0) return;
  for (int n = 0; n < 2; ++n) copy_beside(tile[n], from + 4 * n, there), end_round();
  if (wait == Wait::for_older) arrived<1>();
  if (wait == Wait::for_all) arrived<0>();
  for (int n = 0; n < 8; ++n) to[n] = tile[n / 4][n % 4];
  if (wait == Wait::for_older) arrived<0>();
}

TEST(CudaEmulation, CopiesArriveWhenTheyAreWaitedFor) {
  testing::Array from(kF32, {8}), to(kF32, {8});
  from.fill([](int64_t i) { return i + 1; });
  const OnGpu gfrom(from), gto(to);
  const auto copy = [&](Wait wait, bool there) {
    launch("copies", OnGpu::stream(), {.threads = 32}, copy_in_rounds, gfrom.view().as<const float>(), gto.view().as<float>(), wait,
           there);
    return gto.back();
  };
  const testing::Array all = copy(Wait::for_all, true), none = copy(Wait::for_all, false), older = copy(Wait::for_older, true);
  for (int n = 0; n < 8; ++n) {
    EXPECT_EQ(all.at(n), n + 1);
    EXPECT_EQ(none.at(n), 0);
    if (n < 4) EXPECT_EQ(older.at(n), n + 1);
    else EXPECT_TRUE(std::isnan(older.at(n)));
  }
  expect_error([&] { copy(Wait::not_at_all, true); }, "[copies] thread 0 has ended with copies on their way");
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
    // In shared memory, where the neighbour may not have written yet.
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
  copy_bytes(two, c.view().data, b.view().data, 4, Copy::on_device);  // ordered after nothing
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
  add(s.one, a, b, 1);  // before the capture: at the front of the graph
  s.begin();
  add(s.one, a, b, ten);
  add(s.two, b, c, 1);
  ten = 1000;  // arguments are those at launch time
  const GraphHandle graph = s.end();
  EXPECT_FALSE(capturing(s.one) || capturing(s.two));
  synchronize(s.one), synchronize(s.two);
  EXPECT_EQ(a.value(), 1);  // nothing has run yet
  EXPECT_EQ(b.value(), 0);
  for (int n = 0; n < 3; ++n) launch_graph(graph, s.one);
  synchronize(s.one);
  EXPECT_EQ(b.value(), 3);
  // In each replay the other stream's part, which nothing orders after this one, ran first.
  EXPECT_EQ(a.value(), 1 + 3 * 10 + (1 + 2 + 3));
  destroy_graph(graph);
}

TEST(CudaEmulation, AGraphKeepsTheOrderThatEventsGave) {
  const TwoStreams s;
  const Cell a, b, c;
  s.begin();
  add(s.one, a, c, 1);
  record(s.fork, s.one), wait(s.two, s.fork);
  add(s.two, b, a, 0);  // ordered after it
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
    add(s.one, a, b, 1);  // the stream works again
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
