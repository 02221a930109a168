// Islands that each train a model, and their outer optimizer: against its formula on each mesh, bitwise between strategies.
#include "sheaf/nn/optim/diloco.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/unsharded.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::for_each_sharding;
using testing::TinyBlock;
using testing::TinyModel;

using Values = std::map<std::string, std::vector<double>>;

struct Meshes {
  Mesh all, island;
  int index() const { return all.coordinate("island"); }
};

Meshes islands_of(World& w, int islands) {
  const Mesh all = w.mesh({{"island", islands}, {"data", w.size() / islands}});
  return {all, w.slice(all, "island")};
}

Values values(nn::Module& m) {
  Values out;
  for (const nn::Parameter& p : m.parameters()) out[p.name()] = full_parameter(p).to_vector<double>();
  return out;
}

// Tokens that no other island has.
void backward(TinyModel& m, const Meshes& meshes, int64_t round) {
  const int64_t shift = 29 * meshes.index() + 5 * round;
  Recording recording;
  recording.backward(m.loss(testing::token_rows(meshes.island, 6, 4, 11, shift), testing::token_rows(meshes.island, 6, 4, 11, shift + 1)));
}

constexpr int kRounds = 3;

// The islands' parameters before and after each outer step, by round and island.
struct Rounds {
  std::vector<std::vector<Values>> before, after;
  Values start;
};

struct Leveled : nn::Module {
  nn::Parameter weight{{5}, nn::Init::zeros()}, level{{5}, nn::Init::zeros()};
  Leveled() { level.steer(0.25); }
  SHEAF_FIELDS(weight, level);
};

Rounds run_rounds(int islands, int ranks, ShardOptions options, const optim::DiLoCoOptions& outer_options, DType dtype) {
  options.whole_blocks = outer_options.moves == optim::Moves::int8;
  Rounds out;
  out.before.assign(kRounds, std::vector<Values>(static_cast<size_t>(islands)));
  out.after = out.before;
  std::mutex mutex;
  run_local(islands * ranks, [&](World& w) {
    const Meshes meshes = islands_of(w, islands);
    TinyModel m;
    m.blocks[1].norm.bias.freeze();
    shard(m, meshes.island, options);
    materialize(m, Device::cpu(), {.seed = 4, .dtype = dtype});
    optim::SGD inner(m, {.lr = 0.3, .momentum = 0.5});
    optim::DiLoCo outer(m, meshes.all, "island", outer_options);
    EXPECT_EQ(outer.islands(), islands);
    EXPECT_EQ(outer.island(), meshes.index());
    const auto note = [&](Values& to) {
      const Values now = values(m);
      const std::lock_guard lock(mutex);
      if (meshes.island.coordinate("data") == 0) to = now;
    };
    note(out.start);
    for (size_t round = 0; round < kRounds; ++round) {
      for (int64_t k = 0; k < 2; ++k) {
        backward(m, meshes, static_cast<int64_t>(round) * 2 + k);
        inner.step();
        inner.zero_grad();
      }
      note(out.before[round][static_cast<size_t>(meshes.index())]);
      outer.step();
      note(out.after[round][static_cast<size_t>(meshes.index())]);
    }
  });
  return out;
}

TEST(DiLoCo, AgreesWithTheFormula) {
  for (const auto& [islands, ranks] : std::vector<std::pair<int, int>>{{1, 1}, {1, 2}, {2, 1}, {3, 1}, {5, 1}, {2, 2}, {3, 2}, {2, 3}})
    for (const char* strategy : {"full_shard", "zero1", "replicate"}) {
      SCOPED_TRACE(str(islands, " islands of ", ranks, ", ", strategy));
      const double lr = 0.6, momentum = islands == 3 ? 0 : 0.8;
      const Rounds r = run_rounds(islands, ranks, {.units = nn::units_of<TinyBlock>(), .strategy = strategy}, {.lr = lr, .momentum = momentum}, kF64);
      Values q = r.start, b;
      for (auto& [name, x] : q) b[name].assign(x.size(), 0.0);
      for (size_t round = 0; round < kRounds; ++round) {
        if (islands > 1) {
          EXPECT_NE(r.before[round][0], r.before[round][1]);
        }
        for (auto& [name, x] : q)
          for (size_t i = 0; i < x.size(); ++i) {
            double mean = 0;
            for (const Values& of : r.before[round]) mean += of.at(name)[i] / islands;
            const double g = x[i] - mean;
            b[name][i] = momentum * b[name][i] + g;
            x[i] -= lr * (g + momentum * b[name][i]);
          }
        for (const Values& of : r.after[round]) {
          EXPECT_EQ(of, r.after[round][0]);
          for (const auto& [name, x] : q)
            for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(of.at(name)[i], x[i], 1e-13) << name << " " << i;
        }
      }
      EXPECT_EQ(q.at("blocks.1.norm.bias"), r.start.at("blocks.1.norm.bias"));
    }
}

double largest_difference(const Values& a, const Values& b) {
  double worst = 0;
  for (const auto& [name, x] : a)
    for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(x[i] - b.at(name)[i]));
  return worst;
}

// Sent moves are rounded, but all islands still have the same bits.
TEST(DiLoCo, MovesInFewerBitsAreNearThoseInAll) {
  for (const auto& [islands, ranks] : std::vector<std::pair<int, int>>{{1, 2}, {2, 1}, {3, 1}, {5, 1}, {2, 2}, {3, 2}, {2, 3}})
    for (const char* strategy : {"full_shard", "replicate"}) {
      const ShardOptions options{.units = nn::units_of<TinyBlock>(), .strategy = strategy};
      const Rounds exact = run_rounds(islands, ranks, options, {}, kF64);
      const double moved = largest_difference(exact.before[0][0], exact.start);
      for (const auto& [moves, most] : {std::pair(optim::Moves::bf16, 0.02), {optim::Moves::int8, 0.04}}) {
        SCOPED_TRACE(str(islands, " islands of ", ranks, ", ", strategy, most < 0.03 ? ", bf16" : ", int8"));
        const Rounds r = run_rounds(islands, ranks, options, {.moves = moves}, kF64);
        EXPECT_EQ(r.before[0], exact.before[0]);
        for (const Values& of : r.after[0]) {
          EXPECT_EQ(of, r.after[0][0]);
          EXPECT_NE(of, exact.after[0][0]);
          EXPECT_LT(largest_difference(of, exact.after[0][0]), most * moved);
        }
        for (size_t round = 1; round < kRounds; ++round)
          for (const Values& of : r.after[round]) EXPECT_EQ(of, r.after[round][0]);
      }
    }
}

TEST(DiLoCo, BeginsAnewWithoutMomentum) {
  run_local(2, [](World& w) {
    const Meshes meshes = islands_of(w, 2);
    TinyModel m, n;
    for (TinyModel* model : {&m, &n}) {
      shard(*model, meshes.island);
      materialize(*model, Device::cpu(), {.seed = 4, .dtype = kF64});
    }
    const auto round = [&](TinyModel& model, optim::DiLoCo& outer) {
      optim::SGD sgd(model, {.lr = 0.3});
      backward(model, meshes, 0);
      sgd.step();
      sgd.zero_grad();
      outer.step();
    };
    optim::DiLoCo of_m(m, meshes.all, "island");
    round(m, of_m);
    for (size_t u = 0; u < units(m).size(); ++u)
      for (size_t b = 0; b < units(m)[u]->buffers().size(); ++b) store_into(units(n)[u]->buffers()[b].shard, units(m)[u]->buffers()[b].shard);
    optim::DiLoCo of_n(n, meshes.all, "island");
    of_m.begin();
    round(m, of_m);
    round(n, of_n);
    EXPECT_EQ(values(m), values(n));
  });
}

// Weights gathered before an outer step are not used after it.
TEST(DiLoCo, GathersAnewBehindAStep) {
  run_local(4, [](World& w) {
    const Meshes meshes = islands_of(w, 2);
    TinyModel m;
    shard(m, meshes.island, {.strategy = "zero1"});
    materialize(m, Device::cpu(), {.seed = 4, .dtype = kF64});
    optim::SGD sgd(m, {.lr = 0.3});
    optim::DiLoCo outer(m, meshes.all, "island");
    backward(m, meshes, 0);
    sgd.step();
    const auto loss = [&] {
      const Tensor l = m.loss(testing::token_rows(meshes.island, 6, 4, 11), testing::token_rows(meshes.island, 6, 4, 11, 1));
      return redistribute(l, "data", Placement::invariant()).item<double>();
    };
    double behind = 0;
    {
      const Recording recording;
      const double before = loss();
      outer.step();
      behind = loss();
      EXPECT_NE(behind, before);
    }
    EXPECT_EQ(loss(), behind);
  });
}

// Nor are those gathered before islands went back to what they had agreed on.
TEST(DiLoCo, GathersAnewBehindAReturn) {
  run_local(4, [](World& w) {
    const Meshes meshes = islands_of(w, 2);
    TinyModel m;
    shard(m, meshes.island, {.units = nn::units_of<TinyBlock>()});
    materialize(m, Device::cpu(), {.seed = 4, .dtype = kF64});
    optim::SGD sgd(m, {.lr = 0.3});
    optim::DiLoCo outer(m, meshes.all, "island");
    const auto table = [&] { return m.table.weight.value().to_vector<double>(); };
    const auto loss = [&] {
      const Tensor l = m.loss(testing::token_rows(meshes.island, 6, 4, 11), testing::token_rows(meshes.island, 6, 4, 11, 1));
      return redistribute(l, "data", Placement::invariant()).item<double>();
    };
    const double agreed = loss();
    const std::vector<double> values = table();
    backward(m, meshes, 0);
    sgd.step();
    EXPECT_NE(loss(), agreed);  // leaves the root and the last block gathered
    outer.go_back();
    EXPECT_EQ(table(), values);
    EXPECT_EQ(loss(), agreed);
  });
}

// What has no slope is agreed on by its mean, whatever the outer step's rate.
TEST(DiLoCo, WhatIsSteeredBecomesItsMean) {
  run_local(4, [](World& w) {
    const Meshes meshes = islands_of(w, 2);
    Leveled m;
    shard(m, meshes.island);
    materialize(m, Device::cpu(), {.seed = 4});
    optim::SGD sgd(m, {.lr = 0.5});
    optim::DiLoCo outer(m, meshes.all, "island", {.lr = 0.75, .momentum = 0.5});
    {
      Recording recording;
      recording.backward(redistribute(sum(m.level + m.weight) * (outer.island() == 0 ? 0.0 : 1.0), "data", Placement::partial()));
    }
    sgd.step();
    EXPECT_EQ(full_parameter(m.level).to_vector(), std::vector<float>(5, outer.island() == 0 ? 0.0f : -0.25f));
    outer.step();
    EXPECT_EQ(full_parameter(m.level).to_vector(), std::vector<float>(5, -0.125f));
  });
}

// Nor are those of a model that is kept whole used after an outer step in a program.
TEST(DiLoCo, IsSeenByWholeModelsInPrograms) {
  const auto losses = [](bool compiled) {
    std::vector<double> out;
    run_local(4, [&](World& w) {
      const Meshes meshes = islands_of(w, 2);
      TinyModel m;
      shard(m, meshes.island, {.units = nn::units_of<TinyBlock>(), .strategy = "full_shard"});
      materialize(m, Device::cpu(), {.seed = 4});
      optim::SGD sgd(m, {.lr = 0.3});
      optim::DiLoCo outer(m, meshes.all, "island");
      const auto code = [&](const Tensor& x) {
        outer.step();
        return x + 1;
      };
      auto step = compile(code);
      const nn::Unsharded whole(m);
      const Tensor x = Tensor::from(std::vector<float>{1}, {1});
      for (int64_t round = 0; round < 5; ++round) {  // the last two run the program
        backward(m, meshes, round);
        sgd.step();
        sgd.zero_grad();
        if (compiled) {
          step({.step = round}, x);
        } else {
          const Recording recording({.step = round});
          code(x);
        }
        const Tensor l = m.loss(testing::token_rows(meshes.island, 6, 4, 11), testing::token_rows(meshes.island, 6, 4, 11, 1));
        const double loss = redistribute(l, "data", Placement::invariant()).item<float>();
        if (w.rank() == 0) out.push_back(loss);
      }
    });
    return out;
  };
  const std::vector<double> eager = losses(false);
  EXPECT_NE(eager[3], eager[4]);
  EXPECT_EQ(losses(true), eager);
}

TEST(DiLoCo, HasTheSameBitsWithEveryStrategy) {
  for (const optim::Moves moves : {optim::Moves::whole, optim::Moves::bf16, optim::Moves::int8}) {
    std::vector<Values> first;
    for_each_sharding(2, [&](StrategyChoice strategy, const nn::UnitPolicy& units, int64_t prefetch, const char* name) {
      SCOPED_TRACE(name);
      const ShardOptions options{.units = units, .strategy = strategy, .prefetch_bytes = prefetch};
      const std::vector<Values> here = run_rounds(2, 2, options, {.moves = moves}, kF32).after.back();
      if (first.empty()) first = here;
      EXPECT_EQ(here, first);
    });
  }
}

// With one step of plain SGD per island, the mean equals a step with the mean gradient.
TEST(DiLoCo, OfOneStepIsDataParallelism) {
  Values together;
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    TinyModel m;
    shard(m, mesh);
    materialize(m, Device::cpu(), {.seed = 4, .dtype = kF64});
    optim::SGD sgd(m, {.lr = 0.3});
    const auto tokens = [&](int64_t shift) {  // those of both islands, concatenated
      const auto rows = testing::token_rows({}, 6, 4, 11, 29 * w.rank() + shift).to_vector<int32_t>();
      return Tensor::from_local(rows, {kI32, {12, 4}, Layout(mesh.spec, Placement::shard(0))});
    };
    {
      Recording recording;
      recording.backward(m.loss(tokens(0), tokens(1)));
    }
    sgd.step();
    const Values now = values(m);
    if (w.rank() == 0) together = now;
  });
  run_local(2, [&](World& w) {
    const Meshes meshes = islands_of(w, 2);
    TinyModel m;
    shard(m, meshes.island);
    materialize(m, Device::cpu(), {.seed = 4, .dtype = kF64});
    optim::SGD sgd(m, {.lr = 0.3});
    optim::DiLoCo outer(m, meshes.all, "island", {.lr = 1, .momentum = 0});
    backward(m, meshes, 0);
    sgd.step();
    outer.step();
    for (const auto& [name, x] : values(m))
      for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], together.at(name)[i], 1e-14) << name << " " << i;
  });
}

// If moves are rounded, each island holds all parameters of the last outer step.
void expect_state_is_cut(optim::Moves moves) {
  for (const auto& [islands, ranks] : std::vector<std::pair<int, int>>{{2, 2}, {3, 1}, {5, 1}}) {
    std::mutex mutex;
    std::map<std::string, std::vector<int>> times[2];  // how often each element is held: of values, of momentum
    int64_t bytes = 0, masters = 0;
    run_local(islands * ranks, [&, islands = islands](World& w) {
      const Meshes meshes = islands_of(w, islands);
      TinyModel m;
      shard(m, meshes.island, {.units = nn::units_of<TinyBlock>(), .whole_blocks = moves == optim::Moves::int8});
      materialize(m, Device::cpu(), {.seed = 4});
      const optim::DiLoCo outer(m, meshes.all, "island", {.moves = moves});
      const std::lock_guard lock(mutex);
      bytes += outer.state_bytes();
      for (const optim::OuterShard& shard : outer.shards()) {
        if (w.rank() < w.size() / islands) masters += shard.flat().shard.local_bytes();
        for (const optim::OuterState* state : {&shard.values, &shard.momentum})
          for (const auto& [piece, at] : state->parts) {
            const LeafSpec& leaf = shard.unit->leaves()[static_cast<size_t>(piece.leaf)];
            auto& of = times[state == &shard.momentum][leaf.name];
            of.resize(static_cast<size_t>(leaf.shape.numel()));
            for (int64_t i = 0; i < piece.runs.numel(); ++i) ++of[static_cast<size_t>(piece.runs.at(i))];
            EXPECT_LE(at + piece.runs.numel(), state->tensor.local_shape().numel());
          }
      }
    });
    const int copies = moves == optim::Moves::whole ? 1 : islands;
    EXPECT_EQ(bytes, (copies + 1) * masters);
    EXPECT_EQ(times[0].size(), times[1].size());
    EXPECT_FALSE(times[0].empty());
    for (const auto& [name, of] : times[0]) EXPECT_EQ(of, std::vector<int>(of.size(), copies)) << name;
    for (const auto& [name, of] : times[1]) EXPECT_EQ(of, std::vector<int>(of.size(), 1)) << name;
  }
}

TEST(DiLoCo, StateIsCutOverAllRanks) {
  for (const optim::Moves moves : {optim::Moves::whole, optim::Moves::bf16, optim::Moves::int8}) expect_state_is_cut(moves);
}

TEST(DiLoCo, IsATapeOfRedistributions) {
  run_local(4, [](World& w) {
    const Meshes meshes = islands_of(w, 2);
    TinyModel m;
    shard(m, meshes.island);
    materialize(m, Device::cpu(), {.seed = 4});
    optim::DiLoCo outer(m, meshes.all, "island");
    Recording recording;
    outer.step();
    const Tape tape = recording.take();
    const std::string text = to_text(tape);
    for (const char* part : {"mean", "all_to_all", "Shard(2 by 32)@island", "Shard(1 by 32)@island", "sgd", "Replicate@island", "Shard(0)@island"})
      EXPECT_THAT(text, HasSubstr(part));
    EXPECT_THAT(check_types(tape), ::testing::IsEmpty());
  });
}

TEST(DiLoCo, RefusesOtherMeshes) {
  run_local(2, [](World& w) {
    TinyModel m;
    const Mesh data = w.mesh({{"data", 2}});
    shard(m, data);
    materialize(m, Device::cpu());
    const Mesh all = w.mesh({{"island", 2}, {"data", 1}});
    const auto message = [](auto&& f) -> std::string {
      try {
        f();
      } catch (const ConfigError& e) {
        return e.what();
      }
      return "";
    };
    EXPECT_THAT(message([&] { optim::DiLoCo(m, all, "island"); }),
                HasSubstr("is sharded over (data=2), and islands have that of (island=2, data=1)"));
    EXPECT_THAT(message([&] { w.slice(data, "data"); }), HasSubstr("has none"));
    EXPECT_EQ(w.slice(all, "island").spec, w.slice(all, "island").spec);
    EXPECT_THAT(message([&] { w.slice(w.mesh({{"replica", 2}, {"data", 1}}), "replica"); }), HasSubstr("is in use already"));
    TinyModel n;
    shard(n, w.slice(all, "island"));
    materialize(n, Device::cpu());
    EXPECT_THAT(message([&] { optim::DiLoCo(n, all, "island", {.lr = 0}); }), HasSubstr("lr is 0"));
    EXPECT_THAT(message([&] { optim::DiLoCo(n, all, "island", {.momentum = 1}); }), HasSubstr("momentum is 1"));
    TinyModel half(0, 11, 5);  // 64 elements, and 32
    shard(half, w.slice(all, "island"));
    materialize(half, Device::cpu());
    EXPECT_THAT(message([&] { optim::DiLoCo(half, all, "island", {.moves = optim::Moves::int8}); }),
                HasSubstr("shard it with ShardOptions::whole_blocks"));
  });
}

}  // namespace
}  // namespace sheaf
