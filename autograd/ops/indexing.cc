// Selecting and accumulating elements by index, and running sums: all linear in their floating operands. And document_begins.
#include "sheaf/kernels/indexing.h"

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct DimAttrs {
  int32_t dim;
  bool reverse = false;  ///< cumsum
  char unused[3] = {};
};

void require_index(const char* op, const Type& t) {
  if (is_floating(t.dtype) || t.dtype == kBool || t.dtype == kI8)
    fail<DTypeError>("[", op, "] an index must be i64, i32, u32, u16 or u8, not ", t);
}
/// Whatever the indices, nothing can be taken from an empty dimension.
void require_elements(const char* op, const Type& x, int dim, const Type& index) {
  if (x.shape[dim] == 0 && index.shape.numel() > 0)
    fail<ShapeError>("[", op, "] dimension ", dim, " of ", x, " has no elements to index");
}
void require_lines(const char* op, const Type& a, const Type& b, int dim) {
  Shape x = a.shape, y = b.shape;
  if (x.rank() == y.rank()) x[dim] = y[dim];
  if (!(x == y)) fail<ShapeError>("[", op, "] ", a, " and ", b, " differ in other dimensions than ", dim);
}

/// The shard of a dimension other than `dim`, if there is one.
const OwnershipMap* cut_beside(const Place& p, int dim) {
  const OwnershipMap* map = p.sharded();
  return map && !map->is_flat() && map->dim() != dim ? map : nullptr;
}

/// For the gradient of x: many addends may belong to one element, so they are not rounded each, nor a parameter's sum.
Tensor zero_sums(const Type& x) {
  Type sums = x.dual();
  sums.dtype = statistics_dtype(x.dtype);
  return full_of(sums, 0.0);
}

struct Gather {
  static constexpr const char* kName = "gather";
  using Attrs = DimAttrs;
  static constexpr uint64_t kSavedInputs = 0b10;
  static void infer(const Attrs& a, Infer& c) {
    require_index(kName, c.input(1));
    require_lines(kName, c.input(0), c.input(1), a.dim);
    require_elements(kName, c.input(0), a.dim, c.input(1));
    c.output(c.dtype(0), c.shape(1));
  }
  static void place(const Attrs& a, Place& p) {
    if (const OwnershipMap* map = cut_beside(p, a.dim))
      rule_all(p, Placement::shard(*map), Placement::shard(*map));
    if (p.in(1).is_shard(a.dim)) p.rule({kR, p.in(1)}, {p.in(1)});
    p.rule({kR, kR}, {kR});
    p.rule({kP, kR}, {kP});
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), gather, c.input(0), a.dim, c.input(1), c.output(0));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    c.set(0, scatter_add(zero_sums(c.input_type(0)), a.dim, c.input(1), in_statistics_dtype(c.grad())));
  }
  static void describe(const Attrs& a, std::string& out) { out += str("dim ", a.dim); }
};

struct ScatterAdd {  // inputs x, index, src
  static constexpr const char* kName = "scatter_add";
  using Attrs = DimAttrs;
  static constexpr uint64_t kSavedInputs = 0b010;
  static void infer(const Attrs& a, Infer& c) {
    require_index(kName, c.input(1));
    require_lines(kName, c.input(0), c.input(1), a.dim);
    require_elements(kName, c.input(0), a.dim, c.input(1));
    if (!(c.shape(1) == c.shape(2)))
      fail<ShapeError>("[scatter_add] index ", c.input(1), " and source ", c.input(2));
    if (c.dtype(0) != c.dtype(2))
      fail<DTypeError>("[scatter_add] ", c.input(0), " and ", c.input(2));
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs& a, Place& p) {
    if (const OwnershipMap* map = cut_beside(p, a.dim))
      rule_all(p, Placement::shard(*map), Placement::shard(*map));
    if (p.in(1).is_shard(a.dim)) p.rule({kP, p.in(1), p.in(1)}, {kP});
    p.rule({kR, kR, kR}, {kR});
    p.rule({kP, kR, kP}, {kP});
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), copy, c.input(0), c.output(0));
    SHEAF_ON_DEVICE(c.stream(), scatter_add, c.output(0), a.dim, c.input(1), c.input(2));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (c.needs(0)) c.set(0, c.grad());
    if (c.needs(2)) c.set(2, gather(c.grad(), a.dim, c.input(1)));
  }
  static void describe(const Attrs& a, std::string& out) { out += str("dim ", a.dim); }
};

struct Take {  // inputs x, 1-D index
  static constexpr const char* kName = "take";
  using Attrs = DimAttrs;
  static constexpr uint64_t kSavedInputs = 0b10;
  static void infer(const Attrs& a, Infer& c) {
    require_index(kName, c.input(1));
    require_elements(kName, c.input(0), a.dim, c.input(1));
    Shape out = c.shape(0);
    out[a.dim] = c.shape(1)[0];
    c.output(c.dtype(0), out);
  }
  static void place(const Attrs& a, Place& p) {
    if (const Placement& x = p.in(0); x.is_shard() && !x.map().is_flat() && x.map().dim() != a.dim)
      p.rule({x, kR}, {x});
    if (p.in(1).is_shard(0))
      p.rule({kR, p.in(1)}, {Placement::shard(p.in(1).map().moved_to(a.dim))});
    p.rule({kR, kR}, {kR});
    p.rule({kP, kR}, {kP});
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), take, c.input(0), a.dim, c.input(1), c.output(0));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    c.set(0, index_add(zero_sums(c.input_type(0)), a.dim, c.input(1), in_statistics_dtype(c.grad())));
  }
  static void describe(const Attrs& a, std::string& out) { out += str("dim ", a.dim); }
};

struct IndexAdd {  // inputs x, 1-D index, src
  static constexpr const char* kName = "index_add";
  using Attrs = DimAttrs;
  static constexpr uint64_t kSavedInputs = 0b010;
  static void infer(const Attrs& a, Infer& c) {
    require_index(kName, c.input(1));
    require_lines(kName, c.input(0), c.input(2), a.dim);
    require_elements(kName, c.input(0), a.dim, c.input(1));
    if (c.shape(1).rank() != 1 || c.shape(1)[0] != c.shape(2)[a.dim])
      fail<ShapeError>("[index_add] index ", c.input(1), " does not fit dimension ", a.dim, " of ",
                       c.input(2));
    if (c.dtype(0) != c.dtype(2)) fail<DTypeError>("[index_add] ", c.input(0), " and ", c.input(2));
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs& a, Place& p) {
    for (const int i : {0, 2})
      if (const Placement& x = p.in(i);
          x.is_shard() && !x.map().is_flat() && x.map().dim() != a.dim)
        p.rule({x, kR, x}, {x});
    if (p.in(1).is_shard(0))
      p.rule({kP, p.in(1), Placement::shard(p.in(1).map().moved_to(a.dim))}, {kP});
    p.rule({kR, kR, kR}, {kR});
    p.rule({kP, kR, kP}, {kP});
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), copy, c.input(0), c.output(0));
    SHEAF_ON_DEVICE(c.stream(), take_add, c.output(0), a.dim, c.input(1), c.input(2));
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (c.needs(0)) c.set(0, c.grad());
    if (c.needs(2)) c.set(2, take(c.grad(), c.input(1), a.dim));
  }
  static void describe(const Attrs& a, std::string& out) { out += str("dim ", a.dim); }
};

struct Cumsum {
  static constexpr const char* kName = "cumsum";
  using Attrs = DimAttrs;
  static void infer(const Attrs&, Infer& c) {
    c.output(is_floating(c.dtype(0)) ? c.dtype(0) : kI64, c.shape(0));
  }
  static void place(const Attrs& a, Place& p) {
    if (const OwnershipMap* map = cut_beside(p, a.dim))
      rule_all(p, Placement::shard(*map), Placement::shard(*map));
    rule_all(p, kR, kR);
    rule_all(p, kP, kP);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), cumsum, c.input(0), a.dim, a.reverse, c.output(0));
  }
  static void vjp(const Attrs& a, Vjp& c) { c.set(0, cumsum(c.grad(), a.dim, !a.reverse)); }
  static void describe(const Attrs& a, std::string& out) {
    out += str("dim ", a.dim, a.reverse ? " reverse" : "");
  }
};

struct DocumentBegins {
  static constexpr const char* kName = "document_begins";
  struct Attrs {
    int64_t end_of_text;
  };
  static void infer(const Attrs&, Infer& c) {
    require_index(kName, c.input(0));
    if (c.shape(0).rank() == 0) fail<ShapeError>("[", kName, "] wants tokens [.., T], not ", c.input(0));
    c.output(kI32, c.shape(0));
  }
  static void place(const Attrs&, Place& p) {
    if (const OwnershipMap* map = cut_beside(p, p.shape(0).rank() - 1))
      rule_all(p, Placement::shard(*map), Placement::shard(*map));
    rule_all(p, kR, kR);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), document_begins, c.input(0), a.end_of_text, c.output(0));
  }
  static void describe(const Attrs& a, std::string& out) { out += str("end of text ", a.end_of_text); }
};

}  // namespace

Tensor gather(const Tensor& x, int dim, const Tensor& index) {
  return apply<Gather>({wrap_dim("gather", dim, x)}, {x, index});
}
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& src) {
  return apply<ScatterAdd>({wrap_dim("scatter_add", dim, x)}, {x, index, src});
}
Tensor take(const Tensor& x, const Tensor& index, int dim) {
  const int d = wrap_dim("take", dim, x);
  expect_defined("take", index, 1);
  if (index.rank() == 1) return apply<Take>({d}, {x, index});
  Shape shape = x.shape();
  shape.erase(d);
  for (int i = 0; i < index.rank(); ++i) shape.insert(d + i, index.shape()[i]);
  return reshape(apply<Take>({d}, {x, reshape(index, {index.numel()})}), shape);
}
Tensor index_add(const Tensor& x, int dim, const Tensor& index, const Tensor& src) {
  return apply<IndexAdd>({wrap_dim("index_add", dim, x)}, {x, index, src});
}
Tensor cumsum(const Tensor& x, int dim, bool reverse) {
  return apply<Cumsum>({wrap_dim("cumsum", dim, x), reverse}, x);
}
Tensor document_begins(const Tensor& tokens, int64_t end_of_text) { return apply<DocumentBegins>({end_of_text}, tokens); }

}  // namespace sheaf
