// Every pair of the table in core/placement.h at worlds 1 to 5, with parts made by hand: the value is preserved exactly, and the recorded
// gradient is the adjoint.
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/ops/redistribution.h"
#include "sheaf/autograd/ops/pending_redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/communicator.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/poison.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

Values integers(size_t n, const std::string& stream) {
  Generator draw(stream);
  Values v(n);
  for (double& e : v) e = static_cast<double>(draw.below(2001) - 1000);
  return v;
}

// Even and uneven cuts of every dimension, cuts of its parts, intervals with owners, flat cuts with and without an offset, all on one rank,
// and the three placements that do not cut.
std::vector<Placement> placements(const Shape& shape, int ranks) {
  std::vector<Placement> out = {Placement::replicate(), Placement::partial(), Placement::invariant()};
  for (int d = 0; d < shape.rank(); ++d) {
    out.push_back(Placement::shard(d));
    std::vector<int64_t> sizes(static_cast<size_t>(ranks), 0);  // all but the last rank own one row, as long as there are rows
    int64_t left = shape[d];
    for (int r = 0; r + 1 < ranks && left > 0; ++r) sizes[static_cast<size_t>(r)] = 1, --left;
    sizes.back() += left;
    out.push_back(Placement::shard(OwnershipMap::uneven(d, sizes)));
    out.push_back(Placement::shard(parts_of(d, shape[d])));
    out.push_back(Placement::shard(owned_of(d, shape[d], ranks)));
  }
  if (shape.rank() > 0) {
    const int64_t n = shape.numel();
    out.push_back(Placement::shard(OwnershipMap::flat((n + ranks - 1) / ranks)));
    out.push_back(Placement::shard(OwnershipMap::flat(n / ranks + 3, 2)));
  }
  for (int r = 0; r < ranks; ++r) out.push_back(Placement::on(r));
  return out;
}

// <a, b> of the values on all ranks: summed over ranks, but once for Invariant.
double pairing(const std::vector<LocalPart>& a, const std::vector<LocalPart>& b) {
  double sum = 0;
  const size_t ranks = a[0].type.layout[0].is_invariant() ? 1 : a.size();
  for (size_t r = 0; r < ranks; ++r) {
    EXPECT_EQ(a[r].values.size(), b[r].values.size());
    for (size_t i = 0; i < a[r].values.size(); ++i) sum += a[r].values[i] * b[r].values[i];
  }
  return sum;
}

enum class Links { none, chain, ring };
void PrintTo(Links links, std::ostream* out) { *out << (links == Links::none ? "none" : links == Links::chain ? "chain" : "ring"); }

MeshSpec::Axis axis_of(int ranks, Links links) { return {"data", ranks, links == Links::chain, links == Links::ring}; }

int64_t received(MeshRuntime& mesh, int ranks, Links links) {
  int64_t bytes = mesh.gather_lane(0).bytes_received();
  const int me = mesh.coordinate(0), before = (me + ranks - 1) % ranks, next = (me + 1) % ranks;
  if (links == Links::none || ranks == 1) return bytes;
  if (me > 0 || links == Links::ring)
    bytes += mesh.link(0, me, Toward::before).bytes_received() + mesh.link(0, before, Toward::next).bytes_received();
  if (me + 1 < ranks || links == Links::ring)
    bytes += mesh.link(0, me, Toward::next).bytes_received() + mesh.link(0, next, Toward::before).bytes_received();
  return bytes;
}

// Ranks, and how they are linked.
class Redistribute : public ::testing::TestWithParam<std::tuple<int, Links>> {};

TEST_P(Redistribute, EveryPairKeepsTheValueAndHasItsAdjoint) {
  const auto [ranks, links] = GetParam();
  for (const Shape& shape : {Shape{7, 5}, Shape{4, 1, 6}, Shape{12, 2}, Shape{3}, Shape{0, 4}, Shape{}}) {
    const std::vector<Placement> all = placements(shape, ranks);
    const auto n = static_cast<size_t>(shape.numel());
    const Values x = integers(n, "x"), w = integers(n, "w");
    struct Parts { std::vector<LocalPart> x, y, w, g; };
    std::vector<Parts> pairs(all.size() * all.size());
    for (Parts& p : pairs)
      for (auto* v : {&p.x, &p.y, &p.w, &p.g}) v->resize(static_cast<size_t>(ranks));
    run_local(ranks, [&, ranks = ranks, links = links](World& world) {
      const Mesh joined = world.mesh({axis_of(ranks, links)});
      const MeshSpec* mesh = joined.spec;
      const auto rank = static_cast<size_t>(world.rank());
      const PoisonScope poison;
      int64_t foreseen = 0;
      for (size_t from = 0; from < all.size(); ++from) {
        for (size_t to = 0; to < all.size(); ++to) {
          Parts& parts = pairs[from * all.size() + to];
          const Tensor source = make_local(x, {kF64, shape, Layout(mesh, all[from])}, "x addends");
          Recording recording;
          recording.watch(source);
          const Tensor result = redistribute(source, Layout(mesh, all[to]));
          // The cotangent is given in the dual type; a Partial one as addends that differ between ranks.
          const Tensor cotangent = make_local(w, result.type().dual(), "w addends");
          const Tensor gradient = from == to ? cotangent : redistribute(cotangent, source.layout().dual());
          parts.x[rank] = local_part(source);
          parts.y[rank] = local_part(result);
          parts.w[rank] = local_part(cotangent);
          parts.g[rank] = local_part(gradient);
          // The gradient that the tape derives is the same map.
          const Tensor weight = make_local(w, {kF64, shape, probe_weight_layout(result.layout())}, "");
          const Tensor derived = recording.gradient(probe(std::span(&result, 1), std::span(&weight, 1)),
                                                    std::span(&source, 1))[0];
          EXPECT_EQ(derived.type().to_string(), source.type().dual().to_string());
          EXPECT_EQ(str(check_types(recording.tape()).size()), "0");
          EXPECT_EQ(str(check_cotangents(recording.tape()).size()), "0");
          for (NodeId i = 0; i < recording.tape().num_nodes(); ++i)
            foreseen += recording.tape().wire_bytes(recording.tape().node(i));
          parts.g[rank].type = gradient.type();
          Parts check;
          check.g = {local_part(derived)};
          if (!all[from].is_replicate() && !all[from].is_partial()) {  // partial sums may be split differently
            EXPECT_EQ(check.g[0].values, parts.g[rank].values) << all[from].to_string() << "→" << all[to].to_string();
          }
        }
      }
      EXPECT_EQ(foreseen, received(*joined.runtime, ranks, links)) << "what tapes say is received, and what was";
    }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
    for (size_t from = 0; from < all.size(); ++from) {
      for (size_t to = 0; to < all.size(); ++to) {
        const Parts& p = pairs[from * all.size() + to];
        const std::string what = str(all[from], "→", all[to], " of ", shape, " at ", ranks, " ranks");
        std::string error;
        EXPECT_EQ(assemble(p.y, error), x) << what;
        EXPECT_EQ(assemble(p.g, error), w) << what;
        EXPECT_EQ(error, "") << what;
        EXPECT_EQ(pairing(p.w, p.y), pairing(p.g, p.x)) << what;
      }
    }
  }
}

// A transposed view's order in memory differs from the order of its elements.
TEST_P(Redistribute, ViewsAreSentAsTheirCopies) {
  const auto [ranks, links] = GetParam();
  const Shape shape{7, 5}, turned{5, 7};
  const std::vector<Placement> from = placements(turned, ranks), to = placements(shape, ranks);
  const Values x = integers(35, "x");
  run_local(ranks, [&, ranks = ranks, links = links](World& world) {
    const MeshSpec* mesh = world.mesh({axis_of(ranks, links)}).spec;
    const PoisonScope poison;
    for (const Placement& p : from) {
      if (p.is_shard() && p.map().is_flat()) continue;  // has no dimensions to exchange
      const Tensor view = transpose(make_local(x, {kF64, turned, Layout(mesh, p)}, "addends"), 0, 1);
      for (const Placement& q : to)
        EXPECT_TRUE(identical(redistribute(view, Layout(mesh, q)), redistribute(view.clone(), Layout(mesh, q))))
            << str(view.type(), " to ", q);
    }
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

// In two halves, start and wait, with another redistribution between them, and the source freed by then; over links that transfer while the
// ranks go on.
TEST_P(Redistribute, WhatTravelsArrives) {
  const auto [ranks, links] = GetParam();
  for (const Shape& shape : {Shape{7, 5}, Shape{4, 1, 6}, Shape{3}, Shape{0, 4}, Shape{}}) {
    const std::vector<Placement> all = placements(shape, ranks);
    const Values x = integers(static_cast<size_t>(shape.numel()), "x"), other = integers(12, "other");
    run_local(ranks, [&, ranks = ranks, links = links](World& world) {
      const Mesh joined = world.mesh({axis_of(ranks, links)});
      const PoisonScope poison;
      int64_t foreseen = 0, travelled = 0;
      for (const Placement& from : all)
        for (const Placement& to : all) {
          const Layout before(joined.spec, from), after(joined.spec, to);
          if (!can_start_redistribute(before, after)) continue;
          const std::string what = str(from, "→", to, " of ", shape, " at ", ranks, " ranks");
          const auto source = [&] { return make_local(x, {kF64, shape, before}, "addends"); };
          Recording recording;
          PendingRedistribute pending = start_redistribute(source(), after);
          const Tensor summed = redistribute(make_local(other, {kF64, {4, 3}, Layout(joined.spec, Placement::partial())}, "others"), "data",
                                             Placement::replicate());
          const Tensor result = wait(pending);
          pending = {};
          EXPECT_TRUE(identical(result, redistribute(source(), after))) << what;
          EXPECT_EQ(summed.to_vector<double>(), other) << what;
          // Its gradient is that of redistribute(), again in two halves.
          const auto gradient_through = [&](const auto& there) {
            const Tensor from_here = recording.watch(source()), y = there(from_here);
            const Tensor weight = make_local(x, {kF64, shape, probe_weight_layout(after)}, "");
            return recording.gradient(probe(std::span(&y, 1), std::span(&weight, 1)), std::span(&from_here, 1))[0];
          };
          const Tensor gradient = gradient_through([&](const Tensor& t) { return wait(start_redistribute(t, after)); });
          EXPECT_TRUE(identical(gradient, gradient_through([&](const Tensor& t) { return redistribute(t, after); }))) << what;
          EXPECT_EQ(str(check_types(recording.tape()).size()), "0") << what;
          EXPECT_EQ(str(check_cotangents(recording.tape()).size()), "0") << what;
          for (NodeId i = 0; i < recording.tape().num_nodes(); ++i) foreseen += recording.tape().wire_bytes(recording.tape().node(i));
          ++travelled;
        }
      EXPECT_EQ(travelled > 0, ranks > 1);
      EXPECT_EQ(foreseen, received(*joined.runtime, ranks, links));
      // A redistribution that nobody waits for.
      if (ranks > 1) start_redistribute(make_local(other, {kF64, {4, 3}, Layout(joined.spec, Placement::partial())}, "others"),
                                        Layout(joined.spec, Placement::shard(0)));
    }, {.bytes_per_second = 1e8, .timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Redistribute, ::testing::Combine(::testing::Range(1, 6), ::testing::Values(Links::none, Links::chain, Links::ring)));

// Intervals with owners are one kind of cut, in whichever form they are written.
TEST(Ownership, IntervalsGoToTheirOwners) {
  const OwnershipMap map = OwnershipMap::by_owner(0, {2, 1, 0, 3, 1}, {2, 2, 1, 0, 2});
  EXPECT_EQ(map, OwnershipMap::by_owner(0, {3, 3, 1}, {2, 0, 2}));
  EXPECT_NE(map, OwnershipMap::by_owner(0, {3, 3, 1}, {2, 1, 2}));
  EXPECT_EQ(str(Placement::shard(map)), "Shard(0 owned)");
  const Shape shape{7, 2};
  EXPECT_EQ(map.owned_intervals(0, 3, shape), (std::vector<Interval>{{3, 6}}));
  EXPECT_EQ(map.owned_intervals(1, 3, shape), std::vector<Interval>{});
  EXPECT_EQ(map.owned_intervals(2, 3, shape), (std::vector<Interval>{{0, 3}, {6, 7}}));
  EXPECT_EQ(map.owned_size(2, 3, shape), 4);
  EXPECT_THROW(map.owned(2, 3, shape), PlacementError);
  EXPECT_EQ(map.moved_to(1, 2, 1), OwnershipMap::by_owner(1, {6, 6, 2}, {2, 0, 2}));
  EXPECT_FALSE(map.can_move(1, 2));
  EXPECT_THROW(OwnershipMap::by_owner(0, {1, 2}, {0}), PlacementError);
  EXPECT_THROW(OwnershipMap::by_owner(0, {-1}, {0}), PlacementError);
}

// Rows whose cost grows with the number of rows before them are balanced over ranks.
TEST(OwnershipMap, FromBothEndsEvensOutWhatGrows) {
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    const int64_t tokens = 2 * ranks * 7;
    std::vector<int> owners(static_cast<size_t>(tokens), -1);
    for (int r = 0; r < ranks; ++r) {
      int64_t seen = 0, own = 0;
      for (const Interval& i : OwnershipMap::from_both_ends(1, tokens, ranks).owned_intervals(r, ranks, {1, tokens}))
        for (int64_t t = i.begin; t < i.end; ++t) {
          EXPECT_EQ(owners[static_cast<size_t>(t)], -1);
          owners[static_cast<size_t>(t)] = r;
          seen += t + 1, ++own;
        }
      EXPECT_EQ(own, 14);
      EXPECT_EQ(seen, 7 * (tokens + 1)) << "rank " << r << " of " << ranks;
    }
    EXPECT_EQ(std::ranges::count(owners, -1), 0);
  }
  // Uneven pieces, and fewer rows than ranks.
  for (const int64_t rows : {0, 1, 5, 9, 17})
    for (const int ranks : {1, 2, 3, 12}) {
      for (int r = 0; r < ranks; ++r)
        EXPECT_EQ(OwnershipMap::from_both_ends(0, rows, ranks).owned_size(r, ranks, {rows}),
                  OwnershipMap::even(0).owned_size(r, ranks, {rows}));
    }
}

// Two gradients of one started redistribution would be added up in order of arrival.
TEST(Redistribute, WhatTravelsArrivesOnce) {
  run_local(2, [](World& world) {
    const Layout cut(world.mesh({{"data", 2}}).spec, Placement::shard(1)), whole(cut.mesh());
    Recording recording;
    const Tensor x = recording.watch(make_local(integers(12, "x"), {kF64, {4, 3}, cut}, ""));
    const PendingRedistribute pending = start_redistribute(x, whole);
    const Tensor both[] = {wait(pending), wait(pending)};
    EXPECT_TRUE(identical(both[0], both[1]));
    const Tensor weights[] = {make_local(integers(12, "w"), {kF64, {4, 3}, probe_weight_layout(whole)}, ""),
                              make_local(integers(12, "v"), {kF64, {4, 3}, probe_weight_layout(whole)}, "")};
    EXPECT_THROW(recording.gradient(probe(both, weights), std::span(&x, 1)), LifetimeError);
  });
}

// Rows are sent without packing if those of each rank are contiguous, at the source and at the destination.
TEST(Redistribute, WhatLiesInOrderIsNotPacked) {
  run_local(3, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 3}}).spec;
    const auto copies = [&](const Shape& shape, const Placement& from, const Placement& to) {
      const Type a{kF32, shape, Layout(mesh, from)}, b{kF32, shape, Layout(mesh, to)};
      return std::pair(Redistribution::packs(a, b), Redistribution::unpacks(a, b));
    };
    const Placement parts = Placement::shard(0), sequences = Placement::shard(1), uneven = Placement::shard(OwnershipMap::uneven(1, {4, 0, 3}));
    EXPECT_EQ(copies({3, 7, 2, 4}, sequences, parts), std::pair(false, false));
    EXPECT_EQ(copies({3, 7, 2, 4}, parts, uneven), std::pair(false, false));
    EXPECT_EQ(copies({2, 7, 2, 4}, sequences, parts), std::pair(false, false));  // one rank has none
    EXPECT_EQ(copies({4, 7, 2, 4}, sequences, parts), std::pair(false, true));   // one has two, each with rows of all
    EXPECT_EQ(copies({4, 7, 2, 4}, parts, sequences), std::pair(true, false));
    EXPECT_EQ(copies({3, 7, 2, 4}, parts, Placement::shard(2)), std::pair(true, false));
    EXPECT_EQ(copies({3, 1, 7, 4}, parts, Placement::shard(2)), std::pair(false, false));
    EXPECT_EQ(copies({3, 7, 2, 4}, sequences, Placement::shard(OwnershipMap::from_both_ends(0, 3, 3))), std::pair(true, false));
  });
}

TEST(Redistribute, SaysWhatItDoes) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const auto name = [&](Placement p, Placement q) { return redistribution_name(Layout(mesh, p), Layout(mesh, q)); };
    const Placement r = Placement::replicate(), p = Placement::partial(), i = Placement::invariant(),
                    s = Placement::shard(0), t = Placement::shard(1);
    EXPECT_EQ(name(s, r), "all_gather");
    EXPECT_EQ(name(s, i), "all_gather");
    EXPECT_EQ(name(p, s), "reduce_scatter");
    EXPECT_EQ(name(p, r), "all_reduce");
    EXPECT_EQ(name(p, i), "all_reduce");
    EXPECT_EQ(name(s, t), "all_to_all");
    EXPECT_EQ(name(r, s), "slice");
    EXPECT_EQ(name(s, p), "zero_embed");
    EXPECT_EQ(name(r, p), "keep_on_one");
    EXPECT_EQ(name(i, r), "nothing");
    const Placement first = Placement::on(0), second = Placement::on(1);
    EXPECT_EQ(name(r, first), "slice");
    EXPECT_EQ(name(first, r), "all_gather");
    EXPECT_EQ(name(first, p), "zero_embed");
    EXPECT_EQ(name(p, second), "reduce_scatter");
    const MeshSpec* chain = world.mesh({{"stage", 2, true}}).spec;
    EXPECT_EQ(redistribution_name(Layout(chain, first), Layout(chain, second)), "send");
    const MeshSpec* one = world.mesh({{"data", 2}, {"model", 1}}).spec;
    EXPECT_EQ(redistribution_name(Layout(one, {r, s}), Layout(one, {r, r})), "nothing");
  });
}

// A value without a mesh is whole on every rank: it need not be gathered, and nothing is gathered to a layout without a mesh.
TEST(Redistribute, ValuesAndLayoutsWithoutAMesh) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const Tensor whole = full_of({kF32, {6, 2}, {}}, 1.0), part = full_of({kF32, {6, 2}, Layout(mesh, Placement::shard(0))}, 2.0);
    EXPECT_EQ(redistribute(whole, "data", Placement::replicate()).id(), whole.id());
    EXPECT_THROW(redistribute(whole, "data", Placement::shard(0)), PlacementError);
    EXPECT_THROW(redistribute(part, Layout()), PlacementError);
    EXPECT_EQ(full_tensor(whole).id(), whole.id());
    const Tensor gathered = full_tensor(part);
    EXPECT_EQ(gathered.layout(), Layout(mesh));
    EXPECT_EQ(gathered.to_vector<float>(), std::vector<float>(12, 2.0f));
    EXPECT_EQ(full_tensor(full_of({kF32, {3}, Layout(mesh, Placement::partial())}, 5.0)).to_vector<float>(), std::vector<float>(3, 5.0f));
  });
}

TEST(Layout, AxesByName) {
  const MeshSpec* mesh = MeshSpec::intern({{"data", 2}, {"model", 3}});
  const Layout layout = Layout(mesh).with("model", Placement::shard(1));
  EXPECT_EQ(layout, Layout(mesh).with(1, Placement::shard(1)));
  EXPECT_TRUE(layout["model"].is_shard(1));
  EXPECT_TRUE(layout["data"].is_replicate());
  EXPECT_THROW(layout.with("stage", Placement::partial()), ConfigError);
  EXPECT_THROW(Layout().with("data", Placement::partial()), PlacementError);
}

// A cut in which elements have no owner, or several, is refused where a tensor is created.
TEST(Redistribute, CutsThatDoNotFitAreRefused) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    for (const OwnershipMap& map : {OwnershipMap::even(0, 2), OwnershipMap::uneven(0, {3, 3}), OwnershipMap::uneven(0, {7}),
                                    OwnershipMap::uneven(0, {4, 5}), OwnershipMap::uneven(0, {2, 2}, 2),
                                    OwnershipMap::even(2), OwnershipMap::even(-1), OwnershipMap::flat(6),
                                    OwnershipMap::parts(0, {4, 4}, 2), OwnershipMap::parts(2, {4, 3}, 1),
                                    OwnershipMap::by_owner(0, {4, 2}, {0, 1}), OwnershipMap::by_owner(0, {4, 3}, {0, 2}),
                                    OwnershipMap::by_owner(0, {4, 3}, {-1, 0}), OwnershipMap::by_owner(2, {2}, {0}), OwnershipMap::on(2)}) {
      const Layout layout(mesh, Placement::shard(map));
      EXPECT_THROW(Tensor::empty({kF32, {7, 2}, layout}), PlacementError) << layout.to_string();
      const Tensor x = full_of({kF32, {7, 2}, Layout(mesh)}, 1.0);
      EXPECT_THROW(redistribute(x, layout), PlacementError) << layout.to_string();
    }
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  run_local(1, [](World& world) {  // no such dimension: also where nothing is cut
    const Tensor x = full_of({kF32, {7, 2}, Layout(world.mesh({{"data", 1}}).spec)}, 1.0);
    EXPECT_THROW(redistribute(x, "data", Placement::shard(2)), PlacementError);
  });
}

}  // namespace
}  // namespace sheaf::testing
