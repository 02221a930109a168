// A scaled loss: the same bits if nothing overflows, and no change at all if something does, on any number of ranks.
#include "sheaf/nn/optim/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "sheaf/autograd/compile.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/muon.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using optim::LossScaler;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& kind, nn::Module& m) {
  if (kind == "sgd") return std::make_unique<optim::SGD>(m, optim::SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true});
  if (kind == "muon") return std::make_unique<optim::Muon>(m, optim::MuonOptions{.lr = 0.01});
  return std::make_unique<optim::AdamW>(m, optim::AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
}

/// Everything that a skipped step must leave unchanged.
struct Values {
  std::vector<std::vector<float>> local;  // masters, then state
  std::optional<int64_t> applied;
  friend bool operator==(const Values&, const Values&) = default;
};

struct Training {
  TinyModel model{3};
  Mesh mesh;
  std::unique_ptr<optim::Optimizer> optimizer;

  Training(World& w, Strategy strategy, const nn::UnitPolicy& units_by, const std::string& kind) {
    if (strategy != Strategy::none) mesh = w.mesh({{"data", w.size()}});
    shard(model, mesh, {.units = units_by, .strategy = strategy});
    materialize(model, Device::cpu(), {.seed = 21});
    optimizer = make_optimizer(kind, model);
  }
  /// The mean loss of batch `step`, each rank's part of it times its `factor`.
  Tensor loss(int64_t step, float factor = 1) {
    const Tensor sum = model.loss(token_rows(mesh, 6, 4, 11, step), token_rows(mesh, 6, 4, 11, step + 1));
    if (factor == 1) return sum;
    const Layout everywhere = mesh.spec ? Layout(mesh.spec, Placement::replicate()) : Layout();
    return sum * Tensor::from_local(std::vector<float>{factor}, Type{kF32, {}, everywhere});
  }
  void backward(int64_t step, const LossScaler* scaler, float factor = 1) {
    Recording recording;
    const Tensor l = loss(step, factor);
    recording.backward(scaler ? scaler->scale(l) : l);
  }
  double update(double max_norm, LossScaler* scaler) {
    const Tensor norm = scaler ? clip_grad_norm(model, max_norm, *scaler) : clip_grad_norm(model, max_norm);
    optimizer->step();
    if (scaler) scaler->update();
    optimizer->zero_grad();
    return norm.item<double>();
  }
  /// One element of this rank's part of the gradient.
  void spoil_gradient(float value) {
    for (const auto& unit : units(model)) {
      unit->reduce_waiting(), unit->complete_reduction();
      for (FlatBuffer& b : unit->buffers())
        if (b.grad && b.grad.local_shape().numel() > 0) {
          *b.grad.view().as<float>() = value;
          return;
        }
    }
  }
  Values values() {
    Values out;
    for (const auto& unit : units(model))
      for (const FlatBuffer& b : unit->buffers()) out.local.push_back(b.shard.to_vector());
    for (const optim::ShardState& shard : optimizer->shards())
      for (const Tensor& s : shard.state) out.local.push_back(s.to_vector());
    out.applied = optimizer->applied_steps();
    return out;
  }
};

/// f(world, strategy, units, optimizer)
template <class F>
void for_each_way(F&& f) {
  for (const int world : {1, 2, 3})
    for (const char* kind : {"adamw", "sgd", "muon"})
      for_each_sharding(world, [&](Strategy s, const nn::UnitPolicy& policy, int64_t prefetch, const char* what) {
        if (prefetch == 0) return;
        run_local(world, [&](World& w) {
          SCOPED_TRACE(str(kind, " ", what, " at ", world));
          f(w, s, policy, kind);
        }, {.threads_per_rank = 1});
      });
}

TEST(LossScaler, PowersOfTwoChangeNoBit) {
  for_each_way([](World& w, Strategy s, const nn::UnitPolicy& policy, const char* kind) {
    for (const double max_norm : {0.1, double{kInfinity}}) {
      Training plain(w, s, policy, kind);
      std::vector<double> norms;
      for (int64_t step = 0; step < 5; ++step) {
        plain.backward(step, nullptr);
        norms.push_back(plain.update(max_norm, nullptr));
      }
      Values expected = plain.values();
      if (std::string(kind) != "sgd") expected.applied = 5;  // the device's step count, for bias corrections
      for (const double initial : {1.0, 65536.0, 0x1p40}) {
        LossScaler scaler(Device::cpu(), {.initial = initial, .growth_interval = 2});
        Training scaled(w, s, policy, kind);
        for (int64_t step = 0; step < 5; ++step) {
          scaled.backward(step, &scaler);
          EXPECT_EQ(scaled.update(max_norm, &scaler), norms[static_cast<size_t>(step)]);
        }
        EXPECT_EQ(scaled.values(), expected) << initial;
        EXPECT_EQ(scaler.state(), (LossScaler::State{4 * initial, 1, 0, 0}));
      }
    }
  });
}

// Steps that overflow, in a loss or in one element on one rank, have no effect: the result is that of the other steps.
TEST(LossScaler, SkippedStepsLeaveNoTraceOnAnyRank) {
  for_each_way([](World& w, Strategy s, const nn::UnitPolicy& policy, const char* kind) {
    const bool last = w.rank() == w.size() - 1, cut = s != Strategy::replicate;
    LossScaler all_good(Device::cpu()), scaler(Device::cpu());
    Training expected(w, s, policy, kind), training(w, s, policy, kind);
    double factor = 65536;
    int64_t skipped = 0;
    const auto skip = [&](auto&& spoil) {
      const Values before = training.values();
      spoil();
      EXPECT_FALSE(std::isfinite(training.update(0.1, &scaler)));
      Values after = training.values();
      EXPECT_EQ(after.local, before.local);
      EXPECT_EQ(after.applied.value_or(0), before.applied.value_or(0));
      EXPECT_EQ(scaler.state(), (LossScaler::State{factor *= 0.5, 0, 0, ++skipped}));
    };
    for (int64_t step = 0; step < 4; ++step) {
      expected.backward(step, &all_good), training.backward(step, &scaler);
      EXPECT_EQ(training.update(0.1, &scaler), expected.update(0.1, &all_good));
      if (step % 2 == 0) skip([&] { training.backward(9, &scaler, last ? kInfinity : 1); });
      if (step % 3 == 0 && cut)
        skip([&] {
          training.backward(9, &scaler);
          if (last) training.spoil_gradient(step ? NAN : -kInfinity);
        });
    }
    EXPECT_EQ(training.values(), expected.values());
    EXPECT_EQ(training.optimizer->steps(), 4 + skipped);
    EXPECT_EQ(training.optimizer->applied_steps().value_or(4), 4);
  });
}

// Also before the very first step that is applied.
TEST(LossScaler, TheFirstStepsMayBeSkipped) {
  run_local(2, [](World& w) {
    LossScaler scaler(Device::cpu(), {.initial = 8, .minimum = 2}), other(Device::cpu());
    Training training(w, Strategy::full_shard, {}, "adamw"), expected(w, Strategy::full_shard, {}, "adamw");
    for (int64_t step = 0; step < 5; ++step) {
      training.backward(0, &scaler, w.rank() ? NAN : 1);
      training.update(0.1, &scaler);
    }
    EXPECT_EQ(scaler.state(), (LossScaler::State{2, 0, 3, 5}));
    EXPECT_EQ(training.optimizer->applied_steps(), 0);
    training.backward(0, &scaler), expected.backward(0, &other);
    training.update(0.1, &scaler), expected.update(0.1, &other);
    EXPECT_EQ(training.values(), expected.values());
    EXPECT_EQ(scaler.state().lost_steps, 0);
  }, {.threads_per_rank = 1});
}

// Steps before there was a scaler, and after it, count.
TEST(LossScaler, MayComeAndGo) {
  run_local(1, [](World& w) {
    LossScaler scaler(Device::cpu());
    Training plain(w, Strategy::full_shard, {}, "adamw"), mixed(w, Strategy::full_shard, {}, "adamw");
    for (int64_t step = 0; step < 6; ++step) {
      LossScaler* const some = step / 2 == 1 ? &scaler : nullptr;
      plain.backward(step, nullptr), mixed.backward(step, some);
      EXPECT_EQ(mixed.update(0.1, some), plain.update(0.1, nullptr));
      for (const auto& unit : units(mixed.model))
        for (const FlatBuffer& b : unit->buffers()) EXPECT_FALSE(b.found_inf.defined()) << "it goes with its gradient";
    }
    EXPECT_EQ(mixed.values().local, plain.values().local);
    EXPECT_EQ(mixed.optimizer->applied_steps(), 6);
  });
}

// A checkpoint of a run that had no scaler says how many steps were made, and all of them were applied.
TEST(LossScaler, StepsThatAreSetWereApplied) {
  run_local(1, [](World& w) {
    LossScaler scaler(Device::cpu());
    Training mixed(w, Strategy::full_shard, {}, "adamw"), plain(w, Strategy::full_shard, {}, "adamw");
    mixed.backward(0, &scaler), plain.backward(0, nullptr);
    mixed.update(0.1, &scaler), plain.update(0.1, nullptr);
    EXPECT_EQ(mixed.optimizer->applied_steps(), 1);
    for (Training* t : {&mixed, &plain}) t->optimizer->set_steps(1000);
    EXPECT_EQ(mixed.optimizer->applied_steps(), 1000);
    mixed.backward(1, &scaler), plain.backward(1, nullptr);
    mixed.update(0.1, &scaler), plain.update(0.1, nullptr);
    EXPECT_EQ(mixed.values().local, plain.values().local);
  }, {.threads_per_rank = 1});
}

TEST(LossScaler, GoesOnFromAStateThatIsSet) {
  LossScaler scaler(Device::cpu(), {.growth_interval = 5});
  const LossScaler::State state{8, 4, 3, 2};
  scaler.set_state(state);
  EXPECT_EQ(scaler.state(), state);
  scaler.found(Tensor::from<int32_t>({0}, {}));
  scaler.update();
  EXPECT_EQ(scaler.state(), (LossScaler::State{16, 0, 0, 2})) << "the fifth good step";
}

TEST(LossScaler, ScalesLossesOfAnyTypeAndPlacement) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    LossScaler scaler(Device::cpu(), {.initial = 4});
    for (const Placement& p : {Placement::partial(), Placement::invariant()})
      for (const DType dtype : {kF32, kF64}) {
        Recording recording;
        const Tensor x = recording.watch(redistribute(full_of({dtype, {}, Layout(mesh.spec, Placement::invariant())}, 3),
                                                      Layout(mesh.spec, p)));
        const Tensor scaled = scaler.scale(x);
        EXPECT_EQ(scaled.type(), x.type());
        EXPECT_EQ(redistribute(scaled, Layout(mesh.spec, Placement::invariant())).item(), 12);
        const Tensor xs[] = {x};
        EXPECT_EQ(recording.gradient(scaled, xs)[0].to_vector<double>(), std::vector<double>{4});
      }
    EXPECT_THROW(scaler.scale(full_of({kF32, {2}, {}}, 1)), ShapeError);
  }, {.threads_per_rank = 1});
}

struct Pair : nn::Module {
  nn::Linear a{3, 3}, b{3, 3};
  SHEAF_FIELDS(a, b);
};

// Two optimizers, two norms: one may step while the other skips.
TEST(LossScaler, EachOptimizerIsSkippedByItsOwnNorm) {
  Pair pair;
  shard(pair, Mesh{}, {.units = nn::units_at({"a", "b"})});
  materialize(pair, Device::cpu(), {.seed = 2});
  optim::AdamW first(pair.a), second(pair.b);
  LossScaler scaler(Device::cpu(), {.initial = 8});
  const auto step = [&](double of_a, double of_b) {
    Recording recording;
    const Tensor x = full_of({kF32, {2, 3}, {}}, 1);
    recording.backward(scaler.scale(sum(square(pair.a(x))) * of_a + sum(square(pair.b(x))) * of_b));
    clip_grad_norm(pair.a, 1.0, scaler), clip_grad_norm(pair.b, 1.0, scaler);
    for (optim::AdamW* o : {&first, &second}) o->step(), o->zero_grad();
    scaler.update();
  };
  step(1, 1), step(1, kInfinity), step(kInfinity, 1), step(1, kInfinity), step(1, 1);
  EXPECT_EQ(first.applied_steps(), 4);
  EXPECT_EQ(second.applied_steps(), 3);
  EXPECT_EQ(scaler.state(), (LossScaler::State{1, 1, 0, 3}));
}

template <class E>
std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "";
}

// Each would skip by its own norm, and the optimizer makes one step.
TEST(LossScaler, AnOptimizerRefusesTwoNorms) {
  Pair pair;
  shard(pair, Mesh{}, {.units = nn::units_at({"a", "b"})});
  materialize(pair, Device::cpu(), {.seed = 2});
  optim::AdamW adam(pair);
  LossScaler scaler(Device::cpu(), {.initial = 8});
  Recording recording;
  const Tensor x = full_of({kF32, {2, 3}, {}}, 1);
  recording.backward(scaler.scale(sum(square(pair.a(x))) + sum(square(pair.b(x)))));
  clip_grad_norm(pair.a, 1.0, scaler), clip_grad_norm(pair.b, 1.0, scaler);
  EXPECT_THAT(message<ConfigError>([&] { adam.step(); }), HasSubstr("were not clipped together"));
  clip_grad_norm(pair, 1.0, scaler);
  adam.step();
  EXPECT_EQ(adam.applied_steps(), 1);
}

TEST(LossScaler, RefusesWhatCannotBeMeant) {
  run_local(1, [](World& w) {
    LossScaler scaler(Device::cpu());
    EXPECT_THAT(message<LifetimeError>([&] { scaler.update(); }), HasSubstr("clip_grad_norm(model, max_norm, scaler)"));
    Training t(w, Strategy::full_shard, nn::units_of<TinyBlock>(), "adamw");
    t.backward(0, &scaler);
    for (TinyBlock& block : t.model.blocks) clip_grad_norm(block, 1.0, scaler);
    EXPECT_THAT(message<ConfigError>([&] { t.optimizer->step(); }), HasSubstr("'blocks.0' were not clipped together"));
    EXPECT_EQ(t.optimizer->steps(), 0) << "a step that is refused does not count";
  });
  const optim::LossScalerOptions wrong[] = {
      {.initial = 0},        {.initial = NAN},        {.initial = 0x1p65},   {.growth_factor = 0.5}, {.backoff_factor = 0},
      {.backoff_factor = 2}, {.growth_interval = 0},  {.minimum = 0},        {.minimum = 1e6},       {.maximum = kInfinity},
      {.initial = 8, .maximum = 4}};
  for (const auto& options : wrong)
    EXPECT_THAT(message<ConfigError>([&] { LossScaler(Device::cpu(), options); }), HasSubstr("[loss_scaler]"));
}

// Eight steps in two micro-batches, of which those in `bad` overflow; from the fourth on they are run by a program.
struct Outcome {
  Values values;
  std::vector<float> losses;
  std::vector<double> norms;
  std::vector<LossScaler::State> states;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};
Outcome train(World& w, Strategy s, const char* kind, const std::vector<int64_t>& bad, bool compiled) {
  Training t(w, s, nn::units_of<TinyBlock>(), kind);
  LossScaler scaler(Device::cpu(), {.growth_interval = 2});
  const auto code = [&](const Tensor& tokens, const Tensor& targets, const Tensor& factor, const Tensor& scalars) {
    Recording& recording = *Recording::current();
    Tensor total;
    for (int micro = 0; micro < 2; ++micro) {
      const Tensor loss = t.model.loss(tokens, targets, {.divide_by = 48.0});
      recording.backward(scaler.scale(micro ? loss * factor : loss), {.last_micro_batch = micro == 1});
      total = total ? total + loss : loss;
    }
    const Tensor norm = clip_grad_norm(t.model, 0.1, scaler);
    t.optimizer->step({.scalars = scalars});
    scaler.update();
    t.optimizer->zero_grad();
    return std::vector<Tensor>{redistribute(total, Layout(t.mesh.spec, Placement::invariant())), norm};
  };
  auto step = compile(code);
  Outcome out;
  for (int64_t i = 0; i < 8; ++i) {
    const bool overflows = std::ranges::count(bad, i) && w.rank() == w.size() - 1;
    const Tensor factor = Tensor::from_local(std::vector<float>{overflows ? kInfinity : 1},
                                             Type{kF32, {}, Layout(t.mesh.spec, Placement::replicate())});
    const Tensor tokens = token_rows(t.mesh, 6, 4, 11, i), targets = token_rows(t.mesh, 6, 4, 11, i + 1);
    const std::vector<double> numbers = t.optimizer->next_scalars({.lr = 0.01 / static_cast<double>(i + 1)});
    const Tensor scalars = Tensor::from(numbers, {std::ssize(numbers)});
    std::vector<Tensor> results;
    if (compiled) {
      results = step({.step = i}, tokens, targets, factor, scalars);
    } else {
      Recording recording({.step = i});
      results = code(tokens, targets, factor, scalars);
    }
    EXPECT_EQ(step.program() != nullptr, compiled && i >= 2);
    out.losses.push_back(results[0].item());
    out.norms.push_back(std::isfinite(results[1].item<double>()) ? results[1].item<double>() : -1);
    out.states.push_back(scaler.state());
  }
  out.values = t.values();
  return out;
}

TEST(LossScaler, AProgramSkipsAsEagerStepsDo) {
  for (const int world : {1, 2, 3})
    for (const char* kind : {"adamw", "muon"})
      for (const Strategy s : {Strategy::full_shard, Strategy::zero1})
        run_local(world, [&](World& w) {
          SCOPED_TRACE(str(kind, " ", name(s), " at ", world));
          const Outcome eager = train(w, s, kind, {1, 4, 5}, false), compiled = train(w, s, kind, {1, 4, 5}, true);
          EXPECT_EQ(compiled, eager);
          EXPECT_EQ(eager.values.applied, 5);
          std::vector<double> factors;
          for (const auto& state : eager.states) factors.push_back(state.factor / 65536);
          EXPECT_THAT(factors, ::testing::ElementsAre(1, 0.5, 0.5, 1, 0.5, 0.25, 0.25, 0.5));
        }, {.threads_per_rank = 1});
}

// As where a discriminator and a generator are trained in turns: one step looks, the other one looks and adapts the factor.
TEST(LossScaler, StepsThatAreCompiledApartShareIt) {
  const auto factors = [](bool compiled) {
    TinyModel first, second;
    LossScaler scaler(Device::cpu());
    std::vector<optim::SGD> optimizers;
    for (TinyModel* model : {&first, &second}) {
      materialize(*model, Device::cpu(), {.seed = 2});
      optimizers.emplace_back(*model, optim::SgdOptions{.lr = 0.01});
    }
    const auto code = [&](TinyModel& model, optim::SGD& optimizer, bool updates) {
      return [&, updates](const Tensor& factor, const Tensor& scalars) {
        const Tensor loss = model.loss(token_rows({}, 6, 4, 11), token_rows({}, 6, 4, 11, 1));
        Recording::current()->backward(scaler.scale(loss * factor));
        const Tensor norm = clip_grad_norm(model, 1.0, scaler);
        optimizer.step({.scalars = scalars});
        if (updates) scaler.update();
        optimizer.zero_grad();
        return norm;
      };
    };
    const auto one = code(first, optimizers[0], false), two = code(second, optimizers[1], true);
    auto step_one = compile(one), step_two = compile(two);
    std::vector<double> out;
    for (int64_t i = 0; i < 8; ++i) {
      const Tensor spoilt = Tensor::scalar(i == 4 || i == 6 ? kInfinity : 1.0, kF32), whole = Tensor::scalar(1.0, kF32);
      const auto scalars = [&](size_t of) {
        const std::vector<double> numbers = optimizers[of].next_scalars();
        return Tensor::from(numbers, {std::ssize(numbers)});
      };
      if (compiled) {
        step_one({.step = i}, spoilt, scalars(0)), step_two({.step = i}, whole, scalars(1));
      } else {
        { Recording recording({.step = i}); one(spoilt, scalars(0)); }
        { Recording recording({.step = i}); two(whole, scalars(1)); }
      }
      out.push_back(scaler.state().factor);
    }
    EXPECT_EQ(step_one.program() != nullptr, compiled);
    EXPECT_EQ(scaler.state().skipped_steps, 2);
    EXPECT_THROW(scaler.update(), LifetimeError) << "nobody has looked since then";
    return out;
  };
  EXPECT_EQ(factors(true), factors(false));
  EXPECT_EQ(factors(false), (std::vector<double>{65536, 65536, 65536, 65536, 32768, 32768, 16384, 16384}));
}

}  // namespace
}  // namespace sheaf::testing
