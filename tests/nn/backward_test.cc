// The guarantees of a backward for parameters in unusual places: twice in one node, frozen and read through a view, on a mesh with another
// axis, prefetched; and for a second backward in one recording.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/autograd/local_map.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 6, kWidth = 5;

template <class F>
std::string refusal(F&& f) {
  return message_of<LifetimeError>(ExitCode::kDesync, f);
}

/// Rows that depend only on the global row index, cut along the mesh's first axis.
Tensor rows_of(const Mesh& mesh, int64_t width = kWidth) {
  const Type type{kF32, {kRows, width}, mesh.spec ? Layout(mesh.spec).with(0, Placement::shard(0)) : Layout()};
  const int64_t first = mesh.spec ? type.local_start()[0] : 0;
  std::vector<float> local;
  for (int64_t i = 0; i < type.local_shape().numel(); ++i)
    local.push_back(0.1f * static_cast<float>((first * width + i) * 7 % 11) - 0.4f);
  return Tensor::from_local(local, type);
}

Mesh data_mesh(World& w) { return w.mesh({{"data", w.size()}}); }

/// A square weight that is used as it is, as a Gram matrix, frozen together with a trainable one, and transposed twice.
struct Layer : nn::Module {
  nn::Parameter weight{{kWidth, kWidth}, nn::Init::normal(0.4)}, frozen{{kWidth, kWidth}, nn::Init::normal(0.4)};
  Layer() { frozen.freeze(); }
  Tensor forward(const Tensor& x) {
    const Tensor turned = transpose(frozen, 0, 1);
    return tanh(matmul(tanh(linear(x, weight)), turned));
  }
  Tensor gram() { return sum(square(linear(weight, weight))); }
  SHEAF_FIELDS(weight, frozen);
};

struct Net : nn::Module {
  std::vector<Layer> layers;
  explicit Net(int n = 3) : layers(static_cast<size_t>(n)) {}
  Tensor forward(Tensor x) {
    for (Layer& layer : layers) x = layer(x);
    return x;
  }
  SHEAF_FIELDS(layers);
};

/// The whole gradients of the net's weights after `backward` at a world, with and without another axis of size 1.
template <class Backward>
std::vector<std::vector<float>> gradients(int world, const std::string& strategy, bool model_axis, Backward&& backward,
                                          std::optional<DType> compute = std::nullopt) {
  std::vector<std::vector<float>> out;
  run_local(world, [&](World& w) {
    const Mesh mesh = model_axis ? w.mesh({{"data", w.size()}, {"model", 1}}) : data_mesh(w);
    Net net;
    shard(net, mesh, {.units = nn::units_of<Layer>(), .strategy = strategy, .compute_dtype = compute});
    materialize(net, Device::cpu(), {.seed = 5});
    for (int step = 0; step < 2; ++step) {  // the second one follows the first one's order, with prefetched gathers
      zero_grad(net);
      Recording recording;
      backward(recording, net, rows_of(mesh));
    }
    for (Layer& layer : net.layers) {
      const std::vector<float> g = full_gradient(layer.weight).template to_vector<float>();
      if (w.rank() == 0) out.push_back(g);
    }
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
  return out;
}

void expect_near(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < a[i].size(); ++j) EXPECT_NEAR(a[i][j], b[i][j], 2e-6) << "layer " << i << " element " << j;
}

const std::vector<std::string> kStrategies{"full_shard", "shard_grad_op", "zero1", "replicate"};

TEST(Backward, FrozenWeightsBehindViewsAndAnotherAxisOfOne) {
  const auto once = [](Recording& r, Net& net, const Tensor& x) {
    Tensor loss = sum(net(x));
    if (loss.layout().num_axes() > 1) loss = redistribute(loss, "model", Placement::invariant());
    r.backward(loss);
  };
  const auto expected = gradients(1, "full_shard", false, once);
  EXPECT_NE(expected[0], std::vector<float>(kWidth * kWidth, 0.0f));
  for (const std::string& strategy : kStrategies)
    for (int world : {1, 2, 3})
      for (bool model_axis : {false, true}) {
        SCOPED_TRACE(str(strategy, " at ", world, model_axis ? " x 1" : ""));
        expect_near(gradients(world, strategy, model_axis, once), expected);
      }
}

// The input of a local_map is a view of a gathered weight, which is discarded before the backward reads it.
TEST(Backward, AWeightThatEntersALocalMap) {
  const auto step = [](bool maps) {
    return [maps](Recording& r, Net& net, const Tensor& rows) {
      Tensor x = rows;
      const Tensor target = x;
      for (Layer& layer : net.layers) {
        const auto scope = layer.enter();
        const auto f = [](const Tensor& mine, const Tensor& w) { return tanh(linear(mine, w)); };
        x = maps ? local_map(f, Type{x.dtype(), x.shape(), x.layout()}, x, layer.weight.value()) : f(x, layer.weight);
      }
      Tensor loss = sum(square(x - target));
      if (loss.layout().num_axes() > 1) loss = redistribute(loss, "model", Placement::invariant());
      r.backward(loss);
    };
  };
  const auto expected = gradients(1, "full_shard", false, step(false));
  for (const std::string& strategy : kStrategies)
    for (int world : {1, 2, 3}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      expect_near(gradients(world, strategy, false, step(true)), expected);
    }
}

// A gradient in the loss, as with critics (Gulrajani et al. 2017): a unit's gradients are reduced where the backward leaves its use in the
// gradient, and where it leaves its use in the forward, so no two units' are whole at a time.
TEST(Backward, APenaltyOnTheGradientOfInputs) {
  const auto penalized = [](Recording& r, Net& net, const Tensor& rows) {
    const Tensor x = r.watch(rows);
    const Tensor y = sum(square(net(x))), dx = r.gradient(y, std::span(&x, 1), {.keep = true})[0];
    Tensor loss = y + 0.3 * sum(square(dx));
    if (loss.layout().num_axes() > 1) loss = redistribute(loss, "model", Placement::invariant());
    r.backward(loss);
    int open = 0, most = 0, reductions = 0;
    for (NodeId id = 0; id < r.tape().num_nodes(); ++id) {
      const Node& n = r.tape().node(id);
      if (!n.op) continue;
      if (std::string_view(n.op->name) == "grad_slots") most = std::max(most, ++open);
      if (std::string_view(n.op->name) == "reduce_scatter") --open, ++reductions;
    }
    const MeshSpec* const mesh = rows.layout().mesh();
    if (mesh && mesh->size(0) > 1 && net.layers[0].unit()->strategy() == Strategy::full_shard) {
      EXPECT_EQ(most, 1);
      EXPECT_EQ(reductions, 6);
    }
  };
  const auto expected = gradients(1, "full_shard", false, penalized);
  const auto plain = gradients(1, "full_shard", false, [](Recording& r, Net& net, const Tensor& x) { r.backward(sum(square(net(x)))); });
  EXPECT_GT(std::abs(expected[0][0] - plain[0][0]), 1e-3);
  for (const std::string& strategy : kStrategies)
    for (int world : {1, 2, 3}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      expect_near(gradients(world, strategy, false, penalized), expected);
    }
}

template <class F>
void on_two_ranks(F&& f) {
  run_local(2, [&](World& w) {
    const Mesh mesh = data_mesh(w);
    Net net;
    shard(net, mesh, {.units = nn::units_of<Layer>()});
    materialize(net, Device::cpu(), {.seed = 5});
    optim::SGD optimizer(net, {.lr = 0.01});
    f(mesh, net, optimizer);
  }, {.threads_per_rank = 1});
}

// An unused derivative is freed with the value that it is of, memory included, and a step between two of them is no in-place change.
TEST(Backward, AKeptGradientThatNobodyUses) {
  on_two_ranks([](const Mesh& mesh, Net& net, optim::SGD& optimizer) {
    Allocator& memory = *RankContext::current().memory(Device::cpu());
    Recording r;
    std::vector<int64_t> live;
    for (int step = 0; step < 4; ++step) {
      r.next_micro_batch(kRows * step);
      const Tensor x = r.watch(rows_of(mesh));
      {
        const Tensor y = sum(square(net(x)));
        r.gradient(y, std::span(&x, 1), {.keep = true});
        r.backward(y);
      }
      optimizer.step();
      optimizer.zero_grad();
      live.push_back(memory.stats().live);
    }
    EXPECT_EQ(live[3] - live[2], live[2] - live[1]);
    EXPECT_LT(live[3] - live[2], 4 * kRows * kWidth * 4) << "the inputs that are watched, and little else";
  });
}

// Each of several micro-batches was computed from the parameters at that time.
TEST(Backward, AStepBetweenTwoMicroBatchesIsAChange) {
  on_two_ranks([](const Mesh& mesh, Net& net, optim::SGD& optimizer) {
    Recording r;
    r.next_micro_batch(0);
    const Tensor first = sum(square(net(rows_of(mesh))));
    r.next_micro_batch(kRows);
    r.backward(sum(net(rows_of(mesh))));
    optimizer.step();
    r.next_micro_batch(2 * kRows);
    const Tensor second = sum(square(net(rows_of(mesh))));
    EXPECT_THAT(refusal([&] { r.backward(first + second); }), HasSubstr("were changed in place"));
  });
}

struct FrozenFirst : nn::Module {
  nn::Parameter frozen{{kWidth, kWidth}, nn::Init::normal(0.4)}, weight{{kWidth, kWidth}, nn::Init::normal(0.4)};
  FrozenFirst() { frozen.freeze(); }
  Tensor forward(const Tensor& x) { return linear(tanh(linear(x, weight)), frozen); }
  SHEAF_FIELDS(frozen, weight);
};

// Also if the unit's first buffer, that of frozen weights, stays as it is.
TEST(Backward, AStepOfSomeOfAUnitsBuffersIsAChange) {
  for (const std::string& strategy : kStrategies)
    run_local(2, [&](World& w) {
      FrozenFirst net;
      shard(net, data_mesh(w), {.strategy = strategy});
      materialize(net, Device::cpu(), {.seed = 5});
      ASSERT_FALSE(units(net)[0]->buffers()[0].trainable);
      optim::SGD optimizer(net, {.lr = 0.1});
      Recording r;
      r.next_micro_batch(0);
      const Tensor first = sum(square(net(rows_of(data_mesh(w)))));
      r.next_micro_batch(kRows);
      r.backward(sum(net(rows_of(data_mesh(w)))));
      optimizer.step();
      r.next_micro_batch(2 * kRows);
      const Tensor second = sum(square(net(rows_of(data_mesh(w)))));
      EXPECT_THAT(refusal([&] { r.backward(first + second); }), HasSubstr("were changed in place")) << strategy;
    }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
}

// An op's operands are gathered one after another, and all of them are there when it runs; so is what a program holds.
TEST(Backward, OperandsOfSeveralUnitsOutsideOfTheirScopes) {
  for (const std::string& strategy : kStrategies)
    for (const bool records : {false, true})
      run_local(2, [&](World& w) {
        Net net;
        shard(net, data_mesh(w), {.units = nn::units_of<Layer>(), .strategy = strategy, .prefetch_bytes = 0});
        materialize(net, Device::cpu(), {.seed = 5});
        std::vector<std::vector<float>> whole;
        for (Layer& layer : net.layers) whole.push_back(full_parameter(layer.weight).to_vector<float>());
        for (int step = 0; step < 3; ++step) {
          std::optional<Recording> recording;
          if (records) recording.emplace();
          const std::vector<float> d = (net.layers[0].weight - net.layers[1].weight).to_vector<float>();
          for (size_t i = 0; i < d.size(); ++i) ASSERT_EQ(d[i], whole[0][i] - whole[1][i]) << strategy << " step " << step;
          std::vector<Tensor> held;
          for (Layer& layer : net.layers) held.push_back(layer.weight.value());
          for (size_t l = 0; l < held.size(); ++l) ASSERT_EQ(held[l].to_vector<float>(), whole[l]) << strategy << " step " << step;
        }
      }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
}

// d/dW of |W Wᵀ|² is 4 W Wᵀ W.
TEST(Backward, AWeightThatIsBothOperandsGetsBothContributions) {
  Layer layer;
  materialize(layer, Device::cpu(), {.seed = 2});
  for (const bool by_linear : {true, false}) {
    zero_grad(layer);
    Recording recording;
    const Tensor product = by_linear ? linear(layer.weight, layer.weight) : matmul(layer.weight, layer.weight);
    recording.backward(sum(square(product)));
    recording.take();
    const Tensor w = full_parameter(layer.weight), t = transpose(w, 0, 1);
    const Tensor square_of = by_linear ? matmul(w, t) : matmul(w, w);
    // |W W|²: 2 (W W Wᵀ + Wᵀ W W).
    const Tensor expected = by_linear ? mul(matmul(square_of, w), 4.0)
                                      : mul(add(matmul(square_of, t), matmul(t, square_of)), 2.0);
    const auto a = full_gradient(layer.weight).to_vector<float>(), b = expected.to_vector<float>();
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5) << i;
  }
}

TEST(Backward, ASecondOneIsForWhatWasComputedSince) {
  Net net;
  materialize(net, Device::cpu(), {.seed = 3});
  const Tensor x = rows_of({});
  {
    Recording r;
    const Tensor first = sum(net(x)), second = sum(square(net(x)));
    r.backward(first);
    EXPECT_THAT(refusal([&] { r.backward(second); }), HasSubstr("computed before the last backward"));
    EXPECT_THAT(refusal([&] { r.backward(first); }), HasSubstr("computed before the last backward"));
  }
  {
    Recording r;
    const Tensor h = net.layers[0](x);
    r.backward(sum(net.layers[1](h)));
    const Tensor late = sum(net.layers[2](h));  // its path to layer 0 was already differentiated
    EXPECT_THAT(refusal([&] { r.backward(late); }), HasSubstr("its gradient would be lost"));
  }
  {
    Recording r;
    EXPECT_THAT(refusal([&] { r.backward(sum(x)); }), HasSubstr("no trainable parameter"));
  }
  Recording r;
  r.backward(sum(net(x)));
  r.backward(sum(net(x)));  // the next micro-batch
}

// What is refused has taken nothing.
TEST(Backward, MayComeLaterThanWhereItCannotBe) {
  const auto backward = [](bool tries) {
    return [=](Recording& r, Net& net, const Tensor& x) {
      Tensor loss;
      {
        const RecomputeScope scope;
        loss = sum(square(net(x)));
        if (tries) { EXPECT_THAT(refusal([&] { r.backward(loss); }), HasSubstr("[backward] inside of a RecomputeScope: it must end first")); }
      }
      r.backward(custom_vjp([](const Tensor& t) { return t; }, [&r, loss, tries](Vjp& c) {
        if (tries) {
          EXPECT_THAT(refusal([&] { r.backward(loss); }), HasSubstr("[backward] inside of another derivative"));
          EXPECT_THAT(refusal([&] { r.gradient(loss, std::vector{loss}, {.keep = true}); }), HasSubstr("[gradient] inside of another derivative"));
        }
        c.set(0, c.grad());
      }, loss));
    };
  };
  for (const std::string& strategy : kStrategies)
    for (int world : {1, 2})
      EXPECT_EQ(gradients(world, strategy, false, backward(true)), gradients(world, strategy, false, backward(false))) << strategy << world;
}

TEST(Backward, OnlyTheInnermostLivingRecording) {
  Net net;
  materialize(net, Device::cpu(), {.seed = 3});
  const Tensor x = rows_of({});
  auto outer = std::make_unique<Recording>();
  const Tensor loss = sum(net(x));
  {
    Recording inner;
    EXPECT_THAT(refusal([&] { outer->backward(loss); }), HasSubstr("another one has begun"));
  }
  outer->backward(loss);
  outer->take();
  EXPECT_THAT(refusal([&] { outer->backward(loss); }), HasSubstr("is over"));
  EXPECT_THAT(refusal([&] { outer->gradient(loss, std::vector{x}); }), HasSubstr("is over"));
  // In a loop the next recording begins before the previous one ends.
  for (int step = 0; step < 3; ++step) {
    outer = std::make_unique<Recording>();
    EXPECT_EQ(Recording::current(), outer.get());
    zero_grad(net);
    outer->backward(sum(net(x)));
  }
  outer.reset();
  EXPECT_EQ(Recording::current(), nullptr);
  net(x);
}

// A step within a step, such as a line search or a teacher that is the model itself: the inner recording does its own gathers for units
// that the outer one has open, and each tape has the discards of its own gathers.
TEST(Backward, ARecordingInsideAnotherOverTheSameModel) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
    SCOPED_TRACE(strategy);
    const auto gradient = [&](bool nested) {
      std::vector<float> out;
      run_local(2, [&](World& w) {
        Net net;
        const Mesh mesh = data_mesh(w);
        shard(net, mesh, {.units = nn::units_of<Layer>(), .strategy = strategy});
        materialize(net, Device::cpu(), {.seed = 3});
        Recording outer;
        const Tensor loss = sum(net(rows_of(mesh)));
        if (nested) {
          Recording inner;
          const Tensor probe = sum(net(rows_of(mesh)));
          const Tensor x = net.layers[0].weight.value();
          EXPECT_EQ(inner.gradient(probe, std::vector{x}).size(), 1u);
          for (const Finding& f : check_gathers(inner.take())) ADD_FAILURE() << "inner: " << f.to_string();
        }
        outer.backward(loss);
        for (const Finding& f : check_gathers(outer.take())) ADD_FAILURE() << "outer: " << f.to_string();
        const std::vector<float> g = full_gradient(net.layers[0].weight).to_vector<float>();
        if (w.rank() == 0) out = g;
      }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
      return out;
    };
    EXPECT_EQ(gradient(true), gradient(false));
  }
}

// An implicit layer's derivative may run the model again: the gradients of the backward around it stay.
TEST(Backward, ARecordingInsideADerivativeOverTheSameModel) {
  for (const int ranks : {1, 2})
    for (const bool one_unit : {false, true})
      for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
        SCOPED_TRACE(str(strategy, ' ', ranks, one_unit ? " one unit" : ""));
        const auto gradients_with = [&](bool nested) {
          std::vector<std::vector<float>> out;
          run_local(ranks, [&](World& w) {
            Net net;
            const Mesh mesh = data_mesh(w);
            shard(net, mesh, {.units = one_unit ? nn::UnitPolicy() : nn::units_of<Layer>(), .strategy = strategy});
            materialize(net, Device::cpu(), {.seed = 3});
            const auto again = [&](Vjp& c) {
              if (nested) {
                Recording inner;
                const Tensor probe = sum(net(rows_of(mesh))), weight = net.layers[0].weight.value();
                EXPECT_EQ(inner.gradient(probe, std::vector{weight}).size(), 1u);
              }
              c.set(0, c.grad());
            };
            Recording outer;
            Tensor x = rows_of(mesh);
            {
              const auto scope = net.enter();
              x = custom_vjp([](const Tensor& h) { return h + 0.0; }, again, net.layers[1](net.layers[0](x)));
              x = net.layers[2](x);
            }
            outer.backward(sum(x));
            outer.take();
            for (Layer& layer : net.layers) {
              const std::vector<float> g = full_gradient(layer.weight).to_vector<float>();
              if (w.rank() == 0) out.push_back(g);
            }
          }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
          return out;
        };
        EXPECT_EQ(gradients_with(true), gradients_with(false));
      }
}

// Values that are read in a scope stay until it ends, though their module is called in between.
TEST(Backward, AWeightReadBeforeItsModuleIsCalled) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
    SCOPED_TRACE(strategy);
    run_local(2, [&](World& w) {
      Net net;
      const Mesh mesh = data_mesh(w);
      shard(net, mesh, {.units = nn::units_of<Layer>(), .strategy = strategy});
      materialize(net, Device::cpu(), {.seed = 3});
      const auto loss = [&] {
        const auto scope = net.enter();
        const Tensor weight = net.layers[0].weight, h = net.layers[1](net.layers[0](rows_of(mesh)));
        return sum(matmul(h, transpose(weight, 0, 1)));
      };
      loss();
      Recording recording;
      recording.backward(loss());
      recording.take();
      EXPECT_TRUE(full_gradient(net.layers[0].weight));
    }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
  }
}

// Two models in one scope, with a backward each: the second is prefetched while the first computes.
struct Adversaries : nn::Module {
  Net a{1}, b{1};
  Tensor forward(const Tensor& x) { return b(a(x)); }
  SHEAF_FIELDS(a, b);
};

TEST(Backward, WhatIsGatheredAheadOutlivesABackward) {
  run_local(2, [](World& w) {
    Adversaries m;
    const Mesh mesh = data_mesh(w);
    shard(m, mesh, {.units = nn::units_of<Layer>()});
    materialize(m, Device::cpu(), {.seed = 4});
    std::vector<std::vector<float>> first;
    for (int step = 0; step < 4; ++step) {
      zero_grad(m);
      {
        Recording r;
        const auto scope = m.enter();
        r.backward(sum(m.a(rows_of(mesh))));
        r.backward(sum(m.b(rows_of(mesh))));
      }
      std::vector<std::vector<float>> now;
      for (Net* net : {&m.a, &m.b}) now.push_back(full_gradient(net->layers[0].weight).to_vector<float>());
      if (step == 0) first = now;
      EXPECT_EQ(now, first) << "step " << step;
    }
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
}

// The backward has finished with b before it gathers a again, and b ahead of its next use.
TEST(Backward, WhatIsGatheredAheadAfterItsOwnEndIsForTheNext) {
  run_local(2, [](World& w) {
    const Mesh mesh = data_mesh(w);
    const auto trained = [&](int64_t prefetch_bytes) {
      Adversaries m;
      shard(m, mesh, {.units = nn::units_of<Layer>(), .prefetch_bytes = prefetch_bytes});
      materialize(m, Device::cpu(), {.seed = 4});
      optim::SGD optimizer(m, {.lr = 0.1});
      std::vector<std::vector<float>> values;
      for (const bool updates : {false, true})
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          Recording r;
          {
            const auto scope = m.enter();
            const Tensor x = rows_of(mesh), h = m.a(x);
            m.b(h);
            r.backward(sum(h));
            if (updates) optimizer.step();
            r.backward(sum(square(m.b(x))));
          }
          for (const Finding& f : check_gathers(r.take())) ADD_FAILURE() << f.to_string();
          for (const nn::Parameter& p : m.parameters()) {
            const Tensor g = full_gradient(p);
            values.push_back(g ? g.to_vector() : std::vector<float>());
          }
        }
      for (const nn::Parameter& p : m.parameters()) values.push_back(full_parameter(p).to_vector());
      return values;
    };
    EXPECT_EQ(trained(-1), trained(0));
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
}

/// Runs `body` with a net of every strategy, alone and on two ranks.
void with_every_strategy(std::optional<DType> compute, const std::function<void(World&, const Mesh&, Net&)>& body) {
  for (const std::string& strategy : kStrategies)
    for (int world : {1, 2}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      run_local(world, [&](World& w) {
        Net net;
        const Mesh mesh = data_mesh(w);
        shard(net, mesh, {.units = nn::units_of<Layer>(), .strategy = strategy, .compute_dtype = compute});
        materialize(net, Device::cpu(), {.seed = 6});
        body(w, mesh, net);
      }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
    }
}

// gradient() of a parameter that was gathered twice counts both uses, whatever the strategy.
TEST(Backward, GradientOfAParameterIsThatOfEveryUse) {
  std::vector<float> expected;
  with_every_strategy({}, [&](World& w, const Mesh& mesh, Net& net) {
    Recording r;
    const Tensor weight = net.layers[0].weight;
    const Tensor y = sum(net.layers[0](net.layers[1](net.layers[0](rows_of(mesh)))));
    const Tensor g = r.gradient(y, std::vector{weight})[0];
    const std::vector<float> whole = full_tensor(g).to_vector<float>();
    if (w.rank() != 0) return;
    if (expected.empty()) expected = whole;
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], expected[i], 2e-6) << i;
  });
}

// ... and adds up in the order of uses, however often it was gathered: all strategies give the same bits.
TEST(Backward, GradientOfAParameterDoesNotDependOnItsGathers) {
  std::vector<float> expected;
  with_every_strategy({}, [&](World& w, const Mesh& mesh, Net& net) {
    Recording r;
    const Tensor x = rows_of(mesh);
    Tensor y = linear(tanh(linear(x, net.layers[0].weight)), net.layers[0].weight);
    y = net.layers[1](y);
    y = linear(y, net.layers[0].weight);
    const Tensor g = r.gradient(sum(y), std::vector<Tensor>{net.layers[0].weight})[0];
    const std::vector<float> whole = full_tensor(g).to_vector<float>();
    if (w.size() == 1 || w.rank() != 0) return;
    if (expected.empty()) expected = whole;
    EXPECT_EQ(whole, expected);
  });
}

// Within one open scope: what a unit is used for after a gradient that is kept, or in a later micro-batch, is its own part.
TEST(Backward, AnOpenScopeIsUsedInEachPart) {
  std::vector<float> expected;
  for (const bool micro_batches : {false, true})
    for (const bool in_scope : {false, true})
      with_every_strategy({}, [&](World& w, const Mesh& mesh, Net& net) {
        Layer& layer = net.layers[0];
        const Tensor x = rows_of(mesh);
        for (int step = 0; step < 2; ++step) {
          zero_grad(net);
          Recording r;
          std::optional<nn::ModuleScope> scope;
          if (in_scope) scope.emplace(layer);
          r.next_micro_batch(0);
          const Tensor first = sum(tanh(linear(x, layer.weight)));
          if (micro_batches) r.next_micro_batch(kRows);
          else r.gradient(first, std::vector<Tensor>{layer.weight}, {.keep = true});
          const Tensor second = sum(square(linear(x, layer.weight)));
          r.backward(second);
          if (micro_batches) r.backward(first * 0.0);
        }
        const std::vector<float> whole = full_gradient(layer.weight).to_vector<float>();
        if (w.rank() != 0) return;
        if (expected.empty()) expected = whole;
        for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], expected[i], 2e-6) << i;
      });
}

// Weights gathered in an open scope are not kept beyond a change of the masters.
TEST(Backward, AnOpenScopeSeesNewParameters) {
  for (const bool recorded : {false, true})
    with_every_strategy({}, [&](World&, const Mesh& mesh, Net& net) {
      Layer& layer = net.layers[0];
      const Tensor x = rows_of(mesh);
      optim::SGD optimizer(net, {.lr = 1});
      Recording before;
      before.backward(sum(net(x)));
      before.take();
      const auto scope = layer.enter();
      std::vector<std::vector<float>> seen;
      const auto look = [&] { seen.push_back(linear(x, layer.weight).to_vector<float>()); };
      {
        std::optional<Recording> recording;
        if (recorded) recording.emplace();
        look();
        optimizer.step();
        look();
      }
      assign(layer.weight, full_like(full_parameter(layer.weight), 0.0));
      look();
      EXPECT_NE(seen[0], seen[1]);
      EXPECT_EQ(seen[2], std::vector<float>(seen[2].size(), 0.0f));
    });
}

// Masters that are not gathered are cast for compute: the cast is not kept beyond a change of the masters.
TEST(Backward, EvaluationInBf16SeesNewParameters) {
  with_every_strategy(kBF16, [](World&, const Mesh& mesh, Net& net) {
    const Tensor x = cast(rows_of(mesh), kBF16);
    const std::vector<float> before = net(x).to_vector<float>();
    for (Layer& layer : net.layers) assign(layer.weight, full_like(full_parameter(layer.weight), 0.0));
    EXPECT_NE(net(x).to_vector<float>(), before);
    EXPECT_EQ(net(x).to_vector<float>(), std::vector<float>(before.size(), 0.0f));
    // Memory that changes without an op, as by the replay of a graph on a GPU.
    for (const auto& unit : units(net))
      for (FlatBuffer& b : unit->buffers()) {
        float* p = b.shard.view().as<float>();
        for (int64_t i = 0; i < b.shard.local_shape().numel(); ++i) p[i] = 0.25f;
      }
    EXPECT_NE(net(x).to_vector<float>(), std::vector<float>(before.size(), 0.0f));
  });
}

TEST(Backward, AScopeMayOutliveTheRecording) {
  run_local(2, [](World& w) {
    Layer layer;
    shard(layer, data_mesh(w));
    materialize(layer, Device::cpu(), {.seed = 7});
    const Tensor x = rows_of(data_mesh(w));
    {
      const auto scope = layer.enter();
      Recording r;
      r.backward(sum(linear(x, layer.weight)));
    }
    const std::vector<float> before = layer(x).to_vector<float>();
    assign(layer.weight, full_like(full_parameter(layer.weight), 0.0));
    EXPECT_NE(layer(x).to_vector<float>(), before);
    EXPECT_EQ(layer(x).to_vector<float>(), std::vector<float>(before.size(), 0.0f));
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
}

// A table that is used twice for lookup and for a product: its slot is stored once and accumulated in place by two kinds of nodes.
struct Tied : nn::Module {
  nn::Embedding table{11, kWidth, nn::Init::normal(0.5)};
  Tensor forward(const Tensor& tokens) {
    const Tensor h = tanh(table(tokens));
    return linear_cross_entropy(h, table.weight, tokens) + mul(sum(square(linear(h, table.weight))), 0.01);
  }
  SHEAF_FIELDS(table);
};

TEST(Backward, ReplaysWhatWasAddedInPlace) {
  Tied model;
  materialize(model, Device::cpu(), {.seed = 8});
  Recording r({.capture_leaves = true});
  r.backward(model(testing::token_rows({}, 4, 3, 11)));
  const Tensor grad = units(model)[0]->buffers()[0].grad;
  const std::vector<ValueId> wanted{r.value_of(grad)};
  const auto leaves = r.captured();
  const Tape tape = r.take();
  EXPECT_EQ(replay(tape, [&](ValueId v) { return leaves.at(v); }, wanted)[0].to_vector<float>(), grad.to_vector<float>());
}

// The gradient already has another recording's contribution when this one adds to it.
TEST(Backward, ReplaysWhatWasAddedToAnotherRecordingsGradient) {
  Layer layer;
  materialize(layer, Device::cpu(), {.seed = 8});
  const Tensor x = rows_of({});
  {
    Recording before;
    before.backward(sum(layer(x)));
  }
  Recording r({.capture_leaves = true});
  r.backward(sum(layer(x)));
  const Tensor grad = units(layer)[0]->buffers()[0].grad;
  const std::vector<ValueId> wanted{r.value_of(grad)};
  const auto leaves = r.captured();
  const Tape tape = r.take();
  replay(tape, [&](ValueId v) { return leaves.at(v); }, wanted);
  EXPECT_EQ(leaves.at(wanted[0]).to_vector<float>(), grad.to_vector<float>());  // the copy was added to
}

// The same for addends that wait to be reduced: those of an earlier recording's micro-batches are leaves of this one, as they were before.
TEST(Backward, ReplaysWhatWasAddedToWhatWaited) {
  for (const std::string& strategy : kStrategies)
    for (const bool adds : {true, false})
      run_local(4, [&](World& w) {
        const Mesh mesh = w.mesh({{"data", 2}, {"replica", 2}});
        Net net;
        shard(net, mesh, {.axis = "data", .replica_axis = "replica", .units = nn::units_of<Layer>(), .strategy = strategy});
        materialize(net, Device::cpu(), {.seed = 8});
        const auto backward = [&](Recording& r) {
          r.backward(redistribute(sum(net(rows_of(mesh))), "replica", Placement::partial()), {.last_micro_batch = false});
        };
        {
          Recording before;
          backward(before);
        }
        Recording r({.capture_leaves = true});
        if (adds) backward(r);
        grad_norm(net);  // reduces what waits
        std::vector<ValueId> wanted;
        std::vector<std::vector<float>> gradients;
        for (const auto& unit : units(net))
          for (const FlatBuffer& b : unit->buffers())
            if (b.grad) wanted.push_back(r.value_of(b.grad)), gradients.push_back(b.grad.to_vector<float>());
        EXPECT_EQ(wanted.size(), 3u);
        const auto leaves = r.captured();
        const Tape tape = r.take();
        const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return leaves.at(v); }, wanted);
        for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(again[i].to_vector<float>(), gradients[i]) << strategy << ' ' << adds;
      }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
}

// d/dW of sum(f(W) · stop(f(W))) is f'(W) f(W), half of that without the stop; and a stopped parameter is gathered again where a backward
// needs its value.
TEST(Backward, StopsAtStopGradient) {
  const auto with_stop = [](Recording& r, Net& net, const Tensor& x) {
    const Tensor y = net(x), h = linear(x, net.layers[1].weight);
    const Tensor constant = transpose(stop_gradient(net.layers[0].weight), 0, 1);
    r.backward(sum(y * stop_gradient(y)) + sum(linear(h, constant)));
  };
  const auto without = [](Recording& r, Net& net, const Tensor& x) {
    const Tensor y = net(x);
    const Tensor w = full_of(Type{kF32, {kWidth, kWidth}, {}}, 0.0);
    r.backward(sum(y * y) * 0.5 + sum(linear(linear(x, net.layers[1].weight), w)));
  };
  for (const std::string& strategy : kStrategies)
    for (int world : {1, 2}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      const auto stopped = gradients(world, strategy, false, with_stop), half = gradients(world, strategy, false, without);
      expect_near({stopped[0], stopped[2]}, {half[0], half[2]});
      EXPECT_NE(stopped[1], half[1]);  // the stopped weight is not zero
    }
}

// A constant made of parameters may be watched, as samples that follow a model's own gradient are: what is asked for ends there, and
// what it was made of, perhaps in another micro-batch, keeps its own backward.
TEST(Backward, AWatchedConstantIsWhereGradientsEnd) {
  const auto half_square = [](const Tensor& y) { return sum(square(y) * 0.5); };  // whose gradient is y
  const auto with_watch = [&](bool micro_batches) {
    return [=](Recording& r, Net& net, const Tensor& in) {
      const Tensor x = r.watch(in), y = net(x), constant = r.watch(stop_gradient(y)), product = sum(y * constant);
      if (micro_batches) r.next_micro_batch(kRows);
      const Tensor other = half_square(net(x * 0.5)), energy = half_square(constant) + other;
      const auto gradient = [&](const Tensor& of, const Tensor& to) { return r.gradient(of, std::vector{to}, {.keep = true})[0].to_vector(); };
      EXPECT_EQ(gradient(energy, constant), constant.to_vector());
      EXPECT_EQ(gradient(energy, x), gradient(other, x));
      if (micro_batches) {
        r.backward(energy);
        r.backward(product);
      } else {
        r.backward(energy + product);
      }
    };
  };
  const auto without = [&](Recording& r, Net& net, const Tensor& x) { r.backward(half_square(net(x)) + half_square(net(x * 0.5))); };
  for (const std::string& strategy : kStrategies)
    for (int world : {1, 2})
      for (const bool micro_batches : {false, true}) {
        SCOPED_TRACE(str(strategy, " at ", world, micro_batches ? " in micro-batches" : ""));
        expect_near(gradients(world, strategy, false, with_watch(micro_batches)), gradients(world, strategy, false, without));
      }
}

// Values that a derivative reads must not have changed.
TEST(Backward, WhatWasSavedMayNotChangeInPlace) {
  run_local(1, [](World& w) {
    const auto change = [&](bool saved, auto&& how) {
      Net net(1);
      shard(net, data_mesh(w), {});
      materialize(net, Device::cpu(), {.seed = 1});
      return refusal([&] {
        Recording recording;
        const Tensor x = rows_of(data_mesh(w));
        store_into(x, full_like(x, 1));  // a change before the value is read is allowed
        const Tensor y = square(linear(x, net.layers[0].weight)), other = x * 2.0;
        how(saved ? x : other);
        recording.backward(redistribute(sum(y), "data", Placement::partial()));
      });
    };
    EXPECT_THAT(change(true, [](const Tensor& x) { store_into(x, full_like(x, 100)); }), HasSubstr("was changed in place between forward"));
    EXPECT_THAT(change(true, [](const Tensor& x) { add_into(x, full_like(x, 1)); }), HasSubstr("change a copy"));
    EXPECT_EQ(change(false, [](const Tensor& x) { store_into(x, full_like(x, 100)); }), "no exception") << "it is no one's";
  }, {.threads_per_rank = 1});
}

// Invalid sizes, and ambiguous axes.
TEST(Backward, SizesAndAxesThatCannotBe) {
  EXPECT_THROW(zeros({-1, 3}), ShapeError);
  EXPECT_THROW(randn({kF32, {-2}, {}}, Key{1}), ShapeError);
  EXPECT_THROW(zeros({int64_t{1} << 40, int64_t{1} << 40}), ShapeError);
  EXPECT_EQ(zeros({0, int64_t{1} << 40}).numel(), 0);
  EXPECT_THROW(split(zeros({4}), std::vector<int64_t>{-1, 5}), ShapeError);
  EXPECT_THROW(OwnershipMap::uneven(0, {5, -1}), PlacementError);
  run_local(4, [](World& w) {
    EXPECT_THROW(w.mesh({{"data", 2}, {"data", 2}}), ConfigError);
    EXPECT_THROW(w.mesh({{"", 4}}), ConfigError);
  }, {.threads_per_rank = 1});
}

// Read, but behind stop_gradient(): as if it had not been read.
TEST(Backward, AUnitThatTheLossDoesNotDependOnHasNoGradient) {
  for (const int ranks : {1, 2, 3})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::zero1, Strategy::replicate})
      run_local(ranks, [&](World& w) {
        const Mesh mesh = data_mesh(w);
        Net net(2);
        shard(net, mesh, {.units = nn::units_of<Layer>(), .strategy = strategy});
        materialize(net, Device::cpu(), {.seed = 3});
        optim::SGD sgd(net, {.lr = 0.1, .weight_decay = 0.5});
        const auto before = full_parameter(net.layers[1].weight).to_vector();
        const Tensor x = rows_of(mesh);
        {
          Recording recording;
          recording.backward(mean(square(net.layers[0](x) - stop_gradient(net.layers[1](x)))), {.last_micro_batch = true});
          sgd.step();
        }
        EXPECT_TRUE(full_gradient(net.layers[0].weight).defined());
        EXPECT_FALSE(full_gradient(net.layers[1].weight).defined());
        EXPECT_EQ(full_parameter(net.layers[1].weight).to_vector(), before);
      });
}

// Nor do micro-batches whose weight gradients come later, of which several have passed it by then.
TEST(Backward, AUnitThatNoMicroBatchDependsOnHasNoDeferredGradient) {
  run_local(2, [&](World& w) {
    const Mesh mesh = data_mesh(w);
    Net net(2);
    shard(net, mesh, {.units = nn::units_of<Layer>()});
    materialize(net, Device::cpu(), {.seed = 3});
    const Tensor x = rows_of(mesh);
    {
      Recording recording;
      for (int micro = 0; micro < 2; ++micro)
        recording.backward(mean(square(net.layers[0](x) - stop_gradient(net.layers[1](x)))), {.defer_weights = true});
      for (int micro = 0; micro < 2; ++micro) recording.backward_weights();
    }
    EXPECT_TRUE(full_gradient(net.layers[0].weight).defined());
    EXPECT_FALSE(full_gradient(net.layers[1].weight).defined());
  });
}

// One of two micro-batches depends on it.
TEST(Backward, AUnitHasTheGradientsOfTheMicroBatchesThatDependOnIt) {
  const auto gradient = [](int ranks, Strategy strategy, std::vector<bool> depends) {
    std::vector<float> out;
    run_local(ranks, [&](World& w) {
      const Mesh mesh = data_mesh(w);
      Net net(2);
      shard(net, mesh, {.units = nn::units_of<Layer>(), .strategy = strategy});
      materialize(net, Device::cpu(), {.seed = 3});
      const Tensor x = rows_of(mesh);
      {
        Recording recording;
        for (size_t m = 0; m < depends.size(); ++m) {
          const Tensor y = net.layers[1](x);
          recording.backward(mean(square(net.layers[0](x) - (depends[m] ? y : stop_gradient(y)))), {.last_micro_batch = m + 1 == depends.size()});
        }
      }
      const Tensor whole = full_gradient(net.layers[1].weight);
      if (w.rank() == 0) out = whole.to_vector();
    });
    return out;
  };
  const std::vector<float> want = gradient(1, Strategy::replicate, {true});
  for (const int ranks : {1, 2, 3})
    for (const Strategy strategy : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::zero1, Strategy::replicate})
      for (const std::vector<bool>& depends : {std::vector{true, false}, {false, true}, {false, true, false}}) {
        const std::vector<float> got = gradient(ranks, strategy, depends);
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-6) << ranks << ' ' << i;
      }
}

}  // namespace
}  // namespace sheaf
