// A pass: units stay gathered where memory allows, instead of being discarded and gathered again. It turns full_shard into
// as much shard_grad_op as fits ("selective unsharding" of DeepCompile, Tanaka et al. 2025,
// https://arxiv.org/abs/2504.09983); over micro-batches, into as much zero1. Values keep their bits; a rank receives less.
//
//   ~ all_gather A   discard A   ~   all_gather A'   uses of A'   discard A'
//   ~ all_gather A               ~                   uses of A    discard A
#pragma once

#include <span>
#include <vector>

#include "sheaf/autograd/program.h"

namespace sheaf {

/// A unit that is discarded and gathered again, with no update in between: the gather would return the same values.
struct Regather {
  NodeId discard, gather;
  int64_t bytes;  ///< of its buffers, on each rank
  friend bool operator==(const Regather&, const Regather&) = default;
};
/// In the order of the gathers. The same on all ranks if their tapes are congruent (check_collectives), and leaves share memory alike.
std::vector<Regather> regathers(const Program& program);

/// As many as memory allows, preferring those that are gathered again soonest. `alive[i]` are the bytes alive at node i if none is
/// kept (Program::alive_bytes()); with the chosen ones kept they exceed `limit` nowhere where they did not before.
std::vector<Regather> choose_kept(std::span<const Regather> all, std::vector<int64_t> alive, int64_t limit);

/// Keeps these units of the tape gathered. Values keep their ids; nodes get new ones.
void keep_gathered(Tape& tape, std::span<const Regather> which);

}  // namespace sheaf
