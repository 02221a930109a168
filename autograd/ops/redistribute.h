// Redistribution: the same value in another placement on one mesh axis. The only op that communicates, except for those of units.
#pragma once

#include <string>

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/tape.h"

namespace sheaf {

bool is_redistribute(const OpDef* op);
/// The name of a redistribution: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "slice", "zero_embed",
/// "keep_on_one", "nothing".
std::string redistribution_name(const Layout& from, const Layout& to);

/// From one rank of a chain to its neighbour; see send.cc.
const OpDef& send_op();
/// Whether a value moves from one placement to the other by a transfer between two neighbours.
bool is_send(const MeshSpec& mesh, int axis, const Placement& from, const Placement& to);
/// x, which is on one rank of `axis`, on the neighbour that `to` names. Adjoints go in the opposite direction, even in a ring of two
/// ranks, where both directions lead to the same neighbour.
Tensor send(const Tensor& x, const Layout& to, int axis);
/// Whether a node sends to the previous rank, not to the next.
bool sends_back(const Tape& tape, const Node& n);

/// Whether gradients placed as `g` are addends of one placed as `want`: placed the same, or on one rank where `want` is Partial.
bool adds_up_to(const Layout& g, const Layout& want);

/// redistribute_in_pieces() with pieces of at least `least_rows` rows; 0: not in pieces.
Tensor come_in_pieces(const Tensor& x, const Layout& to, int64_t least_rows);
/// Its op.
const OpDef& in_pieces_op();
/// To be called before such a node runs: marks its output as received in pieces.
void expect_pieces(const void* attrs, const Tensor& input, std::span<const Tensor> outputs);

/// For such a node: the number of lane calls, and the part of the rows that was local before.
struct IncomingPieces {
  int32_t calls = 0;
  double own = 0;
};
IncomingPieces incoming_pieces(const Tape& tape, const Node& n, bool by_heads);
/// The number of rounds in which the node communicates: one, or one per piece.
int32_t rounds_of(const Tape& tape, NodeId n);
/// A redistribution of the previous node's result, executed together with it: see apply_and_redistribute(). Its attributes:
const OpDef& output_in_pieces_op();
struct OutputInPieces {
  Layout to;
  int32_t parts;
  bool packs;  ///< packs what is sent, and unpacks what is received
  bool operator==(const OutputInPieces&) const = default;
};

/// The number of pieces in which node `n`'s result is sent by the next node while it is computed; 0: not in pieces.
int32_t output_pieces(const Tape& tape, NodeId n);

namespace detail {
/// Law A.
void adjoint_of_redistribution(Vjp& c);
}  // namespace detail

}  // namespace sheaf
