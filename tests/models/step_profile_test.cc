// A step's measured timeline has everything on the step's tape.
#include "sheaf/models/step_profile.h"

#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

using Counts = std::map<std::string, int>;

const Device kGpu = Device::cuda();

// What runs, by name: on the thread that computes, or on its GPU's stream, and on lanes.
struct Ran {
  Counts ops, collectives, copies;
};
Ran on_tape(const Tape& tape) {
  Ran ran;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (!n.op || !n.op->execute || n.op->kind == OpKind::discard) continue;
    if (n.num_outputs && tape.value(tape.output(n)).view_of >= 0) continue;
    ++ran.ops[n.op->name];
    if (n.op->lane == Lane::copy) ++ran.copies[n.op->name];
    for (const Transfer& t : transfers(tape, n)) ++ran.collectives[t.name];
  }
  return ran;
}

struct Span {
  std::string name;
  double begin, end;
};

void expect_what_tapes_have(Device device, bool offload = false) {
  for (const bool compiled : {false, true})
    for (const int world : {1, 2}) {
      SCOPED_TRACE(str(device.to_string(), ", ", world, compiled ? " ranks, compiled" : " ranks"));
      const ScratchFolder folder;
      const std::string file = folder / "trace.json";
      std::vector<Tape> tapes(static_cast<size_t>(world));
      std::vector<int64_t> peaks(static_cast<size_t>(world));
      std::string line;
      run_local(world, [&](World& w) {
        models::TrainConfig config = tiny_config();
        config.train.compile = compiled;
        config.train.offload_parameters = offload;
        models::TrainingStep step(config, config.model.vocab, w, w.device());
        for (int64_t s = 0; s < 4; ++s) step.run(s, fill_tiny);
        models::StepProfile profile(w);
        models::RecordedStep recorded;
        Allocator& memory = *RankContext::current().memory(device);
        memory.reset_peak();
        step.run(4, fill_tiny, &recorded);
        peaks[static_cast<size_t>(w.rank())] = memory.stats().peak;
        const int64_t received = world > 1 ? w.communicator().bytes_received() : 0;
        const std::string shares = profile.write(file);
        if (w.rank() > 0) {
          EXPECT_LT(w.communicator().bytes_received() - received, 200) << "only rank 0 gets the events of all";
        }
        if (w.rank() == 0) line = shares;
        tapes[static_cast<size_t>(w.rank())] = std::move(recorded.tape);
      }, {.device = device});
      EXPECT_THAT(line, HasSubstr(" s: "));
      EXPECT_THAT(line, HasSubstr("%"));
      const Json trace = Json::parse(File::open<DataError>(file).read_all(), "trace");
      std::map<std::pair<int64_t, int64_t>, std::string> rows;  // of a rank and a number
      for (const Json& e : trace.at("traceEvents").as_array())
        if (e.at("name").as_string() == "thread_name")
          rows[{e.at("pid").as_int(), e.at("tid").as_int()}] = e.at("args").at("name").as_string();
      EXPECT_EQ(rows.at({0, 0}), "compute");
      EXPECT_EQ(static_cast<int>(rows.size()) > world, world > 1 || offload);
      for (int rank = 0; rank < world; ++rank) {
        const Ran expected = on_tape(tapes[static_cast<size_t>(rank)]);
        Ran seen;
        std::vector<Span> spans;
        int64_t peak = 0;
        for (const Json& e : trace.at("traceEvents").as_array()) {
          if (e.at("pid").as_int() != rank) continue;
          if (e.at("ph").as_string() == "C") peak = std::max(peak, e.at("args").at("value").as_int());
          if (e.at("ph").as_string() != "X") continue;
          const std::string& name = e.at("name").as_string();
          const double begin = e.at("ts").as_double();
          EXPECT_GE(begin, 0);
          EXPECT_GE(e.at("dur").as_double(), 0);
          if (const std::string& row = rows.at({rank, e.at("tid").as_int()}); row != "compute") {
            ++(row == "copies" || row == "leaving" ? seen.copies : seen.collectives)[name];
            continue;
          }
          if (name != "waits") ++seen.ops[name];
          spans.push_back({name, begin, begin + e.at("dur").as_double()});
        }
        for (const auto& [name, count] : expected.ops) EXPECT_EQ(seen.ops[name], count) << name;
        // A program's results, some numbers, are copied after its last op.
        EXPECT_LE(peak, peaks[static_cast<size_t>(rank)]);
        EXPECT_GE(peak, peaks[static_cast<size_t>(rank)] - (compiled ? 16 : 0));
        if (!compiled) continue;  // an eager step does more than it records
        EXPECT_EQ(seen.ops.size(), expected.ops.size());
        EXPECT_EQ(seen.copies, expected.copies);
        EXPECT_EQ(seen.copies.empty(), !offload);
        for (const auto& [name, count] : expected.collectives) {
          if (world > 1) {
            EXPECT_GE(seen.collectives[name], count) << name;
          }
        }
        for (size_t i = 1; i < spans.size(); ++i) EXPECT_GE(spans[i].end, spans[i - 1].end - 1e-3);
      }
    }
}

TEST(StepProfile, HasTheNodesOfTheTapeAndTheirCollectives) { expect_what_tapes_have(Device::cpu()); }

TEST(StepProfile, OfAGpuHasThemToo) {
  SHEAF_NEEDS_GPU();
  for (const bool offload : {false, true}) expect_what_tapes_have(kGpu, offload);
}

// The host enqueues all of it at once, and waits for nothing.
TEST(StepProfile, OfAGpuIsInItsTimeAndNotTheHosts) {
  SHEAF_NEEDS_GPU();
  constexpr double kTravels = 0.1;
  constexpr int64_t kElements = 1 << 15;
  double gathers[2], waits[2];
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const Tensor x = Tensor::empty({kF32, {kElements}, Layout(mesh.spec, {Placement::shard(0)})}, kGpu);
    const Profile profile;
    const Tensor y = redistribute(x, "data", Placement::replicate()) * 2.0f;
    profile.settle();
    std::map<std::string, double> seconds;
    for (const Profile::Span& s : profile.spans()) {
      EXPECT_GE(s.end, s.begin) << s.name;
      if (s.name != "all_gather" || s.row != Profile::kCompute) seconds[s.name] += s.end - s.begin;
    }
    gathers[w.rank()] = seconds["all_gather"], waits[w.rank()] = seconds["waits"];
  }, {.bytes_per_second = 4 * kElements / 2 / kTravels, .threads_per_rank = 1, .device = kGpu});
  EXPECT_GE(std::min(gathers[0], gathers[1]), 0.9 * kTravels);
  EXPECT_GE(std::max(waits[0], waits[1]), 0.8 * kTravels);  // the emulated GPU may run a rank's lane while the other rank waits
}

// If a rank fails, a lane may end its call after the profile was destroyed.
TEST(Profile, IsOutlivedByItsSpans) {
  std::optional<Profile> profile(std::in_place);
  std::optional<ProfileSpan> span(std::in_place, "lane", "gather", "n");
  profile.reset();
  span.reset();
  EXPECT_TRUE(Profile().spans().empty());
}

TEST(StepProfile, WhatAnOpWaitedForIsNotItsOwn) {
  const ScratchFolder folder;
  run_local(1, [&](World& w) {
    const auto rest = [](int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); };
    std::string line;
    bool smaller = false;
    for (int tries = 0; tries < 5 && !smaller; ++tries) {  // a busy machine may hold up the op
      models::StepProfile profile(w);
      {
        const ProfileSpan op(Profile::kCompute, "op", "m");
        rest(5);
        const ProfileSpan waits(Profile::kCompute, "waits", {});
        rest(50);
      }
      line = profile.write(folder / "trace.json");
      // What is first has the largest share.
      const size_t waits = line.find(": waits "), op = line.find(", op ");
      smaller = waits != std::string::npos && op != std::string::npos && std::stod(line.substr(op + 5)) < 50;
    }
    EXPECT_TRUE(smaller) << line;
  });
}

TEST(StepProfile, OneAtATimeForEachRank) {
  const Profile profile;
  EXPECT_THROW(Profile(), ConfigError);
}

TEST(Profile, TellsTheComputingThreadFromOthers) {
  Profile profile;
  { const ProfileSpan span(Profile::kCompute, "op", "m"); }
  std::thread([&context = RankContext::current()] {
    const RankScope scope(context);
    const ProfileSpan compute(Profile::kCompute, "not there", "m"), lane("lane", "gather", "n");
  }).join();
  const auto spans = profile.spans();
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].name, "op");
  EXPECT_EQ(spans[1].row + spans[1].name + spans[1].module, "lanegathern");
  EXPECT_GE(spans[1].begin, spans[0].end);
}

}  // namespace
}  // namespace sheaf::testing
