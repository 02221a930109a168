// The memory that each kind of communicator holds in addition to the caller's buffers. Separate from the communicators themselves, so
// that a simulation can charge the same bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "sheaf/distributed/collective.h"

namespace sheaf {

/// Gloo: peers' slices arrive in the staging, chunk by chunk, to be summed. Bytes of one chunk from one peer: at most
/// 512 KiB, and 8 MiB over all peers; never less than a small all_reduce.
constexpr int64_t gloo_chunk_bytes(int world) {
  const int64_t peers = std::max(1, world - 1);
  return std::clamp<int64_t>((int64_t{8} << 20) / peers / 128 * 128, kSmallAllReduceBytes, int64_t{512} << 10);
}
/// Two chunks per peer: one fills while the other is summed.
constexpr int64_t gloo_staging_bytes(int world) { return world <= 1 ? 0 : 2 * (world - 1) * gloo_chunk_bytes(world); }

/// Shared memory: data for peers that is not in wire memory goes through two halves, one being filled while peers read
/// the other. A half fits a core's second-level cache and is small compared to the smallest models: sharded data is in
/// wire memory. Reductions divide it by the ranks, and every window costs a meeting.
constexpr int64_t shm_half_bytes(int world) {
  return std::clamp<int64_t>(world * (int64_t{16} << 10), int64_t{128} << 10, int64_t{512} << 10);
}
constexpr int64_t shm_staging_bytes(int world) { return world <= 1 ? 0 : 2 * shm_half_bytes(world); }

/// Bytes that each communicator of `world` ranks holds; `kind` is its Communicator::kind().
constexpr int64_t staging_bytes_of(std::string_view kind, int world) {
  return kind == "gloo" ? gloo_staging_bytes(world) : kind == "shm" ? shm_staging_bytes(world) : 0;
}

}  // namespace sheaf
