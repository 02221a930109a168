// Attention of few queries to any number of keys, as in generation, by our own kernels: the keys of a (sequence, key head) pair are
// spread over blocks, one segment each (attention_softmax.h), and up to 16 rows, of all query heads of the pair, are computed
// together, so that keys and values are read once for them (Flash-Decoding: Dao et al., https://pytorch.org/blog/flash-decoding/). A
// second kernel combines the segments in order. Results have the bits of attention_blocked.h. Operands as in kernels/attention.h,
// checked by the caller.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/attention.h"

namespace sheaf::kernels::cuda::decode {

/// f32, bf16 and f16, up to 16 queries per sequence: a block of attention_blocked.h computes four times as many of a head, whether
/// they exist or not.
bool takes(const View& q, const View& v);

/// Memory for the sums of segments. Only for operands that takes() accepts.
size_t attention_workspace(const View& q, const View& k, const View& v, const AttentionMask& mask);
void attention(const Stream& stream, const View& q, const View& k, const View& v,
               const AttentionMask& mask, double scale, const View& out, const View& lse,
               Workspace workspace);

}  // namespace sheaf::kernels::cuda::decode
