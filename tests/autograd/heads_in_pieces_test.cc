// Keys and values that ranks gather for attention of their own queries, in groups of heads: the bits equal those of waiting for all,
// forward and backward.
#include <gtest/gtest.h>

#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/tests/autograd/in_pieces.h"
#include "sheaf/tests/poison.h"

namespace sheaf::testing {
namespace {

constexpr int64_t kWidth = 6;

// Numbers of query heads and key heads; how ranks cut tokens, of one sequence and of several.
struct Case {
  int64_t batch, tokens, heads, key_heads;
  OwnershipMap cut;
  AttentionOptions options = {};
  bool sinks = false;
};
std::vector<Case> cases(int ranks) {
  std::vector<int64_t> uneven(static_cast<size_t>(ranks), 3);
  uneven.back() = 23 - 3 * (ranks - 1);
  return {{1, 20, 4, 4, OwnershipMap::from_both_ends(1, 20, ranks)},
          {1, 21, 6, 3, OwnershipMap::from_both_ends(1, 21, ranks)},  // unequal numbers of tokens
          {3, 20, 10, 5, OwnershipMap::from_both_ends(1, 20, ranks), {.window = 4}, /*sinks=*/true},
          {1, 23, 4, 2, OwnershipMap::uneven(1, uneven)},
          {2, 20, 7, 7, OwnershipMap::even(1)}};
}

// As layers do it: keys and values are views of one packed tensor, which is gathered again in the backward.
Tensor attend(const Tensor& q, const Tensor& kv, const Layout& whole, bool overlap, const AttentionOptions& options) {
  std::vector<Tensor> of_all;
  {
    const RecomputeScope again({.results = true});
    of_all = chunk(overlap ? redistribute_in_heads(kv, whole, q.size(2) / (kv.size(2) / 2)) : redistribute(kv, whole), 2, 2);
  }
  return attention(q, of_all[0], of_all[1], options);
}

class HeadsInPieces : public ::testing::TestWithParam<int> {};

TEST_P(HeadsInPieces, HaveTheBitsOfWaitingForAll) {
  const int ranks = GetParam();
  for (const double speed : {kLink, 0.0})
    for (const DType dtype : {kF32, kBF16, kF64})
      for (const Case& c : cases(ranks)) {
        const Shape queries{c.batch, c.tokens, c.heads, kWidth}, pairs{c.batch, c.tokens, 2 * c.key_heads, kWidth};
        run_local(ranks, [&](World& world) {
          const Mesh mesh = world.mesh({{"context", ranks}});
          const PoisonScope poison;
          const Layout cut(mesh.spec, Placement::shard(c.cut)), whole(mesh.spec);
          const auto run = [&](Recording& recording, bool overlap) {
            std::vector<Tensor> leaves = {value("q", dtype, queries, cut), value("kv", dtype, pairs, cut)};
            if (c.sinks) leaves.push_back(value("sinks", dtype, {c.heads}, whole));
            for (const Tensor& t : leaves) recording.watch(t);
            AttentionOptions options = c.options;
            if (c.sinks) options.sinks = leaves[2];
            const Tensor y = attend(leaves[0], leaves[1], whole, overlap, options);
            EXPECT_EQ(nodes_in_pieces(recording.tape()), overlap && ranks > 1 ? 1 : 0);
            const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(value("w", dtype, queries, cut), kF64)), leaves);
            EXPECT_EQ(nodes_in_pieces(recording.tape()), overlap && ranks > 1 ? 2 : 0);  // once more in the backward
            return std::vector<Tensor>{y, gradients[0], gradients[1]};
          };
          expect_bits_of_the_whole(mesh, str(value("kv", dtype, pairs, cut).type(), ", ", ranks, " ranks"), run);
        }, links(speed));
      }
}
INSTANTIATE_TEST_SUITE_P(Worlds, HeadsInPieces, ::testing::Range(1, 6));

// An op on heads that records which heads it is executed for, and how much workspace it gets.
thread_local std::vector<Interval> executed;

struct Noted {
  static constexpr const char* kName = "noted";
  static constexpr PartDims kHeads = {{2, 2, 2}, {2}};
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::replicate_only(p); }
  static int64_t workspace(const Attrs&, const Execute& c) { return 4096 / c.input(1).shape[2]; }  // fewer heads need more
  static void execute(const Attrs&, Execute& c) {
    const View q = c.input(0), k = c.input(1), v = c.input(2), y = c.output(0);
    ASSERT_GE(static_cast<int64_t>(c.workspace.bytes), workspace({}, c));
    ASSERT_EQ(q.shape[2], 2 * k.shape[2]);
    const int64_t first = (k.as<float>() - c.input_tensor(1).view_unsynced().as<float>()) / kWidth;
    executed.push_back({first, first + k.shape[2]});
    for (int64_t h = 0; h < q.shape[2]; ++h)  // of the first token
      y.as<float>()[h * y.strides[2]] = k.as<float>()[h / 2 * k.strides[2]] + v.as<float>()[h / 2 * v.strides[2]] + q.as<float>()[h * q.strides[2]];
  }
};

enum class From { as_they_come, other_keys, values_first, queries_come_too };
std::vector<Interval> heads_of_a_call(int64_t key_heads, int64_t least, From from = From::as_they_come) {
  std::vector<Interval> out;
  run_local(2, [&](World& world) {
    const Layout cut(world.mesh({{"context", 2}}).spec, Placement::shard(OwnershipMap::from_both_ends(1, 8, 2))), whole(cut.mesh());
    Recording recording({.piece_rows = least});
    const Shape shape{1, 8, 2 * key_heads, kWidth};
    const Tensor kv = value("kv", kF32, shape, cut);
    const Tensor q = from == From::queries_come_too ? redistribute_in_heads(value("q", kF32, shape, cut), whole, 2) : value("q", kF32, shape, whole);
    std::vector<Tensor> parts = chunk(redistribute_in_heads(kv, whole, 2), 2, 2);
    if (from == From::other_keys) parts[0] = parts[0] * 1.0;
    if (from == From::values_first) std::swap(parts[0], parts[1]);
    executed.clear();
    const Tensor y = apply<Noted>({}, {q, parts[0], parts[1]});
    if (world.rank() == 0) out = executed;
    const std::vector<float> got = slice(y, 1, 0, 1).to_vector(), all = value("kv", kF32, {1, 8, 2 * key_heads, kWidth}, whole).to_vector(),
                             queries = value("q", kF32, shape, whole).to_vector();
    for (int64_t h = 0; h < 2 * key_heads; ++h)
      EXPECT_EQ(got[static_cast<size_t>(h * kWidth)], all[static_cast<size_t>(h / 2 * kWidth)] +
                                                          all[static_cast<size_t>((key_heads + h / 2) * kWidth)] +
                                                          queries[static_cast<size_t>(h * kWidth)]);
  }, links(1e5));
  return out;
}

TEST(HeadsInPiecesOrder, SomeHeadsAtATime) {
  using Heads = std::vector<Interval>;
  EXPECT_EQ(heads_of_a_call(2, 1), (Heads{{0, 1}, {1, 2}}));
  EXPECT_EQ(heads_of_a_call(3, 1), (Heads{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(heads_of_a_call(8, 1), (Heads{{0, 2}, {2, 4}, {4, 6}, {6, 8}}));
  EXPECT_EQ(heads_of_a_call(5, 1), (Heads{{0, 1}, {1, 2}, {2, 3}, {3, 5}}));
  EXPECT_EQ(heads_of_a_call(1, 1), (Heads{{0, 1}}));  // one head: whole
  EXPECT_EQ(heads_of_a_call(4, 5), (Heads{{0, 4}}));  // too few rows of a rank
  EXPECT_EQ(heads_of_a_call(4, 0), (Heads{{0, 4}}));
  // An op that reads them otherwise starts when all heads have arrived; other inputs in flight are waited for in full.
  EXPECT_EQ(heads_of_a_call(4, 1, From::other_keys), (Heads{{0, 4}}));
  EXPECT_EQ(heads_of_a_call(4, 1, From::values_first), (Heads{{0, 4}}));
  EXPECT_EQ(heads_of_a_call(4, 1, From::queries_come_too), (Heads{{0, 1}, {1, 2}, {2, 3}, {3, 4}}));
}

// Send and receive buffers outlive the nodes until all pieces have arrived.
TEST(HeadsInPieces, ProgramsHaveTheBitsOfTheRecording) {
  for (const int ranks : {2, 3})
    run_local(ranks, [&](World& world) {
      const Layout cut(world.mesh({{"context", ranks}}).spec, Placement::shard(OwnershipMap::from_both_ends(1, 12, ranks))), whole(cut.mesh());
      const Shape shape{2, 12, 8, kWidth};
      const auto layers = [&](Tensor x, bool overlap) {
        for (int layer = 0; layer < 3; ++layer) {
          const Tensor kv = x * 0.5, between = x + 1.0;
          x = attend(x, kv, whole, overlap, {}) + between;
        }
        return x;
      };
      auto step = compile([&](const Tensor& given) { return layers(given, true); });
      const auto input = [&](int i) { return value(str("x", i), kF32, shape, cut); };
      std::vector<Tensor> first;
      for (int i = 0; i < 4; ++i) first.push_back(step({.piece_rows = 1}, input(i)));
      ASSERT_NE(step.program(), nullptr);
      EXPECT_EQ(nodes_in_pieces(step.program()->tape()), 3);
      for (int i = 0; i < 4; ++i) {
        const Tensor expected = layers(input(i), false);
        EXPECT_TRUE(identical(first[static_cast<size_t>(i)], expected)) << i;
        EXPECT_TRUE(identical(step({.piece_rows = 1}, input(i)), expected)) << i;
      }
    }, links());
}

// A reader that is not attention waits for all pieces.
TEST(HeadsInPieces, OthersWaitForAll) {
  run_local(3, [](World& world) {
    const Layout cut(world.mesh({{"context", 3}}).spec, Placement::shard(OwnershipMap::from_both_ends(1, 12, 3))), whole(cut.mesh());
    Recording recording({.piece_rows = 1});
    const auto come = [&] { return redistribute_in_heads(value("x", kF32, {2, 12, 8, kWidth}, cut), whole, 2); };
    const Tensor expected = value("x", kF32, {2, 12, 8, kWidth}, whole);
    EXPECT_TRUE(identical(come(), expected));
    EXPECT_EQ(sum(chunk(come(), 2, 2)[1]).to_vector(), sum(chunk(expected, 2, 2)[1]).to_vector());
    EXPECT_TRUE(identical(contiguous(transpose(come(), 0, 2)), contiguous(transpose(expected, 0, 2))));
    const Tensor weight = value("weight", kF32, {3, kWidth}, whole);  // of a product that computes with rows as they arrive
    EXPECT_TRUE(identical(linear(come(), weight), linear(expected, weight)));
    come();
  }, links(1e6));
}

// A rank that is lost during the gather is an error, and no rank hangs.
TEST(HeadsInPieces, ALostRankIsAnError) {
  std::string said;
  EXPECT_THROW(run_local(2, [&](World& world) {
    const Layout cut(world.mesh({{"context", 2}}).spec, Placement::shard(OwnershipMap::from_both_ends(1, 8, 2))), whole(cut.mesh());
    Recording recording({.piece_rows = 1});
    if (world.rank() == 1) fail<ConfigError>("lost");
    const Tensor q = value("q", kF32, {1, 8, 8, kWidth}, cut), kv = value("kv", kF32, {1, 8, 8, kWidth}, cut);
    try {
      attend(q, kv, whole, true, {}).to_vector();
    } catch (const CommError& error) {
      said = error.what();
      throw;
    }
  }, links(1e4)), ConfigError);
  EXPECT_NE(said.find("lost"), said.npos) << said;
}

// Four pieces that take as long to send as attention takes to compute: three of them overlap with it.
TEST(HeadsInPiecesClock, AttentionGoesOnWithWhatHasCome) {
  run_local(2, [](World& world) {
    const Layout cut(world.mesh({{"context", 2}}).spec, Placement::shard(OwnershipMap::from_both_ends(1, 8, 2))), whole(cut.mesh());
    for (const int64_t key_heads : {1, 4}) {
      Recording recording({.piece_rows = 1});
      const Tensor kv = value("kv", kF32, {1, 8, 2 * key_heads, kWidth}, cut), q = value("q", kF32, {1, 8, 2 * key_heads, kWidth}, cut);
      const std::vector<Tensor> parts = chunk(redistribute_in_heads(kv, whole, 2), 2, 2);
      attention(q, parts[0], parts[1]);
      EXPECT_DOUBLE_EQ(timeline(recording.tape(), 4, 4).seconds, key_heads == 1 ? 8 : 5);
    }
  }, links());
}

}  // namespace
}  // namespace sheaf::testing
