#include "sheaf/tests/distributed/job_scenarios.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <thread>

#include <dlfcn.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sheaf/distributed/init.h"
#include "sheaf/distributed/launcher.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/distributed/simulated.h"
#include "sheaf/distributed/staging.h"
#include "sheaf/tests/distributed/suspend.h"

namespace {
std::atomic<bool> dies_connecting = false;  // over TCP or a Unix socket
}

// Instead of the C library's.
extern "C" int connect(int fd, const sockaddr* address, socklen_t size) {
  static const auto real = reinterpret_cast<decltype(&connect)>(dlsym(RTLD_NEXT, "connect"));
  if (dies_connecting) raise(SIGKILL);
  return real(fd, address, size);
}

namespace sheaf::testing {
namespace {

constexpr int64_t kLarge = 1'300'000;  // bytes: several chunks of staging

Communicator& lane(World& world) { return world.mesh({{"data", world.size()}}).runtime->gather_lane(0); }

std::string report_of(Communicator& comm, BufferMemory memory) {
  Battery battery(comm, memory);
  battery.run(kLarge);
  return str("digest ", battery.digest(), ' ', comm.fingerprint(), ' ', comm.sequence(), " received ",
             comm.bytes_received());
}

void run_battery(World& world, BufferMemory memory) {
  const int64_t before = RankContext::current().cpu->stats().live;
  const std::string report = battery_report(world, memory);
  const int64_t held = RankContext::current().cpu->stats().live - before;
  if (::testing::Test::HasFailure()) std::_Exit(1);
  const int64_t expected = 2 * staging_bytes_of(lane(world).kind(), world.size());
  std::cout << report << (held == expected ? "" : " wrong staging") << std::endl;
}

void say_kinds(World& world) {
  const Mesh mesh = grid(world);
  const auto kind = [&](int axis) { return mesh.runtime->gather_lane(axis).kind(); };
  std::cout << world.kind() << ": data " << kind(0) << ", model " << kind(1) << std::endl;
}

/// All collectives on both axes, and the memory that a plan of this job predicts for its communicators.
void run_grid_battery(World& world) {
  const int64_t before = RankContext::current().cpu->stats().live;
  const std::string report = grid_report(world, BufferMemory::mixed);
  const int64_t held = RankContext::current().cpu->stats().live - before;
  if (::testing::Test::HasFailure()) std::_Exit(1);
  say_kinds(world);
  const std::vector<int> hosts = RankContext::current().hosts;
  World plan = distributed::simulated_world(world.rank(), world.size(), {.comm = std::string(world.kind()), .hosts = hosts});
  grid(plan);
  const int64_t planned = RankContext::current().meta->stats().live;
  std::cout << report << (held == planned ? "" : str(" holds ", held, ", not ", planned)) << std::endl;
}

/// All-reduces in an endless loop; `event` happens on rank 1 (or `culprit`) at the sixth.
void train(World& world, const std::function<void()>& event, int culprit = 1) {
  Mesh mesh = world.mesh({{"data", world.size()}});
  static std::vector<float> x(100'000), y(100'000);  // outlive the collectives that a failure leaves unfinished
  for (int step = 0; step < 100'000; ++step) {
    if (step == 5 && world.rank() == culprit) event();
    Event a = mesh.runtime->gather_lane(0).all_reduce(x.data(), 100'000, kF32, Reduction::sum, "blocks.3");
    Event b = mesh.runtime->reduce_lane(0).all_reduce(y.data(), 100'000, kF32, Reduction::sum, "blocks.4");
    a.sync();
    b.sync();
  }
}

/// The same on both axes of the grid.
void train_on_grid(World& world, const std::function<void()>& event) {
  const Mesh mesh = grid(world);
  static std::vector<float> x(100'000), y(100'000);
  for (int step = 0; step < 100'000; ++step) {
    if (step == 5 && world.rank() == world.size() - 1) event();
    Event a = mesh.runtime->gather_lane(1).all_reduce(x.data(), 100'000, kF32, Reduction::sum, "within");
    Event b = mesh.runtime->reduce_lane(0).all_reduce(y.data(), 100'000, kF32, Reduction::sum, "across");
    a.sync();
    b.sync();
  }
}

/// Inputs are overwritten as soon as a collective is over: a rank that still reads them gets wrong values.
void overwrite(World& world, MemoryKind where) {
  Communicator& comm = lane(world);
  const int n = world.size();
  constexpr int64_t kCount = 40'000;
  const std::vector<int64_t> counts(n, kCount);
  Buffer<float> part(kCount, where), whole(n * kCount, where), sum(kCount, where), all(n * kCount, where);
  int64_t wrong = 0;
  for (int step = 1; step <= 150; ++step) {
    const auto given = [&](int rank) { return static_cast<float>(step * 10 + rank); };
    float total = 0;
    for (int r = 0; r < n; ++r) total += given(r);
    std::fill_n(part.get(), kCount, given(world.rank()));
    std::fill_n(whole.get(), n * kCount, given(world.rank()));
    comm.all_gather(part.get(), all.get(), counts, kF32, "gather").sync();
    std::fill_n(part.get(), kCount, -1.0f);
    comm.reduce_scatter(whole.get(), sum.get(), counts, kF32, "scatter").sync();
    std::fill_n(whole.get(), n * kCount, given(world.rank()));
    comm.all_reduce(whole.get(), n * kCount, kF32, Reduction::sum, "reduce").sync();
    for (int64_t i = 0; i < n * kCount; ++i) wrong += all[i] != given(static_cast<int>(i / kCount));
    for (int64_t i = 0; i < kCount; ++i) wrong += sum[i] != total;
    for (int64_t i = 0; i < n * kCount; ++i) wrong += whole[i] != total;
  }
  if (wrong > 0) fail<CommError>("[overwrite] ", wrong, " wrong elements");
}

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

double timeout() { return std::stod(std::getenv("SHEAF_TIMEOUT")); }
/// For longer than the others wait, even if they come late.
void hang() { sleep_for(2 * timeout()); }

void hang_on_grid(World& world, int neighbour, int axis) {
  const Mesh mesh = grid(world);
  lane(world).barrier("once").sync();
  if (world.rank() == 3) hang();
  if (world.rank() != neighbour) sleep_for(0.3);
  mesh.runtime->gather_lane(world.rank() == neighbour ? axis : 1 - axis).barrier("hang").sync();
  lane(world).barrier("end").sync();
}

const std::map<std::string, std::function<void(World&)>>& scenarios() {
  static const auto* all = new std::map<std::string, std::function<void(World&)>>{
      {"battery", [](World& w) { run_battery(w, BufferMemory::normal); }},
      {"battery_wire", [](World& w) { run_battery(w, BufferMemory::wire); }},
      {"battery_mixed", [](World& w) { run_battery(w, BufferMemory::mixed); }},
      {"kill", [](World& w) { train(w, [] { raise(SIGKILL); }); }},
      {"kill0", [](World& w) { train(w, [] { raise(SIGKILL); }, 0); }},
      {"throw", [](World& w) {
         w.guard([&] { train(w, [] { fail<DataError>("[data] token 70000 is out of vocabulary"); }); });
       }},
      {"throw_unguarded", [](World& w) { train(w, [] { fail<DataError>("[data] bad token"); }); }},
      {"exit", [](World& w) { train(w, [] { std::_Exit(65); }); }},
      {"hang", [](World& w) { train(w, hang, 2); }},
      {"patient", [](World& w) {  // the last rank comes long after the time-out, and the call after that has one again
         Communicator& comm = lane(w);
         int32_t all = 1;
         if (w.rank() + 1 == w.size()) sleep_for(1.5 * timeout());
         comm.next_call_has_no_deadline();
         comm.all_reduce(&all, 1, kI32, Reduction::sum, "patient").sync();
         check<DataError>(all == w.size(), "[patient] ", all);
         if (w.rank() + 1 == w.size()) hang();
         comm.barrier("hang").sync();
       }},
      {"stopped_before_a_patient_call", [](World& w) {
         lane(w).barrier("once").sync();
         if (w.rank() + 1 == w.size()) raise(SIGSTOP);
         lane(w).next_call_has_no_deadline();
         lane(w).barrier("patient").sync();
       }},
      {"stopped", [](World& w) { train(w, [] { raise(SIGSTOP); }, 2); }},
      {"suspended", [](World& w) {  // all of them, while they wait for the last one; later it hangs
         Communicator& comm = lane(w);
         const std::vector<int64_t> counts(w.size(), 1);
         std::vector<int32_t> pids(w.size());
         const int32_t own = getpid();
         comm.all_gather(&own, pids.data(), counts, kI32, "pids").sync();
         const bool last = w.rank() + 1 == w.size();
         if (last) {
           sleep_for(0.3);
           suspend({pids.begin(), pids.end()}, 1.5 * timeout());
           sleep_for(0.5);
         }
         comm.barrier("suspended").sync();
         if (last) hang();
         comm.barrier("hang").sync();
       }},
      {"leave", [](World& w) {
         Communicator& comm = lane(w);
         comm.barrier("once").sync();
         if (w.rank() != 1) comm.barrier("twice").sync();
       }},
      {"mismatch", [](World& w) {
         Communicator& comm = lane(w);
         const std::vector<int64_t> counts(w.size(), 1000);
         std::vector<float> x(1000 * w.size()), y(1000);
         comm.all_gather(y.data(), x.data(), counts, kF32, "blocks.0").sync();
         if (w.rank() == 1) comm.reduce_scatter(x.data(), y.data(), counts, kF32, "blocks.1").sync();
         else comm.all_gather(y.data(), x.data(), counts, kF32, "blocks.1").sync();
       }},
      {"skip", [](World& w) {  // one rank leaves a call out
         Communicator& comm = lane(w);
         std::vector<float> x(1000);
         for (int i = 0; i < 10; ++i)
           if (i != 4 || w.rank() != 1)
             comm.all_reduce(x.data(), 1000, kF32, Reduction::sum, "blocks." + std::to_string(i)).sync();
       }},
      {"mismatch_all_to_all", [](World& w) {
         std::vector<float> x(100), y(100);
         const bool first = w.rank() == 0;
         const std::vector<int64_t> send = {first ? 1 : 5, 1}, recv = {1, first ? 4 : 1};
         lane(w).all_to_all(x.data(), send, y.data(), recv, kF32, "moe").sync();
       }},
      {"axes", [](World& w) {
         Mesh mesh = w.mesh({{"data", 2}, {"model", 2}});
         for (int axis = 0; axis < 2; ++axis) {
           std::vector<int32_t> ranks(2);
           const int32_t me = w.rank();
           const std::vector<int64_t> ones = {1, 1};
           mesh.runtime->gather_lane(axis).all_gather(&me, ranks.data(), ones, kI32, "ranks").sync();
           const int base = axis == 0 ? me % 2 : me / 2 * 2, stride = axis == 0 ? 2 : 1;
           if (ranks[0] != base || ranks[1] != base + stride) fail<CommError>("wrong group");
         }
         w.print("axes ", RankContext::current().threads, " threads, ", w.kind());
       }},
      {"pinned", [](World& w) {
         cpu_set_t mine;
         sched_getaffinity(0, sizeof mine, &mine);
         std::vector<cpu_set_t> all(static_cast<size_t>(w.size()));
         const std::vector<int64_t> bytes(static_cast<size_t>(w.size()), sizeof mine);
         const Mesh mesh = w.mesh({{"data", w.size()}});
         mesh.runtime->gather_lane(0).all_gather(&mine, all.data(), bytes, kU8, "cpus").sync();
         cpu_set_t both;
         for (int r = 1; r < w.size(); ++r) {
           CPU_AND(&both, &all[r - 1], &all[r]);
           if (CPU_COUNT(&both) != 0) fail<CommError>("ranks ", r - 1, " and ", r, " share a CPU");
         }
       }},
      {"wait", [](World& w) {
         lane(w).barrier("start").sync();
         if (w.rank() == 0) std::cout << "started" << std::endl;
         sleep_for(60);
       }},
      {"nap", [](World& w) {
         lane(w).barrier("start").sync();
         if (w.rank() == 0) std::cout << "started" << std::endl;
         sleep_for(2.5);
         lane(w).barrier("end").sync();
       }},
      {"nothing", [](World&) {}},
      {"no_mesh", [](World& w) {  // rank 1 fails before it connects to the others
         w.guard([&] {
           if (w.rank() == 1) fail<DataError>("[corpus] missing");
           lane(w).barrier("once").sync();
         });
       }},
      {"die_connecting", [](World& w) {
         dies_connecting = w.rank() == 1;
         w.guard([&] { lane(w).barrier("once").sync(); });
       }},
      {"kind", [](World& w) {
         lane(w).barrier("once").sync();
         std::cout << "talks over " << w.kind() << std::endl;
       }},
      {"abort", [](World& w) {
         Communicator& comm = lane(w);
         comm.barrier("once").sync();
         if (w.rank() == 1) comm.abort("had enough");
         comm.barrier("twice").sync();
       }},
      {"overwrite_wire", [](World& w) { overwrite(w, MemoryKind::wire); }},
      {"overwrite", [](World& w) { overwrite(w, MemoryKind::normal); }},
      {"grid", run_grid_battery},
      {"grid_kinds", [](World& w) {
         say_kinds(w);
         lane(w).barrier("once").sync();
       }},
      {"grid_kill", [](World& w) { train_on_grid(w, [] { raise(SIGKILL); }); }},
      {"grid_throw", [](World& w) {
         w.guard([&] { train_on_grid(w, [] { fail<DataError>("[data] token 70000 is out of vocabulary"); }); });
       }},
      // Rank 3 hangs. One neighbour waits for it; the others reach a call on the other axis somewhat later.
      {"grid_hang_in_row", [](World& w) { hang_on_grid(w, 2, 1); }},
      {"grid_hang_in_column", [](World& w) { hang_on_grid(w, 1, 0); }},
      // Rank 3 stops. Rank 2 waits for it in their row, rank 0 for both of them.
      {"grid_held_up_in_row", [](World& w) {
         const Mesh mesh = grid(w);
         lane(w).barrier("once").sync();
         if (w.rank() == 3) raise(SIGSTOP);
         if (w.rank() > 0) sleep_for(0.5);
         if (w.rank() == 2) mesh.runtime->gather_lane(1).barrier("row").sync();
         lane(w).barrier("all").sync();
       }},
      // Of six, ranks 2 and 4 stop. Rank 1 waits for 4 in their column, rank 0 for 1 and 2 in the row.
      {"grid_held_up_in_column", [](World& w) {
         const Mesh mesh = grid(w);
         lane(w).barrier("once").sync();
         if (w.rank() == 2 || w.rank() == 4) raise(SIGSTOP);
         if (w.rank() > 0) sleep_for(0.5);
         if (w.rank() == 1) mesh.runtime->gather_lane(0).barrier("column").sync();
         mesh.runtime->gather_lane(1).barrier("row").sync();
       }},
      {"held_up", [](World& w) {  // rank 3 stops; rank 2 waits for it, and so cannot reach rank 0
         Communicator& all = lane(w);
         Mesh mesh = w.mesh({{"data", 2}, {"model", 2}});
         all.barrier("once").sync();
         if (w.rank() == 3) raise(SIGSTOP);
         if (w.rank() >= 2) mesh.runtime->gather_lane(1).barrier("row").sync();
         all.barrier("all").sync();
       }},
  };
  return *all;
}

/// Rank 1 cannot take part in shared memory, or does not want to.
void handicap() {
  if (std::getenv("SMALL_FILES")) {  // a memfd is larger than this
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  if (const char* files = std::getenv("FEW_FILES")) {
    const rlimit limit{std::stoul(files), std::stoul(files)};
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (std::getenv("OTHER_WISH")) setenv("SHEAF_COMM", "gloo", 1);
}

void choose_host() {
  const char *hosts = std::getenv("HOSTS"), *rank = std::getenv("RANK");
  if (hosts && rank) setenv("SHEAF_HOST_ID", std::string(1, std::string(hosts).at(std::stoul(rank))).c_str(), 1);
}

std::multiset<std::string> open_files() {
  std::multiset<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;  // the descriptor of the listing itself is closed by now
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (!error) out.insert(target.substr(0, target.find(':')));
  }
  return out;
}

std::set<std::string> listed(const char* folder) {
  std::set<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) out.insert(entry.path());
  return out;
}

/// Uses shared memory, then looks for leftovers.
int leftovers() {
  const auto files = open_files();
  const auto shared = listed("/dev/shm");
  {
    World world = distributed::init_from_env();
    overwrite(world, MemoryKind::wire);
    for (const std::string& name : open_files())
      if (name.find("memfd") != std::string::npos) fail<CommError>("[leftovers] a descriptor of ", name);
    std::ifstream sockets("/proc/self/net/unix");
    for (std::string line; std::getline(sockets, line);)
      if (line.find("@sheaf-") != std::string::npos) fail<CommError>("[leftovers] a socket: ", line);
    std::cout << "talks over " << world.kind() << std::endl;
  }
  const auto now = open_files();  // rank 0 has closed the launcher's socket
  if (!std::includes(files.begin(), files.end(), now.begin(), now.end())) fail<CommError>("[leftovers] descriptors");
  if (listed("/dev/shm") != shared) fail<CommError>("[leftovers] shared memory");
  return 0;
}

}  // namespace

int run_scenario(const std::string& scenario) {
  if (scenario.starts_with("launch/")) {  // launch/<ranks>/<scenario>
    const int n = scenario[7] - '0';
    try {
      return distributed::launch({.nproc = n, .threads_per_rank = 0,
                                  .command = {"/proc/self/exe", "--worker=" + scenario.substr(9)}});
    } catch (const Error& e) {
      std::cerr << e.what() << std::endl;
      return e.exit_code();
    }
  }
  if (scenario.starts_with("exit65on")) {  // without communication
    if (std::getenv("RANK")[0] == scenario[8]) return 65;
    sleep_for(60);
    return 0;
  }
  if (scenario.starts_with("trap")) {  // the exit code after SIGTERM
    static volatile std::sig_atomic_t asked = 0;
    std::signal(SIGTERM, [](int) { asked = 1; });
    std::cout << "ready" << std::endl;
    while (!asked) sleep_for(0.01);
    return std::stoi(scenario.substr(4));
  }
  try {
    if (std::getenv("RANK") == std::string("1")) handicap();
    choose_host();
    if (scenario.ends_with("leftovers")) return leftovers();
    World world = distributed::init_from_env();
    scenarios().at(scenario)(world);
    return 0;
  } catch (const Error& e) {
    std::cerr << e.what() << std::endl;
    return e.exit_code();
  }
}

std::string battery_report(World& world, BufferMemory memory) { return report_of(lane(world), memory); }

std::string grid_report(World& world, BufferMemory memory) {
  const Mesh mesh = grid(world);
  return str(report_of(mesh.runtime->gather_lane(0), memory), ", ", report_of(mesh.runtime->gather_lane(1), memory));
}

Mesh grid(World& world) { return world.mesh({{"data", 2}, {"model", world.size() / 2}}); }

void expect_said(const ProcessResult& result, const std::string& part) {
  EXPECT_NE(result.output.find(part), std::string::npos) << part << " is not in: " << result.output;
}

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

void expect_bits_of_local(const std::string& scenario) {
  for (int n = 1; n <= kLargestWorld; ++n) {
    std::vector<std::string> expected(n);
    run_local(n, [&](World& world) { expected[world.rank()] = battery_report(world); });
    const auto results = run_processes({.scenario = scenario, .ranks = n, .limit = 60});
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(results[r].code, 0) << results[r].output;
      EXPECT_EQ(last_line(results[r].output), expected[r]);
    }
  }
}

std::vector<ProcessResult> expect_fallout(const ProcessJob& job, int culprit, int culprit_code, int code,
                                          double seconds, const std::vector<std::string>& parts) {
  const auto results = run_processes(job);
  EXPECT_EQ(results[culprit].code, culprit_code) << results[culprit].output;
  for (int r = 0; r < job.ranks; ++r) {
    if (r == culprit) continue;
    EXPECT_EQ(results[r].code, code) << results[r].output;
    EXPECT_LT(results[r].seconds - results[culprit].seconds, seconds);
    for (const std::string& part : parts) expect_said(results[r], part);
  }
  return results;
}

}  // namespace sheaf::testing
