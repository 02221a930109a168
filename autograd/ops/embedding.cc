// Rows of a table by token, and the table's gradient.
#include "sheaf/kernels/embedding.h"

#include "sheaf/autograd/ops/rows.h"
#include "sheaf/autograd/work.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct EmbeddingBackward {  // tokens[..], dout[.., C] -> [vocabulary, C]
  static constexpr const char* kName = "embedding_backward";
  struct Attrs {
    int64_t vocabulary;
    Layout table;
    bool operator==(const Attrs&) const = default;
  };
  static constexpr bool kCanAdd = true;
  static constexpr uint64_t kStoresWide = 0b1, kSavedInputs = 0b01;
  static void infer(const Attrs& a, Infer& c) {
    Shape rows = c.shape(0);
    rows.push_back(c.shape(1).rank() ? c.shape(1).back() : 0);
    if (!(rows == c.shape(1)))
      fail<ShapeError>("[", kName, "] rows ", c.input(1), " for tokens ", c.input(0));
    c.output(c.dtype(1), {a.vocabulary, c.shape(1).back()});
  }
  static void place(const Attrs& a, Place& p) {
    // Each rank sums the rows of its tokens.
    if (a.table.mesh() && cuts_table(a.table[p.axis()]))
      return p.rule({kR, kR}, {a.table[p.axis()]});
    row_rules(p, {.like = 1, .inputs = 0b11});
    if (p.in(1).is_shard(p.shape(1).rank() - 1))
      p.rule({kR, p.in(1)}, {Placement::shard(p.in(1).map().moved_to(1))});
    p.rule({kR, kR}, {kR});
    p.rule({kR, kP}, {kP});
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), embedding_backward, c.input(0), c.input(1), c.output(0));
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), embedding_backward, c.input(0), c.input(1),
                 part_of(c.output_type(0)), c.output(0), c.add, c.workspace);
  }
  static void vjp(const Attrs&, Vjp& c) { c.set(1, embedding(c.input(0), c.grad())); }
  static void drop_layouts(Attrs& a) { a.table = {}; }
  static void describe(const Attrs& a, std::string& out) {
    out += str("vocabulary ", a.vocabulary);
  }
};

struct Embedding {
  static constexpr const char* kName = "embedding";
  static constexpr bool kDefersWeights = true;
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b01;
  static void infer(const Attrs&, Infer& c) {
    require_floating(kName, c.dtype(1));
    if (!is_integral(c.dtype(0)) || c.shape(1).rank() != 2)
      fail<ShapeError>("[", kName, "] wants integer tokens and a table [V, C], got ", c.input(0),
                       " and ", c.input(1));
    if (c.shape(1)[0] == 0 && c.shape(0).numel() != 0)
      fail<ShapeError>("[", kName, "] tokens ", c.input(0), " of an empty table ", c.input(1));
    Shape out = c.shape(0);
    out.push_back(c.shape(1)[1]);
    c.output(c.dtype(1), out);
  }
  static void place(const Attrs&, Place& p) {
    if (cuts_table(p.in(1))) p.rule({kR, p.in(1)}, {kP});  // zeros for rows of other ranks
    if (p.in(0).is_shard() && !p.in(0).map().is_flat()) p.rule({p.in(0), kR}, {p.in(0)});
    if (p.in(1).is_shard(1))
      p.rule({kR, p.in(1)}, {Placement::shard(p.in(1).map().moved_to(p.shape(0).rank()))});
    p.rule({kR, kR}, {kR});
    p.rule({kR, kP}, {kP});
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), embedding, c.input(0), c.input(1), part_of(c.input_type(1)),
                 c.output(0));
  }
  static void work(const Attrs&, WorkOf& w) {  // reads the rows that it writes, not the whole table
    w.work.bytes = static_cast<double>(w.output(0).numel()) * 2 * static_cast<double>(size_of(w.work.dtype));
  }
  static void vjp(const Attrs&, Vjp& c) {
    c.weight_gradients(1, [tokens = c.input(0), dy = dense_rows(c.grad())](Vjp& later) {
      const Type& table = later.input_type(1);
      later.set(1, apply<EmbeddingBackward>({table.shape[0], table.layout}, {tokens, dy}, later.into(1, /*may_add=*/true)));
    });
  }
};

}  // namespace

Tensor embedding(const Tensor& tokens, const Tensor& table) {
  return apply<Embedding>({}, {tokens, dense_rows(table)});
}

}  // namespace sheaf
