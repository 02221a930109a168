#include "sheaf/distributed/nccl_calls.h"

#include <algorithm>

namespace sheaf {
namespace {

bool reduces(CollectiveOp op) {
  return op == CollectiveOp::reduce_scatter || op == CollectiveOp::all_reduce;
}

bool all_equal(const std::vector<int64_t>& counts) {
  return std::all_of(counts.begin(), counts.end(), [&](int64_t c) { return c == counts[0]; });
}

}  // namespace

void check_nccl_can(const Collective& call) {
  if (reduces(call.op) && call.dtype == kU16)
    fail<ConfigError>('[', name(call.op), "] ", path_label(call.path),
                      ": NCCL has no reductions of ", call.dtype);
}

void call_nccl(NcclComm& comm, const Collective& call, int n, int me) {
  // A sum of bools is their "or".
  const bool truth = call.dtype == kBool;
  const DType dtype = truth ? kU8 : call.dtype;
  const Reduction reduction =
      truth && call.reduction == Reduction::sum ? Reduction::max : call.reduction;
  const int64_t element = call.element_size();
  const auto* in = static_cast<const std::byte*>(call.in);
  auto* out = static_cast<std::byte*>(call.out);
  switch (call.op) {
    case CollectiveOp::all_gather: {
      if (all_equal(call.counts)) {
        if (call.counts[0] > 0) comm.all_gather(in, out, call.counts[0] * element);
        return;
      }
      const std::vector<int64_t> at = cuts_of(call.counts, element);
      for (int r = 0; r < n; ++r)
        if (call.counts[r] > 0)
          comm.broadcast(r == me ? in : out + at[r], out + at[r], call.counts[r] * element, r);
      return;
    }
    case CollectiveOp::reduce_scatter: {
      if (all_equal(call.counts)) {
        if (call.counts[0] > 0) comm.reduce_scatter(in, out, call.counts[0], dtype, reduction);
        return;
      }
      const std::vector<int64_t> at = cuts_of(call.counts, element);
      for (int r = 0; r < n; ++r)  // only the root's `out` is written
        if (call.counts[r] > 0)
          comm.reduce(in + at[r], out, call.counts[r], dtype, reduction, r);
      return;
    }
    case CollectiveOp::all_reduce:
      if (call.counts[0] > 0) comm.all_reduce(in, out, call.counts[0], dtype, reduction);
      return;
    case CollectiveOp::all_to_all: {
      const std::vector<int64_t> to = cuts_of(call.counts, element), from = cuts_of(call.recv_counts, element);
      for (int r = 0; r < n; ++r) {
        if (call.counts[r] > 0) comm.send(in + to[r], call.counts[r] * element, r);
        if (call.recv_counts[r] > 0) comm.receive(out + from[r], call.recv_counts[r] * element, r);
      }
      return;
    }
    case CollectiveOp::broadcast:
      if (call.counts[0] > 0) comm.broadcast(in, out, call.counts[0], call.root);
      return;
    case CollectiveOp::barrier:
      return;  // done by the host
  }
}

}  // namespace sheaf
