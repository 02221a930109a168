// An exception in a derivative loses the gradients of its backward, and after zero_grad() nothing else: the recording, or the next one,
// continues as if the backward had not run. Without it, a gradient that contains a part of that backward is an error.
#include <gtest/gtest.h>

#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

struct Thrown : std::runtime_error { Thrown() : std::runtime_error("thrown") {} };
thread_local int fails_at = -1, guards = 0;  // the index of the guard that throws in the backward; the number of guards

Tensor guarded(const Tensor& x) {
  const int me = guards++;
  return custom_vjp([](const Tensor& t) { return t; }, [me](Vjp& c) {
    if (me == fails_at) throw Thrown();
    c.set(0, c.grad());
  }, x);
}

struct Block : nn::Module {
  nn::LayerNorm norm{7};
  nn::Linear up{7, 21}, down{21, 7};
  Tensor forward(const Tensor& x) { return x + guarded(down(guarded(tanh(up(norm(x)))))); }
  SHEAF_FIELDS(norm, up, down);
};

struct Net : nn::Module {
  nn::Embedding table{11, 7, nn::Init::normal(0.5)};
  std::vector<Block> blocks = std::vector<Block>(3);
  nn::LayerNorm norm{7, {.bias = false}};
  Tensor forward(const Tensor& tokens) {
    Tensor x = guarded(table(tokens));
    for (Block& b : blocks) x = b(x);
    return norm(x);
  }
  SHEAF_FIELDS(table, blocks, norm);
  Tensor loss(const Tensor& tokens, const Tensor& targets) {
    const auto scope = enter();
    return guarded(linear_cross_entropy((*this)(tokens), table.weight, targets));
  }
};

enum class Then { no_failure, new_recording, next_micro_batch, same_micro_batch };

std::vector<std::vector<double>> gradients(int world, const char* strategy, bool recompute, Then then, int at = -1) {
  std::vector<std::vector<double>> out;
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    Net net;
    shard(net, mesh, {.units = nn::units_of<Block>(), .strategy = strategy});
    materialize(net, Device::cpu(), {.seed = 4});
    if (recompute)
      for (Block& b : net.blocks) b.recompute();
    const auto step = [&](int sample, int fails) {
      guards = 0, fails_at = fails;
      const Tensor loss = net.loss(token_rows(mesh, 3, 5, 11, sample), token_rows(mesh, 3, 5, 11, sample + 1));
      Recording::current()->backward(loss, {.last_micro_batch = fails < 0});
    };
    const auto zero_grad = [&] {
      for (const auto& unit : units(net)) unit->zero_grad();
    };
    for (int s = 0; s < 2; ++s) {  // the order of gathers is known from the second step on
      Recording r;
      step(s, -1);
      zero_grad();
    }
    auto recording = std::make_unique<Recording>();
    if (then != Then::no_failure) {
      EXPECT_THROW(step(5, at), Thrown);
      zero_grad();
      if (then == Then::new_recording) recording = nullptr, recording = std::make_unique<Recording>();
      if (then == Then::next_micro_batch) recording->next_micro_batch(20);
    }
    step(7, -1);
    recording = nullptr;
    std::vector<std::vector<double>> mine;
    for (const nn::Parameter& p : net.parameters()) mine.push_back(full_gradient(p).to_vector<double>());
    if (w.rank() == 0) out = mine;
  }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
  return out;
}

TEST(FailedBackward, LeavesNothingBehind) {
  for (const int world : {1, 2, 3})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
      for (const bool recompute : {false, true}) {
        const auto expected = gradients(world, strategy, recompute, Then::no_failure);
        for (const Then then : {Then::new_recording, Then::next_micro_batch, Then::same_micro_batch})
          for (int at = 0; at < 8; ++at)
            EXPECT_EQ(gradients(world, strategy, recompute, then, at), expected)
                << world << ' ' << strategy << ' ' << recompute << ' ' << static_cast<int>(then) << ' ' << at;
      }
}

TEST(FailedBackward, DoesNotStayInGradients) {
  for (const int world : {1, 2})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
      run_local(world, [&](World& w) {
        const Mesh mesh = w.mesh({{"data", w.size()}});
        for (int at = 0; at < 8; ++at) {
          Net net;
          shard(net, mesh, {.units = nn::units_of<Block>(), .strategy = strategy});
          materialize(net, Device::cpu(), {.seed = 4});
          const auto micro_batch = [&](int sample, int fails) {
            guards = 0, fails_at = fails;
            Recording recording({.first_sample = sample});
            recording.backward(net.loss(token_rows(mesh, 3, 5, 11, sample), token_rows(mesh, 3, 5, 11, sample + 1)));
          };
          micro_batch(5, -1);
          std::vector<std::vector<double>> before;
          for (const nn::Parameter& p : net.parameters()) before.push_back(full_gradient(p).to_vector<double>());
          EXPECT_THROW(micro_batch(6, at), Thrown);
          int refused = 0;
          for (size_t i = 0; i < before.size(); ++i) try {
              EXPECT_EQ(full_gradient(net.parameters()[i]).to_vector<double>(), before[i]) << strategy << ' ' << at;
            } catch (const LifetimeError& e) {
              ++refused;
              EXPECT_NE(std::string(e.what()).find("a backward failed after it had added to these gradients"), std::string::npos);
            }
          EXPECT_EQ(refused > 0, at < 5) << strategy << ' ' << at << ": " << refused;  // the last block is finished first
          for (const auto& unit : units(net)) unit->zero_grad();
          micro_batch(7, -1);
          for (const nn::Parameter& p : net.parameters()) EXPECT_TRUE(full_gradient(p));
        }
      }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
