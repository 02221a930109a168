// Mixtures of experts: products of rows with their expert's matrix, and their gradients.
#include <algorithm>

#include "sheaf/autograd/ops/linear.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/experts.h"

namespace sheaf {
namespace {

using namespace ops;

void check_rows(const char* op, const Infer& c, int rows, int counts) {
  const auto fits = [&] {
    if (c.shape(rows).rank() < 3 || c.shape(counts).rank() < 1 || c.dtype(counts) != kI32) return false;
    Shape groups = leading(leading(c.shape(rows)));
    const int64_t parts = groups[0], experts = c.shape(counts)[0];
    groups[0] = experts;
    return groups == c.shape(counts) && parts <= experts && (parts > 0 || experts == 0);
  };
  if (!fits()) fail<ShapeError>("[", op, "] rows ", c.input(rows), " need i32 counts of experts' rows in their groups, not ", c.input(counts));
}

/// Whether this axis may shard the experts by `cut`: their rows are then sharded by parts.
bool cuts_experts(const Place& p, const OwnershipMap& cut, const Shape& rows, const Shape& counts) {
  if (rows[0] == counts[0]) return true;
  if (!(cut == OwnershipMap::even(0))) return false;
  for (int i = 0; i < p.num_inputs(); ++i)
    if (p.in(i).is_shard(0)) return rows[0] == p.type(i).layout.mesh()->size(p.axis());
  return false;
}

/// Attributes of ExpertLinear and its weight gradients: what is known of their rows.
struct ExpertAttrs {
  bool fp8;
  double fill;  ///< ExpertLinearOptions's

  kernels::ExpertProduct how() const { return {fp8, fill * kernels::own_cost(fp8) <= 1}; }
  /// Whether a GPU uses our own kernel for the product: then only for rows in use, and never in FP8.
  bool is_own(const Shape& rows, int64_t experts) const { return rows[0] != experts || how().mostly_empty; }
  /// The work of a product over all rows.
  double work(double products, bool own) const { return own ? products * fill * kernels::own_cost(false) : products; }
};

struct ExpertBiasGradient {  // dy[Q, .., R, O], counts[E, ..] -> the sums [E, O] of the rows of an expert
  static constexpr const char* kName = "expert_bias_gradient";
  static constexpr uint64_t kStoresWide = 0b1;
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b10;
  static void infer(const Attrs&, Infer& c) {
    check_rows(kName, c, 0, 1);
    require_floating(kName, c.dtype(0));
    c.output(c.dtype(0), {c.shape(1)[0], c.shape(0).back()});
  }
  static void place(const Attrs&, Place& p) {
    const int last = p.shape(0).rank() - 1;
    const OwnershipMap* map = p.sharded();
    if (map && !map->is_flat()) {
      const Placement cut = Placement::shard(*map);
      if (map->dim() == 0) {
        if (cuts_experts(p, *map, p.shape(0), p.shape(1))) p.rule({cut, cut}, {cut});
      } else if (map->dim() < last - 1) p.rule({cut, cut}, {kP});
      else if (p.in(0).is_shard(last)) p.rule({cut, kR}, {Placement::shard(map->moved_to(1))});
    }
    p.rule({kR, kR}, {kR});
    p.rule({kP, kR}, {kP});
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), expert_bias_gradient, c.input(0), c.input(1), c.output(0));
  }
  static void execute(const Attrs&, Execute& c) {
    const Stream stream = c.stream();
    SHEAF_ON_DEVICE_SCRATCH(stream, c.workspace, expert_bias_gradient, c.input(0), c.input(1), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {  // adds g[E, O] to each row in use: as a product with zeros does
    Type none = c.input_type(0);
    none.shape[none.shape.rank() - 1] = 1;
    const int last = none.shape.rank() - 1;
    for (int a = 0; a < none.layout.num_axes(); ++a)
      if (none.layout[a].is_partial() || none.layout[a].is_shard(last)) none.layout[a] = kR;
    const Tensor g = c.grad();
    c.set(0, expert_linear(full_of(none, 0.0), full_of({g.dtype(), {g.size(0), g.size(1), 1}, g.layout()}, 0.0), c.input(1), {.bias = g}));
  }
};

struct ExpertWeightGradient {  // dy[Q, .., R, O], x[Q, .., R, I], counts[E, ..] -> dyᵀ x [E, O, I] over the rows of an expert
  static constexpr const char* kName = "expert_weight_gradient";
  static constexpr uint64_t kStoresWide = 0b1;
  using Attrs = ExpertAttrs;
  static constexpr uint64_t kSavedInputs = 0b111;
  static void infer(const Attrs&, Infer& c) {
    check_rows(kName, c, 0, 2);
    check_rows(kName, c, 1, 2);
    if (!(leading(c.shape(0)) == leading(c.shape(1))) || c.dtype(0) != c.dtype(1))
      fail<ShapeError>("[", kName, "] rows of ", c.input(0), " and ", c.input(1), " differ");
    c.output(c.dtype(0), {c.shape(2)[0], c.shape(0).back(), c.shape(1).back()});
  }
  static void place(const Attrs&, Place& p) {
    const int last = p.shape(0).rank() - 1;
    const OwnershipMap* map = p.sharded();
    if (map && !map->is_flat()) {
      const Placement cut = Placement::shard(*map);
      if (map->dim() == 0) {
        if (cuts_experts(p, *map, p.shape(0), p.shape(2))) p.rule({cut, cut, cut}, {cut});
      } else if (map->dim() < last - 1) p.rule({cut, cut, cut}, {kP});
      else if (p.in(0).is_shard(last)) p.rule({cut, kR, kR}, {Placement::shard(map->moved_to(1))});
      else if (p.in(1).is_shard(last)) p.rule({kR, cut, kR}, {Placement::shard(map->moved_to(2))});
    }
    p.rule({kR, kR, kR}, {kR});
    p.rule({kP, kR, kR}, {kP});
    p.rule({kR, kP, kR}, {kP});
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), expert_weight_gradient, c.input(0), c.input(1), c.input(2), c.output(0), a.how().mostly_empty);
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    SHEAF_ON_DEVICE(stream, expert_weight_gradient, c.input(0), c.input(1), c.input(2), c.output(0), c.workspace, a.how().mostly_empty);
  }
  static void work(const Attrs& a, WorkOf& w) {
    const Shape& dy = w.input(0);
    const int64_t experts = w.input(2)[0];
    w.multiplies(experts * dy.back(), dy.numel() / std::max<int64_t>(1, experts * dy.back()), w.input(1).back(), experts);
    w.work.products = a.work(w.work.products, a.is_own(dy, experts));
  }
  static void vjp(const Attrs& a, Vjp& c) {  // g[E, O, I]: dy gets x gᵀ, x gets dy g
    if (c.needs(0)) c.set(0, expert_linear(c.input(1), c.grad(), c.input(2), {.fill = a.fill}));
    if (c.needs(1)) c.set(1, expert_linear(c.input(0), transpose(c.grad(), -1, -2), c.input(2), {.fill = a.fill}));
  }
  static void saves(const Attrs&, uint64_t needs, uint64_t& in, uint64_t&) {
    in = 0b100 | ((needs & 1) ? 0b10 : 0) | ((needs & 2) ? 0b01 : 0);
  }
};

struct ExpertLinear {  // x[Q, .., R, I], weight[E, O, I], counts[E, ..] [, bias[E, O]] -> [Q, .., R, O]
  static constexpr const char* kName = "expert_linear";
  static constexpr bool kDefersWeights = true;
  // If all experts are one part, some sequences at a time, or groups of one; if each expert is a part, some of the parts.
  static constexpr PartDims kParts = {{0, 0, 0, 0}, {0}}, kSequences = {{1, -1, 1, -1}, {1}}, kGroups = {{2, -1, 2, -1}, {2}};
  static const PartDims* row_parts(const Shape& x) {
    const int leading = x.rank() - 2;
    if (x[0] > 1) return &kParts;
    if (leading > 1 && x[1] > 1) return &kSequences;
    return leading > 2 && x[2] > 1 ? &kGroups : nullptr;
  }
  using Attrs = ExpertAttrs;
  static void describe(const Attrs& a, std::string& out) { describe_rounds({a.fp8}, out); }
  static constexpr bool kMarked = true;
  static constexpr uint64_t kSavedInputs = 0b111;
  static void infer(const Attrs& a, Infer& c) {
    check_rows(kName, c, 0, 2);
    const Shape &x = c.shape(0), &w = c.shape(1);
    if (w.rank() != 3 || w[0] != c.shape(2)[0] || w[2] != x.back() || c.dtype(0) != c.dtype(1))
      fail<ShapeError>("[", kName, "] rows ", c.input(0), " do not fit weights ", c.input(1), ": wants [Q, .., R, I] and [E, O, I]");
    if (c.num_inputs() > 3 && (!(c.shape(3) == Shape{w[0], w[1]}) || c.dtype(3) != c.dtype(1)))
      fail<ShapeError>("[", kName, "] bias ", c.input(3), " does not fit weights ", c.input(1), ": wants [E, O]");
    require_floating(kName, c.dtype(0));
    require_fp8(kName, a.fp8, c.dtype(0));
    Shape out = leading(x);
    out.push_back(w[1]);
    c.output(c.dtype(0), out);
  }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    const auto rule = [&](const Placement& x, const Placement& weight, const Placement& counts, const Placement& bias, const Placement& y) {
      const Placement in[] = {x, weight, counts, bias};
      p.rule(std::span(in, static_cast<size_t>(p.num_inputs())), std::span(&y, 1));
    };
    for (int i = 0; i < p.num_inputs(); ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      const OwnershipMap& map = p.in(i).map();
      const Placement cut = Placement::shard(map), of_last = Placement::shard(map.moved_to(last));
      const bool of_weight = i == 1 || i == 3;
      if (map.dim() == 0) {
        if (cuts_experts(p, map, p.shape(0), p.shape(2))) rule(cut, cut, cut, cut, cut);
      } else if (of_weight && map.dim() == 1) rule(kR, cut, kR, cut, of_last);
      else if (i == 1 || map.dim() == last) rule(of_last, Placement::shard(map.moved_to(2)), kR, kP, kP);
      else if (map.dim() < last - 1) rule(cut, kR, cut, kR, cut);
      break;
    }
    rule(kR, kR, kR, kR, kR);
    if (a.fp8) return;
    rule(kP, kR, kR, kP, kP);
    rule(kR, kP, kR, kP, kP);
  }
  static uint64_t row_inputs(const Attrs& a, InputTypes in) {
    const int64_t parts = in[0]->shape[0];  // of any rank: tapes are read elsewhere, too
    return !a.fp8 && (parts == in[2]->shape[0] || parts == table_parts(in[0]->layout)) ? 0b1 : 0;
  }
  static double products(const Attrs& a, InputTypes in) { return products_of(in[0]->shape, in[2]->shape, a.fill); }
  static double products_of(const Shape& x, const Shape& counts, double fill) {
    return static_cast<double>(counts[0]) / (static_cast<double>(x[0]) * fill);
  }
  static View bias_of(const Execute& c) { return c.num_inputs() > 3 ? c.input(3) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), expert_linear, c.input(0), c.input(1), bias_of(c), c.input(2), c.output(0), a.how());
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    SHEAF_ON_DEVICE(stream, expert_linear, c.input(0), c.input(1), bias_of(c), c.input(2), c.output(0), c.workspace, a.how());
  }
  static void work(const Attrs& a, WorkOf& w) {
    const Shape& x = w.input(0);
    w.multiplies(x.numel() / std::max<int64_t>(1, x.back()), x.back(), w.input(1)[1], w.input(1)[0]);
    const bool own = a.is_own(x, w.input(1)[0]);
    w.work.products = a.work(w.work.products, own);
    if (a.fp8 && !own) rounds(w, x.numel() + w.input(1).numel(), 0);
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor dy = contiguous(c.grad());
    if (c.needs(0)) c.set(0, expert_linear(dy, transpose(c.input(1), -1, -2), c.input(2), {.fp8 = a.fp8, .fill = a.fill}));
    const bool of_bias = c.num_inputs() > 3 && c.needs(3);
    if (!c.needs(1) && !of_bias) return;
    const Tensor x = c.needs(1) ? c.input(0) : Tensor();
    c.weight_gradients(1, [dy, x, of_bias, counts = c.input(2), fill = a.fill](Vjp& c) {
      if (x) c.set(1, apply<ExpertWeightGradient>({.fp8 = false, .fill = fill}, {dy, x, counts}, c.into(1)));
      if (of_bias) c.set(3, apply<ExpertBiasGradient>({}, {dy, counts}, c.into(3)));
    });
  }
  static void saves(const Attrs&, uint64_t needs, uint64_t& in, uint64_t&) {
    in = 0b100 | ((needs & 1) ? 0b10 : 0) | ((needs & 2) ? 0b01 : 0);
  }
};

}  // namespace

Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& counts, const ExpertLinearOptions& options) {
  expect_all_defined("expert_linear", {&x, &weight, &counts});
  const ExpertAttrs attrs{rounds_of(options.fp8, x, weight).fp8, options.fill};
  std::vector<Tensor> inputs{contiguous(x), weight, contiguous(counts)};
  if (options.bias) inputs.push_back(contiguous(options.bias));
  return apply_and_redistribute(op_def<ExpertLinear>(), &attrs, inputs, options.output_layout);
}

double expert_products(const Tensor& x, const Tensor& counts, double fill) { return ExpertLinear::products_of(x.shape(), counts.shape(), fill); }

}  // namespace sheaf
