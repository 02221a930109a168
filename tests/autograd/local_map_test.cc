// local_map at worlds 1 to 5, with uneven cuts: values and gradients equal those of the ops that it replaces, no communication, the tape
// replays; placements that cannot be local are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/local_map.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/poison.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

const LocalOptions kLocal{.timeout = std::chrono::seconds(20), .threads_per_rank = 1};
const Placement kR = Placement::replicate(), kP = Placement::partial(), kS0 = Placement::shard(0), kS1 = Placement::shard(1);
constexpr int64_t kRows = 4, kColumns = 7;

Values draw(const Shape& shape, const std::string& stream) {
  Generator generator(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = generator.uniform(-1, 1);
  return v;
}

struct Results {
  std::vector<LocalPart> y, x, weight;  // the value, and the gradients of the input and of the captured tensor
  explicit Results(int ranks) : y(static_cast<size_t>(ranks)), x(y), weight(y) {}
};

using Function = std::function<Tensor(const Tensor& x, const Tensor& weight, const MeshSpec* mesh)>;

// f of x, placed as `cut`, and of a Replicate weight.
Results run(int ranks, const Placement& cut, const Function& f) {
  Results results(ranks);
  run_local(ranks, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", ranks}});
    const PoisonScope poison;
    const auto make = [&](const Shape& shape, const std::string& stream, const Placement& p) {
      return make_local(draw(shape, stream), {kF64, shape, Layout(mesh.spec, p)}, "");
    };
    const Tensor in[] = {make({kRows, kColumns}, "x", cut), make({kRows, 1}, "weight", kR)};
    Recording recording({.capture_leaves = true});
    for (const Tensor& t : in) recording.watch(t);
    const Tensor y = f(in[0], in[1], mesh.spec);
    EXPECT_EQ(mesh.runtime->gather_lane(0).bytes_received(), 0);
    const Tensor probed = make(y.shape(), "probe", y.layout()[0].is_partial() ? kR : y.layout()[0]);
    const Tensor loss = sum(y * probed);
    const std::vector<Tensor> g = recording.gradient(y.layout()[0].is_replicate() ? redistribute(loss, "data", kP) : loss, in);
    EXPECT_EQ(g[0].layout()[0], cut.dual()) << str(g[0].type());
    EXPECT_EQ(g[1].layout()[0], kP);
    const auto rank = static_cast<size_t>(world.rank());
    results.y[rank] = local_part(y), results.x[rank] = local_part(g[0]), results.weight[rank] = local_part(g[1]);

    const auto captured = recording.captured();
    const ValueId wanted[] = {recording.value_of(y), recording.value_of(g[0])};
    const Tape tape = recording.take();
    for (const auto& check : {check_types(tape), check_cotangents(tape)})
      for (const Finding& finding : check) ADD_FAILURE() << finding.to_string();
    const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return captured.at(v); }, wanted);
    EXPECT_TRUE(identical(again[0], y) && identical(again[1], g[0]));
  }, kLocal);
  return results;
}

void expect_same(const Results& got, const Results& want, const std::string& what) {
  std::string error;
  EXPECT_LE(scaled_error(assemble(got.y, error), assemble(want.y, error)), 1e-14) << what;
  EXPECT_LE(scaled_error(assemble(got.x, error), assemble(want.x, error)), 1e-14) << what;
  EXPECT_LE(scaled_error(assemble(got.weight, error), assemble(want.weight, error)), 1e-14) << what;
  EXPECT_EQ(error, "") << what;
}

std::vector<Placement> cuts_of_columns(int ranks) {
  std::vector<int64_t> last(static_cast<size_t>(ranks), 1), first(static_cast<size_t>(ranks), 0);
  last.back() = kColumns - (ranks - 1);
  first[0] = kColumns;
  return {kS1, Placement::shard(OwnershipMap::uneven(1, last)), Placement::shard(OwnershipMap::uneven(1, first))};
}

class LocalMap : public ::testing::TestWithParam<int> {};

// Partial over a cut dimension, which is what sum() would yield, and which a softmax over it would refuse.
TEST_P(LocalMap, AddendsOfACutDimension) {
  const Function plain = [](const Tensor& x, const Tensor& w, const MeshSpec*) { return sum(exp(x * w), 1); };
  const Results one = run(1, kS1, plain);
  for (const Placement& cut : cuts_of_columns(GetParam()))
    expect_same(run(GetParam(), cut, [](const Tensor& x, const Tensor& w, const MeshSpec* mesh) {
                  return local_map([&](const Tensor& mine) { return sum(exp(mine * w), 1); }, Type{kF64, {kRows}, Layout(mesh, kP)}, x);
                }), one, str(cut));
}

TEST_P(LocalMap, SlicesOfAnotherShape) {
  const Function plain = [](const Tensor& x, const Tensor& w, const MeshSpec*) { return transpose(x * w, 0, 1); };
  const Results one = run(1, kS1, plain);
  expect_same(run(GetParam(), kS1, [](const Tensor& x, const Tensor& w, const MeshSpec* mesh) {
                return local_map([](const Tensor& mine, const Tensor& weight) { return transpose(mine * weight, 0, 1); },
                                 Type{kF64, {kColumns, kRows}, Layout(mesh, kS0)}, x, w);
              }), one, "Shard(1) to Shard(0)");
}

TEST_P(LocalMap, LinearInAddends) {
  const Function plain = [](const Tensor& x, const Tensor& w, const MeshSpec*) { return x * w; };
  expect_same(run(GetParam(), kP, [](const Tensor& x, const Tensor& w, const MeshSpec* mesh) {
                return local_map([&](const Tensor& mine) { return mine * w; }, Type{kF64, {kRows, kColumns}, Layout(mesh, kP)}, x);
              }), run(GetParam(), kP, plain), "Partial");
}

TEST_P(LocalMap, WholesStayWholes) {
  const Function plain = [](const Tensor& x, const Tensor& w, const MeshSpec*) { return cumsum(x * w, 1); };
  expect_same(run(GetParam(), kR, [](const Tensor& x, const Tensor& w, const MeshSpec* mesh) {
                return local_map([&](const Tensor& all) { return cumsum(all * w, 1); }, Type{kF64, {kRows, kColumns}, Layout(mesh, kR)}, x);
              }), run(GetParam(), kR, plain), "Replicate");
}

INSTANTIATE_TEST_SUITE_P(Worlds, LocalMap, ::testing::Range(1, 6));

TEST(LocalMapLayouts, TwoAxesSeveralOutputsAndConstants) {
  run_local(4, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 2}}).spec;
    const Shape shape{5, 6};
    const Layout cut(mesh, {kS0, kS1});
    const Tensor x = make_local(draw(shape, "x"), {kF64, shape, cut}, "");
    const Tensor scale = make_tensor({0.5}, {1}, kF64);  // no layout: the same on all ranks
    const std::vector<Tensor> y = local_map(
        [](const Tensor& mine, const Tensor& s) {
          EXPECT_EQ(mine.layout()[0], kR);
          return std::vector{mine * s, sum(mine, 1)};
        },
        std::vector<Type>{{kF64, shape, cut}, {kF64, {5}, Layout(mesh, {kS0, kP})}}, x, scale);
    EXPECT_TRUE(identical(y[0], x * 0.5));
    EXPECT_TRUE(identical(y[1], sum(x, 1)));
    EXPECT_EQ(y[1].type(), sum(x, 1).type());
  }, kLocal);
  const Tensor alone = make_tensor({1, 2, 3}, {3}, kF64);
  EXPECT_TRUE(identical(local_map([](const Tensor& v) { return square(v); }, Type{kF64, {3}, {}}, alone), square(alone)));
}

// Each rank has an addend of its gradient, as of that of a captured one.
TEST(LocalMapLayouts, ConstantsHaveGradients) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const Type type{kF64, {5, 3}, Layout(mesh, kS0)};
    const Tensor x = make_local(draw({5, 3}, "x"), type, ""), scale = make_tensor({0.5, -1, 2}, {3}, kF64);
    Recording recording;
    recording.watch(scale);
    const auto gradient = [&](const Tensor& y) { return recording.gradient(sum(y), std::span(&scale, 1), {.keep = true})[0]; };
    const Tensor want = gradient(x * scale);
    const Tensor got = gradient(local_map([](const Tensor& mine, const Tensor& s) { return mine * s; }, type, x, scale));
    EXPECT_EQ(got.type(), want.type()) << got.type().to_string();
    EXPECT_TRUE(identical(got, want));
    const Tensor both = gradient(local_map([](const Tensor& mine, const Tensor& s) { return mine * s; }, type, x, scale) + x * scale);
    EXPECT_EQ(full_tensor(both).to_vector<double>(), full_tensor(want * 2.0).to_vector<double>());
  }, kLocal);
}

TEST(LocalMapLayouts, EntersAndLeavesOnTheTape) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const Tensor x = make_local(draw({4, 3}, "x"), {kF64, {4, 3}, Layout(mesh, kS1)}, "");
    Recording recording;
    recording.watch(x);
    const Tensor y = local_map([](const Tensor& mine) { return sum(exp(mine), 1); }, Type{kF64, {4}, Layout(mesh, kP)}, x);
    recording.gradient(sum(y), std::span(&x, 1));
    const Tape tape = recording.take();
    std::vector<std::string> names;
    for (NodeId id = 0; id < tape.num_nodes(); ++id)
      if (const std::string name(tape.op_name(tape.node(id))); name.ends_with("_local")) names.push_back(name);
    // The adjoint of leaving is entering.
    EXPECT_THAT(names, ::testing::ElementsAre("enter_local", "leave_local", "enter_local", "leave_local"));
  }, kLocal);
}

TEST(LocalMapErrors, NameWhatIsWrong) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const MeshSpec* other = world.mesh({{"other", 2}}).spec;
    const auto make = [](const MeshSpec* m, const Placement& p) { return make_local(draw({4, 3}, "x"), {kF64, {4, 3}, Layout(m, p)}, ""); };
    const auto type = [&](const Shape& shape, const Placement& p, DType d = kF64) { return Type{d, shape, Layout(mesh, p)}; };
    const auto same = [](const Tensor& t) { return t; };
    const std::string layer = "blocks.1.mix";
    const PathScope path(layer);
    const Tensor x = make(mesh, kS0);
    const auto refused = [&](auto error, auto&& f, const Type& out, const Tensor& in) {
      return message_of<decltype(error)>(ExitCode::kConfig, [&] { local_map(f, out, in); });
    };
    EXPECT_THAT(refused(ShapeError(""), same, type({4, 2}, kS0), x), HasSubstr("[local_map] blocks.1.mix: f returned f64[2,3]"));
    EXPECT_THAT(refused(ShapeError(""), same, type({4, 3}, kR), x), HasSubstr("has the shape [4,3]"));
    EXPECT_THAT(refused(DTypeError(""), same, type({4, 3}, kS0, kF32), x), HasSubstr("not f32[4,3] Shard(0)@data"));
    EXPECT_THAT(refused(PlacementError(""), same, type({4, 3}, Placement::invariant()), x), HasSubstr("the output f64[4,3] Invariant@data"));
    EXPECT_THAT(refused(PlacementError(""), same, type({4, 3}, kS0), make(mesh, Placement::invariant())), HasSubstr("the input"));
    EXPECT_THAT(refused(PlacementError(""), same, type({4, 3}, kS0), make(mesh, Placement::on(1))), HasSubstr("is Shard(on 1)"));
    EXPECT_THAT(refused(PlacementError(""), same, type({4, 3}, kS0), make(other, kS0)), HasSubstr("another"));
    const Tensor addend = make(mesh, kP);
    EXPECT_THAT(refused(PlacementError(""), [&](const Tensor&) { return addend; }, type({4, 3}, kP), x), HasSubstr("no value of one rank"));
    const auto none = [](std::span<const Tensor>) { return std::vector<Tensor>{}; };
    const Type out = type({4, 3}, kS0);
    EXPECT_THROW(local_map(TensorFunction(none), std::span(&out, 1), std::span(&x, 1)), ShapeError);
  }, kLocal);
}

}  // namespace
}  // namespace sheaf::testing
