// Tapes in readable form: text, JSON, Graphviz, a picture, and what a step sends over the network.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sheaf/autograd/tape.h"
#include "sheaf/core/memory_ledger.h"

namespace sheaf {

/// One line per node, grouped by phase: ids, op, inputs, module path, types; for redistributions the placements, bytes
/// received by this rank and lane; and marks (mirror, prefetched, stored into or added to a slot).
///
/// "This rank" is here and below the one that recorded the tape; on a mesh that it had not joined, the mesh's first one.
std::string to_text(const Tape& tape);
/// An object {"nodes": [...], "values": [...], ...}; a node has id, kind, op, path, phase, lane, flags, attributes as text, inputs,
/// outputs and bytes; a value its dtype, shape, layout and memory.
std::string to_json(const Tape& tape);
/// Graphviz: nodes coloured by the placement of their outputs, communicating edges labelled with bytes.
std::string to_dot(const Tape& tape);
/// An SVG with the nodes from left to right. Above, the bytes alive while each of them runs, by what they are held for (HeldFor). Below, a
/// row per unit: how long its weights are gathered, how long its gradient is whole, and its communication. Names and sizes appear under
/// the mouse; where there are more nodes than pixels, a pixel shows the node with the most bytes. The history is that of a ledger
/// whose clock is the number of recorded nodes:
///
///     MemoryLedger ledger([] { return Recording::current() ? Recording::current()->tape().num_nodes() : -1; });
std::string to_svg(const Tape& tape, const MemoryLedger::History& memory, const std::string& title);

/// One value that a node sends over the network.
struct Transfer {
  ValueId from, to;
  int axis;           ///< of the mesh
  std::string name;   ///< "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"
  int64_t bytes = 0;  ///< received by this rank
};
/// The transfers of node `n`: one for a redistribution, one per buffer for a unit's op; none for anything local, including
/// axes of size 1, nor for transfers between other ranks.
std::vector<Transfer> transfers(const Tape& tape, const Node& n);
/// Where node `n` runs: "compute", "copy", or for a transfer "gather", "reduce" or "send".
std::string_view lane_name(const Tape& tape, const Node& n);
/// A unit's gather: an all_gather of its buffers, as opposed to one of an activation, or the opening of buffers that only one rank
/// has loaded from its host memory.
bool is_unit_gather(const Tape& tape, const Node& n);
/// Distinguishes shards that print alike: kind, dimension, granule or chunk, offset. "" for other placements.
std::string cut_signature(const Placement& p);

/// "12.3 KiB".
std::string format_bytes(int64_t bytes);

/// The collectives of a tape: a line per module path and kind with count and bytes received by this rank, in the order
/// of first use, and a total; on a mesh of several axes, for each of them.
std::string collective_summary(const Tape& tape);

}  // namespace sheaf
