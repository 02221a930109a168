// Mixtures of experts: choosing experts, sending rows to them and returning the results.
//
// Sending, returning and weighting are the three contractions of one trilinear form: the sum over choices of weight · (row · y),
// where y belongs to the choice's token. So they are each other's derivatives. If ranks have all tokens, and each a part of the
// experts with their rows, sending moves nothing, and the returned values are addends.
#include "sheaf/kernels/experts.h"

#include <optional>

#include "sheaf/autograd/ops/rows.h"
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
    row_rules(p, {.inputs = 0b1, .outputs = 0b1});
    p.rule({kR}, {kR});
  }
  static void execute(const Attrs&, Execute& c) { SHEAF_ON_DEVICE(c.stream(), top_k, c.input(0), c.output(0)); }
  static void describe(const Attrs& a, std::string& out) { out += str("k ", a.k); }
};

/// A shard of sequences or of groups, as it applies to tokens (x, slots, weights) and to rows (rows, sources, counts).
struct GroupCut {
  Placement tokens, rows;
};

/// `groups` of a sequence's tokens fit a shard of the tokens if each rank has whole groups and ranks agree where they begin: they are
/// equal, or each rank has one.
bool fits_groups(const Layout& l, int dim, const OwnershipMap& map, int64_t tokens, int64_t groups) {
  if (!(map == OwnershipMap::even(dim))) return false;
  int64_t ranks = 1;
  for (int a = 0; a < l.num_axes(); ++a)
    if (l[a].is_shard(dim)) ranks *= l.mesh()->size(a);
  return groups % ranks == 0 && (tokens % groups == 0 || groups == ranks);
}

/// The shard that the first sharded operand implies; `rows`: a bit for each operand with the dimensions of rows. `rank`: of slots.
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

/// Slots and sources must be of the same routes, and weights, if there are any, of the compute dtype.
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
    if (cuts_table(p.in(2))) rule(kR, kR, p.in(2), kR, p.in(2));
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
    if (cuts_table(p.in(0))) rule(p.in(0), kR, p.in(0), kR, kP);
    if (p.in(0).is_shard(rank + 1)) rule(p.in(0), kR, kR, kR, Placement::shard(p.in(0).map().moved_to(rank - 1)));
    rule(kR, kR, kR, kR, kR);
    rule(kP, kR, kR, kR, kP);
    if (p.num_inputs() == 4) rule(kR, kR, kR, kP, kP);
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), from_experts, c.input(0), c.num_inputs() == 4 ? c.input(3) : View{}, c.input(1), c.output(0),
                    part_of(c.input_type(0)).first);
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
    if (cuts_table(p.in(0))) p.rule({p.in(0), kR, kR, p.in(0)}, {kP});
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
    SHEAF_ON_DEVICE(c.stream(), choice_dots, c.input(0), c.input(1), c.input(2), c.output(0), part_of(c.input_type(0)).first);
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

template <class Op>
Tensor apply_routed(const Tensor& x, const ExpertRoutes& routes, const Tensor& weights) {
  std::vector<Tensor> inputs{contiguous(x), routes.slots, routes.sources};
  if (weights) inputs.push_back(contiguous(weights));
  return std::move(apply(op_def<Op>(), nullptr, inputs)[0]);
}

}  // namespace

Tensor top_k(const Tensor& x, int64_t k) { return apply<TopK>({k}, contiguous(x)); }

int64_t rows_of_part(int64_t tokens, int64_t choices, int64_t experts, int64_t places, int64_t parts) {
  if (parts == experts || parts == 0) return places;
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

}  // namespace sheaf
