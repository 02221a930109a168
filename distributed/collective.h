// Collective: one call, as data: its arguments, its caller, and the hashes by which ranks compare their calls.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/dtype.h"
#include "sheaf/core/event.h"
#include "sheaf/core/communicator.h"

namespace sheaf {

enum class CollectiveOp : uint8_t { all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier };
std::string_view name(CollectiveOp op);
std::string_view name(Reduction reduction);

struct Collective {
  CollectiveOp op = CollectiveOp::barrier;
  DType dtype = DType::u8;
  Reduction reduction = Reduction::sum;
  int root = 0;
  std::vector<int64_t> counts = {};       ///< per rank (all_to_all: sent to each), or the one count
  std::vector<int64_t> recv_counts = {};  ///< all_to_all only: received from each
  const void* in = nullptr;
  void* out = nullptr;
  std::string path = {};
  std::string of = {};       ///< names the values, if the caller does
  bool on_gpu = false;       ///< the buffers are on the rank's GPU
  bool waited_for = false;   ///< the rank's thread blocks until it is done
  bool has_deadline = true;  ///< false: other ranks may come at any time
  bool captured = false;     ///< the call becomes part of a graph of the rank's GPU
  Event buffers_ready = {};  ///< on_gpu: what the rank's stream had to do before the call
  uint64_t sequence = 0;     ///< 1 for a communicator's first call
  uint64_t call_hash = 0;    ///< of op, dtype, counts, path and values: equal on all ranks
  uint64_t fingerprint = 0;  ///< running: of this call and all before it

  int64_t element_size() const { return static_cast<int64_t>(size_of(dtype)); }
  /// "all_gather f32 [4, 4, 3] (blocks.3)"
  std::string to_string() const;
};

/// About as long as clocks can tell.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
/// How long the call may take, of `timeout` for those that have a deadline.
inline std::chrono::milliseconds time_for(const Collective& call, std::chrono::milliseconds timeout) {
  return call.has_deadline ? timeout : kForever;
}

/// Hash of everything that all ranks must agree on. The counts of an all_to_all differ between ranks and are not included.
uint64_t hash_call(const Collective& call);
/// Next running fingerprint.
uint64_t chain(uint64_t fingerprint, uint64_t call_hash);

/// Where consecutive segments of `counts` elements begin, and where the last one ends; in bytes, if `element` is
/// the size of one.
std::vector<int64_t> cuts_of(const std::vector<int64_t>& counts, int64_t element = 1);

/// Payload bytes that rank `rank` of `size` receives.
int64_t received_bytes(const Collective& call, int rank, int size);

}  // namespace sheaf
