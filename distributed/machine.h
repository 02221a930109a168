// Machine: how fast the ranks of a job compute and communicate, in a dozen numbers, and the resulting times of a tape's nodes
// (autograd/clock.h). Nothing here is measured on a step; the numbers are rates that large operations reach.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "sheaf/autograd/clock.h"

namespace sheaf {

/// Operations per second for large sizes; fewer for small ones, half of them at size `half`.
struct Rate {
  double limit = 0, half = 0;
  double at(double size) const { return size > 0 ? limit * size / (size + half) : limit; }
};

/// The link through which a rank receives; it sends at the same rate at the same time.
struct Link {
  double bytes_per_second = 0;
  double seconds = 0;      ///< of each step of a collective, which takes log2 of its ranks
  double hop_seconds = 0;  ///< of each hop of all_gather and reduce_scatter, which use a ring of all ranks
};

struct Machine {
  std::string name;
  Rate products;                               ///< of matrices in bf16 and f16, by the smallest of their three dimensions
  double f32 = 1, f64 = 1;                     ///< how many times slower products and attention are in these
  double fp8 = 1;                              ///< how many times faster products are in FP8; 1: no FP8
  Rate attention_forward, attention_backward;  ///< in bf16, causal, with heads of 128, by the number of keys
  double bytes_per_second = 0;                 ///< of memory, read and written together
  double least_seconds = 0;                    ///< the minimum time of an op that computes
  double issue_seconds = 0;                    ///< of the host, for each node
  double host_bytes_per_second = 0;            ///< between a GPU and its host's memory, in each direction
  int64_t memory = 0;                          ///< bytes available to a rank
  double peak = 0;                             ///< FLOP/s in bf16 by the vendor's data sheet: the reference for MFU
  int ranks_per_host = 1;
  Link within, between;  ///< hosts
};

/// "h200", "h100" or "a100", eight to a host. ConfigError for others.
Machine machine_named(std::string_view name);

/// The job and rank that a tape belongs to.
struct TapeOf {
  int rank = 0;
  bool offloads_state = false;  ///< an update reads and writes its state in the host's memory
  /// If the tape was recorded in a shorter pipeline: the number of stages of `rank`'s pipeline, and how many more of them precede it.
  /// Neighbours on the tape are neighbours in that pipeline.
  int stages = 0, stages_before = 0;
  const RankTimes* like = nullptr;  ///< times of the same tape for another rank, from which compute times are taken
};

/// How long each node of a rank's tape takes on such machines; this rank must have joined the tape's meshes. Consecutive
/// ranks share a host.
RankTimes times_on(const Machine& machine, const Tape& tape, const TapeOf& of);

}  // namespace sheaf
