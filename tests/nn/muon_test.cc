// Muon against golden values, on meshes of 1 to 11 ranks, whole and cut in every way.
#include "sheaf/nn/optim/muon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/layers/latent_attention.h"
#include "sheaf/nn/optim/matrix_batches.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/nn/nets.h"
#include "sheaf/tests/nn/zoo.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

optim::MuonOptions golden_options(bool match_rms, bool nesterov) {
  optim::MuonOptions o;
  o.lr = o.adamw.lr = 0.05;
  o.momentum = 0.9;
  o.weight_decay = 0.3;
  o.nesterov = nesterov;
  o.scale = match_rms ? optim::MuonScale::match_rms : optim::MuonScale::original;
  return o;
}

void expect_near(const std::vector<double>& actual, const Json& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.as_array().size()) << what;
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_NEAR(actual[i], expected.as_array()[i].as_double(), tolerance) << what << " " << i;
}

TEST(Muon, AgreesWithTheGoldenValuesHoweverItIsCut) {
  const Json golden = Json::parse(File::open("tests/nn/muon/golden.json").read_all(), "golden.json");
  for (const bool match_rms : {true, false})
    for (const Way& way : ways())
      on(way, [&](World& w, const Mesh& mesh, const ShardOptions& options) {
        Zoo zoo;
        start(zoo, mesh, options);
        optim::Muon muon(zoo, golden_options(match_rms, match_rms));
        for (int64_t step = 0; step < 4; ++step) {
          set_gradients(zoo, step);
          muon.step();
        }
        const Values actual = values(zoo);
        if (w.rank() != 0) return;
        int compared = 0;
        for (const Json& entry : golden.as_array()) {
          if ((entry.at("scale").as_string() == "match_rms") != match_rms) continue;
          const std::string name = entry.at("name").as_string();
          expect_near(actual.at(name), entry.at("values"), 1e-12, name);
          expect_near(actual.at(name), entry.at("torch"), 4e-3, name + " of torch.optim.Muon, which computes in bf16");
          ++compared;
        }
        EXPECT_EQ(compared, 6);
      });
}

TEST(Muon, TheRestIsAdamW) {
  for (const Way& way : ways())
    on(way, [&](World&, const Mesh& mesh, const ShardOptions& options) {
      Zoo zoo, other;
      start(zoo, mesh, options), start(other, mesh, options);
      const optim::AdamWOptions adamw{.lr = 0.002, .beta2 = 0.9, .weight_decay = 0.2};
      optim::Muon muon(zoo, {.lr = 0.001, .adamw = adamw});
      optim::AdamW expected(other, adamw);
      for (int64_t step = 0; step < 3; ++step) {
        set_gradients(zoo, step), set_gradients(other, step);
        clip_grad_norm(zoo, 0.5), clip_grad_norm(other, 0.5);
        muon.step({.lr = 0.003});
        expected.step({.lr = 0.006});
      }
      const Values a = values(zoo), b = values(other);
      EXPECT_EQ(a.at("bias"), b.at("bias"));
      EXPECT_EQ(a.at("weight"), b.at("weight"));
      EXPECT_NE(a.at("tall"), b.at("tall"));
    });
}

// A matrix's update is scaled by its factor, its momentum is not.
TEST(Muon, FactorsAreThoseOfItsLearningRate) {
  const auto run = [](World&, const Mesh& mesh, const ShardOptions& options, double lr, const optim::Factors& factors) {
    Zoo zoo;
    start(zoo, mesh, options);
    optim::Muon muon(zoo, {.lr = lr, .factors = factors, .adamw = {.lr = lr, .factors = factors}});
    for (int64_t step = 0; step < 2; ++step) {
      set_gradients(zoo, step);
      muon.step({.lr = step == 0 ? 0 : lr});  // parameters are still equal
    }
    return values(zoo);
  };
  for (const Way& way : ways())
    on(way, [&](World& w, const Mesh& mesh, const ShardOptions& options) {
      const optim::Factors mixed = {.lr = [](const nn::Parameter& p) {
        return p.name() == "tall" || p.name() == "bias" ? 4.0 : p.table() ? 0.0 : 1.0;
      }};
      const Values none = run(w, mesh, options, 0.0625, {.lr = [](const nn::Parameter&) { return 0; }}),
                   one = run(w, mesh, options, 0.0625, {}), four = run(w, mesh, options, 0.25, {}),
                   some = run(w, mesh, options, 0.0625, mixed);
      for (const auto& [name, values] : some)
        EXPECT_EQ(values, (name == "tall" || name == "bias" ? four : name == "weight" ? none : one).at(name)) << name;
      EXPECT_NE(one.at("tall"), four.at("tall"));
      EXPECT_NE(one.at("weight"), none.at("weight"));
    });
}

// A matrix's update is independent of its gradient's norm, but the momentum contains the clipped gradients.
TEST(Muon, TakesTheScaleOfClipping) {
  Values plain, clipped, scaled;
  for (Values* out : {&plain, &clipped, &scaled}) {
    Zoo zoo;
    start(zoo, {}, {});
    optim::Muon muon(zoo, golden_options(true, true));
    for (int64_t step = 0; step < 2; ++step) {
      set_gradients(zoo, step);
      if (out == &clipped && step == 0) clip_grad_norm(zoo, 0.5);
      if (out == &scaled && step == 0)
        for (const auto& unit : units(zoo))
          for (FlatBuffer& b : unit->buffers()) b.grad_scale = Tensor::scalar(1e-3, kF64);
      muon.step();
    }
    *out = values(zoo);
  }
  EXPECT_NE(plain.at("tall"), clipped.at("tall"));
  EXPECT_NE(plain.at("tall"), scaled.at("tall"));
}

void backward(TinyModel& m, const Mesh& mesh) {
  Recording recording;
  recording.backward(m.loss(token_rows(mesh, 6, 4, 11), token_rows(mesh, 6, 4, 11, 1)));
}

std::map<std::string, std::vector<float>> train(World& w, Strategy s, const nn::UnitPolicy& policy, int64_t layers, bool bf16,
                                                int64_t prefetch = -1) {
  TinyModel m(layers);
  m.blocks[0].up.weight.freeze();
  if (layers > 2) nn::tie(m.blocks[2].down.weight, m.blocks[1].down.weight);
  const Mesh mesh = s == Strategy::none ? Mesh{} : w.mesh({{"data", w.size()}});
  shard(m, mesh, {.units = policy, .strategy = s, .prefetch_bytes = prefetch});
  materialize(m, Device::cpu(), {.seed = 21});
  optim::MuonOptions options;
  if (bf16) options.compute_dtype = options.state.dtype = options.adamw.state.dtype = kBF16;
  optim::Muon muon(m, options);
  for (int step = 0; step < 6; ++step) {
    backward(m, mesh);
    clip_grad_norm(m, 0.1);
    muon.step({.lr = 0.01});
    muon.zero_grad();
  }
  std::map<std::string, std::vector<float>> out;
  for (const nn::Parameter& p : m.parameters()) out[p.name()] = full_parameter(p).to_vector<float>();
  return out;
}

TEST(Muon, BitsDoNotDependOnStrategyUnitsOrPrefetch) {
  for (const bool bf16 : {false, true})
    for (const auto& [world, layers] : {std::pair{1, 3}, {2, 3}, {3, 3}, {5, 1}}) {
      std::map<std::string, std::vector<float>> expected;
      const auto check = [&](Strategy s, const nn::UnitPolicy& policy, int64_t prefetch, const char* what) {
        run_local(world, [&](World& w) {
          const auto run = train(w, s, policy, layers, bf16, prefetch);
          if (w.rank() != 0) return;
          if (expected.empty()) expected = run;
          EXPECT_TRUE(run == expected) << what << " at world " << world << (bf16 ? " in bf16" : "");
        }, kLocal);
      };
      for_each_sharding(world, check);
    }
}

// The gradients are the same at all worlds, and so is everything computed from them.
TEST(Muon, BitsOfAStepDoNotDependOnTheWorld) {
  Values expected;
  for (const Way& way : ways())
    on(way, [&](World& w, const Mesh& mesh, const ShardOptions& options) {
      Zoo zoo;
      start(zoo, mesh, options, kF32);
      optim::Muon muon(zoo, {});
      for (int64_t step = 0; step < 3; ++step) {
        set_gradients(zoo, step);
        muon.step({.lr = 0.05});
      }
      const Values actual = values(zoo);
      if (w.rank() != 0) return;
      if (expected.empty()) expected = actual;
      EXPECT_EQ(actual, expected);
    });
}

struct Four : nn::Module {
  nn::Parameter a{{8, 8}, nn::Init::zeros()}, b{{8, 8}, nn::Init::zeros()}, c{{16, 16}, nn::Init::zeros()},
      d{{8, 8}, nn::Init::zeros()};
  SHEAF_FIELDS(a, b, c, d);
};

// Latents of queries and of keys are rows of one parameter, and matrices of their own.
TEST(Muon, LatentsAreTwoMatrices) {
  nn::LatentAttention attention({.width = 12, .heads = 2, .q_lora_rank = 5, .kv_lora_rank = 4, .qk_nope_head_dim = 3, .qk_rope_head_dim = 2,
                                 .v_head_dim = 3});
  materialize(attention);
  const optim::Matrix latents = optim::matrix_of(attention.latents.weight);
  ASSERT_EQ(latents.parts.size(), 2u);
  EXPECT_EQ(latents.parts[0].rows, 5);
  EXPECT_EQ(latents.parts[1].rows, 6);
  EXPECT_EQ(latents.parts[1].begin, 5 * 12);
  EXPECT_EQ(optim::matrix_of(attention.queries.weight).parts.size(), 1u);
  EXPECT_THROW(attention.projection.weight.set_matrices({3, 4}), ShapeError);
}

TEST(Muon, WorkIsSharedByCost) {
  run_local(3, [&](World& w) {
    TinyModel m(4);
    shard(m, w.mesh({{"data", 3}}), {.units = nn::units_of<TinyBlock>()});
    materialize(m);
    optim::Muon muon(m, {});
    std::vector<int> owned(3, 0);
    for (const optim::Bundle& bundle : muon.bundles())
      for (const optim::Matrix& matrix : bundle.matrices) ++owned[static_cast<size_t>(matrix.owner)];
    EXPECT_THAT(owned, ::testing::ElementsAre(3, 3, 2));  // eight of equal cost
  }, kLocal);
  run_local(2, [&](World& w) {  // the most expensive one alone, against three that cost a third each
    Four four;
    shard(four, w.mesh({{"data", 2}}));
    materialize(four);
    optim::Muon muon(four, {});
    std::vector<int> owners;
    for (const optim::Matrix& matrix : muon.bundles()[0].matrices) owners.push_back(matrix.owner);
    EXPECT_THAT(owners, ::testing::ElementsAre(1, 1, 0, 1));
    EXPECT_EQ(str(muon.bundles()[0].owned.layout), "Shard(0 owned)@data");
  }, kLocal);
}

// The batches that a step orthogonalises at once: [k, M, N] over the whole mesh.
std::vector<int64_t> batches(const optim::Muon& muon) {
  std::vector<int> bundles;
  for (size_t i = 0; i < muon.bundles().size(); ++i)
    if (!muon.bundles()[i].matrices.empty()) bundles.push_back(static_cast<int>(i));
  std::vector<int64_t> out;
  for (const optim::Batch& b : optim::batches_of(muon.bundles(), bundles)) out.push_back(b.matrices.shape[0]);
  return out;
}

struct Pile : nn::Module {
  std::vector<nn::Linear> layers;
  explicit Pile(int count) {
    for (int i = 0; i < count; ++i) layers.emplace_back(2048, 3072);
  }
  SHEAF_FIELDS(layers);
};

TEST(Muon, MatricesOfEqualShapeAreOneBatch) {
  for (const int world : {1, 2, 3})
    run_local(world, [&](World& w) {
      TinyModel m(4);
      shard(m, w.mesh({{"data", world}}), {.units = nn::units_of<TinyBlock>()});
      materialize(m);
      set_gradients(m, 0);
      optim::Muon muon(m, {});
      EXPECT_THAT(batches(muon), ::testing::ElementsAre(4, 4));
      Recording recording;
      muon.step();
      const Tape tape = recording.take();
      int products = 0;
      for (NodeId i = 0; i < tape.num_nodes(); ++i) products += tape.op_name(tape.node(i)) == "matmul";
      EXPECT_EQ(products, 2 * 5 * 3);
    }, kLocal);
}

// Two matrices of 6 million elements at once, on each rank.
TEST(Muon, WhatARankComputesAtOnceIsBounded) {
  const auto expect = [](std::vector<MeshSpec::Axis> axes, const std::vector<int64_t>& expected) {
    on({std::move(axes), Strategy::full_shard, /*one_unit=*/true}, [&](World&, const Mesh& mesh, const ShardOptions& options) {
      Pile pile(9);
      shard(pile, mesh, options);
      materialize(pile, Device::meta());
      EXPECT_EQ(batches(optim::Muon(pile)), expected);
    });
  };
  expect({{"data", 1}}, {2, 2, 2, 2, 1});
  expect({{"data", 2}}, {4, 4, 1});
  expect({{"data", 3}}, {6, 3});
  expect({{"replica", 2}, {"data", 2}}, {8, 1});
}

TEST(Muon, MatricesHaveOneStateAndTheRestTwo) {
  run_local(2, [](World& w) {
    Zoo zoo;
    start(zoo, w.mesh({{"data", 2}}), {.units = nn::units_of<Inner>()});
    optim::Muon muon(zoo, {});
    int64_t elements = 0;
    std::map<std::string, int> names;
    for (const optim::ShardState& s : muon.shards()) {
      for (const Tensor& t : s.state) elements += t.numel();
      for (const std::string& n : s.names) ++names[n];
    }
    EXPECT_EQ(elements, 28 + 45 + 36 + 96 + 60 + 8 + 2 * (5 + 18));
    EXPECT_THAT(names, ::testing::ElementsAre(std::pair("m", 1), std::pair("momentum", 2), std::pair("v", 1)));
    std::vector<std::string> pieces;
    for (const nn::StatePiece& p : nn::state_pieces(muon)) pieces.push_back(p.name);
    EXPECT_THAT(pieces, ::testing::IsSupersetOf({"optimizer.momentum.inner.packed", "optimizer.m.bias",
                                                 "optimizer.v.table.weight"}));
    EXPECT_THAT(pieces, ::testing::Not(::testing::Contains("optimizer.v.tall")));
  }, kLocal);
}

TEST(Muon, StepIsRecordedAndReplays) {
  for (Strategy s : {Strategy::full_shard, Strategy::replicate})
    run_local(3, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 3}});
      TinyModel m;
      shard(m, mesh, {.units = nn::units_of<TinyBlock>(), .strategy = s});
      materialize(m, Device::cpu(), {.seed = 1});
      optim::Muon muon(m);
      std::unordered_map<ValueId, Tensor> before;
      Tape tape;
      {
        Recording recording({.capture_leaves = true});
        recording.backward(m.loss(token_rows(mesh, 6, 4, 11), token_rows(mesh, 6, 4, 11, 1)));
        clip_grad_norm(m, 0.1);
        muon.step({.lr = 0.01});
        before = recording.captured();
        tape = recording.take();
      }
      for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
      std::map<std::string, ValueId> updated;  // the last step of each unit reads the parameters first
      std::map<std::string, int> calls;
      for (NodeId i = 0; i < tape.num_nodes(); ++i) {
        const Node& n = tape.node(i);
        if (!n.op || n.phase != Phase::update) continue;
        const std::string op(tape.op_name(n));
        if (op == "muon" || op == "adamw") updated[std::string(tape.path(n))] = tape.output(n);
        if (tape.kind(n) == OpKind::redistribute)
          ++calls[redistribution_name(tape.type(tape.inputs(n)[0]).layout, tape.type(tape.output(n)).layout)];
      }
      const bool cut = s == Strategy::full_shard;
      EXPECT_EQ(calls[cut ? "all_to_all" : "slice"], cut ? 4 : 2) << "one for each unit with matrices, and one back";
      EXPECT_EQ(calls["all_gather"], cut ? 0 : 2);
      std::vector<ValueId> wanted;
      for (const auto& unit : units(m)) wanted.push_back(updated.at(unit->name()));
      const auto again = replay(tape, [&](ValueId v) { return before.at(v).clone(); }, wanted);
      const auto all = units(m);
      for (size_t u = 0; u < all.size(); ++u)
        EXPECT_EQ(again[u].to_vector<float>(), all[u]->buffers()[0].shard.to_vector<float>()) << all[u]->name();
    }, kLocal);
}

// A unit without a gradient does not change, and takes part again when it has one.
TEST(Muon, UnitsTakePartWhenTheyHaveAGradient) {
  for (int world : {1, 3})
    run_local(world, [&](World& w) {
      const auto make = [&](TinyModel& m) {
        shard(m, w.mesh({{"data", world}}), {.units = nn::units_of<TinyBlock>()});
        materialize(m, Device::cpu(), {.seed = 1});
      };
      TinyModel m(2), other(2);
      make(m), make(other);
      optim::Muon muon(m, {.momentum = 0}), expected(other, {.momentum = 0});
      const std::vector<float> before = full_parameter(m.blocks[1].up.weight).to_vector<float>();
      for (const bool both : {true, false, true}) {
        set_gradients(m, 1), set_gradients(other, 1);
        if (!both) m.blocks[1].up.weight.unit()->zero_grad();
        muon.step({.lr = 0.1});
        if (both) expected.step({.lr = 0.1});
      }
      const auto values = [](TinyModel& of, int block) { return full_parameter(of.blocks[block].up.weight).to_vector<float>(); };
      EXPECT_NE(values(m, 1), before);
      EXPECT_EQ(values(m, 1), values(other, 1));
      EXPECT_NE(values(m, 0), values(other, 0));
    }, kLocal);
}

TEST(Muon, AUnitMayHaveManyMatricesAndAModelManyUnits) {
  for (int world : {1, 3})
    run_local(world, [&](World& w) {
      TinyModel m(70), other(70);
      for (TinyModel* model : {&m, &other}) {
        shard(*model, w.mesh({{"data", world}}), {.units = model == &m ? nn::UnitPolicy() : nn::units_of<TinyBlock>()});
        materialize(*model, Device::cpu(), {.seed = 1});
        set_gradients(*model, 1);
        optim::Muon muon(*model);
        EXPECT_EQ(muon.bundles().size(), model == &m ? 2u : 141u);
        Recording recording;
        muon.step({.lr = 0.1});
      }
      EXPECT_EQ(values(m), values(other));
    }, kLocal);
}

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

TEST(Muon, WhatItCannotDoIsRefused) {
  Zoo zoo;
  materialize(zoo);
  EXPECT_THAT(refusal([&] { optim::Muon(zoo, {.momentum = 1.0}); }), HasSubstr("momentum is 1"));
  EXPECT_THAT(refusal([&] { optim::Muon(zoo, {.lr = 0}); }), HasSubstr("lr is 0"));
  for (const DType dtype : {kF16, kI64})
    EXPECT_THAT(refusal([&] { optim::Muon(zoo, {.compute_dtype = dtype}); }), HasSubstr(str("products in ", dtype, ": f32, bf16 and f64")));
  EXPECT_THAT(refusal([&] { optim::Muon(zoo, {.orthogonalize = {.steps = 0}}); }), HasSubstr("at least one"));
  EXPECT_THAT(refusal([&] { optim::Muon(zoo, {.matrices = [](const nn::Parameter&) { return true; }}); }),
              HasSubstr("'bias' [5]: what is orthogonalised has two dimensions"));
  EXPECT_THROW(optim::Muon(std::vector<nn::Parameter>{zoo.wide}), ConfigError);  // part of a unit
}

}  // namespace
}  // namespace sheaf::testing
