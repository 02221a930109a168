// Steered parameters: their gradients are measurements, summed exactly over ranks and micro-batches; a step moves them by a rate against
// the sign, whatever the optimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/loss_scaler.h"
#include "sheaf/nn/optim/muon.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/shard.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kRows = 7, kWidth = 3;
constexpr double kRate = 0.125;

/// y = linear(x); `bias` measures how many values in each column of x are above 0, minus half of the rows.
struct Counting : nn::Module {
  nn::Linear linear;
  nn::Parameter level;
  explicit Counting(double rate) : linear(kWidth, kWidth), level({kWidth}, nn::Init::zeros()) {
    if (rate > 0) level.steer(rate);
  }
  Tensor forward(const Tensor& x_BC) {
    const auto count = [](Vjp& c) {
      c.set(0, c.grad());
      const Tensor above = cast(gt(c.input(1), 0.0), c.input(0).dtype()) - 0.5;
      c.set(2, redistribute(sum(above, {0}), c.input(2).layout().dual()));
    };
    const auto pass = [](const Tensor& y, const Tensor&, const Tensor&) { return y; };
    const Tensor x = custom_vjp(pass, count, x_BC, stop_gradient(x_BC), level);
    const auto scope = linear.enter();
    return linear(cast(x, linear.weight.value().dtype()));
  }
  SHEAF_FIELDS(linear, level);
};

struct OfAllKinds : nn::Module {
  nn::Parameter slow{{kWidth}, nn::Init::zeros()}, fast{{kWidth}, nn::Init::zeros()}, exact{{kWidth}, nn::Init::zeros()},
      plain{{kWidth}, nn::Init::zeros()};
  SHEAF_FIELDS(exact, slow, fast, plain);
};

Tensor batch(const Mesh& mesh, uint64_t key) {
  const Tensor x = randn({kF32, {kRows, kWidth}, {}}, Key{key});
  return redistribute(x, Layout(mesh.spec, Placement::shard(0)));
}
std::vector<double> excess(uint64_t key) {
  const std::vector<float> x = randn({kF32, {kRows, kWidth}, {}}, Key{key}).to_vector();
  std::vector<double> out(kWidth, -0.5 * kRows);
  for (size_t i = 0; i < x.size(); ++i) out[i % kWidth] += x[i] > 0;
  return out;
}

void backward(Counting& model, const Mesh& mesh, uint64_t key, optim::LossScaler* scaler = nullptr) {
  Recording recording;
  const Tensor loss = mean(square(model(batch(mesh, key))));
  recording.backward(scaler ? scaler->scale(loss) : loss);
}

std::unique_ptr<optim::Optimizer> make(const std::string& name, nn::Module& model) {
  if (name == "sgd") return std::make_unique<optim::SGD>(model, optim::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1});
  if (name == "muon") return std::make_unique<optim::Muon>(model, optim::MuonOptions{});
  return std::make_unique<optim::AdamW>(model, optim::AdamWOptions{.factors = {.weight_decay = [](const nn::Parameter&) { return 1.0; }}});
}

TEST(Steered, StepsMoveItByItsRateOnAnyRanks) {
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const char* optimizer : {"adamw", "sgd", "muon"})
      for (const int world : {1, 2, 3, 4, 5})
        run_local(world, [&](World& w) {
          const Mesh mesh = w.mesh({{"data", world}});
          Counting model(kRate), free(0);
          for (Counting* m : {&model, &free}) {
            shard(*m, mesh, {.strategy = strategy, .compute_dtype = kBF16, .reduce_dtype = kBF16});
            materialize(*m, Device::cpu(), {.seed = 3});
          }
          const auto steps = make(optimizer, model), of_free = make(optimizer, free);
          EXPECT_EQ(steps->shards().size(), of_free->shards().size());
          std::vector<double> level(kWidth);
          for (uint64_t step = 0; step < 4; ++step) {
            std::vector<double> sum(kWidth);
            for (const uint64_t micro : {2 * step, 2 * step + 1}) {
              backward(model, mesh, micro);
              const std::vector<double> one = excess(micro);
              for (size_t i = 0; i < kWidth; ++i) sum[i] += one[i];
            }
            const double norm = clip_grad_norm(model, 0.01).item<double>();
            EXPECT_EQ(full_gradient(model.level).to_vector<double>(), sum) << "neither rounded nor clipped";
            const std::vector<double> slopes = full_gradient(model.linear.weight).to_vector<double>(),
                                      of_bias = full_gradient(model.linear.bias).to_vector<double>();
            double squares = 0;
            for (const double x : slopes) squares += x * x;
            for (const double x : of_bias) squares += x * x;
            EXPECT_NEAR(norm, std::sqrt(squares), 1e-6 * norm) << "of slopes alone";
            steps->step({.lr = 1e-2 * static_cast<double>(step)});
            steps->zero_grad();
            EXPECT_FALSE(model.level.unit()->holds_gradients());
            for (size_t i = 0; i < kWidth; ++i) level[i] -= kRate * (sum[i] > 0 ? 1 : sum[i] < 0 ? -1 : 0);
            EXPECT_EQ(full_parameter(model.level).to_vector<double>(), level) << strategy << optimizer << world;
          }
          steps->step();
          EXPECT_EQ(full_parameter(model.level).to_vector<double>(), level) << "without a gradient nothing moves";
        }, {.threads_per_rank = 1});
}

// A step that is skipped for infinities skips it, too, and the loss's factor does not affect it.
TEST(Steered, IsSkippedWithTheStep) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    Counting model(kRate);
    shard(model, mesh, {});
    materialize(model, Device::cpu(), {.seed = 3});
    optim::AdamW steps(model);
    optim::LossScaler scaler(Device::cpu(), {.initial = 1024});
    const auto step = [&](bool infinite) {
      backward(model, mesh, 1, &scaler);
      if (infinite)
        for (FlatBuffer& b : model.unit()->buffers())
          if (b.has_slope()) store_into(b.grad, full_like(b.grad, std::numeric_limits<double>::infinity()));
      clip_grad_norm(model, 1.0, scaler);
      steps.step();
      steps.zero_grad();
      scaler.update();
      return full_parameter(model.level).to_vector<double>();
    };
    const std::vector<double> before(kWidth, 0.0), once = step(false);
    for (size_t i = 0; i < kWidth; ++i) EXPECT_EQ(once[i], excess(1)[i] > 0 ? -kRate : kRate);
    EXPECT_EQ(step(true), once);
    EXPECT_NE(step(false), once);
  }, {.threads_per_rank = 1});
}

// Without any other trained parameter, a steered one still has a step.
TEST(Steered, MayBeAllThereIs) {
  run_local(3, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 3}});
    Counting model(kRate);
    model.linear.weight.freeze();
    model.linear.bias.freeze();
    shard(model, mesh, {});
    materialize(model, Device::cpu(), {.seed = 3});
    optim::AdamW steps(model);
    EXPECT_TRUE(steps.shards().empty());
    backward(model, mesh, 1);
    steps.step();
    for (size_t i = 0; i < kWidth; ++i)
      EXPECT_EQ(full_parameter(model.level).to_vector<double>()[i], excess(1)[i] > 0 ? -kRate : kRate);
    steps.zero_grad();
    EXPECT_FALSE(model.unit()->holds_gradients());
  }, {.threads_per_rank = 1});
}

TEST(Steered, WhatIsExactIsNotCast) {
  run_local(2, [](World& w) {
    Counting model(0);
    model.level.keep_exact();
    model.level.freeze_for_good();
    model.linear.weight.freeze_for_good();
    shard(model, w.mesh({{"data", 2}}), {.compute_dtype = kBF16});
    materialize(model, Device::cpu(), {.seed = 3});
    EXPECT_EQ(model.level.dtype(), kF32);
    EXPECT_EQ(model.level.value().dtype(), kF32);
    EXPECT_EQ(model.linear.weight.dtype(), kBF16);
    EXPECT_EQ(model.level.unit()->buffers().back().name, "root exact frozen");
  }, {.threads_per_rank = 1});
}

// Beside others of the same unit that are cast, in any order.
TEST(Steered, WhatIsTrainedAndExactIsNotCastEither) {
  run_local(2, [](World& w) {
    for (const bool exact_bias : {false, true}) {
      Counting model(0);
      model.level.keep_exact();
      if (exact_bias) model.linear.bias.keep_exact();
      shard(model, w.mesh({{"data", 2}}), {.compute_dtype = kBF16});
      materialize(model, Device::cpu(), {.seed = 3});
      Recording recording;
      EXPECT_EQ(model.level.value().dtype(), kF32);
      EXPECT_EQ(model.linear.weight.value().dtype(), kBF16);
      EXPECT_EQ(model.linear.bias.value().dtype(), exact_bias ? kF32 : kBF16);
      EXPECT_EQ(model.level.unit()->buffers().back().name, "root exact");
    }
  }, {.threads_per_rank = 1});
}

// In one unit: each moves by its own rate, and what is only exact is the optimizer's.
TEST(Steered, RatesOfAUnitAreTheirOwn) {
  OfAllKinds model;
  model.slow.steer(0.125), model.fast.steer(0.5), model.exact.keep_exact();
  materialize(model);
  optim::SGD sgd(model, {.lr = 0.25});
  Recording recording;
  recording.backward(sum(model.slow + model.fast * 2 + model.exact * 3 + model.plain * 4));
  const Tensor norm = grad_norm(model);
  EXPECT_NEAR(norm.item(), std::sqrt(9.0 * kWidth + 16.0 * kWidth), 1e-6);
  sgd.step();
  recording.take();
  EXPECT_EQ(full_parameter(model.slow).to_vector(), std::vector<float>(kWidth, -0.125f));
  EXPECT_EQ(full_parameter(model.fast).to_vector(), std::vector<float>(kWidth, -0.5f));
  EXPECT_EQ(full_parameter(model.exact).to_vector(), std::vector<float>(kWidth, -0.75f));
  EXPECT_EQ(full_parameter(model.plain).to_vector(), std::vector<float>(kWidth, -1.0f));
}

TEST(Steered, RefusesWhatItCannotMean) {
  Counting model(kRate);
  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THAT([&] { model.level.steer(rate); }, ThrowsMessage<ConfigError>(HasSubstr("the rate must be above 0")));
  materialize(model, Device::cpu());
  EXPECT_THAT([&] { model.level.steer(0.1); }, ThrowsMessage<ConfigError>(HasSubstr("'level' is materialized")));
  EXPECT_THAT([&] { model.level.keep_exact(); }, ThrowsMessage<ConfigError>(HasSubstr("'level' is materialized")));
}

}  // namespace
}  // namespace sheaf
