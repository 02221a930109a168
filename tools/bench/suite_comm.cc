// comm: all-gathers and reduce-scatters of each communicator, as the units of a sharded model issue them, against memcpy and against
// Gloo's own collectives. "local" ranks are threads of this process, the others are processes. Rates count the bytes that a rank
// receives, (n - 1)/n of the whole buffer; memcpy copies as many, on all ranks concurrently. On a GPU: gpu_comm.cc.
#include <algorithm>
#include <cstring>

#include "sheaf/core/rank_context.h"
#include "sheaf/core/storage.h"
#include "sheaf/distributed/init.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tools/bench/gpu_comm.h"
#include "sheaf/tools/bench/rank_job.h"
#include "sheaf/tools/bench/raw_gloo.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

struct Question {
  bool gathers;        // all-gather, else reduce-scatter
  int64_t bytes;       // of the whole buffer
  int rounds;          // alternations of ours, memcpy and Gloo
  std::string folder;  // rendezvous of Gloo's ranks
};

// Zero-filled floats from the allocator of a rank's tensors.
struct Buffer {
  Buffer(int64_t elements, MemoryKind where)
      : storage(Storage::allocate(Device::cpu(), 4 * elements, where)),
        data(reinterpret_cast<float*>(storage->data())) {
    std::fill(data, data + elements, 0.0f);
  }
  std::shared_ptr<Storage> storage;
  float* data;
};

// A single collective is too short for the clock: this many in a row, the same on all ranks.
int repeats(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / bytes, 1, 64));
}

// Run by every rank; rank 0 answers with its seconds per call.
Json answer_of(World& world, const Question& q) {
  const int size = world.size(), repeat = repeats(q.bytes);
  const int64_t each = q.bytes / 4 / size, all = each * size;
  const Mesh mesh = world.mesh({{"data", size}});
  Communicator& lane = q.gathers ? mesh.runtime->gather_lane(0) : mesh.runtime->reduce_lane(0);
  const std::vector<int64_t> counts(static_cast<size_t>(size), each);
  // As in a unit: the input, a parameter shard or a gradient's slots, is in wire memory; the output is not.
  const Buffer given(q.gathers ? each : all, MemoryKind::wire),
      taken(q.gathers ? all : each, MemoryKind::normal), spare(all, MemoryKind::normal);
  const float* whole = q.gathers ? taken.data : given.data;

  RawGloo raw(world.rank(), size, q.folder);
  const auto gloo = q.gathers ? raw.all_gather(given.data, spare.data, static_cast<size_t>(each))
                              : raw.reduce_scatter(spare.data, static_cast<size_t>(each));
  const auto ours = [&] {
    (q.gathers ? lane.all_gather(given.data, taken.data, counts, kF32, "bench")
               : lane.reduce_scatter(given.data, taken.data, counts, kF32, "bench"))
        .sync();
  };
  const auto copy = [&] {
    std::memcpy(spare.data, whole, static_cast<size_t>(4 * each * (size - 1)));
  };
  const auto sample = [&](const auto& call) {
    lane.barrier("bench").sync();
    const double begin = now();
    for (int i = 0; i < repeat; ++i) call();
    return (now() - begin) / repeat;
  };
  std::vector<double> own, memcpys, gloos;
  ours(), copy(), gloo();
  for (int round = 0; round < q.rounds; ++round) {
    own.push_back(sample(ours));
    memcpys.push_back(sample(copy));
    gloos.push_back(sample(gloo));
  }
  lane.barrier("bench").sync();
  Json answer;
  answer.set("kind", world.kind());
  answer.set("own", to_json_array(own));
  answer.set("memcpy", to_json_array(memcpys));
  answer.set("gloo", to_json_array(gloos));
  return answer;
}

Json ask(const Session& session, std::string_view kind, int ranks, Question q) {
  const TemporaryFolder folder;
  q.folder = folder.path();
  if (kind != "local")
    return run_ranks(session,
                     {.words = {"comm", q.gathers ? "all-gather" : "reduce-scatter",
                                std::to_string(q.bytes), std::to_string(q.rounds), q.folder},
                      .ranks = ranks,
                      .threads = std::max(1, session.machine().threads / ranks),
                      .communicator = std::string(kind)});
  Json answer;
  run_local(ranks, [&](World& world) {
    Json mine = answer_of(world, q);
    if (world.rank() == 0) answer = std::move(mine);
  });
  return answer;
}

}  // namespace

// words: all-gather or reduce-scatter, bytes, rounds, Gloo's folder.
Json comm_rank(const std::vector<std::string>& words) {
  const Question q{words.at(0) == "all-gather", std::stoll(words.at(1)), std::stoi(words.at(2)),
                   words.at(3)};
  World world = distributed::init_from_env();
  Json answer;
  world.guard([&] { answer = answer_of(world, q); });
  return world.rank() == 0 ? answer : Json();
}

void comm_suite(Session& session) {
  if (session.on_gpu()) return gpu_comm_lines(session);
  std::vector<int64_t> sizes = {64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  if (session.options().quick) sizes.resize(1);
  for (std::string_view kind : {"local", "shm", "gloo"})
    for (int ranks : {2, 4})
      for (bool gathers : {true, false})
        for (const int64_t bytes : sizes) {
          const std::string name = str(kind, "-", gathers ? "all-gather" : "reduce-scatter", "-",
                                       ranks, "-", short_bytes(bytes));
          const double received = static_cast<double>(bytes) * (ranks - 1) / ranks;
          session.line(
              "comm", name, Unit::gigabytes_per_second,
              [&](Line& line) {
                const Json answer =
                    ask(session, kind, ranks, {gathers, bytes, session.samples(20), ""});
                check<ConfigError>(answer.at("kind").as_string() == kind,
                                   "[bench] ranks of one host talk over ",
                                   answer.at("kind").as_string());
                line.samples_s = numbers(answer.at("own"));
                line.by_memory = true;
                line.peer = "memcpy";
                const auto rate = [&](const char* what) {
                  return figure(line.unit, received, quantile(numbers(answer.at(what)), 0.5));
                };
                line.peer_value = rate("memcpy");
                line.more = {{"raw Gloo", rate("gloo")},
                             {"of raw Gloo", rate("own") / rate("gloo")}};
              },
              received);
        }
}

}  // namespace sheaf::bench
