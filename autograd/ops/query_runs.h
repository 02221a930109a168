// Attention of queries, sharded by a mesh axis or not.
//
// [Note: runs of queries] If an axis shards the queries of sequences whose keys are whole (queries Shard(1), keys Replicate), a rank
// has one or more runs of consecutive queries. Those at positions [e - t, e) are the last queries of the first e keys, which is what
// kernels compute if there are more keys than queries. The contributions of runs to the gradients of keys and values are addends, and
// so are those of ranks.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/kernels/attention.h"

namespace sheaf::ops {

/// Whether queries, input 0, may be sharded as `queries` while the keys, input 1, are whole: with a causal mask there must be at
/// least as many keys.
inline bool cuts_queries(const Place& p, const Placement& queries, bool causal) {
  return queries.is_shard(1) && (!causal || p.shape(1)[1] >= p.shape(0)[1]);
}

/// kernels::attention of this rank's queries, whose type is that of input 0 of `c`. Views are the rank's local ones, as in
/// kernels/attention.h; `mask.begins` is that of the whole sequences or, where keys have documents of their own, of these queries.
struct AttentionCall {
  View q, k, v, out, lse;
  kernels::AttentionMask mask;
  double scale;

  int64_t workspace(const Execute& c) const;
  void run(const Execute& c, const Stream& stream, Workspace workspace) const;
};

/// Stores the gradients of that.
struct AttentionBackwardCall {
  View q, k, v, out, lse, dout;
  kernels::AttentionMask mask;
  double scale;
  View dq, dk, dv;

  int64_t workspace(const Execute& c) const;
  void run(const Execute& c, const Stream& stream, Workspace workspace) const;
};

}  // namespace sheaf::ops
