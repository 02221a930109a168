// Machine: how fast the ranks of a job compute and how fast they talk, in a dozen numbers, and with them how long the nodes of
// a tape take (autograd/clock.h). Nothing here is measured on a step; the numbers are rates that large operations reach.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "sheaf/autograd/clock.h"

namespace sheaf {

/// Operations per second of something large; of something small fewer: half of them where its size is `half`.
struct Rate {
  double limit = 0, half = 0;
  double at(double size) const { return size > 0 ? limit * size / (size + half) : limit; }
};

/// What a rank receives through, in each direction at once.
struct Link {
  double bytes_per_second = 0;
  double seconds = 0;      ///< of each step of a collective, which takes log2 of its ranks
  double hop_seconds = 0;  ///< of all_gather and reduce_scatter, which go round a ring of all ranks
};

struct Machine {
  std::string name;
  Rate products;                     ///< of matrices in bf16 and f16, by the smallest of their three dimensions
  double f32 = 1, f64 = 1;           ///< how many times slower products and attention are in these
  double fp8 = 1;                    ///< how many times faster products are in that; 1: it has none
  Rate attention_forward, attention_backward;  ///< in bf16, causal, with heads of 128, by the number of keys
  double bytes_per_second = 0;       ///< of memory, read and written together
  double least_seconds = 0;          ///< of whatever computes, however little
  double issue_seconds = 0;          ///< of the host, for each node
  double host_bytes_per_second = 0;  ///< between a GPU and its host's memory, in each direction
  int64_t memory = 0;                ///< bytes that a rank may take
  double peak = 0;                   ///< FLOP/s in bf16 by the maker's data sheet: what MFU refers to
  int ranks_per_host = 1;
  Link within, between;              ///< hosts
};

/// "h200", "h100" or "a100", eight to a host. ConfigError for others.
Machine machine_named(std::string_view name);

/// Whose tape it is.
struct TapeOf {
  int rank = 0;
  bool offloads_state = false;  ///< an update reads and writes its state in the host's memory
  /// If it was recorded in a shorter pipeline: the stages of the one that `rank` is in, and how many more there are before it.
  /// Neighbours are neighbours there.
  int stages = 0, stages_before = 0;
  const RankTimes* like = nullptr;  ///< of the same tape, for another rank: what computes takes as long as there
};

/// How long each node of a rank's tape takes on such machines; this rank must have joined the tape's meshes. Ranks are hosts'
/// one after another.
RankTimes times_on(const Machine& machine, const Tape& tape, const TapeOf& of);

}  // namespace sheaf
