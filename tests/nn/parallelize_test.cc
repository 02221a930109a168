// Modules that are parallelized without a change to their code: Module::parallelize().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/tensor_region.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 13, kWidth = 6, kHidden = 12;

struct Layers : nn::Module {
  nn::Linear up{kWidth, kHidden}, down{kHidden, kWidth};
  virtual Tensor forward(const Tensor& x) = 0;
  void cut() {
    up.weight.set_cut(OwnershipMap::even(0)), up.bias.set_cut(OwnershipMap::even(0));
    down.weight.set_cut(OwnershipMap::even(1));
  }
  SHEAF_FIELDS(up, down);
};
struct Uneven : nn::Module {
  nn::Parameter rows{{13, kWidth}, nn::Init::normal(1)}, columns{{kWidth, 13}, nn::Init::normal(1)}, bias{{13}, nn::Init::normal(1)};
  Uneven() { rows.set_cut(OwnershipMap::even(0)), columns.set_cut(OwnershipMap::even(1)), bias.set_cut(OwnershipMap::even(0)); }
  SHEAF_FIELDS(rows, columns, bias);
};
// Knows nothing of ranks.
struct Plain : Layers {
  Tensor forward(const Tensor& x) override { return down(tanh(up(x))); }
  SHEAF_FIELDS(up, down);
};
// The same, parallelized by its own code.
struct Shared : Layers {
  Tensor forward(const Tensor& x) override {
    const nn::TensorRegion region(x, up.weight);
    return region.leave(down(tanh(up(region.enter(x)))));
  }
  SHEAF_FIELDS(up, down);
};

template <class Mlp>
struct Net : nn::Module {
  nn::Linear first{kWidth, kWidth};
  Mlp mlp;
  Tensor forward(const Tensor& x) {
    const Tensor y = first(x);
    return y + mlp(y);
  }
  SHEAF_FIELDS(first, mlp);
};

const nn::CallPlacements kCall{.axis = "model", .inputs = Placement::replicate(), .outputs = Placement::shard(0)};

Tensor rows(const Mesh& mesh) {
  const Type type{kF64, {kRows, kWidth}, Layout(mesh.spec, Placement::shard(0))};
  const int64_t begin = type.local_start()[0] * kWidth;
  std::vector<double> local;
  for (int64_t i = 0; i < type.local_shape().numel(); ++i) local.push_back(std::sin(static_cast<double>(begin + i)));
  return Tensor::from_local(local, type);
}

struct Outcome {
  std::vector<std::vector<double>> gradients;
  std::string tape;
};

template <class Mlp>
Outcome run(int data, int model_ranks, const std::function<void(Net<Mlp>&)>& share) {
  Outcome out;
  run_local(data * model_ranks, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", data}, {"model", model_ranks}});
    Net<Mlp> net;
    share(net);
    shard(net, mesh, {.tensor_axis = "model", .units = nn::units_of<Layers>()});
    materialize(net, Device::cpu(), {.seed = 3, .dtype = kF64});
    Recording recording;
    const Tensor y = net(rows(mesh));
    recording.backward(sum(y * y));
    const Tape tape = recording.take();
    for (const nn::Parameter& p : net.parameters()) {
      const Tensor g = full_gradient(p);
      if (w.rank() == 0) out.gradients.push_back(g.to_vector<double>());
    }
    if (w.rank() != 0) return;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) {
      const Node& n = tape.node(id);
      out.tape += str(tape.op_name(n), ' ', tape.path(n));
      for (int o = 0; o < n.num_outputs; ++o) out.tape += str(' ', tape.type(tape.output(n, o)));
      out.tape += '\n';
    }
  }, {.threads_per_rank = 1});
  return out;
}

void expect_near(const Outcome& actual, const Outcome& expected) {
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
  for (size_t p = 0; p < expected.gradients.size(); ++p)
    for (size_t i = 0; i < expected.gradients[p].size(); ++i)
      ASSERT_NEAR(actual.gradients[p][i], expected.gradients[p][i], 1e-12) << p << ' ' << i;
}

void from_outside(Net<Plain>& net) {
  net.mlp.cut();
  net.mlp.parallelize(kCall);
}

// On one rank, and when parallelized by the layer's own code: the same tape, with the same paths.
TEST(Parallelize, IsWhatTheModulesCodeWouldSay) {
  const Outcome one = run<Plain>(1, 1, [](Net<Plain>&) {});
  for (const auto& [data, model_ranks] : {std::pair{1, 1}, {1, 2}, {1, 3}, {2, 2}, {1, 5}, {2, 1}}) {
    SCOPED_TRACE(str(data, " x ", model_ranks));
    const Outcome shared = run<Shared>(data, model_ranks, [](Net<Shared>& net) { net.mlp.cut(); });
    const Outcome outside = run<Plain>(data, model_ranks, from_outside);
    expect_near(outside, one);
    EXPECT_EQ(outside.gradients, shared.gradients);
    EXPECT_EQ(outside.tape, shared.tape);
    EXPECT_THAT(outside.tape, HasSubstr(model_ranks > 1 ? "reduce_scatter mlp f64[13,6]" : "tanh mlp"));
  }
}

TEST(Parallelize, GoesWithComputingAgain) {
  const Outcome one = run<Plain>(1, 1, [](Net<Plain>&) {});
  expect_near(run<Plain>(2, 3, [](Net<Plain>& net) {
    from_outside(net);
    net.mlp.recompute();
  }), one);
}

struct Two {
  Tensor a, b;
  template <class F>
  void for_each_tensor(F&& f) {
    f(a), f(b);
  }
};
struct OfTwo : nn::Module {
  Type seen[2];
  Two forward(Two x) {
    seen[0] = x.a.type(), seen[1] = x.b.type();
    return {x.a * 2, x.b};
  }
  SHEAF_FIELDS();
};
struct OfNone : nn::Module {
  int64_t forward(const Tensor& x) { return x.numel(); }
  SHEAF_FIELDS();
};

TEST(Parallelize, TakesStructsOfTensors) {
  run_local(3, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}, {"model", 3}});
    OfTwo module;
    module.parallelize(kCall);
    module.parallelize({.axis = "elsewhere", .inputs = Placement::partial()});
    const Tensor whole = full_of({kF32, {2}, {}}, 1.0);  // on no mesh
    Recording recording;
    const Two y = module(Two{rows(mesh), whole});
    EXPECT_TRUE(module.seen[0].layout[1].is_replicate());
    EXPECT_EQ(module.seen[1].layout.mesh(), nullptr);
    EXPECT_TRUE(y.a.layout()[1].is_shard());
    EXPECT_EQ(y.b.layout().mesh(), nullptr);
    const Two constant{rows(mesh), whole};
    EXPECT_TRUE(module(constant).a.layout()[1].is_shard());
  });
}

struct OfStream : nn::Module {
  bool joined = false;
  nn::Residual forward(nn::Residual stream) {
    joined = !stream.branch;
    return stream;
  }
  SHEAF_FIELDS();
};

// The residual stream is passed as one tensor; where it is not passed on, the next norm adds.
TEST(Parallelize, JoinsWhatItMoves) {
  run_local(2, [](World& w) {
    for (const std::string axis : {"model", "other"}) {
      const Mesh mesh = w.mesh({{axis, 2}});
      OfStream module;
      module.parallelize(kCall);
      const nn::Residual y = module(nn::Residual{rows(mesh), rows(mesh)});
      EXPECT_EQ(module.joined, axis == kCall.axis);
      EXPECT_TRUE(y.x.layout()[0].is_shard());
      OfStream results;
      results.parallelize({.axis = "model", .outputs = Placement::replicate()});
      EXPECT_EQ(results(nn::Residual{rows(mesh), rows(mesh)}).branch.defined(), axis != kCall.axis);
      EXPECT_FALSE(results.joined);
    }
  });
}

struct Squares : nn::Module {
  Tensor forward(const Tensor& x) { return x * x; }
  SHEAF_FIELDS();
};

// The whole output is used, and kept, like any other value.
TEST(Parallelize, GathersResultsOnce) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"model", 2}});
    Squares module;
    module.parallelize({.axis = "model", .outputs = Placement::replicate()});
    Recording recording;
    const Tensor x = rows(mesh);
    recording.watch(x);
    const Tensor y = module(x);
    EXPECT_TRUE(y.layout()[0].is_replicate());
    const Tensor xs[] = {x};
    const Tensor g = recording.gradient(sum(redistribute(y * y, "model", Placement::shard(0))), xs)[0];
    EXPECT_TRUE(g.layout()[0].is_shard());
    const Tape tape = recording.take();
    int gathers = 0;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) gathers += tape.op_name(tape.node(id)) == "all_gather";
    EXPECT_EQ(gathers, 1);
  });
}

TEST(Parallelize, RefusesWhatCannotBePlaced) {
  OfNone module;
  const Tensor x = full_of({kF32, {2}, {}}, 1.0);
  module.parallelize({.axis = "model", .inputs = Placement::replicate()});
  EXPECT_EQ(module(x), 2);
  module.parallelize(kCall);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { module(x); }), HasSubstr("returns no Tensor"));
  EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [] {
    run_local(2, [](World& w) {
      const Mesh mesh = w.mesh({{"model", 2}});
      OfTwo two;
      two.parallelize({.axis = "model", .outputs = Placement::shard(5)});
      two(Two{rows(mesh), rows(mesh)});
    });
  }), HasSubstr("[13,6]"));
}

// shard() and clone() see the whole module.
TEST(Parallelize, IsCloned) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}, {"model", 2}});
    Net<Plain> net;
    from_outside(net);
    shard(net, mesh, {.tensor_axis = "model"});
    materialize(net, Device::cpu(), {.seed = 3, .dtype = kF64});
    Net<Plain> copy = nn::clone(net);
    EXPECT_EQ(copy(rows(mesh)).to_vector<double>(), net(rows(mesh)).to_vector<double>());
  });
}

// Blocks of different sizes have equal room in a unit's buffer. What is behind the smaller ones belongs to no parameter.
TEST(Cuts, EachElementIsOnceWhereBlocksDiffer) {
  struct Pieces {
    std::mutex mutex;
    std::map<std::string, std::map<int64_t, int>> held;  // times that each element is saved
  } all;
  run_local(6, [&](World& w) {
    Uneven net;
    shard(net, w.mesh({{"data", 2}, {"model", 3}}), {.tensor_axis = "model"});
    materialize(net, Device::cpu(), {.seed = 3});
    const std::lock_guard lock(all.mutex);
    for (const nn::StatePiece& p : nn::state_pieces(net))
      for (int64_t i = 0; p.owner && i < p.runs.numel(); ++i) ++all.held[p.name][p.runs.at(i)];
  }, {.threads_per_rank = 1});
  for (const auto& [name, times] : all.held) {
    EXPECT_EQ(times.size(), name == "bias" ? 13u : 13u * kWidth) << name;
    for (const auto& [element, count] : times) ASSERT_EQ(count, 1) << name << ' ' << element;
  }
  EXPECT_EQ(all.held.size(), 3u);
}

}  // namespace
}  // namespace sheaf::testing
