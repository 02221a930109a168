// Shared code of the attention ops: which keys are seen, what that costs, placement rules for documents and sinks.
#pragma once

#include <algorithm>
#include <cmath>

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/autograd/ops/second.h"
#include "sheaf/autograd/work.h"
#include "sheaf/kernels/attention.h"

namespace sheaf::ops {

/// The number of pairs of a query at the first n positions and a key that it sees, each up to `window`: the diagonal counts half.
inline double seen_by_first(int64_t n, int64_t window) {
  const auto all = static_cast<double>(std::max<int64_t>(0, n)), most = std::min(all, static_cast<double>(window));
  return most * (all - most / 2);
}

/// Operations of one product of all queries, [B, T, ..], with the keys that they see: if causal, half of the keys among as many as
/// there are queries. Sharded queries are assumed to see equally many keys on every rank. Documents are ignored: their boundaries are
/// not part of types.
inline double attention_product(WorkOf& w, const Shape& queries, int64_t keys, int64_t head, bool causal, int64_t window) {
  w.work.keys = static_cast<double>(window ? std::min(window, keys) : keys), w.work.head = static_cast<double>(head);
  const double of_a_key = 2 * static_cast<double>(queries.numel());
  const int64_t all = w.whole_input()[1];
  if (window && all)
    return of_a_key * (seen_by_first(keys, window) - seen_by_first(keys - all, window)) / static_cast<double>(all);
  const double with_each = of_a_key * static_cast<double>(keys);
  return causal && keys == all ? with_each / 2 : with_each;
}

/// Latent attention has no softcap.
template <class Attrs>
double softcap_of(const Attrs& a) {
  if constexpr (requires { a.softcap; }) return a.softcap;
  else return 0;
}

/// Two products in the forward, one of them with values; five in the backward, two of them with values, since the scores are
/// recomputed.
template <class Attrs>
double forward_operations(WorkOf& w, const Attrs& a, const Shape& queries, const Shape& results, int64_t keys, int64_t head) {
  w.work.softcap = softcap_of(a) != 0;
  return attention_product(w, queries, keys, head, a.causal, a.window) + attention_product(w, results, keys, head, a.causal, a.window);
}
template <class Attrs>
double backward_operations(WorkOf& w, const Attrs& a, const Shape& queries, const Shape& results, int64_t keys, int64_t head) {
  w.work.softcap = softcap_of(a) != 0;
  return 3 * attention_product(w, queries, keys, head, a.causal, a.window) + 2 * attention_product(w, results, keys, head, a.causal, a.window);
}

/// The gradients of the first `operands` inputs by the op `Backward` of these, the result, its gradient, the log-sum-exps, and the
/// other inputs present: sinks, begins, key_begins. Those of the sinks are sums of its last output, [B, H, T].
template <class Backward, class Attrs>
void set_gradients(const Attrs& a, Vjp& c, int operands, bool sinks) {
  std::vector<Tensor> in;
  for (int i = 0; i < operands; ++i) in.push_back(c.input(i));
  in.insert(in.end(), {c.output(0), dense_rows(c.grad()), c.output(1)});
  for (int i = operands; i < c.num_inputs(); ++i) in.push_back(c.input(i));
  const Tensors d = apply(op_def<Backward>(), &a, in);
  for (int i = 0; i < operands; ++i) c.set(i, d[static_cast<size_t>(i)]);
  if (sinks && c.needs(operands)) c.set(operands, sum(d[static_cast<size_t>(operands)], {0, 2}));
}

/// `begins` is the one behind `others` of an op's inputs, if it has more, and `key_begins` the next one.
template <class Attrs>
kernels::AttentionMask mask_of(const Attrs& a, const Execute& c, int others) {
  kernels::AttentionMask mask{a.causal != 0, c.num_inputs() > others ? c.input(others) : View(), a.window, softcap_of(a)};
  if (c.num_inputs() > others + 1) mask.key_begins = c.input(others + 1);
  return mask;
}

/// The same for the vjp of a backward.
template <class Attrs>
VisibleKeys visible_keys(const Attrs& a, const Vjp& c, int others) {
  const auto given = [&](int i) { return c.num_inputs() > i ? c.input(i) : Tensor(); };
  return {a.causal != 0, a.window, given(others), given(given(others + 1) ? others + 1 : others), softcap_of(a)};
}

inline std::string describe_mask(bool causal, int64_t window, double softcap = 0) {
  return str(causal ? "causal " : "", window ? str("window ", window, " ") : "", softcap != 0 ? str("softcap ", softcap, " ") : "");
}

/// Checks the inputs behind `others`, if there are any: begins and key_begins.
inline void check_begins(const char* op, const Infer& c, int others, const Shape& rows_BT, bool causal, int64_t keys) {
  const bool of_keys = c.num_inputs() > others + 1;
  for (int i = others; i < c.num_inputs(); ++i)
    if (c.dtype(i) != kI32) fail<DTypeError>("[", op, "] where documents begin is i32, not ", c.input(i));
  if (of_keys && !(c.shape(others + 1) == Shape{rows_BT[0], keys}))
    fail<ShapeError>("[", op, "] wants key_begins as [B,S] ", Shape{rows_BT[0], keys}, ", got ", c.input(others + 1));
  if (c.num_inputs() > others && (!(c.shape(others) == rows_BT) || (!of_keys && (causal ? keys < rows_BT[1] : keys != rows_BT[1]))))
    fail<ShapeError>("[", op, "] documents want their begins as [B,T] ", rows_BT, ", and ",
                     causal ? "no fewer keys than queries" : "without a causal mask as many keys as queries, or key_begins", "; got ",
                     c.input(others), " and ", keys, " keys");
}

inline void check_sinks(const char* op, const Type& sinks, int64_t heads, DType d) {
  if (!(sinks.shape == Shape{heads}) || sinks.dtype != statistics_dtype(d))
    fail<ShapeError>("[", op, "] wants a sink of each of ", heads, " heads, ", statistics_dtype(d), "; got ", sinks);
}

/// Appends the optional inputs of attention with operands of dtype `d`: sinks, begins, key_begins.
inline void push_others(std::vector<Tensor>& inputs, const AttentionOptions& options, DType d) {
  if (options.sinks) {
    const DType exact = statistics_dtype(d);
    inputs.push_back(dense_rows(options.sinks.dtype() == exact ? options.sinks : cast(options.sinks, exact)));
  }
  if (options.begins) inputs.push_back(dense_rows(options.begins));
  if (options.key_begins) inputs.push_back(dense_rows(options.key_begins));
}

/// A rule for the inputs and outputs without documents; `begins`, if present, is placed as given.
inline void rule_of(Place& p, std::initializer_list<Placement> inputs, std::initializer_list<Placement> outputs,
                    const Placement& begins = kR) {
  std::vector<Placement> in(inputs);
  if (static_cast<int>(in.size()) < p.num_inputs()) in.push_back(begins);
  p.rule(in, outputs);
}
/// The same for an op with optional sinks: they follow `inputs`, and the queries' contributions to their gradient, [B, H, T], follow
/// the `outputs` of a backward. `begins` and `key_begins` are last.
struct SinkRules {
  Place& p;
  bool sinks, backward;

  struct Others {
    Placement sinks = kR, of_sinks = kR, begins = kR, key_begins = kR;
  };
  void operator()(std::initializer_list<Placement> inputs, std::initializer_list<Placement> outputs, const Others& others) const {
    std::vector<Placement> in(inputs), out(outputs);
    if (sinks) in.push_back(others.sinks);
    for (const Placement* of : {&others.begins, &others.key_begins})
      if (static_cast<int>(in.size()) < p.num_inputs()) in.push_back(*of);
    if (sinks && backward) out.push_back(others.of_sinks);
    p.rule(in, out);
  }
};

/// The cut of the log-sum-exps [B, H, T] of queries [B, T, ..] that are cut along T.
inline Placement lse_of(const Placement& queries) { return Placement::shard(queries.map().moved_to(2)); }

/// A shard by `map`, the map of another operand that is sharded `like` this; of each rank's own part, if `like` is.
inline Placement shard_like(const Placement& like, const OwnershipMap& map) {
  return Placement::shard(like.map().is_inner() ? map.inner() : map);
}

/// The attributes with this rank's numbers of heads and key heads: of input 0, which packs them along dimension 2, it holds the same
/// fraction of each.
template <class Attrs>
Attrs local_heads(Attrs a, const Execute& c) {
  const int64_t local = c.input(0).shape[2], whole = c.input_type(0).shape[2];
  a.heads = static_cast<int32_t>(local_share(a.heads, local, whole));
  a.key_heads = static_cast<int32_t>(local_share(a.key_heads, local, whole));
  return a;
}

/// The number of units in which `size` rows are evenly sharded along `dim`; 0 if they are not.
inline int64_t even_units(const Placement& p, int dim, int64_t size) {
  const bool even = p.is_shard(dim) && p.map().kind() == OwnershipMap::Kind::dim;
  return even && size % p.map().granule() == 0 ? size / p.map().granule() : 0;
}

/// The number of units in which packed queries, keys and values are sharded along dimension 2; 0 if they are not.
inline int64_t packed_units(const Placement& p) { return p.is_shard(2) && p.map().is_parts() ? p.map().granule() : 0; }

inline double scale_of(const AttentionOptions& options, int64_t width) {
  return options.scale > 0 ? options.scale
                           : 1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, width)));
}

inline void check_score_scale(const char* op, double scale) {
  check<ConfigError>(scale >= 0 && std::isfinite(scale), "[", op, "] scores times ", scale,
                     ": wants a positive factor, or 0 for 1 / sqrt(D)");
}

/// `own_keys`: keys are those of the queries' tokens.
inline void check_mask(const char* op, const AttentionOptions& options, bool own_keys = true) {
  if (options.key_begins && (own_keys || options.causal))
    fail<ConfigError>("[", op, "] key_begins ", options.key_begins.type(),
                      own_keys ? ": its keys are those of the queries' tokens; wants begins" : " with a causal mask; wants causal = false");
  check_score_scale(op, options.scale);
  check_softcap(op, options.softcap);
  if (options.window < 0 || (options.window > 0 && !options.causal))
    fail<ShapeError>("[", op, "] a window of ", options.window, " keys", options.causal ? "" : ", not causal",
                     "; wants 0 for none, or a causal mask and at least 1");
}

}  // namespace sheaf::ops
