// Programs on meshes of two and three axes: a transformer block with the batch cut over one axis and heads, columns and rows of its weights
// over the other; random ops, whose values do not depend on the cut; constants without a mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/rowwise.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/autograd/findings.h"
#include "sheaf/tests/poison.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

const LocalOptions kLocal{.timeout = std::chrono::seconds(20), .threads_per_rank = 1};
const Placement kR = Placement::replicate(), kP = Placement::partial(), kI = Placement::invariant(),
                kS0 = Placement::shard(0), kS1 = Placement::shard(1), kS2 = Placement::shard(2);

Values draw(const Shape& shape, const std::string& stream) {
  Generator generator(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = generator.uniform(-1, 1);
  return v;
}

// ---- one block, data times tensor parallel ----------------------------------------------------------------------------

constexpr int64_t kB = 3, kT = 4, kC = 5, kHeads = 4, kKeys = 2, kD = 2, kF = 7, kV = 6;

// The block's parameters in the order in which forward uses them. Queries read the keys of their group: both are cut in units of a key
// head.
struct Weight {
  const char* name;
  Shape shape;
  Placement on_model;
};
const std::vector<Weight>& weights() {
  static const auto* list = new std::vector<Weight>{
      {"table", {kV, kC}, kR},
      {"norm1", {kC}, kR},
      {"query", {kHeads * kD, kC}, Placement::shard(OwnershipMap::even(0, kHeads / kKeys * kD))},
      {"key", {kKeys * kD, kC}, Placement::shard(OwnershipMap::even(0, kD))},
      {"value", {kKeys * kD, kC}, Placement::shard(OwnershipMap::even(0, kD))},
      {"out", {kC, kHeads * kD}, Placement::shard(OwnershipMap::even(1, kHeads / kKeys * kD))},
      {"out_bias", {kC}, kR},
      {"norm2", {kC}, kR},
      {"up", {kF, kC}, kS0},
      {"up_bias", {kF}, kS0},
      {"down", {kC, kF}, kS1},
      {"down_bias", {kC}, kR},
  };
  return *list;
}

struct Block {
  bool on_mesh;
  bool sequence = false;   ///< the residual stream is cut along T between the products
  bool recompute = false;  ///< the block is computed again in the backward

  // The output of a block's second products is Partial over "model"; it is all-reduced, or reduce-scattered along the sequence.
  Tensor reduced(const Tensor& y) const {
    return on_mesh ? redistribute(y, "model", sequence ? kS1 : kR) : y;
  }
  Tensor whole(const Tensor& x) const { return on_mesh && sequence ? redistribute(x, "model", kR) : x; }

  // tokens[B, T] -> loss
  Tensor forward(const Tensor& tokens, const Tensor& targets, const std::vector<Tensor>& w) const {
    Tensor x = embedding(tokens, w[0]);
    if (on_mesh && sequence) x = redistribute(x, "model", kS1);
    std::optional<RecomputeScope> scope;
    if (recompute) scope.emplace();
    const Tensor h = whole(rms_norm(x, w[1]));
    const auto heads = [&](const Tensor& weight, int64_t n) { return reshape(linear(h, weight), {kB, kT, n, kD}); };
    const Tensor mixed = attention(rotary(heads(w[2], kHeads)), rotary(heads(w[3], kKeys)), heads(w[4], kKeys));
    x = x + reduced(linear(reshape(mixed, {kB, kT, kHeads * kD}), w[5], w[6]));
    const GeluOfLinear up = linear_gelu(whole(rms_norm(x, w[7])), w[8], w[9]);
    x = x + dropout(reduced(gelu_linear(up, w[10], w[11])), 0.25, Key{5});
    scope.reset();
    const Tensor loss = linear_cross_entropy(whole(x), w[0], targets);
    return on_mesh ? redistribute(loss, "model", kP) : loss;  // counted once, not once per rank of the axis
  }
};

struct Step {
  LocalPart loss;
  std::vector<LocalPart> gradients;
  Tape tape;
};

Step run_block(const Block& block, const MeshSpec* mesh) {
  const auto type = [&](const Shape& shape, const Placement& data, const Placement& model, DType dtype = kF64) {
    return Type{dtype, shape, mesh ? Layout(mesh, {data, model}) : Layout()};
  };
  const auto numbers = [&](const char* name) {
    Values v = draw({kB, kT}, name);
    for (double& e : v) e = std::floor((e + 1) / 2 * kV);
    return make_local(v, type({kB, kT}, kS0, kR, kI64), "");
  };
  std::vector<Tensor> w;
  for (const Weight& weight : weights())
    w.push_back(make_local(draw(weight.shape, weight.name), type(weight.shape, kR, weight.on_model), ""));
  Recording recording({.capture_leaves = true});
  for (const Tensor& t : w) recording.watch(t);
  const Tensor loss = block.forward(numbers("tokens"), numbers("targets"), w);
  const std::vector<Tensor> g = recording.gradient(loss, w);
  Step step;
  step.loss = local_part(loss);
  std::vector<Tensor> results = g;
  results.push_back(loss);
  std::vector<ValueId> ids;
  for (const Tensor& t : results) ids.push_back(recording.value_of(t));
  for (const Tensor& t : g) step.gradients.push_back(local_part(t));
  const auto captured = recording.captured();
  step.tape = recording.take();
  const std::vector<Tensor> again = replay(step.tape, [&](ValueId v) { return captured.at(v); }, ids);
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_TRUE(identical(again[i], results[i])) << i;
  return step;
}

int count(const Tape& tape, const std::string& call) {
  int n = 0;
  for (const PlannedCollective& c : collectives(tape)) n += c.call.starts_with(call);
  return n;
}

TEST(AxesBlock, IsTheUnshardedBlock) {
  const Step want = run_block({.on_mesh = false}, nullptr);
  for (const auto& how : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
    const bool sequence = how.first, recompute = how.second;
    for (const auto& [data, model] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}, {3, 2}, {2, 3}}) {
      const auto ranks = static_cast<size_t>(data * model);
      std::vector<Step> steps(ranks);
      run_local(data * model, [&](World& world) {
        const Mesh mesh = world.mesh({{"data", data}, {"model", model}});
        const PoisonScope poison;
        Step& step = steps[static_cast<size_t>(world.rank())] = run_block({true, how.first, how.second}, mesh.spec);
        int64_t foreseen = 0;
        for (NodeId id = 0; id < step.tape.num_nodes(); ++id) foreseen += step.tape.wire_bytes(step.tape.node(id));
        EXPECT_EQ(2 * foreseen, mesh.runtime->gather_lane(1).bytes_received()) << "the step and its replay";
        EXPECT_EQ(mesh.runtime->gather_lane(0).bytes_received(), 0);
      }, kLocal);
      SCOPED_TRACE(str(data, " x ", model, sequence ? ", sequence parallel" : "", recompute ? ", computed again\n" : "\n", to_text(steps[0].tape)));
      std::string error;
      std::vector<const Tape*> tapes;
      for (const Step& s : steps) {
        EXPECT_EQ(all(check_types(s.tape)) + all(check_cotangents(s.tape)) + all(check_gathers(s.tape)), "");
        tapes.push_back(&s.tape);
      }
      EXPECT_EQ(all(check_collectives(tapes)), "");
      // In each direction one collective before and one after each half of the block, or only one after it; with sequence parallelism one
      // more before the loss.
      if (model > 1 && !recompute) {
        EXPECT_EQ(count(steps[0].tape, "all_reduce"), sequence ? 0 : 4);
        EXPECT_EQ(count(steps[0].tape, "all_gather"), sequence ? 5 : 0);
        EXPECT_EQ(count(steps[0].tape, "reduce_scatter"), sequence ? 5 : 0);
      }
      const auto whole = [&](auto&& part) {
        std::vector<LocalPart> parts;
        for (const Step& s : steps) parts.push_back(part(s));
        return assemble(parts, error);
      };
      EXPECT_LE(scaled_error(whole([](const Step& s) { return s.loss; }), want.loss.values), 1e-13);
      for (size_t i = 0; i < weights().size(); ++i) {
        const Weight& w = weights()[i];
        EXPECT_EQ(steps[0].gradients[i].type.layout[0].to_string(), "Partial") << w.name;
        EXPECT_TRUE(steps[0].gradients[i].type.layout[1] == w.on_model.dual()) << w.name;
        EXPECT_LE(scaled_error(whole([&](const Step& s) { return s.gradients[i]; }), want.gradients[i].values), 1e-12)
            << w.name;
      }
      EXPECT_EQ(error, "");
    }
  }
}

// ---- random ops --------------------------------------------------------------------------------------------------------

TEST(AxesRandom, ValuesDependOnTheElementAlone) {
  const Shape shape{7, 4, 2};
  const Values x = draw(shape, "x");
  const auto drawn = [&](const std::vector<MeshSpec::Axis>& axes, const std::vector<Placement>& placements, bool rows) {
    int ranks = 1;
    for (const auto& axis : axes) ranks *= axis.size;
    std::vector<LocalPart> parts(static_cast<size_t>(ranks));
    run_local(ranks, [&](World& world) {
      const Type type{kF64, shape, axes.empty() ? Layout() : Layout(world.mesh(axes).spec, placements)};
      Recording recording({.step = 3, .first_sample = 5, .seed = 9});
      const auto f = [](const Tensor& t) { return dropout(t, 0.5) + dropout(t, 0.5, Key{11}); };
      const Tensor in = make_local(x, type, "");
      Tensor y = rows ? rowwise(f, in) : f(in);
      y = y + randn(type) + uniform(type) + randn(type, Key{4}) + uniform(type, Key{4});
      parts[static_cast<size_t>(world.rank())] = local_part(y);
    }, kLocal);
    std::string error;
    const Values all = assemble(parts, error);
    EXPECT_EQ(error, "");
    return all;
  };
  const Values want = drawn({}, {}, false);
  const Placement uneven = Placement::shard(OwnershipMap::uneven(0, {4, 0, 3}));
  const Placement flat = Placement::shard(OwnershipMap::flat(20, 3));
  const std::vector<std::vector<Placement>> cuts = {{kS0, kS0}, {kS0, kS1}, {kS1, kS0}, {kS2, kS2}, {kR, kS0}, {kS0, kR},
                                                    {kS0, kI},  {kI, kS1},  {kS1, uneven}, {kR, flat}, {kI, uneven}};
  for (const auto& cut : cuts) {
    EXPECT_EQ(drawn({{"data", 2}, {"model", 3}}, cut, false), want) << str(cut[0], " ", cut[1]);
    const bool rows = cut[0].is_shard(0) || cut[1].is_shard(0);
    if (!rows) continue;
    EXPECT_EQ(drawn({{"data", 2}, {"model", 3}}, cut, true), want) << str(cut[0], " ", cut[1], " by rows");
  }
  EXPECT_EQ(drawn({{"host", 2}, {"data", 1}, {"model", 2}}, {kS0, kS0, kS0}, false), want);
  EXPECT_EQ(drawn({{"host", 2}, {"data", 2}, {"model", 2}}, {kS0, kS1, kS0}, true), want);
}

// ---- rows cut by two axes ----------------------------------------------------------------------------------------------

TEST(AxesRows, AreThoseOfBothAxes) {
  run_local(6, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 3}}).spec;
    const Shape shape{7, 3};
    const auto make = [&](const Shape& s, const Placement& a, const Placement& b) {
      return make_local(draw(s, "x"), {kF64, s, Layout(mesh, {a, b})}, "");
    };
    const Tensor x = make(shape, kS0, kS0), weight = make({3, 2}, kR, kR);
    Recording recording;
    recording.watch(weight);
    const Tensor y = rowwise([&](const Tensor& rows) {
      EXPECT_EQ(rows.shape(), x.local_shape());
      EXPECT_EQ(first_local_row(), x.layout().local_start(shape)[0]);
      return cumsum(matmul(rows, weight), 1);
    }, x);
    EXPECT_TRUE(identical(y, cumsum(matmul(x, weight), 1)));
    EXPECT_EQ(recording.gradient(sum(y), std::span(&weight, 1))[0].type().to_string(),
              "f64[3,2] Partial@data Partial@model");
    // Rows cut by a later axis alone differ from rows cut by both axes.
    const auto first = [](const Tensor& r, const Tensor&) { return r; };
    EXPECT_THROW(rowwise(first, x, make({7, 1}, kR, kS0)), PlacementError);
    EXPECT_TRUE(identical(rowwise(first, x, make({7, 1}, kS0, kR)), x));
  }, kLocal);
}

// A batch of one sample is cut as larger ones are: one rank has it, however its rows are seen.
TEST(AxesRows, OfOneSampleAreOneRanks) {
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [](World& world) {
      const MeshSpec* mesh = world.mesh({{"data", world.size()}}).spec;
      const auto make = [&](const Shape& s, const Placement& p) { return make_local(draw(s, "x"), {kF64, s, Layout(mesh, p)}, ""); };
      const Placement whole_rows = Placement::shard(OwnershipMap::even(1, 4));
      const Tensor x = make({1, 4, 3}, kS0), by_rows = make({1, 4, 3}, whole_rows), table = make({5, 3}, kR);
      Recording recording;
      for (const Tensor& t : {x, by_rows, table}) recording.watch(t);
      const Tensor rows = reshape(x, {4, 3}), picked = take(table, redistribute(reshape(arange(4), {1, 4}), Layout(mesh, kS0)));
      EXPECT_EQ(rows.layout()[0].to_string(), "Shard(0 by 4)");
      const Tensor y = x * reshape(rows, {1, 4, 3}) + picked;
      EXPECT_EQ(y.type().to_string(), "f64[1,4,3] Shard(0)@data");
      const auto g = recording.gradient(sum(y) + sum(square(reshape(by_rows, {4, 3}))), std::vector{x, by_rows});
      EXPECT_TRUE(identical(g[0], x * 2.0));
      EXPECT_TRUE(identical(g[1], by_rows * 2.0));
      EXPECT_EQ(all(check_types(recording.tape())) + all(check_cotangents(recording.tape())), "");
    }, kLocal);
  run_local(4, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 2}}).spec;
    const auto make = [&](const Placement& a, const Placement& b) {
      return make_local(draw({1, 4}, "x"), {kF64, {1, 4}, Layout(mesh, {a, b})}, "");
    };
    EXPECT_EQ(reshape(make(kS0, kS1), {4}).type().to_string(), "f64[4] Shard(0 by 4)@data Shard(0)@model");
    EXPECT_THROW(reshape(make(kS1, kS0), {4}), PlacementError);  // of half of it there is no whole
    // Each axis' cut goes back to its own dimension.
    const Placement whole = Placement::shard(OwnershipMap::even(1, 4));
    const Tensor x = make(kS0, whole), both = make_local(draw({1, 1, 4}, "both"), {kF64, {1, 1, 4}, Layout(mesh, {kS0, kS1})}, "");
    Recording recording;
    for (const Tensor& t : {x, both}) recording.watch(t);
    const auto g = recording.gradient(sum(square(reshape(x, {4}))) + sum(square(reshape(both, {4}))), std::vector{x, both});
    EXPECT_TRUE(identical(g[0], x * 2.0));
    EXPECT_TRUE(identical(g[1], both * 2.0));
  }, kLocal);
}

// ---- constants ---------------------------------------------------------------------------------------------------------

// A value without a mesh is Replicate on every mesh it is used with; its gradients add up.
TEST(AxesConstants, GradientsArePartialBesideInvariantOperandsToo) {
  const Shape shape{4, 3};
  std::vector<LocalPart> parts(4);
  run_local(4, [&](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 2}}).spec;
    const auto make = [&](const Placement& a, const Placement& b) {
      return make_local(Values(12, 2), {kF64, shape, Layout(mesh, {a, b})}, "x");
    };
    const Tensor c = make_tensor(Values(12, 1), shape, kF64);
    Recording recording;
    recording.watch(c);
    Tensor loss;
    for (const Tensor& x : {make(kI, kI), make(kI, kS0), make(kS0, kI), make(kR, kS1), make(kP, kS0), make(kS0, kS0)}) {
      const Tensor y = sum(mul(x, c));
      const Tensor part = redistribute(redistribute(y, "data", kP), "model", kP);
      loss = loss ? loss + part : part;
    }
    const Tensor g = recording.gradient(loss, std::span(&c, 1))[0];
    EXPECT_EQ(g.type().to_string(), "f64[4,3] Partial@data Partial@model");
    EXPECT_EQ(all(check_types(recording.tape())) + all(check_cotangents(recording.tape())), "");
    parts[static_cast<size_t>(world.rank())] = local_part(g);
  }, kLocal);
  std::string error;
  EXPECT_EQ(assemble(parts, error), Values(12, 12));
  EXPECT_EQ(error, "");
}

// The order of the axes, by hand: each one cuts what the axes before it have left.
TEST(AxesOrder, LaterAxesCutWhatEarlierOnesLeave) {
  const MeshSpec* mesh = MeshSpec::intern({{"host", 2}, {"data", 2}, {"model", 2}});
  const auto block = [&](const Layout& l, int host, int data, int model) {
    const int at[] = {host, data, model};
    return std::pair(l.local_start({9, 2}, at)[0], l.local_shape({9, 2}, at)[0]);
  };
  const Layout rows(mesh, kS0);  // 4 and 5; 2 2 and 2 3; 1 1, 1 1, 1 1, 1 2
  EXPECT_EQ(block(rows, 0, 0, 1), (std::pair<int64_t, int64_t>{1, 1}));
  EXPECT_EQ(block(rows, 1, 0, 0), (std::pair<int64_t, int64_t>{4, 1}));
  EXPECT_EQ(block(rows, 1, 1, 0), (std::pair<int64_t, int64_t>{6, 1}));
  EXPECT_EQ(block(rows, 1, 1, 1), (std::pair<int64_t, int64_t>{7, 2}));
  const Layout outer(mesh, {kS0, kR, Placement::shard(OwnershipMap::even(0, 1))});
  EXPECT_EQ(block(outer, 1, 0, 1), (std::pair<int64_t, int64_t>{6, 3}));
}

}  // namespace
}  // namespace sheaf::testing
