// RMS normalisation of each query and key of a packed projection, whose values are unchanged.
#include <algorithm>
#include <optional>

#include "sheaf/autograd/ops/attention.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/norm.h"

namespace sheaf {
namespace {

using namespace ops;

/// Over all ranks: query heads, then key heads, then equally many value heads.
struct Heads {
  int64_t queries, keys;
};

Heads local(const Heads& all, const Execute& c, int packed) {
  const int64_t mine = c.input(packed).shape[2], whole = c.input_type(packed).shape[2];
  return {local_share(all.queries, mine, whole), local_share(all.keys, mine, whole)};
}

/// Heads [begin, begin + count) of x[B, T, H + 2 G, D].
View part(View x, int64_t begin, int64_t count) {
  if (x.data) x.data = x.as<char>() + begin * x.strides[2] * static_cast<int64_t>(size_of(x.dtype));
  x.shape[2] = count;
  return x;
}
View queries(const View& x, const Heads& h) { return part(x, 0, h.queries); }
View keys(const View& x, const Heads& h) { return part(x, h.queries, h.keys); }
View values(const View& x, const Heads& h) { return part(x, h.queries + h.keys, h.keys); }

/// A shard of the heads in `units` units: of the packed ones, and of a statistic of each query or key.
struct Cut {
  Placement packed, queries, keys;
};
std::optional<Cut> cut_of(const Heads& h, int64_t units, bool inner) {
  if (units <= 0 || h.keys % units != 0 || h.queries % units != 0) return {};
  const auto shard = [&](const OwnershipMap& map) { return Placement::shard(inner ? map.inner() : map); };
  return Cut{shard(OwnershipMap::parts(2, {h.queries, h.keys, h.keys}, units)),
             shard(OwnershipMap::even(2, h.queries / units)), shard(OwnershipMap::even(2, h.keys / units))};
}

struct PackedNormBackward {  // dy, x, rstd of queries, of keys, their weights -> dx, dweights
  static constexpr const char* kName = "packed_rms_norm_backward";
  struct Attrs {
    Heads heads;
    int32_t dx, dq, dk;  ///< which gradients are wanted
    int32_t padding;     ///< 0: attributes are compared byte by byte
    double eps;
  };
  static void infer(const Attrs& a, Infer& c) {
    if (a.dx) c.output(c.dtype(1), c.shape(1));
    const DType sum = statistics_dtype(c.dtype(1));
    if (a.dq) c.output(sum, {c.shape(1)[3]});
    if (a.dk) c.output(sum, {c.shape(1)[3]});
  }
  static void place(const Attrs& a, Place& p) {
    const int outputs = a.dx + a.dq + a.dk;
    const auto with_weights = [&](std::vector<Placement> in, const Placement& dx) {
      in.insert(in.end(), 2, kR);
      std::vector<Placement> out(static_cast<size_t>(outputs), kP);
      if (a.dx) out[0] = dx;
      p.rule(in, out);
    };
    for (int i = 0; i < 4; ++i) {
      const Placement& in = p.in(i);
      if (!in.is_shard()) continue;
      if (in.is_shard(0) || in.is_shard(1)) with_weights({in, in, in, in}, in);
      const int64_t units = i < 2 ? packed_units(in) : even_units(in, 2, i == 2 ? a.heads.queries : a.heads.keys);
      if (const auto cut = cut_of(a.heads, units, in.map().is_inner()))
        with_weights({cut->packed, cut->packed, cut->queries, cut->keys}, cut->packed);
      break;
    }
    rule_all(p, kR, kR, outputs);
    std::vector<Placement> linear(6, kR);
    linear[0] = kP;
    p.rule(linear, std::vector<Placement>(static_cast<size_t>(outputs), kP));
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    const Heads h = local(a.heads, c, 1);
    const View x = c.input(1), wanted = c.input(4), none;
    return std::max<int64_t>(
        SHEAF_WORKSPACE(c.device(), rms_norm_backward, queries(x, h), x, a.dq ? wanted : none),
        SHEAF_WORKSPACE(c.device(), rms_norm_backward, keys(x, h), x, a.dk ? wanted : none));
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const Heads h = local(a.heads, c, 1);
    const View dy = c.input(0), x = c.input(1), none;
    int o = 0;
    const View dx = a.dx ? c.output(o++) : none, dq = a.dq ? c.output(o++) : none, dk = a.dk ? c.output(o) : none;
    if (a.dx || a.dq)
      SHEAF_ON_DEVICE(stream, rms_norm_backward, queries(dy, h), queries(x, h), c.input(4), c.input(2),
                      a.dx ? queries(dx, h) : none, dq, c.workspace);
    if (a.dx || a.dk)
      SHEAF_ON_DEVICE(stream, rms_norm_backward, keys(dy, h), keys(x, h), c.input(5), c.input(3),
                      a.dx ? keys(dx, h) : none, dk, c.workspace);
    if (a.dx) SHEAF_ON_DEVICE(stream, copy, values(dy, h), values(dx, h));
  }
  static constexpr uint64_t kSavedInputs = 0b110011;
  /// As one normalisation of all heads, each with its own weight. That of values is discarded: their part is the identity.
  static void vjp(const Attrs& a, Vjp& c) {
    const DeviceScope device(c.input(1).device());
    const Type& x = c.input_type(1);
    const DType d = statistics_dtype(x.dtype);
    const auto heads = [&](int64_t begin, int64_t end) {  // [H + 2 G, 1]: 1 for heads [begin, end), 0 for others
      const Tensor h = arange(x.shape[2]);
      return unsqueeze(cast(logical_and(ge(h, static_cast<double>(begin)), lt(h, static_cast<double>(end))), d), {1});
    };
    const int64_t normed = a.heads.queries + a.heads.keys;
    const Tensor queries = heads(0, a.heads.queries), keys = heads(a.heads.queries, normed), values = heads(normed, x.shape[2]);
    const auto of_heads = [&](const Tensor& of_queries, const Tensor& of_keys) {
      return sum_of_defined({of_queries ? mul(queries, in_statistics_dtype(of_queries)) : Tensor(),
                             of_keys ? mul(keys, in_statistics_dtype(of_keys)) : Tensor()});
    };
    const Tensor dx = grad_if(a.dx, c, 0), dq = grad_if(a.dq, c, a.dx), dk = grad_if(a.dk, c, a.dx + a.dq);
    const NormBackwardOperands g =
        norm_second({c.input(0), c.input(1), of_heads(c.input(4), c.input(5))}, {dx, of_heads(dq, dk), {}}, /*layer=*/false, a.eps);
    const Tensor all_normed = add(queries, keys);
    const Tensor dy = mul(all_normed, g.dy);
    c.set(0, dx ? add(dy, mul(values, in_statistics_dtype(dx))) : dy);
    c.set(1, mul(all_normed, g.x));
    if (!g.weight) return;
    c.set(4, sum(mul(queries, g.weight), {0}));
    c.set(5, sum(mul(keys, g.weight), {0}));
  }
};

struct PackedNorm {  // x[B, T, H + 2 G, D], weight of queries, of keys -> y, rstd of queries, of keys
  static constexpr const char* kName = "packed_rms_norm";
  struct Attrs {
    Heads heads;
    double eps;
  };
  static constexpr uint64_t kSavedInputs = 0b111, kSavedOutputs = 0b110;
  static void infer(const Attrs& a, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_floating(kName, d);
    const Shape& x = c.shape(0);
    if (x.rank() != 4 || a.heads.queries < 0 || a.heads.keys < 0 || x[2] != a.heads.queries + 2 * a.heads.keys)
      fail<ShapeError>("[", kName, "] wants [B, T, H + 2 G, D] with ", a.heads.queries, " query heads, got ", c.input(0));
    for (int i = 1; i < 3; ++i)
      if (!(c.shape(i) == Shape{x[3]}))
        fail<ShapeError>("[", kName, "] ", c.input(i), " does not fit the last dimension of ", c.input(0));
    c.output(d, x);
    c.output(statistics_dtype(d), {x[0], x[1], a.heads.queries});
    c.output(statistics_dtype(d), {x[0], x[1], a.heads.keys});
  }
  static void place(const Attrs& a, Place& p) {
    const Placement& in = p.in(0);
    if (in.is_shard(0) || in.is_shard(1)) p.rule({in, kR, kR}, {in, in, in});
    if (const auto cut = cut_of(a.heads, packed_units(in), in.is_shard() && in.map().is_inner()))
      p.rule({cut->packed, kR, kR}, {cut->packed, cut->queries, cut->keys});
    rule_all(p, kR, kR, 3);
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const Heads h = local(a.heads, c, 0);
    const View x = c.input(0), y = c.output(0);
    SHEAF_ON_DEVICE(stream, rms_norm, queries(x, h), c.input(1), a.eps, queries(y, h), c.output(1));
    SHEAF_ON_DEVICE(stream, rms_norm, keys(x, h), c.input(2), a.eps, keys(y, h), c.output(2));
    SHEAF_ON_DEVICE(stream, copy, values(x, h), values(y, h));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const PackedNormBackward::Attrs attrs{a.heads, c.needs(0), c.needs(1), c.needs(2), 0, a.eps};
    const Tensor inputs[] = {dense_rows(c.grad(0)), c.input(0), c.output(1), c.output(2), c.input(1), c.input(2)};
    std::vector<Into> into(attrs.dx ? 1 : 0);
    if (attrs.dq) into.push_back(c.into(1));
    if (attrs.dk) into.push_back(c.into(2));
    const Tensors d = apply(op_def<PackedNormBackward>(), &attrs, inputs, into);
    size_t o = 0;
    if (attrs.dx) c.set(0, d[o++]);
    if (attrs.dq) c.set(1, d[o++]);
    if (attrs.dk) c.set(2, d[o]);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str("heads ", a.heads.queries, "/", a.heads.keys, " eps ", a.eps);
  }
};

}  // namespace

Tensor packed_rms_norm(const Tensor& x, int64_t heads, const Tensor& query_weight, const Tensor& key_weight, double eps) {
  expect_defined("packed_rms_norm", x);
  const int64_t others = x.rank() == 4 ? x.size(2) - heads : 0;
  check<ShapeError>(others % 2 == 0, "[packed_rms_norm] ", x.type(), ": with ", heads, " query heads there must be as many ",
                    "keys as values");
  const PackedNorm::Attrs attrs{{heads, others / 2}, eps};
  return apply_all<PackedNorm>(attrs, {dense_rows(x), dense_rows(query_weight), dense_rows(key_weight)})[0];
}

}  // namespace sheaf
