#include "sheaf/tools/bench/gpu_comm.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/storage.h"
#include "sheaf/distributed/nccl.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/tools/bench/gpu_time.h"

namespace sheaf::bench {
namespace {

// Zero-filled floats on the rank's GPU.
struct Floats {
  Floats(Device device, int64_t count) : storage(Storage::allocate(device, 4 * count)) {
    const View all = View::dense(storage->data(), kF32, {count});
    SHEAF_ON_DEVICE(RankContext::current().stream(device), fill, all, 0.0);
  }
  char* data() const { return storage->data(); }
  std::shared_ptr<Storage> storage;
};

// Consecutive calls per sample, the same on all ranks: one call is too short for small transfers.
int repeats(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / bytes, 1, 64));
}

// Rank 0's seconds for a collective, and for copying the bytes that a rank receives from others.
std::pair<std::vector<double>, std::vector<double>> local_turns(const Session& session, int ranks,
                                                                bool gathers, int64_t bytes) {
  std::pair<std::vector<double>, std::vector<double>> seconds;
  const auto rank_main = [&](World& world) {
    Gpu& gpu = RankContext::current().gpu_of(world.device());
    const int64_t each = bytes / 4 / ranks, all = each * ranks;
    const Mesh mesh = world.mesh({{"data", ranks}});
    Communicator& lane = gathers ? mesh.runtime->gather_lane(0) : mesh.runtime->reduce_lane(0);
    const std::vector<int64_t> counts(static_cast<size_t>(ranks), each);
    const Floats given(world.device(), gathers ? each : all),
        taken(world.device(), gathers ? all : each), spare(world.device(), all);
    const auto ours = [&] {
      (gathers ? lane.all_gather(given.data(), taken.data(), counts, kF32, "bench")
               : lane.reduce_scatter(given.data(), taken.data(), counts, kF32, "bench"))
          .order(gpu.compute());
    };
    const char* whole = gathers ? taken.data() : given.data();
    const auto copy = [&] {
      gpu.copy(gpu.compute(), spare.data(), whole, static_cast<size_t>(4 * each * (ranks - 1)),
               Gpu::Copy::on_device);
    };
    const auto sample = [&](const auto& call) {
      lane.barrier("bench").sync();
      const double all_calls = gpu_seconds([&] {
        for (int i = 0; i < repeats(bytes); ++i) call();
      });
      return all_calls / repeats(bytes);
    };
    sample(ours), sample(copy);
    for (int round = 0; round < session.samples(20); ++round) {
      const double own = sample(ours), other = sample(copy);
      if (world.rank() != 0) continue;
      seconds.first.push_back(own), seconds.second.push_back(other);
    }
    lane.barrier("bench").sync();
  };
  run_local(ranks, rank_main, {.threads_per_rank = 1, .device = session.device()});
  return seconds;
}

void local_line(Session& session, int ranks, bool gathers, int64_t bytes) {
  const std::string name =
      str("local-", gathers ? "all-gather" : "reduce-scatter", "-", ranks, "-", short_bytes(bytes));
  const double received = static_cast<double>(bytes) * (ranks - 1) / ranks;
  session.line(
      "comm", name, Unit::gigabytes_per_second,
      [&](Line& line) {
        auto [own, peers] = local_turns(session, ranks, gathers, bytes);
        line.samples_s = std::move(own);
        line.by_memory = true;
        line.peer = "copy";
        line.peer_value = figure(line.unit, received, quantile(peers, 0.5));
      },
      received);
}

// Waits until an asynchronous NCCL call has completed: it may continue after it returns, and the next call requires it to be done.
void settle(NcclComm& comm) {
  std::string why;
  for (NcclComm::State state; (state = comm.state(why)) != NcclComm::State::ready;) {
    if (state == NcclComm::State::failed) fail<CommError>("[nccl] ", why);
    std::this_thread::yield();
  }
}

void nccl_line(Session& session, bool gathers, int64_t bytes) {
  const std::string name =
      str("nccl-", gathers ? "all-gather" : "reduce-scatter", "-1-", short_bytes(bytes));
  if (!session.wants("comm", name)) return;
  Gpu& gpu = RankContext::current().gpu_of(session.device());
  std::unique_ptr<NcclComm> comm;
  std::optional<Floats> in, out;
  Comparison c{.name = name, .unit = Unit::gigabytes_per_second};
  c.by_memory = true;
  c.peer = "copy";
  c.amount = c.peer_amount = static_cast<double>(bytes);
  c.prepare = [&] {
    if constexpr (kernels::kHasCuda) {
      NcclLibrary& library = nccl_library();
      comm = library.join(library.unique_id(), 1, 0, "bench");
      settle(*comm);
    }
    in.emplace(session.device(), bytes / 4), out.emplace(session.device(), bytes / 4);
  };
  c.run = [&] {
    gpu.record(gpu.compute()).order(comm->stream());
    comm->group([&] {
      if (gathers)
        comm->all_gather(in->data(), out->data(), bytes);
      else
        comm->reduce_scatter(in->data(), out->data(), bytes / 4, kF32, Reduction::sum);
    });
    settle(*comm);
    comm->record().order(gpu.compute());
  };
  c.peer_run = [&] {
    gpu.copy(gpu.compute(), out->data(), in->data(), static_cast<size_t>(bytes),
             Gpu::Copy::on_device);
  };
  session.compare("comm", c);
  if (!session.lines().back().missing.empty()) return;
  comm->finalize();
  settle(*comm);
}

}  // namespace

void gpu_comm_lines(Session& session) {
  const std::vector<int64_t> sizes =
      session.options().quick ? std::vector<int64_t>{64 << 10}
                              : std::vector<int64_t>{1 << 20, 16 << 20, 128 << 20, 512 << 20};
  for (int ranks : {2, 4})
    for (bool gathers : {true, false})
      for (int64_t bytes : sizes) local_line(session, ranks, gathers, bytes);
  for (bool gathers : {true, false})
    for (int64_t bytes : sizes) nccl_line(session, gathers, bytes);
}

}  // namespace sheaf::bench
