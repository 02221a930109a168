// Units on the tape: how often they are gathered, discarded and reduced, and that their gradients are right, on a chain of small layers
// that are driven by hand.
#include "sheaf/distributed/unit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/run_local.h"

namespace sheaf {
namespace {

constexpr int64_t kWidth = 37, kRows = 5;  // nothing divides

// x → tanh(x · w + b), a unit per layer, and a root that holds a scale used before and after them.
struct Chain {
  std::shared_ptr<GatherSchedule> schedule;
  std::shared_ptr<Unit> root;
  std::vector<std::shared_ptr<Unit>> layers;

  Chain(World& world, int depth, Strategy strategy, int64_t budget = -1) {
    const Mesh mesh = world.mesh({{"data", world.size()}});
    schedule = std::make_shared<GatherSchedule>(budget);
    const UnitOptions options{.mesh = mesh.spec, .strategy = strategy};
    root = std::make_shared<Unit>("", std::vector<LeafSpec>{{"scale", {kWidth}}}, options, schedule);
    for (int i = 0; i < depth; ++i) {
      const std::string name = "layers." + std::to_string(i);
      layers.push_back(std::make_shared<Unit>(
          name, std::vector<LeafSpec>{{name + ".w", {kWidth}}, {name + ".b", {1, kWidth}}, {name + ".unused", {3}}},
          options, schedule));
    }
    for (Unit* u : units()) fill(*u);
  }
  std::vector<Unit*> units() {
    std::vector<Unit*> all{root.get()};
    for (auto& l : layers) all.push_back(l.get());
    return all;
  }
  static void fill(Unit& unit) {
    unit.allocate(Device::cpu());
    for (FlatBuffer& b : unit.buffers())
      for (const LocalPiece& p : unit.pieces(b))
        for (int64_t i = 0; i < p.runs.numel(); ++i)
          b.shard.view().as<float>()[p.shard_offset + i] =
              0.3f + 0.01f * static_cast<float>(p.runs.at(i) * (p.leaf + 2) % 17);
  }
  Tensor forward(Tensor x) {
    root->enter();
    x = mul(x, root->value(0));
    for (auto& l : layers) {
      l->enter();
      x = tanh(add(mul(x, l->value(0)), l->value(1)));
      l->leave();
    }
    x = mul(x, root->value(0));
    root->leave();
    return x;
  }
};

Tensor input(World& world) {
  const Type type{kF32, {kRows, kWidth}, Layout(world.mesh({{"data", world.size()}}).spec, Placement::shard(0))};
  Tensor x = Tensor::empty(type);
  const int64_t first = type.local_start()[0];
  for (int64_t i = 0; i < x.local_shape().numel(); ++i)
    x.view().as<float>()[i] = 0.02f * static_cast<float>((first * kWidth + i) % 23) - 0.2f;
  return x;
}

using Gradients = std::map<std::string, std::vector<float>>;

Gradients gradients(int world, Strategy strategy, int depth) {
  Gradients all;
  std::mutex mutex;
  run_local(world, [&](World& w) {
    Chain chain(w, depth, strategy);
    {
      Recording recording;
      recording.backward(sum(chain.forward(input(w))));
    }
    std::lock_guard lock(mutex);
    for (Unit* u : chain.units())
      for (FlatBuffer& b : u->buffers())
        for (const LocalPiece& p : u->pieces(b)) {
          auto& whole = all[u->leaves()[p.leaf].name];
          whole.resize(u->leaves()[p.leaf].shape.numel());
          for (int64_t i = 0; i < p.runs.numel(); ++i)
            whole[p.runs.at(i)] = b.grad.view().as<float>()[p.shard_offset + i];
        }
  }, {.threads_per_rank = 1});
  return all;
}

TEST(Unit, GradientsEqualThoseOfOneRank) {
  const Gradients expected = gradients(1, Strategy::full_shard, 3);
  ASSERT_EQ(expected.size(), 10u);
  for (Strategy s : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::replicate})
    for (int world : {1, 2, 3, 4, 5, 7}) {
      SCOPED_TRACE(str(name(s), " at ", world));
      const Gradients actual = gradients(world, s, 3);
      for (const auto& [leaf, g] : expected) {
        ASSERT_EQ(actual.at(leaf).size(), g.size());
        for (size_t i = 0; i < g.size(); ++i) EXPECT_NEAR(actual.at(leaf)[i], g[i], 2e-6) << leaf << " " << i;
      }
    }
}

TEST(Unit, TapeHoldsTwoGathersAndOneReduceScatterPerLayer) {
  run_local(2, [&](World& w) {
    Chain chain(w, 3, Strategy::full_shard);
    for (int step = 0; step < 3; ++step) {
      Recording recording({.step = step});
      recording.backward(sum(chain.forward(input(w))));
      const Tape tape = recording.take();
      std::map<std::string, int> total;
      for (NodeId i = 0; i < tape.num_nodes(); ++i) {
        const Node& n = tape.node(i);
        if (tape.kind(n) != OpKind::leaf) ++total[tape.op_name(n) + " " + tape.path(n)];
      }
      EXPECT_EQ(total["all_gather layers.0"], 2) << to_text(tape);
      EXPECT_EQ(total["all_gather layers.1"], step == 0 ? 2 : 1);  // foreseen, it stays, as it would be prefetched again
      EXPECT_EQ(total["all_gather layers.2"], 1);  // its discard and second gather vanish
      EXPECT_EQ(total["all_gather "], 1);
      EXPECT_EQ(total["discard layers.0"], 2);
      EXPECT_EQ(total["discard layers.2"], 1);
      EXPECT_EQ(total["discard "], 1);
      for (const char* unit : {"", "layers.0", "layers.1", "layers.2"}) EXPECT_EQ(total[std::string("reduce_scatter ") + unit], 1);
      const int prefetched = [&] {
        int n = 0;
        for (NodeId i = 0; i < tape.num_nodes(); ++i) n += (tape.node(i).flags & Node::kPrefetched) != 0;
        return n;
      }();
      if (step == 0) EXPECT_EQ(prefetched, 0);
      else EXPECT_GE(prefetched, 4);
      for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.message << "\n" << to_text(tape);
      EXPECT_EQ(chain.schedule->mispredicted(), 0);
      EXPECT_LE(chain.schedule->peak_excess(), chain.schedule->budget());
      EXPECT_EQ(chain.schedule->gathered_bytes(), 0);
    }
  }, {.threads_per_rank = 1});
}

// Units that stay because they are foreseen count against the prefetch budget; they do not add to it.
TEST(Unit, NoMoreIsGatheredThanTheBudgetSays) {
  for (const int64_t given : {-1, 2400, 4000, 0})
    run_local(2, [&](World& w) {
      Chain chain(w, 12, Strategy::full_shard, given);
      GatherSchedule& schedule = *chain.schedule;
      const int64_t root = chain.root->gathered_bytes(), layer = chain.layers[0]->gathered_bytes();
      for (int step = 0; step < 3; ++step) {
        Recording recording({.step = step});
        recording.backward(sum(chain.forward(input(w))), {.last_micro_batch = true});
        for (Unit* unit : chain.units()) unit->zero_grad();
      }
      EXPECT_LE(schedule.peak_gathered_bytes(), root + layer + std::max(schedule.budget(), layer)) << given;
      EXPECT_LE(schedule.peak_excess(), schedule.budget()) << given;
      EXPECT_EQ(schedule.mispredicted(), 0) << given;
    }, {.threads_per_rank = 1});
}

// A unit that is open while others are prefetched may be needed again before them.
TEST(Unit, ForeseesUnitsAroundUnitsAndTwoBackwardsInAPass) {
  run_local(2, [](World& w) {
    const auto schedule = std::make_shared<GatherSchedule>();
    const UnitOptions options{.mesh = w.mesh({{"data", 2}}).spec, .strategy = Strategy::full_shard};
    const auto unit = [&](const std::string& name, int64_t size) {
      auto made = std::make_shared<Unit>(name, std::vector<LeafSpec>{{name + ".w", {kWidth}}, {name + ".more", {size}}}, options, schedule);
      Chain::fill(*made);
      return made;
    };
    const auto root = unit("", 10), around = unit("around", 20000), a = unit("around.a", 6000), b = unit("around.b", 6000),
               last = unit("around.last", 18000), small = unit("small", 100);
    for (int step = 0; step < 3; ++step) {
      Recording recording({.step = step});
      Tensor x = input(w);
      const auto use = [&](Unit& u) {
        u.enter();
        x = tanh(mul(x, u.value(0)));
        u.leave();
      };
      root->enter();
      x = mul(x, root->value(0));
      around->enter();
      use(*a);
      use(*b);
      x = tanh(mul(x, around->value(0)));
      use(*last);
      around->leave();
      use(*small);
      root->leave();
      recording.backward(sum(x));
      EXPECT_EQ(schedule->mispredicted(), 0) << "step " << step;
      EXPECT_LE(schedule->peak_excess(), schedule->budget()) << "step " << step;
    }
  }, {.threads_per_rank = 1});
  for (const int64_t given : {-1, 4000})
    run_local(2, [&](World& w) {
      Chain chain(w, 6, Strategy::full_shard, given);
      for (int step = 0; step < 4; ++step) {
        Recording recording({.step = step});
        Tensor losses[2];
        for (int micro = 0; micro < 2; ++micro) {
          if (micro > 0) recording.next_micro_batch(kRows * micro);
          losses[micro] = sum(chain.forward(input(w)));
        }
        recording.backward(losses[0]);
        recording.backward(losses[1], {.last_micro_batch = true});
        for (Unit* unit : chain.units()) unit->zero_grad();
        EXPECT_EQ(chain.schedule->mispredicted(), 0) << given << ", step " << step;
        EXPECT_LE(chain.schedule->peak_excess(), chain.schedule->budget()) << given << ", step " << step;
      }
    }, {.threads_per_rank = 1});
}

// Between the end of its scope and the backward a parameter may be used, in the first step as in later ones.
TEST(Unit, AValueStaysUntilTheBackwardBegins) {
  run_local(2, [](World& w) {
    Chain chain(w, 3, Strategy::full_shard);
    for (int step = 0; step < 3; ++step) {
      Recording recording({.step = step});
      Tensor x = input(w);
      chain.root->enter();
      const Tensor scale = chain.root->value(0);
      for (const auto& layer : chain.layers) {
        layer->enter();
        x = tanh(mul(x, layer->value(0)));
        layer->leave();
      }
      chain.root->leave();
      EXPECT_NO_THROW(mul(x, scale)) << "step " << step;
      recording.backward(sum(x), {.last_micro_batch = true});
      for (Unit* unit : chain.units()) unit->zero_grad();
    }
  }, {.threads_per_rank = 1});
}

// gradient() holds no more at a time than backward() does, which may follow it.
TEST(Unit, AGradientClosesWhatItGathers) {
  for (Strategy strategy : {Strategy::full_shard, Strategy::shard_grad_op}) {
    run_local(2, [&](World& w) {
      Chain chain(w, 5, strategy, /*budget=*/0);
      const auto reduced = [&] {
        std::vector<std::vector<float>> out;
        for (Unit* u : chain.units()) {
          out.push_back(u->buffers()[0].grad.to_vector());
          u->zero_grad();
        }
        return out;
      };
      {
        Recording recording;
        recording.backward(sum(chain.forward(input(w))));
      }
      const auto expected = reduced();
      const int64_t peak = chain.schedule->peak_gathered_bytes();
      {
        Recording recording;
        const Tensor x = recording.watch(input(w));
        const Tensor loss = sum(chain.forward(x));
        const auto once = recording.gradient(loss, std::vector{x}, {.keep = true})[0].to_vector();
        EXPECT_EQ(recording.gradient(loss, std::vector{x}, {.keep = true})[0].to_vector(), once);
        recording.backward(loss);
        const Tape tape = recording.take();
        for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.message << "\n" << to_text(tape);
      }
      EXPECT_EQ(chain.schedule->peak_gathered_bytes(), peak) << name(strategy);
      EXPECT_EQ(reduced(), expected);
    }, {.threads_per_rank = 1});
  }
}

// A prefetched gather is placed before the previous layer: the reduction must not wait until that layer's backward is done.
TEST(Unit, PrefetchDoesNotDelayReductions) {
  run_local(2, [&](World& w) {
    Chain chain(w, 3, Strategy::full_shard);
    for (int step = 0; step < 2; ++step) {
      Recording recording({.step = step});
      recording.backward(sum(chain.forward(input(w))));
      const Tape tape = recording.take();
      std::vector<std::string> order;  // where each layer's backward computes, and its reduction
      for (NodeId i = 0; i < tape.num_nodes(); ++i) {
        const Node& n = tape.node(i);
        if (n.phase != Phase::backward) continue;
        const std::string what = tape.op_name(n);
        if (what == "reduce_scatter" || what == "grad_slots") order.push_back(what + " " + tape.path(n));
      }
      const auto at = [&](const std::string& what) { return std::find(order.begin(), order.end(), what); };
      EXPECT_LT(at("reduce_scatter layers.2"), at("grad_slots layers.1")) << to_text(tape);
      EXPECT_LT(at("reduce_scatter layers.1"), at("grad_slots layers.0")) << to_text(tape);
    }
  }, {.threads_per_rank = 1});
}

TEST(Unit, AnotherOrderIsMispredictedAndStillRight) {
  run_local(2, [&](World& w) {
    Chain chain(w, 3, Strategy::full_shard);
    std::vector<float> expected;
    for (int step = 0; step < 4; ++step) {
      if (step >= 2) std::swap(chain.layers[0], chain.layers[2]);  // the schedule expects the previous order
      Recording recording({.step = step});
      Tensor loss = sum(chain.forward(input(w)));
      recording.backward(loss);
      EXPECT_EQ(chain.schedule->gathered_bytes(), 0);
    }
    EXPECT_GT(chain.schedule->mispredicted(), 0);
  }, {.threads_per_rank = 1});
}

TEST(Unit, WithoutRecordingNothingIsKept) {
  run_local(3, [&](World& w) {
    Chain chain(w, 2, Strategy::full_shard);
    for (int i = 0; i < 3; ++i) chain.forward(input(w));
    chain.schedule->flush();
    EXPECT_EQ(chain.schedule->gathered_bytes(), 0);
  }, {.threads_per_rank = 1});
}

TEST(Unit, DiscardedValueSaysSo) {
  run_local(2, [&](World& w) {
    Chain chain(w, 2, Strategy::full_shard);
    chain.layers[0]->enter();
    const Tensor kept = chain.layers[0]->value(0);
    chain.layers[0]->leave();
    chain.layers[1]->enter();
    try {
      add(kept, kept);
      ADD_FAILURE() << "no error";
    } catch (const LifetimeError& e) {
      EXPECT_NE(std::string(e.what()).find("layers.0"), std::string::npos) << e.what();
    }
    chain.layers[1]->leave();
  }, {.threads_per_rank = 1});
}

TEST(Unit, AReplayHasTheSameBits) {
  for (int world : {1, 3}) {
    run_local(world, [&](World& w) {
      std::vector<std::vector<float>> grads;
      std::unordered_map<ValueId, Tensor> leaves;
      std::vector<ValueId> wanted;
      Tape tape;
      {
        Chain chain(w, 3, Strategy::full_shard);
        const Tensor x = input(w);
        for (int step = 0; step < 2; ++step) {
          Recording recording({.step = step, .capture_leaves = true});
          recording.backward(sum(chain.forward(x)));
          if (step == 1) {
            for (Unit* u : chain.units()) {
              wanted.push_back(recording.value_of(u->buffers()[0].grad));
              grads.push_back(u->buffers()[0].grad.to_vector());
            }
            leaves = recording.captured();
            tape = recording.take();
          }
          for (Unit* u : chain.units()) u->zero_grad();
        }
      }
      const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return leaves.at(v); }, wanted);
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(again[i].to_vector(), grads[i]);
    }, {.threads_per_rank = 1});
  }
}

}  // namespace
}  // namespace sheaf
