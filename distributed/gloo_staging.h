// Staging of the Gloo communicator: peers' slices arrive here, chunk by chunk, to be summed. Apart from the
// communicator itself, so that a simulation can charge the same bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sheaf/distributed/collective.h"

namespace sheaf {

/// Bytes of one chunk from one peer: at most 512 KiB, and 8 MiB over all peers; never less than a small all_reduce.
constexpr int64_t gloo_chunk_bytes(int world) {
  const int64_t peers = std::max(1, world - 1);
  return std::clamp<int64_t>((int64_t{8} << 20) / peers / 128 * 128, kSmallAllReduceBytes, int64_t{512} << 10);
}

/// Bytes that each Gloo communicator of `world` ranks holds: two chunks a peer, one filling while one is summed.
constexpr int64_t gloo_staging_bytes(int world) { return world <= 1 ? 0 : 2 * (world - 1) * gloo_chunk_bytes(world); }

}  // namespace sheaf
