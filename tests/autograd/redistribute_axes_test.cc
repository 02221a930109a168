// Redistribution on meshes of two and three axes: every pair of layouts preserves the value exactly and has the correct adjoint, also where
// axes cut one dimension, one nested in the other; the tape says what is sent, passes the checks and replays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/poison.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Axes = std::vector<MeshSpec::Axis>;

const LocalOptions kLocal{.timeout = std::chrono::seconds(20), .threads_per_rank = 1};
const Placement kR = Placement::replicate(), kP = Placement::partial(), kI = Placement::invariant(),
                kS0 = Placement::shard(0), kS1 = Placement::shard(1);

Values integers(size_t n, const std::string& stream) {
  Generator draw(stream);
  Values v(n);
  for (double& e : v) e = static_cast<double>(draw.below(2001) - 1000);
  return v;
}

// All but the first rank own one row, as long as there are rows; the first owns the rest.
OwnershipMap uneven(int dim, int64_t rows, int ranks) {
  std::vector<int64_t> sizes(static_cast<size_t>(ranks), 0);
  for (size_t r = sizes.size(); r-- > 1;)
    if (rows > 0) sizes[r] = 1, --rows;
  sizes[0] += rows;
  return OwnershipMap::uneven(dim, sizes);
}

bool fits(const Layout& layout, const Shape& shape) {
  const std::vector<int> origin(static_cast<size_t>(layout.num_axes()), 0);
  try {
    layout.local_shape(shape, origin.data());
    return true;
  } catch (const PlacementError&) {
    return false;
  }
}

// Every valid layout of `shape` on the mesh, from R, P, I, even and uneven cuts of every dimension, cuts of its parts (the parts of what
// the earlier axes leave, if all blocks are alike) and flat cuts with and without an offset.
std::vector<Layout> layouts(const MeshSpec* mesh, const Shape& shape) {
  std::vector<Layout> out = {Layout(mesh)};
  for (int axis = 0; axis < mesh->num_axes(); ++axis) {
    const int ranks = mesh->size(axis);
    std::vector<Layout> longer;
    for (const Layout& before : out) {
      std::vector<int> origin(static_cast<size_t>(mesh->num_axes()), 0);
      const Shape left = before.local_shape(shape, origin.data());
      std::vector<Placement> options = {kR, kP, kI};
      for (int d = 0; d < shape.rank(); ++d) {
        options.push_back(Placement::shard(d));
        if (left.rank() != shape.rank()) continue;
        options.push_back(Placement::shard(uneven(d, left[d], ranks)));
        options.push_back(Placement::shard(parts_of(d, left[d])));
        if (left[d] > 0) options.push_back(Placement::shard(owned_of(d, left[d], ranks)));
      }
      const int64_t n = shape.numel();
      if (shape.rank() > 0) {
        options.push_back(Placement::shard(OwnershipMap::flat((n + ranks - 1) / ranks)));
        options.push_back(Placement::shard(OwnershipMap::flat(n / ranks + 3, 2)));
      }
      for (const Placement& p : options)
        if (const Layout l = before.with(axis, p); fits(l, shape)) longer.push_back(l);
    }
    out = std::move(longer);
  }
  return out;
}

// <a, b> of the values on all ranks: summed over ranks, but once along Invariant axes.
double pairing(const std::vector<LocalPart>& a, const std::vector<LocalPart>& b) {
  double sum = 0;
  for (size_t r = 0; r < a.size(); ++r) {
    const Layout& l = a[r].type.layout;
    bool counts = true;
    for (int axis = 0; axis < l.num_axes(); ++axis)
      counts = counts && !(l[axis].is_invariant() && a[r].coordinates[static_cast<size_t>(axis)] != 0);
    EXPECT_EQ(a[r].values.size(), b[r].values.size());
    for (size_t i = 0; counts && i < a[r].values.size(); ++i) sum += a[r].values[i] * b[r].values[i];
  }
  return sum;
}

int64_t received(MeshRuntime& runtime, const MeshSpec* mesh) {
  int64_t bytes = 0;
  for (int a = 0; a < mesh->num_axes(); ++a) bytes += runtime.gather_lane(a).bytes_received();
  return bytes;
}

struct Parts {
  LocalPart x, y, w, g;
  uint64_t collectives = 0;
};

// One pair on one rank. Returns the bytes received according to the tape.
int64_t try_pair(const Values& x, const Values& w, const Shape& shape, const Layout& from, const Layout& to, bool replayed,
                 Parts& parts) {
  const Tensor source = make_local(x, {kF64, shape, from}, "x addends");
  Recording recording({.capture_leaves = true});
  recording.watch(source);
  const Tensor result = redistribute(source, to);
  EXPECT_EQ(result.type().to_string(), (Type{kF64, shape, to}).to_string());
  const Tensor weight = make_local(w, {kF64, shape, probe_weight_layout(to)}, "");
  const Tensor gradient =
      recording.gradient(probe(std::span(&result, 1), std::span(&weight, 1)), std::span(&source, 1))[0];
  EXPECT_EQ(gradient.type().to_string(), source.type().dual().to_string());
  parts.x = local_part(source);
  parts.y = local_part(result);
  parts.g = local_part(gradient);
  // The cotangent that the probe gave: its weight, which along a Replicate axis one rank contributes in full.
  parts.w = local_part(make_local(w, result.type().dual(), "w addends"));
  const auto captured = recording.captured();
  const ValueId wanted[] = {recording.value_of(result), recording.value_of(gradient)};
  const Tape tape = recording.take();
  for (const Finding& f : check_tape(tape)) ADD_FAILURE() << str(from, " to ", to, ": ", f);
  parts.collectives = collective_hash(tape);
  int64_t foreseen = 0;
  for (NodeId i = 0; i < tape.num_nodes(); ++i) foreseen += tape.wire_bytes(tape.node(i));
  if (!replayed || wanted[0] < 0 || wanted[1] < 0) return foreseen;
  const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return captured.at(v); }, wanted);
  EXPECT_TRUE(identical(again[0], result)) << str(from, " to ", to);
  EXPECT_TRUE(identical(again[1], gradient)) << str(from, " to ", to);
  return 2 * foreseen;
}

// All pairs of layouts, or a random sample of `some` of them.
void try_pairs(const Axes& axes, const Shape& shape, size_t some = 0,
               std::vector<Layout> (*layouts_of)(const MeshSpec*, const Shape&) = layouts) {
  int ranks = 1;
  for (const auto& axis : axes) ranks *= axis.size;
  const std::vector<Layout> all = layouts_of(MeshSpec::intern(axes), shape);
  std::vector<std::pair<size_t, size_t>> pairs;
  for (size_t from = 0; from < all.size(); ++from)
    for (size_t to = 0; to < all.size(); ++to) pairs.emplace_back(from, to);
  Generator draw("pairs");
  for (size_t k = 0; some && k < some; ++k)
    std::swap(pairs[k], pairs[k + static_cast<size_t>(draw.below(static_cast<int64_t>(pairs.size() - k)))]);
  if (some) pairs.resize(some);
  const auto n = static_cast<size_t>(shape.numel());
  const Values x = integers(n, "x"), w = integers(n, "w");
  std::vector<std::vector<Parts>> parts(pairs.size(), std::vector<Parts>(static_cast<size_t>(ranks)));
  run_local(ranks, [&](World& world) {
    const Mesh mesh = world.mesh(axes);
    const PoisonScope poison;
    int64_t foreseen = 0;
    for (size_t k = 0; k < pairs.size(); ++k) {
      Parts& mine = parts[k][static_cast<size_t>(world.rank())];
      foreseen += try_pair(x, w, shape, all[pairs[k].first], all[pairs[k].second], k % 7 == 0, mine);
    }
    EXPECT_EQ(foreseen, received(*mesh.runtime, mesh.spec)) << "what tapes say is received, and what was";
  }, kLocal);
  for (size_t k = 0; k < pairs.size(); ++k) {
    std::vector<LocalPart> px, py, pw, pg;
    std::vector<uint64_t> hashes;
    for (Parts& p : parts[k]) {
      px.push_back(p.x), py.push_back(p.y), pw.push_back(p.w), pg.push_back(p.g);
      hashes.push_back(p.collectives);
    }
    const std::string what = str(all[pairs[k].first], " to ", all[pairs[k].second], " of ", shape);
    std::string error;
    EXPECT_EQ(assemble(py, error), x) << what;
    EXPECT_EQ(assemble(pg, error), w) << what;
    EXPECT_EQ(error, "") << what;
    EXPECT_EQ(pairing(pw, py), pairing(pg, px)) << what;
    EXPECT_EQ(std::count(hashes.begin(), hashes.end(), hashes[0]), ranks) << what << ": ranks issue other collectives";
  }
}

TEST(RedistributeAxes, EveryPairOnTwoByTwo) {
  for (const Shape& shape : {Shape{7, 5}, Shape{3}, Shape{0, 4}, Shape{}}) try_pairs({{"data", 2}, {"model", 2}}, shape);
}
TEST(RedistributeAxes, EveryPairOnTwoByThree) { try_pairs({{"data", 2}, {"model", 3}}, {7, 4}); }
// For meshes and shapes that differ little from those, only some pairs.
TEST(RedistributeAxes, DrawnPairsOnTwoAxes) {
  try_pairs({{"data", 2}, {"model", 2}}, {8, 2}, 2000);
  try_pairs({{"data", 2}, {"model", 3}}, {4, 2}, 2000);
  try_pairs({{"data", 3}, {"model", 2}}, {5, 6}, 3000);
  try_pairs({{"data", 1}, {"model", 3}}, {7, 2}, 2000);
  try_pairs({{"data", 3}, {"model", 1}}, {7, 2}, 2000);
}
TEST(RedistributeAxes, EveryPairOnOneRank) { try_pairs({{"data", 1}, {"model", 1}}, {3, 2}); }
// Cuts that are made last, regardless of the order of axes: of rows, of rows that stay together and of parts of which a block has fewer
// units. On an axis with such a cut: all conversions from and to even cuts, partial sums and whole values.
std::vector<Layout> inner_layouts(const MeshSpec* mesh, const Shape& shape) {
  const OwnershipMap packed = OwnershipMap::parts(1, {shape[1] / 2, shape[1] / 4, shape[1] / 4}, shape[1] / 4);
  const Placement options[] = {kR, kP, kS0, kS1, Placement::shard(packed), Placement::shard(OwnershipMap::even(0).inner()),
                               Placement::shard(OwnershipMap::even(1, 4).inner()), Placement::shard(packed.inner())};
  std::vector<Layout> out = {Layout(mesh)};
  for (int axis = 0; axis < mesh->num_axes(); ++axis) {
    std::vector<Layout> longer;
    for (const Layout& before : out)
      for (const Placement& p : options) longer.push_back(before.with(axis, p));
    out = std::move(longer);
  }
  std::erase_if(out, [&](const Layout& l) { return !fits(l, shape); });
  return out;
}

TEST(RedistributeAxes, InnerCutsComeLast) {
  const Shape shape{5, 12};
  for (const Axes& axes : {Axes{{"context", 2}, {"model", 2}}, Axes{{"context", 3}, {"model", 2}}, Axes{{"context", 2}, {"model", 1}}})
    try_pairs(axes, shape, 0, inner_layouts);
  try_pairs({{"data", 2}, {"context", 2}, {"model", 2}}, shape, 2000, inner_layouts);
}

TEST(RedistributeAxes, DrawnPairsOnThreeAxes) {
  try_pairs({{"host", 2}, {"data", 1}, {"model", 2}}, {6, 5}, 1500);
  try_pairs({{"host", 2}, {"data", 2}, {"model", 2}}, {9, 4}, 1500);
}

// A transposed view's order in memory differs from the order of its elements.
TEST(RedistributeAxes, ViewsAreSentAsTheirCopies) {
  const Shape shape{5, 4}, turned{4, 5};
  const Values x = integers(20, "x");
  run_local(6, [&](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 3}}).spec;
    const PoisonScope poison;
    for (const Layout& from : layouts(mesh, turned)) {
      if ((from[0].is_shard() && from[0].map().is_flat()) || (from[1].is_shard() && from[1].map().is_flat())) continue;
      const Tensor view = transpose(make_local(x, {kF64, turned, from}, "addends"), 0, 1);
      for (const Layout& to : layouts(mesh, shape))
        EXPECT_TRUE(identical(redistribute(view, to), redistribute(view.clone(), to))) << str(view.type(), " to ", to);
    }
  }, kLocal);
}

// Which redistributions happen on which axis, by their names in dumps.
std::vector<std::string> steps(const Tape& tape) {
  std::vector<std::string> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (!n.op || !is_redistribute(n.op)) continue;
    const Layout& from = tape.type(tape.inputs(n)[0]).layout;
    const Layout& to = tape.type(tape.output(n)).layout;
    for (int a = 0; a < to.num_axes(); ++a)
      if (!(from[a] == to[a])) out.push_back(str(redistribution_name(from, to), ' ', to.mesh()->name(a)));
  }
  return out;
}

TEST(RedistributeAxes, WhatIsInsideIsPutTogetherFirst) {
  run_local(4, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 2}}).spec;
    const auto tape_of = [&](const Placement& a, const Placement& b, const Placement& c, const Placement& d) {
      const Tensor x = full_of({kF64, {4, 4}, Layout(mesh, {a, b})}, 1.0);
      Recording recording;
      recording.watch(x);
      const Tensor y = redistribute(x, Layout(mesh, {c, d}));
      recording.gradient(probe(std::span(&y, 1), std::vector{full_of({kF64, {4, 4}, probe_weight_layout(y.layout())}, 1.0)}),
                         std::span(&x, 1));
      return recording.take();
    };
    EXPECT_THAT(steps(tape_of(kS0, kS0, kR, kR)), ElementsAre("all_gather model", "all_gather data", "reduce_scatter data",
                                                              "reduce_scatter model"));
    EXPECT_THAT(steps(tape_of(kR, kR, kS0, kS0)), ElementsAre("slice data", "slice model", "zero_embed model",
                                                              "zero_embed data"));
    EXPECT_THAT(steps(tape_of(kS0, kS0, kR, kS0)),
                ElementsAre("all_gather model", "all_gather data", "slice model", "zero_embed model",
                            "reduce_scatter data", "reduce_scatter model"));
    EXPECT_THAT(steps(tape_of(kR, kS0, kS0, kS1)), ElementsAre("all_to_all model", "slice data", "zero_embed data",
                                                               "all_to_all model"));
    // An inner cut comes last, though its axis does not: the other axis' cut stays as it is.
    const Placement inner = Placement::shard(OwnershipMap::even(1).inner());
    EXPECT_THAT(steps(tape_of(kS0, kS1, inner, kS1)), ElementsAre("all_to_all data", "all_to_all data"));
    EXPECT_THAT(steps(tape_of(inner, kS1, kR, kS1)), ElementsAre("all_gather data", "reduce_scatter data"));
    EXPECT_THAT(steps(tape_of(inner, kS1, inner, kR)),
                ElementsAre("all_gather data", "all_gather model", "slice data", "zero_embed data", "reduce_scatter model",
                            "reduce_scatter data"));
    // Other dimensions are left alone.
    EXPECT_THAT(steps(tape_of(kS0, kS1, kR, kS1)), ElementsAre("all_gather data", "reduce_scatter data"));
    EXPECT_THAT(to_text(tape_of(kS0, kS0, kR, kR)), HasSubstr("Shard(0)→Replicate@model"));
  }, kLocal);
}

// An axis between the two is not in its final placement yet: the last axis' cut fits only after that one is.
TEST(RedistributeAxes, WhatIsCutLastWaitsForTheAxesBeforeIt) {
  run_local(8, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"host", 2}, {"data", 2}, {"model", 2}}).spec;
    const Layout to(mesh, {kI, kS1, Placement::shard(OwnershipMap::uneven(1, {0, 2}))});
    const Tensor x = make_local(integers(36, "x"), {kF64, {9, 4}, Layout(mesh, {kS0, kI, kS0})}, "");
    EXPECT_TRUE(identical(redistribute(x, to), make_local(integers(36, "x"), {kF64, {9, 4}, to}, "")));
  }, kLocal);
}

// On every rank, also on those whose own block would fit: otherwise the others would wait for them.
TEST(RedistributeAxes, CutsThatDoNotFitAreRefusedOnEveryRank) {
  run_local(4, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 2}}).spec;
    const Placement flat = Placement::shard(OwnershipMap::flat(20)), of_three = Placement::shard(OwnershipMap::uneven(0, {1, 2})),
                    by_five = Placement::shard(OwnershipMap::even(0, 5));
    const auto refusal = [&](const Shape& shape, const Layout& layout) -> std::string {
      EXPECT_THROW(Tensor::empty({kF64, shape, layout}), PlacementError) << layout.to_string();
      try {
        redistribute(full_of({kF64, shape, Layout(mesh)}, 1.0), layout);
      } catch (const PlacementError& e) {
        return e.what();
      }
      return "nothing thrown";
    };
    EXPECT_THAT(refusal({7, 2}, Layout(mesh, {kS0, of_three})),
                HasSubstr("[7,2] cannot be Shard(0)@data Shard(0 uneven)@model on mesh (data=2, model=2): axis model does not "
                          "fit a block of 4 that the axes before it leave of dimension 0"));
    EXPECT_THAT(refusal({9, 2}, Layout(mesh, {kS0, by_five})), HasSubstr("does not fit a block of 4"));
    EXPECT_THAT(refusal({9, 2}, Layout(mesh, {kS0, flat})), HasSubstr("axis model cuts it too, and a flat cut goes with no "
                                                                      "other"));
    EXPECT_THAT(refusal({9, 2}, Layout(mesh, {flat, kS0})), HasSubstr("a flat cut goes with no other"));
    EXPECT_THAT(refusal({9, 2}, Layout(mesh, {flat, flat})), HasSubstr("a flat cut goes with no other"));
    // Cases that do fit: blocks of equal size, and rows of ten cut into rows of five.
    EXPECT_EQ(Tensor::empty({kF64, {6, 2}, Layout(mesh, {kS0, of_three})}).local_shape()[0],
              1 + RankContext::current().coordinate(mesh, 1));
    EXPECT_EQ(Tensor::empty({kF64, {20, 2}, Layout(mesh, {Placement::shard(OwnershipMap::even(0, 10)), by_five})})
                  .local_shape()[0], 5);
  }, kLocal);
}

TEST(RedistributeAxes, MetaHasTheSameTypesAndPeaks) {
  run_local(6, [&](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 3}}).spec;
    const Shape shape{7, 4};
    const std::vector<Layout> all = layouts(mesh, shape);
    const auto peak = [&](const Tensor& x, const Layout& to, Allocator& allocator) {
      allocator.reset_peak();
      const int64_t before = allocator.stats().live;
      const Tensor y = redistribute(x, to);
      EXPECT_EQ(y.type().to_string(), (Type{kF64, shape, to}).to_string());
      return allocator.stats().peak - before;
    };
    const RankContext& context = RankContext::current();
    for (const Layout& from : all) {
      const Tensor x = full_of({kF64, shape, from}, 1.0), meta = Tensor::empty(x.type(), Device::meta());
      for (const Layout& to : all)
        EXPECT_EQ(peak(x, to, *context.cpu), peak(meta, to, *context.meta)) << str(from, " to ", to);
    }
  }, kLocal);
}

}  // namespace
}  // namespace sheaf::testing
