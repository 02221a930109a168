// rowwise at worlds 1 to 5: values and gradients are those of one rank, no communication, the tape replays.
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/rowwise.h"
#include "sheaf/core/communicator.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/check_rowwise.h"
#include "sheaf/tests/poison.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

const LocalOptions kLocal{.timeout = std::chrono::seconds(20), .threads_per_rank = 1};
const Placement kR = Placement::replicate(), kP = Placement::partial();

Values draw(const Shape& shape, const std::string& stream) {
  Generator generator(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = generator.uniform(-1, 1);
  return v;
}

// Even, one row each and the rest to the last, everything on the first rank.
std::vector<Placement> cuts(int64_t rows, int ranks) {
  std::vector<int64_t> last(static_cast<size_t>(ranks), 1), first(static_cast<size_t>(ranks), 0);
  last.back() = rows - (ranks - 1);
  first[0] = rows;
  return {Placement::shard(0), Placement::shard(OwnershipMap::uneven(0, last)),
          Placement::shard(OwnershipMap::uneven(0, first))};
}

// Rows x[n, 3] and position[n, 1]; f captures weight[3, 4]. Stands for sorting or anything else that is done per row.
Tensor experts(const Tensor& x, const Tensor& position, const Tensor& weight) {
  const Tensor hidden = tanh(mul(x, exp(position)));
  return cumsum(matmul(hidden, weight), 1);
}

struct Results {
  std::vector<LocalPart> y, x, position, weight;  // the output and three gradients
};

Results run(int ranks, const Placement& cut, bool second) {
  const Shape shapes[] = {{7, 3}, {7, 1}, {3, 4}, {7, 4}};
  Results results;
  for (auto* v : {&results.y, &results.x, &results.position, &results.weight}) v->resize(static_cast<size_t>(ranks));
  run_local(ranks, [&](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", ranks}}).spec;
    const PoisonScope poison;
    const auto make = [&](int i, const Placement& p) {
      return make_local(draw(shapes[i], str("input ", i)), {kF64, shapes[i], Layout(mesh, p)}, "");
    };
    std::vector<Tensor> in = {make(0, cut), make(1, cut), make(2, kR)};
    Recording recording({.capture_leaves = true});
    for (const Tensor& t : in) recording.watch(t);
    const Tensor y = rowwise([&](const Tensor& x, const Tensor& position) { return experts(x, position, in[2]); }, in[0],
                             in[1]);
    EXPECT_TRUE(y.layout()[0] == cut) << str(y.type());
    EXPECT_EQ(y.shape(), (Shape{7, 4}));
    const Tensor weight = make(3, cut);
    Tensor loss = probe(std::span(&y, 1), std::span(&weight, 1));
    std::vector<Tensor> g = recording.gradient(loss, in, {.keep = second});
    if (second) {  // of <dL/dx, dL/dx>
      const Tensor squares = sum(mul(g[0], g[0]));
      g = recording.gradient(squares, in);
    }
    EXPECT_TRUE(g[2].layout()[0] == kP) << str(g[2].type());
    const auto rank = static_cast<size_t>(world.rank());
    results.y[rank] = local_part(y);
    results.x[rank] = local_part(g[0]);
    results.position[rank] = local_part(g[1]);
    results.weight[rank] = local_part(g[2]);
    EXPECT_EQ(world.mesh({{"data", ranks}}).runtime->gather_lane(0).bytes_received(), 0);

    const auto captured = recording.captured();
    const ValueId wanted[] = {recording.value_of(y), recording.value_of(g[0]), recording.value_of(g[2])};
    const Tape tape = recording.take();
    for (const auto& check : {check_types(tape), check_cotangents(tape)})
      for (const Finding& f : check) ADD_FAILURE() << f.to_string();
    const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return captured.at(v); }, wanted);
    EXPECT_TRUE(identical(again[0], y));
    EXPECT_TRUE(identical(again[1], g[0]));
    EXPECT_TRUE(identical(again[2], g[2]));
  }, kLocal);
  return results;
}

class Rowwise : public ::testing::TestWithParam<int> {};

TEST_P(Rowwise, IsTheUnshardedFunction) {
  for (const bool second : {false, true}) {
    std::string error;
    const Results one = run(1, Placement::shard(0), second);
    for (const Placement& cut : cuts(7, GetParam())) {
      const Results many = run(GetParam(), cut, second);
      const std::string what = str(cut, second ? " second" : "");
      EXPECT_EQ(assemble(many.y, error), one.y[0].values) << what;
      EXPECT_LE(scaled_error(assemble(many.x, error), one.x[0].values), 1e-14) << what;
      EXPECT_LE(scaled_error(assemble(many.position, error), one.position[0].values), 1e-14) << what;
      EXPECT_LE(scaled_error(assemble(many.weight, error), one.weight[0].values), 1e-14) << what;
    }
    EXPECT_EQ(error, "");
  }
}

TEST_P(Rowwise, RandomOpsCountRowsOfTheWholeBatch) {
  const Shape shape{7, 3};
  const auto dropped = [&](int ranks, const Placement& cut, bool inside) {
    std::vector<LocalPart> y(static_cast<size_t>(ranks)), g = y;
    run_local(ranks, [&](World& world) {
      const Layout layout(world.mesh({{"data", ranks}}).spec, cut);
      const Tensor x = make_local(draw(shape, "x"), {kF64, shape, layout}, "");
      Recording recording({.step = 3, .first_sample = 5, .seed = 9});
      recording.watch(x);
      const auto f = [](const Tensor& rows) { return add(dropout(rows, 0.5), dropout(rows, 0.5, Key{11})); };
      const Tensor out = inside ? rowwise(f, x) : f(x);
      const Tensor weight = make_local(draw(shape, "w"), {kF64, shape, layout}, "");
      const auto rank = static_cast<size_t>(world.rank());
      y[rank] = local_part(out);
      g[rank] = local_part(recording.gradient(probe(std::span(&out, 1), std::span(&weight, 1)), std::span(&x, 1))[0]);
    }, kLocal);
    std::string error;
    Values all = assemble(y, error);
    const Values gradient = assemble(g, error);
    EXPECT_EQ(error, "");
    all.insert(all.end(), gradient.begin(), gradient.end());
    return all;
  };
  const Values want = dropped(1, Placement::shard(0), false);
  for (const Placement& cut : cuts(7, GetParam())) EXPECT_EQ(dropped(GetParam(), cut, true), want) << str(cut);
}

INSTANTIATE_TEST_SUITE_P(Worlds, Rowwise, ::testing::Range(1, 6));

TEST(RowwiseLayouts, OtherCutsStayVisibleAndReplicateRowsAreSliced) {
  run_local(4, [&](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 2}}).spec;
    const Shape shape{5, 6};
    const Values values = draw(shape, "x");
    const Tensor x = make_local(values, {kF64, shape, Layout(mesh, {Placement::shard(0), Placement::shard(1)})}, "");
    const Tensor scale = make_tensor(draw({5, 1}, "scale"), {5, 1}, kF64);  // no layout: sliced like x
    const Tensor y = rowwise([&](const Tensor& rows, const Tensor& s) {
      EXPECT_EQ(rows.size(0), x.local_shape()[0]);
      EXPECT_EQ(rows.size(1), 6);
      EXPECT_TRUE(rows.layout()[1].is_shard(1));
      return mul(rows, s);
    }, x, scale);
    EXPECT_TRUE(identical(y, mul(x, scale)));
    // Both axes cut rows; nested calls see the rows that the outer call sees.
    const Tensor z = make_local(values, {kF64, shape, Layout(mesh, Placement::shard(0))}, "");
    const auto f = [](const Tensor& rows) { return rowwise([](const Tensor& r) { return exp(r); }, rows); };
    EXPECT_TRUE(identical(rowwise(f, z), exp(z)));
    EXPECT_EQ(first_local_row(), 0);
  }, kLocal);
}

// Weights of units, gathered inside f: one all_gather and one reduce_scatter each, however many rows there are.
struct Expert : nn::Module {
  nn::Linear up{3, 5}, down{5, 3};
  Tensor forward(const Tensor& x) {
    return rowwise([&](const Tensor& rows) { return down(tanh(up(rows))) + cumsum(rows, 1); }, x);
  }
  SHEAF_FIELDS(up, down);
};
struct Experts : nn::Module {
  Expert first, second;
  Tensor forward(const Tensor& x) { return second(first(x)); }
  SHEAF_FIELDS(first, second);
};

std::vector<Values> train_experts(int ranks, Strategy strategy, const Placement& cut) {
  std::vector<Values> gradients;
  run_local(ranks, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", ranks}});
    Experts model;
    shard(model, mesh, {.units = nn::units_of<Expert>(), .strategy = strategy});
    materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
    const Tensor x = make_local(draw({7, 3}, "x"), {kF64, {7, 3}, Layout(mesh.spec, cut)}, "");
    Recording recording;
    recording.backward(mean(model(x) * model(x)));
    const Tape tape = recording.take();
    for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
    for (const nn::Parameter& p : model.parameters()) {
      const Values g = full_gradient(p).to_vector<double>();
      if (world.rank() == 0) gradients.push_back(g);
    }
  }, kLocal);
  return gradients;
}

TEST_P(Rowwise, GathersWeightsInside) {
  const std::vector<Values> want = train_experts(1, Strategy::full_shard, Placement::shard(0));
  ASSERT_EQ(want.size(), 8u);
  for (const Strategy s : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::replicate})
    for (const Placement& cut : cuts(7, GetParam())) {
      const std::vector<Values> got = train_experts(GetParam(), s, cut);
      for (size_t i = 0; i < want.size(); ++i) EXPECT_LE(scaled_error(got[i], want[i]), 1e-13) << name(s) << " " << i;
    }
}

TEST(RowwiseLayouts, MetaHasTheSameTypes) {
  run_local(3, [&](World& world) {
    const Layout layout(world.mesh({{"data", 3}}).spec, Placement::shard(0));
    const Tensor x = Tensor::empty({kF32, {7, 2}, layout}, Device::meta());
    const Tensor y = rowwise([](const Tensor& rows) { return sum(rows, 1); }, x);
    EXPECT_TRUE(y.device().is_meta());
    EXPECT_EQ(y.type(), (Type{kF32, {7}, layout}));
  }, kLocal);
}

TEST(RowwiseErrors, NameWhatIsWrong) {
  run_local(2, [&](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const auto make = [&](const Shape& s, const Placement& p) {
      return make_local(draw(s, "x"), {kF64, s, Layout(mesh, p)}, "");
    };
    const Tensor x = make({4, 3}, Placement::shard(0));
    const auto same = [](const Tensor& r) { return r; };
    const auto first = [](const Tensor& r, const Tensor&) { return r; };
    EXPECT_THROW(rowwise(first, x, make({3, 4}, kR)), ShapeError) << "a weight that is no row";
    EXPECT_THROW(rowwise(same, make({}, kR)), ShapeError);
    EXPECT_THROW(rowwise(first, x, make({4, 3}, kP)), PlacementError);
    EXPECT_THROW(rowwise(first, x, make({4, 3}, Placement::invariant())), PlacementError);
    EXPECT_THROW(rowwise(first, x, make({4, 3}, cuts(4, 2)[2])), PlacementError) << "another cut of rows";
    EXPECT_THROW(rowwise([](const Tensor& r) { return sum(r); }, x), ShapeError) << "not a row for each row";
    const Tensor addend = make({3, 3}, kP);
    EXPECT_THROW(rowwise([&](const Tensor& r) { return matmul(r, addend); }, x), PlacementError) << "still an addend";
    EXPECT_EQ(first_local_row(), 0);
  }, kLocal);
}

TEST(CheckRowwise, TellsRowsFromWholes) {
  const std::vector<Tensor> x = {make_tensor(draw({9, 4}, "x"), {9, 4}, kF64)};
  using Rows = std::span<const Tensor>;
  EXPECT_EQ(check_rowwise([](Rows r) { return std::vector{softmax(r[0])}; }, x), "");
  EXPECT_NE(check_rowwise([](Rows r) { return std::vector{softmax(r[0], 0)}; }, x), "");
  EXPECT_NE(check_rowwise([](Rows r) { return std::vector{sub(r[0], mean(r[0], 0))}; }, x), "");
  EXPECT_NE(check_rowwise([](Rows r) { return std::vector{cumsum(r[0], 0)}; }, x), "");
  EXPECT_NE(check_rowwise([](Rows r) { return std::vector{sum(r[0], 0)}; }, x), "");
}

}  // namespace
}  // namespace sheaf::testing
