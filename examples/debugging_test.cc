// docs/debugging.md, compiled and tested: what a rank has of a tensor, whole values, errors, and the tape of a step.
#include <map>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/sheaf.h"

namespace examples {
namespace {

using namespace sheaf;
using ::testing::ContainsRegex, ::testing::HasSubstr;

struct Net : nn::Module {
  nn::Linear up{4, 6}, down{6, 3};
  Tensor forward(const Tensor& x) { return down(relu(up(x))); }
  SHEAF_FIELDS(up, down);
};

struct Classifier : nn::Module {
  Net net;
  Tensor forward(const Tensor& x) { return net(x); }
  SHEAF_FIELDS(net);
};

struct Batch {
  Tensor x, label;
};
Batch batch(World& world, const Mesh& mesh) {
  std::vector<float> x;
  for (int i = 0; i < 5 * 4; ++i) x.push_back(static_cast<float>(i % 7 - 3));
  const Layout rows(mesh.spec, Placement::shard(0));
  return {redistribute(Tensor::from(x, {5, 4}).to(world.device()), rows),
          redistribute(Tensor::from<int64_t>({0, 1, 2, 0, 1}, {5}).to(world.device()), rows)};
}

TEST(Debugging, ATensorSaysWhatARankHas) {
  run_local(2, [](World& world) {
    const Mesh mesh = world.mesh({{"data", 2}});
    const Tensor x = redistribute(Tensor::from<float>({1, 2, 3, 4, 5, 6}, {3, 2}), Layout(mesh.spec, Placement::shard(0)));
    const bool first = world.rank() == 0;
    EXPECT_EQ(str(x), first ? "f32[3,2] Shard(0)@data cpu local [1,2]\n  1 2" : "f32[3,2] Shard(0)@data cpu local [2,2]\n  3 4\n  5 6");
    EXPECT_EQ(x.type().to_string(), "f32[3,2] Shard(0)@data");
    EXPECT_EQ(x.local_shape(), (first ? Shape{1, 2} : Shape{2, 2}));
    EXPECT_EQ(x.layout().local_start(x.shape())[0], first ? 0 : 1);
    EXPECT_EQ(x.to_vector(), (first ? std::vector<float>{1, 2} : std::vector<float>{3, 4, 5, 6}));  // of this rank

    const Layout everywhere(mesh.spec, Placement::replicate());
    EXPECT_EQ(redistribute(x, everywhere).to_vector(), (std::vector<float>{1, 2, 3, 4, 5, 6}));

    const Tensor total = sum(x);  // Partial: an addend on each rank
    EXPECT_EQ(str(total), first ? "f32[] Partial@data cpu\n  3" : "f32[] Partial@data cpu\n  18");
    EXPECT_THROW(total.item(), PlacementError);
    EXPECT_EQ(redistribute(total, "data", Placement::invariant()).item(), 21);
  });
}

TEST(Debugging, WholeParametersAndGradients) {
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      Net net;
      shard(net, mesh, {.units = nn::units_of<nn::Linear>()});
      materialize(net, world.device(), {.seed = 1});
      const auto [x, label] = batch(world, mesh);
      {
        Recording recording;
        recording.backward(cross_entropy(net(x), label));
        EXPECT_THROW(full_gradient(net.up.weight), LifetimeError) << "inside of the recording";
        recording.take();
        for (const nn::Parameter& p : net.parameters()) {  // in the same order on all ranks
          const Tensor weight = full_parameter(p), gradient = full_gradient(p);
          EXPECT_EQ(weight.local_shape(), p.shape());
          EXPECT_EQ(gradient.local_shape(), p.shape());
          EXPECT_FALSE(gradient.layout().mesh());
        }
      }
    });
}

TEST(Debugging, AnErrorNamesTheOpTheModuleAndTheFix) {
  run_local(2, [](World& world) {
    const Mesh mesh = world.mesh({{"data", 2}});
    Classifier model;
    shard(model, mesh);
    materialize(model, world.device());
    const Tensor x = sum(batch(world, mesh).x, {0}, /*keepdim=*/true);
    try {
      model(x);
      FAIL() << "of a Partial value there is no relu";
    } catch (const PlacementError& e) {
      EXPECT_EQ(e.exit_code(), 64);
      EXPECT_THAT(e.what(), HasSubstr(str("[relu] net: on mesh axis data rank ", world.rank(), " has Partial (f32[1,6] Partial@data); ")));
      EXPECT_THAT(e.what(), HasSubstr("accepted: Replicate -> Replicate; communication is never implied: "));
      EXPECT_THAT(e.what(), HasSubstr("write redistribute(x, \"data\", Placement::replicate()) for x = input 0"));
    }
  });
}

TEST(Debugging, TheTapeOfAStep) {
  std::map<int, Tape> tapes;  // of all ranks, which are threads
  std::mutex mutex;
  run_local(3, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", world.size()}});
    Net net;
    shard(net, mesh, {.units = nn::units_of<nn::Linear>()});
    materialize(net, world.device(), {.seed = 1});
    optim::AdamW optimizer(net);
    const auto [x, label] = batch(world, mesh);
    Recording recording;
    recording.backward(cross_entropy(net(x), label));
    optimizer.step();
    optimizer.zero_grad();
    const std::scoped_lock lock(mutex);
    tapes[world.rank()] = recording.take();
  });

  const Tape& tape = tapes.at(0);
  EXPECT_THAT(to_text(tape), HasSubstr("reduce_scatter"));
  EXPECT_THAT(collective_summary(tape), ContainsRegex("up +all_gather +1 "));
  int64_t received = 0;
  std::map<std::string, int> sent;  // collectives, by module and kind
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    received += tape.wire_bytes(n);
    for (const Transfer& t : transfers(tape, n)) ++sent[tape.path(n) + " " + t.name];
  }
  EXPECT_EQ(sent.at("up reduce_scatter"), 1);
  EXPECT_EQ(sent.at("down reduce_scatter"), 1);
  EXPECT_GT(received, 0);

  for (const auto& [rank, of_rank] : tapes) EXPECT_TRUE(check_tape(of_rank).empty()) << rank;
  const Tape* all[] = {&tapes.at(0), &tapes.at(1), &tapes.at(2)};
  EXPECT_TRUE(check_collectives(all).empty());
}

TEST(Debugging, FindsWhatIsNotFinite) {
  run_local(2, [](World& world) {
    const Mesh mesh = world.mesh({{"data", 2}});
    const Tensor x = log(redistribute(Tensor::from<float>({1, 0, 2, -1, 0}, {5}), Layout(mesh.spec, Placement::shard(0))));
    const Tensor bad = sum(logical_not(isfinite(x)));  // of this rank: Partial
    EXPECT_EQ(bad.to_vector<int64_t>()[0], world.rank() == 0 ? 1 : 2);
    EXPECT_EQ(redistribute(bad, "data", Placement::invariant()).item<int64_t>(), 3);
  });
}

TEST(Debugging, TheTapeOfAJobThatDoesNotRun) {
  World world = distributed::simulated_world(/*rank=*/0, /*size=*/8);  // one of eight ranks, without data and memory
  const Mesh mesh = world.mesh({{"data", 8}});
  Net net;
  shard(net, mesh, {.units = nn::units_of<nn::Linear>()});
  materialize(net, world.device());
  EXPECT_TRUE(world.device().is_meta());
  const Layout rows(mesh.spec, Placement::shard(0));
  const Tensor x = Tensor::empty({kF32, {16, 4}, rows}, world.device()), label = Tensor::empty({kI64, {16}, rows}, world.device());
  Recording recording;
  recording.backward(cross_entropy(net(x), label));
  EXPECT_THAT(collective_summary(recording.take()), ContainsRegex("down +reduce_scatter +1 "));
}

TEST(Debugging, ARankCannotReadAlone) {
  try {
    run_local(2, [](World& world) {
      const Mesh mesh = world.mesh({{"data", 2}});
      Net net;
      shard(net, mesh);
      materialize(net, world.device());
      if (world.rank() == 0) full_parameter(net.up.weight);  // wrong: an all_gather that rank 1 does not join
    });
    FAIL() << "it had no partner";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("[all_gather] rank 0 of 2"));
  }
}

}  // namespace
}  // namespace examples
