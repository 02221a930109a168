// Each key and value head of a packed projection several times, so that more ranks can share them; its gradient is their sum.
#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/reduce.h"

namespace sheaf {
namespace {

using namespace ops;

/// Of all ranks' heads: so many queries, then so many keys, then as many values, of `width` elements. Where keys are repeated
/// there are `times` as many keys and values.
struct RepeatAttrs {
  int32_t heads, key_heads, width, times;
  int64_t size(int64_t copies) const { return (int64_t{heads} + 2 * copies * key_heads) * width; }
};

/// A rank's part of a packed tensor [B, T, E], of `whole` features on all ranks: its queries [B, T, H, D], and its keys and values,
/// each `copies` times, [B, T, 2 G, copies, D].
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

/// A cut of the packed heads, `copies` of each key, in units of whole key heads with the queries that read them.
Placement cut_of(const RepeatAttrs& a, int64_t copies, const OwnershipMap& like) {
  const int64_t queries = int64_t{a.heads} * a.width, keys = copies * a.key_heads * a.width;
  const OwnershipMap map = OwnershipMap::parts(2, {queries, keys, keys}, like.granule());
  return Placement::shard(like.is_inner() ? map.inner() : map);
}

/// From `have` copies of each key head to `give`: linear, and each token's alone.
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

}  // namespace

Tensor repeat_key_heads(const Tensor& qkv, int64_t heads, int64_t key_heads, int64_t times) {
  const int64_t parts = heads + 2 * key_heads;
  if (qkv.rank() != 3 || heads <= 0 || key_heads <= 0 || times <= 0 || qkv.size(2) % parts != 0)
    fail<ShapeError>("[repeat_key_heads] wants [B, T, (H + 2 G) D], got ", qkv.type(), ", H ", heads, ", G ", key_heads,
                     ", each ", times, " times");
  if (times == 1) return qkv;
  const RepeatAttrs attrs{static_cast<int32_t>(heads), static_cast<int32_t>(key_heads), static_cast<int32_t>(qkv.size(2) / parts),
                          static_cast<int32_t>(times)};
  return apply<RepeatKeyHeads>(attrs, dense_rows(qkv));
}

}  // namespace sheaf
