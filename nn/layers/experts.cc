#include "sheaf/nn/layers/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/autograd/ops/relabel.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/experts.h"

namespace sheaf::nn {
namespace {

Parameter matrices(const Shape& shape, const Init& init) {
  Parameter p(shape, init);
  p.set_cut(OwnershipMap::even(0));
  return p;
}
Parameter biases(bool has, const Shape& shape) {
  if (!has) return {};
  Parameter p = matrices(shape, Init::zeros());
  p.set_bias();
  return p;
}


MixtureConfig checked(const MixtureConfig& c) {
  check<ConfigError>(c.experts > 0 && c.choices > 0 && c.choices <= c.experts && c.hidden > 0, "[experts] ", c.choices,
                     " choices among ", c.experts, " experts of hidden width ", c.hidden);
  check<ConfigError>(c.capacity_factor >= 0 && c.capacity_groups > 0, "[experts] capacity factor ", c.capacity_factor, " for ", c.capacity_groups,
                     " groups of each sequence");
  check<ConfigError>(c.routing_groups > 0 && c.experts % c.routing_groups == 0 && c.routing_groups_per_token > 0 &&
                         c.routing_groups_per_token <= c.routing_groups &&
                         c.choices <= c.routing_groups_per_token * (c.experts / c.routing_groups),
                     "[experts] ", c.choices, " choices among ", c.routing_groups_per_token, " of ", c.routing_groups, " equal groups of ",
                     c.experts, " experts");
  check<ConfigError>(!c.shared_gate || c.shared_hidden > 0, "[experts] shared_gate without shared experts (shared_hidden 0)");
  check<ConfigError>(c.gate_limit >= 0 && !std::isnan(c.gate_limit) && c.gate_alpha > 0 && std::isfinite(c.gate_alpha), "[experts] gates held to ",
                     c.gate_limit, ", alpha ", c.gate_alpha);
  check<ConfigError>(c.balance_rate >= 0 && std::isfinite(c.balance_rate) && c.scale > 0 && std::isfinite(c.scale) && c.shared_hidden >= 0,
                     "[experts] balance rate ", c.balance_rate, ", weights times ", c.scale, ", shared hidden width ", c.shared_hidden);
  return c;
}

/// The layout of x[B, T, ..] with a rank's tokens as one interval, if they are several intervals of a sequence: experts process
/// tokens one by one, in any order.
Layout in_order_of_ranks(const Tensor& x) {
  Layout l = x.layout();
  const Placement even = Placement::shard(1);
  for (int a = 0; a < l.num_axes(); ++a) {
    if (!l[a].is_shard(1) || !l[a].map().is_scattered()) continue;
    const int n = l.mesh()->size(a);
    bool alike = true;
    for (int r = 0; r < n; ++r) alike = alike && l[a].map().owned_size(r, n, x.shape()) == even.map().owned_size(r, n, x.shape());
    if (alike) l[a] = even;
  }
  return l;
}

/// The unit whose multiples are the boundaries of the ranks' intervals of a sequence, on any rank; 0 if each rank has one interval.
int64_t unit_of_places(const Tensor& x) {
  const Layout& l = x.layout();
  int64_t unit = 0;
  for (int a = 0; a < l.num_axes(); ++a) {
    if (!l[a].is_shard(1) || !l[a].map().is_scattered()) continue;
    const int n = l.mesh()->size(a);
    for (int r = 0; r < n; ++r)
      for (const Interval& i : l[a].map().owned_intervals(r, n, x.shape())) unit = std::gcd(unit, std::gcd(i.begin, i.end));
  }
  return unit;
}

/// Replaces `from` by `to` on all axes.
Layout replaced(Layout l, const Placement& from, const Placement& to) {
  for (int a = 0; a < l.num_axes(); ++a)
    if (l[a] == from) l[a] = to;
  return l;
}

MlpConfig shared_mlp(const MixtureConfig& c) {
  MlpConfig m;
  m.width = c.width;
  m.hidden = c.shared_hidden;
  m.bias = false;
  m.init = c.init;
  m.projection_init = c.projection_init;
  return m;
}

/// How often each of `experts` was chosen, f32 or f64 [E]: Partial if tokens are sharded.
Tensor loads(const Tensor& choices_BTK, int64_t experts, DType dtype) {
  const Layout& l = choices_BTK.layout();
  const Tensor one = full_of({dtype, choices_BTK.shape(), l}, 1.0);
  const Tensor none = full_of({dtype, {choices_BTK.size(0), choices_BTK.size(1), experts}, l}, 0.0);
  return sum(scatter_add(none, 2, choices_BTK, one), {0, 1});
}

/// Returns the weights unchanged. The gradient of the bias is E times each expert's choices, minus all choices: whole numbers, whose
/// sums are exact in any order (in f32 up to 2^24, 65,536 choices of one of 256 experts; beyond, to 24 bits).
Tensor measuring(const Tensor& weights_BTK, const Tensor& bias_E, const Tensor& choices_BTK) {
  const auto vjp = [](Vjp& c) {
    c.set(0, c.grad());
    if (!c.needs(1)) return;  // frozen
    const Tensor load = loads(c.input(2), c.input(1).numel(), c.input(1).dtype());
    const Tensor excess = load * static_cast<double>(load.numel()) - sum(load, {0}, /*keepdim=*/true);
    c.set(1, redistribute(excess, c.input(1).layout().dual()));
  };
  return custom_vjp([](const Tensor& w, const Tensor&, const Tensor&) { return w; }, vjp, CustomVjpOptions{.saved_inputs = 0b110, .saved_outputs = 0},
                    weights_BTK, bias_E, choices_BTK);
}

/// x in a wider dtype, in which it is not kept for the backward.
Tensor wider(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  const RecomputeScope again(RecomputeOptions{.results = true});
  return cast(x, dtype);
}

}  // namespace

Experts::Experts(const MixtureConfig& c)
    : gate(matrices({c.experts, c.hidden, c.width}, c.init)),
      up(matrices({c.experts, c.hidden, c.width}, c.init)),
      down(matrices({c.experts, c.width, c.hidden}, c.projection_init)),
      gate_bias(biases(c.linear_bias, {c.experts, c.hidden})),
      up_bias(biases(c.linear_bias, {c.experts, c.hidden})),
      down_bias(biases(c.linear_bias, {c.experts, c.width})),
      gate_limit(c.gate_limit),
      gate_alpha(c.gate_alpha) {}

Layout Experts::inside(const Tensor& of_rows) const {
  const Layout& l = of_rows.layout();
  return gate.cut_axis() >= 0 && l.mesh() ? l.with(gate.cut_axis(), Placement::shard(OwnershipMap::even(0))) : l;
}

bool Experts::gathers(const Tensor& x, int64_t tokens, int64_t choices, int64_t places, int64_t parts) const {
  const int axis = gate.cut_axis();
  const Layout& l = x.layout();
  if (axis < 0 || !l.mesh() || !l[axis].is_shard() || !can_start_redistribute(l, l.with(axis, Placement::replicate()))) return false;
  constexpr int64_t kAlone = 2;  // half of the rows, and more, are in flight while products are computed; tokens are sent without overlap
  return parts * rows_of_part(tokens, choices, gate.shape()[0], places, parts) > kAlone * tokens * l.mesh()->size(axis);
}

Experts::Rows Experts::rows_of(const Tensor& x, int64_t tokens, int64_t choices, int64_t places) const {
  const int64_t experts = gate.shape()[0], used = std::min(tokens * choices, experts * places);
  const int axis = gate.cut_axis();
  const int64_t ranks = axis >= 0 && x.layout().mesh() ? std::min<int64_t>(x.layout().mesh()->size(axis), experts) : 1;
  const auto rows = [&](int64_t parts) { return parts * rows_of_part(tokens, choices, experts, places, parts); };
  const bool skips = !kernels::is_for_gpu(x.device()) || used * kernels::own_cost(fp8 != Fp8::none) <= rows(experts);
  const int64_t parts = skips && rows(ranks) < rows(experts) ? ranks : experts;
  return {parts, rows(parts) ? static_cast<double>(used) / static_cast<double>(rows(parts)) : 1.0};
}

Tensor Experts::forward(const Tensor& rows_QBNRC, const Tensor& counts_EBN, double fill) {
  const Tensor counts = redistribute(counts_EBN, inside(counts_EBN));  // before the rows, so that it does not wait for them
  const Layout to = inside(rows_QBNRC);
  const Tensor x =
      fp8 == Fp8::none ? redistribute_in_pieces(rows_QBNRC, to, expert_products(rows_QBNRC, counts_EBN, fill)) : redistribute(rows_QBNRC, to);
  return of_own(x, counts, rows_QBNRC.layout(), fill);
}

Tensor Experts::forward(const PendingRedistribute& rows_QBNRC, const Tensor& counts_EBN, double fill) {
  const Tensor x = wait(rows_QBNRC);
  return of_own(x, redistribute(counts_EBN, inside(counts_EBN)), rows_QBNRC.from, fill);
}

Tensor Experts::of_own(const Tensor& x, const Tensor& counts, const Layout& outside, double fill) {
  const auto product = [&](const Tensor& rows, const Parameter& weight, const Parameter& bias, const OutputLayout& output_layout = {}) {
    return expert_linear(rows, weight, counts, {.bias = bias, .fp8 = fp8 != Fp8::none, .fill = fill, .output_layout = output_layout});
  };
  const Tensor gates = product(x, gate, gate_bias), ups = product(x, up, up_bias);
  const Tensor gated = gate_limit > 0 ? clamped_swiglu(gates, ups, {.alpha = gate_alpha, .limit = gate_limit}) : swiglu(gates, ups);
  return product(gated, down, down_bias, [&](const Type&) { return outside; });
}

MixtureOfExperts::MixtureOfExperts(const MixtureConfig& c)
    : config(checked(c)), router(c.width, c.experts, {.bias = c.linear_bias, .init = c.init}), experts(c), dropout(c.dropout) {
  router.weight.set_table();
  if (c.shared_hidden > 0) shared.emplace(shared_mlp(c));
  if (c.shared_gate) {
    shared_gate.emplace(c.width, 1, LinearOptions{.bias = false, .init = c.init});
    shared_gate->weight.set_table();
  }
  if (!c.choice_bias) return;
  choice_bias = Parameter({c.experts}, Init::zeros());
  if (c.balance_rate > 0) choice_bias.steer(c.balance_rate);
  else choice_bias.keep_exact(), choice_bias.freeze();
}

// If nothing is dropped, each rank that shares a sequence has one group.
int64_t MixtureOfExperts::groups_of(const Tensor& x_BTC, const Layout& l, bool drops) const {
  int64_t ranks = 1;
  std::string axes;
  for (int a = 0; a < l.num_axes(); ++a) {
    if (!l[a].is_shard(1)) continue;
    ranks *= l.mesh()->size(a);
    axes += str(axes.empty() ? "'" : " and '", l.mesh()->name(a), "'");
  }
  if (!drops || config.capacity_factor == 0) return ranks;
  const int64_t tokens = x_BTC.size(1), unit = unit_of_places(x_BTC);
  const int64_t groups = config.capacity_groups;
  const bool whole = groups % ranks == 0 && tokens % groups == 0 && (tokens == 0 || unit % (tokens / groups) == 0);
  if (ranks > 1 && !whole)
    fail<ConfigError>("[experts] '", path_label(path()), "': places for the tokens of a sequence are counted in ", groups,
                      groups == 1 ? " group" : " groups", ", and the ", ranks, " ranks of ", axes, " share its ",
                      tokens, unit ? str(" in pieces of multiples of ", unit) : "", ": with a capacity, groups must be a multiple of these "
                      "ranks and divide the tokens", unit ? " of each piece" : "");
  return groups;
}

Tensor MixtureOfExperts::router_logits(const Tensor& x_BTC) {
  const DType exact = x_BTC.dtype() == kF64 ? kF64 : kF32;
  const auto scope = router.enter();
  return linear(wider(x_BTC, exact), cast(router.weight, exact), router.bias ? cast(router.bias, exact) : Tensor());
}

Tensor MixtureOfExperts::choose(const Tensor& affinities_BTE) const {
  Tensor preferred = stop_gradient(affinities_BTE);
  if (choice_bias) preferred = preferred + stop_gradient(choice_bias);
  if (config.routing_groups_per_token < config.routing_groups) {
    const int64_t size = config.experts / config.routing_groups;
    const Shape whole = preferred.shape();
    const Tensor by_group = reshape(preferred, {whole[0], whole[1], config.routing_groups, size});
    const Tensor best_two = gather(by_group, 3, top_k(by_group, std::min<int64_t>(2, size)));
    const Tensor allowed = top_k(sum(best_two, {3}), config.routing_groups_per_token);
    const Tensor one = full_of({kI32, allowed.shape(), allowed.layout()}, 1);
    const Tensor is_allowed = scatter_add(full_of({kI32, {whole[0], whole[1], config.routing_groups}, allowed.layout()}, 0), 2, allowed, one);
    preferred = reshape(where(unsqueeze(is_allowed, {3}), by_group, -std::numeric_limits<double>::infinity()), whole);
  }
  return top_k(preferred, config.choices);
}

Tensor MixtureOfExperts::weigh(const Tensor& affinities_BTE, const Tensor& choices_BTK) const {
  Tensor weights = gather(affinities_BTE, 2, choices_BTK);
  if (config.normalize) {
    const Tensor total = sum(weights, {2}, /*keepdim=*/true);
    // Sigmoids of very small logits may all be 0; DeepSeek-V3's router has this addend, too.
    weights = weights / (config.affinity == Affinity::sigmoid ? total + 1e-20 : total);
  }
  if (config.scale != 1.0) weights = weights * config.scale;
  return choice_bias && config.balance_rate > 0 ? measuring(weights, choice_bias, choices_BTK) : weights;
}

Tensor MixtureOfExperts::imbalance_of(const Tensor& affinities_BTE, const Tensor& choices_BTK) const {
  const auto choices = static_cast<double>(std::max<int64_t>(1, choices_BTK.numel()));
  const Tensor probabilities_BTE =
      config.affinity == Affinity::softmax ? affinities_BTE : affinities_BTE / sum(affinities_BTE, {2}, /*keepdim=*/true);
  const Tensor chosen = loads(choices_BTK, config.experts, probabilities_BTE.dtype());
  const Tensor share = redistribute(chosen, replaced(chosen.layout(), Placement::partial(), Placement::replicate()));
  const double scale = static_cast<double>(config.experts * config.choices) / (choices * choices);
  return sum(mul(sum(probabilities_BTE, {0, 1}), share)) * scale;
}

Tensor MixtureOfExperts::z_of(const Tensor& logits_BTE) {
  const Tensor lse_BT = logsumexp(logits_BTE, {2});
  return sum(square(lse_BT)) * (1.0 / static_cast<double>(std::max<int64_t>(1, lse_BT.numel())));
}

Tensor MixtureOfExperts::shared_of(const Tensor& x_BTC) {
  const Tensor y_BTC = (*shared)(x_BTC);
  return shared_gate ? y_BTC * sigmoid((*shared_gate)(x_BTC)) : y_BTC;
}

Tensor MixtureOfExperts::forward(const Tensor& in_BTC, bool drops) {
  const Layout together = in_order_of_ranks(in_BTC);
  const Tensor x_BTC = together == in_BTC.layout() ? in_BTC : relabel(in_BTC, {in_BTC.dtype(), in_BTC.shape(), together}, /*enters=*/true);
  Plan plan = plan_of(x_BTC, groups_of(in_BTC, in_BTC.layout(), drops), drops);
  PendingRedistribute all;
  if (experts.gathers(x_BTC, plan.tokens, config.choices, plan.places, plan.parts)) {
    const Layout whole = x_BTC.layout().with(experts.gate.cut_axis(), Placement::replicate());
    all = start_redistribute(x_BTC, whole);
    plan = plan_of(x_BTC, groups_of(in_BTC, whole, drops), drops);
  }
  const Tensor logits = router_logits(x_BTC), affinity = config.affinity == Affinity::sigmoid ? sigmoid(logits) : softmax(logits);
  const Tensor choices = choose(affinity), weights = weigh(affinity, choices);
  imbalance = training() && config.balances ? imbalance_of(affinity, choices) : Tensor();  // drops what a forward without a loss has left
  router_z = training() && config.measures_logits ? z_of(logits) : Tensor();
  const Tensor out = all ? of_gathered(x_BTC, all, choices, weights, plan) : of_exchanged(x_BTC, choices, weights, plan);
  return dropout(together == in_BTC.layout() ? out : relabel(out, in_BTC.type(), /*enters=*/false));
}

MixtureOfExperts::Plan MixtureOfExperts::plan_of(const Tensor& x_BTC, int64_t groups, bool drops) const {
  const int64_t tokens = (x_BTC.size(1) + groups - 1) / groups;
  int64_t places = tokens;
  if (drops && config.capacity_factor > 0) {
    const double share = static_cast<double>(config.choices * tokens) / static_cast<double>(config.experts);
    places = std::min(tokens, static_cast<int64_t>(std::ceil(config.capacity_factor * share)));
  }
  const auto [parts, fill] = experts.rows_of(x_BTC, tokens, config.choices, places);
  return {groups, tokens, places, parts, fill};
}

Tensor MixtureOfExperts::of_exchanged(const Tensor& x_BTC, const Tensor& choices_BTK, const Tensor& weights_BTK, const Plan& plan) {
  const ExpertRoutes routes = expert_routes(choices_BTK, config.experts, plan.places, plan.groups, plan.parts);
  const Tensor sent = to_experts(x_BTC, routes);
  Tensor rows, beside;
  if (const Layout inside = experts.inside(sent); shared && can_start_redistribute(sent.layout(), inside)) {
    const PendingRedistribute pending = start_redistribute(sent, inside);
    beside = shared_of(x_BTC);
    rows = experts(pending, routes.counts, plan.fill);
  } else {
    rows = experts(sent, routes.counts, plan.fill);
    if (shared) beside = shared_of(x_BTC);
  }
  const Tensor chosen = from_experts(rows, routes, weights_BTK);
  return shared ? chosen + beside : chosen;
}

// By placements alone: what is Replicate is sent to parts of the experts without moving, and comes back Partial.
Tensor MixtureOfExperts::of_gathered(const Tensor& x_BTC, const PendingRedistribute& all, const Tensor& choices_BTK, const Tensor& weights_BTK,
                                     const Plan& plan) {
  const Layout& whole = all.value.layout();
  const Tensor beside = shared ? shared_of(x_BTC) : Tensor();
  ExpertRoutes routes = expert_routes(redistribute(choices_BTK, whole), config.experts, plan.places, plan.groups, plan.parts);
  routes.sources = redistribute(routes.sources, experts.inside(routes.sources));
  routes.counts = redistribute(routes.counts, experts.inside(routes.counts));
  const Tensor rows = experts(to_experts(wait(all), routes), routes.counts, plan.fill);
  // After these, so that in the backward this gradient is not queued after that of the tokens, which is in flight while the rest is
  // computed.
  const Tensor weights = redistribute(weights_BTK, whole);
  const Tensor chosen = redistribute(from_experts(rows, routes, weights), x_BTC.layout());
  return shared ? chosen + beside : chosen;
}

}  // namespace sheaf::nn
