// Each key and value head of a packed projection repeated, so that more ranks can share them; its gradient is the sum of the copies'.
// And queries packed with replicated keys and values, of which each rank takes those that its queries read.
#include <algorithm>
#include <optional>

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/reduce.h"

namespace sheaf {
namespace {

using namespace ops;

/// Over all ranks: query heads, key heads, and equally many value heads, of `width` elements. Where keys are repeated there are
/// `times` as many keys and values.
struct RepeatAttrs {
  int32_t heads, key_heads, width, times;
  int64_t size(int64_t copies) const { return (int64_t{heads} + 2 * copies * key_heads) * width; }
};

/// A rank's part of a packed tensor [B, T, E], of `whole` features over all ranks: its queries [B, T, H, D], and its keys and values,
/// `copies` of each, [B, T, 2 G, copies, D].
struct Packed {
  View queries, others;
  Packed(const RepeatAttrs& a, const View& x, int64_t whole, int64_t copies) {
    const int64_t heads = local_share(a.heads, x.shape[2], whole), keys = local_share(a.key_heads, x.shape[2], whole);
    queries = kernels::heads_of(x, 0, heads, a.width);
    others = kernels::heads_of(x, heads, 2 * keys * copies, a.width);
    others.shape = {x.shape[0], x.shape[1], 2 * keys, copies, a.width};
    others.strides = {x.strides[0], x.strides[1], copies * a.width, a.width, 1};
  }
};

/// A shard of the packed heads, `copies` of each key, in units of whole key heads with the queries that read them.
Placement cut_of(const RepeatAttrs& a, int64_t copies, int64_t units, bool inner) {
  const int64_t queries = int64_t{a.heads} * a.width, keys = copies * a.key_heads * a.width;
  const OwnershipMap map = OwnershipMap::parts(2, {queries, keys, keys}, units);
  return Placement::shard(inner ? map.inner() : map);
}
Placement cut_of(const RepeatAttrs& a, int64_t copies, const OwnershipMap& like) {
  return cut_of(a, copies, like.granule(), like.is_inner());
}

/// From `have` copies of each key head to `give`: linear, and independent for each token.
void place_packed(const RepeatAttrs& a, Place& p, int64_t have, int64_t give) {
  const Placement& in = p.in(0);
  if (in.is_shard(0) || in.is_shard(1)) p.rule({in}, {in});
  if (in.is_shard(2) && in.map().is_parts() && a.key_heads % in.map().granule() == 0 && in == cut_of(a, have, in.map()))
    p.rule({in}, {cut_of(a, give, in.map())});
  p.rule({kR}, {kR});
  p.rule({kP}, {kP});
}

std::string described(const RepeatAttrs& a) { return str("heads ", a.heads, "/", a.key_heads, " keys ", a.times, " times"); }

struct SumKeyHeads {  // the adjoint of RepeatKeyHeads
  static constexpr const char* kName = "sum_key_heads";
  using Attrs = RepeatAttrs;
  static void infer(const Attrs& a, Infer& c) { c.output(c.dtype(0), {c.shape(0)[0], c.shape(0)[1], a.size(1)}); }
  static void place(const Attrs& a, Place& p) { place_packed(a, p, a.times, 1); }
  static View sums(const Attrs& a, const Execute& c) { return Packed(a, c.output(0), a.size(1), 1).others; }
  static View addends(const Attrs& a, const Execute& c) { return Packed(a, c.input(0), a.size(a.times), a.times).others; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), sum, addends(a, c), sums(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    SHEAF_ON_DEVICE(stream, copy, Packed(a, c.input(0), a.size(a.times), a.times).queries,
                    Packed(a, c.output(0), a.size(1), 1).queries);
    SHEAF_ON_DEVICE_SCRATCH(stream, c.workspace, sum, addends(a, c), sums(a, c), 1.0);
  }
  static void vjp(const Attrs& a, Vjp& c);
  static void describe(const Attrs& a, std::string& out) { out += described(a); }
};

struct RepeatKeyHeads {  // x[B, T, (H + 2 G) D] -> [B, T, (H + 2 G times) D]
  static constexpr const char* kName = "repeat_key_heads";
  using Attrs = RepeatAttrs;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, c.dtype(0));
    c.output(c.dtype(0), {c.shape(0)[0], c.shape(0)[1], a.size(a.times)});
  }
  static void place(const Attrs& a, Place& p) { place_packed(a, p, 1, a.times); }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const Packed x(a, c.input(0), a.size(1), 1), y(a, c.output(0), a.size(a.times), a.times);
    SHEAF_ON_DEVICE(stream, copy, x.queries, y.queries);
    SHEAF_ON_DEVICE(stream, copy, expand_view(x.others, y.others.shape), y.others);
  }
  static void vjp(const Attrs& a, Vjp& c) { c.set(0, apply<SumKeyHeads>(a, dense_rows(c.grad()))); }
  static void describe(const Attrs& a, std::string& out) { out += described(a); }
};

void SumKeyHeads::vjp(const Attrs& a, Vjp& c) { c.set(0, apply<RepeatKeyHeads>(a, dense_rows(c.grad()))); }

/// Queries sharded evenly, with the shard of the packed heads that has as many units; keys and values are on every rank.
struct PackCut {
  Placement queries, packed;
};
std::optional<PackCut> pack_cut(const RepeatAttrs& a, int64_t units, bool inner) {
  if (units <= 0 || int64_t{a.key_heads} * a.times % units != 0) return {};
  const OwnershipMap queries = OwnershipMap::even(2, int64_t{a.heads} * a.width / units);
  return PackCut{Placement::shard(inner ? queries.inner() : queries), cut_of(a, a.times, units, inner)};
}

/// Calls f(g, n, at) for each key head g of which this rank's part of a packed tensor has n > 0 copies, from its copy `at` on.
template <class F>
void for_each_key_head(const RepeatAttrs& a, const Type& packed, F&& f) {
  const std::vector<Interval> rows = packed.layout.local_rows(packed.shape, 2);
  const int64_t group = int64_t{a.heads} / a.key_heads / a.times * a.width;  // of the queries that read one copy
  if (rows.empty() || group == 0) return;
  const bool whole = rows[0].size() == packed.shape[2];
  const int64_t begin = whole ? 0 : rows[0].begin / group, end = whole ? int64_t{a.key_heads} * a.times : rows[0].end / group;
  for (int64_t at = begin, n; at < end; at += n) {
    const int64_t head = at / a.times;
    n = std::min(end, (head + 1) * a.times) - at;
    f(head, n, at - begin);
  }
}

/// The n copies from `at` on of this rank's keys (kv 0) or values (kv 1) in a packed tensor.
View copies_of(const RepeatAttrs& a, const View& packed, int64_t kv, int64_t at, int64_t n) {
  const int64_t whole = a.size(a.times), keys = int64_t{a.key_heads} * a.times;
  const int64_t first = local_share(a.heads, packed.shape[2], whole) + kv * local_share(keys, packed.shape[2], whole);
  return kernels::heads_of(packed, first + at, n, a.width);
}
/// Key head g, or value head g, of keys and values [B, T, 2 G D].
View head_of(const RepeatAttrs& a, const View& keys_values, int64_t kv, int64_t g) {
  return kernels::heads_of(keys_values, kv * a.key_heads + g, 1, a.width);
}
View queries_of(const RepeatAttrs& a, const View& x, int64_t whole) {
  return kernels::heads_of(x, 0, local_share(a.heads, x.shape[2], whole), a.width);
}

struct UnpackHeads {  // the adjoint of PackHeads
  static constexpr const char* kName = "unpack_heads";
  using Attrs = RepeatAttrs;
  static void infer(const Attrs& a, Infer& c) {
    const Shape& x = c.shape(0);
    c.output(c.dtype(0), {x[0], x[1], int64_t{a.heads} * a.width});
    c.output(c.dtype(0), {x[0], x[1], int64_t{2} * a.key_heads * a.width});
  }
  static void place(const Attrs& a, Place& p) {
    const Placement& in = p.in(0);
    if (in.is_shard(0) || in.is_shard(1)) p.rule({in}, {in, in});
    if (in.is_shard(2) && in.map().is_parts())
      if (const auto cut = pack_cut(a, in.map().granule(), in.map().is_inner()); cut && cut->packed == in)
        p.rule({in}, {cut->queries, kP});
    p.rule({kR}, {kR, kR});
    p.rule({kP}, {kP, kP});
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    int64_t most = 0;
    for_each_key_head(a, c.input_type(0), [&](int64_t g, int64_t n, int64_t at) {
      const View copies = copies_of(a, c.input(0), 0, at, n);
      most = std::max<int64_t>(most, SHEAF_GPU_WORKSPACE(c.device(), sum, copies, head_of(a, c.output(1), 0, g)));
    });
    return most;
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View packed = c.input(0), kv = c.output(1);
    SHEAF_ON_DEVICE(stream, copy, queries_of(a, packed, a.size(a.times)), queries_of(a, c.output(0), int64_t{a.heads} * a.width));
    SHEAF_ON_DEVICE(stream, fill, kv, 0.0);  // zero for heads that other ranks read
    for_each_key_head(a, c.input_type(0), [&](int64_t g, int64_t n, int64_t at) {
      for (const int64_t i : {0, 1})
        SHEAF_ON_DEVICE_SCRATCH(stream, c.workspace, sum, copies_of(a, packed, i, at, n), head_of(a, kv, i, g), 1.0);
    });
  }
  static void vjp(const Attrs& a, Vjp& c);
  static void describe(const Attrs& a, std::string& out) { out += described(a); }
};

struct PackHeads {  // q[B, T, H D], kv[B, T, 2 G D] -> [B, T, (H + 2 G times) D]
  static constexpr const char* kName = "pack_heads";
  using Attrs = RepeatAttrs;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, common_dtype(kName, c));
    c.output(c.dtype(0), {c.shape(0)[0], c.shape(0)[1], a.size(a.times)});
  }
  static void place(const Attrs& a, Place& p) {
    for (const int i : {0, 1})
      if (p.in(i).is_shard(0) || p.in(i).is_shard(1)) rule_all(p, p.in(i), p.in(i));
    const int64_t units = even_units(p.in(0), 2, p.shape(0)[2]);
    if (const auto cut = pack_cut(a, units, units && p.in(0).map().is_inner())) p.rule({cut->queries, kR}, {cut->packed});
    rule_all(p, kR, kR);
    rule_all(p, kP, kP);
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View packed = c.output(0), kv = c.input(1);
    SHEAF_ON_DEVICE(stream, copy, queries_of(a, c.input(0), int64_t{a.heads} * a.width), queries_of(a, packed, a.size(a.times)));
    for_each_key_head(a, c.output_type(0), [&](int64_t g, int64_t n, int64_t at) {
      for (const int64_t i : {0, 1}) {
        const View to = copies_of(a, packed, i, at, n);
        SHEAF_ON_DEVICE(stream, copy, expand_view(head_of(a, kv, i, g), to.shape), to);
      }
    });
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensors d = apply(op_def<UnpackHeads>(), &a, {{dense_rows(c.grad())}});
    c.set(0, d[0]), c.set(1, d[1]);
  }
  static void describe(const Attrs& a, std::string& out) { out += described(a); }
};

void UnpackHeads::vjp(const Attrs& a, Vjp& c) {
  const auto of = [&](int o) { return c.has_grad(o) ? dense_rows(c.grad(o)) : zeros(c.output_type(o).shape, c.output_type(o).dtype); };
  c.set(0, apply<PackHeads>(a, {of(0), of(1)}));
}

}  // namespace

Tensor repeat_key_heads(const Tensor& qkv, int64_t heads, int64_t kv_heads, int64_t times) {
  expect_defined("repeat_key_heads", qkv);
  const int64_t parts = heads + 2 * kv_heads;
  if (qkv.rank() != 3 || heads <= 0 || kv_heads <= 0 || times <= 0 || qkv.size(2) % parts != 0)
    fail<ShapeError>("[repeat_key_heads] wants [B, T, (H + 2 G) D], got ", qkv.type(), ", H ", heads, ", G ", kv_heads,
                     ", each ", times, " times");
  if (times == 1) return qkv;
  const RepeatAttrs attrs{static_cast<int32_t>(heads), static_cast<int32_t>(kv_heads), static_cast<int32_t>(qkv.size(2) / parts),
                          static_cast<int32_t>(times)};
  return apply<RepeatKeyHeads>(attrs, dense_rows(qkv));
}

Tensor pack_heads(const Tensor& queries, const Tensor& keys_values, int64_t heads, int64_t kv_heads, int64_t times) {
  expect_all_defined("pack_heads", {&queries, &keys_values});
  const Shape &q = queries.shape(), &kv = keys_values.shape();
  if (q.rank() != 3 || heads <= 0 || kv_heads <= 0 || times <= 0 || heads % (kv_heads * times) != 0 || q[2] % heads != 0 ||
      !(kv == Shape{q[0], q[1], 2 * kv_heads * (q[2] / heads)}))
    fail<ShapeError>("[pack_heads] wants queries [B, T, H D] and keys and values [B, T, 2 G D] with H a multiple of G times; got ",
                     queries.type(), ", ", keys_values.type(), ", H ", heads, ", G ", kv_heads, ", each ", times, " times");
  const RepeatAttrs attrs{static_cast<int32_t>(heads), static_cast<int32_t>(kv_heads), static_cast<int32_t>(q[2] / heads),
                          static_cast<int32_t>(times)};
  return apply<PackHeads>(attrs, {dense_rows(queries), dense_rows(keys_values)});
}

}  // namespace sheaf
