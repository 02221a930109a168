#include "sheaf/distributed/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <net/if.h>
#include <netdb.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "sheaf/core/cores.h"
#include "sheaf/core/error.h"
#include "sheaf/distributed/job.h"
#include "sheaf/distributed/tcp_store.h"

namespace {
int busy_answers = 0;  // of the name server, until it knows the name below
}

// Instead of the C library's.
extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints, addrinfo** list) {
  static const auto real = reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const bool ours = host && std::string_view(host) == "this-host.invalid";  // as Debian names a host in its own /etc/hosts
  if (ours && busy_answers-- > 0) return EAI_AGAIN;
  return real(ours ? "127.0.1.1" : host, port, hints, list);
}

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Variables = std::map<std::string, std::string>;

Rendezvous read(const Variables& variables) {
  return read_rendezvous([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

void expect_refused(const Variables& variables, const std::string& part) {
  try {
    read(variables);
    ADD_FAILURE() << "accepted, expected: " << part;
  } catch (const ConfigError& e) {
    EXPECT_EQ(e.exit_code(), 64);
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(Rendezvous, WithoutALauncherThereIsOneRank) {
  const Rendezvous r = read({});
  EXPECT_EQ(r.world, 1);
  EXPECT_EQ(r.launcher, "");
  EXPECT_EQ(r.threads, available_cores());
  EXPECT_EQ(r.timeout.count(), 300'000);
}

TEST(Rendezvous, Torchrun) {
  const Rendezvous r = read({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "5000"}, {"SHEAF_TIMEOUT", "2.5"},
                             {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "9"}});
  EXPECT_EQ(r.launcher, "torchrun");
  EXPECT_EQ(r.rank, 3);
  EXPECT_EQ(r.world, 4);
  EXPECT_EQ(r.local_rank, 1);
  EXPECT_EQ(r.local_world, 2);
  EXPECT_EQ(r.threads, std::max(1, available_cores() / 2));
  EXPECT_EQ(r.port, 5000);
  EXPECT_EQ(r.timeout.count(), 2500);
}

TEST(Rendezvous, TorchrunsAgentHoldsItsPort) {
  Variables v = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "some-host"},
                 {"MASTER_PORT", "5000"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  EXPECT_EQ(read(v).port, 5001);
  EXPECT_EQ(read(v).host, "127.0.0.1");  // all ranks are on this host, whatever its name
  v["SHEAF_PORT"] = "6000";
  EXPECT_EQ(read(v).port, 6000);
}

TEST(Rendezvous, HowOftenTheJobWasStartedAgain) {
  Variables v = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  EXPECT_EQ(read(v).restarts, 0);
  v["TORCHELASTIC_RESTART_COUNT"] = "2";
  EXPECT_EQ(read(v).restarts, 2);
  v["TORCHELASTIC_RESTART_COUNT"] = "often";
  expect_refused(v, "TORCHELASTIC_RESTART_COUNT='often' is not a number");
  v.erase("RANK"), v.erase("WORLD_SIZE");  // of another job
  EXPECT_EQ(read(v).restarts, 0);
}

TEST(Rendezvous, OtherLaunchersInOrder) {
  Variables v = {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "1"}, {"SLURM_NTASKS_PER_NODE", "2"}};
  EXPECT_EQ(read(v).world, 1) << "the script of sbatch is in no step";
  v["SLURM_STEP_ID"] = "0";
  EXPECT_EQ(read(v).launcher, "Slurm");
  EXPECT_EQ(read(v).rank, 1);
  v["SLURM_JOB_NAME"] = "bash";
  EXPECT_EQ(read(v).world, 1);
  v["PMI_RANK"] = "2", v["PMI_SIZE"] = "3";
  EXPECT_EQ(read(v).launcher, "PMI");
  EXPECT_EQ(read(v).local_world, 3);
  v["OMPI_COMM_WORLD_RANK"] = "4", v["OMPI_COMM_WORLD_SIZE"] = "5", v["OMPI_COMM_WORLD_LOCAL_RANK"] = "4",
  v["OMPI_COMM_WORLD_LOCAL_SIZE"] = "5";
  EXPECT_EQ(read(v).launcher, "Open MPI");
  EXPECT_EQ(read(v).rank, 4);
}

TEST(Rendezvous, SlurmsFirstHostServesTheStore) {
  for (auto [list, host] : {std::pair{"127.0.0.[1-4,9]", "127.0.0.1"}, {"localhost,node2", "localhost"}}) {
    const Rendezvous r = read({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_NODELIST", list},
                               {"SLURM_NTASKS_PER_NODE", "2"}});
    EXPECT_EQ(r.host, host);
  }
}

TEST(Rendezvous, SlurmTellsWhoSharesAHost) {
  const auto local_world = [](Variables more) {
    more.insert({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}, {"SLURM_LOCALID", "0"},
                 {"SLURM_JOB_NODELIST", "localhost"}});
    return read(more).local_world;
  };
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "4"}, {"SLURM_NODEID", "0"}}), 4);
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}, {"SLURM_NODEID", "1"}}), 2);
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}}), 2);
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "3,1"}, {"SLURM_NODEID", "0"}}), 3);
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "3,1"}, {"SLURM_NODEID", "1"}}), 1);
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "1(x2),2"}, {"SLURM_NODEID", "2"}}), 2);
  EXPECT_EQ(local_world({{"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_JOB_NUM_NODES", "2"}}), 4);
  EXPECT_EQ(local_world({{"SLURM_JOB_NUM_NODES", "1"}}), 4);
  EXPECT_EQ(local_world({{"SLURM_JOB_NUM_NODES", "2"}, {"SLURM_NTASKS_PER_NODE", "2"}}), 2);
  // sbatch --ntasks-per-node=8, then srun -n 4: the actual size of the step counts, not the request.
  EXPECT_EQ(local_world({{"SLURM_NTASKS_PER_NODE", "8"}}), 4);
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "1(x4)"}, {"SLURM_NODEID", "3"}, {"SLURM_NTASKS_PER_NODE", "4"}}), 1);
  EXPECT_EQ(local_world({{"SLURM_STEP_TASKS_PER_NODE", "many"}, {"SLURM_NODEID", "0"}}), 1);
  EXPECT_EQ(local_world({}), 1);
}

TEST(Rendezvous, SlurmStartsRanksOfPmi) {
  Variables v = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "1"},
                 {"SLURM_STEP_TASKS_PER_NODE", "2"}, {"SLURM_NODEID", "0"}, {"SLURM_JOB_NODELIST", "no-such-host.invalid"},
                 {"SLURM_STEP_NODELIST", "127.0.0.2"}};
  EXPECT_EQ(read(v).local_world, 2);
  EXPECT_EQ(read(v).local_rank, 1);
  EXPECT_EQ(read(v).host, "127.0.0.1");
  v["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)";
  EXPECT_EQ(read(v).local_world, 1);
  EXPECT_EQ(read(v).host, "127.0.0.2");
  v["SLURM_STEP_NUM_TASKS"] = "1";  // the size of a step of a launcher's daemons
  expect_refused(v, "MASTER_ADDR");
}

TEST(Rendezvous, ThreadsOfARank) {
  const int cores = available_cores();
  EXPECT_EQ(read({{"OMP_NUM_THREADS", "1"}}).threads, 1);
  EXPECT_EQ(read({{"OMP_NUM_THREADS", "1,4"}}).threads, 1);  // of the outermost level
  for (const char* nothing : {"100000", "0", "-1", "all", ""}) EXPECT_EQ(read({{"OMP_NUM_THREADS", nothing}}).threads, cores);
  EXPECT_EQ(read({{"OMP_NUM_THREADS", "1"}, {"SHEAF_THREADS_PER_RANK", "3"}}).threads, 3);
  EXPECT_EQ(read({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"OMP_NUM_THREADS", "100000"}}).threads,
            std::max(1, cores / 2));
  EXPECT_EQ(threads_per_rank(2 * cores, [](const char*) { return nullptr; }), 1);
}

TEST(Rendezvous, JobsHaveTokensAndPortsOfTheirOwn) {
  const Variables slurm = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEPID", "0"}, {"SLURM_JOB_NUM_NODES", "1"}};
  const Variables pmi = {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, mpi = {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  const Variables torchrun = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}};
  const auto with = [](Variables base, Variables more) {
    base.merge(more);
    return base;
  };
  const std::vector<Variables> jobs = {
      with(slurm, {{"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "0"}}),
      with(slurm, {{"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "1"}}),
      with(slurm, {{"SLURM_JOB_ID", "18"}, {"SLURM_STEP_ID", "0"}}),
      with(pmi, {{"PMI_JOBID", "17.0"}}),
      with(pmi, {{"PMI_JOBID", "17.1"}}),
      with(pmi, {{"I_MPI_HYDRA_UUID", "9d260000"}, {"PMI_JOBID", "17.1"}}),
      with(pmi, {{"SLURM_JOB_ID", "17"}}),
      with(mpi, {{"PMIX_NAMESPACE", "prterun-host-4711@1"}}),
      with(mpi, {{"OMPI_MCA_ess_base_jobid", "2871066625"}}),
  };
  std::map<std::string, size_t> tokens;
  std::map<int, size_t> ports;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Rendezvous r = read(jobs[i]);
    EXPECT_TRUE(tokens.emplace(r.token, i).second) << i << " has the token of " << tokens[r.token];
    EXPECT_TRUE(ports.emplace(r.port, i).second) << i << " has the port of " << ports[r.port];
    EXPECT_GE(r.port, 20000);
    EXPECT_LT(r.port, 29000);
    Variables other_rank = jobs[i];
    for (auto& [name, value] : other_rank)
      if (name.ends_with("RANK") || name == "SLURM_PROCID") value = "1";
    EXPECT_EQ(read(other_rank).token, r.token);
    EXPECT_EQ(read(other_rank).port, r.port);
  }
  // The secret counts in addition to the id, and an explicit port wins.
  const Rendezvous r = read(with(jobs[0], {{"SHEAF_TOKEN", "secret"}, {"MASTER_PORT", "5000"}}));
  EXPECT_NE(r.token, read(jobs[0]).token);
  EXPECT_EQ(r.port, 5000);
  EXPECT_EQ(read(with(jobs[0], {{"SHEAF_PORT", "6000"}})).port, 6000);
  for (const Variables& unnamed : {pmi, mpi, slurm, torchrun}) {
    EXPECT_EQ(read(unnamed).port, 29500);
    EXPECT_EQ(read(unnamed).token, "");
    EXPECT_EQ(read(with(unnamed, {{"SHEAF_TOKEN", "secret"}})).token, "secret");
  }
  EXPECT_EQ(read(with(torchrun, {{"TORCHELASTIC_RUN_ID", "a"}})).port, 29500);
  EXPECT_NE(read(with(torchrun, {{"TORCHELASTIC_RUN_ID", "a"}})).token, read(with(torchrun, {{"TORCHELASTIC_RUN_ID", "b"}})).token);
}

TEST(Rendezvous, AnIdOfTheJobIsNoSecret) {
  expect_refused({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "4"}, {"SLURM_NTASKS_PER_NODE", "2"}, {"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "0"},
                  {"SLURM_JOB_NODELIST", "192.0.2.[1-2]"}}, "set SHEAF_TOKEN");
}

TEST(Rendezvous, WrongValuesAreRefused) {
  expect_refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK=2 is not below WORLD_SIZE=2");
  expect_refused({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK=-1 is not between");
  expect_refused({{"RANK", "one"}, {"WORLD_SIZE", "2"}}, "RANK='one' is not a number");
  expect_refused({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}, "RANK='1x' is not a number");
  expect_refused({{"RANK", "0"}}, "WORLD_SIZE is not");
  expect_refused({{"WORLD_SIZE", "2"}}, "RANK is not");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE=0");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}, "MASTER_PORT=70000");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "3"}}, "LOCAL_WORLD_SIZE=3");
  expect_refused({{"SHEAF_TIMEOUT", "soon"}}, "SHEAF_TIMEOUT='soon'");
  expect_refused({{"SHEAF_TIMEOUT", "0"}}, "SHEAF_TIMEOUT='0'");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}}, "MASTER_ADDR");
}

TEST(Rendezvous, BeyondLoopbackATokenIsRequired) {
  Variables v = {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "192.0.2.1"}};
  expect_refused(v, "set SHEAF_TOKEN");
  v["SHEAF_TOKEN"] = "secret";
  EXPECT_EQ(read(v).host, "192.0.2.1");
}

TEST(Rendezvous, OthersReachRankZeroByItsName) {
  Variables v = {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "this-host.invalid"}, {"SHEAF_TOKEN", "secret"}};
  expect_refused(v, "rank 0 is at this-host.invalid, which on its own host leads to loopback");
  v["MASTER_ADDR"] = "127.0.0.1";
  EXPECT_EQ(read(v).host, "127.0.0.1");
  v["RANK"] = "2", v["MASTER_ADDR"] = "this-host.invalid";  // other hosts may know it by another address
  EXPECT_EQ(read(v).host, "this-host.invalid");
}

TEST(Rendezvous, NamesThatDoNotResolveAreConfiguration) {
  const std::string part = "cannot resolve host 'no-such-host.invalid'";
  expect_refused({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "no-such-host.invalid"}},
                 part);
  expect_refused({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_NODELIST", "no-such-host.invalid,b"}},
                 part);
  EXPECT_THROW(connect_to("no-such-host.invalid", 5000, std::chrono::steady_clock::now()), ConfigError);
  EXPECT_THROW(listen_on("192.0.2.1", 0), ConfigError);  // not an address of this host
  const Socket taken = listen_on("127.0.0.1", 0);
  EXPECT_THROW(listen_on("127.0.0.1", local_port(taken)), ConfigError);
}

Deadline in(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

// The system may have picked it for the near end of a connection to somewhere else.
TEST(Sockets, APortOfAConnectionIsAwaited) {
  const Socket listener = listen_on("127.0.0.1", 0);
  Socket connection = connect_to("127.0.0.1", local_port(listener), in(5));
  const int port = local_port(connection);
  EXPECT_THROW(listen_on("127.0.0.1", port), ConfigError);
  std::jthread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const linger none{1, 0};  // with an orderly end the port would stay taken for a minute
    setsockopt(connection.fd(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
    connection.close();
  });
  EXPECT_TRUE(listen_on("127.0.0.1", port, in(60)));
  ends.join();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(listen_on("127.0.0.1", local_port(listener), in(60)), ConfigError) << "somebody listens there";
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(Sockets, ANameServerThatIsBusyIsAskedAgain) {
  const Socket listener = listen_on("127.0.1.1", 0);
  busy_answers = 2;
  EXPECT_TRUE(connect_to("this-host.invalid", local_port(listener), in(5)));
  busy_answers = 2;
  EXPECT_TRUE(listen_on("this-host.invalid", 0, in(5)));
  busy_answers = 2;
  EXPECT_TRUE(is_loopback("this-host.invalid", in(5)));
  busy_answers = 1000;
  EXPECT_THAT([&] { connect_to("this-host.invalid", local_port(listener), in(0.3)); },
              ThrowsMessage<ConfigError>(HasSubstr("cannot resolve host 'this-host.invalid': Temporary failure")));
  busy_answers = 0;
}

/// Takes this thread to a network of its own, which has loopback, and a single port for the ends that the system picks.
bool enter_network_with_one_port(int port) {
  if (unshare(CLONE_NEWNET) != 0) return false;
  ifreq loopback{};
  std::strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP;
  const Socket s(socket(AF_INET, SOCK_DGRAM, 0));
  if (ioctl(s.fd(), SIOCSIFFLAGS, &loopback) != 0) return false;
  std::ofstream range("/proc/sys/net/ipv4/ip_local_port_range");
  range << port << ' ' << port << std::flush;
  return bool(range);
}

TEST(Sockets, WhereNobodyListensNobodyIsConnectedToItself) {
  constexpr int kPort = 40000;
  bool alone = false;
  std::string said;
  std::jthread([&] {
    if (!(alone = enter_network_with_one_port(kPort))) return;
    try {
      connect_to("127.0.0.1", kPort, in(0.1));
      said = "connected";
    } catch (const CommError& e) {
      said = e.what();
    }
  }).join();
  if (!alone) GTEST_SKIP() << "not run: no network of its own here";
  EXPECT_THAT(said, HasSubstr("no answer from 127.0.0.1:40000: Connection refused"));
}

class Store : public ::testing::Test {
 protected:
  void serve(int world, const std::string& token) {
    Socket listener = listen_on("127.0.0.1", 0);
    port = local_port(listener);
    server = std::make_unique<StoreServer>(std::move(listener), world, token);
  }
  std::unique_ptr<StoreClient> client(int rank, int world, const std::string& token = "t") {
    return std::make_unique<StoreClient>("127.0.0.1", port, rank, world, token, in(5));
  }
  int port = 0;
  std::unique_ptr<StoreServer> server;
};

TEST_F(Store, ValuesReachThoseWhoWait) {
  serve(2, "t");
  auto a = client(0, 2), b = client(1, 2);
  std::thread setter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    b->set("key", std::string("va\0lue", 6), in(5));
  });
  EXPECT_EQ(a->get("key", in(5)), std::string("va\0lue", 6));
  setter.join();
  EXPECT_EQ(b->get("key", in(5)).size(), 6u);
  EXPECT_EQ(b->get_part("key", 1, 3, in(5)), std::string("\0l", 2));
  for (const auto& [part, parts] : {std::pair<uint64_t, uint64_t>(3, 3), {0, 4}, {0, 0}})
    EXPECT_THROW(b->get_part("key", part, parts, in(5)), ConfigError);
  EXPECT_EQ(a->local_address(), "127.0.0.1");
}

// Each rank's addresses for all others, as Gloo stores them for every communicator.
TEST_F(Store, HoldsTheAddressesOfManyRanks) {
  const int world = 600;
  serve(world, "t");
  auto a = client(0, world);
  const std::string addresses(136 * (world - 1), 'x');
  for (int lane = 0; lane < 3; ++lane)
    for (int rank = 0; rank < world; ++rank) a->set(str(lane, "/", rank), addresses, in(30));
  EXPECT_EQ(a->get_part("2/599", 5, world - 1, in(5)), std::string(136, 'x'));
}

TEST_F(Store, TimeOutAndMissingRanks) {
  serve(3, "t");
  auto a = client(1, 3);
  try {
    a->get("nothing", in(0.1));
    FAIL();
  } catch (const CommError& e) {
    EXPECT_EQ(e.exit_code(), 71);
  }
  EXPECT_EQ(a->missing_ranks(), "0, 2");
}

// Rank 0 may end, with its server, as soon as it has told the others.
TEST_F(Store, WhoTimesOutAfterAnotherSaysWhatThatSaid) {
  serve(3, "t");
  auto a = client(1, 3), first = client(0, 3);
  EXPECT_THAT([&] { a->get("nothing", in(0.1)); }, ThrowsMessage<CommError>(HasSubstr("time-out, waiting for 'nothing'")));
  first->give_up("time-out after 1 s, missing ranks: 2", ExitCode::kTimeout);
  first.reset();
  server.reset();
  try {
    FAIL() << a->missing_ranks();
  } catch (const CommError& e) {
    EXPECT_EQ(e.exit_code(), 71);
    EXPECT_THAT(e.what(), HasSubstr("rank 1 of 3: rank 0 failed: time-out after 1 s, missing ranks: 2"));
  }
}

// Both give up at the same moment: whatever comes first, the second says what the first was missing.
TEST_F(Store, TwoThatTimeOutTogetherSayTheSame) {
  int told = 0;
  for (int round = 0; round < 60; ++round) {
    serve(3, "t");
    auto a = client(1, 3), first = client(0, 3);
    const Deadline deadline = in(0.01);
    std::thread other([&] {
      std::this_thread::sleep_until(deadline + std::chrono::microseconds(20 * (round - 30)));
      first->give_up("time-out, missing ranks: 2", ExitCode::kTimeout);
      first.reset();
      server.reset();
    });
    try {
      const auto late = a->get_unless_late("nothing", deadline);
      EXPECT_FALSE(late);
      EXPECT_EQ(a->missing_ranks(), "2");
    } catch (const CommError& e) {
      ++told;
      EXPECT_EQ(e.exit_code(), 71);
      EXPECT_THAT(e.what(), HasSubstr("rank 0 failed: time-out, missing ranks: 2"));
    }
    other.join();
  }
  EXPECT_GE(told, 1);
}

// Rank 0 is there, but its process is stopped, or has not come to the store yet.
TEST_F(Store, ARankZeroThatHangsIsNamed) {
  const Socket listener = listen_on("127.0.0.1", 0);
  const auto join = [&](double seconds) {
    return std::make_unique<StoreClient>("127.0.0.1", local_port(listener), 1, 2, "t", in(seconds));
  };
  EXPECT_THAT([&] { join(0.1); }, ThrowsMessage<CommError>(HasSubstr("time-out, waiting for rank 0, which serves the store, to answer")));
  accept_from(listener, in(5));  // and closes it
  std::optional<Socket> server;
  std::thread greeter([&] {
    server = accept_from(listener, in(5));
    receive_frame(*server, in(5));
    send_frame(*server, FrameWriter().u8('o').text("").bytes(), in(5));
  });
  const auto a = join(5);
  greeter.join();
  EXPECT_THAT([&] { a->set("key", "value", in(0.1)); },
              ThrowsMessage<CommError>(HasSubstr("time-out, waiting for rank 0, which serves the store, to take 'key'")));
  EXPECT_EQ(a->missing_ranks(), "0");
  server.reset();
  EXPECT_THAT([&] { a->missing_ranks(); }, ThrowsMessage<CommError>(HasSubstr("rank 0, which serves the store, is gone")));
}

TEST_F(Store, InterruptEndsAWait) {
  serve(2, "t");
  auto a = client(0, 2);
  std::thread interrupter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    a->interrupt("rank 1 failed: it has no data");
  });
  for (int i = 0; i < 2; ++i) {
    try {
      a->get("nothing", in(20));
      FAIL();
    } catch (const CommError& e) {
      EXPECT_EQ(e.exit_code(), 72);
      EXPECT_STREQ(e.what(), "[rendezvous] rank 0 of 2: rank 1 failed: it has no data");
    }
  }
  interrupter.join();
}

TEST_F(Store, RefusesStrangers) {
  serve(2, "t");
  auto a = client(0, 2);
  EXPECT_THROW(client(1, 2, "wrong"), ConfigError);
  EXPECT_THROW(client(1, 2, ""), ConfigError);
  EXPECT_THROW(client(0, 2), ConfigError);
  EXPECT_THROW(client(1, 3), ConfigError);
  EXPECT_THROW(client(2, 2), ConfigError);
  // An invalid greeting ends that connection and nothing else.
  for (std::string garbage : {std::string("GET / HTTP/1.0\r\n\r\n"), std::string(4, '\xff'), std::string(3, '\0')}) {
    Socket s = connect_to("127.0.0.1", port, in(5));
    send_frame(s, garbage, in(1));
    EXPECT_FALSE(receive_frame(s, in(1)).has_value());
  }
  auto b = client(1, 2);
  b->set("alive", "yes", in(5));
  EXPECT_EQ(a->get("alive", in(5)), "yes");
}

// Rank 0 may need a while to end a job, whose other ranks begin the next one meanwhile.
TEST_F(Store, WhoHasLeftWaitsForTheNextJob) {
  serve(2, "t");
  auto first = client(0, 2), leaves = client(1, 2);
  leaves->may_leave();
  leaves.reset();
  std::jthread next([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    first.reset();
    server.reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    server = std::make_unique<StoreServer>(listen_on("127.0.0.1", port), 2, "t");
  });
  auto again = client(1, 2);
  next.join();
  again->set("alive", "yes", in(5));
  EXPECT_EQ(client(0, 2)->get("alive", in(5)), "yes");
}

// The next job's rank is accepted by the server that ends.
TEST_F(Store, AServerThatEndsBeforeItAnswersIsNotTheOne) {
  Socket listener = listen_on("127.0.0.1", 0);
  port = local_port(listener);
  std::jthread next([&] {
    accept_from(listener, in(5));  // and closes it
    server = std::make_unique<StoreServer>(std::move(listener), 2, "t");
  });
  client(1, 2)->set("alive", "yes", in(5));
  next.join();
}

// A rank that throws before the job is connected, and closes everything in an orderly way.
TEST_F(Store, ARankThatGivesUpIsTold) {
  serve(3, "t");
  auto a = client(0, 3), quits = client(1, 3), leaves = client(2, 3);
  leaves->may_leave();
  leaves.reset();
  EXPECT_THAT([&] { a->get("never set", in(0.2)); }, ThrowsMessage<CommError>(HasSubstr("time-out")));
  quits.reset();
  EXPECT_THAT([&] { a->get("never set", in(20)); }, ThrowsMessage<CommError>(HasSubstr("rank 1 died before the job was connected")));
}

TEST_F(Store, ARankThatGivesUpSaysWhy) {
  serve(4, "t");
  auto a = client(0, 4), quits = client(1, 4), follows = client(2, 4);
  const auto code_of = [&](const std::string& key) {
    try {
      a->get(key, in(20));
    } catch (const CommError& e) {
      EXPECT_THAT(e.what(), HasSubstr("rank 0 of 4: rank 1 failed: time-out after 1 s, missing ranks: 3"));
      return e.exit_code();
    }
    return 0;
  };
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    quits->give_up("time-out after 1 s, missing ranks: 3", ExitCode::kTimeout);
    quits.reset();
  });
  EXPECT_EQ(code_of("never set"), 71);
  later.join();
  follows->give_up("it has no GPU", ExitCode::kConfig);
  EXPECT_EQ(code_of("nor this"), 71) << "the first reason stays";
}

// All addresses are known, and rank 0 waits for rank 1 to connect.
TEST(Job, WhoDiesBeforeItConnectsToTheOthersIsNotWaitedFor) {
  Socket listener = listen_on("127.0.0.1", 0);
  Rendezvous r;
  r.world = 2, r.port = local_port(listener), r.token = "t", r.listen_fd = listener.release();
  std::thread other([&] {
    const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    StoreClient client("127.0.0.1", r.port, 1, 2, "t", deadline);
    client.set("monitor/1", "127.0.0.1 1", deadline);
    client.get("monitor/0", deadline);
  });
  EXPECT_THAT([&] { join_job(r); }, ThrowsMessage<CommError>(HasSubstr("rank 0 of 2: rank 1 died before the job was connected")));
  other.join();
}

// All addresses are known, and rank 2 connects to rank 0, which nobody answers for, when rank 1 or rank 0 itself is lost.
TEST_F(Store, WhoConnectsToTheOthersDoesNotWaitForTheLost) {
  const Socket silent = listen_on("127.0.0.1", 0);
  for (const std::string& address : {std::string("127.0.0.1 1"), str("127.0.0.1 ", local_port(silent))})
    for (const int lost : {0, 1}) {
      serve(3, "t");
      Rendezvous r;
      r.world = 3, r.rank = 2, r.port = port, r.token = "t", r.init_timeout = std::chrono::seconds(5);
      std::thread others([&] {
        auto first = client(0, 3), second = client(1, 3);
        first->set("monitor/0", address, in(5));
        second->set("monitor/1", address, in(5));
        first->get("monitor/2", in(5));
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        if (lost == 0) server.reset();
        else second.reset();
        EXPECT_THROW(first->get("never set", in(5)), CommError);
      });
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THAT([&] { join_job(r); },
                  ThrowsMessage<CommError>(HasSubstr(lost == 0 ? "rank 2 of 3: rank 0, which serves the store, is gone"
                                                               : "rank 2 of 3: rank 1 died before the job was connected")));
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
      others.join();
      server.reset();
    }
}

TEST_F(Store, WhoDoesNotAnswerIsNamed) {
  const auto refused = [](const std::string& part) { return ThrowsMessage<CommError>(HasSubstr(part + " at 127.0.0.1:1: Connection refused")); };
  port = 1;
  EXPECT_THAT([&] { StoreClient("127.0.0.1", port, 1, 2, "t", in(0.1)); }, refused("no answer from rank 0, which serves the store,"));
  Monitor monitor(2, 3, std::make_shared<FailureBoard>(), "127.0.0.1", "t", std::chrono::seconds(5));
  EXPECT_THAT([&] { monitor.connect(1, "127.0.0.1", 1, in(0.1), [] {}); }, refused("no answer from rank 1"));
}

TEST_F(Store, ADeadRankIsTold) {
  serve(3, "");
  auto a = client(0, 3, "");
  // A rank that greets and then disconnects without a farewell.
  std::thread dies([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    Socket s = connect_to("127.0.0.1", port, in(5));
    send_frame(s, FrameWriter().u8('H').u64(0x6d6f6f7266616873ull).u64(2).u64(3).text("").bytes(), in(1));
    receive_frame(s, in(1));
  });
  try {
    a->get("monitor/2", in(5));
    FAIL();
  } catch (const CommError& e) {
    EXPECT_EQ(e.exit_code(), 72);
    EXPECT_NE(std::string(e.what()).find("rank 2 died"), std::string::npos) << e.what();
  }
  dies.join();
  server.reset();
  EXPECT_THROW(a->get("x", in(5)), CommError);
}

}  // namespace
}  // namespace sheaf
