// custom_vjp: the given derivative is the one that is used, for every way to shard, recomputed, compiled and differentiated again; only
// what it asks for is saved; a gradient that would be lost is an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/gradcheck.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 7, kWidth = 6;

Values draw(const Shape& shape, const std::string& stream) {
  Generator generator(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = generator.uniform(-1, 1);
  return v;
}

Tensor drawn(const Shape& shape, const std::string& stream) { return make_tensor(draw(shape, stream), shape, kF64); }

/// Two inputs, two outputs, and their true derivative.
std::vector<Tensor> waves(const Tensor& x, const Tensor& y) {
  return custom_vjp([](const Tensor& a, const Tensor& b) { return std::vector{sin(a) * b, exp(b)}; },
                    [](Vjp& c) {
                      const Tensor &a = c.input(0), &b = c.input(1);
                      Tensor da, db;
                      if (c.has_grad(0)) da = c.grad(0) * (cos(a) * b), db = c.grad(0) * sin(a);
                      if (c.has_grad(1)) db = db ? db + c.grad(1) * c.output(1) : c.grad(1) * c.output(1);
                      if (da) c.set(0, da);
                      if (db) c.set(1, db);
                    },
                    x, y);
}

Tensor rounded(const Tensor& x) {
  return custom_vjp([](const Tensor& v) { return sign(v) * 0.5 + 0.25; }, [](Vjp& c) { c.set(0, c.grad()); },
                    {.saved_inputs = 0, .saved_outputs = 0}, x);
}

TEST(CustomVjp, HasTheDerivativeThatIsGiven) {
  const std::vector<Tensor> x = {drawn({3, 4}, "x"), drawn({3, 4}, "y")};
  const auto both = [](Recording&, const std::vector<Tensor>& in) {
    const std::vector<Tensor> out = waves(in[0], in[1]);
    return sum(out[0] * out[1]) + sum(square(out[0]));
  };
  EXPECT_EQ(gradcheck(both, x), "");
  EXPECT_EQ(gradgradcheck(both, x), "") << "it is differentiated again";
  for (int o : {0, 1}) {
    const auto one = [o](Recording&, const std::vector<Tensor>& in) { return sum(square(waves(in[0], in[1])[static_cast<size_t>(o)])); };
    EXPECT_EQ(gradcheck(one, x), "") << "output " << o << " alone";
  }
  // Not the derivative that the tape would derive, which is 0.
  Recording recording;
  recording.watch(x[0]);
  const Tensor y = rounded(x[0]);
  EXPECT_TRUE(identical(y, sign(x[0]) * 0.5 + 0.25));
  const Tensor g = recording.gradient(sum(y * x[1]), std::span(x.data(), 1))[0];
  EXPECT_TRUE(identical(g, x[1]));
}

TEST(CustomVjp, IsTheFunctionAloneWhereNothingHasAGradient) {
  const Tensor x = drawn({3, 4}, "x");
  const auto fails = [](Vjp&) { FAIL(); };
  const auto f = [](const Tensor& v) { return square(v); };
  EXPECT_TRUE(identical(custom_vjp(f, fails, x), square(x)));
  Recording recording;
  EXPECT_TRUE(identical(custom_vjp(f, fails, x), square(x)));
  EXPECT_EQ(recording.tape().num_nodes(), 3) << "x and the two squares";
}

TEST(CustomVjp, CallsNobodyForWhatLeadsNowhere) {
  const Tensor x = drawn({3, 4}, "x");
  int calls = 0;
  Recording recording;
  recording.watch(x);
  const Tensor y = custom_vjp([](const Tensor& v) { return square(v); }, [&](Vjp&) { ++calls; }, x);
  const Tensor g = recording.gradient(sum(x * 2.0), std::span(&x, 1))[0];
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(g.to_vector<double>(), Values(12, 2.0));
  // A derivative that sets no gradient gives zeros.
  EXPECT_EQ(recording.gradient(sum(y), std::span(&x, 1))[0].to_vector<double>(), Values(12, 0.0));
  EXPECT_EQ(calls, 1);
}

// A layer with a hand-written derivative. For a gated linear layer the tape would keep both products and the gate; this one keeps its
// operands and recomputes them in one go.
struct Gated : nn::Module {
  nn::Parameter gate{{kWidth, kWidth}, nn::Init::normal(0.4)}, up{{kWidth, kWidth}, nn::Init::normal(0.4)};
  bool own;
  explicit Gated(bool own_derivative) : own(own_derivative) {}
  static Tensor compute(const Tensor& x, const Tensor& g, const Tensor& u) { return tanh(linear(x, g)) * linear(x, u); }
  static void derive(Vjp& c) {
    const Tensor x = c.input(0), g = c.input(1), u = c.input(2);
    const Tensor gated = tanh(linear(x, g)), value = linear(x, u);
    const Tensor d_gate = c.grad() * value * (1.0 - square(gated)), d_value = c.grad() * gated;
    if (c.needs(0)) c.set(0, matmul(d_gate, g) + matmul(d_value, u));
    c.set(1, matmul(transpose(d_gate, 0, 1), x));
    c.set(2, matmul(transpose(d_value, 0, 1), x));
  }
  Tensor forward(const Tensor& x) {
    return own ? custom_vjp(compute, derive, {.saved_outputs = 0}, x, gate, up) : compute(x, gate, up);
  }
  SHEAF_FIELDS(gate, up);
};

struct Net : nn::Module {
  std::vector<Gated> layers;
  nn::Parameter table{{kWidth, kWidth}, nn::Init::normal(0.5)};
  explicit Net(bool own) {
    for (int i = 0; i < 3; ++i) layers.emplace_back(own);
  }
  Tensor forward(Tensor x) {
    x = linear(x, table);
    for (Gated& layer : layers) x = x + layer(x);
    // Fake quantization of a gathered weight: a straight-through estimator for a parameter.
    return linear(x, rounded(table));
  }
  SHEAF_FIELDS(layers, table);
};

struct Case {
  Strategy strategy = Strategy::full_shard;
  bool own = true, recompute = false, compiled = false;
  int64_t prefetch = 0;
};

struct Outcome {
  std::vector<Values> parameters;  // after five steps, whole
  std::string findings;
};

Outcome train(int ranks, const Case& c) {
  Outcome out;
  run_local(ranks, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", ranks}});
    Net net(c.own);
    shard(net, mesh, {.units = nn::units_of<Gated>(), .strategy = c.strategy, .prefetch_bytes = c.prefetch});
    materialize(net, Device::cpu(), {.seed = 3, .dtype = kF64});
    optim::SGD optimizer(net, {.momentum = 0.9});
    const Tensor x = make_local(draw({kRows, kWidth}, "x"), {kF64, {kRows, kWidth}, Layout(mesh.spec, Placement::shard(0))}, "");
    const auto code = [&](const Tensor& rows, const Tensor& scalars) {
      Tensor loss;
      {
        std::optional<RecomputeScope> scope;
        if (c.recompute) scope.emplace();
        loss = mean(square(net(rows)));
      }
      Recording::current()->backward(loss, {.last_micro_batch = true});
      optimizer.step({.scalars = scalars});
      optimizer.zero_grad();
      return std::vector<Tensor>{loss};
    };
    const auto scalars = [&] {
      const std::vector<double> values = optimizer.next_scalars({.lr = 0.1});
      return Tensor::from(values, {static_cast<int64_t>(values.size())});
    };
    auto step = compile(code);
    for (int i = 0; i < 5; ++i) {
      if (c.compiled) {
        step({.step = i}, x, scalars());
        continue;
      }
      Recording recording({.step = i});
      code(x, scalars());
      const Tape tape = recording.take();
      for (const Finding& f : check_tape(tape)) out.findings += f.to_string() + "\n";
    }
    for (const nn::Parameter& p : net.parameters()) {
      const Values v = full_parameter(p).to_vector<double>();
      if (world.rank() == 0) out.parameters.push_back(v);
    }
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
  return out;
}

void expect_close(const std::vector<Values>& got, const std::vector<Values>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) EXPECT_LE(scaled_error(got[i], want[i]), 1e-12) << what << ", parameter " << i;
}

class CustomVjpTraining : public ::testing::TestWithParam<int> {};

TEST_P(CustomVjpTraining, IsTheDerivedOneUnderEveryWayToShard) {
  const Outcome one = train(1, {.own = false});
  ASSERT_EQ(one.parameters.size(), 7u);
  for (const Strategy s : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::zero1, Strategy::replicate})
    for (const int64_t prefetch : {int64_t{0}, int64_t{1} << 20}) {
      const Outcome many = train(GetParam(), {.strategy = s, .prefetch = prefetch});
      expect_close(many.parameters, one.parameters, str(name(s), " prefetch ", prefetch));
      EXPECT_EQ(many.findings, "");
    }
}

TEST_P(CustomVjpTraining, KeepsItsBitsRecomputedAndCompiled) {
  const Outcome plain = train(GetParam(), {});
  const Outcome again = train(GetParam(), {.recompute = true});
  EXPECT_EQ(again.parameters, plain.parameters);
  EXPECT_EQ(again.findings, "");
  EXPECT_EQ(train(GetParam(), {.compiled = true}).parameters, plain.parameters);
  EXPECT_EQ(train(GetParam(), {.recompute = true, .compiled = true}).parameters, plain.parameters);
}

INSTANTIATE_TEST_SUITE_P(Worlds, CustomVjpTraining, ::testing::Range(1, 6));

// Bytes that are live after a forward with wide intermediate values.
int64_t kept_by(const std::function<Tensor(const Tensor&)>& f) {
  int64_t bytes = 0;
  run_local(1, [&](World&) {
    const Tensor x = full({1024}, 0.5, kF32);
    Recording recording;
    recording.watch(x);
    const int64_t before = RankContext::current().cpu->stats().live;
    const Tensor y = f(x);
    bytes = RankContext::current().cpu->stats().live - before;
    EXPECT_TRUE(recording.gradient(sum(y), std::span(&x, 1))[0].defined());
  }, {.threads_per_rank = 1});
  return bytes;
}

TEST(CustomVjp, KeepsWhatItAsksForAlone) {
  const auto wide = [](const Tensor& x) { return tanh(exp(sin(x)) * sin(x)); };
  const auto derivative = [](Vjp& c) { c.set(0, c.grad() * cos(c.input(0))); };
  constexpr int64_t kBytes = 1024 * 4;
  EXPECT_EQ(kept_by(wide), 3 * kBytes) << "by the tape's own derivative";
  EXPECT_EQ(kept_by([&](const Tensor& x) { return custom_vjp(wide, derivative, x); }), kBytes) << "the result";
  // A result that nobody uses any more is kept only if the derivative reads it.
  const auto used = [&](uint64_t outputs) {
    return kept_by([&](const Tensor& x) {
      return custom_vjp(wide, [](Vjp& c) { c.set(0, c.grad()); }, {.saved_outputs = outputs}, x) + 1.0;
    });
  };
  EXPECT_EQ(used(0), kBytes);
  EXPECT_EQ(used(1), 2 * kBytes);
}

TEST(CustomVjp, GivesGradientsToPlacedValues) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const auto make = [&](const Placement& p) { return make_local(draw({4, 3}, "x"), {kF64, {4, 3}, Layout(mesh, p)}, ""); };
    for (const Placement& p : {Placement::shard(0), Placement::shard(1), Placement::replicate(), Placement::partial()}) {
      const Tensor x = make(p);
      Recording recording;
      recording.watch(x);
      const Tensor y = custom_vjp([](const Tensor& v) { return 2.0 * v; }, [](Vjp& c) { c.set(0, c.grad() * 2.0); }, x);
      EXPECT_EQ(y.type(), x.type());
      const Tensor loss = p.is_replicate() ? redistribute(sum(y), "data", Placement::partial()) : sum(y);
      EXPECT_EQ(recording.gradient(loss, std::span(&x, 1))[0].layout()[0], p.dual()) << str(p);
    }
    // A gradient in another placement is refused; the message has the layer's path.
    const std::string layer = "blocks.3.act";
    const PathScope path(layer);
    const Tensor x = make(Placement::shard(0));
    Recording recording;
    recording.watch(x);
    const Tensor y = custom_vjp([](const Tensor& v) { return 2.0 * v; }, [](Vjp& c) { c.set(0, sum(c.grad(), 0)); }, x);
    const std::string refused =
        message_of<PlacementError>(ExitCode::kConfig, [&] { recording.gradient(sum(y), std::span(&x, 1)); });
    EXPECT_THAT(refused, HasSubstr("[custom_vjp] blocks.3.act"));
    EXPECT_THAT(refused, HasSubstr("is not the dual of its value f64[4,3] Shard(0)@data"));
  }, {.threads_per_rank = 1});
}

TEST(CustomVjpErrors, SayWhatWouldBeLost) {
  const Tensor x = drawn({3, 4}, "x"), w = drawn({3, 4}, "w");
  const auto passes = [](Vjp& c) { c.set(0, c.grad()); };
  Recording recording;
  recording.watch(x);
  recording.watch(w);
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { custom_vjp([&](const Tensor& v) { return v * w; }, passes, x); }),
              HasSubstr("[custom_vjp] root: the result f64[3,4] depends on a value with a gradient that is not among its inputs"));
  EXPECT_NO_THROW(custom_vjp([&](const Tensor& v) { return v * stop_gradient(w); }, passes, x));
  EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { custom_vjp([](const Tensor&) { return std::vector<Tensor>{}; }, passes, x); }),
              HasSubstr("1 inputs and 0 outputs"));
  const Tensor y = custom_vjp([](const Tensor& v) { return square(v); }, [](Vjp& c) { c.set(0, c.grad() * c.output(0)); },
                              {.saved_outputs = 0}, x);
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.gradient(sum(y), std::span(&x, 1)); }),
              HasSubstr("or its derivative reads what it does not save"));
}

}  // namespace
}  // namespace sheaf::testing
