// Splitting and concatenating tensors along a dimension. Slices are views.
#include <optional>

#include "sheaf/autograd/ops/common.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/interned.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/indexing.h"

namespace sheaf {
namespace {

using namespace ops;

/// The shard by parts of positions [begin, end) of its dimension: none unless these are whole parts. A rank has the same fraction of
/// each part, and so of what precedes them.
std::optional<OwnershipMap> parts_between(const OwnershipMap& map, int64_t begin, int64_t end) {
  std::vector<int64_t> sizes;
  int64_t at = 0;
  bool starts = false, ends = false;
  for (const int64_t size : map.sizes()) {
    starts |= at == begin;
    if (at >= begin && at + size <= end) sizes.push_back(size);
    ends |= (at += size) == end;
  }
  if (!starts || !ends || sizes.empty()) return {};
  const OwnershipMap left = sizes.size() == 1 ? OwnershipMap::even(map.dim(), sizes[0] / map.granule())
                                              : OwnershipMap::parts(map.dim(), sizes, map.granule());
  return map.is_inner() ? left.inner() : left;
}

/// The same for consecutive ranges of these sizes; empty unless all are whole parts.
std::vector<Placement> whole_parts(const OwnershipMap& map, const std::vector<int64_t>& sizes) {
  std::vector<Placement> out;
  int64_t at = 0;
  for (const int64_t size : sizes) {
    const auto part = parts_between(map, at, at + size);
    if (!part) return {};
    out.push_back(Placement::shard(*part));
    at += size;
  }
  return out;
}

/// Shards by parts, as OwnershipMap::parts defines them, in attributes: the same parts on each axis that has such a shard, in units of
/// its own.
struct CutParts {
  const std::vector<int64_t>* sizes = nullptr;  ///< null: none
  int64_t units[kMaxAxes] = {};                 ///< by axis; 0: none
  CutParts() = default;
  /// Those by which axes shard x along `dim`.
  CutParts(const Type& x, int dim) {
    for (int axis = 0; axis < x.layout.num_axes(); ++axis)
      if (const Placement& p = x.layout[axis]; p.is_shard(dim) && p.map().is_parts() && (!sizes || sizes == &p.map().sizes()))
        sizes = &p.map().sizes(), units[axis] = p.map().granule();
  }
  /// That of an axis, if `p` shards the same dimension, with the same inner or outer order.
  std::optional<OwnershipMap> like(const Placement& p, int dim, int axis) const {
    if (units[axis] == 0 || !p.is_shard(dim)) return {};
    const OwnershipMap map = OwnershipMap::parts(dim, *sizes, units[axis]);
    return p.map().is_inner() ? map.inner() : map;
  }
};

struct SliceOp {
  static constexpr const char* kName = "slice";
  static constexpr bool kRecipe = true;
  struct Attrs {
    int64_t begin, end;
    int64_t dim, size;  ///< size: of the dimension
    int64_t step = 1;
  };
  static void infer(const Attrs& a, Infer& c) {
    Shape out = c.shape(0);
    out[static_cast<int>(a.dim)] = (a.end - a.begin + a.step - 1) / a.step;
    c.output(c.dtype(0), out);
  }
  static void place(const Attrs& a, Place& p) {
    rules::beside(p, static_cast<int>(a.dim), /*linear=*/true);
    if (const OwnershipMap* map = p.sharded(); map && map->is_parts() && map->dim() == a.dim && a.step == 1)
      if (const auto left = parts_between(*map, a.begin, a.end))
        p.rule({Placement::shard(*map)}, {Placement::shard(*left)});
  }
  static bool alias(const Attrs& a, const View& in, View& out) {
    const int dim = static_cast<int>(a.dim);
    out.strides = in.strides;
    out.data = static_cast<char*>(in.data) + local_share(a.begin, in.shape[dim], a.size) * in.strides[dim] *
                                                 static_cast<int64_t>(size_of(in.dtype));
    out.strides[dim] *= a.step;
    return true;
  }
  static void vjp(const Attrs& a, Vjp& c);
  static void describe(const Attrs& a, std::string& out) {
    out += str("dim ", a.dim, " [", a.begin, ",", a.end, ")");
    if (a.step > 1) out += str(" step ", a.step);
  }
};

struct Pad {
  static constexpr const char* kName = "pad";
  struct Attrs {
    int64_t before, after;
    int64_t dim;
    double value;
    CutParts of_result = {};  ///< of which the input is whole parts
  };
  static void drop_layouts(Attrs& a) { a.of_result = {}; }
  static void infer(const Attrs& a, Infer& c) {
    check_scalar(kName, c.dtype(0), a.value);
    Shape out = c.shape(0);
    out[static_cast<int>(a.dim)] += a.before + a.after;
    c.output(c.dtype(0), out);
  }
  static void place(const Attrs& a, Place& p) {
    const int dim = static_cast<int>(a.dim);
    rules::beside(p, dim, /*linear=*/a.value == 0);
    if (const auto out = a.of_result.like(p.in(0), dim, p.axis()))
      if (parts_between(*out, a.before, a.before + p.shape(0)[dim]) == p.in(0).map()) p.rule({p.in(0)}, {Placement::shard(*out)});
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    Shape before = Shape::filled(c.input(0).rank(), 0);
    const int dim = static_cast<int>(a.dim);
    before[dim] = local_share(a.before, c.output(0).shape[dim], c.output_type(0).shape[dim]);
    SHEAF_ON_DEVICE(stream, pad, c.input(0), before, a.value, c.output(0));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const int dim = static_cast<int>(a.dim);
    c.set(0, slice(c.grad(), dim, a.before, a.before + c.input_type(0).shape[dim]));
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str("dim ", a.dim, " ", a.before, "+", a.after, " of ", a.value);
  }
};

void SliceOp::vjp(const Attrs& a, Vjp& c) {
  const Type& in = c.input_type(0);
  const int dim = static_cast<int>(a.dim);
  if (a.step > 1) {
    const Tensor taken = arange(static_cast<double>(a.begin), static_cast<double>(a.end), static_cast<double>(a.step));
    return c.set(0, index_add(full_of(in.dual(), 0.0), dim, taken, c.grad()));
  }
  c.set(0, apply<Pad>({a.begin, a.size - a.end, a.dim, 0.0, CutParts(in, dim)}, c.grad()));
}

struct Concat {
  static constexpr const char* kName = "concat";
  struct Attrs {
    int64_t dim;
    CutParts of_result = {};  ///< of which each input is whole parts
  };
  static void drop_layouts(Attrs& a) { a.of_result = {}; }
  static void infer(const Attrs& a, Infer& c) {
    const int dim = static_cast<int>(a.dim);
    Shape out = c.shape(0);
    out[dim] = 0;
    for (int i = 0; i < c.num_inputs(); ++i) {
      Shape other = c.shape(i);
      if (other.rank() == out.rank()) other[dim] = out[dim];
      if (!(other == out))
        fail<ShapeError>("[concat] ", c.input(0), " and ", c.input(i), " differ in other dimensions than ",
                         dim);
      out[dim] += c.shape(i)[dim];
    }
    c.output(common_dtype(kName, c), out);
  }
  static void place(const Attrs& a, Place& p) {
    const int dim = static_cast<int>(a.dim);
    rules::beside(p, dim, /*linear=*/true);
    const auto out = a.of_result.like(p.in(0), dim, p.axis());
    if (!out) return;
    std::vector<int64_t> sizes;
    for (int i = 0; i < p.num_inputs(); ++i) sizes.push_back(p.shape(i)[dim]);
    if (const auto in = whole_parts(*out, sizes); !in.empty()) p.rule(in, std::vector{Placement::shard(*out)});
  }
  static void execute(const Attrs& a, Execute& c) {
    const int dim = static_cast<int>(a.dim);
    const Stream stream = c.stream();
    View part = c.output(0);
    const int64_t step = part.strides[dim] * static_cast<int64_t>(size_of(part.dtype));
    for (int i = 0; i < c.num_inputs(); ++i) {
      const View x = c.input(i);
      part.shape[dim] = x.shape[dim];
      SHEAF_ON_DEVICE(stream, copy, x, part);
      part.data = part.as<char>() + x.shape[dim] * step;
    }
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const int dim = static_cast<int>(a.dim);
    int64_t at = 0;
    for (int i = 0; i < c.num_inputs(); ++i) {
      const int64_t size = c.input_type(i).shape[dim];
      if (c.needs(i)) c.set(i, slice(c.grad(), dim, at, at + size));
      at += size;
    }
  }
  static void describe(const Attrs& a, std::string& out) { out += str("dim ", a.dim); }
};

/// x in parts of these sizes along a dimension, whose gradients are concatenated.
struct Split {
  static constexpr const char* kName = "split";
  static constexpr bool kRecipe = true;
  struct Attrs {
    const std::vector<int64_t>* sizes;  // interned
    int64_t dim;
  };
  static void infer(const Attrs& a, Infer& c) {
    Shape out = c.shape(0);
    for (const int64_t size : *a.sizes) {
      out[static_cast<int>(a.dim)] = size;
      c.output(c.dtype(0), out);
    }
  }
  static void place(const Attrs& a, Place& p) {
    const int dim = static_cast<int>(a.dim), count = static_cast<int>(a.sizes->size());
    rules::beside(p, dim, /*linear=*/true, count);
    if (!p.in(0).is_shard(dim) || !p.in(0).map().is_parts()) return;
    if (const auto out = whole_parts(p.in(0).map(), *a.sizes); !out.empty()) p.rule(std::vector{p.in(0)}, out);
  }
  static bool alias(const Attrs& a, int output, const View& in, View& out) {
    const int dim = static_cast<int>(a.dim);
    int64_t before = 0, whole = 0;
    for (size_t i = 0; i < a.sizes->size(); ++i) {
      if (static_cast<int>(i) < output) before += (*a.sizes)[i];
      whole += (*a.sizes)[i];
    }
    out.strides = in.strides;
    out.data = static_cast<char*>(in.data) +
               local_share(before, in.shape[dim], whole) * in.strides[dim] * static_cast<int64_t>(size_of(in.dtype));
    return true;
  }
  static void vjp(const Attrs& a, Vjp& c) {
    std::vector<Tensor> parts;
    for (int o = 0; o < static_cast<int>(a.sizes->size()); ++o)
      parts.push_back(c.has_grad(o) ? c.grad(o) : full_of(c.output_type(o).dual(), 0.0));
    c.set(0, concat_as(parts, static_cast<int>(a.dim), c.input_type(0)));
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str("dim ", a.dim);
    for (const int64_t size : *a.sizes) out += str(' ', size);
  }
};

}  // namespace

Tensor slice(const Tensor& x, int dim, int64_t begin, int64_t end, int64_t step) {
  const int d = wrap_dim("slice", dim, x);
  const int64_t size = x.shape()[d];
  if (begin < 0) begin += size;
  if (end < 0) end += size;
  if (begin < 0 || end < begin || end > size)
    fail<ShapeError>("[slice] [", begin, ",", end, ") is not within dimension ", d, " of ",
                     x.type());
  if (step < 1) fail<ShapeError>("[slice] step ", step, " along dimension ", d, " of ", x.type(), ": the least is 1");
  if (step >= end - begin) end = std::min(end, begin + 1), step = 1;  // at most one position
  return begin == 0 && end == size && step == 1 ? x : apply<SliceOp>({begin, end, d, size, step}, x);
}

Tensor pad(const Tensor& x, int dim, int64_t before, int64_t after, double value) {
  const int d = wrap_dim("pad", dim, x);
  if (before < 0 || after < 0)
    fail<ShapeError>("[pad] ", x.type(), ": negative padding ", before, ", ", after);
  return before + after == 0 ? x : apply<Pad>({before, after, d, value}, x);
}

Tensor concat(const std::vector<Tensor>& xs, int dim) {
  if (xs.empty()) fail<ShapeError>("[concat] needs a tensor");
  constexpr size_t kMost = Recording::kMostInputs;
  if (xs.size() > kMost) {
    std::vector<Tensor> joined;
    for (size_t i = 0; i < xs.size(); i += kMost) joined.push_back(concat({xs.begin() + i, xs.begin() + std::min(i + kMost, xs.size())}, dim));
    return concat(joined, dim);
  }
  const Concat::Attrs attrs{wrap_dim("concat", dim, xs[0])};
  return apply(op_def<Concat>(), &attrs, xs)[0];
}

Tensor concat_as(const std::vector<Tensor>& parts, int dim, const Type& whole) {
  if (parts.empty()) fail<ShapeError>("[concat] needs a tensor");
  const int d = wrap_dim("concat", dim, whole.shape.rank());
  const Concat::Attrs attrs{d, CutParts(whole, d)};
  if (!attrs.of_result.sizes) return concat(parts, d);
  return apply(op_def<Concat>(), &attrs, parts)[0];
}

Tensor stack(const std::vector<Tensor>& xs, int dim) {
  if (xs.empty()) fail<ShapeError>("[stack] needs a tensor");
  for (size_t i = 0; i < xs.size(); ++i) expect_defined("stack", xs[i], static_cast<int>(i));
  const int d = wrap_dim("stack", dim, xs[0].rank() + 1);
  std::vector<Tensor> rows;
  for (const Tensor& x : xs) {
    if (!(x.shape() == xs[0].shape()))
      fail<ShapeError>("[stack] ", xs[0].type(), " and ", x.type(), " differ in shape");
    rows.push_back(unsqueeze(x, {d}));
  }
  return concat(rows, d);
}

std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes, int dim) {
  const int d = wrap_dim("split", dim, x);
  int64_t total = 0;
  for (const int64_t n : sizes) {
    if (n < 0) fail<ShapeError>("[split] a part of size ", n, " of ", x.type());
    total += n;
  }
  if (total != x.shape()[d])
    fail<ShapeError>("[split] sizes add up to ", total, ", not to dimension ", d, " of ", x.type());
  if (sizes.size() < 2) return std::vector<Tensor>(sizes.size(), x);
  const Split::Attrs attrs{interned(sizes), d};
  const Tensors parts = apply(op_def<Split>(), &attrs, std::span(&x, 1));
  return {parts.begin(), parts.end()};
}

std::vector<Tensor> chunk(const Tensor& x, int64_t parts, int dim) {
  const int d = wrap_dim("split", dim, x);
  const int64_t size = x.shape()[d];
  if (parts < 1 || size % parts != 0)
    fail<ShapeError>("[split] dimension ", dim, " of ", x.type(), " does not split into ", parts,
                     " equal parts");
  return split(x, std::vector<int64_t>(static_cast<size_t>(parts), size / parts), dim);
}

}  // namespace sheaf
