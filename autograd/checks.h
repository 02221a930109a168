// Checks on a tape: each is one pass over the nodes and says what is wrong where. A tape that Recording made passes all
// of them; passes that rewrite tapes, and tests that break them, are what they are for.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "sheaf/autograd/tape.h"

namespace sheaf {

struct Finding {
  NodeId node = -1;
  std::string message;
  std::string to_string() const { return "node " + std::to_string(node) + ": " + message; }
};

/// T: types line up. Every value is made by one node before its first use; every output has the dtype and shape that its
/// op infers from its inputs' types; on every mesh axis, inputs and outputs are one of the op's placement rules; a
/// redistribution changes nothing but the layout, a value inside another's memory fits.
std::vector<Finding> check_types(const Tape& tape);

/// D: the type of every gradient is the dual of its value's type; see Tape::cotangents(). And every value of the backward
/// that lies in the memory of another (a contribution stored into or added to a slot) has that value's layout.
std::vector<Finding> check_cotangents(const Tape& tape);

/// G: what a unit's all_gather yields is used (but for a prefetch that turned out wrong, and a module that was entered and
/// did not need its parameters), discarded exactly once, and not used after that; views on it count as it. Nothing at
/// all is used after its discard or discarded twice.
std::vector<Finding> check_gathers(const Tape& tape);

/// M: what a unit's reduce_scatter reads is there, and stays until it has it: nothing is stored into gradients' slots behind the
/// reduce_scatter that reads them, and a `complete` behind it gives them back, whose memory its lane reads while later nodes run.
std::vector<Finding> check_memory(const Tape& tape);

/// T, D, G and M together.
std::vector<Finding> check_tape(const Tape& tape);

/// One collective as the tape foresees it.
struct PlannedCollective {
  NodeId node;
  std::string communicator;  ///< "(data=4) data gather": mesh, axis, lane
  std::string call;          ///< "all_gather f32[4096] Shard(flat)→Replicate blocks.0": what all ranks must agree on
};
/// C: the collectives in the order in which this rank issues them, each communicator's being congruent on all ranks.
std::vector<PlannedCollective> collectives(const Tape& tape);
/// Hash of the sequence of one communicator, or of all of them.
uint64_t collective_hash(const Tape& tape, std::string_view communicator = {});
/// Compares all ranks' sequences, communicator by communicator, and names the first difference of each; the finding's
/// node is one of the rank that differs from rank 0. For ranks of one axis; with more, give the tapes of one group.
std::vector<Finding> check_collectives(std::span<const Tape* const> ranks);

}  // namespace sheaf
