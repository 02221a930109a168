#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "sheaf/autograd/compile.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/ema.h"
#include "sheaf/nn/optim/muon.h"
#include "sheaf/nn/optim/schedule.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/nn/unsharded.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::for_each_sharding;
using testing::TinyBlock;
using testing::TinyModel;

Mesh data_mesh(World& w) { return w.mesh({{"data", w.size()}}); }

void backward(TinyModel& m, const Mesh& mesh, int64_t rows = 6) {
  Recording recording;
  recording.backward(m.loss(testing::token_rows(mesh, rows, 4, 11), testing::token_rows(mesh, rows, 4, 11, 1)));
}

std::map<std::string, std::vector<float>> values(nn::Module& m) {
  std::map<std::string, std::vector<float>> out;
  for (const nn::Parameter& p : m.parameters()) out[p.name()] = full_parameter(p).to_vector<float>();
  return out;
}

// For parameters of one unit: tables get 2.5 times the learning rate, vectors a quarter, and vectors a small decay.
double lr_factor(const nn::Parameter& p) { return p.table() ? 2.5 : p.shape().rank() >= 2 ? 1.0 : 0.25; }
double decay_factor(const nn::Parameter& p) { return p.shape().rank() >= 2 ? 1.0 : 0.125; }
const optim::Factors kFactors = {lr_factor, decay_factor};

TEST(AdamW, AgreesWithTheFormula) {
  for (DType dtype : {kF64, kF32}) {
    TinyModel m;
    m.blocks[0].up.bias.freeze();
    shard(m, Mesh{}, {.units = nn::units_of<TinyBlock>()});
    materialize(m, Device::cpu(), {.seed = 9, .dtype = dtype});
    const double lr = 0.01, beta1 = 0.8, beta2 = 0.95, eps = 1e-6, decay = 0.3, max_norm = 0.05;
    optim::AdamW adam(m, {.beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = decay, .factors = kFactors});
    std::map<std::string, std::vector<double>> p, m1, v;
    for (const nn::Parameter& q : m.parameters()) {
      p[q.name()] = full_parameter(q).to_vector<double>();
      m1[q.name()] = v[q.name()] = std::vector<double>(q.numel(), 0.0);
    }
    for (int step = 1; step <= 5; ++step) {
      backward(m, {});
      double squares = 0;
      for (const nn::Parameter& q : m.parameters())
        if (q.trainable())
          for (double g : full_gradient(q).to_vector<double>()) squares += g * g;
      const double norm = std::sqrt(squares), scale = std::min(1.0, max_norm / (norm + 1e-6));
      for (const nn::Parameter& q : m.parameters()) {
        if (!q.trainable()) continue;
        const auto g = full_gradient(q).to_vector<double>();
        for (size_t i = 0; i < g.size(); ++i) {
          double &x = p[q.name()][i], &a = m1[q.name()][i], &b = v[q.name()][i];
          a = beta1 * a + (1 - beta1) * scale * g[i];
          b = beta2 * b + (1 - beta2) * scale * g[i] * scale * g[i];
          const double rate = lr * lr_factor(q);
          x -= rate * decay * decay_factor(q) * x;
          x -= rate * (a / (1 - std::pow(beta1, step))) / (std::sqrt(b / (1 - std::pow(beta2, step))) + eps);
        }
      }
      EXPECT_NEAR(clip_grad_norm(m, max_norm).item<double>(), norm, 1e-6 * norm);
      EXPECT_LT(scale, 1.0);
      adam.step({.lr = lr});
      adam.zero_grad();
    }
    EXPECT_EQ(adam.steps(), 5);
    const double tolerance = dtype == kF64 ? 1e-13 : 2e-6;
    for (const nn::Parameter& q : m.parameters()) {
      const auto actual = full_parameter(q).to_vector<double>();
      for (size_t i = 0; i < actual.size(); ++i)
        EXPECT_NEAR(actual[i], p[q.name()][i], tolerance) << q.name() << " " << i;
    }
  }
}

TEST(SGD, AgreesWithTheFormula) {
  for (const bool nesterov : {false, true}) {
    TinyModel m;
    materialize(m, Device::cpu(), {.seed = 9, .dtype = kF64});
    const double lr = 0.1, momentum = 0.9, decay = 0.01;
    optim::SGD sgd(m.parameters(), {.lr = lr, .momentum = momentum, .nesterov = nesterov, .weight_decay = decay, .factors = kFactors});
    std::map<std::string, std::vector<double>> p, buffer;
    for (const nn::Parameter& q : m.parameters()) {
      p[q.name()] = full_parameter(q).to_vector<double>();
      buffer[q.name()].assign(q.numel(), 0.0);
    }
    for (int step = 0; step < 4; ++step) {
      backward(m, {});
      for (const nn::Parameter& q : m.parameters()) {
        const auto grad = full_gradient(q).to_vector<double>();
        for (size_t i = 0; i < grad.size(); ++i) {
          double &x = p[q.name()][i], &b = buffer[q.name()][i];
          const double g = grad[i] + decay * decay_factor(q) * x;
          b = momentum * b + g;
          x -= lr * lr_factor(q) * (nesterov ? g + momentum * b : b);
        }
      }
      sgd.step();
      sgd.zero_grad();
    }
    for (const nn::Parameter& q : m.parameters()) {
      const auto actual = full_parameter(q).to_vector<double>();
      for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], p[q.name()][i], 1e-13) << q.name() << " " << i;
    }
  }
}

// Values and norms after `steps` clipped AdamW steps.
struct Outcome {
  std::map<std::string, std::vector<float>> values;
  std::vector<double> norms;
  bool operator==(const Outcome&) const = default;
};

Outcome train(World& w, Strategy s, const nn::UnitPolicy& policy, int steps, int64_t prefetch = -1,
              std::optional<DType> state = std::nullopt) {
  TinyModel m(3);
  const Mesh mesh = s == Strategy::none ? Mesh{} : data_mesh(w);
  shard(m, mesh, {.units = policy, .strategy = s, .prefetch_bytes = prefetch});
  materialize(m, Device::cpu(), {.seed = 21});
  optim::AdamW adam(m, {.weight_decay = 0.1, .factors = kFactors, .state = {.dtype = state}});
  for (const optim::ShardState& shard : adam.shards())
    for (const Tensor& t : shard.state) EXPECT_EQ(t.dtype(), state.value_or(kF32));
  Outcome run;
  for (int step = 0; step < steps; ++step) {
    backward(m, mesh);
    run.norms.push_back(clip_grad_norm(m, 0.1).item<double>());
    adam.step({.lr = optim::cosine(step, {.peak = 0.01, .warmup = 2, .total = steps})});
    adam.zero_grad();
  }
  run.values = values(m);
  return run;
}

// State in bf16 is rounded stochastically, with the same noise wherever an element is stored.
TEST(Training, BitsDoNotDependOnStrategyUnitsOrPrefetch) {
  for (const std::optional<DType> state : {std::optional<DType>(), std::optional(kBF16)})
    for (int world : {1, 2, 3}) {
      Outcome expected;
      bool first = true;
      const auto check = [&](Strategy s, const nn::UnitPolicy& policy, int64_t prefetch, const char* what) {
        run_local(world, [&](World& w) {
          const Outcome run = train(w, s, policy, 20, prefetch, state);
          if (w.rank() != 0) return;
          if (first) expected = run;
          first = false;
          EXPECT_TRUE(run == expected) << what << " at world " << world;
        }, {.threads_per_rank = 1});
      };
      for_each_sharding(world, check);
    }
}

TEST(Factors, OfTheLearningRateMayBeZero) {
  TinyModel m;
  materialize(m);
  optim::AdamW adam(m, {.lr = 0.1, .factors = {.lr = [](const nn::Parameter& p) { return p.table() ? 0 : 1; }}});
  const auto before = values(m);
  backward(m, {}), adam.step(), adam.zero_grad();
  for (const auto& [name, now] : values(m)) EXPECT_EQ(now == before.at(name), name == "table.weight") << name;
}

TEST(Factors, AreFiniteAndAtLeastZero) {
  TinyModel m;
  materialize(m);
  for (const double bad : {-0.5, double{NAN}, double{INFINITY}}) {
    const auto only_norm = [&](double other) {
      return [&, other](const nn::Parameter& p) { return p.name() == "norm.weight" ? bad : other; };
    };
    EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::SGD(m, {.factors = {.lr = only_norm(1)}}); }),
                HasSubstr(str("[sgd] parameter 'norm.weight': the factor of its learning rate is ", bad)));
    EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::Muon(m, {.adamw = {.factors = {.weight_decay = only_norm(0)}}}); }),
                HasSubstr(str("[muon] parameter 'norm.weight': the factor of its weight decay is ", bad)));
  }
}

// ... for which a step is told its number.
TEST(Optimizer, StepsAreNumbered) {
  TinyModel m;
  materialize(m);
  using namespace kernels::cpu;
  const auto expect_third = [&](optim::Optimizer&& o, std::vector<size_t> at) {
    for (int step = 0; step < 2; ++step) backward(m, Mesh{}), o.step({.lr = 1e-3}), o.zero_grad();
    for (const size_t i : at) EXPECT_EQ(o.next_scalars()[i], 3) << i;
  };
  expect_third(optim::AdamW(m), {kStep});
  expect_third(optim::SGD(m, {.momentum = 0.9}), {kSgdStep});
  expect_third(optim::Muon(m), {kStep, kAdamWScalars + int{kSgdStep}});
}

TEST(Optimizer, StateHasAWidthThatItCanRestIn) {
  TinyModel m, wide;
  materialize(m);
  materialize(wide, Device::cpu(), {.dtype = kF64});
  const auto refused = [](auto&& make) { return message_of<DTypeError>(ExitCode::kConfig, make); };
  EXPECT_THAT(refused([&] { optim::AdamW(m, {.state = {.dtype = kF16}}); }), HasSubstr("state in f16 for masters in f32"));
  EXPECT_THAT(refused([&] { optim::SGD(wide, {.momentum = 0.9, .state = {.dtype = kBF16}}); }), HasSubstr("state in bf16 for masters in f64"));
  EXPECT_THAT(refused([&] { optim::Muon(m, {.state = {.dtype = kF64}}); }), HasSubstr("state in f64 for masters in f32"));
}

// Gradients without any computation: values that depend only on name and index.
void set_gradients(TinyModel& m) {
  for (const auto& unit : units(m))
    for (FlatBuffer& b : unit->buffers()) {
      b.grad = full_like(b.shard, 0.0);
      for (const LocalPiece& piece : unit->pieces(b))
        for (int64_t i = 0; i < piece.runs.numel(); ++i) {
          const auto h = static_cast<double>(
              random_u32(key_of(unit->leaves()[piece.leaf].name, 1), piece.runs.at(i)));
          b.grad.view().as<float>()[piece.shard_offset + i] = static_cast<float>(std::ldexp(h - 2e9, -30));
        }
    }
}

TEST(ClipGradNorm, BitsDoNotDependOnWorldStrategyOrUnits) {
  double expected = 0;
  for (int world = 1; world <= 5; ++world)
    for (Strategy s : {Strategy::replicate, Strategy::shard_grad_op, Strategy::full_shard})
      for (const bool one_unit : {false, true})
        run_local(world, [&](World& w) {
          TinyModel m(3, 50, 13);
          shard(m, data_mesh(w), {.units = one_unit ? nn::UnitPolicy() : nn::units_of<TinyBlock>(), .strategy = s});
          materialize(m);
          set_gradients(m);
          const Tensor norm = clip_grad_norm(m.parameters(), 1.0);
          EXPECT_TRUE(norm.layout().all_invariant());
          EXPECT_EQ(norm.item<double>(), grad_norm(m).item<double>());
          if (w.rank() != 0) return;
          if (expected == 0) expected = norm.item<double>();
          EXPECT_EQ(norm.item<double>(), expected) << world << " " << name(s) << " " << one_unit;
        }, {.threads_per_rank = 1});
  EXPECT_GT(expected, 1.0);
}

TEST(ClipGradNorm, MixedStrategiesCountEveryGradientOnce) {
  double norm[2];
  for (const bool mixed : {false, true})
    run_local(3, [&](World& w) {
      TinyModel m(3, 50, 13);
      if (mixed) shard(m.blocks[1], data_mesh(w), {.strategy = Strategy::replicate});
      shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>()});
      materialize(m);
      set_gradients(m);
      const double n = clip_grad_norm(m, 1.0).item<double>();
      if (w.rank() == 0) norm[mixed] = n;
    });
  EXPECT_EQ(norm[0], norm[1]);
}

// The sums of gradients that lie on ranks in different ways are reduced one by one, then added: here in four ways.
TEST(ClipGradNorm, CountsGradientsOfAllPlacements) {
  double norm[2];
  for (const bool cut : {false, true})
    run_local(4, [&](World& w) {
      TinyModel m(3, 50, 12);
      if (cut)
        for (TinyBlock& block : m.blocks) {
          block.up.weight.set_cut(OwnershipMap::even(0)), block.up.bias.set_cut(OwnershipMap::even(0));
          block.down.weight.set_cut(OwnershipMap::even(1));
        }
      const Mesh mesh = w.mesh({{"data", 2}, {"model", 2}});
      shard(m.blocks[1], mesh, {.tensor_axis = "model", .strategy = Strategy::replicate});
      shard(m, mesh, {.tensor_axis = "model", .units = nn::units_of<TinyBlock>()});
      materialize(m);
      set_gradients(m);
      const double n = clip_grad_norm(m, 1.0).item<double>();
      if (w.rank() == 0) norm[cut] = n;
    });
  EXPECT_EQ(norm[0], norm[1]);
}

TEST(ClipGradNorm, RefusesWhatItCannotMean) {
  TinyModel m;
  materialize(m);
  EXPECT_THROW(clip_grad_norm(m, 1.0), LifetimeError);  // no gradients
  EXPECT_THROW(clip_grad_norm(m, 0.0), ConfigError);
  const auto some = std::vector<nn::Parameter>{m.table.weight};
  EXPECT_THROW(clip_grad_norm(some, 1.0), ConfigError);  // part of a unit
  EXPECT_THROW(optim::AdamW{some}, ConfigError);
  TinyModel unmade;
  EXPECT_THROW(optim::AdamW{unmade}, LifetimeError);
}

TEST(ClipGradNorm, ScaleEndsWithItsGradient) {
  TinyModel m;
  materialize(m);
  backward(m, {});
  clip_grad_norm(m, 1e-3);
  EXPECT_LT(units(m)[0]->buffers()[0].grad_scale.item<double>(), 1.0);
  backward(m, {});  // accumulates: the scale applied to the previous gradient
  EXPECT_FALSE(units(m)[0]->buffers()[0].grad_scale.defined());
}

TEST(Optimizer, StepIsRecordedAndReplays) {
  TinyModel m;
  shard(m, Mesh{}, {.units = nn::units_of<TinyBlock>()});
  materialize(m, Device::cpu(), {.seed = 1});
  optim::AdamW adam(m);
  std::unordered_map<ValueId, Tensor> before;
  Tape tape;
  {
    Recording recording({.capture_leaves = true});
    recording.backward(m.loss(testing::token_rows({}, 6, 4, 11), testing::token_rows({}, 6, 4, 11, 1)));
    clip_grad_norm(m, 0.1);
    adam.step({.lr = 0.01});
    before = recording.captured();
    tape = recording.take();
  }
  int steps = 0;
  std::vector<ValueId> updated;
  for (NodeId i = 0; i < tape.num_nodes(); ++i) {
    const Node& n = tape.node(i);
    if (tape.kind(n) != OpKind::step) continue;
    ++steps;
    EXPECT_EQ(n.phase, Phase::update);
    updated.push_back(tape.output(n));
  }
  EXPECT_EQ(steps, 3);
  const auto again = replay(tape, [&](ValueId v) { return before.at(v).clone(); }, updated);
  const auto all = units(m);
  for (size_t u = 0; u < all.size(); ++u)
    EXPECT_EQ(again[u].to_vector<float>(), all[u]->buffers()[0].shard.to_vector<float>()) << all[u]->name();
}

TEST(Optimizer, WhatWasGatheredBeforeAStepIsNotUsedAfterIt) {
  run_local(2, [](World& w) {
    TinyModel m;
    shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>()});
    materialize(m, Device::cpu(), {.seed = 1});
    m(testing::token_rows(data_mesh(w), 4, 3, 11));  // leaves the root and the last block gathered
    EXPECT_GT(gather_schedule(m).gathered_bytes(), 0);
    set_gradients(m);
    optim::SGD(m, {.lr = 1.0}).step();
    EXPECT_EQ(m.table.weight.value().to_vector<float>(), full_parameter(m.table.weight).to_vector<float>());
    EXPECT_EQ(m.blocks[1].up.weight.value().to_vector<float>(),
              full_parameter(m.blocks[1].up.weight).to_vector<float>());
  });
}

// Nor after its values were set, as a checkpoint's are.
TEST(Optimizer, WhatWasGatheredBeforeValuesWereSetIsNotUsedAfterIt) {
  for (const Strategy s : {Strategy::full_shard, Strategy::zero1, Strategy::replicate})
    run_local(2, [&](World& w) {
      TinyModel m;
      shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>(), .strategy = s, .compute_dtype = kBF16});
      materialize(m, Device::cpu(), {.seed = 1});
      m(testing::token_rows(data_mesh(w), 4, 3, 11));  // leaves the root and the last block gathered
      for (const nn::StatePiece& p : nn::state_pieces(m)) std::fill_n(static_cast<float*>(p.data), p.runs.numel(), 0.5f);
      EXPECT_EQ(cast(m.table.weight.value(), kF32).to_vector<float>(), std::vector<float>(11 * 7, 0.5f)) << name(s);
      EXPECT_EQ(cast(m.blocks[1].up.bias.value(), kF32).to_vector<float>(), std::vector<float>(21, 0.5f)) << name(s);
    });
}

TEST(Optimizer, StatePiecesResumeBitwise) {
  run_local(2, [](World& w) {
    const auto make = [&](TinyModel& m) {
      shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>()});
      materialize(m, Device::cpu(), {.seed = 21});
    };
    TinyModel a, b;
    make(a), make(b);
    optim::AdamW adam_a(a), adam_b(b);
    const auto steps = [&](TinyModel& m, optim::AdamW& adam, int n) {
      for (int i = 0; i < n; ++i) {
        backward(m, data_mesh(w));
        adam.step({.lr = 0.01});
        adam.zero_grad();
      }
    };
    steps(a, adam_a, 3);
    const auto copy = [](const std::vector<nn::StatePiece>& from, const std::vector<nn::StatePiece>& to) {
      ASSERT_EQ(from.size(), to.size());
      for (size_t i = 0; i < from.size(); ++i) {
        EXPECT_EQ(from[i].name, to[i].name);
        if (from[i].runs.numel())
          std::memcpy(to[i].data, from[i].data, from[i].runs.numel() * size_of(from[i].dtype));
      }
    };
    copy(nn::state_pieces(a), nn::state_pieces(b));
    copy(nn::state_pieces(adam_a), nn::state_pieces(adam_b));
    EXPECT_EQ(nn::state_pieces(adam_a)[0].name, "optimizer.m.table.weight");
    adam_b.set_steps(adam_a.steps());
    steps(a, adam_a, 3);
    steps(b, adam_b, 3);
    EXPECT_EQ(values(a), values(b));
  });
}

TEST(Schedule, WarmUpAndDecay) {
  const optim::ScheduleOptions o{.peak = 1.0, .minimum = 0.1, .warmup = 9, .total = 109};
  EXPECT_DOUBLE_EQ(optim::cosine(0, o), 0.1);
  EXPECT_DOUBLE_EQ(optim::linear(8, o), 0.9);
  EXPECT_DOUBLE_EQ(optim::cosine(9, o), 1.0);
  EXPECT_DOUBLE_EQ(optim::cosine(59, o), 0.55);
  EXPECT_DOUBLE_EQ(optim::linear(34, o), 1.0 - 0.25 * 0.9);
  for (auto f : {optim::cosine, optim::linear}) EXPECT_DOUBLE_EQ(f(1000, o), 0.1);
  EXPECT_DOUBLE_EQ(optim::constant(1000, o), 1.0);
}

// nanoGPT's get_lr(), where `total` is lr_decay_iters: https://github.com/karpathy/nanoGPT/blob/master/train.py.
TEST(Schedule, CosineIsNanoGpts) {
  const optim::ScheduleOptions o{.peak = 6e-4, .minimum = 6e-5, .warmup = 20, .total = 300};
  for (int step = 0; step < 400; ++step) {
    double lr = 6e-5;
    if (step < 20) lr = 6e-4 * (step + 1) / 21;
    else if (step <= 300) lr += 0.5 * (1.0 + std::cos(M_PI * (step - 20) / 280)) * (6e-4 - 6e-5);
    EXPECT_DOUBLE_EQ(optim::cosine(step, o), lr) << step;
  }
}

// Hägele et al., https://arxiv.org/abs/2405.18392, section 3: constant up to N - N_decay, then a linear cooldown.
TEST(Schedule, DecayMayStartAfterTheWarmUp) {
  const optim::ScheduleOptions o{.peak = 1.0, .minimum = 0.0, .warmup = 9, .decay_start = 80, .total = 100};
  for (int step = 0; step < 120; ++step) {
    const double lr = step < 9 ? (step + 1) / 10.0 : step < 80 ? 1.0 : step < 100 ? 1.0 - (step - 80) / 20.0 : 0.0;
    EXPECT_DOUBLE_EQ(optim::linear(step, o), lr) << step;
  }
  EXPECT_DOUBLE_EQ(optim::cosine(79, o), 1.0);
  EXPECT_DOUBLE_EQ(optim::cosine(90, o), 0.5);
  // The warm-up is completed first.
  EXPECT_DOUBLE_EQ(optim::linear(30, {.peak = 1.0, .warmup = 20, .decay_start = 5, .total = 40}), 0.5);
  EXPECT_DOUBLE_EQ(optim::linear(50, {.peak = 1.0, .decay_start = 60, .total = 60}), 1.0);
  EXPECT_DOUBLE_EQ(optim::linear(60, {.peak = 1.0, .minimum = 0.25, .decay_start = 60, .total = 60}), 0.25);
  EXPECT_DOUBLE_EQ(optim::cosine(7, {.peak = 1.0, .minimum = 0.25, .warmup = 7, .total = 7}), 0.25);
}

// Against its formula after each step; training is unaffected by it, and forwards with it use the average.
TEST(Ema, FollowsTheParametersOnTheirShards) {
  std::map<std::string, std::vector<float>> one;
  for (const int ranks : {1, 2, 3})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) run_local(ranks, [&](World& w) {
      const Mesh mesh = data_mesh(w);
      TinyModel model(2);
      model.blocks[1].up.weight.freeze();
      shard(model, mesh, {.units = nn::units_of<TinyBlock>(), .strategy = strategy});
      materialize(model, w.device(), {.seed = 3});
      TinyModel average = nn::clone(model, 2);
      optim::AdamW optimizer(model, {.lr = 0.05});
      optim::Ema ema(model, average, 0.75);
      auto expected = values(model);
      for (int step = 0; step < 3; ++step) {
        backward(model, mesh);
        optimizer.step();
        optimizer.zero_grad();
        ema.update();
        const auto now = values(model);
        for (auto& [name, x] : expected)
          for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * 0.75f + now.at(name)[i] * 0.25f;
        for (const auto& [name, x] : values(average))
          for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], expected.at(name)[i], 1e-6) << name;
      }
      EXPECT_NE(values(average), values(model));
      EXPECT_EQ(values(average).at("blocks.1.up.weight"), values(model).at("blocks.1.up.weight"));
      EXPECT_NO_THROW(average.loss(testing::token_rows(mesh, 6, 4, 11), testing::token_rows(mesh, 6, 4, 11, 1)));
      const auto all = values(average);
      if (w.rank() == 0 && one.empty()) one = all;
      if (w.rank() != 0) return;
      for (const auto& [name, x] : all)
        for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], one.at(name)[i], 1e-5) << name;
    }, {.threads_per_rank = 1});
}

// Frozen in the model: the average's own values stay, whatever they are.
TEST(Ema, WhatIsFrozenIsNotUpdated) {
  TinyModel model(2);
  model.blocks[1].up.weight.freeze();
  materialize(model, Device::cpu(), {.seed = 3});
  TinyModel average(2);
  average.blocks[1].up.weight.freeze();
  materialize(average, Device::cpu(), {.seed = 4});
  const auto before = values(average);
  optim::Ema(model, average, 0.75).update();
  EXPECT_EQ(values(average).at("blocks.1.up.weight"), before.at("blocks.1.up.weight"));
  EXPECT_NE(values(average).at("blocks.1.down.weight"), before.at("blocks.1.down.weight"));
}

// With decay and 1 - decay as two rounded factors, some weights shrink: after these steps by up to a thousandth.
TEST(Ema, HighDecaysKeepTheScale) {
  TinyModel model(2);
  materialize(model, Device::cpu(), {.seed = 3});
  TinyModel average = nn::clone(model, 2);
  optim::Ema ema(model, average, 0.999999);
  const auto expected = values(model);
  for (int step = 0; step < 10000; ++step) ema.update();
  EXPECT_EQ(values(average), expected);
}

// As schedules of the decay have it; also where a step is compiled.
TEST(Ema, MayHaveAnotherDecayInEachStep) {
  const auto averages = [](int how) {
    TinyModel model, average;
    for (TinyModel* m : {&model, &average}) materialize(*m, Device::cpu(), {.seed = 4, .dtype = kF64});
    assign(model.norm.weight, full({7}, 3.0, kF64));
    optim::Ema ema(model, average, 0.9);
    auto step = compile([&](const Tensor& decay) {
      ema.update(decay);
      return decay + 1.0;
    });
    for (int i = 0; i < 5; ++i) {
      const double decay = 0.5 + 0.1 * i;
      if (how == 0) ema.update(decay);
      else if (how == 1) ema.update(Tensor::scalar(decay, kF64));
      else step({.step = i}, Tensor::scalar(decay, kF64));
    }
    EXPECT_EQ(step.program() != nullptr, how == 2);
    return full_parameter(average.norm.weight).to_vector<double>()[0];
  };
  double expected = 1;
  for (int i = 0; i < 5; ++i) expected += (3 - expected) * (1 - (0.5 + 0.1 * i));
  for (const int how : {0, 1, 2}) EXPECT_NEAR(averages(how), expected, 1e-12) << how;
}

TEST(Ema, WhatCannotBeIsRefused) {
  TinyModel model(2), average(2), other(1), unmade(2);
  for (nn::Module* m : std::initializer_list<nn::Module*>{&model, &average, &other}) materialize(*m);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::Ema(model, average, 1.0); }), HasSubstr("[ema] decay 1:"));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::Ema(model, average, 0.9).update(-0.5); }), HasSubstr("[ema] decay -0.5:"));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::Ema(model, other, 0.9); }), HasSubstr("unit 'root' has f32["));
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { optim::Ema(model, unmade, 0.9); }), HasSubstr("has no memory: call materialize()"));
  // Of equal sizes, but not the same.
  TinyModel first(2), second(2);
  first.blocks[0].up.weight.freeze(), second.blocks[1].up.weight.freeze();
  materialize(first), materialize(second);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::Ema(first, second, 0.9); }), HasSubstr("unit 'root' has other parameters"));
}

// A part of a model that shares a unit with the rest would be averaged in part.
struct Body : nn::Module {
  TinyBlock block{7};
  nn::LayerNorm norm{7};
  SHEAF_FIELDS(block, norm);
};
struct Around : nn::Module {
  Body body;
  SHEAF_FIELDS(body);
};

TEST(Ema, OfAPartThatIsInUnitsAroundItIsRefused) {
  Around model, average;
  for (Around* m : {&model, &average}) {
    shard(*m, Mesh{}, {.units = nn::units_of<TinyBlock>()});
    materialize(*m);
  }
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::Ema(model.body, average.body, 0.9); }),
              HasSubstr("[ema] 'body.norm.weight' is in unit 'root' of a model around this"));
  EXPECT_NO_THROW(optim::Ema(model, average, 0.9));
}

// The units of a part of a model, one of them the part's own, and a clone of it, a model of its own: its names are relative to it.
struct PartAndClone {
  TinyModel model{2};
  Mesh mesh;
  TinyBlock& part = model.blocks[1];
  TinyBlock clone;
  explicit PartAndClone(World& w) : mesh(data_mesh(w)), clone(make(w)) {}
  TinyBlock make(World& w) {
    const auto is_unit = [](nn::Module& m, const std::string&) { return dynamic_cast<TinyBlock*>(&m) || dynamic_cast<nn::Linear*>(&m); };
    shard(model, mesh, {.units = nn::units_where(is_unit)});
    materialize(model, w.device(), {.seed = 3});
    return nn::clone(part, 7);
  }
};

TEST(Ema, OfAPartInItsClone) {
  for (const int ranks : {1, 2}) run_local(ranks, [&](World& w) {
    PartAndClone of(w);
    optim::SGD optimizer(of.model, {.lr = 0.1});
    optim::Ema ema(of.part, of.clone, 0.75);
    const auto before = values(of.clone);
    backward(of.model, of.mesh);
    optimizer.step();
    optimizer.zero_grad();
    ema.update();
    const auto now = values(of.part), after = values(of.clone);
    for (const auto& [name, x] : after)
      for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], before.at(name)[i] * 0.75f + now.at("blocks.1." + name)[i] * 0.25f, 1e-6) << name;
    EXPECT_NE(after, before);
  }, {.threads_per_rank = 1});
}

TEST(Direction, OfAPartIsItsClone) {
  for (const int ranks : {1, 2}) run_local(ranks, [&](World& w) {
    PartAndClone of(w);
    backward(of.model, of.mesh);
    set_to_gradient(of.clone, of.part);
    double squares = 0;
    for (const nn::Parameter& p : of.part.parameters())
      for (const double g : full_gradient(p).to_vector<double>()) squares += g * g;
    EXPECT_NEAR(gradient_along(of.part, of.clone).item<double>(), squares, 1e-6);
    zero_grad(of.model);
    Recording recording({.higher_order = true});
    const Tensor loss = of.model.loss(testing::token_rows(of.mesh, 6, 4, 11), testing::token_rows(of.mesh, 6, 4, 11, 1));
    const Tensor along = derivative_along(loss, of.part, of.clone);
    EXPECT_NEAR(redistribute(along, "data", Placement::invariant()).item<double>(), squares, 1e-6);
    recording.backward(along);
    EXPECT_GT(grad_norm(of.model).item<double>(), 0);
  }, {.threads_per_rank = 1});
}

// A layer with statistics of its inputs.
struct Centered : nn::Module {
  nn::Buffer mean{{3}, nn::Init::zeros()}, seen{{}, nn::Init::zeros(), kI64};
  nn::Linear linear{3, 2};
  Tensor forward(const Tensor& x) { return linear(x - mean); }
  SHEAF_FIELDS(mean, seen, linear);
};

TEST(Ema, HasTheModelsBuffers) {
  const auto set = [](Centered& m, int64_t step) {
    assign(m.mean, Tensor::from<float>(std::vector<float>(3, static_cast<float>(step)), {3}));
    assign(m.seen, Tensor::from<int64_t>({step}, {}));
  };
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& w) {
      Centered model;
      shard(model, data_mesh(w));
      materialize(model, w.device(), {.seed = 3});
      Centered average = nn::clone(model);
      optim::Ema ema(model, average, 0.5);
      const auto expect = [&](int64_t step) {
        EXPECT_EQ(average.mean.value().to_vector<float>(), std::vector<float>(3, static_cast<float>(step)));
        EXPECT_EQ(average.seen.value().to_vector<int64_t>(), std::vector<int64_t>{step});
      };
      for (int64_t step = 1; step < 4; ++step) {
        set(model, step);
        expect(step - 1);
        if (step == 2) {
          Recording recording({.step = step});
          ema.update();
        } else {
          ema.update();
        }
        expect(step);
      }
      EXPECT_TRUE(identical(full_parameter(average.linear.weight), full_parameter(model.linear.weight)));
    }, {.threads_per_rank = 1});
  Centered model;
  materialize(model);
  Centered other;
  other.mean = nn::Buffer({4}, nn::Init::zeros());
  materialize(other);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { optim::Ema(model, other, 0.9); }),
              HasSubstr("[ema] the average's buffer 'mean' is f32[4], the model's 'mean' f32[3]"));
}

TEST(Ema, HasTheModelsBuffersInAProgram) {
  run_local(2, [&](World& w) {
    const Mesh mesh = data_mesh(w);
    Centered model;
    shard(model, mesh);
    materialize(model, w.device(), {.seed = 3});
    Centered average = nn::clone(model);
    optim::SGD optimizer(model, {.lr = 0.1});
    optim::Ema ema(model, average, 0.5);
    auto step = compile([&](const Tensor& x, const Tensor& scalars) {
      const Tensor loss = mean(square(model(x)));
      Recording::current()->backward(loss, {.last_micro_batch = true});
      optimizer.step({.scalars = scalars});
      optimizer.zero_grad();
      ema.update();
      return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
    });
    const Tensor x = testing::dense_rows(mesh, 4, 3, 0);
    for (int64_t s = 0; s < 5; ++s) {
      assign(model.mean, Tensor::from<float>(std::vector<float>(3, static_cast<float>(s)), {3}));
      const std::vector<double> values = optimizer.next_scalars({.lr = 0.1});
      step({.step = s}, x, Tensor::from(values, {static_cast<int64_t>(values.size())}));
      EXPECT_EQ(average.mean.value().to_vector<float>(), std::vector<float>(3, static_cast<float>(s)));
    }
  }, {.threads_per_rank = 1});
}

// Evaluations between a program's runs use the latest average.
TEST(Ema, InAProgram) {
  for (const char* strategy : {"full_shard", "replicate"})
    for (const int world : {1, 2}) {
      const auto losses = [&](bool compiled) {
        std::vector<double> out;
        run_local(world, [&](World& w) {
          const Mesh mesh = w.mesh({{"data", w.size()}});
          TinyModel model, average;
          for (TinyModel* m : {&model, &average}) {
            shard(*m, mesh, {.units = nn::units_of<TinyBlock>(), .strategy = strategy, .compute_dtype = kBF16});
            materialize(*m, Device::cpu(), {.seed = 3});
          }
          optim::AdamW optimizer(model, {.lr = 0.1});
          optim::Ema ema(model, average, 0.5);
          const Layout everywhere(mesh.spec, Placement::invariant());
          const auto code = [&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
            const Tensor loss = model.loss(tokens, targets);
            Recording::current()->backward(loss, {.last_micro_batch = true});
            optimizer.step({.scalars = scalars});
            optimizer.zero_grad();
            ema.update();
            return redistribute(loss, everywhere);
          };
          auto step = compile(code);
          const nn::Unsharded whole(average);
          const Tensor tokens = testing::token_rows(mesh, 4, 5, 11), targets = testing::token_rows(mesh, 4, 5, 11, 1);
          for (int s = 0; s < 5; ++s) {
            const std::vector<double> values = optimizer.next_scalars({.lr = 0.1});
            const Tensor scalars = Tensor::from(values, {static_cast<int64_t>(values.size())});
            if (compiled) {
              step({.step = s}, tokens, targets, scalars);
            } else {
              Recording r({.step = s});
              code(tokens, targets, scalars);
            }
            const double loss = redistribute(average.loss(tokens, targets), everywhere).item();
            if (w.rank() == 0) out.push_back(loss);
          }
        }, {.threads_per_rank = 1});
        return out;
      };
      const std::vector<double> eager = losses(false);
      EXPECT_NE(eager[3], eager[4]);
      EXPECT_EQ(losses(true), eager) << strategy << world;
    }
}

}  // namespace
}  // namespace sheaf
