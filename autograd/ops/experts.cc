// Mixtures of experts: choosing experts, rows on their way to them and back, products with the matrix of each.
//
// Sending, returning and weighting are the three contractions of one form: the sum over choices of weight · (row · y), y being
// that of the choice's token. So they are each other's derivatives.
#include "sheaf/kernels/experts.h"

#include <optional>

#include "sheaf/autograd/ops/linear.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct TopK {
  static constexpr const char* kName = "top_k";
  struct Attrs { int64_t k; };
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, c.dtype(0));
    if (c.shape(0).rank() < 1 || a.k < 0 || a.k > c.shape(0).back())
      fail<ShapeError>("[", kName, "] ", c.input(0), " has no ", a.k, " largest elements in its last dimension");
    Shape out = leading(c.shape(0));
    out.push_back(a.k);
    c.output(kI64, out);
  }
  static void place(const Attrs&, Place& p) {
    row_rules(p, 0, 0b1, 0b1, 1, 1);
    p.rule({kR}, {kR});
  }
  static void execute(const Attrs&, Execute& c) { SHEAF_ON_DEVICE(c.stream(), top_k, c.input(0), c.output(0)); }
  static void describe(const Attrs& a, std::string& out) { out += str("k ", a.k); }
};

/// A cut of sequences or of groups, as tokens have it (x, slots, weights) and as rows have it (rows, sources, counts).
struct GroupCut {
  Placement tokens, rows;
};

/// `groups` of a sequence's tokens fit a cut of the tokens if each rank has whole ones, and ranks agree where they begin: they
/// are equal, or each rank has one.
bool fits_groups(const Layout& l, int dim, const OwnershipMap& map, int64_t tokens, int64_t groups) {
  if (!(map == OwnershipMap::even(dim))) return false;
  int64_t ranks = 1;
  for (int a = 0; a < l.num_axes(); ++a)
    if (l[a].is_shard(dim)) ranks *= l.mesh()->size(a);
  return groups % ranks == 0 && (tokens % groups == 0 || groups == ranks);
}

/// What the first sharded operand says of it; `rows`: a bit for each that has the dimensions of rows. `rank`: of slots.
std::optional<GroupCut> group_cut(const Place& p, uint64_t rows, int rank, int64_t tokens, int64_t groups) {
  for (int i = 0; i < p.num_inputs(); ++i) {
    if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
    const OwnershipMap& map = p.in(i).map();
    const bool of_rows = (rows >> i) & 1;
    const int dim = of_rows ? map.dim() - 1 : map.dim();  // of tokens
    if (dim < 0 || dim > rank - 2) return {};
    if (dim == rank - 2 && !fits_groups(p.type(i).layout, map.dim(), map, tokens, groups)) return {};
    return GroupCut{Placement::shard(map.moved_to(dim)), Placement::shard(map.moved_to(dim + 1))};
  }
  return {};
}

struct Routes {  // choices[.., T, K] -> slots[.., T, K], sources[Q, .., N, R], counts[E, .., N]
  static constexpr const char* kName = "expert_routes";
  struct Attrs { int64_t experts, places, groups, parts; };
  static void infer(const Attrs& a, Infer& c) {
    const Shape& choices = c.shape(0);
    if (c.dtype(0) != kI64) fail<DTypeError>("[", kName, "] choices must be i64, not ", c.input(0));
    if (choices.rank() < 2) fail<ShapeError>("[", kName, "] choices must be [.., T, K], not ", c.input(0));
    if (a.experts < 0 || a.places < 0 || a.groups < 1 || a.parts < 0 || a.parts > a.experts || (a.parts == 0 && a.experts > 0))
      fail<ShapeError>("[", kName, "] ", a.experts, " experts in ", a.parts, " parts with ", a.places, " places in each of ", a.groups, " groups");
    const int64_t rows = rows_of_part((choices.dim(-2) + a.groups - 1) / a.groups, choices.back(), a.experts, a.places, a.parts);
    if (a.parts * rows > INT32_MAX) fail<ShapeError>("[", kName, "] ", a.parts, " parts of experts with ", rows, " rows of a group: more than 2^31");
    Shape counts = leading(leading(choices));
    counts.insert(0, a.experts);
    counts.push_back(a.groups);
    Shape sources = counts;
    sources[0] = a.parts;
    sources.push_back(rows);
    c.output(kI32, choices);
    c.output(kI32, sources);
    c.output(kI32, counts);
  }
  static void place(const Attrs& a, Place& p) {
    const int rank = p.shape(0).rank();
    if (const auto cut = group_cut(p, 0, rank, p.shape(0).dim(-2), a.groups))
      p.rule({cut->tokens}, {cut->tokens, cut->rows, cut->rows});
    p.rule({kR}, {kR, kR, kR});
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), route, c.input(0), a.places, c.output(0), c.output(1), c.output(2));
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str(a.experts, " experts, ", a.places, " places");
    if (a.parts != a.experts) out += str(", ", a.parts, a.parts == 1 ? " part" : " parts");
    if (a.groups > 1) out += str(", ", a.groups, " groups");
  }
};

/// Slots and sources are of the same routes, and weights, if there are any, of the type of computation.
void check_operands(const char* op, const Infer& c, const Shape& slots, const Shape& sources, int weights) {
  Shape want = leading(leading(slots));
  Shape have = sources;
  if (have.rank() == slots.rank() + 1) have.erase(have.rank() - 1), have.erase(have.rank() - 1), have.erase(0);
  if (!(want == have)) fail<ShapeError>("[", op, "] slots ", slots, " and sources ", sources, " are of different routes");
  if (weights >= c.num_inputs()) return;
  if (!(c.shape(weights) == slots) || c.dtype(weights) != statistics_dtype(c.dtype(0)))
    fail<ShapeError>("[", op, "] weights ", c.input(weights), " for choices ", slots, " of ", c.input(0), ": they are ",
                     statistics_dtype(c.dtype(0)));
}

struct ToExperts {  // x[.., T, C], slots, sources [, weights] -> [Q, .., N, R, C]
  static constexpr const char* kName = "to_experts";
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b1111;
  static void infer(const Attrs&, Infer& c) {
    require_floating(kName, c.dtype(0));
    check_operands(kName, c, c.shape(1), c.shape(2), 3);
    if (!(leading(c.shape(0)) == leading(c.shape(1))))
      fail<ShapeError>("[", kName, "] ", c.input(0), " for choices ", c.input(1));
    Shape out = c.shape(2);
    out.push_back(c.shape(0).back());
    c.output(c.dtype(0), out);
  }
  static void place(const Attrs&, Place& p) {
    const int rank = p.shape(1).rank();
    const auto rule = [&](const Placement& x, const Placement& slots, const Placement& sources, const Placement& weights,
                          const Placement& rows) {
      const Placement in[] = {x, slots, sources, weights};
      p.rule(std::span(in, static_cast<size_t>(p.num_inputs())), std::span(&rows, 1));
    };
    if (const auto cut = group_cut(p, 0b100, rank, p.shape(1).dim(-2), p.shape(2).dim(-2)))
      rule(cut->tokens, cut->tokens, cut->rows, cut->tokens, cut->rows);
    if (p.in(0).is_shard(rank - 1)) rule(p.in(0), kR, kR, kR, Placement::shard(p.in(0).map().moved_to(rank + 1)));
    rule(kR, kR, kR, kR, kR);
    rule(kP, kR, kR, kR, kP);
    if (p.num_inputs() == 4) rule(kR, kR, kR, kP, kP);
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), to_experts, c.input(0), c.num_inputs() == 4 ? c.input(3) : View{}, c.input(1), c.input(2),
                    c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c);
  static void saves(const Attrs&, uint64_t needs, uint64_t& in, uint64_t&) {
    in = 0b0110 | ((needs & 0b1) ? 0b1000 : 0) | ((needs & 0b1000) ? 0b1 : 0);
  }
};

struct FromExperts {  // rows[Q, .., N, R, C], slots, sources [, weights] -> [.., T, C]
  static constexpr const char* kName = "from_experts";
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b1111;
  static void infer(const Attrs&, Infer& c) {
    require_floating(kName, c.dtype(0));
    check_operands(kName, c, c.shape(1), c.shape(2), 3);
    if (!(leading(c.shape(0)) == c.shape(2))) fail<ShapeError>("[", kName, "] rows ", c.input(0), " of sources ", c.input(2));
    Shape out = leading(c.shape(1));
    out.push_back(c.shape(0).back());
    c.output(c.dtype(0), out);
  }
  static void place(const Attrs&, Place& p) {
    const int rank = p.shape(1).rank();
    const auto rule = [&](const Placement& rows, const Placement& slots, const Placement& sources, const Placement& weights,
                          const Placement& y) {
      const Placement in[] = {rows, slots, sources, weights};
      p.rule(std::span(in, static_cast<size_t>(p.num_inputs())), std::span(&y, 1));
    };
    if (const auto cut = group_cut(p, 0b101, rank, p.shape(1).dim(-2), p.shape(2).dim(-2)))
      rule(cut->rows, cut->tokens, cut->rows, cut->tokens, cut->tokens);
    if (p.in(0).is_shard(rank + 1)) rule(p.in(0), kR, kR, kR, Placement::shard(p.in(0).map().moved_to(rank - 1)));
    rule(kR, kR, kR, kR, kR);
    rule(kP, kR, kR, kR, kP);
    if (p.num_inputs() == 4) rule(kR, kR, kR, kP, kP);
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), from_experts, c.input(0), c.num_inputs() == 4 ? c.input(3) : View{}, c.input(1), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c);
  static void saves(const Attrs& a, uint64_t needs, uint64_t& in, uint64_t& out) { ToExperts::saves(a, needs, in, out); }
};

struct ChoiceDots {  // rows[Q, .., N, R, C], y[.., T, C], slots, sources -> row · y of each choice, [.., T, K]
  static constexpr const char* kName = "choice_dots";
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b1111;
  static void infer(const Attrs&, Infer& c) {
    check_operands(kName, c, c.shape(2), c.shape(3), 4);
    if (!(leading(c.shape(0)) == c.shape(3)) || !(leading(c.shape(1)) == leading(c.shape(2))) ||
        c.shape(0).back() != c.shape(1).back() || c.dtype(0) != c.dtype(1))
      fail<ShapeError>("[", kName, "] rows ", c.input(0), " and ", c.input(1), " for choices ", c.input(2));
    c.output(statistics_dtype(c.dtype(0)), c.shape(2));
  }
  static void place(const Attrs&, Place& p) {
    const int rank = p.shape(2).rank();
    if (const auto cut = group_cut(p, 0b1001, rank, p.shape(2).dim(-2), p.shape(3).dim(-2)))
      p.rule({cut->rows, cut->tokens, cut->tokens, cut->rows}, {cut->tokens});
    for (const auto& [i, last] : {std::pair{0, rank + 1}, {1, rank - 1}})
      if (p.in(i).is_shard(last)) {
        const OwnershipMap& map = p.in(i).map();
        p.rule({Placement::shard(map.moved_to(rank + 1)), Placement::shard(map.moved_to(rank - 1)), kR, kR}, {kP});
        break;
      }
    p.rule({kR, kR, kR, kR}, {kR});
    p.rule({kP, kR, kR, kR}, {kP});
    p.rule({kR, kP, kR, kR}, {kP});
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), choice_dots, c.input(0), c.input(1), c.input(2), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {
    const ExpertRoutes routes{c.input(2), c.input(3), {}};
    if (c.needs(0)) c.set(0, to_experts(c.input(1), routes, c.grad()));
    if (c.needs(1)) c.set(1, from_experts(c.input(0), routes, c.grad()));
  }
  static void saves(const Attrs&, uint64_t needs, uint64_t& in, uint64_t&) {
    in = 0b1100 | ((needs & 0b1) ? 0b10 : 0) | ((needs & 0b10) ? 0b1 : 0);
  }
};

Tensor choice_dots(const Tensor& rows, const Tensor& y, const Tensor& slots, const Tensor& sources) {
  return apply<ChoiceDots>({}, {contiguous(rows), contiguous(y), slots, sources});
}

void ToExperts::vjp(const Attrs&, Vjp& c) {
  const ExpertRoutes routes{c.input(1), c.input(2), {}};
  const bool weighted = c.num_inputs() == 4;
  if (c.needs(0)) c.set(0, from_experts(c.grad(), routes, weighted ? c.input(3) : Tensor()));
  if (weighted && c.needs(3)) c.set(3, choice_dots(c.grad(), c.input(0), routes.slots, routes.sources));
}

void FromExperts::vjp(const Attrs&, Vjp& c) {
  const ExpertRoutes routes{c.input(1), c.input(2), {}};
  const bool weighted = c.num_inputs() == 4;
  if (c.needs(0)) c.set(0, to_experts(c.grad(), routes, weighted ? c.input(3) : Tensor()));
  if (weighted && c.needs(3)) c.set(3, choice_dots(c.input(0), c.grad(), routes.slots, routes.sources));
}

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

/// Whether ranks of this axis may have experts of their own: their rows are, which stand in parts.
bool cuts_experts(const Place& p, const Shape& rows, const Shape& counts) {
  if (rows[0] == counts[0]) return true;
  for (int i = 0; i < p.num_inputs(); ++i)
    if (p.in(i).is_shard(0)) return rows[0] == p.type(i).layout.mesh()->size(p.axis());
  return false;
}

/// What ExpertLinear and its gradients of weights know of their rows.
struct ExpertAttrs {
  bool fp8;
  double fill;  ///< ExpertLinearOptions's

  kernels::ExpertProduct how() const { return {fp8, fill * kernels::own_cost(fp8) <= 1}; }
  /// Whether a GPU's own kernel makes the product: then of rows in use alone, and never in FP8.
  bool is_own(const Shape& rows, int64_t experts) const { return rows[0] != experts || how().mostly_empty; }
  /// Of a product of all rows.
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
        if (cuts_experts(p, p.shape(0), p.shape(1))) p.rule({cut, cut}, {cut});
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
  static void vjp(const Attrs&, Vjp& c) {  // g[E, O] to each row in use: as a product with zeros adds it
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
        if (cuts_experts(p, p.shape(0), p.shape(2))) p.rule({cut, cut, cut}, {cut});
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
  static constexpr bool kWeightsLater = true;
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
        if (cuts_experts(p, p.shape(0), p.shape(2))) rule(cut, cut, cut, cut, cut);
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
    c.weights(1, [dy, x, of_bias, counts = c.input(2), fill = a.fill](Vjp& c) {
      if (x) c.set(1, apply<ExpertWeightGradient>({.fp8 = false, .fill = fill}, {dy, x, counts}, c.into(1)));
      if (of_bias) c.set(3, apply<ExpertBiasGradient>({}, {dy, counts}, c.into(3)));
    });
  }
  static void saves(const Attrs&, uint64_t needs, uint64_t& in, uint64_t&) {
    in = 0b100 | ((needs & 1) ? 0b10 : 0) | ((needs & 2) ? 0b01 : 0);
  }
};

template <class Op>
Tensor apply_routed(const Tensor& x, const ExpertRoutes& routes, const Tensor& weights) {
  std::vector<Tensor> inputs{contiguous(x), routes.slots, routes.sources};
  if (weights) inputs.push_back(contiguous(weights));
  return std::move(apply(op_def<Op>(), nullptr, inputs)[0]);
}

}  // namespace

Tensor top_k(const Tensor& x, int64_t k) { return apply<TopK>({k}, contiguous(x)); }

int64_t rows_of_part(int64_t tokens, int64_t choices, int64_t experts, int64_t places, int64_t parts) {
  if (parts == experts) return places;
  const int64_t together = (experts + parts - 1) / parts;
  return std::min(tokens * std::min(choices, together), together * std::min(places, tokens));
}

ExpertRoutes expert_routes(const Tensor& choices, int64_t experts, int64_t places, int64_t groups, int64_t parts) {
  const auto routes = apply_all<Routes>({experts, places, groups, parts ? parts : experts}, {contiguous(choices)});
  return {routes[0], routes[1], routes[2]};
}

Tensor to_experts(const Tensor& x, const ExpertRoutes& routes, const Tensor& weights) {
  return apply_routed<ToExperts>(x, routes, weights);
}
Tensor from_experts(const Tensor& rows, const ExpertRoutes& routes, const Tensor& weights) {
  return apply_routed<FromExperts>(rows, routes, weights);
}
Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& counts, const ExpertLinearOptions& options) {
  const ExpertAttrs attrs{rounds_of(options.fp8, x, weight).fp8, options.fill};
  if (!options.bias) return apply<ExpertLinear>(attrs, {contiguous(x), weight, contiguous(counts)});
  return apply<ExpertLinear>(attrs, {contiguous(x), weight, contiguous(counts), contiguous(options.bias)});
}

}  // namespace sheaf
