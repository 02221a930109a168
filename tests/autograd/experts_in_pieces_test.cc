// Rows of experts in pieces: rank by rank where each rank has a part of the experts, or group by group of experts where each expert is a
// part. Products have the bits of the whole, forward and backward.
#include <gtest/gtest.h>

#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/tests/autograd/in_pieces.h"
#include "sheaf/tests/poison.h"

namespace sheaf::testing {
namespace {

constexpr int64_t kChoices = 2;

struct Case {
  int64_t experts, parts;  // 0 parts: one for each rank
  int64_t sequences, tokens, groups;
  int cut;  // of x [B, T, C], cut over ranks by sequences or tokens
  bool bias;
  bool (*travels)(int ranks);  // in pieces
};

bool always(int) { return true; }
bool never(int) { return false; }

// Where each expert is a part, four or five ranks that share seven experts leave one of them fewer than two: then there is nothing to
// split.
const Case kCases[] = {
    {11, 0, 7, 6, 1, 0, false, always},
    {5, 0, 5, 4, 2, 0, true, always},
    {6, 0, 1, 60, 60, 1, true, always},  // ranks share a sequence
    {6, 0, 3, 60, 60, 1, false, never},  // several: their rows are not contiguous
    {7, 7, 7, 6, 1, 0, true, [](int ranks) { return ranks < 4; }},
    {12, 12, 5, 6, 1, 0, false, always},
};

Placement even(int dim) { return Placement::shard(OwnershipMap::even(dim)); }

class ExpertsInPieces : public ::testing::TestWithParam<int> {};

TEST_P(ExpertsInPieces, ProductsHaveTheBitsOfTheWhole) {
  const int ranks = GetParam();
  for (const double speed : {kLink, 0.0})
    for (const DType dtype : {kF32, kBF16, kF64})
      for (const Case& c : kCases) {
        const int64_t parts = c.parts ? c.parts : ranks;
        run_local(ranks, [&](World& world) {
          const Mesh mesh = world.mesh({{"expert", ranks}});
          const PoisonScope poison;
          const Layout tokens(mesh.spec, even(c.cut)), experts(mesh.spec, even(0));
          const int travels = c.travels(ranks) && ranks > 1 ? 1 : 0;
          const auto run = [&](Recording& recording, bool overlap) {
            std::vector<Tensor> leaves = {value("x", dtype, {c.sequences, c.tokens, kIn}, tokens),
                                          value("up", dtype, {c.experts, kOut, kIn}, experts), value("down", dtype, {c.experts, kIn, kOut}, experts)};
            if (c.bias)
              leaves.push_back(value("up bias", dtype, {c.experts, kOut}, experts)),
                  leaves.push_back(value("down bias", dtype, {c.experts, kIn}, experts));
            for (const Tensor& t : leaves) recording.watch(t);
            const Tensor chosen = top_k(value("affinity", kF32, {c.sequences, c.tokens, c.experts}, tokens), kChoices);
            const ExpertRoutes routes = expert_routes(chosen, c.experts, c.tokens, c.groups, parts);
            const Tensor sent = to_experts(leaves[0], routes), counts = redistribute(routes.counts, experts);
            const Tensor rows = overlap ? redistribute_in_pieces(sent, experts) : redistribute(sent, experts);
            const Tensor inside = expert_linear(rows, leaves[1], counts, {.bias = c.bias ? leaves[3] : Tensor()});
            const ExpertLinearOptions down{.bias = c.bias ? leaves[4] : Tensor()};
            ExpertLinearOptions output_layout = down;
            output_layout.output_layout = [&](const Type&) { return sent.layout(); };
            const Tensor back = overlap ? expert_linear(inside * inside, leaves[2], counts, output_layout)
                                        : redistribute(expert_linear(inside * inside, leaves[2], counts, down), sent.layout());
            EXPECT_EQ(nodes_in_pieces(recording.tape()), overlap ? 2 * travels : 0);
            const Tensor y = from_experts(back, routes);
            const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(value("w", dtype, y.shape(), tokens), kF64)), leaves);
            EXPECT_EQ(nodes_in_pieces(recording.tape()), overlap ? 3 * travels : 0);  // gradients back to the product that sent the tokens
            std::vector<Tensor> out = {y};
            out.insert(out.end(), gradients.begin(), gradients.end());
            return out;
          };
          expect_bits_of_the_whole(mesh,
                                   str(c.experts, " experts in ", parts, " parts, ", value("x", dtype, {c.sequences, c.tokens, kIn}, tokens).type(),
                                       ", ", ranks, " ranks"),
                                   run);
        }, links(speed));
      }
}
INSTANTIATE_TEST_SUITE_P(Worlds, ExpertsInPieces, ::testing::Range(1, 6));

// With one sequence, one group of ranks has it and the other has none.
TEST(ExpertsInPieces, ARankMayHaveNoRows) {
  for (const int64_t sequences : {1, 2})
    run_local(4, [&](World& world) {
      const Mesh mesh = world.mesh({{"expert", 2}, {"data", 2}});
      const PoisonScope poison;
      Layout tokens(mesh.spec, Placement::replicate());
      tokens[0] = even(1), tokens[1] = even(0);
      const Layout experts = tokens.with(0, even(0)).with(1, Placement::replicate());
      const auto run = [&](Recording& recording, bool overlap) {
        const std::vector<Tensor> leaves = {value("x", kF32, {sequences, 60, kIn}, tokens), value("up", kF32, {6, kOut, kIn}, experts),
                                            value("down", kF32, {6, kIn, kOut}, experts)};
        for (const Tensor& t : leaves) recording.watch(t);
        const Tensor chosen = top_k(value("affinity", kF32, {sequences, 60, 6}, tokens), kChoices);
        const ExpertRoutes routes = expert_routes(chosen, 6, 60, 60, 2);
        const Tensor sent = to_experts(leaves[0], routes);
        const auto at_experts = [&](const Tensor& t) { return t.layout().with(0, even(0)); };
        const Tensor counts = redistribute(routes.counts, at_experts(routes.counts));
        const Tensor rows = overlap ? redistribute_in_pieces(sent, at_experts(sent)) : redistribute(sent, at_experts(sent));
        const Tensor inside = expert_linear(rows, leaves[1], counts);
        const OutputLayout back_to = [&](const Type&) { return sent.layout(); };
        const Tensor back = overlap ? expert_linear(inside * inside, leaves[2], counts, {.output_layout = back_to})
                                    : redistribute(expert_linear(inside * inside, leaves[2], counts), sent.layout());
        const Tensor y = from_experts(back, routes);
        const auto gradients = recording.gradient(sum(cast(y, kF64)), leaves);
        std::vector<Tensor> out = {y};
        out.insert(out.end(), gradients.begin(), gradients.end());
        return out;
      };
      expect_bits_of_the_whole(mesh, str(sequences, " sequences"), run);
    }, links());
}

// Rows that do not form whole parts, such as those of an expert with one part and one sequence, are sent and waited for as a whole.
TEST(ExpertsInPieces, RowsThatAreNoPartsGoWhole) {
  run_local(2, [](World& world) {
    const Layout parts(world.mesh({{"expert", 2}}).spec, even(0));
    for (const auto& [shape, of_counts] : {std::pair{Shape{2, 8, kIn}, Shape{4}}, {{2, 1, 1, 8, kIn}, {4, 1, 1}}}) {
      const int columns = shape.rank() - 2;
      const Tensor x = value("x", kF32, shape, parts), weight = value("w", kF32, {4, kOut, kIn}, parts),
                   counts = full_of({kI32, of_counts, parts}, 2);
      Recording recording({.piece_rows = 1});
      const OutputLayout output_layout = along(0, even(columns));
      const Tensor y = expert_linear(x, weight, counts, {.output_layout = output_layout});
      EXPECT_EQ(nodes_in_pieces(recording.tape()), 0);
      EXPECT_TRUE(identical(y, redistribute_output(expert_linear(x, weight, counts), output_layout)));
    }
  }, links());
}

// A row-wise op that needs no workspace.
struct Plain {
  static constexpr const char* kName = "plain";
  struct Attrs { int64_t none; };
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static uint64_t row_inputs(const Attrs&, InputTypes) { return 0b1; }
  static void execute(const Attrs&, Execute& c) {
    for (int64_t i = 0; i < c.input(0).numel(); ++i) c.output(0).as<float>()[i] = c.input(0).as<float>()[i] * 2;
  }
};

TEST(ExpertsInPieces, AnOpNeedsNoWorkspace) {
  run_local(2, [](World& world) {
    const Layout rows(world.mesh({{"expert", 2}}).spec, even(0));
    const Tensor x = value("x", kF32, {2, 6, 4}, rows);
    Recording recording({.piece_rows = 1});
    const Plain::Attrs attrs{};
    EXPECT_TRUE(identical(apply_and_redistribute(op_def<Plain>(), &attrs, std::span(&x, 1), along(0, even(1))),
                          value("x", kF32, {2, 6, 4}, rows.with(0, even(1))) * 2.0));
    EXPECT_EQ(nodes_in_pieces(recording.tape()), 1);
  }, links());
}

// An op on rows of whole sequences, or experts, that records which rows it is executed for, and that needs workspace.
thread_local std::vector<Interval> executed;

struct Noted : DoublesRows {
  static constexpr PartDims kParts = {{0}, {0}}, kSequences = {{1}, {1}};
  struct Attrs { double products; };
  static void execute(const Attrs&, Execute& c) {
    const View x = c.input(0), y = c.output(0);
    ASSERT_GE(static_cast<int64_t>(c.workspace.bytes), x.bytes());
    ASSERT_TRUE(x.contiguous() && y.contiguous());
    const int64_t row = (x.as<float>() - c.input_tensor(0).view_unsynced().as<float>()) / x.shape.back();
    executed.push_back({row, row + x.numel() / x.shape.back()});
    for (int64_t i = 0; i < x.numel(); ++i) y.as<float>()[i] = x.as<float>()[i] * 2;
  }
  static const PartDims* row_parts(const Shape& x) { return x[0] > 1 ? &kParts : &kSequences; }
  static double products(const Attrs& a, InputTypes) { return a.products; }
};

// The pieces of its own rows that rank 1 of `ranks` processes, when sending and when receiving, over links so slow that nothing arrives
// before it is waited for.
std::array<std::vector<Interval>, 2> rows_of_a_call(int ranks, const Shape& shape, double products, int64_t least) {
  std::array<std::vector<Interval>, 2> out;
  run_local(ranks, [&](World& world) {
    const Layout sequences(world.mesh({{"expert", ranks}}).spec, even(1)), parts = sequences.with(0, even(0));
    Recording recording({.piece_rows = least});
    const Noted::Attrs attrs{products};
    executed.clear();
    const Tensor x = value("x", kF32, shape, parts);
    EXPECT_TRUE(
        identical(apply_and_redistribute(op_def<Noted>(), &attrs, std::span(&x, 1), along(0, even(1))), value("x", kF32, shape, sequences) * 2.0));
    if (world.rank() == 1) out[0] = executed;
    const Tensor come = redistribute_in_pieces(value("x", kF32, shape, sequences), parts, products);
    executed.clear();
    EXPECT_TRUE(identical(apply<Noted>(attrs, come), value("x", kF32, shape, parts) * 2.0));
    if (world.rank() == 1) out[1] = executed;
  }, links(1e5));
  return out;
}

TEST(ExpertsInPiecesOrder, OneRankAfterAnother) {
  using Rows = std::vector<Interval>;
  // Each sequence has three rows of a part. When sending, the rows that others wait for come first; when receiving, the rank's own rows
  // come first.
  const auto [sent, come] = rows_of_a_call(3, {3, 7, 1, 3, 4}, 1, 2);
  EXPECT_EQ(sent, (Rows{{12, 21}, {0, 6}, {6, 12}}));
  EXPECT_EQ(come, (Rows{{6, 12}, {12, 21}, {0, 6}}));
  const auto whole = std::array<Rows, 2>{Rows{{0, 21}}, Rows{{0, 21}}};
  EXPECT_EQ(rows_of_a_call(3, {3, 7, 1, 3, 4}, 1, 7), whole);  // the fewest that a rank sends are six
  EXPECT_EQ(rows_of_a_call(3, {3, 7, 1, 3, 4}, 2, 2)[0].size(), 3u);
  EXPECT_EQ(rows_of_a_call(3, {3, 7, 1, 3, 4}, 3.5, 2), whole);  // split over several products, each would have too few rows
  EXPECT_EQ(rows_of_a_call(3, {3, 7, 1, 3, 4}, 1, 0), whole);
}

TEST(ExpertsInPiecesOrder, SomeExpertsAfterOthers) {
  using Rows = std::vector<Interval>;
  const auto both = [](const Rows& rows) { return std::array<Rows, 2>{rows, rows}; };
  EXPECT_EQ(rows_of_a_call(2, {4, 2, 1, 3, 4}, 1, 2), both({{0, 6}, {6, 12}}));
  EXPECT_EQ(rows_of_a_call(2, {12, 2, 1, 3, 4}, 1, 6), both({{0, 6}, {6, 18}, {18, 24}, {24, 36}}));
  EXPECT_EQ(rows_of_a_call(2, {5, 2, 1, 3, 4}, 1, 2), both({{0, 6}, {6, 18}}));
  EXPECT_EQ(rows_of_a_call(2, {4, 2, 1, 3, 4}, 1, 7), both({{0, 12}}));
}

// Send and receive buffers outlive the nodes until all pieces have arrived.
TEST(ExpertsInPieces, ProgramsHaveTheBitsOfTheRecording) {
  for (const int ranks : {2, 3})
    for (const int64_t parts : {ranks, 8})
      run_local(ranks, [&](World& world) {
        const Layout sequences(world.mesh({{"expert", ranks}}).spec, even(1)), experts = sequences.with(0, even(0));
        const Tensor weight = value("w", kF32, {8, kIn, kIn}, experts), counts = full_of({kI32, {8, 5, 1}, experts}, 2);
        const auto layers = [&](Tensor x, bool overlap) {
          for (int layer = 0; layer < 3; ++layer) {
            const Tensor rows = overlap ? redistribute_in_pieces(x, experts) : redistribute(x, experts);
            const Tensor y = expert_linear(rows, weight, counts);
            x = x + (overlap ? expert_linear(y, weight, counts, {.output_layout = [&](const Type&) { return sequences; }})
                             : redistribute(expert_linear(y, weight, counts), sequences));
          }
          return x;
        };
        auto step = compile([&](const Tensor& x) { return layers(x, true); });
        const auto input = [&](int i) { return value(str("x", i), kF32, {parts, 5, 1, 16, kIn}, sequences); };
        for (int i = 0; i < 6; ++i) EXPECT_TRUE(identical(step({.piece_rows = 1}, input(i)), layers(input(i), false))) << i;
        ASSERT_NE(step.program(), nullptr);
        EXPECT_EQ(nodes_in_pieces(step.program()->tape()), 6);
      }, links());
}

// By hand: with four ranks a quarter of the rows is local: there at once, and never sent.
TEST(ExpertsInPiecesOrder, TheClockLetsThemOverlap) {
  run_local(4, [](World& world) {
    const Layout sequences(world.mesh({{"expert", 4}}).spec, even(1)), parts = sequences.with(0, even(0));
    const auto seconds = [&](bool sends, double travels, double computes) {
      const Tensor weight = value("w", kF32, {4, kIn, kIn}, parts), counts = full_of({kI32, {4, 4, 1}, parts}, 2);
      const Tensor x = value("x", kF32, {4, 4, 1, 2, kIn}, sends ? parts : sequences);
      Recording recording({.piece_rows = 1});
      if (sends) expert_linear(x, weight, counts, {.output_layout = [&](const Type&) { return sequences; }});
      else expert_linear(redistribute_in_pieces(x, parts), weight, counts);
      EXPECT_EQ(nodes_in_pieces(recording.tape()), 1);
      return timeline(recording.take(), travels, computes).seconds;
    };
    EXPECT_EQ(seconds(false, 3, 8), 8);    // a piece each second, after two seconds of computing with its own rows
    EXPECT_EQ(seconds(false, 12, 8), 14);
    EXPECT_EQ(seconds(true, 4, 8), 9);
    EXPECT_EQ(seconds(true, 16, 8), 18);
  }, links());
}

// A lost peer is an error, both where rows are waited for and where they are sent.
TEST(ExpertsInPiecesOrder, ALostRankIsAnError) {
  for (const bool sends : {true, false})
    EXPECT_THROW(run_local(2, [&](World& world) {
      const Layout sequences(world.mesh({{"expert", 2}}).spec, even(1)), parts = sequences.with(0, even(0));
      Recording recording({.piece_rows = 1});
      if (world.rank() == 1) fail<DataError>("lost");
      const Tensor weight = value("w", kF32, {2, kIn, kIn}, parts), counts = full_of({kI32, {2, 4, 1}, parts}, 2);
      const Tensor x = value("x", kF32, {2, 4, 1, 2, kIn}, sends ? parts : sequences);
      if (sends) expert_linear(x, weight, counts, {.output_layout = [&](const Type&) { return sequences; }});
      else expert_linear(redistribute_in_pieces(x, parts), weight, counts);
    }, links()), DataError);
}

}  // namespace
}  // namespace sheaf::testing
