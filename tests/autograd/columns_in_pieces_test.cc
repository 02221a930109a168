// Redistributions in pieces between a cut of rows and a cut of columns, as around attention: sent while a product computes them, received
// by a product that reads them; the bits are those of products of the whole.
#include <gtest/gtest.h>

#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/tests/autograd/in_pieces.h"
#include "sheaf/tests/poison.h"

namespace sheaf::testing {
namespace {

constexpr int64_t kUnits = 5, kWide = 4 * kUnits;  // columns, in units of which each rank has some

// Cuts of rows, of one sequence and of several, converted to cuts of columns: even and uneven, of packed parts.
struct Case {
  Shape leading;
  Placement rows, columns;
  bool goes = true;  // sent in pieces
};
std::vector<Case> cases(int ranks) {
  std::vector<int64_t> uneven(static_cast<size_t>(ranks), 2);
  uneven.back() = 17 - 2 * (ranks - 1);
  const auto columns = [](int dim) { return Placement::shard(OwnershipMap::even(dim, kWide / kUnits)); };
  const auto packed = [](int dim) { return Placement::shard(OwnershipMap::parts(dim, {2 * kUnits, kUnits, kUnits}, kUnits)); };
  return {{Shape{1, 17}, Placement::shard(1), packed(2)},
          {Shape{17}, Placement::shard(OwnershipMap::uneven(0, uneven)), columns(1)},
          {Shape{3, 17}, Placement::shard(OwnershipMap::uneven(1, uneven)), packed(2)},
          {Shape{7, 8}, Placement::shard(1), columns(2)},
          {Shape{1, 17, 3}, Placement::shard(1), columns(3)},  // three rows per token
          {Shape{2, 11, 3}, Placement::shard(1), packed(3)},
          {Shape{2, 3, 11}, Placement::shard(2), columns(3), false},                                         // more than sequences before
          {Shape{2, 20}, Placement::shard(OwnershipMap::from_both_ends(1, 20, ranks)), columns(2), false}};  // a rank has two intervals
}

class ColumnsInPieces : public ::testing::TestWithParam<int> {};

TEST_P(ColumnsInPieces, ProductsHaveTheBitsOfTheWhole) {
  const int ranks = GetParam();
  for (const double speed : {kLink, 0.0})
    for (const DType dtype : {kF32, kBF16, kF64})
      for (const Case& c : cases(ranks)) {
        Shape in = c.leading, wide = c.leading;
        in.push_back(kIn), wide.push_back(kWide);
        run_local(ranks, [&](World& world) {
          const Mesh mesh = world.mesh({{"context", ranks}});
          const PoisonScope poison;
          const Layout by_rows(mesh.spec, c.rows), by_columns(mesh.spec, c.columns), whole(mesh.spec);
          const bool goes = c.goes && ranks > 1;
          const auto run = [&](Recording& recording, bool overlap) {
            const std::vector<Tensor> leaves = {value("x", dtype, in, by_rows), value("read", dtype, {kWide, kIn}, whole),
                                                value("bias", dtype, {kWide}, whole), value("write", dtype, {kIn, kWide}, whole)};
            for (const Tensor& t : leaves) recording.watch(t);
            const OutputLayout output_layout = along(0, c.columns);
            const Tensor inside = overlap ? linear(leaves[0], leaves[1], leaves[2], Fp8::none, output_layout)
                                          : redistribute(linear(leaves[0], leaves[1], leaves[2]), by_columns);
            const Tensor mixed = inside * inside;
            const Tensor y = linear(overlap ? redistribute_in_pieces(mixed, by_rows) : redistribute(mixed, by_rows), leaves[3]);
            EXPECT_EQ(nodes_in_pieces(recording.tape()), overlap && goes ? 2 : 0);
            const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(value("w", dtype, in, by_rows), kF64)), leaves);
            EXPECT_EQ(nodes_in_pieces(recording.tape()), overlap && goes ? 3 : 0);  // gradients back to the product that sent the value
            std::vector<Tensor> out = {inside, y};
            out.insert(out.end(), gradients.begin(), gradients.end());
            return out;
          };
          expect_bits_of_the_whole(mesh, str(value("x", dtype, in, by_rows).type(), ", ", ranks, " ranks"), run);
        }, links(speed));
      }
}
INSTANTIATE_TEST_SUITE_P(Worlds, ColumnsInPieces, ::testing::Range(1, 6));

// A row-wise op that records how many rows it is executed for, and that needs workspace.
thread_local std::vector<int64_t> executed;

struct Noted : DoublesRows {
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    const View x = c.input(0), y = c.output(0);
    ASSERT_GE(static_cast<int64_t>(c.workspace.bytes), x.bytes());
    float* const between = static_cast<float*>(c.workspace.data);
    executed.push_back(x.numel() / x.shape.back());
    for (int64_t i = 0; i < x.numel(); ++i) between[i] = x.as<float>()[i] * 2;
    for (int64_t i = 0; i < x.numel(); ++i) y.as<float>()[i] = between[i];
  }
};

// This rank's rows in pieces, both ways; links are so slow that nothing arrives before it is waited for.
TEST(ColumnsInPiecesOrder, SomeRowsOfEachRankAtATime) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"context", 2}}).spec;
    const Layout rows(mesh, Placement::shard(1)), columns(mesh, Placement::shard(2));
    Recording recording({.piece_rows = 2});
    const auto sent = [&](const Shape& shape) {
      executed.clear();
      const Tensor x = value("x", kF32, shape, rows),
                   y = apply_and_redistribute(op_def<Noted>(), nullptr, std::span(&x, 1), along(0, Placement::shard(2)));
      EXPECT_TRUE(identical(y, value("x", kF32, shape, columns) * 2.0));
      return executed;
    };
    const auto received = [&](const Shape& shape) {
      const Tensor x = redistribute_in_pieces(value("x", kF32, shape, columns), rows);
      executed.clear();
      EXPECT_TRUE(identical(apply<Noted>({}, x), value("x", kF32, shape, rows) * 2.0));
      return executed;
    };
    using Rows = std::vector<int64_t>;
    for (const auto& run : {std::function(sent), std::function(received)}) {
      EXPECT_EQ(run({1, 16, 6}), (Rows{2, 2, 2, 2}));
      EXPECT_EQ(run({1, 40, 6}), (Rows{5, 5, 5, 5}));
      EXPECT_EQ(run({1, 10, 6}), (Rows{2, 3}));
      EXPECT_EQ(run({3, 4, 6}), (Rows{2, 2, 2}));
      EXPECT_EQ(run({6, 4, 6}), (Rows{2, 4, 2, 4}));
      EXPECT_EQ(run({1, 6, 6}), (Rows{3}));  // too few: whole
    }
  }, links(1e5));
}

// A reader that is not a product waits for all pieces.
TEST(ColumnsInPiecesOrder, OthersWaitForAll) {
  run_local(3, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"context", 3}}).spec;
    const Layout rows(mesh, Placement::shard(1)), columns(mesh, Placement::shard(2));
    for (const int64_t sequences : {1, 3}) {
      const Shape shape{sequences, 9, 6};
      Recording recording({.piece_rows = 1});
      const auto come = [&] { return redistribute_in_pieces(value("x", kF32, shape, columns), rows); };
      const Tensor expected = value("x", kF32, shape, rows);
      EXPECT_TRUE(identical(come(), expected));
      EXPECT_EQ(sum(come()).to_vector(), sum(expected).to_vector());
      EXPECT_TRUE(identical(contiguous(transpose(come(), 0, 2)), contiguous(transpose(expected, 0, 2))));
      come();
    }
  }, links(1e6));
}

// Send and receive buffers outlive the nodes until all pieces have arrived.
TEST(ColumnsInPiecesOrder, ProgramsHaveTheBitsOfTheRecording) {
  for (const int ranks : {2, 3})
    for (const int64_t sequences : {1, 4})
      run_local(ranks, [&](World& world) {
        const MeshSpec* mesh = world.mesh({{"context", ranks}}).spec;
        const Layout rows(mesh, Placement::shard(1)), whole(mesh);
        const Placement columns = Placement::shard(OwnershipMap::even(2, kWide / kUnits));
        const Tensor read = value("read", kF32, {kWide, kIn}, whole), write = value("write", kF32, {kIn, kWide}, whole);
        auto step = compile([&](const Tensor& given) {
          Tensor x = given;
          for (int layer = 0; layer < 3; ++layer) {
            const Tensor inside = linear(x, read, {}, Fp8::none, along(0, columns)), between = x + 1.0;
            x = linear(redistribute_in_pieces(inside * 0.5, rows), write) + between;
          }
          return x;
        });
        const auto input = [&](int i) { return value(str("x", i), kF32, {sequences, 13, kIn}, rows); };
        std::vector<Tensor> first;
        for (int i = 0; i < 4; ++i) first.push_back(step({.piece_rows = 1}, input(i)));
        ASSERT_NE(step.program(), nullptr);
        EXPECT_EQ(nodes_in_pieces(step.program()->tape()), 6);
        for (int i = 0; i < 4; ++i) {
          Tensor x = input(i);
          for (int layer = 0; layer < 3; ++layer)
            x = linear(redistribute(redistribute(linear(x, read), rows.with(0, columns)) * 0.5, rows), write) + (x + 1.0);
          EXPECT_TRUE(identical(first[static_cast<size_t>(i)], x)) << i;
          EXPECT_TRUE(identical(step({.piece_rows = 1}, input(i)), x)) << i;
        }
      }, links());
}

// By hand: a step of a product followed, or preceded, by an exchange in four pieces.
TEST(ColumnsInPiecesOrder, TheClockLetsThemOverlap) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"context", 2}}).spec;
    const Layout rows(mesh, Placement::shard(1)), columns(mesh, Placement::shard(2)), whole(mesh);
    const auto seconds = [&](bool sends, double travels, double computes, double packs = 0) {
      Recording recording({.piece_rows = 1});
      const Tensor given = value("x", kF32, {1, 8, kIn}, sends ? rows : columns), weight = value("w", kF32, {kIn, kIn}, whole);
      if (sends) linear(given, weight, {}, Fp8::none, along(0, Placement::shard(2)));
      else linear(redistribute_in_pieces(given, rows), weight);
      const Tape tape = recording.take();
      return timeline(tape, travels, computes, packs).seconds;
    };
    for (const bool sends : {true, false}) {
      EXPECT_EQ(seconds(sends, 4, 8), 9);
      EXPECT_EQ(seconds(sends, 16, 8), 18);
    }
    EXPECT_EQ(seconds(true, 8, 8, 4), 14);  // pieces are packed after their product
  }, links());
}

// If the batch leaves a rank no sequences, it sends none, in pieces or whole.
TEST(ColumnsInPiecesOrder, OfNoSequencesNothingIsSent) {
  run_local(4, [](World& world) {
    const Layout whole(world.mesh({{"data", 2}, {"context", 2}}).spec);
    const Layout tokens = whole.with(0, Placement::shard(0)).with(1, Placement::shard(1));
    Recording recording({.piece_rows = 1});
    const Tensor x = value("x", kF32, {1, 16, kIn}, tokens), weight = value("w", kF32, {kIn, kIn}, whole);
    const Tensor y = linear(x, weight, {}, Fp8::none, along(1, Placement::shard(2)));
    EXPECT_TRUE(identical(y, redistribute(linear(x, weight), tokens.with(1, Placement::shard(2)))));
    EXPECT_TRUE(identical(linear(redistribute_in_pieces(y, tokens), weight), linear(redistribute(y, tokens), weight)));
    const Tensor wide = value("x", kF32, {1, 16, kIn}, tokens.with(1, Placement::shard(2))),
                 cut = value("w", kF32, {kIn, kIn}, whole.with(1, Placement::shard(1)));
    EXPECT_TRUE(identical(linear(wide, cut, {}, Fp8::none, along(1, Placement::shard(1))), redistribute(linear(wide, cut), tokens)));
    EXPECT_EQ(nodes_in_pieces(recording.tape()), x.local_shape()[0] == 0 ? 0 : 3);
  }, links());
}

// A lost peer is an error, both where rows are waited for and where they are sent.
TEST(ColumnsInPiecesOrder, ALostRankIsAnError) {
  for (const bool sends : {true, false})
    EXPECT_THROW(run_local(2, [&](World& world) {
      const MeshSpec* mesh = world.mesh({{"context", 2}}).spec;
      const Layout rows(mesh, Placement::shard(1)), columns(mesh, Placement::shard(2));
      Recording recording({.piece_rows = 1});
      if (world.rank() == 1) fail<DataError>("lost");
      const Tensor weight = value("w", kF32, {kIn, kIn}, Layout(mesh));
      if (sends) linear(value("x", kF32, {1, 8, kIn}, rows), weight, {}, Fp8::none, along(0, Placement::shard(2)));
      else linear(redistribute_in_pieces(value("x", kF32, {1, 8, kIn}, columns), rows), weight);
    }, links()), DataError);
}

}  // namespace
}  // namespace sheaf::testing
