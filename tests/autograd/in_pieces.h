// Helpers shared by the tests of redistributions in pieces.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/clock.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {

inline constexpr double kLink = 1e8;  // bytes a second: lanes run concurrently with the ranks
inline constexpr int64_t kIn = 12, kOut = 10;

inline LocalOptions links(double bytes_per_second = kLink) {
  return {.bytes_per_second = bytes_per_second, .timeout = std::chrono::seconds(20), .threads_per_rank = 1};
}

inline Values drawn(const Shape& shape, const std::string& stream) {
  Generator draw(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = draw.uniform(-1, 1);
  return v;
}
inline Tensor value(const std::string& name, DType dtype, const Shape& shape, const Layout& layout, const std::string& addends = "") {
  return make_local(drawn(shape, name), {dtype, shape, layout}, addends);
}

/// An op that doubles its rows, shared by these tests; it records which rows it is executed for, and needs workspace.
struct DoublesRows {
  static constexpr const char* kName = "noted";
  static void infer(const auto&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const auto&, Place& p) { rules::pointwise_linear(p); }
  static int64_t workspace(const auto&, const Execute& c) { return c.input(0).bytes(); }
  static uint64_t row_inputs(const auto&, InputTypes) { return 0b1; }
};

inline int64_t nodes_in_pieces(const Tape& tape) {
  int64_t n = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    n += tape.node(id).op == &in_pieces_op() || tape.node(id).op == &output_in_pieces_op();
  return n;
}

/// The result of compute(recording, overlap) has the bits of a run that waits for all pieces, and receives as many bytes as its tape says.
inline void expect_bits_of_the_whole(const Mesh& mesh, const std::string& what,
                                     const std::function<std::vector<Tensor>(Recording&, bool overlap)>& compute) {
  const auto run = [&](bool overlap) {
    Recording recording({.overlap = overlap, .piece_rows = overlap ? 1 : 128});
    const std::vector<Tensor> out = compute(recording, overlap);
    for (const auto& findings : {check_types(recording.tape()), check_cotangents(recording.tape())})
      for (const Finding& f : findings) ADD_FAILURE() << f.to_string();
    int64_t foreseen = 0;
    for (NodeId i = 0; i < recording.tape().num_nodes(); ++i) foreseen += recording.tape().wire_bytes(recording.tape().node(i));
    return std::pair(out, foreseen);
  };
  const int64_t before = mesh.runtime->gather_lane(0).bytes_received();
  const auto [pieces, foreseen] = run(true);
  EXPECT_EQ(mesh.runtime->gather_lane(0).bytes_received() - before, foreseen);
  const auto expected = run(false).first;
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(identical(pieces[i], expected[i])) << "result " << i << " of " << what;
}

/// The time of a step with this tape if redistributions take `travels` on the link and `packs` to compute, and ops take `computes`.
inline Timeline timeline(const Tape& tape, double travels, double computes, double packs = 0) {
  RankTimes times{.tape = &tape, .nodes = std::vector<NodeTime>(static_cast<size_t>(tape.num_nodes())), .order = {}, .lanes = {"lane"}};
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    NodeTime& time = times.nodes[static_cast<size_t>(id)];
    if (tape.kind(tape.node(id)) == OpKind::redistribute) time.travels = travels, time.computes = packs, time.lane = 0;
    else if (tape.node(id).op) time.computes = computes;
  }
  return clock(std::span(&times, 1))[0];
}

}  // namespace sheaf::testing
