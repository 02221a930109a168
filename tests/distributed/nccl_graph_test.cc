// NcclCommunicator's calls in graphs, and its end, over EchoNccl: how calls are recorded, joined and watched, not what NCCL does in a
// graph; that is tested with one rank on one GPU.
#include "sheaf/tests/distributed/echo_nccl.h"
#include "sheaf/tests/distributed/nccl_job.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf {
namespace {

using namespace testing::nccl;
using testing::EchoNccl;

/// A captured step of three lanes: x + gathered twice, by the communicators of both lanes.
struct Step {
  explicit Step(World& world) : x(ones(world)), y(twice(world)), z(twice(world)) {
    Gpu& gpu = *RankContext::current().gpu;
    const std::vector<int64_t> counts{1000, 1000};
    const auto gather = [&](Communicator& comm, const Tensor& to, std::string_view path) {
      return comm.all_gather(x.view().data, to.view().data, counts, kF32, path);
    };
    gather(lane(world), y, "before").sync();  // made and connected
    gather(other_lane(world), z, "before").sync();
    GpuCapture capture(gpu);
    const Event a = gather(lane(world), y, "a"), b = gather(other_lane(world), z, "b"),
                c = gather(lane(world), y, "c");
    for (const Event& e : {a, b, c}) e.order(gpu.compute());
    graph = capture.finish();
  }
  static Tensor twice(World& world) { return ones(world, 2000); }
  void set(float value) {
    const Tensor values =
        Tensor::from(std::vector<float>(1000, value), {1000}).to(x.device());
    Gpu& gpu = *RankContext::current().gpu;
    gpu.copy(gpu.compute(), x.view().data, values.view().data, 4000, Gpu::Copy::on_device);
  }

  Tensor x, y, z;
  std::unique_ptr<GpuGraph> graph;
};

TEST(NcclGraph, ReplaysCallsOfBothLanes) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  expect_well(run_job(nccl,
                      [](World& world) {
                        Step step(world);
                        for (float value : {2.0f, 3.0f}) {
                          step.set(value);
                          step.graph->replay();
                          EXPECT_EQ(step.y.to_vector(), std::vector<float>(2000, value));
                          EXPECT_EQ(step.z.to_vector(), std::vector<float>(2000, value));
                        }
                        EXPECT_EQ(lane(world).sequence(), 3u);  // replays are not calls
                      },
                      {}));
}

TEST(NcclGraph, IsWorkedAtByOneThreadAtATime) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  expect_well(run_job(nccl,
                      [&](World& world) {
                        Gpu& gpu = *RankContext::current().gpu;
                        const Tensor x = ones(world), y = ones(world);
                        add(lane(world), x, "before").sync();
                        add(other_lane(world), y, "before").sync();
                        nccl.delays->enqueue_ms = 20;
                        const std::atomic<int>& enqueued = nccl.delays->enqueued[world.rank()];
                        GpuCapture capture(gpu);
                        for (int before : {2, 4}) {
                          const Event a = add(lane(world), x, "a");
                          EXPECT_EQ(enqueued, before + 1);
                          const Event b = add(other_lane(world), y, "b");
                          EXPECT_EQ(enqueued, before + 2);
                          a.order(gpu.compute()), b.order(gpu.compute());
                        }
                        capture.finish()->replay();
                      },
                      {}));
}

TEST(NcclGraph, RegistersMemoryThatTheCaptureAskedFor) {
  SHEAF_NEEDS_GPU();
  const Registered scope;
  EchoNccl nccl;
  expect_well(run_job(nccl,
                      [](World& world) {
                        Gpu& gpu = *RankContext::current().gpu;
                        Communicator& comm = lane(world);
                        const Tensor y =
                            Tensor::from(std::vector<float>(1000, 3.0f), {1000}).to(gpu.device());
                        GpuCapture capture(gpu);
                        const Tensor out =
                            Tensor::empty({kF32, {10'000'000}, {}}, gpu.device(), MemoryKind::landing);
                        EXPECT_EQ(gpu.wire_pieces().size(), 2u);
                        comm.all_gather(y.view().data, out.view().data, std::vector<int64_t>(2, 1000), kF32, "y")
                            .order(gpu.compute());
                        const auto graph = capture.finish();
                        graph->replay();
                        const Tensor first = Tensor::over(out.storage(), 0, {kF32, {2000}, {}}, {2000}, {1});
                        EXPECT_EQ(first.to_vector(), std::vector<float>(2000, 3.0f));
                      },
                      {}));
  EXPECT_EQ(nccl.rules->moved("all_gather out").in_place, 2);
  EXPECT_EQ(nccl.rules->registrations(), 2 * (2 + 1));  // the other lane knows the first piece
}

TEST(NcclGraph, AReplayHearsOfAJobThatFailed) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  const auto outcomes = run_job(
      nccl,
      [](World& world) {
        Step step(world);
        step.graph->replay();
        if (world.rank() == 1) fail<DataError>("[data] token 70000 is out of vocabulary");
        for (int i = 0; i < 1000; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          step.graph->replay();
        }
        ADD_FAILURE() << "it went through";
      },
      {});
  expect(outcomes[1], ExitCode::kData, {"token 70000"});
  expect(outcomes[0], ExitCode::kPeerLost,
         {"rank 1 failed: [data] token 70000 is out of vocabulary"});
}

// The holder of the graph waits for a call, which would never return if its lane waited for the graph.
TEST(NcclGraph, AnAbortWaitsForGraphsAndNobodyForIt) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  const auto outcomes = run_job(
      nccl,
      [&](World& world) {
        Step step(world);
        struct Held {  // destroyed before the step
          explicit Held(std::atomic<int>& graphs) : graphs_(graphs) { ++graphs_; }
          ~Held() { --graphs_; }
          std::atomic<int>& graphs_;
        } const held(nccl.delays->graphs);
        if (world.rank() == 1) {
          while (!nccl.delays->busy) std::this_thread::yield();
          fail<DataError>("[data] token 70000 is out of vocabulary");
        }
        while (nccl.delays->graphs < world.size()) std::this_thread::yield();
        nccl.delays->busy = true;
        add(lane(world), step.x, "evaluation").sync();
        ADD_FAILURE() << "it went through";
      },
      {});
  expect(outcomes[1], ExitCode::kData, {"token 70000"});
  expect(outcomes[0], ExitCode::kPeerLost,
         {"rank 1 failed: [data] token 70000 is out of vocabulary"});
}

TEST(NcclCommunicatorsEnd, DoesNotWaitForEverForPeers) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  nccl.delays->peers = 1;
  expect_well(run_job(nccl, [](World& world) { add(lane(world), ones(world), "x").sync(); }, {}));
  EXPECT_EQ(nccl.delays->there, 2 * 2);
  nccl.delays->peers = 0;
  while (nccl.delays->there > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A collective of one rank would be a copy; a send to itself uses NCCL's kernel.
TEST(NcclGraph, OfNcclItselfOneRankOnOneGpu) {
  SHEAF_NEEDS_GPU();
  SHEAF_NEEDS_NCCL();
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    RankScope scope(context);
    context.gpu = kernels::cuda::make_gpu(0);
    Gpu& gpu = *context.gpu;
    NcclLibrary& nccl = nccl_library();
    const std::shared_ptr<NcclComm> comm = nccl.join(nccl.unique_id(), 1, 0, "one");
    std::string why;
    settle(*comm);
    const auto floats = [&](float value) {
      return Tensor::from(std::vector<float>(1000, value), {1000}).to(gpu.device());
    };
    const Tensor in = floats(0), out = floats(0);
    const auto set = [&](float value) {
      gpu.copy(gpu.compute(), in.view().data, floats(value).view().data, 4000, Gpu::Copy::on_device);
    };
    const auto to_itself = [&] {
      gpu.record(gpu.compute()).order(comm->stream());
      comm->group([&] {
        comm->send(in.view().data, 4000, 0);
        comm->receive(out.view().data, 4000, 0);
      });
      settle(*comm);
      comm->record().order(gpu.compute());
    };
    set(1), to_itself();  // connected
    EXPECT_EQ(out.to_vector(), std::vector<float>(1000, 1));
    std::unique_ptr<GpuGraph> graph;
    {
      GpuCapture capture(gpu);
      to_itself();
      graph = capture.finish();
    }
    for (float value : {2.0f, 3.0f}) {
      set(value), graph->replay();
      EXPECT_EQ(out.to_vector(), std::vector<float>(1000, value));
      set(-value), to_itself();  // between replays
      EXPECT_EQ(out.to_vector(), std::vector<float>(1000, -value));
    }
    std::promise<void> over;
    std::future<void> aborted = over.get_future();
    std::thread([comm, over = std::move(over)]() mutable {
      comm->abort();
      over.set_value();
    }).detach();
    while (comm->state(why) != NcclComm::State::failed) std::this_thread::yield();
    graph.reset();
    EXPECT_EQ(aborted.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  }
}

TEST(NcclGraph, MemoryOfTheHostIsNotPartOfOne) {
  SHEAF_NEEDS_GPU();
  EchoNccl nccl;
  const auto outcomes = run_job(nccl,
                                [](World& world) {
                                  Communicator& comm = lane(world);
                                  int32_t here = 1;
                                  GpuCapture capture(*RankContext::current().gpu);
                                  comm.all_reduce(&here, 1, kI32, Reduction::sum, "count");
                                },
                                {});
  for (const Outcome& o : outcomes)
    EXPECT_TRUE(o.code == 64 || o.code == 72) << o.what;
  expect(outcomes[outcomes[0].code == 64 ? 0 : 1], ExitCode::kConfig,
         {"[all_reduce] count: a graph cannot hold this call: its memory is the host's"});
}

}  // namespace
}  // namespace sheaf
