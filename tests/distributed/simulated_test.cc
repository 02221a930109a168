#include "sheaf/distributed/simulated.h"

#include <gtest/gtest.h>

#include "sheaf/distributed/run_local.h"
#include "sheaf/distributed/staging.h"

namespace sheaf {
namespace {

using distributed::simulated_world;

/// A few calls of every kind; buffers may be null where nothing moves.
void calls(Communicator& comm, void* in, void* out) {
  const int n = comm.size();
  std::vector<int64_t> counts(n), to(n), from(n);
  for (int r = 0; r < n; ++r) counts[r] = r * 3, to[r] = (comm.rank() + r) % n, from[r] = (r + comm.rank()) % n;
  comm.all_gather(in, out, counts, kBF16, "a").sync();
  comm.reduce_scatter(out, in, counts, kF32, "b").sync();
  comm.all_reduce(out, 5, kF64, Reduction::max, "c").sync();
  comm.all_reduce(out, 5000, kF32, Reduction::sum, "d").sync();
  comm.all_to_all(in, to, out, from, kI64, "e").sync();
  comm.broadcast(out, 100, n - 1, "f").sync();
  comm.barrier("g").sync();
}

TEST(Simulated, CountsAsARealJobDoes) {
  for (int n : {1, 2, 3, 5}) {
    std::vector<uint64_t> prints(n);
    std::vector<int64_t> received(n);
    run_local(n, [&](World& world) {
      std::vector<double> in(6000), out(6000);
      Communicator& comm = world.mesh({{"data", n}}).runtime->gather_lane(0);
      calls(comm, in.data(), out.data());
      prints[world.rank()] = comm.fingerprint();
      received[world.rank()] = comm.bytes_received();
    });
    for (int r = 0; r < n; ++r) {
      World world = simulated_world(r, n);
      Communicator& comm = world.mesh({{"data", n}}).runtime->gather_lane(0);
      calls(comm, nullptr, nullptr);
      EXPECT_EQ(comm.kind(), "simulated");
      EXPECT_EQ(comm.sequence(), 7u);
      EXPECT_EQ(comm.fingerprint(), prints[r]);
      EXPECT_EQ(comm.bytes_received(), received[r]);
    }
  }
}

TEST(Simulated, AThousandRanksAndTheirStaging) {
  for (const std::string comm : {"gloo", "shm"}) {
    World world = simulated_world(1000, 1024, {.threads = 3, .comm = comm});
    EXPECT_EQ(world.device(), Device::meta());
    EXPECT_EQ(RankContext::current().threads, 3);
    EXPECT_EQ(RankContext::current().meta->stats().live, 0);
    Mesh mesh = world.mesh({{"data", 256}, {"model", 4}});
    EXPECT_EQ(mesh.coordinate("data"), 250);
    EXPECT_EQ(mesh.coordinate("model"), 0);
    EXPECT_EQ(RankContext::current().meta->stats().live, 2 * (staging_bytes_of(comm, 256) + staging_bytes_of(comm, 4)));
    EXPECT_EQ(mesh.runtime->gather_lane(0).staging_bytes(),
              comm == "gloo" ? gloo_staging_bytes(256) : shm_staging_bytes(256));
  }
  EXPECT_EQ(RankContext::current().world, 1);
  World alone = simulated_world(0, 1);
  alone.mesh({{"data", 1}});
  EXPECT_EQ(RankContext::current().meta->stats().live, 0);
  EXPECT_THROW(simulated_world(3, 3), ConfigError);
}

// On hosts of four ranks: model's groups are within one host, data's span hosts.
TEST(Simulated, EachGroupOfSeveralHostsHasStagingOfItsKind) {
  std::vector<int> hosts;
  for (int r = 0; r < 16; ++r) hosts.push_back(r / 4 * 4);
  World world = simulated_world(6, 16, {.comm = "shm+gloo", .hosts = hosts});
  const Mesh mesh = world.mesh({{"data", 4}, {"model", 4}});
  EXPECT_EQ(mesh.runtime->gather_lane(0).staging_bytes(), gloo_staging_bytes(4));
  EXPECT_EQ(mesh.runtime->gather_lane(1).staging_bytes(), shm_staging_bytes(4));
  EXPECT_EQ(RankContext::current().meta->stats().live, 2 * (gloo_staging_bytes(4) + shm_staging_bytes(4)));
  EXPECT_THROW(simulated_world(0, 4, {.comm = "shm+gloo"}), ConfigError);
}

TEST(Simulated, WorldsNest) {
  World a = simulated_world(0, 2);
  RankContext* outer = &RankContext::current();
  {
    World b = simulated_world(1, 2);
    EXPECT_EQ(RankContext::current().rank, 1);
  }
  EXPECT_EQ(&RankContext::current(), outer);
  EXPECT_EQ(outer->rank, 0);
  EXPECT_EQ(outer->world, 2);
}

}  // namespace
}  // namespace sheaf
