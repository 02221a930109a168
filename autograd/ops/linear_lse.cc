// Each vocabulary shard's contribution to the loss of a linear head whose weight's rows are sharded.
#include "sheaf/autograd/ops/cross_entropy.h"
#include "sheaf/autograd/ops/relabel.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf {
namespace {

using namespace ops;

/// Whether `rows` shards a leading dimension of x[.., C]. Targets[..] and their values are then sharded alike, and values [M, ..] one
/// dimension further on.
bool cuts_rows(const Place& p, const Placement& rows) {
  return rows.is_shard() && !rows.map().is_flat() && rows.map().dim() < p.shape(0).rank() - 1;
}
Placement behind_parts(const Placement& rows) {
  return Placement::shard(rows.map().moved_to(rows.map().dim() + 1));
}

/// Axes on which ranks have parts of a table's rows. Where a part can be treated as a whole table, the rank's own is: on such an axis
/// sharded values become Replicate, of their local size, as in a local_map; on other axes nothing changes.
class TableParts {
 public:
  explicit TableParts(const Type& table) : table_(table.layout) {
    Layout cut = table_;
    for (int a = 0; a < cut.num_axes(); ++a)
      if (!is_cut(a)) cut[a] = kR;
    const auto all = cut.local_rows(table.shape, 0);
    if (!all.empty()) here_ = all[0];
  }
  Interval here() const { return here_; }
  /// For x sharded on these axes along dimension 0: its local `rows`.
  Tensor enter(const Tensor& x, int64_t rows) const {
    Type here = x.type();
    here.shape[0] = rows;
    return relabelled(x, here, /*enters=*/true, [](int) { return kR; });
  }
  /// Back to a value sharded as `whole` is.
  Tensor leave(const Tensor& x, const Type& whole) const {
    Type all = x.type();
    all.shape[0] = whole.shape[0];
    return relabelled(x, all, /*enters=*/false, [&](int axis) { return whole.layout[axis]; });
  }
  /// Back, as each rank's addend of the whole.
  Tensor leave_addend(const Tensor& x) const {
    return relabelled(x, x.type(), /*enters=*/false, [](int) { return kP; });
  }

 private:
  bool is_cut(int axis) const { return cuts_table(table_[axis]); }
  template <class F>
  Tensor relabelled(const Tensor& x, Type type, bool enters, F&& placement_on) const {
    bool any = false;
    for (int a = 0; a < table_.num_axes(); ++a)
      if (is_cut(a)) type.layout[a] = placement_on(a), any = true;
    return any ? relabel(x, type, enters) : x;
  }
  Layout table_;
  Interval here_;
};

struct LinearLseBackward : HeadGradients {  // x, weight, targets, lse, dlse, dtarget_logits
  static constexpr const char* kName = "linear_lse_backward";
  static void place(const Attrs& a, Place& p) {
    const auto rule = [&](std::initializer_list<Placement> in, const Placement& dweight, const Placement& dx) {
      std::vector<Placement> out;
      if (a.dweight) out.push_back(dweight);
      if (a.dx) out.push_back(dx);
      p.rule(std::span(in.begin(), in.size()), out);
    };
    const Placement part = Placement::shard(0);
    if (cuts_table(p.in(1))) rule({kR, p.in(1), kR, part, part, kR}, p.in(1), kP);
    for (const int i : {0, 2, 5}) {
      const Placement& rows = p.in(i);
      if (!cuts_rows(p, rows)) continue;
      rule({rows, kR, rows, behind_parts(rows), behind_parts(rows), rows}, kP, rows);
      break;
    }
    rule({kR, kR, kR, kR, kR, kR}, kR, kR);
    rule({kR, kR, kR, kR, kP, kP}, kP, kP);  // linear in both gradients
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_lse_backward, c.input(0), c.input(1), dx(a, c), dweight(a, c));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_lse_backward, c.input(0), c.input(1), part_of(c.input_type(1)), c.input(2),
                 head_rules(a), c.input(3), c.input(4), c.input(5), dx(a, c), dweight(a, c), c.workspace);
  }
  static void work(const Attrs& a, WorkOf& w) { head(w, 1 + a.dweight + a.dx); }
  static constexpr uint64_t kSavedInputs = 0b110111;
  static void vjp(const Attrs& a, Vjp& c) {
    const TableParts parts(c.input_type(1));
    const int64_t here = parts.here().size();
    HeadBackwardOperands u = of_results(a, c);
    if (u.weight) u.weight = parts.enter(u.weight, here);
    const HeadBackwardOperands d =
        head_second({c.input(0), parts.enter(c.input(1), here), squeeze(parts.enter(c.input(4), 1), {0}), c.input(5)}, u, c.input(2),
                    head_rules(a), parts.here().begin);
    c.set(0, parts.leave_addend(d.x));
    c.set(1, parts.leave(d.weight, c.input_type(1)));
    c.set(4, parts.leave(unsqueeze(d.dlse, {0}), c.input_type(4)));
    c.set(5, parts.leave_addend(d.dtarget));
  }
};

struct LinearLseOp {  // x[.., C], weight[V, C], targets[..] -> lse[M, ..], target_logits[..]
  static constexpr const char* kName = "linear_lse";
  struct Attrs {
    int64_t ignore_index;
    double softcap;
    int64_t parts;
  };
  static constexpr uint64_t kSavedInputs = 0b111, kSavedOutputs = 0b01;
  static void infer(const Attrs& a, Infer& c) {
    check_head(kName, c);
    if (a.parts != table_parts(c.input(1).layout))
      fail<ShapeError>("[", kName, "] weight ", c.input(1), " is not cut in ", a.parts, " parts");
    Shape per_part = leading(c.shape(0));
    per_part.insert(0, a.parts);
    c.output(statistics_dtype(c.dtype(0)), per_part);
    c.output(statistics_dtype(c.dtype(0)), leading(c.shape(0)));
  }
  static void place(const Attrs&, Place& p) {
    if (cuts_table(p.in(1))) p.rule({kR, p.in(1), kR}, {Placement::shard(0), kP});
    for (const int i : {0, 2}) {
      const Placement& rows = p.in(i);
      if (!cuts_rows(p, rows)) continue;
      p.rule({rows, kR, rows}, {behind_parts(rows), rows});
      break;
    }
    rule_all(p, kR, kR, 2);
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_lse, c.input(0), c.input(1));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_lse, c.input(0), c.input(1), part_of(c.input_type(1)), c.input(2),
                 head_rules(a), c.output(0), c.output(1), c.workspace);
  }
  static void work(const Attrs&, WorkOf& w) { head(w, 1); }
  static void vjp(const Attrs& a, Vjp& c) {
    const auto grad = [&](int o) {
      return c.has_grad(o) ? c.grad(o) : zeros(c.output_type(o).shape, c.output_type(o).dtype);
    };
    HeadGradients::set<LinearLseBackward>(
        {a.ignore_index, a.softcap}, {c.input(0), c.input(1), c.input(2), c.output(0), grad(0), grad(1)}, c);
  }
  static void describe(const Attrs& a, std::string& out) {
    describe_head(a, out);
    out += str(" parts ", a.parts);
  }
};

}  // namespace

LinearLse linear_lse(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t ignore_index, double softcap) {
  expect_all_defined("linear_lse", {&x, &weight, &targets});
  check_softcap("linear_lse", softcap);
  auto y = apply_all<LinearLseOp>({ignore_index, softcap, table_parts(weight.layout())}, {dense_rows(x), weight, targets});
  return {std::move(y[0]), std::move(y[1])};
}

}  // namespace sheaf
