// Mistaken arguments and orders of calls: each is an error of Sheaf's, and what follows is as if it had not happened.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/loss_scaler.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

// Of any of Sheaf's classes: caught by their base, as callers do.
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return str("not of Sheaf: ", error.what());
  }
  return "no error";
}

struct Counter : nn::Module {
  nn::Buffer count{{3}, nn::Init::normal(1), kI32};
  SHEAF_FIELDS(count);
};

// Thrown from kernels that are compiled once more for AVX-512, with types of their own for what is inline.
TEST(BadArguments, ErrorsOfAllKernelsAreErrors) {
  Counter counter;
  EXPECT_THAT(error_of([&] { materialize(counter); }), HasSubstr("[normal] is not defined for i32"));
}

TEST(BadArguments, SizesThatCannotBe) {
  EXPECT_THAT(error_of([] { nn::Parameter({4, int64_t{1} << 62, 5}, nn::Init::normal(1)); }), HasSubstr("[parameter] f32[4,"));
  EXPECT_THAT(error_of([] { nn::Linear(-1, -1); }), HasSubstr("[parameter] f32[-1,-1]: a size is negative"));
  EXPECT_THAT(error_of([] { OwnershipMap::parts(0, {6, -2}, 2); }), HasSubstr("a part of -2 rows"));
  EXPECT_THAT(error_of([] { OwnershipMap::flat(2, -3); }), HasSubstr("chunks of 2 from -3"));
  EXPECT_THAT(error_of([] { OwnershipMap::from_both_ends(0, 4, -1); }), HasSubstr("over -1 ranks"));
  EXPECT_THAT(error_of([] { Placement::shard(256); }), HasSubstr("Shard(256): dimensions are 0 to 7"));
  EXPECT_THAT(error_of([] { MeshSpec::intern({{"a", 641}, {"b", 6'700'417}}); }), HasSubstr("more ranks than can be counted, of axis b on"));
  EXPECT_EQ(rows_of_part(4, 2, 4, 3, 0), rows_of_part(4, 2, 4, 3, 4));
  nn::KeyValueCache cache(8);
  cache.advance(2);
  EXPECT_THAT(error_of([&] { cache.shorten(-4); }), HasSubstr("[key_value_cache] -4 tokens"));
  EXPECT_THAT(error_of([&] { cache.advance(-1); }), HasSubstr("[key_value_cache] -1 tokens"));
  EXPECT_EQ(cache.length(), 2);
}

TEST(BadArguments, NumbersThatMakeNoSense) {
  TinyModel model;
  shard(model, Mesh{});
  materialize(model);
  const double nan = std::nan(""), infinite = std::numeric_limits<double>::infinity();
  EXPECT_THAT(error_of([&] { optim::AdamW(model, {.beta2 = 1}); }), HasSubstr("[adamw] beta2 is 1: it is finite, at least 0 and below 1"));
  EXPECT_THAT(error_of([&] { optim::AdamW(model, {.eps = nan}); }), HasSubstr("[adamw] eps is nan"));
  EXPECT_THAT(error_of([&] { optim::SGD(model, {.lr = infinite}); }), HasSubstr("[sgd] lr is inf"));
  optim::AdamW adam(model);
  EXPECT_THAT(error_of([&] { adam.step({.lr = nan}); }), HasSubstr("[adamw] lr is nan"));
  EXPECT_THAT(error_of([&] { adam.step_in_backward({.lr = -1}); }), HasSubstr("[adamw] lr is -1"));
  EXPECT_THAT(error_of([&] { adam.set_steps(-5); }), HasSubstr("[adamw] -5 steps"));
  EXPECT_EQ(adam.steps(), 0);
  optim::LossScaler scaler(Device::cpu());
  EXPECT_THAT(error_of([&] { scaler.set_state({.factor = -3}); }), HasSubstr("the factor is -3"));
}

TEST(BadArguments, OperandsOfADerivativeThatAreNotThere) {
  const Tensor x = Tensor::from<float>({1, 2}, {2});
  const auto refusal = [&](const std::function<void(Vjp&)>& vjp) {
    return error_of([&] {
      Recording recording;
      recording.watch(x);
      const Tensor y = custom_vjp([](const Tensor& t) { return t * 2.0; }, vjp, x);
      recording.gradient(sum(y), {&x, 1});
    });
  };
  EXPECT_EQ(refusal([](Vjp& c) { c.set(0, c.grad()); }), "no error");
  EXPECT_THAT(refusal([](Vjp& c) { c.set(5, c.grad()); }), HasSubstr("[custom_vjp] root: the derivative asks for input 5 of 2"));
  EXPECT_THAT(refusal([](Vjp& c) { c.set(0, c.input(-1)); }), HasSubstr("input -1 of 2"));
  EXPECT_THAT(refusal([](Vjp& c) { c.set(0, c.output(9)); }), HasSubstr("output 9 of 1"));
  EXPECT_THAT(refusal([](Vjp& c) { c.set(0, c.grad()), Recording::current()->take(); }), HasSubstr("take() inside of a derivative"));
  EXPECT_THAT(refusal({}), HasSubstr("[custom_vjp] root: no function, or no derivative"));
}

TEST(BadArguments, ValuesThatAreNotThere) {
  const Tensor here = Tensor::from<float>({1, 2}, {2}), meta = Tensor::empty({kF32, {2}, {}}, Device::meta());
  EXPECT_THAT(error_of([&] { store_into(here, meta); }), HasSubstr("a meta tensor has no values for f32[2]"));
  EXPECT_THAT(error_of([&] { add_into(here, meta); }), HasSubstr("a meta tensor has no values for f32[2]"));
  EXPECT_EQ(here.to_vector(), (std::vector<float>{1, 2}));
  Recording recording;
  EXPECT_THAT(error_of([&] { recording.next_micro_batch(0, here); }), HasSubstr("a random state is i64[3], not f32[2]"));
}

// A program's run that fails is no step, and says where it failed, as the code does.
TEST(BadArguments, AStepThatFailsDoesNotCount) {
  run_local(2, [](World& w) {
    const auto train = [&](bool fails) {
      const Mesh mesh = w.mesh({{"data", 2}});
      TinyModel model;
      shard(model, mesh, {.units = nn::units_of<TinyBlock>()});
      materialize(model, Device::cpu(), {.seed = 3});
      optim::AdamW optimizer(model);
      auto step = compile([&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
        const Tensor loss = model.loss(tokens, targets);
        Recording::current()->backward(loss, {.last_micro_batch = true});
        optimizer.step({.scalars = scalars});
        optimizer.zero_grad();
        return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
      });
      std::vector<float> losses;
      const auto run = [&](const Tensor& tokens) {
        const std::vector<double> scalars = optimizer.next_scalars();
        return step({}, tokens, token_rows(mesh, 6, 4, 11, 1), Tensor::from(scalars, {std::ssize(scalars)})).item();
      };
      for (int s = 0; s < 6; ++s) {
        if (fails && s == 4) {
          EXPECT_NE(step.program(), nullptr);
          const Tensor wrong = Tensor::from_local(std::vector<int32_t>(12, 99), token_rows(mesh, 6, 4, 11).type());
          EXPECT_THAT(error_of([&] { run(wrong); }), HasSubstr(str("(in table, rank ", w.rank(), ")")));
        }
        losses.push_back(run(token_rows(mesh, 6, 4, 11)));
        EXPECT_EQ(optimizer.steps(), s + 1);
      }
      return losses;
    };
    EXPECT_EQ(train(true), train(false));
  });
}

// The first call that succeeds says which types the inputs have; gathers may be in another order behind one that failed.
TEST(BadArguments, CompileGoesOnBehindAFirstCallThatFailed) {
  auto twice = compile([](const Tensor& x) {
    check<DTypeError>(x.dtype() == kF32, "needs f32");
    return x + x;
  });
  EXPECT_THAT(error_of([&] { twice({}, Tensor::from<double>({1}, {1})); }), HasSubstr("needs f32"));
  EXPECT_EQ(twice({}, Tensor::from<float>({1}, {1})).item(), 2);
  for (const int failing : {0, 1, 2})
    run_local(2, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 2}});
      TinyModel model(/*layers=*/3);
      shard(model, mesh, {.units = nn::units_of<TinyBlock>()});
      materialize(model, Device::cpu(), {.seed = 3});
      optim::SGD optimizer(model);
      int calls = 0;
      auto step = compile([&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
        const bool fails = calls++ == failing;
        Tensor x = model.table(tokens);
        for (size_t i = 0; i < model.blocks.size(); ++i) {
          if (fails && i == 1) fail<DataError>("now");
          x = model.blocks[i](x);
        }
        const Tensor loss = cross_entropy(linear(model.norm(x), model.table.weight), targets);
        Recording::current()->backward(loss, {.last_micro_batch = true});
        optimizer.step({.scalars = scalars});
        optimizer.zero_grad();
        return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
      });
      int refused = 0;
      for (int s = 0; s < 9; ++s) {
        const std::vector<double> scalars = optimizer.next_scalars({.lr = 0.1});
        const std::string error = error_of([&] {
          step({}, token_rows(mesh, 6, 4, 11), token_rows(mesh, 6, 4, 11, 1), Tensor::from(scalars, {std::ssize(scalars)}));
        });
        if (error != "no error") {
          EXPECT_THAT(error, HasSubstr("now"));
          ++refused;
        }
      }
      EXPECT_EQ(refused, 1);
      EXPECT_NE(step.program(), nullptr);
      EXPECT_EQ(optimizer.steps(), 8);
    });
}

}  // namespace
}  // namespace sheaf::testing
