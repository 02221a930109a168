// Ops that rename elements: their results share the operand's memory if strides can express them.
#include <algorithm>

#include "sheaf/autograd/ops/common.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

/// Strides that show `in`'s elements, in row-major order, in another shape; false if there are
/// none.
bool reshape_strides(const View& in, const Shape& shape, Shape& strides) {
  strides = shape.contiguous_strides();
  if (in.numel() == 0) return true;
  // Runs of `in`'s dimensions that are contiguous with each other; each must cover whole dimensions of the new shape.
  int from = in.rank() - 1, to = shape.rank() - 1;
  while (from >= 0) {
    int64_t run = in.shape[from];
    const int64_t step = in.strides[from];
    while (from > 0 && run != 1 && (in.shape[from - 1] == 1 || in.strides[from - 1] == run * step)) run *= in.shape[--from];
    --from;
    if (run == 1) continue;
    int64_t covered = 1;
    while (to >= 0 && covered < run) {
      strides[to] = covered * step;
      covered *= shape[to--];
    }
    if (covered != run) return false;
  }
  return true;
}

struct StopGradient {
  static constexpr const char* kName = "stop_gradient";
  static constexpr bool kRecipe = true, kStopsGradient = true;
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { p.rule({p.in(0)}, {p.in(0)}); }
  static bool alias(const Attrs&, const View& in, View& out) {
    out.strides = in.strides;
    out.data = in.data;
    return true;
  }
};

struct Reshape {
  static constexpr const char* kName = "reshape";
  static constexpr bool kRecipe = true;
  struct Attrs {
    Shape shape;
    uint32_t inserted = 0, removed = 0;  ///< bit d: dimension d of the result, or of the operand, has size 1 and no other's place
    uint64_t cut = 0;  ///< bit kMaxDims a + d: where moved() has a choice for mesh axis a, it prefers dimension d of the result
    bool operator==(const Attrs&) const = default;
  };
  static void drop_layouts(Attrs& a) { a.cut = 0; }
  static void infer(const Attrs& a, Infer& c) { c.output(c.dtype(0), a.shape); }
  static void place(const Attrs& a, Place& p) {
    if (const OwnershipMap* map = p.sharded()) {
      const Placement in = Placement::shard(*map);
      Placement out;
      if (map->is_flat())
        p.rule({in}, {in});
      else if (a.inserted | a.removed ? shifted(*map, a, out) : moved(p, *map, a, out))
        p.rule({in}, {out});
    }
    p.rule({kR}, {kR});
    p.rule({kP}, {kP});
  }
  /// A bit for each axis and the dimension that it cuts.
  static uint64_t cut_dims(const Layout& layout) {
    static_assert(kMaxAxes * kMaxDims <= 64);
    uint64_t dims = 0;
    for (int axis = 0; axis < layout.num_axes(); ++axis)
      for (int d = 0; d < kMaxDims; ++d) dims |= static_cast<uint64_t>(layout[axis].is_shard(d)) << (kMaxDims * axis + d);
    return dims;
  }
  /// Where a cut of dimension d goes, if the inserted and removed dimensions are known.
  static bool shifted(const OwnershipMap& map, const Attrs& a, Placement& result) {
    if (a.removed >> map.dim() & 1) return false;
    const auto before = static_cast<uint32_t>((1u << map.dim()) - 1);
    int to = map.dim() - std::popcount(a.removed & before);
    for (int d = 0; d <= to; ++d) to += static_cast<int>(a.inserted >> d & 1);
    return result = Placement::shard(map.moved_to(to)), true;
  }
  /// Where a cut of dimension d goes: dimensions are matched in groups of equal product, and a cut
  /// of a group's first dimension cuts the first dimension of the other group, in rows of another
  /// size. Dimensions of size 1 before it, such as a batch of one sample, may be cut, too: one rank has the whole group.
  static bool moved(const Place& p, const OwnershipMap& map, const Attrs& attrs, Placement& result) {
    const Shape &in = p.shape(0), &out = attrs.shape;
    const int leading = map.dim() + 1;
    if (out.rank() >= leading && std::equal(in.begin(), in.begin() + leading, out.begin())) return result = Placement::shard(map), true;
    if (in.numel() == 0) return false;  // nothing says which dimensions belong together
    for (int i = 0, j = 0; i < in.rank() && j < out.rank();) {
      int64_t a = in[i], b = out[j];
      int i_end = i + 1, j_end = j + 1;
      while (a != b) {
        if (a < b)
          a *= in[i_end++];
        else
          b *= out[j_end++];
      }
      // Leading dimensions of size 1 belong to whichever dimension follows them.
      int first = i, target = j;
      while (first < i_end - 1 && in[first] == 1) ++first;
      while (target < j_end - 1 && out[target] == 1) ++target;
      if (map.dim() >= i && map.dim() < i_end) {
        if (map.dim() > first || (map.dim() < first && map.is_inner())) return false;
        for (int axis = 0; axis < p.axis(); ++axis)  // what these leave of the group is no whole one
          for (int d = map.dim() + 1; d <= first; ++d)
            if (p.type(0).layout[axis].is_shard(d)) return false;
        const int64_t rows_in = a / in[map.dim()];
        const uint64_t preferred = attrs.cut >> (kMaxDims * p.axis());
        int to = -1;
        for (int d = j; d <= target; ++d)
          if (map.can_move(rows_in, b / out[d]) && (to < 0 || (preferred >> d & 1) > (preferred >> to & 1))) to = d;
        if (to < 0) return false;
        return result = Placement::shard(map.moved_to(to, rows_in, b / out[to])), true;
      }
      i = i_end, j = j_end;
    }
    return false;
  }
  static bool alias(const Attrs&, const View& in, View& out) {
    out.data = in.data;
    return reshape_strides(in, out.shape, out.strides);
  }
  static void execute(const Attrs&, Execute& c) {
    const Stream stream = c.stream();
    const View x = c.input(0);
    SHEAF_ON_DEVICE(stream, copy, x, View::dense(c.output(0).data, x.dtype, x.shape));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const Type& type = c.input_type(0);
    c.set(0, type.shape == a.shape ? c.grad() : apply<Reshape>({type.shape, a.removed, a.inserted, cut_dims(type.layout)}, c.grad()));
  }
  static void describe(const Attrs& a, std::string& out) { out += a.shape.to_string(); }
};

/// Bit d for each dimension d in `dims`, numbered within `rank` dimensions.
uint32_t mask_of(const char* op, const Dims& dims, int rank) {
  uint32_t mask = 0;
  for (const int dim : dims) {
    const int d = wrap_dim(op, dim, rank);
    check<ShapeError>((mask >> d & 1) == 0, "[", op, "] dimension ", dim, " is given twice");
    mask |= 1u << d;
  }
  return mask;
}

struct Permute {
  static constexpr const char* kName = "permute";
  static constexpr bool kRecipe = true;
  struct Attrs {
    Shape order;  ///< dimension i of the result is dimension order[i] of the operand
    bool operator==(const Attrs&) const = default;
  };
  static void infer(const Attrs& a, Infer& c) {
    Shape out = c.shape(0);
    for (int i = 0; i < out.rank(); ++i) out[i] = c.shape(0)[static_cast<int>(a.order[i])];
    c.output(c.dtype(0), out);
  }
  static void place(const Attrs& a, Place& p) {
    if (const OwnershipMap* map = p.sharded(); map && !map->is_flat())
      for (int i = 0; i < a.order.rank(); ++i)
        if (a.order[i] == map->dim())
          p.rule({Placement::shard(*map)}, {Placement::shard(map->moved_to(i))});
    p.rule({kR}, {kR});
    p.rule({kP}, {kP});
  }
  static bool alias(const Attrs& a, const View& in, View& out) {
    out.data = in.data;
    out.strides = in.strides;
    for (int i = 0; i < in.rank(); ++i) out.strides[i] = in.strides[static_cast<int>(a.order[i])];
    return true;
  }
  static void vjp(const Attrs& a, Vjp& c) {
    Shape back = a.order;
    for (int i = 0; i < back.rank(); ++i) back[static_cast<int>(a.order[i])] = i;
    c.set(0, apply<Permute>({back}, c.grad()));
  }
  static void describe(const Attrs& a, std::string& out) { out += a.order.to_string(); }
};

struct Expand {
  static constexpr const char* kName = "expand";
  static constexpr bool kRecipe = true;
  struct Attrs {
    Shape shape;
    bool operator==(const Attrs&) const = default;
  };
  static void infer(const Attrs& a, Infer& c) {
    if (!(broadcast_shapes(kName, c.shape(0), a.shape) == a.shape))
      fail<ShapeError>("[expand] ", c.input(0), " cannot be repeated to ", a.shape);
    check<ShapeError>(byte_size(size_of(c.dtype(0)), a.shape).has_value(), "[expand] ", c.input(0), " to ", a.shape,
                      ": more than 2^63 bytes");
    c.output(c.dtype(0), a.shape);
  }
  static void place(const Attrs& a, Place& p) {
    if (const OwnershipMap* map = p.sharded(); map && !map->is_flat()) {
      const int at = map->dim() + a.shape.rank() - p.shape(0).rank();
      if (p.shape(0)[map->dim()] == a.shape[at])
        p.rule({Placement::shard(*map)}, {Placement::shard(map->moved_to(at))});
    } else if (map && p.shape(0) == a.shape) {
      p.rule({Placement::shard(*map)}, {Placement::shard(*map)});
    }
    p.rule({kR}, {kR});
    p.rule({kP}, {kP});
  }
  static bool alias(const Attrs&, const View& in, View& out) {
    out.data = in.data;
    out.strides = expand_view(in, out.shape).strides;
    return true;
  }
  static void vjp(const Attrs&, Vjp& c) { c.set(0, sum_to(c.grad(), c.input_type(0))); }
  static void describe(const Attrs& a, std::string& out) { out += a.shape.to_string(); }
};

}  // namespace

Tensor reshape(const Tensor& x, const Shape& shape) {
  expect_defined("reshape", x);
  Shape target = shape, sizes = shape;
  for (int i = 0; i < sizes.rank(); ++i) sizes[i] = std::max<int64_t>(sizes[i], 1);  // zeros would hide products that do not fit
  check<ShapeError>(byte_size(size_of(x.dtype()), sizes).has_value(), "[reshape] ", x.type(), " does not have the size of ", shape);
  int64_t known = 1;
  int open = -1;
  for (int i = 0; i < target.rank(); ++i) {
    if (target[i] >= 0) {
      known *= target[i];
      continue;
    }
    if (target[i] != -1 || open >= 0)
      fail<ShapeError>("[reshape] ", x.type(), " to ", shape, ": one size may be -1");
    open = i;
  }
  if (open >= 0) target[open] = known > 0 ? x.numel() / known : 0;
  if (target.numel() != x.numel())
    fail<ShapeError>("[reshape] ", x.type(), " does not have the size of ", shape);
  return target == x.shape() ? x : apply<Reshape>({target}, x);
}

Tensor unsqueeze(const Tensor& x, const Dims& dims) {
  expect_defined("unsqueeze", x);
  const int rank = x.rank() + static_cast<int>(dims.size());
  check<ShapeError>(rank <= kMaxDims, "[unsqueeze] ", x.type(), ": ", dims.size(), " more make more than ", kMaxDims, " dimensions");
  const uint32_t inserted = mask_of("unsqueeze", dims, rank);
  Shape shape;
  for (int d = 0, from = 0; d < rank; ++d) shape.push_back(inserted >> d & 1 ? 1 : x.shape()[from++]);
  return inserted == 0 ? x : apply<Reshape>({shape, inserted, 0}, x);
}

Tensor squeeze(const Tensor& x, const Dims& dims) {
  expect_defined("squeeze", x);
  const uint32_t removed = mask_of("squeeze", dims, x.rank());
  Shape shape;
  for (int d = 0; d < x.rank(); ++d) {
    if (!(removed >> d & 1)) shape.push_back(x.shape()[d]);
    else if (x.shape()[d] != 1) fail<ShapeError>("[squeeze] ", x.type(), ": dimension ", d, " has size ", x.shape()[d], ", not 1");
  }
  return removed == 0 ? x : apply<Reshape>({shape, 0, removed}, x);
}

Tensor permute(const Tensor& x, const Dims& order) {
  expect_defined("permute", x);
  Shape normal = Shape::filled(x.rank(), -1);
  uint32_t seen = 0;
  check<ShapeError>(static_cast<int>(order.size()) == x.rank(), "[permute] ", x.type(), " needs ",
                    x.rank(), " dimensions, not ", order.size());
  for (int i = 0; i < x.rank(); ++i) {
    normal[i] = wrap_dim("permute", order[i], x.rank());
    check<ShapeError>(!(seen >> normal[i] & 1), "[permute] dimension ", order[i],
                      " is given twice");
    seen |= 1u << normal[i];
  }
  return apply<Permute>({normal}, x);
}

Tensor stop_gradient(const Tensor& x) { return apply<StopGradient>({}, x); }

Tensor transpose(const Tensor& x, int dim0, int dim1) {
  expect_defined("transpose", x);
  Shape order = Shape::filled(x.rank(), 0);
  for (int i = 0; i < x.rank(); ++i) order[i] = i;
  std::swap(order[wrap_dim("transpose", dim0, x.rank())],
            order[wrap_dim("transpose", dim1, x.rank())]);
  return apply<Permute>({order}, x);
}

Tensor expand(const Tensor& x, const Shape& shape) {
  expect_defined("expand", x);
  return shape == x.shape() ? x : apply<Expand>({shape}, x);
}

}  // namespace sheaf
