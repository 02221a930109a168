// Prefetched gathers are issued where a layer's activations leave their lane idle for longest: before the exchanges, between them, or after
// them, depending on where the layer computes; the same on all ranks.
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/distributed/unit.h"

namespace sheaf {
namespace {

constexpr int kLayers = 4;
constexpr int64_t kWidth = 12;

// A layer that computes the given numbers of products before, between and after two exchanges.
struct Layer {
  int before, between, behind;
  bool reads = true;  // a parameter, between them
};

struct Model {
  explicit Model(const Mesh& mesh) : layout(mesh.spec, Placement::shard(0)), schedule(std::make_shared<GatherSchedule>()) {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(std::make_shared<Unit>(str("layers.", i), std::vector<LeafSpec>{{"w", {kWidth, kWidth}}},
                                              UnitOptions{.mesh = mesh.spec, .strategy = Strategy::full_shard}, schedule));
      layers.back()->allocate(Device::cpu());
    }
  }
  Tensor there_and_back(const Tensor& x, Unit& unit) {
    const Tensor there = redistribute(x, Layout(layout.mesh(), Placement::shard(1)));
    unit.value(0);
    return redistribute(there, layout);
  }
  Tensor products(Tensor x, int count, Unit& unit) {
    for (int i = 0; i < count; ++i) x = matmul(x, unit.value(0));
    return x;
  }
  Tensor forward(Tensor x, const Layer& layer, bool exchanges = true, bool fails = false) {
    schedule->enter_scope();
    for (auto& unit : layers) {
      unit->enter();
      const Tensor w = unit->value(0);
      x = products(x, layer.before, *unit);
      if (exchanges) x = there_and_back(x, *unit);
      for (int i = 0; i < layer.between; ++i) x = matmul(x, layer.reads ? unit->value(0) : w);
      if (exchanges) x = there_and_back(x, *unit);
      if (fails) fail<DataError>("in the first layer");
      x = products(x, layer.behind, *unit);
      unit->leave();
    }
    schedule->leave_scope();
    return x;
  }
  Layout layout;
  std::shared_ptr<GatherSchedule> schedule;
  std::vector<std::shared_ptr<Unit>> layers;
};

// The number of exchanges between the gather of the first layer and the prefetched gather of the second; -1 if that is not prefetched.
int exchanges_before_gather(const Tape& tape) {
  int exchanges = 0, gathers = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (!n.op) continue;
    if (is_redistribute(n.op)) exchanges += gathers == 1;
    else if (tape.op_name(n) == "all_gather" && ++gathers == 2) {
      return n.flags & Node::kPrefetched ? exchanges : -1;
    }
  }
  return -1;
}

std::vector<int> places(const Layer& layer, int ranks) {
  std::vector<int> out;
  run_local(ranks, [&](World& w) {
    const Mesh mesh = w.mesh({{"context", ranks}});
    Model model(mesh);
    const Tensor x = full_of({kF32, {24 + ranks, kWidth}, model.layout}, 1.0);  // uneven
    for (int pass = 0; pass < 4; ++pass) {
      Recording recording;
      model.forward(x, layer);
      if (w.rank() + 1 == ranks) out.push_back(exchanges_before_gather(recording.tape()));
    }
    model.schedule->flush();
    EXPECT_LE(model.schedule->mispredicted(), 1);  // the first layer's, for a pass that does not come
    EXPECT_EQ(model.schedule->peak_excess(), model.layers[0]->gathered_bytes()) << "one unit ahead of use";
  }, {.threads_per_rank = 1});
  return out;
}

TEST(QuietStretch, GathersAheadOfUseGoWhereActivationsDoNotForLongest) {
  for (const int ranks : {2, 3, 5}) {
    EXPECT_EQ(places({3, 1, 1}, ranks), (std::vector<int>{-1, 0, 0, 0})) << "the first pass knows no order";
    EXPECT_EQ(places({1, 3, 1}, ranks), (std::vector<int>{-1, 2, 2, 2}));
    EXPECT_EQ(places({1, 2, 3}, ranks), (std::vector<int>{-1, 4, 4, 4}));
    EXPECT_EQ(places({2, 2, 2}, ranks), (std::vector<int>{-1, 0, 0, 0})) << "of as much work the first";
    EXPECT_EQ(places({1, 3, 2, /*reads=*/false}, ranks), (std::vector<int>{-1, 4, 4, 4})) << "nobody looks between them";
  }
}

// If a layer skips its exchanges once, they are not waited for: its successor is then gathered when it is used.
TEST(QuietStretch, OfFewerExchangesThanForeseenNothingIsMissed) {
  run_local(2, [](World& w) {
    Model model(w.mesh({{"context", 2}}));
    const Tensor x = full_of({kF32, {8, kWidth}, model.layout}, 1.0);
    for (const bool exchanges : {true, true, false, true}) {
      Recording recording;
      model.forward(x, {1, 2, 3}, exchanges);
      int gathers = 0;
      for (NodeId id = 0; id < recording.tape().num_nodes(); ++id)
        gathers += recording.tape().op_name(recording.tape().node(id)) == "all_gather" && !is_redistribute(recording.tape().node(id).op);
      EXPECT_EQ(gathers, kLayers);
    }
    model.schedule->flush();
    EXPECT_EQ(model.schedule->mispredicted(), 0);
  }, {.threads_per_rank = 1});
}

// If a pass ends by an exception, deferred gathers are dropped: an abandoned recording sends nothing.
TEST(QuietStretch, AnExceptionGathersNothing) {
  run_local(2, [](World& w) {
    Model model(w.mesh({{"context", 2}}));
    const Tensor x = full_of({kF32, {8, kWidth}, model.layout}, 1.0);
    const auto pass = [&] {
      Recording recording;
      model.forward(x, {1, 2, 3});
      return exchanges_before_gather(recording.tape());
    };
    pass(), pass();
    model.schedule->flush();
    struct Leaves {  // as modules do
      Model& m;
      ~Leaves() { m.layers[0]->leave(), m.schedule->leave_scope(); }
    };
    const auto failing = [&] {
      Recording recording;
      const Leaves leaves{model};
      model.forward(x, {1, 2, 3}, true, true);
    };
    EXPECT_THROW(failing(), DataError);
    model.schedule->flush();
    EXPECT_EQ(model.schedule->mispredicted(), 0);
    pass();  // learns the order anew
    EXPECT_EQ(pass(), 4);
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf
