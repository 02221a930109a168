#include "sheaf/autograd/ops/query_runs.h"

#include <algorithm>

#include "sheaf/autograd/ops/cut.h"
#include "sheaf/autograd/ops/scratch.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf::ops {
namespace {

// A run of consecutive queries, and the keys among which are those that they see.
struct QueryRun {
  Interval positions;  // in the sequence
  Interval here;       // in the rank's local queries
  int64_t keys;        // they see the first `keys` keys

  View queries(const View& x, int dim = 1) const { return rows_of(x, dim, here); }
  View first_keys(const View& x) const { return rows_of(x, 1, {0, keys}); }
  kernels::AttentionMask mask(kernels::AttentionMask m) const {
    if (m.has_documents()) m.begins = rows_of(m.begins, 1, positions);
    return m;
  }
};

// This rank's runs, starting with the one that sees the most keys. If what queries see does not depend on their positions, or all
// that is given of documents is this rank's, they are one run.
SmallVector<QueryRun, 2> runs_of(const Execute& c, const View& q, int64_t keys, const kernels::AttentionMask& mask) {
  const Type& type = c.input_type(0);
  const int64_t here = q.shape[1], whole = type.shape[1];
  SmallVector<QueryRun, 2> runs;
  if (here == 0) return runs;
  if (here == whole || (!mask.causal && (!mask.has_documents() || mask.begins.shape[1] == here))) {
    runs.emplace_back(Interval{0, here}, Interval{0, here}, keys);
    return runs;
  }
  const std::vector<Interval> rows = type.layout.local_rows(type.shape, 1);
  int64_t end = here;
  for (auto i = rows.rbegin(); i != rows.rend(); ++i) {
    runs.emplace_back(*i, Interval{end - i->size(), end}, mask.causal ? i->end + keys - whole : keys);
    end -= i->size();
  }
  return runs;
}

}  // namespace

int64_t AttentionCall::workspace(const Execute& c) const {
  int64_t most = 0;
  for (const QueryRun& r : runs_of(c, q, k.shape[1], mask))
    most = std::max(most, SHEAF_WORKSPACE(c.device(), attention, r.queries(q), r.first_keys(k), r.first_keys(v), r.mask(mask),
                                          r.queries(out), r.queries(lse, 2)));
  return most;
}

void AttentionCall::run(const Execute& c, const Stream& stream, Workspace workspace) const {
  for (const QueryRun& r : runs_of(c, q, k.shape[1], mask))
    SHEAF_ON_DEVICE(stream, attention, r.queries(q), r.first_keys(k), r.first_keys(v), r.mask(mask), scale, r.queries(out),
                    r.queries(lse, 2), workspace);
}

int64_t AttentionBackwardCall::workspace(const Execute& c) const {
  int64_t most = 0;
  bool first = true;
  for (const QueryRun& r : runs_of(c, q, k.shape[1], mask)) {
    const View sum_k = r.first_keys(dk), sum_v = r.first_keys(dv), to_k = first ? sum_k : block_like(sum_k, nullptr),
               to_v = first ? sum_v : block_like(sum_v, nullptr);
    const int64_t own = SHEAF_WORKSPACE(c.device(), attention_backward, r.queries(q), r.first_keys(k), r.first_keys(v), r.queries(out),
                                        r.queries(lse, 2), r.queries(dout), r.mask(mask), r.queries(dq), to_k, to_v);
    most = std::max(most, own + (first ? 0 : block_bytes(sum_k) + block_bytes(sum_v)));
    first = false;
  }
  return most;
}

void AttentionBackwardCall::run(const Execute& c, const Stream& stream, Workspace workspace) const {
  int64_t stored = 0;  // of the keys' gradients
  for (const QueryRun& r : runs_of(c, q, k.shape[1], mask)) {
    Workspace rest = workspace;
    const View sum_k = r.first_keys(dk), sum_v = r.first_keys(dv);
    const bool first = stored == 0;
    const View to_k = first ? sum_k : take_block("attention_backward", rest, sum_k),
               to_v = first ? sum_v : take_block("attention_backward", rest, sum_v);
    SHEAF_ON_DEVICE(stream, attention_backward, r.queries(q), r.first_keys(k), r.first_keys(v), r.queries(out), r.queries(lse, 2),
                    r.queries(dout), r.mask(mask), scale, r.queries(dq), to_k, to_v, rest);
    if (first) {
      stored = r.keys;
    } else {
      SHEAF_ON_DEVICE(stream, add_into, sum_k, to_k);
      SHEAF_ON_DEVICE(stream, add_into, sum_v, to_v);
    }
  }
  for (const View& x : {dk, dv})
    if (stored < x.shape[1]) SHEAF_ON_DEVICE(stream, fill, rows_of(x, 1, {stored, x.shape[1]}), 0.0);
}

}  // namespace sheaf::ops
