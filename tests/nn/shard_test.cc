#include "sheaf/nn/shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TinyBlock;
using testing::TinyModel;

std::vector<std::string> unit_names(nn::Module& m) {
  std::vector<std::string> out;
  for (const auto& u : units(m)) out.push_back(u->name());
  return out;
}
std::vector<std::string> leaf_names(const Unit& u) {
  std::vector<std::string> out;
  for (const LeafSpec& l : u.leaves()) out.push_back(l.name);
  return out;
}
Mesh data_mesh(World& w) { return w.mesh({{"data", w.size()}}); }

TEST(Shard, WithoutItThereIsOneUnit) {
  TinyModel m(1);
  materialize(m);
  EXPECT_THAT(unit_names(m), ElementsAre(""));
  EXPECT_EQ(units(m)[0]->strategy(), Strategy::none);
  EXPECT_THROW(materialize(m), ConfigError);
  EXPECT_THROW(shard(m, Mesh{}), ConfigError);
}

TEST(Shard, UnitsByTypePathPredicateAndCount) {
  TinyModel by_type, by_path, by_predicate, by_count;
  shard(by_type, Mesh{}, {.units = nn::units_of<TinyBlock>()});
  shard(by_path, Mesh{}, {.units = nn::units_at({"blocks.1", "norm"})});
  shard(by_predicate, Mesh{}, {.units = nn::units_where([](nn::Module&, const std::string& path) {
                                 return path.ends_with(".up");
                               })});
  // up: 7·21+21 = 168, down: 21·7+7 = 154, norm: 14. Post-order: up reaches 150, then down; the rest of the block (its norm) does not.
  shard(by_count, Mesh{}, {.units = nn::units_of_at_least(150)});
  for (nn::Module* m : {&by_type, &by_path, &by_predicate, &by_count}) materialize(*m);
  EXPECT_THAT(unit_names(by_type), ElementsAre("", "blocks.0", "blocks.1"));
  EXPECT_THAT(unit_names(by_path), ElementsAre("", "blocks.1", "norm"));
  EXPECT_THAT(unit_names(by_predicate), ElementsAre("", "blocks.0.up", "blocks.1.up"));
  EXPECT_THAT(unit_names(by_count), ElementsAre("", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"));
  EXPECT_THAT(leaf_names(*units(by_type)[0]), ElementsAre("table.weight", "norm.weight"));
  TinyModel larger;
  shard(larger, Mesh{}, {.units = nn::units_of_at_least(200)});  // only whole blocks reach that
  materialize(larger);
  EXPECT_THAT(unit_names(larger), ElementsAre("", "blocks.0", "blocks.1"));
}

TEST(Shard, UnknownPathsAxesAndStrategiesAreNamed) {
  run_local(1, [](World& w) {
    TinyModel m;
    const auto message = [&](const ShardOptions& options) -> std::string {
      try {
        shard(m, data_mesh(w), options);
      } catch (const ConfigError& e) {
        return e.what();
      }
      return "";
    };
    EXPECT_THAT(message({.units = nn::units_at({"blocks.7"})}), HasSubstr("'blocks.7'; there are: blocks.0"));
    EXPECT_THAT(message({.axis = "model"}), HasSubstr("model"));
    EXPECT_THAT(message({.compute_dtype = kI32}), HasSubstr("it is bf16, f16, f32 or f64"));
    EXPECT_THROW(StrategyChoice("hybrid"), ConfigError);
    EXPECT_THROW(StrategyChoice("fsdp"), ConfigError);
    EXPECT_EQ(StrategyChoice("shard_grad_op").value, Strategy::shard_grad_op);
  });
}

struct Lone : nn::Module {
  nn::Parameter weight{{3}, nn::Init::ones()};
  SHEAF_FIELDS(weight);
};

// Else the model would silently be one unit.
TEST(Shard, ByAPolicyThatChoosesNothingIsRefused) {
  const auto message = [](nn::Module& m, const nn::UnitPolicy& units) {
    return message_of<ConfigError>(ExitCode::kConfig, [&] { shard(m, Mesh{}, {.units = units}); });
  };
  TinyModel m(1);
  Lone lone;
  EXPECT_THAT(message(m, nn::units_of<nn::Dropout>()),
              HasSubstr("[shard] ShardOptions::units: units_of<sheaf::nn::Dropout>() chooses no module of this sheaf::testing::TinyModel, which "
                        "has modules of types sheaf::nn::Embedding, sheaf::nn::LayerNorm, sheaf::nn::Linear, sheaf::testing::TinyBlock; for one "
                        "unit leave `units` out"));
  EXPECT_THAT(message(m, nn::units_where([](nn::Module&, const std::string& path) { return path.starts_with("block."); })),
              HasSubstr("the predicate chooses no module of this sheaf::testing::TinyModel, which has modules blocks.0 blocks.0.down"));
  EXPECT_THAT(message(lone, nn::units_of<TinyBlock>()), HasSubstr("which has no modules; for one unit"));
}

// The sharded module is a unit in any case, inner calls have chosen some, and a minimum may be more than there is.
TEST(Shard, MayBeOneUnitByAPolicy) {
  TinyModel root(1), inner(1), small(1);
  shard(root, Mesh{}, {.units = nn::units_of<TinyModel>()});
  shard(inner.blocks[0], Mesh{});
  shard(inner, Mesh{}, {.units = nn::units_of<TinyBlock>()});
  shard(small, Mesh{}, {.units = nn::units_of_at_least(1'000'000)});
  for (nn::Module* m : {&root, &inner, &small}) materialize(*m);
  EXPECT_THAT(unit_names(root), ElementsAre(""));
  EXPECT_THAT(unit_names(inner), ElementsAre("", "blocks.0"));
  EXPECT_THAT(unit_names(small), ElementsAre(""));
}

// A call that is refused marks nothing: the next one is as the first.
TEST(Shard, MayBeCalledAgainAfterItWasRefused) {
  run_local(2, [](World& w) {
    TinyModel m;
    shard(m.blocks[1], data_mesh(w), {.strategy = "zero1"});
    EXPECT_THROW(shard(m, data_mesh(w), {.units = nn::units_at({"blocks.0", "blocks.7"})}), ConfigError);
    EXPECT_THROW(shard(m, data_mesh(w), {.units = nn::units_at({"blocks.0", "blocks.1"})}), ConfigError);
    shard(m, data_mesh(w), {.units = nn::units_at({"blocks.0"}), .strategy = "replicate"});
    materialize(m);
    EXPECT_THAT(unit_names(m), ElementsAre("", "blocks.0", "blocks.1"));
    EXPECT_EQ(units(m)[1]->strategy(), Strategy::replicate);
    EXPECT_EQ(units(m)[2]->strategy(), Strategy::zero1);
  });
}

TEST(Shard, BottomUpWithOptionsPerUnit) {
  run_local(2, [](World& w) {
    TinyModel m;
    shard(m.blocks[1], data_mesh(w), {.units = nn::units_at({"up"}), .strategy = Strategy::shard_grad_op});
    shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>(), .strategy = "replicate"});
    materialize(m);
    EXPECT_THAT(unit_names(m), ElementsAre("", "blocks.0", "blocks.1", "blocks.1.up"));
    std::vector<Strategy> strategies;
    for (const auto& u : units(m)) strategies.push_back(u->strategy());
    EXPECT_THAT(strategies, ElementsAre(Strategy::replicate, Strategy::replicate, Strategy::shard_grad_op,
                                        Strategy::shard_grad_op));
    for (const auto& u : units(m)) EXPECT_EQ(u->schedule().get(), &gather_schedule(m));

    TinyModel half;  // the outer call is missing
    shard(half.blocks[0], data_mesh(w));
    try {
      materialize(half);
      ADD_FAILURE();
    } catch (const ConfigError& e) {
      EXPECT_THAT(e.what(), HasSubstr("'table.weight' is in no unit"));
    }
  });
}

TEST(Shard, LeafOfSeveralUnitsBelongsToTheirCommonAncestor) {
  TinyModel m(3);
  tie(m.blocks[2].up.weight, m.blocks[0].up.weight);
  tie(m.blocks[1].down.weight, m.blocks[1].up.weight = nn::Parameter({7, 21}, nn::Init::normal(1)));
  shard(m, Mesh{}, {.units = nn::units_where([](nn::Module& module, const std::string& path) {
                      return dynamic_cast<TinyBlock*>(&module) || path == "blocks.1.up" || path == "blocks.1.down";
                    })});
  materialize(m);
  EXPECT_THAT(leaf_names(*units(m)[0]), ElementsAre("table.weight", "blocks.0.up.weight", "norm.weight"));
  EXPECT_EQ(m.blocks[2].up.weight.unit(), units(m)[0]);
  EXPECT_EQ(m.blocks[1].down.weight.unit()->name(), "blocks.1");
}

// All parameters, whole, by name.
std::map<std::string, std::vector<float>> values(nn::Module& m) {
  std::map<std::string, std::vector<float>> out;
  for (const nn::Parameter& p : m.parameters()) out[p.name()] = full_parameter(p).to_vector<float>();
  return out;
}

TEST(Materialize, SameBitsAtAnyWorldAndStrategy) {
  std::map<std::string, std::vector<float>> expected;
  {
    TinyModel m;
    materialize(m, Device::cpu(), {.seed = 11});
    expected = values(m);
  }
  ASSERT_NE(expected["table.weight"][0], expected["table.weight"][1]);
  for (int world = 1; world <= 5; ++world)
    for (Strategy s : {Strategy::replicate, Strategy::shard_grad_op, Strategy::full_shard})
      run_local(world, [&](World& w) {
        TinyModel m;
        shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>(), .strategy = s});
        materialize(m, Device::cpu(), {.seed = 11});
        EXPECT_EQ(values(m), expected) << "world " << world << " " << name(s);
      }, {.threads_per_rank = 1});
  TinyModel other;
  materialize(other, Device::cpu(), {.seed = 12});
  EXPECT_NE(values(other)["table.weight"], expected["table.weight"]);
  TinyModel wide;
  materialize(wide, Device::cpu(), {.seed = 11, .dtype = kF64});
  EXPECT_EQ(wide.table.weight.dtype(), kF64);
  EXPECT_EQ(values(wide)["table.weight"], expected["table.weight"]);  // drawn in f64, rounded to f32
}

struct Kinds : nn::Module {
  nn::Parameter zeros{{9}, nn::Init::zeros()}, ones{{9}, nn::Init::ones()}, constant{{9}, nn::Init::constant(2.5)},
      normal{{4000}, nn::Init::normal(0.1)}, uniform{{4000}, nn::Init::uniform(0.5)};
  Tensor forward(const Tensor& x) { return x; }
  SHEAF_FIELDS(zeros, ones, constant, normal, uniform);
};

TEST(Materialize, InitKinds) {
  Kinds m;
  materialize(m, Device::cpu(), {.seed = 1});
  EXPECT_EQ(full_parameter(m.zeros).to_vector<float>(), std::vector<float>(9, 0.0f));
  EXPECT_EQ(full_parameter(m.ones).to_vector<float>(), std::vector<float>(9, 1.0f));
  EXPECT_EQ(full_parameter(m.constant).to_vector<float>(), std::vector<float>(9, 2.5f));
  double squares = 0;
  for (float x : full_parameter(m.normal).to_vector<float>()) squares += x * x;
  EXPECT_NEAR(std::sqrt(squares / 4000), 0.1, 0.005);
  float low = 1, high = -1;
  for (float x : full_parameter(m.uniform).to_vector<float>()) low = std::min(low, x), high = std::max(high, x);
  EXPECT_TRUE(low >= -0.5f && low < -0.49f && high <= 0.5f && high > 0.49f) << low << " " << high;
}

TEST(Materialize, EachRankHoldsOnlyItsPieces) {
  run_local(3, [](World& w) {
    Allocator& memory = *RankContext::current().cpu;
    TinyModel m(2, 500, 30);
    shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>()});
    const int64_t before = memory.stats().live;
    memory.reset_peak();
    materialize(m);
    int64_t bytes = 0;
    for (const auto& u : units(m))
      for (const FlatBuffer& b : u->buffers()) bytes += b.layout.chunk * 4;
    EXPECT_EQ(memory.stats().live - before, bytes);
    EXPECT_EQ(memory.stats().peak - before, bytes);
  });
}

// The actions of units; slices, which move no byte, are not counted.
std::map<std::string, int> counts(const Tape& tape) {
  std::map<std::string, int> out;
  for (NodeId i = 0; i < tape.num_nodes(); ++i) {
    const Node& n = tape.node(i);
    if ((tape.kind(n) == OpKind::redistribute && tape.op_name(n) != "slice") || tape.kind(n) == OpKind::discard)
      ++out[tape.op_name(n) + " " + tape.path(n)];
  }
  return out;
}

Tape step_tape(World& w, TinyModel& m, Device device, int64_t rows = 5) {
  const DeviceScope scope(device);
  Tensor tokens = testing::token_rows(data_mesh(w), rows, 4, 11), targets = testing::token_rows(data_mesh(w), rows, 4, 11, 1);
  if (device.is_meta()) tokens = Tensor::empty(tokens.type(), device), targets = Tensor::empty(targets.type(), device);
  Recording recording;
  recording.backward(m.loss(tokens, targets));
  return recording.take();
}

TEST(Shard, TapeGathersAndReducesEachUnit) {
  run_local(3, [](World& w) {
    TinyModel m(3);
    shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>()});
    materialize(m, Device::cpu(), {.seed = 2});
    for (int step = 0; step < 3; ++step) {
      const Tape tape = step_tape(w, m, Device::cpu());
      const int again = step == 0 ? 2 : 1;  // while the last block computes, the previous one would be prefetched: it stays
      const std::map<std::string, int> expected = {
          {"all_gather ", 1},             {"discard ", 1},              {"reduce_scatter ", 1},
          {"all_gather blocks.0", 2},     {"discard blocks.0", 2},      {"reduce_scatter blocks.0", 1},
          {"all_gather blocks.1", again}, {"discard blocks.1", again},  {"reduce_scatter blocks.1", 1},
          {"all_gather blocks.2", 1}, {"discard blocks.2", 1},  {"reduce_scatter blocks.2", 1}};
      EXPECT_EQ(counts(tape), expected) << "step " << step;
    }
    EXPECT_EQ(gather_schedule(m).mispredicted(), 0);
  });
}

TEST(Shard, MetaStepHasTheSameTapeAndBytes) {
  std::mutex mutex;
  run_local(2, [&](World& w) {
    std::string text[2];
    int64_t peak[2];
    for (const bool meta : {false, true}) {
      const Device device = meta ? Device::meta() : Device::cpu();
      Allocator& memory = meta ? *RankContext::current().meta : *RankContext::current().cpu;
      const DeviceScope scope(device);
      const int64_t before = memory.stats().live;
      TinyModel m(3);
      shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>()});
      materialize(m, device, {.seed = 2});
      step_tape(w, m, device);
      for (const auto& u : units(m)) u->zero_grad();
      memory.reset_peak();
      text[meta] = to_text(step_tape(w, m, device));
      peak[meta] = memory.stats().peak - before;
    }
    std::lock_guard lock(mutex);
    EXPECT_EQ(text[0], text[1]);
    EXPECT_EQ(peak[0], peak[1]);
  }, {.threads_per_rank = 1});
}

TEST(Shard, GradientsEqualThoseOfOneRank) {
  std::map<std::string, std::vector<double>> expected;
  for (int world = 1; world <= 5; ++world)
    for (Strategy s : {Strategy::replicate, Strategy::shard_grad_op, Strategy::full_shard})
      run_local(world, [&](World& w) {
        TinyModel m(3);
        shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>(), .strategy = s});
        materialize(m, Device::cpu(), {.seed = 2, .dtype = kF64});
        step_tape(w, m, Device::cpu(), 4);  // at 5 ranks one has no rows
        for (const nn::Parameter& p : m.parameters()) {
          const auto g = full_gradient(p).to_vector<double>();
          if (world == 1 && s == Strategy::replicate) {
            expected[p.name()] = g;
            continue;
          }
          for (size_t i = 0; i < g.size(); ++i) EXPECT_NEAR(g[i], expected[p.name()][i], 1e-13) << p.name() << " " << i;
        }
      }, {.threads_per_rank = 1});
}

// Gradients arrive in the masters' dtype, whatever the compute dtype.
TEST(Shard, MastersOfAnyDtypeBesideCompute) {
  const std::vector<std::pair<DType, DType>> pairs{{kF64, kF32}, {kF32, kF64}, {kF64, kBF16}, {kF32, kF16}};
  for (const auto& [master, compute] : pairs) {
    SCOPED_TRACE(str(master, " computed in ", compute));
    std::vector<double> got[2];
    for (const bool casts : {false, true}) {
      nn::Linear layer(5, 3);
      shard(layer, Mesh{}, {.compute_dtype = casts ? std::optional(compute) : std::nullopt});
      materialize(layer, Device::cpu(), {.seed = 3, .dtype = master});
      Recording r;
      r.backward(sum(square(layer(layer.weight))));  // of two contributions, one stored and one accumulated
      r.take();
      EXPECT_EQ(full_gradient(layer.weight).dtype(), master);
      got[casts] = full_gradient(layer.weight).to_vector<double>();
    }
    for (size_t i = 0; i < got[0].size(); ++i) EXPECT_NEAR(got[1][i], got[0][i], compute == kBF16 ? 0.05 : compute == kF16 ? 5e-3 : 1e-5) << i;
  }
}

TEST(StateDict, PiecesOfAllRanksCoverEveryTensorOnce) {
  for (Strategy s : {Strategy::replicate, Strategy::full_shard}) {
    std::map<std::string, std::vector<int>> covered;
    std::map<std::string, std::vector<float>> expected;
    std::mutex mutex;
    run_local(3, [&](World& w) {
      TinyModel m;
      shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>(), .strategy = s});
      materialize(m, Device::cpu(), {.seed = 4});
      const auto whole = values(m);
      const auto pieces = nn::state_pieces(m);
      ASSERT_EQ(pieces.size(), whole.size());
      std::lock_guard lock(mutex);
      for (const nn::StatePiece& p : pieces) {
        auto& seen = covered[p.name];
        seen.resize(p.shape.numel());
        for (int64_t i = 0; i < p.runs.numel(); ++i) {
          if (p.owner) ++seen[p.runs.at(i)];
          EXPECT_EQ(static_cast<float*>(p.data)[i], whole.at(p.name)[p.runs.at(i)]);
        }
      }
    });
    for (const auto& [name, seen] : covered)
      for (int n : seen) EXPECT_EQ(n, 1) << name << " under " << sheaf::name(s);
  }
}

TEST(Assign, EachRankTakesItsPiece) {
  run_local(3, [](World& w) {
    TinyModel m;
    shard(m, data_mesh(w), {.units = nn::units_of<TinyBlock>()});
    materialize(m);
    const nn::Parameter& p = m.blocks[1].up.weight;
    std::vector<float> host(p.numel());
    for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i);
    const Tensor before = full_parameter(m.blocks[1].down.weight);
    assign(p, Tensor::from(host, p.shape()));
    EXPECT_EQ(full_parameter(p).to_vector<float>(), host);
    EXPECT_TRUE(identical(full_parameter(m.blocks[1].down.weight), before));
    EXPECT_THROW(assign(p, Tensor::from<float>({1}, {1})), ShapeError);
    EXPECT_THAT([&] { assign(p, cast(full_parameter(p), kBF16)); },
                ::testing::ThrowsMessage<DTypeError>(::testing::AllOf(HasSubstr(p.name()), HasSubstr("bf16"), HasSubstr("f32"))));
  });
}

}  // namespace
}  // namespace sheaf
