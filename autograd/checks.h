// Checks on a tape: each is one pass over the nodes and reports what is wrong and where. A tape made by Recording passes all of them;
// they exist for passes that rewrite tapes and for tests that break them.
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

/// T: types agree. Every value is produced by one node before its first use; every output has the dtype and shape that its op infers
/// from its inputs' types; on every mesh axis, inputs and outputs match one of the op's placement rules; a redistribution changes
/// only the layout; a value placed inside another's memory fits.
std::vector<Finding> check_types(const Tape& tape);

/// D: the type of every gradient is the dual of its value's type; see Tape::cotangents(). And every value of the backward that is
/// placed in another's memory (a contribution stored into or added to a slot) has that value's layout.
std::vector<Finding> check_cotangents(const Tape& tape);

/// G: the outputs of a unit's all_gather are used (except for a mispredicted prefetch, or a module that was entered without needing
/// its parameters), discarded exactly once, and not used after that; a use of a view counts as a use. Nothing at all is used after
/// its discard or discarded twice.
std::vector<Finding> check_gathers(const Tape& tape);

/// M: the slots that a unit's reduce_scatter reads exist and stay unchanged until it has read them: no gradient is stored into them
/// after the reduce_scatter, and a `complete` after it releases them, since its lane reads their memory while later nodes run. Into each
/// slot a gradient is stored, once; others are added to it; and what reads the slots' buffer does so after that.
std::vector<Finding> check_memory(const Tape& tape);

/// T, D, G and M together.
std::vector<Finding> check_tape(const Tape& tape);

/// One collective as the tape predicts it.
struct PlannedCollective {
  NodeId node;
  std::string communicator;  ///< "(data=4) data gather": mesh, axis, lane
  std::string call;          ///< "all_gather f32[4096] Shard(flat)→Replicate blocks.0": must be equal on all ranks
};
/// C: the collectives in the order in which this rank issues them; each communicator's sequence must be congruent on all ranks.
std::vector<PlannedCollective> collectives(const Tape& tape);
/// Hash of the sequence of one communicator, or of all of them.
uint64_t collective_hash(const Tape& tape, std::string_view communicator = {});
/// Compares all ranks' sequences, communicator by communicator, and names the first difference of each; the finding's node is one of
/// the rank that differs from rank 0. For the ranks of one axis; for meshes of several axes, pass the tapes of one group.
std::vector<Finding> check_collectives(std::span<const Tape* const> ranks);

}  // namespace sheaf
