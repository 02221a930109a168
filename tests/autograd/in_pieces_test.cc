// Redistributions in pieces between products: the bits are those of products of the whole, on uneven ranks, of one sequence and of several;
// and rows are computed piece by piece, each once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/tests/autograd/in_pieces.h"
#include "sheaf/tests/poison.h"

namespace sheaf::testing {
namespace {

// Cuts of rows, of one sequence and of several: even and uneven, with trailing dimensions.
struct Case {
  Shape leading;
  Placement cut;
  bool goes;  // in pieces
};
std::vector<Case> cases(int ranks) {
  std::vector<int64_t> uneven(static_cast<size_t>(ranks), 2);
  uneven.back() = 17 - 2 * (ranks - 1);
  const bool several = ranks > 1;
  return {{Shape{1, 17}, Placement::shard(1), several},
          {Shape{17}, Placement::shard(OwnershipMap::uneven(0, uneven)), several},
          {Shape{3, 17}, Placement::shard(OwnershipMap::uneven(1, uneven)), several},
          {Shape{7, 8}, Placement::shard(1), several},
          {Shape{2, 17, 3}, Placement::shard(1), several},
          {Shape{11, 3}, Placement::shard(0), several},                             // one sequence
          {Shape{2, 12}, Placement::shard(OwnershipMap::from_both_ends(1, 12, ranks)), false},  // a rank has two intervals
          {Shape{2, 3}, Placement::shard(2), false}};                              // no rows
}

class InPieces : public ::testing::TestWithParam<int> {};

// Through every kind of product, gathered before it and scattered after it.
TEST_P(InPieces, ProductsHaveTheBitsOfTheWhole) {
  const int ranks = GetParam();
  for (const double speed : {kLink, 0.0})
    for (const DType dtype : {kF32, kBF16, kF64})
      for (const Case& c : cases(ranks)) {
        Shape in = c.leading, hidden = c.leading;
        in.push_back(kIn), hidden.push_back(kOut);
        if (c.cut.map().dim() >= in.rank() - 1 && in.back() % ranks) continue;
        run_local(ranks, [&](World& world) {
          const Mesh mesh = world.mesh({{"model", ranks}});
          const PoisonScope poison;
          const Layout cut(mesh.spec, c.cut), whole(mesh.spec);
          const Layout rows(mesh.spec, Placement::shard(0)), columns(mesh.spec, Placement::shard(1));
          const auto run = [&](Recording& recording, bool overlap) {
            std::vector<Tensor> leaves = {value("x", dtype, in, cut),
                                          value("up", dtype, {kOut * ranks, kIn}, rows),
                                          value("bias", dtype, {kOut * ranks}, rows),
                                          value("down", dtype, {kIn, kOut * ranks}, columns),
                                          value("last", dtype, {kIn}, whole),
                                          value("gate", dtype, {kOut * ranks, kIn}, rows)};
            for (const Tensor& t : leaves) recording.watch(t);
            const auto enter = [&](const Tensor& t) { return overlap ? redistribute_in_pieces(t, whole) : redistribute(t, whole); };
            const OutputLayout output_layout = along(0, c.cut);
            const auto leave = [&](const Tensor& t) { return redistribute(t, t.layout().with(0, c.cut)); };
            const Tensor x = enter(leaves[0]), gate = linear(x, leaves[5]), up = linear(x, leaves[1], leaves[2]);
            const Tensor y = overlap ? linear(swiglu(gate, up), leaves[3], leaves[4], Fp8::none, output_layout)
                                     : leave(linear(swiglu(gate, up), leaves[3], leaves[4]));
            const GeluOfLinear gelu = linear_gelu(enter(y), leaves[1], leaves[2]);
            const Tensor z =
                overlap ? gelu_linear(gelu, leaves[3], leaves[4], Fp8::none, output_layout) : leave(gelu_linear(gelu, leaves[3], leaves[4]));
            EXPECT_EQ(nodes_in_pieces(recording.tape()), overlap && c.goes ? 4 : 0);
            const auto gradients = recording.gradient(sum(cast(z, kF64) * cast(value("w", dtype, in, cut), kF64)), leaves);
            std::vector<Tensor> out = {y, z};
            out.insert(out.end(), gradients.begin(), gradients.end());
            return out;
          };
          expect_bits_of_the_whole(mesh, str(value("x", dtype, in, cut).type(), ", ", ranks, " ranks"), run);
        }, links(speed));
      }
}
INSTANTIATE_TEST_SUITE_P(Worlds, InPieces, ::testing::Range(1, 6));

// A row-wise op that records which rows it is executed for.
thread_local std::vector<std::vector<Interval>> executed;  // each call's, in the order of its output

struct Doubled {
  static constexpr const char* kName = "doubled";
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static void execute(const Attrs&, Execute& c) {
    const View x = c.input(0), y = c.output(0);
    const float* const whole = c.input_tensor(0).view_unsynced().as<float>();
    const int64_t width = x.shape.back(), groups = x.rank() == 3 ? x.shape[0] : 1, rows = x.shape.dim(-2);
    std::vector<Interval>& call = executed.emplace_back();
    for (int64_t g = 0; g < groups; ++g) {
      const float* const from = x.as<float>() + (x.rank() == 3 ? g * x.strides[0] : 0);
      for (int64_t i = 0; i < rows * width; ++i) y.as<float>()[g * rows * width + i] = 2 * from[i];
      call.push_back({(from - whole) / width, (from - whole) / width + rows});
    }
  }
  static uint64_t row_inputs(const Attrs&, InputTypes) { return 0b1; }
};

struct Slow : Doubled {
  static void execute(const Attrs& a, Execute& c) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    Doubled::execute(a, c);
  }
};

struct Added {
  static constexpr const char* kName = "added";
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static void execute(const Attrs&, Execute& c) {
    const View x = c.input(0), other = c.input(1), y = c.output(0);
    for (int64_t i = 0; i < y.numel(); ++i) y.as<float>()[i] = x.as<float>()[i] + other.as<float>()[i];
  }
  static uint64_t row_inputs(const Attrs&, InputTypes) { return 0b11; }
};

std::vector<Interval> flat(const std::vector<std::vector<Interval>>& calls) {
  std::vector<Interval> out;
  for (const auto& call : calls) out.insert(out.end(), call.begin(), call.end());
  return out;
}
Interval rows(int64_t begin, int64_t end) { return {begin, end}; }
using ::testing::ElementsAre;

// Over a link so slow that nothing arrives before it is waited for.
TEST(InPiecesOrder, OwnRowsComeFirstThenThoseOfTheNextRanks) {
  run_local(3, [](World& world) {
    const Layout cut(world.mesh({{"model", 3}}).spec, Placement::shard(1)), whole(cut.mesh());
    Recording recording({.piece_rows = 2});
    executed.clear();
    const Tensor x = value("x", kF32, {1, 18, 4}, cut), all = redistribute_in_pieces(x, whole);
    const Tensor y = apply<Doubled>({}, all);
    const int64_t me = world.rank(), first = 6 * ((me + 1) % 3), second = 6 * ((me + 2) % 3);
    EXPECT_THAT(flat(executed), ElementsAre(rows(6 * me, 6 * me + 6), rows(first, first + 3), rows(first + 3, first + 6), rows(second, second + 3),
                                            rows(second + 3, second + 6)));
    EXPECT_TRUE(identical(y, value("x", kF32, {1, 18, 4}, whole) * 2.0));
    executed.clear();
    apply<Doubled>({}, all);  // now all have arrived
    EXPECT_EQ(executed.size(), 1u);
  }, links(1e5));
}

TEST(InPiecesOrder, SequencesComeSomeAtATime) {
  run_local(2, [](World& world) {
    const Layout cut(world.mesh({{"model", 2}}).spec, Placement::shard(1)), whole(cut.mesh());
    Recording recording({.piece_rows = 1});
    executed.clear();
    const Tensor y = apply<Doubled>({}, redistribute_in_pieces(value("x", kF32, {6, 5, 4}, cut), whole));
    EXPECT_THAT(flat(executed), ElementsAre(rows(0, 5), rows(5, 15), rows(15, 20), rows(20, 30)));
    EXPECT_TRUE(identical(y, value("x", kF32, {6, 5, 4}, whole) * 2.0));
  }, links(1e5));
}

TEST(InPiecesOrder, WhatIsSentOnIsMadeInTheOrderOfTheWire) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"model", 2}}).spec;
    const Layout addends(mesh, Placement::partial());
    Recording recording({.piece_rows = 2});
    const auto sent = [&](const Shape& shape) {
      executed.clear();
      const Tensor x = value("x", kF32, shape, addends, "a");
      const Tensor y = apply_and_redistribute(op_def<Doubled>(), nullptr, std::span(&x, 1), along(0, Placement::shard(1)));
      const std::vector<std::vector<Interval>> calls = executed;
      EXPECT_TRUE(identical(y, redistribute(x * 2.0, Layout(mesh, Placement::shard(1)))));
      return calls;
    };
    // A part of the rows of both at once; of uneven cuts rank by rank; of several sequences, sequence by sequence.
    EXPECT_THAT(sent({1, 8, 4}), ElementsAre(ElementsAre(rows(0, 2), rows(4, 6)), ElementsAre(rows(2, 4), rows(6, 8))));
    EXPECT_THAT(flat(sent({1, 9, 4})), ElementsAre(rows(0, 2), rows(4, 6), rows(2, 4), rows(6, 9)));
    // A non-dense operand is copied.
    const Tensor across = transpose(value("x", kF32, {4, 6, 5}, addends, "a"), 0, 2);
    EXPECT_TRUE(identical(apply_and_redistribute(op_def<Doubled>(), nullptr, std::span(&across, 1), along(0, Placement::shard(1))),
                          redistribute(across * 2.0, Layout(mesh, Placement::shard(1)))));
    EXPECT_THAT(flat(sent({4, 4, 4})),
                ElementsAre(rows(0, 2), rows(4, 6), rows(2, 4), rows(6, 8), rows(8, 10), rows(12, 14), rows(10, 12), rows(14, 16)));
  }, links(1e6));
}

// A reader that is not a product (a sum, a view, the host) waits for all pieces; no explicit wait is needed.
TEST(InPiecesOrder, OthersWaitForAll) {
  run_local(3, [](World& world) {
    const Layout cut(world.mesh({{"model", 3}}).spec, Placement::shard(1)), whole(cut.mesh());
    for (const int64_t sequences : {1, 3}) {
      const Shape shape{sequences, 9, 4};
      Recording recording({.piece_rows = 1});
      const auto gathered = [&] { return redistribute_in_pieces(value("x", kF32, shape, cut), whole); };
      const Tensor expected = value("x", kF32, shape, whole);
      EXPECT_TRUE(identical(gathered(), expected));
      EXPECT_EQ(sum(gathered()).to_vector(), sum(expected).to_vector());
      EXPECT_TRUE(identical(contiguous(transpose(gathered(), 1, 2)), contiguous(transpose(expected, 1, 2))));
      EXPECT_TRUE(identical(linear(reshape(gathered(), {sequences * 9, 4}), value("w", kF32, {5, 4}, whole)),
                            linear(reshape(expected, {sequences * 9, 4}), value("w", kF32, {5, 4}, whole))));
      // Rows along another dimension are not the rows that arrive.
      EXPECT_TRUE(identical(linear(reshape(gathered(), {sequences * 18, 2}), value("w", kF32, {5, 2}, whole)),
                            linear(reshape(expected, {sequences * 18, 2}), value("w", kF32, {5, 2}, whole))));
      gathered();
    }
  }, links(1e6));
}

// Where pieces are first needed is known in advance: their memory, and what is lent to lanes, outlives the earlier nodes.
TEST(InPiecesOrder, ProgramsHaveTheBitsOfTheRecording) {
  for (const int ranks : {2, 3})
    for (const int64_t sequences : {1, 4})
      run_local(ranks, [&](World& world) {
        const Layout cut(world.mesh({{"model", ranks}}).spec, Placement::shard(1)), whole(cut.mesh());
        const Layout by_rows(cut.mesh(), Placement::shard(0)), columns(cut.mesh(), Placement::shard(1));
        const Tensor up = value("up", kF32, {kOut * ranks, kIn}, by_rows), down = value("down", kF32, {kIn, kOut * ranks}, columns);
        auto step = compile([&](const Tensor& given) {
          Tensor x = given;
          for (int layer = 0; layer < 3; ++layer) {
            const Tensor all = redistribute_in_pieces(x * 0.5, whole), between = x + 1.0, h = linear(all, up);
            x = linear(h, down, {}, Fp8::none, along(0, Placement::shard(1))) + between;
          }
          return x;
        });
        const auto input = [&](int i) { return value(str("x", i), kF32, {sequences, 13, kIn}, cut); };
        std::vector<Tensor> first;
        for (int i = 0; i < 4; ++i) first.push_back(step({.piece_rows = 1}, input(i)));
        ASSERT_NE(step.program(), nullptr);
        EXPECT_EQ(nodes_in_pieces(step.program()->tape()), 6);
        for (int i = 0; i < 4; ++i) {
          Tensor x = input(i);
          for (int layer = 0; layer < 3; ++layer)
            x = redistribute(linear(linear(redistribute(x * 0.5, whole), up), down), cut) + (x + 1.0);
          EXPECT_TRUE(identical(first[static_cast<size_t>(i)], x)) << i;
          EXPECT_TRUE(identical(step({.piece_rows = 1}, input(i)), x)) << i;
        }
      }, links());
}

// Scattered rows arrive while the op's input is still read: a rank that owns most rows must not overwrite rows that are yet to be sent.
TEST(InPiecesOrder, ProgramsKeepWhatIsStillMultiplied) {
  run_local(2, [](World& world) {
    const Layout addends(world.mesh({{"model", 2}}).spec, Placement::partial());
    const Placement cut = Placement::shard(OwnershipMap::uneven(1, {2, 10}));
    auto step = compile([&](const Tensor& given) {
      const Tensor x = given * 3.0;
      return apply_and_redistribute(op_def<Slow>(), nullptr, std::span(&x, 1), along(0, cut)) * 5.0;
    });
    const Tensor given = value("x", kF32, {1, 12, 64}, addends, "a");
    const Tensor expected = redistribute(given * 3.0 * 2.0, addends.with(0, cut)) * 5.0;
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(identical(step({.piece_rows = 1}, given), expected)) << i;
    EXPECT_EQ(nodes_in_pieces(step.program()->tape()), 1);
  }, links(1e8));
}

// By hand: the time of a step of a gather and a product that reads it, or of a product and the scatter after it, for given times of both.
TEST(InPiecesOrder, TheClockLetsThemOverlap) {
  run_local(2, [](World& world) {
    const Layout cut(world.mesh({{"model", 2}}).spec, Placement::shard(1)), whole(cut.mesh());
    const auto seconds = [&](int64_t sequences, bool gathers, double travels, double computes, double* waits) {
      Recording recording({.piece_rows = 1});
      const Tensor given = value("x", kF32, {sequences, 8, kIn}, gathers ? cut : Layout(cut.mesh(), Placement::partial()), "a");
      if (gathers) linear(redistribute_in_pieces(given, whole), value("w", kF32, {kOut, kIn}, whole));
      else linear(given, value("w", kF32, {kIn, kIn}, whole), {}, Fp8::none, along(0, Placement::shard(1)));
      const Tape tape = recording.take();
      const Timeline line = timeline(tape, travels, computes);
      EXPECT_EQ(line.computing, computes);
      *waits = 0;
      for (const Timeline::Wait& wait : line.waits) *waits += wait.seconds;
      return line.seconds;
    };
    double waits = 0;
    // Its own rows, and four pieces of the other rank's.
    EXPECT_EQ(seconds(1, true, 4, 10, &waits), 10);
    EXPECT_EQ(waits, 0);
    EXPECT_EQ(seconds(1, true, 16, 10, &waits), 17.25);
    EXPECT_EQ(waits, 7.25);
    // Four pieces, by sequences.
    EXPECT_EQ(seconds(4, true, 4, 8, &waits), 9);
    EXPECT_EQ(waits, 1);
    EXPECT_EQ(seconds(4, true, 16, 8, &waits), 18);
    EXPECT_EQ(seconds(4, false, 4, 8, &waits), 9);
    EXPECT_EQ(waits, 1);
    EXPECT_EQ(seconds(4, false, 16, 8, &waits), 18);
    EXPECT_EQ(waits, 10);
  }, links());
}

// Products that round to FP8 are computed as a whole, and the tape does not claim otherwise.
TEST(InPiecesOrder, ProductsInFp8AreWhole) {
  run_local(2, [](World& world) {
    const Layout cut(world.mesh({{"model", 2}}).spec, Placement::shard(1)), addends(cut.mesh(), Placement::partial());
    Recording recording({.piece_rows = 1});
    const Tensor x = value("x", kF32, {2, 8, kIn}, cut.with(0, Placement::shard(2))),
                 w = value("w", kF32, {kIn, kIn}, Layout(cut.mesh(), Placement::shard(1)));
    const Tensor y = linear(x, w, {}, Fp8::activations, along(0, Placement::shard(1)));
    EXPECT_EQ(nodes_in_pieces(recording.tape()), 0);
    EXPECT_TRUE(identical(y, redistribute(linear(x, w, {}, Fp8::activations), cut)));
  }, links());
}

// Two inputs of an op that arrive at the same time, and one gathered tensor used as both inputs.
TEST(InPiecesOrder, OneInputComesInPiecesOthersAreWaitedFor) {
  run_local(2, [](World& world) {
    const Layout cut(world.mesh({{"model", 2}}).spec, Placement::shard(0)), whole(cut.mesh());
    Recording recording({.piece_rows = 1});
    const auto gathered = [&](const std::string& name) { return redistribute_in_pieces(value(name, kF32, {8, 8}, cut), whole); };
    const Tensor x = value("x", kF32, {8, 8}, whole), w = value("w", kF32, {8, 8}, whole);
    EXPECT_TRUE(identical(linear(gathered("x"), gathered("w")), linear(x, w)));
    const Tensor both = gathered("x");
    EXPECT_TRUE(identical(linear(both, both), linear(x, x)));
    EXPECT_TRUE(identical(apply<Added>({}, {gathered("x"), gathered("w")}), x + w));
  }, links(1e6));
}

// A lost peer is an error where rows are waited for.
TEST(InPiecesOrder, RowsOfALostRankAreAnError) {
  EXPECT_THROW(run_local(2, [](World& world) {
    const Layout cut(world.mesh({{"model", 2}}).spec, Placement::shard(1)), whole(cut.mesh());
    Recording recording({.piece_rows = 1});
    if (world.rank() == 1) fail<DataError>("lost");
    const Tensor x = redistribute_in_pieces(value("x", kF32, {1, 8, kIn}, cut), whole);
    linear(x, value("w", kF32, {kOut, kIn}, whole));
  }, links()), DataError);
}

}  // namespace
}  // namespace sheaf::testing
