// NcclCommunicator: over a stand-in for NCCL whose ranks are threads that share a GPU (an emulated one will do), and over NCCL itself: one
// rank on one GPU, or several ranks where there are several GPUs.
#include <atomic>

#include "sheaf/core/profile.h"
#include "sheaf/tests/distributed/collective_battery.h"
#include "sheaf/tests/distributed/nccl_job.h"
#include "sheaf/tests/distributed/thread_nccl.h"
#include "sheaf/tests/distributed/through_gpu.h"

namespace sheaf {
namespace {

using namespace testing::nccl;
using std::chrono::milliseconds;
using testing::Battery;
using testing::SumOrder;
using testing::ThroughGpu;

void battery(World& world) {
  ThroughGpu comm(lane(world));
  Battery on_gpu(comm, testing::BufferMemory::normal, SumOrder::any);
  on_gpu.run(20'000);
  Battery on_host(other_lane(world));  // sums in rank order
  on_host.run(20'000);
}

void registered_battery(World& world) {
  ThroughGpu comm(lane(world), MemoryKind::wire);
  Battery(comm, testing::BufferMemory::normal, SumOrder::any).run(20'000);
}

TEST(NcclCommunicator, EveryCollectiveAtWorlds1To4) {
  SHEAF_NEEDS_GPU();
  for (int n = 1; n <= 4; ++n) {
    SCOPED_TRACE(n);
    testing::ThreadNccl nccl;
    expect_well(run_job(nccl, battery, {.ranks = n}));
  }
}

TEST(NcclCommunicator, EveryCollectiveInRegisteredBuffers) {
  SHEAF_NEEDS_GPU();
  const Registered scope;
  testing::ThreadNccl nccl;
  expect_well(run_job(nccl, registered_battery, {.ranks = 3}));
  const testing::NcclRules& rules = *nccl.rules;
  for (const char* kind : {"all_gather in", "all_gather out", "reduce_scatter in", "all_reduce out"}) {
    EXPECT_GT(rules.moved(kind).in_place, 0) << kind;
    EXPECT_EQ(rules.moved(kind).copied, 0) << kind;
  }
}

TEST(NcclCommunicator, RegistersWhatItsMemoryGrowsBy) {
  SHEAF_NEEDS_GPU();
  const Registered scope;
  testing::ThreadNccl nccl;
  expect_well(run_job(nccl,
                      [](World& world) {
                        for (int64_t n : {1'000, 9'000'000, 1'000}) {  // the second needs a piece
                          const Tensor x = Tensor::empty({kF32, {n}, {}}, world.device(), MemoryKind::wire);
                          Gpu& gpu = *RankContext::current().gpu;
                          gpu.copy(gpu.compute(), x.view().data, ones(world, n).view().data,
                                   static_cast<size_t>(4 * n), Gpu::Copy::on_device);
                          add(lane(world), x, "x").sync();
                          EXPECT_EQ(x.to_vector(), std::vector<float>(static_cast<size_t>(n), 2.0f));
                        }
                      },
                      {}));
  EXPECT_EQ(nccl.rules->moved("all_reduce out").in_place, 6);
  EXPECT_EQ(nccl.rules->registrations(), 2 * (2 + 1));  // the other lane knows the first piece
}

TEST(NcclCommunicator, RegistersNothingWhereOneRankCannot) {
  SHEAF_NEEDS_GPU();
  const Registered scope;
  testing::ThreadNccl empty, refusing;
  empty.empty = true;
  refusing.refusing = 1;
  for (testing::ThreadNccl* nccl : {&empty, &refusing}) {
    expect_well(run_job(*nccl, registered_battery, {.ranks = 3}));
    EXPECT_GT(nccl->rules->moved("all_gather out").copied, 0);
    EXPECT_EQ(nccl->rules->moved("all_gather out").in_place, 0);
  }
}

TEST(NcclCommunicator, CountsBytesAndHasNoSumsOfU16) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  const auto outcomes =
      run_job(nccl,
              [](World& world) {
                Communicator& comm = lane(world);
                EXPECT_EQ(comm.kind(), "nccl");
                const Tensor x = ones(world);
                add(comm, x, "x").sync();
                EXPECT_EQ(x.to_vector(), std::vector<float>(1000, 2.0f));
                EXPECT_EQ(comm.bytes_received(), 4000);
                comm.all_reduce(x.view().data, 1000, kU16, Reduction::sum, "narrow").sync();
              },
              {});
  for (const Outcome& o : outcomes) EXPECT_TRUE(o.code == 64 || o.code == 72) << o.what;
  EXPECT_TRUE(outcomes[0].code == 64 || outcomes[1].code == 64);
  const Outcome& refused = outcomes[outcomes[0].code == 64 ? 0 : 1];
  expect(refused, ExitCode::kConfig, {"[all_reduce] narrow: NCCL has no reductions of u16"});
}

// That they were enqueued. When a stand-in's streams reach them says nothing.
TEST(NcclCommunicator, AProfileHasItsCalls) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  expect_well(run_job(nccl,
                      [](World& world) {
                        const Profile profile;
                        const Tensor x = ones(world);
                        for (const char* path : {"a", "b"}) add(lane(world), x, path).sync();
                        std::string calls;
                        for (const Profile::Span& s : profile.spans()) {
                          if (s.row != "(data=2)/data/0/gather") continue;
                          calls += s.name + ' ' + s.module + "; ";
                          EXPECT_GE(s.end, s.begin);
                        }
                        EXPECT_EQ(calls, "all_reduce a; all_reduce b; ");
                      },
                      {}));
}

TEST(NcclCommunicator, TheLaneDoesNotWaitForTheDevice) {
  SHEAF_NEEDS_GPU();
  // Rank 1 waits until rank 0 has enqueued all its calls.
  testing::ThreadNccl nccl;
  std::atomic<bool> enqueued = false;
  expect_well(run_job(nccl,
                      [&](World& world) {
                        Communicator& comm = lane(world);
                        const Tensor x = ones(world);
                        for (int i = 0; world.rank() == 1 && i < 2000 && !enqueued; ++i) std::this_thread::sleep_for(milliseconds(10));
                        if (world.rank() == 1) {
                          EXPECT_TRUE(enqueued);
                        }
                        std::vector<Event> events;
                        for (int i = 0; i < 3; ++i) events.push_back(add(comm, x, "x"));
                        EXPECT_NE(events[2].point(), nullptr);  // enqueued
                        if (world.rank() == 0) {
                          EXPECT_FALSE(events[0].ready());
                          enqueued = true;
                        }
                        events[2].sync();
                        EXPECT_EQ(x.to_vector(), std::vector<float>(1000, 8.0f));
                      },
                      {}));
}

TEST(NcclCommunicator, ATimeOutNamesWhoIsMissing) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  const auto outcomes = run_job(nccl,
                                [](World& world) {
                                  const Tensor x = ones(world);
                                  Communicator& comm = lane(world);
                                  add(comm, x, "blocks.0").sync();
                                  if (world.rank() != 2)
                                    add(comm, x, "blocks.1").sync();
                                  else
                                    std::this_thread::sleep_for(milliseconds(6000));
                                },
                                {.ranks = 3, .timeout = milliseconds(3000)});
  for (int r : {0, 1})
    expect(outcomes[r], ExitCode::kTimeout,
           {"[all_reduce] rank ", "time-out after 3.0 s at sequence 2 (blocks.1)",
            "missing ranks: 2"});
  EXPECT_EQ(outcomes[2].code, 0) << outcomes[2].what;
}

TEST(NcclCommunicator, RanksThatDisagreeAreTold) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  const auto outcomes = run_job(nccl,
                                [](World& world) {
                                  const Tensor x = ones(world);
                                  Communicator& comm = lane(world);
                                  if (world.rank() == 0)
                                    add(comm, x, "blocks.0").sync();
                                  else
                                    comm.broadcast(x.view().data, 4000, 0, "blocks.1").sync();
                                },
                                {});
  for (const Outcome& o : outcomes)
    expect(o, ExitCode::kDesync,
           {"ranks disagree on call 1", "all_reduce f32 [1000] sum on GPUs (blocks.0)",
            "broadcast u8 [4000] from 0 on GPUs (blocks.1)"});
}

TEST(NcclCommunicator, ValuesOnTheHostThatAreNotTheSame) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  const auto outcomes = run_job(nccl,
                                [](World& world) {
                                  float x = 1;
                                  lane(world).label_next_call(world.rank() == 0 ? "weights" : "gradients");
                                  lane(world).all_reduce(&x, 1, kF32, Reduction::sum, "loss").sync();
                                },
                                {.timeout = milliseconds(5000)});
  for (const Outcome& o : outcomes)
    expect(o, ExitCode::kDesync, {"ranks disagree", "(loss) of weights", "(loss) of gradients"});
}

TEST(NcclCommunicator, AllToAllCountsThatDoNotFit) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  const auto outcomes = run_job(
      nccl,
      [](World& world) {
        const Tensor x = ones(world), y = ones(world);
        const bool first = world.rank() == 0;
        const std::vector<int64_t> send = {first ? 1 : 5, 1}, recv = {1, first ? 4 : 1};
        lane(world).all_to_all(x.view().data, send, y.view().data, recv, kF32, "moe").sync();
      },
      {});
  for (const Outcome& o : outcomes)
    expect(o, ExitCode::kDesync, {"rank 1 sends 5 elements to rank 0, which expects 4"});
}

TEST(NcclCommunicator, ARankThatThrowsEndsEverybodysCalls) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  const auto begin = std::chrono::steady_clock::now();
  const auto outcomes = run_job(
      nccl,
      [](World& world) {
        const Tensor x = ones(world), y = ones(world);
        add(lane(world), x, "blocks.0").sync();
        if (world.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(100));  // the others' calls are in flight
          fail<DataError>("[data] token 70000 is out of vocabulary");
        }
        const Event a = add(lane(world), x, "blocks.1"), b = add(other_lane(world), y, "blocks.2");
        try {
          b.sync();
          ADD_FAILURE() << "it went through";
        } catch (const CommError& e) {
          EXPECT_NE(std::string(e.what()).find("(blocks.2)"), std::string::npos) << e.what();
        }
        a.sync();
      },
      {.ranks = 3});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  expect(outcomes[1], ExitCode::kData, {"token 70000"});
  for (int r : {0, 2})
    expect(
        outcomes[r], ExitCode::kPeerLost,
        {"rank 1 failed: [data] token 70000 is out of vocabulary", "at sequence 2", "(blocks.1)"});
}

TEST(NcclCommunicator, ARankThatLeaves) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  const auto outcomes = run_job(nccl,
                                [](World& world) {
                                  const Tensor x = ones(world);
                                  add(lane(world), x, "once").sync();
                                  if (world.rank() == 0) add(lane(world), x, "twice").sync();
                                },
                                {});
  EXPECT_EQ(outcomes[1].code, 0) << outcomes[1].what;
  expect(outcomes[0], ExitCode::kPeerLost, {"(twice)", "rank 1 failed: it has left the job"});
}

TEST(NcclCommunicator, EndsWithCallsThatNobodyWaitedFor) {
  SHEAF_NEEDS_GPU();
  testing::ThreadNccl nccl;
  expect_well(run_job(nccl,
                      [](World& world) {
                        const Tensor x = ones(world);
                        Communicator& comm = lane(world);
                        for (int i = 0; i < 20; ++i) add(comm, x, "x");
                        add(comm, x, "x").order(RankContext::current().gpu->compute());
                      },
                      {.ranks = 3}));
}

TEST(Nccl, UniqueIds) {  // needs no GPU
  SHEAF_NEEDS_NCCL();
  if constexpr (kernels::kHasCuda) {
    const std::string a = nccl_library().unique_id(), b = nccl_library().unique_id();
    EXPECT_EQ(a.size(), 128u);
    EXPECT_NE(a, b);
  }
}

TEST(Nccl, OneRankOnOneGpu) {
  SHEAF_NEEDS_GPU();
  SHEAF_NEEDS_NCCL();
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    RankScope scope(context);
    context.gpu = kernels::cuda::make_gpu(0);
    Gpu& gpu = *context.gpu;
    NcclLibrary& nccl = nccl_library();
    const std::unique_ptr<NcclComm> comm = nccl.join(nccl.unique_id(), 1, 0, "one");
    settle(*comm);
    std::vector<float> values(1000);
    std::iota(values.begin(), values.end(), -500.0f);
    const auto check_copies = [&](const char* what,
                                  const std::function<void(const void*, void*)>& work) {
      const Tensor in = Tensor::from(values, {1000}).to(gpu.device());
      const Tensor out = Tensor::from(std::vector<float>(1000), {1000}).to(gpu.device());
      gpu.record(gpu.compute()).order(comm->stream());
      comm->group([&] { work(in.view().data, out.view().data); });
      settle(*comm);
      comm->record().order(gpu.compute());
      EXPECT_EQ(out.to_vector(), values) << what;
    };
    check_copies("all_gather", [&](auto* in, auto* out) { comm->all_gather(in, out, 4000); });
    check_copies("broadcast", [&](auto* in, auto* out) { comm->broadcast(in, out, 4000, 0); });
    check_copies("two broadcasts", [&](auto* in, auto* out) {
      comm->broadcast(in, out, 400, 0);
      comm->broadcast(static_cast<const char*>(in) + 400, static_cast<char*>(out) + 400, 3600, 0);
    });
    for (Reduction r : {Reduction::sum, Reduction::max, Reduction::min}) {
      check_copies("all_reduce",
                   [&](auto* in, auto* out) { comm->all_reduce(in, out, 1000, kF32, r); });
      check_copies("reduce", [&](auto* in, auto* out) { comm->reduce(in, out, 1000, kF32, r, 0); });
      check_copies("reduce_scatter",
                   [&](auto* in, auto* out) { comm->reduce_scatter(in, out, 1000, kF32, r); });
    }
    for (DType dtype : {kF64, kF32, kBF16, kF16, kI64, kI32, kU32, kU8, kI8})
      check_copies("all_reduce of this dtype", [&](auto* in, auto* out) {
        comm->all_reduce(in, out, 4000 / static_cast<int64_t>(size_of(dtype)), dtype,
                         Reduction::max);
      });
    check_copies("to itself", [&](auto* in, auto* out) {
      comm->send(in, 4000, 0);
      comm->receive(out, 4000, 0);
    });
    // In memory that is registered with NCCL.
    const std::shared_ptr<PieceSource> memory = nccl.memory();
    ASSERT_NE(memory, nullptr);
    constexpr int64_t kPiece = 4 << 20;
    char* const piece = static_cast<char*>(memory->allocate(0, kPiece));
    ASSERT_NE(piece, nullptr);
    void* const registration = comm->register_memory(piece, kPiece);
    const Tensor in = Tensor::from(values, {1000}).to(gpu.device());
    const Tensor out = Tensor::from(std::vector<float>(1000), {1000}).to(gpu.device());
    gpu.copy(gpu.compute(), piece, in.view().data, 4000, Gpu::Copy::on_device);
    gpu.record(gpu.compute()).order(comm->stream());
    comm->group([&] { comm->all_gather(piece, piece + 4096, 4000); });
    settle(*comm);
    comm->record().order(gpu.compute());
    gpu.copy(gpu.compute(), out.view().data, piece + 4096, 4000, Gpu::Copy::on_device);
    EXPECT_EQ(out.to_vector(), values);
    comm->deregister_memory(registration);
    memory->free(piece);
    comm->finalize();
    settle(*comm);
  }
}

int gpus() {
  if constexpr (kernels::kHasCuda) return kernels::cuda::device_count();
  return 0;
}

TEST(Nccl, EveryCollectiveBetweenGpus) {
  SHEAF_NEEDS_GPU();
  SHEAF_NEEDS_NCCL();
  if (gpus() < 2) GTEST_SKIP() << "not run: NCCL between ranks needs two GPUs, here is one";
  const Registered scope;
  if constexpr (kernels::kHasCuda)
    for (int n = 2; n <= gpus(); ++n)
      for (const auto& calls : {battery, registered_battery})
        expect_well(run_job(nccl_library(), calls, {.ranks = n, .one_gpu = false}));
}

TEST(Nccl, KernelsThatWaitForARankThatThrewEnd) {
  SHEAF_NEEDS_GPU();
  SHEAF_NEEDS_NCCL();
  if (gpus() < 2) GTEST_SKIP() << "not run: NCCL between ranks needs two GPUs, here is one";
  if constexpr (kernels::kHasCuda) {
    const auto outcomes = run_job(nccl_library(),
                                  [](World& world) {
                                    const Tensor x = ones(world);
                                    add(lane(world), x, "blocks.0").sync();
                                    if (world.rank() == 1) fail<DataError>("[data] bad token");
                                    add(lane(world), x, "blocks.1").sync();
                                  },
                                  {.ranks = 2, .one_gpu = false});
    expect(outcomes[0], ExitCode::kPeerLost, {"rank 1 failed: [data] bad token", "(blocks.1)"});
  }
}

}  // namespace
}  // namespace sheaf
