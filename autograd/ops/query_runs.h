// Attention of queries that a mesh axis cuts, and of those that none does.
//
// [Note: runs of queries] Where an axis cuts the queries of sequences whose keys are whole (Shard(1) beside Replicate), a rank has
// runs of queries, each of which stand together. Those at positions [e - t, e) are the last queries of the first e keys, which is
// what kernels take where there are more keys than queries. What runs give keys and values are addends, and so is what ranks do.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/kernels/attention.h"

namespace sheaf::ops {

/// Whether queries, input 0, may be cut as `queries` says while input 1, the keys, is whole: a causal mask then wants at least as
/// many keys.
inline bool cuts_queries(const Place& p, const Placement& queries, bool causal) {
  return queries.is_shard(1) && (!causal || p.shape(1)[1] >= p.shape(0)[1]);
}

/// kernels::attention of this rank's queries, whose type is that of input 0 of `c`. Views are as kernels/attention.h has them, of
/// what the rank has; `mask.begins` is whole, and holds for these queries.
struct AttentionCall {
  View q, k, v, out, lse;
  kernels::AttentionMask mask;
  double scale;

  int64_t workspace(const Execute& c) const;
  void run(const Execute& c, const Stream& stream, Workspace workspace) const;
};

/// The gradients of that, stored.
struct AttentionBackwardCall {
  View q, k, v, out, lse, dout;
  kernels::AttentionMask mask;
  double scale;
  View dq, dk, dv;

  int64_t workspace(const Execute& c) const;
  void run(const Execute& c, const Stream& stream, Workspace workspace) const;
};

}  // namespace sheaf::ops
